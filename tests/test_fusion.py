"""Folding of everything fixed into the weights: a token through the folded tensors equals the unfolded factors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from recalkv.method.fusion import fuse_layer, fused_attention_tensors
from recalkv.method.lowrank import LowRank
from recalkv.method.refit import LayerRefit
from recalkv.model.spec import LayerSpec
from recalkv.model.support import AttentionGeometry

GEOMETRY = AttentionGeometry(hidden=20, heads=6, kv_heads=3, head_dim=4, layers=1)
PERMUTATION = [2, 0, 1]
QUERIES = [4, 5, 0, 1, 2, 3]
"""Query heads in the order of the permuted KV heads."""
COLUMNS = [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7]
"""Columns of the key and value projections in the order of the permuted KV heads."""
ROWS = [4 * head + offset for head in QUERIES for offset in range(4)]
WIDTHS = {"joint": ([8, 4], [8, 4]), "grouped": ([8, 4], [8, 4]), "whole-values": ([8, 4], [12])}
RANKS = {"joint": ([6, 3], [6, 3]), "grouped": ([6, 3], [5, 2]), "whole-values": ([6, 3], [7])}


class Case:
    """Random factors and dense tensors, and the tensors that they are folded into, in float64."""

    def __init__(self, shape: str, layout: str, biased: bool, centered: bool, fitted: bool) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.joint, self.layout = shape == "joint", layout
        (key_widths, value_widths), (key_ranks, value_ranks) = WIDTHS[shape], RANKS[shape]
        self.keys, self.values = self.factors(key_widths, key_ranks), self.factors(value_widths, value_ranks)
        if self.joint:
            self.values = LowRank(self.keys.down, self.values.up)
        sizes = {"q_proj": (24, 20), "k_proj": (12, 20), "v_proj": (12, 20), "o_proj": (20, 24)}
        self.dense = {f"{name}.weight": self.draw(*size) for name, size in sizes.items()}
        if biased:
            self.dense |= {f"{name}.bias": self.draw(size[0]) for name, size in sizes.items()}
        self.mean = self.draw(20) if centered else None
        self.output = self.draw(24, 20) if fitted else self.dense["o_proj.weight"].T
        spec = LayerSpec(key_ranks, value_ranks, self.joint, value_layout=layout, head_permutation=PERMUTATION)
        self.tensors = fused_attention_tensors(
            self.dense, GEOMETRY, spec, self.keys, self.values, self.output if fitted else None, self.mean
        )

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def factors(self, widths: list[int], ranks: list[int]) -> LowRank:
        up = [self.draw(*size) for size in zip(ranks, widths, strict=True)]
        return LowRank([self.draw(20, rank) for rank in ranks], up)

    def bias(self, name: str, size: int) -> Tensor:
        return self.dense.get(f"{name}.bias", torch.zeros(size, dtype=torch.float64))

    def latents(self, inputs: Tensor, side: str) -> list[Tensor]:
        """Return the cached latents of each group."""
        name = "k_proj" if self.joint or side == "key" else "v_proj"
        cached = inputs @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", torch.zeros(1))
        return list(cached.split((self.keys if name == "k_proj" else self.values).ranks, dim=-1))


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", ["separate", "fused"])
@pytest.mark.parametrize("shape", WIDTHS)
def test_keys_queries_and_outputs_are_those_of_the_factors(
    shape: str, layout: str, biased: bool, centered: bool, fitted: bool
) -> None:
    case = Case(shape, layout, biased, centered, fitted)
    tensors, inputs = case.tensors, case.draw(7, 20)

    queries = inputs @ tensors["q_proj.weight"].T + tensors.get("q_proj.bias", torch.zeros(1))
    expected = inputs @ case.dense["q_proj.weight"].T + case.bias("q_proj", 24)
    torch.testing.assert_close(queries, expected[:, ROWS])

    rebuilt = [latent @ tensors[f"key_up.{group}"] for group, latent in enumerate(case.latents(inputs, "key"))]
    keys = torch.cat(rebuilt, dim=1) + tensors.get("key_bias", torch.zeros(1))
    torch.testing.assert_close(keys, inputs @ case.keys.dense() + case.bias("k_proj", 12)[COLUMNS])

    # Every query attends to a single token per row, so it reads that token's values.
    values = inputs @ case.values.dense() + case.bias("v_proj", 12)[COLUMNS]
    expected = values.view(7, 3, 4).repeat_interleave(2, dim=1).flatten(1) @ case.output[ROWS] + case.bias("o_proj", 20)
    latents = case.latents(inputs, "value")
    if case.layout == "fused":
        heads = [up.shape[1] // 4 for up in case.values.up]
        read = torch.cat([own for own, count in zip(latents, heads, strict=True) for _ in range(2 * count)], dim=1)
        assert not any("value_up" in name for name in tensors)
    else:
        rebuilt = [latent @ tensors[f"value_up.{group}"] for group, latent in enumerate(latents)]
        read = torch.cat(rebuilt, dim=1).view(7, 3, 4).repeat_interleave(2, dim=1).flatten(1)
    torch.testing.assert_close(read @ tensors["o_proj.weight"].T + tensors.get("o_proj.bias", torch.zeros(1)), expected)


@pytest.mark.parametrize("shape", WIDTHS)
def test_the_mean_input_is_cached_as_nothing(shape: str) -> None:
    case = Case(shape, "separate", biased=True, centered=True, fitted=False)
    assert case.mean is not None
    for side in ("key", "value"):
        for latent in case.latents(case.mean, side):
            torch.testing.assert_close(latent, torch.zeros_like(latent))
    assert ("v_proj.bias" in case.tensors) == (shape != "joint")


def test_without_biases_and_means_there_are_none() -> None:
    tensors = Case("joint", "fused", biased=False, centered=False, fitted=True).tensors
    assert set(tensors) == {"q_proj.weight", "k_proj.weight", "key_up.0", "key_up.1", "o_proj.weight"}
    assert all(tensor.is_contiguous() for tensor in tensors.values())


def test_norms_of_queries_and_keys_are_kept() -> None:
    case = Case("joint", "separate", biased=False, centered=False, fitted=False)
    norms = {f"{name}_norm.weight": case.draw(4) for name in "qk"}
    spec = LayerSpec([6, 3], [6, 3], True, head_permutation=PERMUTATION)
    tensors = fused_attention_tensors(case.dense | norms, GEOMETRY, spec, case.keys, case.values)
    assert all(torch.equal(tensors[name], norm) for name, norm in norms.items())


def test_a_layer_keeps_everything_else_and_comes_on_its_sources_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused layer keeps all other tensors and is on its source's device, whatever the device of the factors."""
    case = Case("grouped", "fused", biased=True, centered=True, fitted=True)
    held = {f"self_attn.{name}": tensor for name, tensor in case.dense.items()} | {"mlp.weight": case.draw(3, 20)}
    refit = LayerRefit(case.keys, case.values, case.output, 0.0, 0.0)
    spec = LayerSpec([6, 3], [5, 2], value_layout="fused", head_permutation=PERMUTATION)

    def source(device: str) -> Any:
        own = {name: tensor.to(device) for name, tensor in held.items()}
        return SimpleNamespace(
            device=torch.device(device), config=LlamaConfig(), geometry=GEOMETRY, places=[0], holds=lambda name: True,
            layer_tensors=lambda index, below: {name: own[name] for name in own if name.startswith(below)},
            stored_layer=lambda index, without: {name: own[name] for name in own if name not in without},
        )  # fmt: skip

    expected = {f"self_attn.{name}": own for name, own in case.tensors.items()} | {"mlp.weight": held["mlp.weight"]}
    fused = fuse_layer(source("cpu"), 0, spec, refit, case.mean)
    assert fused.keys() == expected.keys() and fused["mlp.weight"].dtype is held["mlp.weight"].dtype
    assert all(torch.equal(tensor, expected[name].to(tensor.dtype)) for name, tensor in fused.items())
    # Tensors on the meta device have no values to compare.
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    away = fuse_layer(source("meta"), 0, spec, refit, case.mean)
    assert {tensor.device.type for tensor in away.values()} == {"meta"}


