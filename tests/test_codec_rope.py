"""Measured rotations, compared with the models' tables; and averaged rotations, compared with sums over positions."""

from typing import Any

import pytest
import torch

from recalkv.codec.probe import watching
from recalkv.codec.rope import Rotation, measured_rotations
from tests.tiny import SIZES, dense_model, random_model, windows

CONTEXT = 200

OTHERS: dict[str, dict[str, Any]] = {
    # Pairs of adjacent dimensions.
    "cohere": {},
    # Only a part of each head is rotated.
    "phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 6},
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": 6},
    # Learned positions.
    "gpt2": {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 256},
}


def model_of(family: str) -> Any:
    return random_model(family, **SIZES | OTHERS[family]) if family in OTHERS else dense_model(family)


def keys_at(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the keys of one text at given positions, by layer: (heads, tokens, d)."""
    found: dict[int, torch.Tensor] = {}
    with watching(model, lambda layer, key, value: found.setdefault(layer, key[0].detach())), torch.no_grad():
        model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    return found


HALVES = ("llama-gqa", "llama-linear-rope", "llama3-rope", "llama-yarn", "mistral-sliding", "qwen3-qk-norm", "gemma3",
          "phi3-fused", "ernie4.5", "gpt-oss-sinks", "ministral3", "olmo2-whole-norm")  # fmt: skip


def test_attention_sinks_leave_one_token_its_value() -> None:
    """Values of a single token are equal at all positions: a sink's share, rounded in 16 bits, would change experts."""
    model = dense_model("gpt-oss-sinks").to(torch.bfloat16)
    values: dict[int, torch.Tensor] = {}
    with watching(model, lambda layer, key, value: values.setdefault(layer, value.detach())), torch.no_grad():
        model(torch.full((100, 1), 5), position_ids=torch.arange(100)[:, None], use_cache=False)
    assert all(bool((each == each[:1]).all()) for each in values.values())


@pytest.mark.parametrize(
    "family",
    [*HALVES, "glm-partial", "glm4-moe", "minimax-m2-whole-norm", "qwen3.5-hybrid", "granite4-hybrid", *OTHERS],
)
def test_keys_turn_as_measured(family: str) -> None:
    """The first layer's keys at any positions are its keys at position 0, rotated, and can be rotated back."""
    model = model_of(family)
    rotations = measured_rotations(model, CONTEXT)
    ids, positions = windows(1, 40)[0], torch.randperm(CONTEXT, generator=torch.Generator().manual_seed(3))[:40]
    # The first layer's keys depend only on the token and its position.
    still, moved = keys_at(model, ids, torch.zeros_like(positions)), keys_at(model, ids, positions)
    first = min(rotations)
    assert rotations.keys() == moved.keys()
    if family == "gpt2":
        assert all(not rotation.frequencies.any() for rotation in rotations.values())
        return
    rotated = rotations[first].rotated(still[first], positions)
    torch.testing.assert_close(rotated, moved[first], rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(rotations[first].rotated(rotated, positions, -1), still[first], rtol=1e-4, atol=1e-5)


def test_frequencies_are_the_models_own() -> None:
    for family in ("llama3-rope", "llama-yarn"):
        model = dense_model(family)
        # YaRN's tables include a scaling factor, which is not a rotation.
        assert (model.model.rotary_emb.attention_scaling != 1) == (family == "llama-yarn")
        table = model.model.rotary_emb.inv_freq.double()
        for rotation in measured_rotations(model, CONTEXT).values():
            assert rotation.pairs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
            torch.testing.assert_close(rotation.frequencies, table, rtol=0, atol=1e-7)


def test_pairs_of_neighbors_and_of_a_part() -> None:
    assert measured_rotations(model_of("cohere"), CONTEXT)[0].pairs.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    rotation = measured_rotations(model_of("phi"), CONTEXT)[1]
    assert rotation.pairs.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]] and rotation.frequencies[2:].tolist() == [0, 0]
    assert measured_rotations(model_of("gpt_neox"), CONTEXT)[2].pairs.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_layers_differ() -> None:
    model = dense_model("smollm3-nope", num_hidden_layers=4)
    uses_rope = {layer: bool(own.frequencies.any()) for layer, own in measured_rotations(model, CONTEXT).items()}
    assert uses_rope == {layer: bool(use) for layer, use in enumerate(model.config.no_rope_layers)}
    assert len(set(uses_rope.values())) == 2
    # Sliding layers have another RoPE base.
    rotations = measured_rotations(dense_model("gemma3", num_hidden_layers=4), CONTEXT)
    assert float((rotations[0].frequencies - rotations[1].frequencies).abs().max()) > 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama-gqa", "phi", "gpt_neox", "cohere", "qwen3-qk-norm", "smollm3-nope"])
