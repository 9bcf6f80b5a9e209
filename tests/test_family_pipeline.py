"""Every stage on models that differ from LLaMA in what the stages see of them: each ends with a page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_pipeline
from tests.pipeline import STAGES, invoke_in_pipeline
from tests.quantized import published_experts
from tests.tiny import dense_model


def _saved(family: str) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        dense_model(family).save_pretrained(folder)
        return folder

    return save


SDPA, EAGER = "static cache, beside SDPA", "static cache, beside transformers' eager attention"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda folder: published_experts(folder)[0], [EAGER], id="mxfp4"),
        pytest.param(_saved("qwen3-next-hybrid"), ["states of the other layers", SDPA], id="hybrid"),
        pytest.param(_saved("glm-partial"), [SDPA], id="glm", marks=pytest.mark.slow),
        pytest.param(_saved("granite4-hybrid"), ["states of the other layers"], id="granite4", marks=pytest.mark.slow),
        pytest.param(_saved("gemma2-softcap"), [EAGER], id="gemma2", marks=pytest.mark.slow),
        pytest.param(_saved("gemma3"), [SDPA], id="gemma3", marks=pytest.mark.slow),
        pytest.param(_saved("olmo2-whole-norm"), [SDPA], id="olmo2", marks=pytest.mark.slow),
        pytest.param(_saved("phi3-fused"), [SDPA], id="phi3", marks=pytest.mark.slow),
    ],
)
def test_the_pipeline_ends_with_a_page(
    make: Callable[[Path], Path], words: list[str], tmp_path: Path, tiny_parameters: dict[str, Any],
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = make(tmp_path / "model")
    tiny_tokenizer.save_pretrained(folder)
    tiny_parameters["model"]["id"] = str(folder)
    tiny_parameters["compression"] |= {"bits": "auto", "exact_window": 4}
    write_pipeline(tmp_path, tiny_parameters)
    monkeypatch.chdir(tmp_path)
    for stage in STAGES:
        assert invoke_in_pipeline(stage) == 0, stage
    page = (tmp_path / "reports/README.md").read_text()
    assert "## Latency" in page and all(word in page for word in words)
