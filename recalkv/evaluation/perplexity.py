"""Step 9, measurements: perplexity, live cache size and generation.

Everything is measured on the model that a user loads: perplexity through the compressed forward
pass, cache bytes from the cache object that ``generate()`` filled.
"""

import statistics
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from recalkv.errors import DataError, NonFiniteError
from recalkv.evaluation.resources import now

__all__ = [
    "cache_bytes_per_token",
    "cache_window_bytes",
    "evaluation_windows",
    "excess_loss",
    "fill_cache",
    "parameter_count",
    "perplexity",
    "time_generation",
    "window_losses",
]

_HEAD_TOKENS = 512


def evaluation_windows(tokens: Tensor, window: int, max_windows: int | None, every: int = 1) -> Tensor:
    """Cut joined texts into consecutive windows without overlap, dropping the rest (GPTQ's protocol).

    ``every`` takes one window of so many, which spreads a small sample over the whole text.

    Returns
    -------
    (windows, window) int64

    Raises
    ------
    DataError
        If the text is shorter than one window.
    """
    count = len(tokens) // window
    if count == 0:
        raise DataError(
            f"the evaluation text has {len(tokens)} tokens, fewer than one window of evaluation.window={window}; "
            f"use a longer text or a shorter window."
        )
    return tokens[: count * window].view(count, window)[::every][:max_windows].clone()


@torch.inference_mode()
def window_losses(
    model: Any,
    windows: Tensor,
    progress: Callable[[], object] = lambda: None,
    precision: str = "float32",
    *,
    batch_size: int = 1,
    prefill: int | None = None,
) -> Tensor:
    """Mean next-token loss of each window; logits exist for 512 tokens of one window at a time.

    Parameters
    ----------
    model
        A causal Hugging Face model, dense or compressed.
    windows : (windows, tokens) int64
        Token ids.
    progress
        Called after each window.
    precision
        With ``bfloat16`` matrix products run in bfloat16 under autocast, whatever the weights' type.
    batch_size
        Windows per forward pass: memory and speed, not results beyond rounding.
    prefill
        Tokens of a window that go through the model in one pass; the others are decoded one by one from
        the cache. None for all in one pass, without a cache.

    Returns
    -------
    (windows,) float64, nats per token

    Raises
    ------
    NonFiniteError
        If a loss is NaN or infinite.
    """
    device = next(model.parameters()).device
    mixed = torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")
    head = model.get_output_embeddings()
    losses = []
    for batch in windows.to(device).split(batch_size):
        with mixed:
            states = _last_states(model, batch, prefill)
            for window, ids in zip(states, batch, strict=True):
                parts = zip(window[:-1].split(_HEAD_TOKENS), ids[1:].split(_HEAD_TOKENS), strict=True)
                sums = [nn.functional.cross_entropy(head(part).float(), ids_, reduction="sum") for part, ids_ in parts]
                losses.append(torch.stack(sums).double().sum() / (len(ids) - 1))
                progress()
    result = torch.stack(losses).cpu()
    if not bool(torch.isfinite(result).all()):
        raise NonFiniteError(
            "NaN or infinity in the evaluation loss; export in bfloat16 or float32 (compression.dtype)"
        )
    return result


def _last_states(model: Any, ids: Tensor, prefill: int | None) -> Tensor:
    """Last hidden states, (batch, tokens, hidden), of one pass or of a prefill and single steps."""
    if prefill is None:
        return cast(Tensor, model.model(input_ids=ids, use_cache=False).last_hidden_state)
    cache = DynamicCache(config=model.config)
    first, *steps = [ids[:, :prefill], *ids[:, prefill:].split(1, dim=1)] if prefill < ids.shape[1] else [ids]
    parts = [model.model(input_ids=part, past_key_values=cache).last_hidden_state for part in (first, *steps)]
    return torch.cat(parts, dim=1)