def test_models_in_16_bits_turn_as_in_32(family: str, dtype: torch.dtype) -> None:
    model = model_of(family)
    expected, found = measured_rotations(model, CONTEXT), measured_rotations(model.to(dtype), CONTEXT)
    for layer, rotation in expected.items():
        uses_rope = rotation.frequencies != 0
        assert torch.equal(found[layer].pairs[:, uses_rope], rotation.pairs[:, uses_rope])
        torch.testing.assert_close(found[layer].frequencies, rotation.frequencies, rtol=0, atol=3e-4)


def test_slow_pairs_that_16_bits_do_not_show_in_a_window_are_those_of_the_context() -> None:
    # Four pairs of dimensions rotate, but only two do so visibly within the window.
    rope = {"rope_type": "default", "rope_theta": 1e10, "partial_rotary_factor": 0.5}
    sizes = SIZES | {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "rope_parameters": rope}
    model = random_model("phi", **sizes).to(torch.bfloat16)
    longer = measured_rotations(model, 1 << 22)
    assert any(not torch.equal(own.pairs, longer[0].pairs) for own in measured_rotations(model, 48).values())
    for layer, own in measured_rotations(model, 48, longer).items():
        assert own.pairs[:, :4].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        torch.testing.assert_close(own.frequencies, longer[layer].frequencies, rtol=0, atol=2e-3)


def test_the_context_decides_where_the_model_says_so() -> None:
    model = dense_model("phi3-longrope")
    short, long = (measured_rotations(model, context)[0].frequencies for context in (40, CONTEXT))
    assert float((short - long).abs().max()) > 1e-3


def test_long_contexts_are_measured_precisely() -> None:
    model = dense_model("llama-gqa", max_position_embeddings=131072)
    rotation, table = measured_rotations(model, 131072)[0], model.model.rotary_emb.inv_freq.double()
    # In radians at the last position, where the model's tables are just as far from exact angles.
    assert float((rotation.frequencies - table).abs().max()) * 131071 < 0.02


def random_rotation_of(heads: int, size: int) -> tuple[Rotation, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(size, generator=generator).view(2, -1)
    frequencies = torch.rand(size // 2, generator=generator, dtype=torch.float64) * 2
    frequencies[-1] = 0
    moment = torch.randn(heads * size, heads * size, generator=generator, dtype=torch.float64)
    return Rotation(order, frequencies), moment @ moment.T


@pytest.mark.parametrize("context", [1, 7, 9000])
def test_averages_are_those_of_a_sum_over_positions(context: int) -> None:
    rotation, moment = random_rotation_of(3, 8)
    total, eye = torch.zeros_like(moment), torch.eye(8, dtype=torch.float64)
    for position in range(context):
        # Row i of the rotated identity is basis vector i, rotated.
        one = rotation.rotated(eye[:, None], torch.tensor([position]))[:, 0].T
        matrix = torch.block_diag(one, one, one)
        total += matrix @ moment @ matrix.T / context
    torch.testing.assert_close(rotation.averaged(moment, context), total, rtol=1e-9, atol=1e-9)
