"""Text sources: the embedded articles, local files, and a stand-in for the hub."""

import bz2
import errno
import importlib.machinery
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from jinja2.exceptions import TemplateError

from recalkv.errors import DataError, StoreError
from recalkv.text import documents as text
from recalkv.text.chat import rendered
from recalkv.text.documents import load_documents
from recalkv.text.wikitext import prose
from tests import raises

WIKITEXT = """{{Infobox|name={{nested|x}}}}
[[File:Cat.jpg|thumb|A [[cat]] on a ''mat''.]]
The '''cat''' ({{IPAc-en|k|æ|t}}, ''[[Felis|Felis catus]]'') is an [[animal]].<ref>A {{cite book}}.</ref> It
weighs {{convert|4|to|5|kg|lb}}&nbsp;and <!-- hidden --> eats H<sub>2</sub>O.
{| class="wikitable"
| cell
|}
== Empty ==
{{main|Nothing}}
== Life ==
=== Food ===
* [[Mouse|mice]]
* [http://example.org fish]{{clear}}
It obeys <math>\\frac{{a}}{b}</math>.
==References==
{{reflist}}
* Smith, 1999.
=== Web ===
Shown nowhere.
== After ==
Last line.
[[Category:Cats]]
[[de:Katze]]
"""


def write(folder: Path, name: str, content: str) -> str:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return str(path)


def fails(message: str, name: str, **arguments: Any) -> None:
    raises(DataError, message, load_documents, name, **{"split": "train"} | arguments)


# Wikitext ------------------------------------------------------------------------------------------------


def test_wikitext_becomes_prose() -> None:
    assert prose(WIKITEXT).split("\n") == [
        "The cat (Felis catus) is an animal. It", "weighs 4 to 5 kg and eats H2O.", "", "Life", "Food", "mice", "fish",
        "It obeys \\frac{ {a} } {b}.", "", "After", "Last line.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wikitext", "expected"),
    [
        ("a {{convert|5|km|1}} walk", "a 5 km walk"),
        ("the {{lang|fr|''ville''}} of X ({{lang-fr|y}}; {{z}}) and Y", "the ville of X and Y"),
        ("one<br/>two", "one\ntwo"),
        ("[[File:Broken caption.jpg|thumb|open\nkept }} text", "kept text"),
        ("[[:Category:Cats]] and [[Talk:Cats|talk]]", "Category:Cats and talk"),
        ("N (; , ''n'', {{x}}; ) and M ( ; ), O", "N (n) and M, O"),
        ("see http://example.org/x and <gallery>\nA.jpg\n</gallery> more", "see and more"),
        ("{{lang}} only", "only"),
    ],
)
def test_wikitext_details(wikitext: str, expected: str) -> None:
    assert prose(wikitext) == expected


# The embedded set ----------------------------------------------------------------------------------------


def gensim_at(folder: Path) -> Callable[[str], importlib.machinery.ModuleSpec]:
    return lambda name: importlib.machinery.ModuleSpec(name, None, origin=str(folder / "__init__.py"))


@pytest.fixture
def small_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "<page><title>T</title><ns>0</ns><revision><text>''Article'' {}.</text></revision></page>"
    pages = list(map(page.format, range(13)))
    pages.insert(2, "<page><ns>0</ns><redirect title='x'/><revision><text>#REDIRECT [[x]]</text></revision></page>")
    pages.insert(5, "<page><ns>4</ns><revision><text>Project page.</text></revision></page>")
    path = tmp_path / text._ARTICLES
    path.parent.mkdir(parents=True)
    path.write_bytes(bz2.compress(f"<mediawiki xmlns='urn:any'>{''.join(pages)}</mediawiki>".encode()))
    monkeypatch.setattr(importlib.util, "find_spec", gensim_at(tmp_path))


