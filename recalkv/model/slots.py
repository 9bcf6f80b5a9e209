"""Cache slots serve as positions: rotary tables by slot, and the check of what positions a caller passes.

Rotations matter only through distances, so the slots of queries and keys do as well as their true positions, from
which they may differ by a constant for each sequence: its left padding.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from recalkv.errors import ParameterError
from recalkv.model.turns import TileRope

__all__ = ["SlotRotary", "check_positions", "rotated"]

_FAR = 1 << 62
"""Further than any slot."""


class SlotRotary:
    """Rotary tables by cache slot, grown by doubling and shared by all layers of a model on the same device."""

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._tiled: dict[int, TileRope] = {}

    def upto(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin, (>= length, d_h) each, in the type and on the device of ``like``."""
        key = like.device, like.dtype
        tables = self._tables.get(key)
        if tables is None or tables[0].shape[0] < length:
            size = max(256, 1 << (length - 1).bit_length())
            # The tables outlive the call: made in inference mode, they could not serve a backward pass later.
            with torch.inference_mode(False):
                cos, sin = self._rotary(like, torch.arange(size, device=like.device)[None])
                self._tables[key] = tables = cos[0], sin[0]
        return tables

    def tiled(self, tile: int) -> TileRope:
        """Tables for tiles of so many slots."""
        if tile not in self._tiled:
            with torch.inference_mode(False):
                rotary: Any = self._rotary
                frequencies = rotary.inv_freq.detach().double().cpu()
                self._tiled[tile] = TileRope(frequencies, float(rotary.attention_scaling), tile)
        return self._tiled[tile]


def rotated(states: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE to (batch, heads, tokens, d_h)."""
    rotated, _ = apply_rotary_pos_emb(states, states[:, :0], *rope)
    return rotated


def check_positions(position_ids: Tensor, mask: Any, start: int | Tensor) -> None:
    """Refuse positions that do not run along with the slots of the new tokens, in every sequence.

    They may be ahead of the slots by a constant, and behind them by the sequence's left padding.

    Parameters
    ----------
    position_ids : (batch or 1, tokens)
        As passed to the model.
    mask : (batch, slots), or anything else that transformers takes, or None
        A mask of two dimensions says what is padding, whose positions do not matter. Without one nothing is. Masks
        that are prepared already (``generate`` with a static cache) do not tell: then equal positions before a run
        that ends with the last token are padding.
    start
        Tokens in the cache.

    Raises
    ------
    ParameterError
        For positions that restart (packed sequences) or leave out padding between tokens.
    """
    tokens = position_ids.shape[-1]
    slots = torch.arange(tokens, device=position_ids.device) + start
    behind = slots - position_ids
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        padding: int | Tensor = 0
        low = high = behind
        if mask is not None:
            attended = mask.to(behind.device) != 0
            padding = attended.int().argmax(dim=-1)
            # Masks cover all slots up to the new tokens, and may cover more.
            end = min(attended.shape[-1], int(start) + tokens)
            ignored = ~attended[:, end - tokens : end]
            low, high = behind.masked_fill(ignored, _FAR), behind.masked_fill(ignored, -_FAR)
        low, high = low.amin(-1), high.amax(-1)
        # A sequence all of whose new tokens are padding has low above high.
        right = (low > high) | ((low == high) & ((low <= 0) | (low == padding)))
    else:
        last = behind[:, -1:]
        right = torch.where(slots >= last, behind == last, position_ids == position_ids[:, :1]).all(-1)
    if not bool(right.all()):
        raise ParameterError(
            "position_ids must run along with the slots of the tokens in the cache, behind them by no more than a "
            "sequence's left padding: keys are cached before RoPE and rotated by slot. Pad on the left only, and pass "
            "packed sequences one by one, or with use_cache=False."
        )
