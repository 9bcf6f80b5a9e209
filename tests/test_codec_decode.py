"""Attention of one token over rows through the kernel interface agrees with PyTorch, with padding and windows."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from recalkv.codec.layer import Code, LayerCodec
from recalkv.codec.rope import Rotation, no_rotation
from recalkv.runtime import cache as cache_module
from recalkv.runtime import decode, row_attention
from recalkv.runtime.cache import CodecLayer
from recalkv.runtime.mask_cache import of_mask
from recalkv.runtime.models import use_codec
from recalkv.runtime.partial import Scoring
from recalkv.runtime.reference import coded_attention_torch
from recalkv.trellis.rows import Segment
from tests import tiny
from tests.coded import dense, fit

_KEYS = (Segment(8, 8), Segment(8, 6), Segment(16, 4), Segment(16, 3), Segment(8, 2))
_VALUES = (Segment(16, 4), Segment(24, 3), Segment(8, 1))


def _layer_codec(groups: int) -> LayerCodec:
    """Return a codec with two KV heads of size 32 per group."""
    generator = torch.Generator().manual_seed(groups)

    def codes(segments: tuple[Segment, ...]) -> tuple[Code, ...]:
        bases = torch.linalg.qr(torch.randn(groups, 64, 64, generator=generator)).Q
        return tuple(Code(basis.contiguous(), segments) for basis in bases)

    means = (torch.randn(2 * groups, 32, generator=generator) for _ in range(2))
    rotation = Rotation(torch.arange(32).view(2, 16), 10000.0 ** (-torch.arange(16).double() / 16))
    return LayerCodec(codes(_KEYS), codes(_VALUES), *means, rotation)


def _filled(codec: LayerCodec, tokens: int, padding: int, sliding: int | None) -> tuple[CodecLayer, torch.Tensor]:
    """Return a cache of two sequences, of which the second is left-padded, and the slots that are attended to."""
    layer = CodecLayer(codec, 32, 4, sliding)
    states = torch.randn(2, 2, codec.kv_heads, tokens, 32, generator=torch.Generator().manual_seed(tokens))
    seen = torch.ones(2, tokens, dtype=torch.bool)
    seen[1, :padding] = False
    positions = torch.arange(tokens) - torch.tensor([[0], [padding]])
    layer.update(states[0], states[1])
    layer.append(states[0], states[1], seen, positions)
    return layer, seen


@pytest.mark.parametrize(("tokens", "padding", "sliding"), [(20, 3, None), (150, 30, None), (200, 9, 64)])
@pytest.mark.parametrize(("groups", "softcap"), [(1, None), (2, 5.0)])
def test_kernels_agree_with_torch(
    monkeypatch: pytest.MonkeyPatch, groups: int, tokens: int, padding: int, sliding: int | None, softcap: float | None
) -> None:
    codec = _layer_codec(groups)
    layer, seen = _filled(codec, tokens, padding, sliding)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 3 * codec.kv_heads, 1, 32, generator=generator)
    new = torch.randn(2, codec.kv_heads, 1, 32, generator=generator)
    _, low = layer.get_mask_sizes(1)
    mask = torch.cat([seen, torch.ones(2, 1, dtype=torch.bool)], 1)[:, None, None, low:]
    sinks = torch.randn(query.shape[1], generator=generator)

    def step(own: CodecLayer) -> torch.Tensor:
        own.update(new, new)
        return decode.decode_step(own, query, new, new, None, None, mask, Scoring(0.2, softcap, sinks))

    results: dict[str, Any] = {"loops": step(copy.deepcopy(layer))}
    monkeypatch.setattr(decode, "decoding_loops", lambda *_: None)
    results["torch"] = step(copy.deepcopy(layer))
    monkeypatch.setattr(decode, "kernel_serves", lambda *_: True)
    monkeypatch.setattr(row_attention, "kernel", lambda: coded_attention_torch)
    results["kernel"] = step(copy.deepcopy(layer))
    torch.testing.assert_close(results["kernel"], results["torch"], rtol=1e-4, atol=1e-5)
    # In the loops, queries and weights are 16-bit integers.
    torch.testing.assert_close(results["loops"], results["torch"], rtol=1e-3, atol=1e-3)


def test_copies_of_a_cache_outlive_the_codec_that_they_were_made_with() -> None:
    codec = _layer_codec(1)
    layer, _ = _filled(codec, 100, 0, None)
    generator = torch.Generator().manual_seed(2)
    query, new = (torch.randn(2, heads, 1, 32, generator=generator) for heads in (6, 2))

    def step(own: CodecLayer) -> torch.Tensor:
        own.update(new, new)
        return decode.decode_step(own, query, new, new, None, None, None, Scoring(0.2))

    wanted = step(copy.deepcopy(layer))
    assert copy.deepcopy(layer).codec is codec
    # Addresses that the loops cache are invalid in another process.
    stored = pickle.dumps(layer)
    assert any(name.startswith("_") for name in codec.__dict__)
    del layer, codec
    gc.collect()
    loaded = pickle.loads(stored)
    assert not any(name.startswith("_") for name in loaded.codec.__dict__)
    torch.testing.assert_close(step(loaded), wanted, rtol=0, atol=0)


class Questions(TorchDispatchMode):
    """Counter of scalars that are read from the device."""

    asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_of_padded_sequences_asks_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of padded sequences reads one more scalar, not one per layer: a GPU must finish its queue for each."""
    monkeypatch.setattr(decode, "kernel_serves", lambda *_: True)
    monkeypatch.setattr(row_attention, "kernel", lambda: coded_attention_torch)
    monkeypatch.setattr(cache_module, "layer_loops", lambda *_: None)
    monkeypatch.setattr(decode, "decoding_loops", lambda *_: None)
    model = dense("llama-gqa")
    ids = torch.randint(3, tiny.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    use_codec(model, fit(model, ids))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    counts: list[int] = []

    def logits(own: torch.Tensor) -> torch.Tensor:
        cache, found = DynamicCache(config=model.config), []
        for start, end in ((0, 36), (36, 37), (37, 38), (38, 39)):
            positions = (own[:, :end].cumsum(1) - 1).clamp_min(0)[:, start:]
            with torch.no_grad(), Questions() as questions:
                given = {"attention_mask": own[:, :end], "position_ids": positions, "past_key_values": cache}
                output = model(ids[:, start:end], **given)
            counts.append(questions.asked)
            found.append(output.logits[:, -1])
        return torch.stack(found)

    padded = logits(mask)
    first, later = counts[1], counts[2:]
    counts.clear()
    logits(torch.ones_like(mask))
    # The first step also prepares state that layers keep. Transformers reads the same number without padding.
    assert first >= later[0] == later[1] == counts[2] + 1 and counts[2] == counts[3] and len(model.model.layers) > 1
    # A padded sequence gives the same logits as alone.
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[1:, 7:36], past_key_values=cache)
        alone = model(ids[1:, 36:37], past_key_values=cache).logits[0, -1]
    torch.testing.assert_close(padded[1, 1], alone, rtol=1e-4, atol=1e-4)


