"""Tiny models that use a codec, fitted once per process for all test files."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from recalkv.codec.context import cached_tokens, model_context, model_fingerprint, rope_facts
from recalkv.codec.fit import build_codec, check_bits
from recalkv.codec.layer import LayerCodec
from recalkv.codec.moments import take_moments
from recalkv.codec.sidecar import Codec
from recalkv.runtime.models import use_codec
from tests import tiny

WINDOW = 8
"""Newest tokens that are exact: few, so that most of a short sequence is read from rows."""

RANGE = 0.08
"""Initializer range: larger weights make random models chaotic, so that tests would see nothing but rounding."""

FAMILIES = (
    "llama-mha", "llama-gqa", "qwen2-bias", "mistral-sliding", "gemma2-softcap", "gemma3",
    "gpt-oss-sinks", "glm-partial", "ernie4.5", "smollm3-nope", "gpt2", "qwen3-next-hybrid",
)  # fmt: skip
"""Families that cover every kind of argument that models pass to their attention."""


@torch.inference_mode(False)
@torch.enable_grad()
def fit(
    model: Any, windows: Tensor, bits: float = 4, context: int | None = None, seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda step, done, total: None,
) -> Codec:  # fmt: skip
    """Fit a codec to a loaded model on calibration windows, (samples, length) int64."""
    check_bits(bits)
    context = context or model_context(model)
    moments = take_moments(model, windows, context, seed, progress)
    record = {"bits": bits, "windows": list(windows.shape), "seed": seed, "rope": rope_facts(model.config)}
    return build_codec(moments, bits, context, model_fingerprint(model), cached_tokens(model, context), record)


def dense(family: str = "llama-gqa", **changes: Any) -> Any:
    """Build a random float32 model without a codec."""
    if family != "gpt2":
        # Scores of normalized queries and keys would be larger than in trained models.
        own = {"query_pre_attn_scalar": 24} if family.startswith("gemma") else {}
        return tiny.dense_model(family, initializer_range=RANGE, **own | changes)
    sizes = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "vocab_size": tiny.VOCABULARY}
    special = {"initializer_range": RANGE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return tiny.random_model("gpt2", **sizes, **special)


@functools.cache
def codec_of(family: str = "llama-gqa", bits: float = 4) -> Codec:
    """Return the codec of :func:`dense` for a family, with few exact tokens."""
    return dataclasses.replace(fit(dense(family), tiny.windows(), bits, context=256), window=WINDOW)


def mean_keys(layer: LayerCodec, positions: Tensor) -> Tensor:
    """Return the mean keys after RoPE at positions (..., tokens): (..., kv heads, tokens, d_k) float32."""
    mean = layer.key_mean[:, None].expand(-1, positions.shape[-1], -1)
    return layer.rotation.rotated(mean.expand(*positions.shape[:-1], *mean.shape), positions[..., None, :])


def packed(layer: LayerCodec, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Pack keys after RoPE and values, (batch, kv heads, tokens, d), by definition: (batch, tokens, row bytes)."""
    return layer.pack_centered(keys.float() - mean_keys(layer, positions), values.float() - layer.value_mean[:, None])


def unpacked(layer: LayerCodec, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack rows to float32 keys after RoPE and values."""
    keys, values = layer.unpack_centered(rows)
    return keys + mean_keys(layer, positions), values + layer.value_mean[:, None]


def coded_model(family: str = "llama-gqa", bits: float = 4) -> Any:
    """Build a new model that uses its codec."""
    return use_codec(dense(family), codec_of(family, bits))


def token_ids(batch: int = 6, length: int = 60, seed: int = 5) -> Tensor:
    """Draw random tokens without special ones."""
    return torch.randint(3, tiny.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def one_pass(model: Any, ids: Tensor, **further: Any) -> Tensor:
    """Return the logits of one pass without a cache."""
    return model(ids, use_cache=False, **further).logits


@torch.no_grad()
def in_chunks(model: Any, ids: Tensor, ends: Iterable[int], cache: Any = None, **masks: Tensor) -> tuple[Tensor, Any]:
    """Feed tokens in chunks with these ends; return logits and cache. Masks and positions are those of all tokens."""
    start, parts = 0 if cache is None else int(cache.get_seq_length()), []
    for end in ends:
        own = {name: each[:, : end if name == "attention_mask" else None] for name, each in masks.items()}
        if "position_ids" in own:
            own["position_ids"] = own["position_ids"][:, start:end]
        output = model(ids[:, start:end], past_key_values=cache, use_cache=True, **own)
        cache, start = output.past_key_values, end
        parts.append(output.logits)
    return torch.cat(parts, 1), cache


def differences(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the largest difference of each sequence's logits, relative to the largest logit."""
    return ((found - wanted).abs().flatten(1).amax(1) / wanted.abs().max()).float()


def assert_agree(found: Tensor, wanted: Tensor, tolerance: float = 2e-4, tied: float = 0.06) -> None:
    """Check that a third of the sequences agree up to rounding, and all of them up to ties.

    Where two chains of codes are equally near, rounding decides for one, and later logits differ by a part of the
    codec's error. Two in three sequences may have met a tie; their differences are bounded as well.
    """
    assert found.shape == wanted.shape and bool(torch.isfinite(found).all())
    apart = differences(found, wanted)
    assert float(apart.max()) < tied, apart
    assert float(apart.sort().values[max(0, len(apart) // 3 - 1)]) < tolerance, apart