@pytest.mark.usefixtures("small_dump")
def test_embedded_splits_are_disjoint_and_skip_redirects_and_other_namespaces() -> None:
    assert load_documents("embedded", split="test") == ["Article 5.", "Article 11."]
    assert load_documents("embedded", split="train") == [f"Article {i}." for i in range(13) if i not in (5, 11)]
    assert load_documents("embedded", split="train", max_documents=2) == ["Article 0.", "Article 1."]


def test_embedded_split_names() -> None:
    fails("no split 'validation'; choose train or test", "embedded", split="validation")


@pytest.mark.parametrize("installed", [False, True])
def test_embedded_without_the_file(installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", gensim_at(tmp_path) if installed else lambda name: None)
    fails(re.escape("`pip install --no-deps gensim==4.4.0`"), "embedded")


def test_embedded_articles() -> None:
    spec = importlib.util.find_spec("gensim")
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / text._ARTICLES).is_file():
        pytest.skip("gensim 4.4.0, whose files hold the embedded text, is not installed")
    documents = load_documents("embedded", split="test")
    assert "gensim" not in sys.modules and len(documents) == 17 and sum(map(len, documents)) > 250_000
    assert documents[0].startswith("In Greek mythology, Achilles")
    for document in documents:
        assert not re.search(r"\[\[|\]\]|\{\{|\}\}|\{\||''|</?ref|\n\n\n|&nbsp;|\(\s*\)|\0", document)
    first = load_documents("embedded", split="train", max_documents=1)[0]
    assert first.startswith("Anarchism is a political philosophy that advocates self-governed societies")


def test_embedded_news_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {text._ARTICLES: "", text._NEWS: "First.\nSecond.\nThird.\n", "b.py": "b", "a/c.py": "c", "test/d.py": "d"}
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(importlib.util, "find_spec", gensim_at(tmp_path))
    assert load_documents("embedded-news", split="train") == ["First.", "Third."]
    assert load_documents("embedded-news", split="test") == ["Second."]
    assert load_documents("embedded-code", split="train") == ["c"]
    assert load_documents("embedded-code", split="test") == ["b"]


# Local files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "a.raw", "notes.md"])
def test_text_file_is_one_document(name: str, tmp_path: Path) -> None:
    assert load_documents(write(tmp_path, name, "One.\n\nTwo.\n"), split="ignored") == ["One.\n\nTwo.\n"]


def test_jsonl_and_json(tmp_path: Path) -> None:
    lines = write(tmp_path, "a.jsonl", '{"body": "one\u2028x", "n": 1}\n\n{"body": "two"}\r\n{"body": ""}\n')
    assert load_documents(lines, split="train", field="body") == ["one\u2028x", "two", ""]
    assert load_documents(lines, split="train", field="body", max_documents=1) == ["one\u2028x"]
    lines = '"one"\n%s\n{"text": "two"}'
    for name, content in (
        ("a.json", '["one", %s, {"text": "two"}]'), ("b.jsonl", lines), ("c.ndjson", lines), ("d.jsonlines", lines),
    ):  # fmt: skip
        chat = [{"role": "user", "content": "hello"}]
        path = write(tmp_path, name, content % json.dumps(chat))
        assert load_documents(path, split="train") == ["one", chat, "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"body": "y", "id": 1}',
         r"a\.jsonl, line 2: column 'text' does not exist; .*: body, id; set `field`"),
        ("a.jsonl", '{"text": "x"}\n\n{"text": ', r"a\.jsonl, line 3: not JSON with the column 'text': "),
        ("a.jsonl", '{"text": "x"}\n["y"]', r"a\.jsonl, line 2: column 'text' does not exist; .* present: none"),
        ("a.jsonl", '{"text": 3}',
         r"a\.jsonl, line 1: column 'text' holds int instead of text or messages; .* present: text;"),
        ("a.json", '["x", {"body": "y"}]', r"a\.json, item 2: column 'text' does not exist; .* present: body;"),
        ("a.json", '{"text": "x"}', r"a\.json: a JSON dict, not a list of objects or strings"),
        ("a.json", "[", r"a\.json: not JSON with the column 'text': "),
        ("a.txt", "", r"a\.txt' holds no text"),
        ("a.txt", " \n\n", r"a\.txt' holds no text"),
        ("a.jsonl", "", r"a\.jsonl' holds no text"),
        ("a.json", "", r"a\.json' holds no text"),
        ("a.json", "[]", r"a\.json' holds no text"),
        ("a.txt", "t\0e\0x\0t\0", r"a\.txt: not UTF-8 text \(it has NUL characters\)"),
        ("a.jsonl", "1" * 5000, r"a\.jsonl, line 1: not JSON"),
        ("a.csv", "text\nx", r"a\.csv: \.csv files are not read; write it as \.jsonl"),
    ],
)  # fmt: skip
def test_bad_local_files(name: str, content: str, message: str, tmp_path: Path) -> None:
    fails(message, write(tmp_path, name, content))


