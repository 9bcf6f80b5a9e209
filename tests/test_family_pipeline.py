"""Every stage on models that differ from LLaMA in ways that the stages see: each run ends with a report page."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_pipeline
from tests.pipeline import STAGES, invoke_in_pipeline
from tests.quantized import published_experts
from tests.tiny import dense_model

SDPA, EAGER = "static cache; dense: SDPA", "static cache; dense: transformers' eager attention"


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("mxfp4", [EAGER]),
        ("qwen3-next-hybrid", ["states of the other layers", SDPA]),
        pytest.param("glm-partial", [SDPA], marks=pytest.mark.slow),
        pytest.param("granite4-hybrid", ["states of the other layers"], marks=pytest.mark.slow),
        pytest.param("gemma2-softcap", [EAGER], marks=pytest.mark.slow),
        pytest.param("gemma3", [SDPA], marks=pytest.mark.slow),
        pytest.param("olmo2-whole-norm", [SDPA], marks=pytest.mark.slow),
        pytest.param("phi3-fused", [SDPA], marks=pytest.mark.slow),
    ],
)
def test_the_pipeline_ends_with_a_page(
    family: str, words: list[str], tmp_path: Path, tiny_parameters: dict[str, Any], tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = tmp_path / "model"
    if family == "mxfp4":
        folder, _ = published_experts(folder)
    else:
        dense_model(family).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    tiny_parameters["model"]["id"] = str(folder)
    tiny_parameters["compression"] |= {"bits": "auto", "exact_window": 4}
    write_pipeline(tmp_path, tiny_parameters)
    monkeypatch.chdir(tmp_path)
    for stage in STAGES:
        assert invoke_in_pipeline(stage) == 0, stage
    page = (tmp_path / "reports/README.md").read_text()
    assert "## Latency" in page and all(word in page for word in words)
