"""Budgets as users write them, and the search for the smallest cache within a loss limit."""

import math
from typing import Any

import pytest
import torch

from recalkv.compression import _prediction, compress_layers, compress_to_target, loss_window
from recalkv.errors import BudgetError, DataError, ParameterError
from recalkv.evaluation.perplexity import window_scores
from recalkv.evaluation.streamed import dense_text
from recalkv.method.search import largest_ratio
from recalkv.method.target import Target
from recalkv.model.layers import ModuleSource
from recalkv.params import CompressionParams, EvaluationParams
from recalkv.text.windows import Windows
from tests import raises
from tests.tiny import assemble, calibration, dense_model, statistics, windows


@pytest.mark.parametrize(
    ("written", "ratio"),
    [
        (0.75, 0.75), (0, 0.0), ("0.75", 0.75), ("ratio=0.5", 0.5), ("bytes_per_token=250", 0.75),
        ("1000KB@4000", 0.75), ("1MiB@4K", 1 - 256 / 1000), (" 0.5 gib @ 2m ", 1 - 256 / 1000),
        (Target(bytes_per_token=500), 0.5),
    ],
)  # fmt: skip
def test_what_is_written_is_a_ratio(written: Any, ratio: float) -> None:
    assert Target.of(written).fixed_ratio(1000) == pytest.approx(ratio, abs=1e-15)


