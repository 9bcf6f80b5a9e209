"""Keys and values that share one latent: the cache, generation, and the factors behind them."""

from typing import Any

import pytest
import torch
from recalkv.algorithm import LayerStatistics
from transformers import AutoModelForCausalLM, DynamicCache

from recalkv import algorithm
from recalkv.compression import collect_statistics
from recalkv.errors import ParameterError
from recalkv.method.lowrank import LowRank
from recalkv.method.methods import resolve_method
from recalkv.method.svd import factorize_parts
from recalkv.model.layers import ModuleSource
from recalkv.params import CompressionParams
from tests.test_generation import SLIDING, STRATEGIES, assert_equal, assert_same, endless, generate, left_padded, pair
from tests.tiny import FAMILIES, calibration, compressed_pair, dense_model, windows


def joint(family: str, **compression: Any) -> tuple[Any, Any]:
    """(compressed, dense twin) of the loss-aware method."""
    return pair(family, method="loss-aware", **compression)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_in_every_family(family: str, cache: str) -> None:
    assert_same(joint(family), windows(2, 9), tokens=32, cache_implementation=cache)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy: str, cache: str) -> None:
    ids, mask = left_padded((20, 9))
    options = STRATEGIES[strategy]
    assert_same(joint("llama-gqa"), ids, 32, attention_mask=mask, cache_implementation=cache, **options)


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3-qk-norm", *SLIDING])
def test_assisted_lookup_and_chunked(family: str) -> None:
    models = joint(family)
    assert_same(models, windows(1, 12), assistant_model=endless(dense_model("llama-gqa", seed=7)))
    assert_same(models, windows(1, 10).repeat(1, 3), prompt_lookup_num_tokens=4)
    assert_same(models, windows(2, 90), prefill_chunk_size=32)


@pytest.mark.parametrize("family", ["llama-gqa", "qwen2-bias", *SLIDING])
def test_left_padding_equals_generation_alone(family: str) -> None:
    compressed, _ = joint(family)
    ids, mask = left_padded((70, 5))
    batch = generate(compressed, ids, attention_mask=mask)
    for row, length in enumerate((70, 5)):
        assert_equal(batch[row, -length - 40 :], generate(compressed, ids[row : row + 1, -length:])[0])


@pytest.mark.parametrize("family", ["llama-gqa", *SLIDING])
def test_crop_then_continue_equals_recomputation(family: str) -> None:
    compressed, _ = joint(family)
    first, wrong, right = windows(2, 30).split([18, 12], dim=1) + (windows(2, 7, seed=3),)
    cache = DynamicCache(config=compressed.config)
    cache.activate_past_recording()
    with torch.no_grad():
        compressed(first, past_key_values=cache)
        compressed(wrong, past_key_values=cache)
        cache.crop(-wrong.shape[1])
        continued = compressed(right, past_key_values=cache).logits
        expected = compressed(torch.cat([first, right], dim=1)).logits[:, first.shape[1] :]
    torch.testing.assert_close(continued, expected, atol=1e-4, rtol=1e-4)


def test_checkpoint_round_trip(tmp_path: Any) -> None:
    _, compressed, _ = compressed_pair("llama-gqa", method="loss-aware")
    compressed.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any("v_proj" in name for name in loaded.state_dict())
    with torch.no_grad():
        assert torch.equal(loaded(windows(2, 20)).logits, compressed(windows(2, 20)).logits)


def statistics_of(family: str, **compression: Any) -> tuple[ModuleSource, list[LayerStatistics], CompressionParams]:
    parameters = CompressionParams(**({"group_size": 2} | compression))
    source = ModuleSource(dense_model(family))
    return source, collect_statistics(source, windows(), calibration(), parameters)[0], parameters


@pytest.mark.parametrize("metric", ["weight", "activation", "loss"])
def test_sharing_never_costs_more_than_separate_latents_of_the_same_size(metric: str) -> None:
    source, statistics, parameters = statistics_of("llama-mha", metric=metric)
    groups, d_h = [[0, 3], [1, 2], [4, 5]], source.geometry.head_dim
    weights = algorithm.key_weight(source, 1), algorithm.value_weight(source, 1)
    separate = parameters.model_copy(update={"joint": False})
    both, _ = algorithm.latent_parts(weights, statistics[1], groups, d_h, parameters)
    keys, values = algorithm.latent_parts(weights, statistics[1], groups, d_h, separate)
    for one, key, value in zip(both, keys, values, strict=True):
        e, k, v = one.energies(), key.energies(), value.energies()
        # Up to the ridges on G, which are relative to each matrix's own diagonal.
        assert float(e.sum()) == pytest.approx(float(k.sum() + v.sum()), rel=1e-2)
        for rank in (2, 5, 8):
            assert float(e[2 * rank :].sum()) <= float(k[rank:].sum() + v[rank:].sum()) * 1.01


def test_keys_and_values_read_the_same_latent() -> None:
    source, statistics, parameters = statistics_of("llama-mha")
    groups, d_h = [[0, 3], [1, 2], [4, 5]], source.geometry.head_dim
    weights = algorithm.key_weight(source, 0), algorithm.value_weight(source, 0)
    ranks = algorithm.LayerRanks([5, 32, 9], [5, 32, 9], joint=True)
    layer = algorithm.factorize_layer(weights, statistics[0], groups, ranks, d_h, parameters)
    assert ranks.cached_elements == 46
    assert all(a is b for a, b in zip(layer.keys.down, layer.values.down, strict=True))
    assert [up.shape for up in layer.keys.up] == [up.shape for up in layer.values.up] == [(5, 16), (32, 16), (9, 16)]
    parts, _ = algorithm.latent_parts(weights, statistics[0], groups, d_h, parameters)
    whole = factorize_parts(parts, ranks.key)
    for group, (key, value, up) in enumerate(zip(layer.keys.up, layer.values.up, whole.up, strict=True)):
        torch.testing.assert_close(torch.cat([key, value], dim=1), up)
        if group == 1:  # full rank
            dense = torch.cat([w[:, 8:24] for w in weights], dim=1).double()
            torch.testing.assert_close(LowRank([whole.down[1]], [up]).dense(), dense, rtol=1e-6, atol=1e-8)


def test_ovc_of_a_shared_latent_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"compression\.refit=values .* set joint to false, or refit to"):
        resolve_method(CompressionParams(method="loss-aware", refit="values"))
    with pytest.raises(ParameterError, match=r"refit_target=residual is for compression\.refit=output, not factors"):
        resolve_method(CompressionParams(method="loss-aware", refit="factors", refit_target="residual"))
