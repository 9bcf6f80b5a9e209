"""Cache slots as positions: rotary tables indexed by slot, and validation of the positions that a caller passes.

RoPE scores depend only on distances, so slots of queries and keys can replace their true positions. The two may
differ by a constant per sequence: its left padding.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from recalkv.errors import ParameterError
from recalkv.model.families import family_of
from recalkv.model.support import AttentionGeometry, layer_attention_types

_FAR = 1 << 62
"""Larger than any slot."""

_GRAPHED = frozenset({"cuda"})
"""Types of devices on which the next run of a compiled step may overwrite what a run has made: CUDA graphs do."""


class SlotRotary:
    """Rotary tables by cache slot, grown by doubling and shared by layers with the same rotation on the same device.

    Parameters
    ----------
    rotary
        The model's rotary module; None for a model without one, whose keys are not rotated.
    half
        Number of pairs per head, ``d_h / 2``; if the module has fewer, the remaining pairs are not rotated.
    layer_type
        Type of the layers if the module has separate tables per type, else None.
    uses_rope
        Whether keys are rotated at all.
    """

    def __init__(self, rotary: nn.Module | None, half: int, layer_type: str | None, uses_rope: bool) -> None:
        self._rotary: Any = rotary
        self._half, self._layer_type, self._uses_rope = half, layer_type, uses_rope and rotary is not None
        self._tables: dict[tuple[torch.device, torch.dtype, bool], tuple[Tensor, Tensor]] = {}

    @property
    def inv_freq(self) -> Tensor:
        """Frequencies of all pairs, (d_h / 2,); 0 for pairs that are not rotated."""
        found = self._own
        return pad(found, (0, self._half - len(found)))

    @property
    def _own(self) -> Tensor:
        """Frequencies of the rotated pairs."""
        if not self._uses_rope:
            return torch.empty(0)
        found: Tensor = getattr(self._rotary, self._name("inv_freq"))
        return found

    @property
    def attention_scaling(self) -> float:
        """Factor on both rotated queries and rotated keys (as in YaRN)."""
        return float(getattr(self._rotary, self._name("attention_scaling"))) if self._uses_rope else 1.0

    @property
    def uniform(self) -> bool:
        """Whether frequencies are fixed and the attention scaling applies to all pairs."""
        partial = len(self._own) < self._half
        return not self._switches and not (partial and self.attention_scaling != 1.0)

    @property
    def _switches(self) -> bool:
        return self._rotary is not None and bool(self._rotary.rope_type == "longrope")

    def _name(self, name: str) -> str:
        return name if self._layer_type is None else f"{self._layer_type}_{name}"

    def upto(self, length: int, like: Tensor, seen: int | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin, (>= length, d_h) each, in the dtype and on the device of ``like``.

        Length-dependent frequencies are chosen for ``seen`` tokens, or for ``length`` if ``seen`` is None.
        """
        if not self._switches:
            return self._table(length, like)
        switch = self._rotary.config.rope_parameters["original_max_position_embeddings"]
        far = (length if seen is None else seen) > switch
        if isinstance(far, bool):
            return self._table(length, like, switch, far)
        tables = zip(self._table(length, like, switch, True), self._table(length, like, switch, False), strict=True)
        cos, sin = (torch.where(far, beyond[:length], near[:length]) for beyond, near in tables)
        return cos, sin

    def _table(self, length: int, like: Tensor, switch: int = 0, far: bool = True) -> tuple[Tensor, Tensor]:
        """Return the tables with the long frequencies of longrope if ``far``, else with those up to its switch."""
        key = like.device, like.dtype, far
        tables = self._tables.get(key)
        if tables is None or tables[0].shape[0] < length:
            size = max(256, 1 << (length - 1).bit_length(), switch + 1)
            # The tables outlive the call: inference tensors could not be used in a later backward pass.
            with torch.inference_mode(False):
                # The module chooses frequencies by the largest position; rows of clamped positions are never read.
                positions = torch.arange(size, device=like.device).clamp(max=size if far else switch - 1)[None]
                types = () if self._layer_type is None else (self._layer_type,)
                still = like.new_ones(1, size, 0), like.new_zeros(1, size, 0)
                cos, sin = self.widened(self._rotary(like, positions, *types) if self._uses_rope else still)
                # In a model split over several devices, the rotary module may be on another one.
                tables = cos[0].to(like.device), sin[0].to(like.device)
            overwritten = torch.compiler.is_compiling() and like.device.type in _GRAPHED
            if type(tables[0]) is Tensor and not overwritten:  # exported tensors have no content
                self._tables[key] = tables
        return tables

    def forget_tables(self) -> None:
        """Compute the tables again when they are next read."""
        self._tables.clear()

    def widened(self, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Extend the model's tables, (batch, tokens, columns), to whole heads in LLaMA's order."""
        pairs, half = len(self._own), self._half
        if rope[0].shape[-1] == 2 * half == 2 * pairs:
            return rope
        # Pairs that are not rotated: cos 1, sin 0.
        cos, sin = (pad(part[..., :pairs], (0, half - pairs), value=1.0 - still) for still, part in enumerate(rope))
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


def layer_slots(config: Any, rotary: nn.Module | None) -> list[SlotRotary]:
    """Return the rotary tables of every decoder layer; layers with the same rotation share one object."""
    types, rope = layer_attention_types(config), family_of(config).rope_layers(config)
    by_type = isinstance(getattr(rotary, "rope_type", None), dict)
    kinds = [(kind if by_type else None, rope is None or bool(rope[index])) for index, kind in enumerate(types)]
    half = AttentionGeometry.from_config(config).head_dim // 2
    made = {kind: SlotRotary(rotary, half, *kind) for kind in dict.fromkeys(kinds)}
    return [made[kind] for kind in kinds]


def rotated(states: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE to (batch, heads, tokens, d_h)."""
    rotated, _ = apply_rotary_pos_emb(states, states[:, :0], *rope)
    # Some families have float32 tables in 16-bit models and cast the rotated states back; the same is done here.
    return rotated.to(states.dtype)


def check_positions(position_ids: Tensor, mask: Any, start: int | Tensor) -> None:
    """Refuse positions that do not advance in step with the cache slots of the new tokens, in any sequence.

    They may be ahead of the slots by a constant, or behind them by the sequence's left padding.

    Parameters
    ----------
    position_ids : (batch or 1, tokens)
        Positions passed to the model.
    mask : (batch, slots), or anything else that transformers accepts, or None
        A 2-D mask marks padding, whose positions do not matter; without a mask there is no padding. Masks prepared
        beforehand (``generate`` with a static cache) do not show padding: then equal positions before the run that
        ends with the last token count as padding.
    start
        Number of tokens in the cache.

    Raises
    ------
    ParameterError
        For positions that restart (packed sequences) or skip padding between tokens.
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
            # Masks cover all slots up to the last new token, and may cover more.
            end = min(attended.shape[-1], int(start) + tokens)
            ignored = ~attended[:, end - tokens : end]
            low, high = behind.masked_fill(ignored, _FAR), behind.masked_fill(ignored, -_FAR)
        low, high = low.amin(-1), high.amax(-1)
        # If all new tokens of a sequence are padding, low is above high.
        # If a prompt has no tokens, transformers continues from the position 0 of its padding: one slot ahead.
        right = (low > high) | ((low == high) & ((low <= 0) | (low == padding) | (low == padding - 1)))
    else:
        last = behind[:, -1:]
        right = torch.where(slots >= last, behind == last, position_ids == position_ids[:, :1]).all(-1)
    if not bool(right.all()):
        raise ParameterError(
            "position_ids must run along with the slots of the tokens in the cache, behind them by no more than a "
            "sequence's left padding: keys are cached before RoPE and rotated by slot. Pad on the left only, and pass "
            "packed sequences one by one, or with use_cache=False."
        )
