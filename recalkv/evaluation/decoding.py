"""Time the whole model: the prefill of a prompt, and decoding steps at a given context length and batch size.

Before decoding is timed, the cache is filled by repeating the cache contents of a short random prompt up to the context
length: prefilling a long prompt would add nothing to a measurement of decoding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from recalkv.cache.argument import CACHE
from recalkv.cache.growing import growing_cache
from recalkv.cache.residual_window import remember
from recalkv.errors import CheckpointError
from recalkv.evaluation.attention_step import TOLERANCE
from recalkv.evaluation.live_cache import kept_states
from recalkv.evaluation.resources import now
from recalkv.evaluation.timing import Timing

CACHES = ("growing", "static")
"""Kinds of cache: the default of ``generate()``, and transformers' StaticCache. For the dense model, the default is
transformers' DynamicCache, which copies the whole cache at every step."""

Contents = list[Any]
"""Cache contents of a prompt, by layer: keys and values, (1, heads, tokens, width) each, and the exact latents or None;
for a layer that keeps states instead of keys and values, the states."""

_PROMPT_TOKENS = 64
_WARM_UP = 1
_PREFILLS = 3


@torch.no_grad()
def prompt_contents(model: Any) -> Contents:
    """Return the cache contents of a prompt of random tokens."""
    cache = DynamicCache(config=model.config)
    model(_random_ids(model, _PROMPT_TOKENS), **{CACHE: cache}, logits_to_keep=1)
    return [kept_states(layer) or (layer.keys, layer.values, getattr(layer, "recent", None)) for layer in cache.layers]


def _random_ids(model: Any, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    # For a whole multimodal model, use the vocabulary of its language model.
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(0, vocabulary, (1, tokens), generator=generator).to(model.device)


@torch.no_grad()
def time_prefill(model: Any, tokens: int) -> Timing:
    """Time the prefill of a prompt of random tokens up to the next-token logits, a few times."""
    ids, seconds = _random_ids(model, tokens), []
    for _ in range(_PREFILLS):
        cache = DynamicCache(config=model.config)
        start = now(model.device)
        model(ids, **{CACHE: cache}, logits_to_keep=1)
        seconds.append(now(model.device) - start)
    return Timing(tuple(seconds))


def _filled(model: Any, contents: Contents, kind: str, batch: int, tokens: int, slots: int) -> Any:
    """Return a cache of the given kind that holds ``tokens`` tokens."""
    cache = StaticCache(model.config, max_cache_len=slots) if kind == "static" else growing_cache(model.config)
    if "recalkv_before" in vars(model):  # rows of a codec cannot simply be repeated
        model(_random_ids(model, tokens).repeat(batch, 1), **{CACHE: cache}, logits_to_keep=1)
        return cache
    for index, held in enumerate(contents):
        if isinstance(held[0], dict):
            for update, states in zip((cache.update_conv_state, cache.update_recurrent_state), held, strict=True):
                for number, state in states.items():
                    update(state.repeat(batch, *[1] * (state.dim() - 1)), index, state_idx=number)
            continue
        keys, values, recent = held
        if recent is not None:
            # Before the rows: added later, the latents would count as new, with those before them missing.
            window = model.config.recalkv["exact_window"]
            remember(cache, index, recent[:, :, -window:].repeat(batch, 1, 1, 1), window)
        length = keys.shape[2]
        # Fill a static cache piece by piece, so that its contents are never in memory twice.
        pieces = [length] * (tokens // length) + [tokens % length] if kind == "static" else [tokens]
        for piece in filter(None, pieces):
            copies = -(-piece // length)
            parts = (part.repeat(batch, 1, copies, 1)[:, :, :piece] for part in (keys, values))
            cache.update(*parts, index)
    return cache


@torch.no_grad()
def time_decoding(
    model: Any, contents: Contents, kind: str, batch: int, context: int, steps: int
) -> tuple[Timing, Tensor]:
    """Time greedy decoding steps of a batch, without CUDA graphs.

    Parameters
    ----------
    model
        Dense or compressed model.
    contents
        :func:`prompt_contents` of this model.
    kind
        One of :data:`CACHES`.
    batch
        Number of sequences.
    context
        Number of tokens that the last step attends to.
    steps
        Number of timed steps; fewer if the context is too short.

    Returns
    -------
    Timing, (batch, vocabulary)
        Step times, and the logits of the first step, which must not depend on the kind of cache.
    """
    steps = min(steps, context - _WARM_UP - 1)
    cache = _filled(model, contents, kind, batch, context - steps - _WARM_UP, context)
    device = model.device
    token = torch.ones(batch, 1, dtype=torch.int64, device=device)
    seconds, logits = [], []
    for step in range(_WARM_UP + steps):
        start = now(device)
        output = model(token, **{CACHE: cache}, logits_to_keep=1).logits[:, -1]
        token = output.argmax(dim=-1, keepdim=True)
        if step >= _WARM_UP:
            seconds.append(now(device) - start)
        logits.append(output)
    return Timing(tuple(seconds)), logits[0]


def check_same(logits: dict[str, Tensor], what: str) -> None:
    """Raise :class:`CheckpointError` unless the logits of all kinds of cache agree up to rounding."""
    (_, first), *others = logits.items()
    limit = TOLERANCE.get(first.dtype, 1e-3)
    for kind, other in others:
        error = float((other.double() - first.double()).norm() / first.double().norm())
        if not error <= limit:
            raise CheckpointError(
                f"{what}: logits over a {kind} cache differ by {error:.3g} of their norm, more than {limit}; decoding "
                f"is wrong, so it is not timed. Decode in plain torch, and report the kernel."
            )


def largest(fits: Callable[[int], bool], limit: int = 1 << 20) -> int:
    """Return the largest number that fits, to within 1/64, by doubling and then bisection; 0 if 1 does not fit."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
