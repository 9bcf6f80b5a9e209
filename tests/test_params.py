"""Parameter file: complete, validated, and with clear messages about what is wrong in it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from recalkv.errors import ParameterError
from recalkv.params import CompressionParams, Params, load_params, parse_params, parse_section
from tests import raises

SECTIONS = {name: field.annotation for name, field in Params.model_fields.items()}
EVERY_KEY = [(section, key) for section, model in SECTIONS.items() for key in model.model_fields]  # type: ignore[union-attr]


@pytest.fixture
def raw() -> dict[str, dict[str, Any]]:
    """Return the defaults of every section, as a file would hold them."""
    return {name: model().model_dump() for name, model in SECTIONS.items()}  # type: ignore[misc]


def write(folder: Path, content: Any) -> Path:
    path = folder / "params.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def told(raw: Any) -> str:
    """Return the message with which a file of this content is refused."""
    with pytest.raises(ParameterError) as caught:
        parse_params(raw, "params.yaml")
    return str(caught.value)


def test_complete_file_is_read(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["compression"] |= {"ratio": 0.7, "method": "palu", "damping": 1e-4}
    raw["calibration"]["samples"] = 5
    params = load_params(write(tmp_path, raw))
    assert params.model_dump() == raw and params.compression.ratio == 0.7


def test_every_parameter_has_a_description() -> None:
    assert all(SECTIONS[section].model_fields[key].description for section, key in EVERY_KEY)  # type: ignore[union-attr]


@pytest.mark.parametrize(("section", "key"), EVERY_KEY)
def test_missing_key_is_named_with_its_default(raw: dict[str, Any], section: str, key: str) -> None:
    default = raw[section].pop(key)
    expected = f"params.yaml: missing parameter(s); add {section}.{key}: {default!r} (the defaults)."
    assert told(raw) == expected
    raw[section][f"{key}x"] = default
    assert told(raw) == f"{expected} unknown there: `{section}.{key}x`."


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("instead", ["absent", None, 3, ["ratio"]])
def test_missing_section_is_named_with_its_keys(raw: dict[str, Any], section: str, instead: Any) -> None:
    if instead == "absent":
        del raw[section]
    else:
        raw[section] = instead
    keys = ", ".join(SECTIONS[section].model_fields)  # type: ignore[union-attr]
    assert told(raw) == f"params.yaml: section `{section}` is missing; it needs {keys}."


@pytest.mark.parametrize("section", SECTIONS)
def test_unknown_key_is_named_with_the_known_ones(raw: dict[str, Any], section: str) -> None:
    raw[section]["ration"] = 0.5
    keys = ", ".join(SECTIONS[section].model_fields)  # type: ignore[union-attr]
    assert told(raw) == f"params.yaml: unknown parameter `{section}.ration`; known here: {keys}."


def test_unknown_section_is_named_with_the_known_ones(raw: dict[str, Any]) -> None:
    raw["compresion"] = {}
    assert "unknown parameter `compresion`; known here: model, calibration, compression" in told(raw)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("compression.ratio", 1.0, "less than 1"), ("compression.ratio", float("nan"), "finite number"),
        ("compression.ratio", "half", "valid number"), ("compression.group_size", 1.5, "valid integer"),
        ("compression.method", "magic", "'recalkv', 'palu' or 'svd'"),
        ("compression.bits", 5, "16, 8, 4, 3, 2 or 'mixed'"), ("compression.joint", 3, "'auto', True or False"),
        ("compression.damping", -1e-9, "greater than or equal to 0"), ("calibration.samples", [4], "valid integer"),
        ("evaluation.further_texts", "one", "valid list"), ("latency.contexts", [], "at least 1 item"),
        ("needle.depths", [0.5] * 11, "at most 10 items"), ("model.id", None, "valid string"),
        ("runtime.device", 0, "valid string"), ("calibration.samples", True, "must not be true or false"),
    ],
)  # fmt: skip
def test_illegal_value_names_key_value_and_rule(raw: dict[str, Any], key: str, value: Any, rule: str) -> None:
    section, name = key.split(".")
    raw[section][name] = value
    message = told(raw)
    assert message.startswith(f"params.yaml: {key}={value!r} is not allowed: ") and rule in message


def test_all_illegal_values_are_told_at_once(raw: dict[str, Any]) -> None:
    raw["compression"] |= {"ratio": 1.0, "group_size": 0}
    raw["calibration"]["samples"] = -1
    names = [line.split("=")[0].split(": ")[1] for line in told(raw).splitlines()]
    assert names == ["calibration.samples", "compression.ratio", "compression.group_size"]


def test_exponents_without_a_point_are_numbers(raw: dict[str, Any], tmp_path: Path) -> None:
    # YAML 1.1 reads 1e-6 as a string.
    text = yaml.safe_dump(raw).replace("damping: null", "damping: 1e-6")
    assert "1e-6" in text and load_params(write(tmp_path, text)).compression.damping == 1e-6


def test_keys_given_twice_are_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    text = yaml.safe_dump(raw).replace("compression:\n", "compression:\n  ratio: 0.5\n")
    with pytest.raises(ParameterError, match=r"(?s)params\.yaml is not valid YAML: .*'ratio' is given twice"):
        load_params(write(tmp_path, text))


def test_missing_file_says_where_to_run(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"none\.yaml does not exist; run from the project's folder"):
        load_params(tmp_path / "none.yaml")


def test_broken_yaml_is_located(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"(?s)params\.yaml is not valid YAML: .*line 2"):
        load_params(write(tmp_path, "model:\n  id: {]\n"))


@pytest.mark.parametrize("content", ["", "- model\n", "text\n"])
def test_file_that_is_no_mapping_lists_the_sections(tmp_path: Path, content: str) -> None:
    with pytest.raises(ParameterError, match=r"params\.yaml must hold the sections model, calibration, compression"):
        load_params(write(tmp_path, content))


def test_illegal_item_of_a_list_is_named(raw: dict[str, Any]) -> None:
    raw["needle"]["depths"] = [0.5, 1.5]
    with pytest.raises(ParameterError, match=r"needle\.depths\.1=1\.5 is not allowed: .*less than or equal to 1"):
        parse_params(raw, "params.yaml")


# --- changes from the command line ---


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("compression.ratio=0.7", 0.7), ("compression.damping=1e-4", 1e-4), ("compression.bits=mixed", "mixed"),
        ("compression.bits=4", 4), ("compression.joint=false", False), ("model.revision=null", None),
        ("model.id=owner/name", "owner/name"), ("calibration.text=[texts/a=b.txt, ptb]", ["texts/a=b.txt", "ptb"]),
        ("evaluation.further_texts=[c4, ptb]", ["c4", "ptb"]), ("evaluation.further_texts=[]", []),
    ],
)  # fmt: skip
def test_changes_replace_the_files_values(
    raw: dict[str, dict[str, Any]], tmp_path: Path, change: str, value: Any
) -> None:
    section, key = change.split("=")[0].split(".")
    raw["model"]["revision"], raw["evaluation"]["further_texts"] = "main", ["c4"]
    path = write(tmp_path, raw)
    changed = load_params(path, [change])
    assert getattr(getattr(changed, section), key) == value
    raw[section][key] = value
    assert changed.model_dump() == raw
    assert path.read_text() != yaml.safe_dump(raw), "the file is not written to"


def test_one_text_is_a_list_of_one(raw: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    path = write(tmp_path, raw)
    assert load_params(path, ["calibration.text=wikitext2"]).calibration.text == ["wikitext2"]
    raises(ParameterError, r"calibration\.text=\[\] is not allowed", load_params, path, ["calibration.text=[]"])
    words = load_params(path, ["calibration.text=[ptb, texts/b.txt]"]).calibration.in_words
    assert words == "32 x 1024 tokens of `ptb`, `texts/b.txt`"


@pytest.mark.parametrize("change", ["", "compression.ratio", "ratio=0.7", "=0.7", "compression=0.7"])
def test_a_change_of_another_form_is_told_the_form(raw: dict[str, Any], tmp_path: Path, change: str) -> None:
    with pytest.raises(ParameterError) as caught:
        load_params(write(tmp_path, raw), [change])
    assert str(caught.value) == f"--set {change!r} must be SECTION.KEY=VALUE, such as compression.ratio=0.7."
    path = write(tmp_path, raw)
    raises(ParameterError, "section 'comp' is unknown; choose one of model, ", load_params, path, ["comp.ratio=0.7"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("compression.ration=0.7", r"unknown parameter `compression\.ration`; known here: method, ratio"),
        ("compression.ratio=1.5", r"compression\.ratio=1\.5 is not allowed: .*less than 1"),
        ("compression.ratio=", r"compression\.ratio=None is not allowed: .*valid number"),
        ("calibration.text=[one", r"--set 'calibration\.text=\[one': the value is not valid YAML.*quote it"),
    ],
)
def test_a_change_is_checked_as_the_file_is(raw: dict[str, Any], tmp_path: Path, change: str, message: str) -> None:
    raises(ParameterError, f"(?s){message}", load_params, write(tmp_path, raw), [change])


# --- one section ---


def test_a_section_by_itself_has_the_defaults_and_the_same_errors() -> None:
    assert parse_section(CompressionParams, {"ratio": 0.7}, "compress") == CompressionParams(ratio=0.7)  # type: ignore[call-arg]
    with pytest.raises(ParameterError, match=r"compress: ratio=1 is not allowed: .*less than 1"):
        parse_section(CompressionParams, {"ratio": 1}, "compress")
    message = r"compress: unknown parameter `ration`; known here: method, ratio, .*damping"
    raises(ParameterError, message, parse_section, CompressionParams, {"ration": 0.5}, "compress")