def test_sinks_and_norms_over_all_heads_move_with_the_heads() -> None:
    case = Case("joint", "separate", True, True, False)
    dense = case.dense | {"q_norm.weight": case.draw(24), "k_norm.weight": case.draw(12)} | {"sinks": case.draw(6)}
    geometry = AttentionGeometry(hidden=20, heads=6, kv_heads=3, head_dim=4, layers=1, sink_logits=True)
    spec = LayerSpec(*RANKS["joint"], True, value_layout="separate", head_permutation=PERMUTATION)
    tensors = fused_attention_tensors(dense, geometry, spec, case.keys, case.values, None, case.mean)
    assert torch.equal(tensors["sinks"], dense["sinks"][QUERIES])
    assert torch.equal(tensors["q_norm.weight"], dense["q_norm.weight"][ROWS])
    assert torch.equal(tensors["k_norm.weight"], dense["k_norm.weight"][COLUMNS])
    # Attention weights with sinks do not sum to 1, so constant value terms stay with the values.
    assert torch.equal(tensors["o_proj.bias"], dense["o_proj.bias"]) and case.mean is not None
    means = [case.mean @ left @ right for left, right in zip(case.values.down, case.values.up, strict=True)]
    torch.testing.assert_close(tensors["value_bias"], dense["v_proj.bias"][COLUMNS] + torch.cat(means))
