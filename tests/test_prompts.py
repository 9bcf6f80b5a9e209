"""Prompts on a CPU: what compiled loops give under masks, and where torch must see what is done and does it itself."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import DynamicCache

from recalkv.model.cpu import plan, product, prompt_layer
from recalkv.model.slots import rotated
from tests.tiny import compressed_pair, windows

WINDOW: dict[str, Any] = {"bits": "mixed", "exact_window": 5}


def model_of(**changes: Any) -> Any:
    _, model, _ = compressed_pair("llama-gqa", method="loss-aware", ratio=0.5, **changes)
    return model


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each call of the loops."""
    calls, right = [], prompt_layer.prompt_attention
    monkeypatch.setattr(prompt_layer, "prompt_attention", lambda *given: (calls.append(1), right(*given))[1])
    return calls


@contextlib.contextmanager
def in_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_layer, "loops_for", lambda *_: None)
        yield


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["causal", "boolean", "added", "infinite"])
@pytest.mark.parametrize(("window", "near"), [(0, 0), (32, 340), (32, 231), (32, 215)])
def test_chunks_under_masks_over_several_tiles(kind: str, window: int, near: int) -> None:
    """Masks that look ahead, are wider than the slots and leave queries nothing; windows longer than what is exact."""
    generator, batch, heads, tokens, past, width = torch.Generator().manual_seed(0), 2, 6, 200, 110, 16
    slots = past + tokens

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query, angles = random(batch, tokens, heads, width), random(batch, slots, width // 2).repeat(1, 1, 2)
    rope = angles.cos(), angles.sin()
    far, exact = ((random(batch, count, 3, width), random(batch, count, 3, 20)) for count in (slots, near))
    # Those before the first slot are nobody's.
    for each in exact:
        each[:, : max(0, near - slots)] = torch.nan
    behind = past + torch.arange(tokens)[:, None] - torch.arange(slots)
    allowed, mask = torch.ones(batch, heads, tokens, slots, dtype=torch.bool), None
    if kind != "causal":
        wide = torch.rand(batch, heads, tokens, slots + 7, generator=generator) < 0.1
        wide[0, :, :, :150] = False
        wide[1, :, :100] = False
        wide[:, 0, :, :250] = False
        allowed = wide[..., :slots]
        least = -torch.inf if kind == "infinite" else torch.finfo(torch.float32).min
        mask = wide if kind == "boolean" else (random(*wide.shape) - 3).masked_fill(~wide, least)
    if window or kind == "causal":
        allowed = allowed & (behind >= 0)
    found = plan.prompt_output(query, [far, exact] if window else [far], rope, window, 0.3, past, mask)

    def turned(states: Tensor, first: int = 0) -> Tensor:
        table = rope[0][:, first:].double(), rope[1][:, first:].double()
        return rotated(states.transpose(1, 2).double(), table).repeat_interleave(heads // states.shape[2], 1)

    def placed(states: Tensor) -> Tensor:
        before = states.new_zeros(batch, max(0, slots - near), *states.shape[2:])
        return torch.cat([before, states[:, max(0, near - slots) :]], dim=1)

    is_near = (behind >= 0) & (behind < window) & (torch.arange(slots) >= slots - near)
    own = turned(query, past)
    scores = torch.where(is_near, own @ turned(placed(exact[0])).mT, own @ turned(far[0]).mT) * 0.3
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask[..., :slots]
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    far_v, near_v = (each.transpose(1, 2).double().repeat_interleave(2, 1) for each in (far[1], placed(exact[1])))
    expected = ((weights * ~is_near) @ far_v + (weights * is_near) @ near_v).transpose(1, 2).float()
    some = allowed.any(-1).transpose(1, 2)
    assert found.isfinite().all() and some.any() and (kind == "causal" or not some.all())
    torch.testing.assert_close(found[some], expected[some], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(1, 1, 40, 39), (3, 1, 40, 40), (1, 2, 40, 40), (1, 1, 1, 40), (1, 1, 39, 40)])
@pytest.mark.parametrize("changes", [{}, WINDOW], ids=["16 bits", "mixed"])
@torch.no_grad()
def test_masks_of_other_shapes_are_not_read_by_loops(shape: Any, changes: Any, taken: list[int]) -> None:
    with torch.enable_grad():
        model = model_of(**changes)
    with contextlib.suppress(RuntimeError, IndexError):
        model(windows(2, 40), attention_mask=torch.ones(shape, dtype=torch.bool))
    assert not taken


@torch.no_grad()
def test_masks_of_integers_are_those_of_booleans() -> None:
    with torch.enable_grad():
        model = model_of(**WINDOW)
    mask = torch.ones(40, 40, dtype=torch.bool).tril()[None, None].expand(2, -1, -1, -1)
    found = [model(windows(2, 40), attention_mask=each).logits for each in (mask, mask.long())]
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_queries_that_look_ahead_do_so() -> None:
    with torch.enable_grad():
        model = model_of()
    found = model(windows(2, 40), is_causal=False).logits
    with in_torch():
        torch.testing.assert_close(found, model(windows(2, 40), is_causal=False).logits)


# --- what torch must see ---------------------------------------------------------------------------------------------


def test_gradients_through_a_cache_and_by_a_mask() -> None:
    """Of a trained prefix, whose exact latents later tokens read, and of numbers that are added."""
    model, ids = model_of(**WINDOW).requires_grad_(False), windows(1, 60)
    model.model.layers[-1].self_attn.o_proj.weight.requires_grad_()
    found = []
    for context in (contextlib.nullcontext(), in_torch()):
        with context:
            prefix = model.get_input_embeddings()(ids[:, :20]).detach().requires_grad_()
            cache = DynamicCache(config=model.config)
            model(inputs_embeds=prefix, past_key_values=cache)
            loss = model(ids[:, 20:], past_key_values=cache).logits.square().sum()
            found += torch.autograd.grad(loss, prefix)
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3 * float(found[1].abs().max()))
    mask = torch.zeros(1, 1, 60, 60).masked_fill(~torch.ones(60, 60).tril().bool(), -1e9).requires_grad_()
    assert model.requires_grad_(False)(ids, attention_mask=mask).logits.requires_grad