def test_local_file_that_cannot_be_read(tmp_path: Path) -> None:
    fails(r"absent\.txt: no such file; name an existing .txt", str(tmp_path / "absent.txt"))
    fails("is a folder; name a .txt, .raw, .json or .jsonl file in it", str(tmp_path))
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    fails(r"latin\.txt, line 1: not UTF-8 text", str(tmp_path / "latin.txt"))


def test_a_long_path_is_no_text(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 120) / ("b" * 120) / ("c" * 60)
    folder.mkdir(parents=True)
    assert load_documents(write(folder, "a.txt", "One."), split="train") == ["One."]
    for long in ("x" * 300, "one\ntwo"):
        fails(rf"a text of {len(long)} characters is given as a name; write it to a file", long)


@pytest.mark.parametrize("count", [0, -1])
def test_max_documents_is_positive(count: int) -> None:
    fails(f"max_documents={count} must be at least 1", "embedded", max_documents=count)


# The hub -------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace ``datasets.load_dataset`` by a mock that returns the dataset set with ``rows``."""
    datasets = pytest.importorskip("datasets")

    stand_in = Mock()
    stand_in.rows = lambda **columns: setattr(stand_in, "return_value", datasets.Dataset.from_dict(columns))
    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    return stand_in


def test_a_full_disk_is_no_missing_data_set(hub: Any) -> None:
    hub.side_effect = OSError(errno.ENOSPC, "x")
    with pytest.raises(StoreError, match=r"no space left on the disk of .*; free some space or set HF_HOME"):
        load_documents("org/set", split="train")


def test_hub_rows_are_verbatim(hub: Any) -> None:
    hub.rows(text=["", "one\n", "two"], other=[1, 2, 3])
    assert load_documents("org/set:en@abc", split="train") == ["", "one\n", "two"]
    assert hub.call_args_list == [(("org/set", "en"), {"split": "train", "revision": "abc"})]
    assert load_documents("org/set@abc", split="train", max_documents=2) == ["", "one\n"]
    assert hub.call_args_list[1] == (("org/set", None), {"split": "train", "revision": "abc"})
    assert load_documents("org/set", split="train", max_documents=9) == ["", "one\n", "two"]