def test_what_a_mask_gives_is_made_again_once_the_mask_was_written_to() -> None:
    mask, made = torch.ones(2, 3, dtype=torch.bool), []

    def sums(own: torch.Tensor) -> torch.Tensor:
        return of_mask(own, "sum", lambda: made.append(1) or own.sum())

    assert sums(mask) is sums(mask) and len(made) == 1 and sums(mask[:1]) == 3 and len(made) == 2
    mask[0, 0] = False
    assert sums(mask) == 5 and len(made) == 3
    with torch.inference_mode():
        other = torch.ones(2, dtype=torch.bool)
        assert sums(other) == 2 and sums(other) == 2 and len(made) == 5


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_values_of_a_repeated_token_do_not_overflow(bits: int) -> None:
    """The output over a repeated token is right, although sums with its largest levels come close to 32 bits."""
    codes = (Code(torch.eye(64), (Segment(64, bits),)),)
    codec = LayerCodec(codes, codes, torch.zeros(1, 64), torch.zeros(1, 64), no_rotation(64))
    value = torch.randn(64, generator=torch.Generator().manual_seed(0))
    value[20] = 8.0
    values, layer = value.expand(1, 1, 600, 64).contiguous(), CodecLayer(codec, 32, 4)
    layer.update(torch.zeros_like(values), values)
    layer.append(torch.zeros_like(values), values, None, None)
    coded_value = layer.rounded(300, 301)[1][0, 0, 0]
    new, zero = value.view(1, 1, 1, 64), torch.zeros(1, 1, 1, 64)
    layer.update(zero, new)
    output = decode.decode_step(layer, zero, zero, new, None, None, None, Scoring(1.0))
    # 36 of the 601 equally weighted tokens are exact.
    torch.testing.assert_close(output.flatten(), coded_value + (value - coded_value) * 36 / 601, atol=0.01, rtol=0.002)
