"""Moments of the codec, compared with a plain computation in float64."""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from recalkv.codec import moments as codec_moments
from recalkv.codec.fit import build_codec
from recalkv.codec.moments import SINKS, LayerMoments, take_moments
from recalkv.codec.probe import watching
from recalkv.codec.rope import Rotation, measured_rotations
from recalkv.errors import ParameterError, UnsupportedModelError
from tests import raises
from tests.tiny import dense_model, random_model, windows

CONTEXT = 70


def drawn_labels(model: Any, ids: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Return the labels of the moments, sampled from the float32 model window by window."""
    sampler, labels = torch.Generator().manual_seed(seed), []
    for window in ids:
        with torch.no_grad():
            likely = model(input_ids=window[None], use_cache=False).logits[0].softmax(-1)
        places = torch.rand(len(likely), 1, generator=sampler)
        labels.append((likely.cumsum(-1) <= places).sum(-1).clamp_max(likely.shape[1] - 1))
    return labels


def naive_moments(
    model: Any, ids: torch.Tensor, rotations: dict[int, Rotation], context: int, seed: int = 0
) -> dict[int, dict[str, Any]]:
    """Return per layer ``means``, ``states`` and ``gradients``, each for keys and values, by the module's formulas."""
    labels, double = drawn_labels(model, ids, seed), copy.deepcopy(model)
    if not hasattr(model.config, "num_local_experts"):  # the grouped matmuls of experts do not support float64
        double = double.double()
    keys: dict[int, list[Any]] = {}
    for window, own in zip(ids, labels, strict=True):
        seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def keep(layer: int, key: torch.Tensor, value: torch.Tensor, seen: dict[int, Any] = seen) -> None:
            key.retain_grad()
            value.retain_grad()
            seen[layer] = (key, value)

        with watching(double, keep):
            logits = double(input_ids=window[None], use_cache=False).logits[0]
            # The last token's label is outside the window.
            torch.nn.functional.cross_entropy(logits[:-1], own[:-1], reduction="sum").backward()
        for layer, pair in seen.items():
            keys.setdefault(layer, []).append([(each.detach()[0], each.grad[0]) for each in pair])
    result = {}
    for layer, found in keys.items():
        rotation = rotations[layer]
        result[layer] = {"means": [], "states": [], "gradients": []}
        for side in (0, 1):
            texts = []  # lists of (x, g), each (heads, d), before RoPE
            for pair in found:
                texts.append([])
                for place in range(SINKS, pair[side][0].shape[1]):
                    vectors = [each[:, place] for each in pair[side]]
                    if side == 0:
                        vectors = [rotation.rotated(each[:, None], torch.tensor([place]), -1)[:, 0] for each in vectors]
                    texts[-1].append(vectors)
            prior = [x for text in texts[: (len(texts) + 1) // 2] for x, _ in text]
            mean = sum(prior) / len(prior)
            energy = sum(float((x - mean).square().sum()) for x in prior) / len(prior)
            size = mean.numel()
            totals, tokens = torch.zeros(2, size, size, dtype=torch.float64), sum(texts, [])
            for x, g in tokens:
                centered = (x - mean).flatten()
                weight = float(centered.square().sum()) / energy
                totals[0] += centered.outer(centered) / weight
                totals[1] += weight * g.flatten().outer(g.flatten())
            totals /= len(tokens)
            if side == 0:
                eye = torch.eye(mean.shape[1], dtype=torch.float64)
                turns = [
                    torch.block_diag(*[rotation.rotated(eye[:, None], torch.tensor([n]))[:, 0].T] * len(mean))
                    for n in range(context)
                ]
                totals = torch.stack([sum(turn @ total @ turn.T for turn in turns) / context for total in totals])
            result[layer]["means"].append(mean)
            result[layer]["states"].append(totals[0])
            result[layer]["gradients"].append(totals[1])
    return result


@pytest.mark.parametrize(
    "family",
    ["llama-gqa", "qwen2-bias", "gemma2-softcap", "glm-partial", "smollm3-nope", "gpt-oss-sinks", "qwen3.5-hybrid"],
)
def test_moments_are_those_of_the_formulas(family: str) -> None:
    model, ids = dense_model(family), windows(3, 24)
    rotations = measured_rotations(model, CONTEXT)
    expected = naive_moments(model, ids, rotations, CONTEXT)
    found = take_moments(model, ids, CONTEXT, rotations=rotations)
    assert found.keys() == expected.keys() == rotations.keys()
    for layer, own in found.items():
        for name in ("means", "states", "gradients"):
            for side in (0, 1):
                theirs = expected[layer][name][side]
                error = (getattr(own, name)[side].double() - theirs).norm() / theirs.norm()
                assert float(error) < 1e-3, (layer, name, side)
        assert own.kv_heads == 3
        assert all(each.dtype == torch.float64 for pair in (own.states, own.gradients) for each in pair)
        torch.testing.assert_close(own.states[0], own.states[0].mT)


def test_blocks_are_those_of_heads_that_may_share_a_code() -> None:
    model, ids = dense_model("llama-mha"), windows(3, 24)
    whole, blocks = (take_moments(model, ids, CONTEXT, heads=heads) for heads in (None, 2))
    assert whole[0].states[0].shape == (1, 48, 48) and blocks[0].states[0].shape == (3, 16, 16)
    for name in ("states", "gradients"):
        for own, block in zip(getattr(whole[1], name), getattr(blocks[1], name), strict=True):
            for number in range(3):
                part = slice(16 * number, 16 * number + 16)
                torch.testing.assert_close(block[number], own[0, part, part], rtol=1e-5, atol=1e-12)
    for heads in (1, 2):
        codecs = [build_codec(each, 4, CONTEXT, heads=heads) for each in (whole, blocks)]
        assert len({codec.bytes_per_token for codec in codecs}) == 1
    with pytest.raises(ParameterError, match=r"are of 16 numbers, and 3 heads per code of layer 0 have 24; .* heads=3"):
        build_codec(blocks, 4, CONTEXT, heads=3)
    with pytest.raises(ParameterError, match="4 heads per code do not divide the 6 KV heads of layer 0"):
        take_moments(model, ids, CONTEXT, heads=4)


def test_values_are_grouped_as_the_keys_whatever_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def wider(model: Any, watcher: Any) -> Iterator[None]:
        def doubled(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
            twice = torch.cat([value, value], -1).detach().requires_grad_(value.requires_grad)
            watcher(layer, key, twice)
            if value.requires_grad:
                value.register_hook(lambda gradient: twice.backward(torch.cat([gradient, gradient], -1)))

        with watching(model, doubled):
            yield

    monkeypatch.setattr(codec_moments, "watching", wider)
    monkeypatch.setattr(codec_moments, "SHARED", 16)
    model, ids = dense_model("llama-mha"), windows(1, 24)
    found = take_moments(model, ids, CONTEXT, rotations=measured_rotations(model, CONTEXT))
    assert [each.shape for each in found[0].states] == [(3, 16, 16), (3, 32, 32)]


def assert_near(found: dict[int, LayerMoments], expected: dict[int, LayerMoments]) -> None:
    """Assert equal gradients up to the order of sums."""
    for layer, own in expected.items():
        for other, gradients in zip(found[layer].gradients, own.gradients, strict=True):
            torch.testing.assert_close(other, gradients, rtol=1e-5, atol=1e-9)


def test_the_seed_decides_the_labels_and_nothing_else_does() -> None:
    model, ids = dense_model("llama-gqa"), windows(3, 24)
    first = take_moments(model, ids, CONTEXT, seed=1)
    torch.manual_seed(5)
    again = take_moments(model, ids, CONTEXT, seed=1)
    assert first.keys() == again.keys()
    for layer, name in itertools.product(first, ("means", "states", "gradients")):
        for one, other in zip(getattr(first[layer], name), getattr(again[layer], name), strict=True):
            assert torch.equal(one, other)
    other = take_moments(model, ids, CONTEXT, seed=2)
    assert torch.equal(first[0].states[0], other[0].states[0])
    assert not torch.equal(first[0].gradients[0], other[0].gradients[0])


def test_products_of_bfloat16_are_near() -> None:
    model, ids = dense_model("llama-gqa"), windows(4, 40)
    exact, near = (take_moments(model, ids, CONTEXT, precision=each) for each in ("float32", "bfloat16"))
    for index, one in exact.items():
        other = near[index]
        assert torch.equal(one.rotation.frequencies, other.rotation.frequencies)
        for a, b in zip((*one.states, *one.means), (*other.states, *other.means), strict=True):
            assert 0 < float((a - b).norm()) < 0.03 * float(a.norm())


def test_activations_computed_again_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = dense_model("llama-gqa"), windows(3, 24)
    kept = take_moments(model, ids, CONTEXT)
    monkeypatch.setattr(codec_moments, "_CHECKPOINTED", 0)
    passes = []
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    again = take_moments(model, ids, CONTEXT)
    assert sum(passes) == 2 * len(ids)  # recomputed in the backward pass
    assert_near(again, kept)
    assert not any(getattr(each, "gradient_checkpointing", False) or each.training for each in model.modules())


def test_layers_that_drop_states_themselves_drop_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointing, which needs layers in training mode, applies no dropout, even in OPT's layers, which call it."""
    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 48, "ffn_dim": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 6, "max_position_embeddings": 256, "dropout": 0.5, "word_embed_proj_dim": 48}
    model, ids = random_model("opt", **sizes), windows(3, 24)
    kept = take_moments(model, ids, CONTEXT)
    monkeypatch.setattr(codec_moments, "_CHECKPOINTED", 0)
    assert_near(take_moments(model, ids, CONTEXT), kept)
    assert {each.dropout for each in model.model.decoder.layers} == {0.5}


def test_windows_that_turn_otherwise_than_the_context_are_turned_back_by_their_own() -> None:
    """With LongRoPE, the windows' keys are rotated back by the table of short sequences, not by the context's."""
    model, ids = dense_model("phi3-longrope"), windows(3, 24)
    own, served = measured_rotations(model, 24), measured_rotations(model, 256)
    found = take_moments(model, ids, 256)
    turned = served[0].averaged(naive_moments(model, ids, own, 1)[0]["states"][0], 256)
    # Position 0 is not rotated, so the formulas averaged over one position give the moment before RoPE.
    assert float((found[0].states[0] - turned).norm() / turned.norm()) < 1e-3
    assert torch.equal(found[0].rotation.frequencies, served[0].frequencies)


def test_labels_are_drawn_by_their_probabilities() -> None:
    likely = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0]).expand(20000, -1)
    found = codec_moments._drawn(likely, torch.rand(20000, 1, generator=torch.Generator().manual_seed(0)))[:, 0]
    counts = torch.bincount(found, minlength=6) / 20000
    torch.testing.assert_close(counts, likely[0], rtol=0, atol=0.01)
    assert counts[[0, 2, 5]].sum() == 0
    assert codec_moments._drawn(likely[:2], torch.tensor([[0.0], [1.0]])).flatten().tolist() == [1, 5]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["k_proj"], "no gradient reaches the keys of layer 1 of LlamaForCausalLM"),
        (["v_proj"], "no gradient reaches the values of layer 1 of LlamaForCausalLM"),
        (["k_proj", "v_proj"], "no gradient reaches the keys of layer 1"),
        (["lm_head"], "no gradient reaches the keys of layer 0"),
    ],
)
def test_projections_without_a_backward_pass_are_refused_at_once(names: list[str], message: str) -> None:
    model, steps = copy.deepcopy(dense_model("llama-gqa")), []
    for name in names:
        module = model.lm_head if name == "lm_head" else getattr(model.model.layers[1].self_attn, name)
        module.register_forward_hook(lambda _, __, output: output.detach())
    raises(UnsupportedModelError, message, take_moments, model, windows(), CONTEXT, progress=lambda *x: steps.append(x))
    assert not [each for each in steps if each[0] == "moments"]