@pytest.mark.parametrize(
    ("name", "asked", "place", "options"),
    [
        ("wikitext2", "test", ("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test", "revision": None}),
        ("ptb", "test", ("ptb-text-only/ptb_text_only", None), {"split": "test", "revision": "refs/convert/parquet"}),
        ("c4", "train", ("allenai/c4", None),
         {"split": "train", "revision": None, "data_files": {"train": "en/c4-train.00000-of-01024.json.gz"}}),
        ("c4", "test", ("allenai/c4", None), {"split": "validation", "revision": None,
         "data_files": {"validation": "en/c4-validation.00000-of-00008.json.gz"}}),
    ],
)  # fmt: skip
def test_short_names(name: str, asked: str, place: tuple[str, ...], options: dict[str, Any], hub: Any) -> None:
    hub.rows(**{"sentence" if name == "ptb" else "text": ["words"]})
    assert load_documents(name, split=asked) == ["words"] and hub.call_args_list == [(place, options)]


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(("split", "theirs"), [("train", "train_sft"), ("test", "test_sft"), ("test_gen", "test_gen")])
def test_conversations_of_the_hub(split: str, theirs: str, hub: Any) -> None:
    hub.rows(prompt=["Hi"] * 3, messages=[CHAT] * 3)
    assert load_documents("ultrachat", split=split, max_documents=2) == [CHAT] * 2
    assert hub.call_args_list == [(("HuggingFaceH4/ultrachat_200k", None), {"split": theirs, "revision": None})]
    # A data set without texts gives its conversations.
    assert load_documents("org/chats", split="train") == [CHAT] * 3
    fails("column 'prompts' does not exist", "org/chats", field="prompts")


def test_no_more_is_read_of_a_huge_set_than_calibration_needs(hub: Any) -> None:
    hub.rows(messages=[CHAT] * 5001)
    assert len(load_documents("ultrachat", split="train")) == 5000
    assert len(load_documents("ultrachat", split="train", max_documents=5001)) == 5001
    hub.rows(text=["word"] * 10_001)
    assert len(load_documents("some/set", split="train")) == 10_000
    assert len(load_documents("c4", split="train")) == 5000


@pytest.mark.parametrize("messages", [[], [{"content": "Hi"}], [{"role": "user", "content": 1}], ["Hi"]])
def test_lists_that_are_no_conversation(messages: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    fails("column 'messages' holds (a list with .*|list) instead of text or messages", str(path))


class Chatty:
    chat_template = "a template"

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        assert not tokenize
        return "".join(f"<{each['role']}>{each['content']}" for each in messages) + "<end>"


def test_conversations_are_read_in_the_chat_template() -> None:
    assert rendered(Chatty(), CHAT) == "<user>Hi<assistant>Hello<end>" and rendered(Chatty(), "Hi") == "Hi"


def test_a_tokenizer_without_a_template_reads_no_conversation() -> None:
    class Base:
        chat_template = None

    assert rendered(Base(), "Hi") == "Hi"
    raises(DataError, "has no chat template, as base models have none; use the chat version", rendered, Base(), CHAT)


def test_a_template_that_refuses_is_named() -> None:
    class Strict(Chatty):
        def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
            raise TemplateError("roles must alternate")

    raises(DataError, "of the roles user, assistant: roles must alternate", rendered, Strict(), CHAT)


def test_short_name_is_not_shadowed_by_a_folder(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ptb").mkdir()
    monkeypatch.chdir(tmp_path)
    hub.rows(sentence=["words"])
    assert load_documents("ptb@mine", split="train") == ["words"] and hub.call_args_list[0][1]["revision"] == "mine"


def test_unknown_split_of_c4(hub: Any) -> None:
    fails("'c4' has no split 'dev'; choose one of train, validation", "c4", split="dev")
    assert not hub.call_args_list


@pytest.mark.parametrize("error", [ConnectionError("no route"), FileNotFoundError("no route"), ValueError("no route")])
def test_unreachable_hub(error: Exception, hub: Any) -> None:
    hub.side_effect = error
    message = f"{type(error).__name__}: no route; .* use embedded, wikitext2, ptb, c4, ultrachat, or a local file"
    fails(message, "org/set")


def test_bad_hub_columns(hub: Any) -> None:
    hub.rows(body=["x"], id=[1])
    fails("org/set: column 'text' does not exist; .* present: body, id", "org/set")
    fails("org/set: column 'id' holds int instead of text or messages; .* present: body, id", "org/set", field="id")
    hub.rows(text=["", "  "])
    fails("'org/set' holds no text", "org/set")


def test_offline_hub_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)  # which the environment variable of that name sets
    fails("'recalkv-tests/absent' .* use embedded, wikitext2", "recalkv-tests/absent")