def _traced(run: Callable[[Tensor], Tensor], states: Tensor, others: Tensor) -> Tensor:
    return torch.jit.trace(run, states, check_trace=False)(others)


def _recorded(run: Callable[[Tensor], Tensor], states: Tensor, others: Tensor) -> Tensor:
    result: Tensor = make_fx(run)(states)(others)
    return result


def _mapped(run: Callable[[Tensor], Tensor], states: Tensor, others: Tensor) -> Tensor:
    result: Tensor = torch.func.vmap(run)(torch.stack([states, others]))[1]
    return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [_traced, _recorded, _mapped])
@torch.no_grad()
def test_recorded_and_transformed_layers(way: Callable[..., Tensor]) -> None:
    with torch.enable_grad():
        model = model_of().requires_grad_(False)
    states, others = (torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    rope = model.model.rotary_emb(states, torch.arange(40)[None])

    def run(states: Tensor) -> Tensor:
        result: Tensor = model.model.layers[0].self_attn(states, rope)[0]
        return result

    torch.testing.assert_close(way(run, states, others), run(others), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_tangents_are_not_dropped() -> None:
    with torch.enable_grad():
        model, ids = model_of(), windows(1, 40)
    embedded = model.get_input_embeddings()(ids)
    # Torch says of its attention that it has none, which is as good.
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        model(inputs_embeds=forward_ad.make_dual(embedded, torch.ones_like(embedded)))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@torch.no_grad()
def test_defaults_of_a_session_are_not_those_of_the_loops(default: torch.dtype, taken: list[int]) -> None:
    with torch.enable_grad():
        model, ids = model_of(**WINDOW), windows(2, 40)
    expected, left, right = model(ids).logits, torch.randn(70, 9), torch.randn(9, 5)
    torch.set_default_dtype(default)
    try:
        found = model(ids).logits
        assert product(left, right).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(taken) == 2 * model.config.num_hidden_layers
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_float64_and_eager_attention_stay_in_torch(taken: list[int]) -> None:
    with torch.enable_grad():
        model, ids = model_of(**WINDOW), windows(2, 40)
    model.set_attn_implementation("eager")
    model(ids)
    model.set_attn_implementation("sdpa")
    model.double()(ids)
    assert not taken
    with torch.autocast("cpu", torch.bfloat16):
        assert product(torch.randn(70, 9), torch.randn(9, 5)).dtype == torch.bfloat16
