"""Checks of a forward pass with a coded cache: positions, masks, and the lengths of the cache's layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recalkv.errors import ParameterError, UnsupportedModelError
from recalkv.runtime.cache import CodecLayer


def check_axes(module: Any, positions: Tensor) -> None:
    """Refuse multimodal RoPE positions (axes, batch, tokens) that differ between axes; those of text do not.

    Raises
    ------
    UnsupportedModelError
    """
    # If there are four axes, the first holds text positions for masks.
    same = (positions[-3:] == positions[-3:-2]).all()
    message = (
        f"codec: {type(module).__name__} has positions of {min(3, len(positions))} numbers per token (multimodal "
        f"RoPE), from which the mean key cannot be subtracted; only text can be served."
    )
    if torch.compiler.is_compiling():
        torch._assert_async(same, message)
    elif not bool(same):
        raise UnsupportedModelError(message)


def widest_mask(mask: Any, layers: Sequence[CodecLayer], count: int) -> tuple[Any, int | None]:
    """Return the mask that covers the most slots, up to ``count`` new ones, among the masks of the layer types.

    Returns
    -------
    The mask, and its column of the first new token; None without a cache, where the new tokens are the last columns.
    """
    start, layer = (layers[0].length, layers[0]) if layers else (0, None)
    if isinstance(mask, Mapping):
        kinds = sorted(mask, key=lambda kind: kind != "full_attention")
        kind = next((each for each in kinds if isinstance(mask[each], Tensor)), None)
        mask = None if kind is None else mask[kind]
        layer = next((each for each in layers if each.is_sliding == (kind != "full_attention")), None)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        mask = mask[:, : start + count]  # it may cover future slots
    skipped = 0 if layer is None else layer.get_mask_sizes(count)[1]
    return mask, start - skipped if layers else None


def check_slots(layer: CodecLayer, positions: Tensor, mask: Any) -> None:
    """Refuse positions (batch or 1, tokens) that do not continue those of a sequence's cached tokens.

    Raises
    ------
    ParameterError
    """
    count = positions.shape[-1]
    # Skip single tokens on a GPU: the check would need a device sync. Padding at the right of a prompt is not noticed.
    if not layer.length or (count == 1 and not positions.is_cpu):
        return
    assert layer.first is not None and layer.offset is not None
    wanted = layer.length + torch.arange(count, device=positions.device) + layer.offset[:, None].to(positions.device)
    # A sequence without cached tokens may begin anywhere.
    wrong = (positions != wanted) & (layer.first < layer.length)[:, None].to(positions.device)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        wrong &= mask[:, -count:].bool().to(wrong.device)
    if bool(wrong.any()):
        own, here = (int(each.expand_as(wrong)[wrong][0]) for each in (positions, wanted))
        raise ParameterError(
            f"codec: position_ids give {own} where a sequence's slots give {here}; pad before the first token of a "
            f"sequence alone, or use a cache for each sequence."
        )


def check_packed(positions: Tensor, mask: Any, start: int | None) -> None:
    """Refuse positions (batch or 1, tokens) that are not consecutive from token to token, except for padding at an end.

    Parameters
    ----------
    start
        Column of the first token in a four-dimensional mask; None if the tokens are its last columns.

    Raises
    ------
    ParameterError
    """
    count = positions.shape[1]
    if count == 1 or not (mask is None or (isinstance(mask, Tensor) and mask.dim() in (2, 4))):
        return
    wrong = positions.diff(dim=1) != 1
    if mask is not None and mask.dim() == 2:
        seen = mask[:, -count:].bool().to(wrong.device)
        if seen.shape[1] == count:
            # Tokens after padding inside a sequence must continue from the tokens before it, too.
            offsets, seen = torch.broadcast_tensors(positions - torch.arange(count, device=positions.device), seen)
            wrong = (offsets != offsets.gather(1, seen.int().argmax(1, keepdim=True))) & seen
    elif mask is not None:
        begin = mask.shape[-1] - count if start is None else start
        seen = mask[..., max(0, begin) : begin + count].to(wrong.device)
        if seen.shape[-2:] == (count, count):
            seen = (seen if seen.dtype == torch.bool else seen == 0).any(1)
            # A token that no later token sees is padding or a sequence of one token: it reads nothing coded.
            wrong = wrong & seen.any(1)[:, :-1] & seen.tril(-1).any(1)[:, 1:]
    if bool(wrong.any()):
        raise ParameterError(
            "codec: position_ids restart or leave out positions between a sequence's tokens, and keys are coded by "
            "where they stand; pass packed sequences one by one, and pad before the first token alone."
        )


def check_lengths(layers: Sequence[CodecLayer]) -> None:
    """Refuse a cache whose layers differ in length, as after a failed pass.

    Raises
    ------
    ParameterError
    """
    lengths = sorted({layer.length for layer in layers})
    if len(lengths) > 1:
        raise ParameterError(
            f"codec: layers of the cache hold {' and '.join(map(str, lengths))} tokens, since a pass ended between "
            f"them; give a copy of the cache from before it, or a new one."
        )
