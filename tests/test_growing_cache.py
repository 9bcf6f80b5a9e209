"""The cache that grows without copying: the same contents as transformers' cache, in memory that stays in place."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from recalkv.cache.growing import GrowingCache, GrowingLayer
from tests.tiny import compressed_pair, windows


def states(tokens: int, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + tokens)
    return torch.randn(batch, 1, tokens, 5, generator=generator), torch.empty(batch, 1, tokens, 0)


CHANGES = {
    "nothing": lambda layer: None,
    "crop": lambda layer: layer.crop(-3),
    "crop all": lambda layer: layer.crop(-layer.get_seq_length()),
    "beams": lambda layer: layer.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([1])),
    "reset": lambda layer: layer.reset(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("prompt", [1, 7, 300])
@torch.no_grad()
def test_the_same_as_transformers(change: str, prompt: int) -> None:
    ours, theirs = GrowingLayer(), DynamicLayer()
    for layer in (ours, theirs):
        layer.update(*states(prompt + 3))
        for tokens in (1, 1, 2):
            layer.update(*states(tokens))
        CHANGES[change](layer)
        batch = 2 if change == "reset" else layer.keys.shape[0]
        for tokens in (1, 4, 600, 1):
            layer.update(*states(tokens, batch))
    assert ours.get_seq_length() == theirs.get_seq_length() and torch.equal(ours.keys, theirs.keys)
    assert ours.values.shape == theirs.values.shape


@torch.no_grad()
def test_types_are_promoted_and_inference_tensors_left_alone() -> None:
    ours, theirs = GrowingLayer(), DynamicLayer()
    for layer in (ours, theirs):
        with torch.inference_mode():
            layer.update(*(each.bfloat16() for each in states(9)))
        layer.update(*states(3))
    assert ours.keys.dtype == theirs.keys.dtype == torch.float32 and torch.equal(ours.keys, theirs.keys)


@torch.no_grad()
def test_memory_stays_where_it_is() -> None:
    layer = GrowingLayer()
    layer.update(*states(2000))
    places = set()
    for _ in range(200):
        keys, _ = layer.update(*states(1))
        places.add(keys.data_ptr())
    assert len(places) == 1
    layer.crop(-150)
    layer.update(*states(1))
    assert {layer.keys.data_ptr()} == places


@torch.no_grad()
def test_what_beams_took_is_not_written_over() -> None:
    """Changes of a layer leave its deep copy unchanged, and appending to the copy keeps the copy's older keys."""
    layer = GrowingLayer()
    layer.update(*states(10))
    twin = copy.deepcopy(layer)
    before = twin.keys.clone()
    layer.crop(-5)
    layer.update(*states(5, seed=1))
    assert torch.equal(twin.keys, before)
    twin.update(*states(1))
    assert torch.equal(twin.keys[:, :, :10], before)


def test_gradients_pass() -> None:
    layer = GrowingLayer()
    keys, values = states(3)
    keys.requires_grad_()
    layer.update(keys, values)
    held, _ = layer.update(*states(1))
    held.sum().backward()
    assert torch.equal(keys.grad, torch.ones_like(keys))


def test_what_a_gradient_needs_is_not_written_over() -> None:
    """Later updates keep the latents that earlier products need for the gradient of the query alone."""
    layer, query, total = GrowingLayer(), torch.randn(2, 1, 1, 5, requires_grad=True), torch.zeros(())
    for tokens in (300, 1, 1):
        keys, _ = layer.update(*states(tokens))
        total = total + (query @ keys.mT).square().sum()
    (found,) = torch.autograd.grad(total, query)
    keys = layer.keys
    torch.testing.assert_close(found, sum(2 * (query @ keys[:, :, :n].mT) @ keys[:, :, :n] for n in (300, 301, 302)))


def test_sliding_layers_are_transformers_own() -> None:
    _, model, _ = compressed_pair("qwen2-mixed-sliding")
    ours, theirs = GrowingCache(model.config), DynamicCache(config=model.config)
    kinds = [type(layer) for layer in theirs.layers]
    assert [type(layer) for layer in ours.layers] == [GrowingLayer if kind is DynamicLayer else kind for kind in kinds]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
def test_generation_takes_it_by_default(options: dict[str, Any]) -> None:
    _, model, _ = compressed_pair("llama-gqa")
    ids, common = windows(2, 12), {"max_new_tokens": 20, "return_dict_in_generate": True, "eos_token_id": None}
    torch.manual_seed(0)
    ours = model.generate(ids, **common, **options)
    assert isinstance(ours.past_key_values, GrowingCache)
    torch.manual_seed(0)
    own = DynamicCache(config=model.config)
    theirs = model.generate(ids, past_key_values=own, **common, **options)
    assert theirs.past_key_values is own and torch.equal(ours.sequences, theirs.sequences)
