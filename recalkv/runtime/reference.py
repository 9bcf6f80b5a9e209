"""Device tables for attention over rows, and that attention in plain PyTorch for devices without Triton.

Scores are computed in code coordinates: a query comes as ``q back^T``, so that no key is reconstructed. A query's score
of the mean key depends only on the position: a sum over RoPE pairs of two coefficients times a cosine and a sine.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from recalkv.codec.layer import LayerCodec
from recalkv.codec.rope import Rotation
from recalkv.errors import ParameterError
from recalkv.runtime.prefill import merge, softmax
from recalkv.trellis.rows import TILE, Segment, coefficient_table, unpack

BLOCK_N = 64
"""Slots that a kernel scores at once; a multiple of TILE."""

CHUNK = 64
"""Coefficients of a code that a kernel decodes at once, or in two halves."""

PAIRS = 16
"""RoPE pairs that a kernel rotates at once."""

MOST_WIDTH = 256
"""Maximum coefficients of one code whose sums a kernel keeps in registers."""

MOST_RUNS = 128
"""Maximum number of parts of a sequence that kernels attend to separately (split-KV)."""

BASE, DIGITS = 256, 3
"""A position is ``low + 256 middle + 65536 high``, rotated digit by digit: up to ``255 * 2^16`` positions."""

_PIECE, _TILES = 128, 1024
"""Tiles that plain PyTorch unpacks at once: of one sequence, and of all."""


@dataclass(frozen=True)
class DeviceRotation:
    """Cosine and sine tables of a rotation: for the digits of a tile's start, and for places within a tile.

    Attributes
    ----------
    anchors : (DIGITS, BASE, 2, pairs) float32
        For digit d times ``BASE^i``. The highest digit starts at -1: a tile may begin before a sequence.
    places : (2, pairs, BLOCK_N) float32
        For the places within a tile. Pairs are padded with zero frequencies to a multiple of PAIRS.
    pairs
        Number of pairs of the rotation, without padding.
    """

    anchors: Tensor
    places: Tensor
    pairs: int

    @classmethod
    def of(cls, rotation: Rotation, device: torch.device | str) -> "DeviceRotation":
        """Compute the tables in float64 on the CPU, whatever the default device and dtype are."""
        with torch.inference_mode(False):
            frequencies = rotation.frequencies.detach().to(device="cpu", dtype=torch.float64)
            pairs = len(frequencies)
            digits = torch.arange(BASE, dtype=torch.float64, device="cpu")
            steps = torch.stack([digits, digits * BASE, (digits - 1) * BASE**2])
            wide = -(-pairs // PAIRS) * PAIRS
            padded = torch.zeros(wide, dtype=torch.float64, device="cpu")
            padded[:pairs] = frequencies
            angles = steps[:, :, None] * padded
            within = padded[:, None] * torch.arange(BLOCK_N, dtype=torch.float64, device="cpu")
            anchors = torch.stack([angles.cos(), angles.sin()], 2).float()
            places = torch.stack([within.cos(), within.sin()]).float()
            return cls(anchors.to(device), places.to(device), pairs)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (..., pairs) float32 at integer positions (...), without trigonometry or float64."""
        digits = (positions % BASE, positions // BASE % BASE, positions // BASE**2 + 1)
        cos, sin = self.anchors[0, digits[0]].unbind(-2)
        for number in range(1, DIGITS):
            other_cos, other_sin = self.anchors[number, digits[number]].unbind(-2)
            cos, sin = cos * other_cos - sin * other_sin, sin * other_cos + cos * other_sin
        return cos[..., : self.pairs], sin[..., : self.pairs]


@dataclass(frozen=True)
class DeviceLayout:
    """Locations of the codes in a layer's rows, on a device.

    Attributes
    ----------
    table : (10, coefficients) int32
        :func:`recalkv.trellis.rows.coefficient_table` for the keys and the values of each group in turn: first,
        first_mask, second, second_mask, last, before, scale, and the last three as float32 bits. Bits 24 and up of
        first, second, last and before hold the shift within the byte.
    places : (groups, 6) int32
        For each group: first column of its keys in ``table``, number of columns, bit mask of the chunks of CHUNK
        coefficients that have two-plane codes; then the same for its values.
    segments
        Segments of each group's keys and values.
    full
        Coefficients of a code if no direction is left out, for keys and values: the same in all layers, so that one
        compiled kernel serves them.
    row_bytes
        Bytes per token.
    """

    table: Tensor
    places: Tensor
    segments: tuple[tuple[tuple[Segment, ...], tuple[Segment, ...]], ...]
    full: tuple[int, int]
    row_bytes: int

    @property
    def groups(self) -> int:
        """Number of groups of KV heads."""
        return len(self.segments)

    @property
    def widths(self) -> tuple[int, int]:
        """Coefficients of the widest group's keys and values, to which queries and outputs are zero-padded."""
        widths = [[sum(each.width for each in own) for own in pair] for pair in self.segments]
        return max(own[0] for own in widths), max(own[1] for own in widths)

    @classmethod
    def of(cls, layer: LayerCodec, device: torch.device | str) -> "DeviceLayout":
        """Build the layout of a layer."""
        byte, column, tables, places = 0, 0, [], []
        # `coefficient_table` creates tensors on the default device.
        with torch.inference_mode(False), torch.device("cpu"):
            for pair in zip(layer.keys, layer.values, strict=True):
                row = []
                for code in pair:
                    table = coefficient_table(code.segments, byte)
                    shifted = ((table.first, table.first_shift), (table.second, table.second_shift),
                               (table.last, table.last_shift), (table.before, table.before_shift))  # fmt: skip
                    first, second, last, before = (place | shift << 24 for place, shift in shifted)
                    floats = (each.view(torch.int32) for each in table[11:])
                    whole = torch.stack([
                        first, table.first_mask, second, table.second_mask, last, before,
                        table.scale, *floats,
                    ])  # fmt: skip
                    two = sum(1 << i for i, part in enumerate(table.second_mask.split(CHUNK)) if bool(part.any()))
                    row += [column, code.width, two]
                    byte, column = byte + code.row_bytes, column + code.width
                    tables.append(whole)
                places.append(row)
            joined, numbers = torch.cat(tables, 1), torch.tensor(places, dtype=torch.int32)
        sides = (layer.keys, layer.values)
        return cls(
            joined.to(device), numbers.to(device),
            tuple((own.segments, other.segments) for own, other in zip(*sides, strict=True)),
            (max(len(code.matrix) for code in sides[0]), max(len(code.matrix) for code in sides[1])), byte,
        )  # fmt: skip


def check(
    rows: Tensor,
    layout: DeviceLayout,
    queries: Tensor,
    mean_queries: Tensor,
    rotation: DeviceRotation,
    block_table: Tensor | None,
) -> None:
    """Refuse arguments that do not fit together.

    Raises
    ------
    ParameterError
    """
    if rows.dtype != torch.uint8 or rows.ndim != 4 or rows.shape[-2:] != (layout.row_bytes, TILE):
        raise ParameterError(
            f"codec: rows of {tuple(rows.shape)} {rows.dtype} are not (any, tiles, {layout.row_bytes}, {TILE}) uint8, "
            f"as this layer's layout has them; pack tokens by the layer's own codec and lay them out by `tiled`."
        )
    if rows.stride()[-2:] != (TILE, 1):
        raise ParameterError(
            f"codec: rows have strides {rows.stride()}, and the last two must be {TILE} and 1; slice caches by "
            f"sequences, blocks or tiles only, or call `contiguous()`."
        )
    batch = len(rows) if block_table is None else len(block_table)
    wanted = (batch, layout.groups, queries.shape[2] if queries.ndim == 4 else 0, layout.widths[0])
    if queries.shape != wanted or not wanted[2]:
        raise ParameterError(
            f"codec: queries of {tuple(queries.shape)} are not (batch {batch}, groups {layout.groups}, queries, width "
            f"{layout.widths[0]}); map them by `back` of the keys' code and pad narrower groups with zeros."
        )
    if mean_queries.shape != (*wanted[:3], 2, rotation.pairs):
        raise ParameterError(
            f"codec: mean_queries of {tuple(mean_queries.shape)} are not {(*wanted[:3], 2, rotation.pairs)}, two "
            f"coefficients for each RoPE pair; compute them from the same queries and the layer's rotation."
        )


def check_rows(rows: Tensor, splits: int | None) -> None:
    """Refuse rows that a kernel cannot load 16 bytes at a time, and split counts that it cannot combine.

    Raises
    ------
    ParameterError
    """
    if rows.stride(0) % TILE or rows.stride(1) % TILE or rows.data_ptr() % TILE:
        raise ParameterError(
            f"codec: rows begin at {rows.data_ptr()} with strides {rows.stride()}, and all must be multiples of "
            f"{TILE}; allocate the cache as a tensor of its own."
        )
    if splits is not None and not 1 <= splits <= MOST_RUNS:
        raise ParameterError(f"codec: splits={splits} must be from 1 to {MOST_RUNS}, or None.")


def runs_for(device: torch.device, resident: int, programs: int, capacity: int, slots: int) -> int:
    """Return the number of split-KV runs per sequence, from the capacity alone.

    Runs of ``programs`` programs each, over all sequences and groups, fill the multiprocessors with ``resident``
    programs each; at most one run for each ``slots`` slots; 1 without CUDA.
    """
    if device.type != "cuda":
        return 1
    wanted = resident * torch.cuda.get_device_properties(device).multi_processor_count // max(programs, 1)
    return max(1, min(wanted, -(-capacity // slots), MOST_RUNS))


def coded_attention_torch(
    rows: Tensor,
    layout: DeviceLayout,
    queries: Tensor,
    mean_queries: Tensor,
    rotation: DeviceRotation,
    first: Tensor,
    length: Tensor,
    offset: Tensor,
    softcap: float | None = None,
    block_table: Tensor | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from one token per sequence to rows, in float32; same arguments and result as in ``triton_decode``.

    Rows are unpacked some tiles at a time (online softmax). On a CPU, the tiles after the longest sequence are
    skipped; elsewhere that would need a device sync.
    """
    check(rows, layout, queries, mean_queries, rotation, block_table)
    batch, groups, count, _ = queries.shape
    per_block = rows.shape[1]
    tiles = per_block if block_table is None else per_block * block_table.shape[1]
    if rows.device.type == "cpu" and batch:
        tiles = min(tiles, -(-max(int(length.max()), 0) // TILE))
    out = torch.zeros(batch, groups, count, layout.widths[1], dtype=torch.float32, device=rows.device)
    lse = torch.full((batch, groups, count), -math.inf, dtype=torch.float32, device=rows.device)
    size = max(1, min(_PIECE, _TILES // max(batch, 1)))
    for start in range(0, tiles, size):
        tile = torch.arange(start, min(start + size, tiles), device=rows.device)
        if block_table is None:
            piece = rows[:, start : start + len(tile)]
        else:
            # Block table entries outside the attended slots are arbitrary.
            used = (tile * TILE < length[:, None]) & ((tile + 1) * TILE > first[:, None])
            block = block_table[:, tile // per_block].long()
            piece = rows[torch.where(used, block, 0), tile % per_block]
        slot = start * TILE + torch.arange(len(tile) * TILE, device=rows.device)
        allowed = (slot >= first[:, None]) & (slot < length[:, None])
        position = torch.where(allowed, slot + offset[:, None], 0).long()
        cos, sin = rotation.at(position)
        scores = torch.einsum("bgqp,bnp->bgqn", mean_queries[..., 0, :].float(), cos)
        scores += torch.einsum("bgqp,bnp->bgqn", mean_queries[..., 1, :].float(), sin)
        octets, byte, values = piece.mT.flatten(1, 2), 0, []
        for group, (keys, own) in enumerate(layout.segments):
            for side, segments in enumerate((keys, own)):
                width = sum(each.row_bytes for each in segments)
                coefficients = unpack(octets[..., byte : byte + width], segments)
                byte += width
                if side:
                    values.append(coefficients)
                else:
                    scores[:, group] += queries[:, group, :, : coefficients.shape[-1]].float() @ coefficients.mT
        weights, part_lse = softmax(scores, allowed[:, None, None], softcap)
        part = torch.zeros_like(out)
        for group, coefficients in enumerate(values):
            part[:, group, :, : coefficients.shape[-1]] = weights[:, group] @ coefficients
        out, lse = merge(out, lse, part, part_lse)
    return out, lse