def test_a_loss_has_no_ratio_of_its_own() -> None:
    assert Target.of("max_excess=0.02") == Target(max_excess=0.02)
    assert Target.of("max_excess=0.02").fixed_ratio(1000) is None


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("1.0", "1 is a ratio of bytes to remove"), (-0.1, "ratio=-0.1"), (math.nan, "ratio=nan"),
        ("small", "'small' cannot be read; write"), ("4GiB", "'4GiB' cannot be read"), ("4@128K", "cannot be read"),
        ("size=4", "'size=4' cannot be read"), ("max_excess=a", "'max_excess=a' cannot be read"),
        ("max_excess=0", "max_excess=0.0 must be a positive"),
        ("bytes_per_token=-5", "bytes_per_token=-5.0 must be a positive"),
        ([1], r"target \[1\] cannot be read; write"),
        ("bytes_per_token=inf", "bytes_per_token=inf must be"), ("4GiB@0K", "bytes_per_token=inf"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_budget(written: Any, message: str) -> None:
    raises(ParameterError, message, Target.of, written)


def test_one_budget_and_no_more() -> None:
    raises(ParameterError, "nothing is given", Target)
    raises(ParameterError, "exactly one", Target, ratio=0.5, max_excess=0.1)


def test_a_budget_that_holds_the_dense_cache_is_refused() -> None:
    with pytest.raises(ParameterError, match="1,000 bytes per token already hold the dense cache of 1,000 bytes"):
        Target(bytes_per_token=1000).fixed_ratio(1000)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("power", [2, 6])
def test_the_search_meets_the_limit_closely(factor: float, power: int) -> None:
    """The search comes close to the limit in measured loss although the prediction is off by a factor."""
    asked = []

    def measure(ratio: float) -> float:
        asked.append(ratio)
        return factor * ratio**power

    found = largest_ratio(lambda ratio: ratio**power, measure, 0.1)
    exact = (0.1 / factor) ** (1 / power)
    assert factor * found**power <= 0.1 and 1 - found <= 1.05 * (1 - exact) and found in asked and len(asked) <= 3


def test_the_search_halves_where_the_prediction_misleads() -> None:
    assert 0.58 < largest_ratio(lambda ratio: 1e-9, lambda ratio: 0.0 if ratio <= 0.6 else 1.0, 0.1) <= 0.6


def test_budgets_without_a_cache_are_not_measured() -> None:
    def measure(ratio: float) -> float:
        assert ratio <= 0.8
        return 0.01

    def predict(ratio: float) -> float:
        return ratio if ratio <= 0.8 else math.inf

    # The prediction is far too high, so the search goes beyond it, up to the smallest cache.
    assert largest_ratio(predict, measure, 0.1) == pytest.approx(0.8, abs=0.005)


def test_a_loss_that_no_cache_meets() -> None:
    with pytest.raises(BudgetError, match=r"max_excess=0\.1 is not met .* is 0\.51\d\d nats .* at ratio 0\.0"):
        largest_ratio(lambda ratio: 0.0, lambda ratio: 0.5 + ratio, 0.1)


@pytest.mark.parametrize("changes", [{}, {"bits": 16}, {"bits": 4}, {"bits": 16, "joint": False}])
def test_the_prediction_is_of_what_ranks_and_codes_leave(changes: dict[str, Any]) -> None:
    source, known = ModuleSource(dense_model("llama-gqa")), statistics("llama-gqa", 3)
    predict = _prediction(source, known, CompressionParams(**({"group_size": 2} | changes)))
    losses = [predict(ratio) for ratio in (0.5, 0.7, 0.8)]
    assert losses == sorted(losses) and 0 < losses[0] < losses[-1] < math.inf and predict(0.999) == math.inf


def test_full_ranks_lose_nothing() -> None:
    source, known = ModuleSource(dense_model("llama-gqa")), statistics("llama-gqa", 3)
    assert _prediction(source, known, CompressionParams(bits=16, ratio=0.0))(0.0) == 0


def own_text(model: Any, count: int, seed: int) -> torch.Tensor:
    """Sample windows from a model itself: no other model has a lower loss on them, except by chance."""
    torch.manual_seed(seed)
    return model.generate(windows(count, 1, seed), max_new_tokens=47, do_sample=True, suppress_tokens=[2])[:, :48]


def test_one_window_is_too_few_for_a_loss_target() -> None:
    dense, one = dense_model("llama-gqa"), Windows(windows(1, 48), torch.arange(1))
    arguments = ModuleSource(dense), windows(), calibration(), CompressionParams(group_size=2)
    with pytest.raises(DataError, match=r"at least 2 held-out windows, the text leaves 1; give more text"):
        compress_to_target(*arguments, Target(max_excess=0.2), torch.float32, lambda: one)


def test_windows_of_a_loss_target_are_longer_than_what_stays_exact() -> None:
    assert [loss_window(CompressionParams(exact_window=tokens)) for tokens in (0, 32, 512)] == [512, 512, 2048]


def test_a_loss_target_is_met_on_held_out_windows_and_not_by_much() -> None:
    dense = dense_model("llama-gqa")
    source, parameters = ModuleSource(dense), CompressionParams(group_size=2)
    seen, others = own_text(dense, 16, 1), Windows(own_text(dense, 16, 2), torch.arange(16))
    target, dtype = Target(max_excess=0.2), torch.float32
    found, result = compress_to_target(source, seen, calibration(), parameters, target, dtype, lambda: others)
    text, wanted = dense_text(source, others, 4), EvaluationParams(precision="float32")

    def excess(layers: Any) -> float:
        figures = text.compare(assemble(dense, layers, found), wanted)
        return figures["excess_nats"] + figures["excess_standard_error_nats"]

    assert 0.05 < excess(result) <= 0.2 and 0.5 < found.ratio < 0.95
    smaller = found.model_copy(update={"ratio": found.ratio + 0.3 * (1 - found.ratio)})
    assert excess(compress_layers(source, seen, calibration(), smaller)) > 0.2


@pytest.mark.parametrize("family", ["qwen3-qk-norm", "gemma2-softcap", "granite4-hybrid"])
def test_streamed_losses_are_those_of_the_model(family: str) -> None:
    dense, ids = dense_model(family), windows(3, 20)
    text = dense_text(ModuleSource(dense), Windows(ids, torch.arange(3)), 2)
    whole = window_scores(dense, ids, keep=True)
    torch.testing.assert_close(text.dense.losses, whole.losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(text.dense.states, whole.states, rtol=1e-2, atol=1e-2)
