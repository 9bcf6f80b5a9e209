"""Latency: outputs of timed steps against float64, the search for batch sizes, and the stage; no times are tested."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recalkv.errors import CheckpointError, ParameterError
from recalkv.evaluation.attention_step import Step, dense_step, module_of, typical_layer
from recalkv.evaluation.decoding import CACHES, check_same, largest, prompt_contents, time_decoding
from recalkv.evaluation.latency import check_contexts
from recalkv.evaluation.timing import environment
from recalkv.model.attention import LatentAttention
from recalkv.model.families import family_of
from recalkv.model.spec import LatentSpec, LayerSpec
from recalkv.model.support import AttentionGeometry, layer_attention_types
from recalkv.reports.latency import latency_section
from tests import raises, tiny
from tests.pipeline import invoke

pair = functools.cache(tiny.compressed_pair)
CPU = torch.device("cpu")


ALIKE = (
    "mixtral", "qwen2-moe", "qwen3-moe", "seed-oss", "arcee", "apertus", "gemma", "ernie4.5-moe", "qwen3.5-hybrid",
    "qwen3.5-moe-hybrid", "ministral", "olmo3-sliding",
)  # fmt: skip
"""Families that differ outside the attention module, or in what another family covers."""

CASES = [
    ("llama-gqa", {}),
    ("llama3-rope", {"method": "loss-aware"}),
    ("llama-yarn", {"values": "fused"}),
    ("llama-bias", {"values": "reconstructed"}),
    ("qwen2-bias", {"method": "loss-aware", "bits": 8, "ratio": 0.6}),
    ("qwen2-bias", {"method": "loss-aware", "bits": 2, "ratio": 0.85, "exact_window": 5}),
    ("llama-gqa", {"bits": 2, "ratio": 0.85, "exact_window": 5}),
    ("qwen3-qk-norm", {"bits": 4, "ratio": 0.8}),
    *(
        (family, {"method": "loss-aware", "bits": 4, "ratio": 0.8})
        for family in tiny.FURTHER_FAMILIES
        if family not in ALIKE
    ),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_steps_are_right_and_complete(family: str, changes: dict[str, Any]) -> None:
    dense, compressed, _ = pair(family, **changes)
    layer = typical_layer(compressed.config)
    module, before = module_of(dense, layer), dense.config._attn_implementation
    # Where all layers have sliding windows, no cache holds more tokens than the window.
    context = 32 if "full_attention" in layer_attention_types(dense.config) else 16
    baseline = dense_step(Step(module, context), 2)
    assert baseline.name == family_of(dense.config).attention_implementation
    assert dense.config._attn_implementation == before
    ours = Step(module_of(compressed, layer), context).measure("latents", 2)
    assert all(each.error < 1e-3 and each.timing.runs == 2 for each in (baseline, ours))


def test_a_wrong_module_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    step, right = Step(module_of(pair("llama-gqa")[1], 0), 32), LatentAttention.attend_in_torch
    monkeypatch.setattr(LatentAttention, "attend_in_torch", lambda *given: right(*given).flip(-1))
    monkeypatch.setattr("recalkv.evaluation.attention_step.time_calls", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(CheckpointError, match=r"layer 0, latents, 32 tokens: .* differs from its float64 reference"):
        step.measure("latents", 1)


@pytest.mark.parametrize(
    "changes", [{}, {"bits": 4, "ratio": 0.8}, {"method": "loss-aware", "bits": 4, "ratio": 0.8, "exact_window": 5}]
)
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding"])
def test_decoding_is_the_same_over_every_cache(family: str, changes: dict[str, Any]) -> None:
    for model in pair(family, **changes)[:2]:
        contents = prompt_contents(model)
        # One context is shorter and one longer than the prompt, whose contents are repeated.
        for context in (16, 150) if family == "llama-gqa" else (16,):
            logits = {kind: time_decoding(model, contents, kind, 2, context, 3)[1] for kind in CACHES}
            check_same(logits, "here")
    wrong = {"growing": logits["growing"], "static": logits["growing"].flip(-1)}
    raises(CheckpointError, r"here: logits over a static cache differ", check_same, wrong, "here")


@pytest.mark.parametrize("room", [0, 1, 2, 3, 37, 64, 1000, 12345])
def test_largest_batch_is_found_to_one_in_64(room: int) -> None:
    asked: list[int] = []
    found = largest(lambda batch: asked.append(batch) or batch <= room)
    assert found <= room <= found + max(1, found // 64) - (found < 64) and len(asked) < 25


def test_typical_layer_is_nearest_to_the_mean_and_full() -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32}
    config = pair("llama-gqa")[1].config.__class__(num_hidden_layers=4, **sizes)
    layers = [LayerSpec([rank], [rank], joint=True) for rank in (2, 30, 14, 10)]
    config.recalkv = LatentSpec(AttentionGeometry.from_config(config), layers, 2, 2, joint=True).to_dict()
    assert typical_layer(config) == 2
    config.layer_types = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    assert typical_layer(config) == 3


def test_contexts_beyond_the_model_are_refused() -> None:
    def check(family: str, contexts: list[int]) -> None:
        check_contexts(tiny.dense_model(family).config, contexts)

    check("llama-gqa", [256])
    with pytest.raises(ParameterError, match=r"latency.contexts=257 is more than the 256 positions .* at most 256"):
        check("llama-gqa", [32, 257])
    with pytest.raises(ParameterError, match=r"latency.contexts=32 is more than the 16 tokens of the sliding window"):
        check("mistral-sliding", [32])
    check("qwen2-mixed-sliding", [32])


def test_stage_writes_rows_metrics_and_a_picture(prepared: Path) -> None:
    assert invoke("latency") == 0
    rows = json.loads((prepared / "reports/latency_rows.json").read_text())
    assert [(row["context"], row["baseline"]) for row in rows] == [(32, "SDPA (torch's choice)")]
    assert all(set(row) == set(rows[0]) and set(environment(CPU)) < set(row) for row in rows)
    assert rows[0]["path"] == "on a CPU; the kernels need a CUDA device"
    assert rows[0]["ratio"] == pytest.approx(0.5, abs=1 / 144)

    metrics = json.loads((prepared / "reports/latency.json").read_text())
    assert set(metrics["attention_us_per_step"]["32_tokens"]) == {"dense", "compressed"}
    rates = metrics["decode_tokens_per_second"]["32_tokens"]
    assert set(rates) == set(CACHES) and rates["static"]["compressed"] > 0
    assert metrics["prefill_seconds"].keys() == {"dense", "compressed"}
    assert (prepared / "reports/latency.png").stat().st_size > 1000

    page = "\n".join(latency_section(metrics, rows))
    assert "**on a CPU; the kernels need a CUDA device**" in page and page.count("\n| float32 |") == 1