def perplexity(losses: Tensor) -> float:
    """``exp`` of the mean of the windows' mean losses."""
    return float(losses.mean().exp())


def excess_loss(losses: Tensor, dense_losses: Tensor) -> tuple[float, float]:
    """Mean rise of the loss over the dense model's, same windows, and its paired standard error, nats per token."""
    rise = losses - dense_losses
    return float(rise.mean()), float(rise.std() / len(rise) ** 0.5) if len(rise) > 1 else 0.0


def parameter_count(model: Any) -> int:
    """Number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.inference_mode()
def fill_cache(model: Any, ids: Tensor, steps: int = 4) -> Any:
    """Cache of a prefill and a few decoding steps, as ``generate()`` builds it, for (batch, tokens) ids."""
    output = model.generate(
        ids.to(next(model.parameters()).device),
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        pad_token_id=model.config.eos_token_id if isinstance(model.config.eos_token_id, int) else 0,
    )
    return output.past_key_values


def cache_bytes_per_token(cache: Any) -> float:
    """Bytes that a live cache holds per sequence and cached token, over all layers, from its tensors.

    Of layers with scales per channel it is that of a token in a complete block, scales included;
    :func:`cache_window_bytes` has the rest.

    Raises
    ------
    DataError
        If such a layer has no complete block yet.
    """
    total = 0.0
    for layer in cache.layers:
        # Asked of the layer, not of its class: measuring dense models does not depend on it.
        if hasattr(layer, "held_bytes"):
            per_token, _ = layer.held_bytes()
            if not layer.has_blocks:
                raise DataError(
                    f"the cache has no complete block of compression.block={layer.layout.block} tokens to measure; "
                    f"use a longer prompt (evaluation.generation_prompt_tokens)."
                )
            total += per_token
            continue
        for tensor in (layer.keys, layer.values):
            batch, _, tokens, _ = tensor.shape
            total += tensor.numel() * tensor.element_size() / (batch * tokens)
    return total


def cache_window_bytes(cache: Any) -> int:
    """Bytes of the exact tokens that a live cache with scales per channel holds per sequence; 0 for others."""
    return sum(layer.held_bytes()[1] for layer in cache.layers if hasattr(layer, "held_bytes"))


def _held_bytes(cache: Any) -> float:
    """Bytes of all tensors of a growing cache, per sequence."""
    total = 0.0
    for layer in cache.layers:
        held = [layer.keys, layer.values, *([layer.blocks] if hasattr(layer, "held_bytes") else [])]
        total += sum(tensor.nbytes / tensor.shape[0] for tensor in held)
    return total


@torch.inference_mode()
def time_generation(model: Any, prompt: Tensor, new_tokens: int, repeats: int) -> dict[str, float]:
    """Time greedy generation of one sequence; medians over repeats, after one warm-up.

    Parameters
    ----------
    prompt : (tokens,) int64
        Prompt.
    new_tokens
        Tokens generated after it; each after the first is one decoding step.

    Returns
    -------
    dict
        ``prefill_seconds``, ``decode_tokens_per_second`` and ``cache_mib`` at the end.
    """
    device = next(model.parameters()).device
    ids = prompt[None].to(device)
    prefill, decode, cache_bytes = [], [], 0.0
    for repeat in range(repeats + 1):
        cache = DynamicCache(config=model.config)
        start = now(device)
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        token = logits[:, -1].argmax(dim=-1, keepdim=True)
        between = now(device)
        for _ in range(new_tokens - 1 if repeat else 3):
            token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(dim=-1, keepdim=True)
        end = now(device)
        if repeat:
            prefill.append(between - start)
            decode.append((new_tokens - 1) / (end - between))
        cache_bytes = _held_bytes(cache)
    return {
        "prefill_seconds": statistics.median(prefill),
        "decode_tokens_per_second": statistics.median(decode),
        "cache_mib": cache_bytes / 2**20,
    }
