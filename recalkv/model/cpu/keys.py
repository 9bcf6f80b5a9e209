"""How each RoPE pair of a key group is scored: chosen and laid out once for all steps."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from recalkv.model.cpu.halves import BFLOAT16, BYTES, FLOAT32, TOLERANCE, pair_columns, panel_columns, round_rows
from recalkv.model.cpu.loops import LANES
from recalkv.model.cpu.matrix_units import aligned, to_bfloat16, to_bytes, whole
from recalkv.model.identity import direct_pairs
from recalkv.model.turns import FLOAT32_TOLERANCE, TileRope, expansion

__all__ = ["Keys", "group_keys"]


class Keys(NamedTuple):
    """How one group's latents become scores; its RoPE pairs are taken in three ways, each of all heads alike.

    Attributes
    ----------
    fast, slow, direct : (any,) int64
        Pairs that are rebuilt, expanded, and cached as they are.
    rebuilt : (heads * 2 fast, >= r) float32
        Columns of R_k: of each head left halves of the fast pairs, then right halves; with zeros up to whole vectors.
    expanded : (heads, 2 slow, >= r) float32
        Columns of R_k: left halves of the slow pairs, then right halves; with zeros as well.
    products : (1,) int64
        How latents are multiplied (:mod:`recalkv.model.cpu.halves`).
    rebuilt_pairs, rebuilt_steps : (>= heads * 2 fast, >= r / 2) uint32, (heads * 2 fast,) float32
        The first in 16 bits: rows of :func:`recalkv.model.cpu.halves.round_rows`, or panels of
        :mod:`recalkv.model.cpu.matrix_units`; bfloat16 has no steps. Empty where products are float32.
    expanded_pairs, expanded_steps : (heads * vectors, >= slow, LANES) uint32, (heads, >= r) float32
        The second in 16 bits (:func:`recalkv.model.cpu.halves.pair_columns`).
    fast_cos, fast_sin : (fast, tile) float32
        Turns of the rebuilt pairs.
    direct_cos, direct_sin : (tile, >= direct) float32
        Turns of the direct pairs; with zeros up to whole vectors.
    functions : (any, tile) float32
        Of the expansion.
    coefficients_cos, coefficients_sin : (functions, slow) float32
        Of the expansion.
    bias : (heads, d_h) float32
        Added to keys; no rows where there is none.
    fast_bias : (heads, 2 fast) float32
        That of the rebuilt columns; no rows where there is none.
    direct_bias : (heads, >= 2 direct, tile) float32
        That of the direct pairs, turned: left halves, with zeros up to whole vectors, then right halves; or empty.
    norm : (d_h,) float32
        Weight of the keys' norm; empty where there is none.
    epsilon : (1,) float32
        Of the norm.
    reach : (2,) int64
        Latents that rebuilt columns are made of, the first ones, and those that all columns are; whole vectors.
    """

    fast: np.ndarray
    slow: np.ndarray
    direct: np.ndarray
    rebuilt: np.ndarray
    expanded: np.ndarray
    products: np.ndarray
    rebuilt_pairs: np.ndarray
    rebuilt_steps: np.ndarray
    expanded_pairs: np.ndarray
    expanded_steps: np.ndarray
    fast_cos: np.ndarray
    fast_sin: np.ndarray
    direct_cos: np.ndarray
    direct_sin: np.ndarray
    functions: np.ndarray
    coefficients_cos: np.ndarray
    coefficients_sin: np.ndarray
    bias: np.ndarray
    fast_bias: np.ndarray
    direct_bias: np.ndarray
    norm: np.ndarray
    epsilon: np.ndarray
    reach: np.ndarray


def group_keys(
    up: Tensor,
    head_dim: int,
    rope: TileRope,
    queries: int,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    products: int = FLOAT32,
) -> Keys:
    """Choose how each RoPE pair of a group is scored.

    Parameters
    ----------
    up : (r, heads d_h)
        Factor.
    rope
        Tables of the tiles.
    queries
        Query heads of the group.
    bias : (heads d_h,) or None
        Added to keys.
    norm
        Weight (d_h,) and epsilon of the keys' norm, which wants all pairs rebuilt, or None.
    products
        How latents are multiplied (:mod:`recalkv.model.cpu.halves`).
    """
    heads, half = up.shape[1] // head_dim, head_dim // 2
    direct = direct_pairs(up, head_dim) if norm is None else []
    rest = [pair for pair in range(half) if pair not in set(direct)]
    chosen = None
    if norm is None and rest:
        tolerance = FLOAT32_TOLERANCE if products == FLOAT32 else TOLERANCE
        frequencies = tuple(rope.frequencies[rest].tolist())
        chosen = expansion(frequencies, rope.tile, 2 * heads, queries, tolerance, _reach(up, head_dim, rest))
    count = len(rest) if chosen is None else chosen.fast
    fast, slow = rest[:count], rest[count:]
    columns = up.detach().float().cpu().unflatten(1, (heads, 2, half))
    filled = -up.shape[0] % LANES
    biases = torch.zeros(0, head_dim) if bias is None else bias.detach().float().cpu().view(heads, head_dim)
    by_half = biases.unflatten(1, (2, half))
    no_functions = torch.zeros(0, rope.tile), torch.zeros(0, 0, dtype=torch.complex64)
    functions, coefficients = no_functions if chosen is None else (chosen.functions, chosen.coefficients)

    def array(tensor: Tensor) -> np.ndarray:
        result: np.ndarray = tensor.detach().float().contiguous().numpy()
        return result

    def numbers(pairs: Sequence[int]) -> np.ndarray:
        return np.array(pairs, dtype=np.int64)

    rebuilt = array(pad(columns[..., fast].flatten(1).T, (0, filled)))
    expanded = array(pad(columns[..., slow].permute(1, 2, 3, 0).flatten(1, 2), (0, filled)))
    return Keys(
        numbers(fast), numbers(slow), numbers(direct), rebuilt, expanded, numbers([products]),
        *_rounded(rebuilt, expanded, products),
        array(rope.cos[fast]), array(rope.sin[fast]), _by_slots(rope.cos[direct]), _by_slots(rope.sin[direct]),
        array(functions), array(coefficients.real), array(coefficients.imag),
        array(biases),
        # A norm comes between the bias and the turns.
        array(by_half[..., fast].flatten(1) if norm is None else torch.zeros(0, head_dim)),
        _turned_bias(by_half[..., direct], rope.cos[direct], rope.sin[direct]),
        array(torch.zeros(0) if norm is None else norm[0].cpu()),
        np.array([0.0 if norm is None else norm[1]], np.float32),
        numbers([-(-_reach(up, head_dim, some)[-1] // LANES) * LANES for some in (fast, range(half))]),
    )  # fmt: skip


def _by_slots(table: Tensor) -> np.ndarray:
    """Turns of pairs, (pairs, tile), as (tile, >= pairs), filled up by zeros."""
    rows: np.ndarray = pad(table.T, (0, -len(table) % LANES)).contiguous().numpy()
    return rows


def _turned_bias(bias: Tensor, cos: Tensor, sin: Tensor) -> np.ndarray:
    """A bias (heads, 2, pairs) turned by each slot's angles (pairs, tile): (heads, >= 2 pairs, tile), zeros at ends."""
    left, right = (half[..., None] for half in bias.unbind(1))
    halves = torch.stack([left * cos - right * sin, right * cos + left * sin], dim=1)
    turned: np.ndarray = pad(halves, (0, 0, 0, -len(cos) % LANES)).flatten(1, 2).contiguous().numpy()
    return turned


def _reach(up: Tensor, head_dim: int, pairs: Sequence[int]) -> tuple[int, ...]:
    """Latents that none of these pairs of a factor (r, heads d_h) is made of, the first one, the first two, and on."""
    by_pair = (up.detach() != 0).cpu().unflatten(1, (-1, head_dim // 2)).any(dim=1)[:, list(pairs)]
    last = (by_pair * torch.arange(1, len(up) + 1)[:, None]).amax(dim=0)
    return tuple(itertools.accumulate(last.tolist(), max, initial=0))


def _rounded(
    rebuilt: np.ndarray, expanded: np.ndarray, products: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rebuilt columns in 16 bits and their steps, expanded ones and theirs; empty where products are float32."""
    if products == FLOAT32:
        return _nothing(0, 0), np.zeros(0, np.float32), _nothing(0, 0, LANES), np.zeros((0, 0), np.float32)
    heads, slow, rank = len(expanded), expanded.shape[1] // 2, rebuilt.shape[1]
    if products == BFLOAT16:
        pairs, slow_pairs = whole(rank // 2), whole(slow)
        rows = aligned(whole(len(rebuilt)), pairs)
        to_bfloat16(rebuilt, 0, rows)
        columns = aligned(heads * rank, slow_pairs).reshape(heads * rank // LANES, slow_pairs, LANES)
        for number in range(heads * rank // LANES):
            head, vector = divmod(number, rank // LANES)
            some = expanded[head, :, vector * LANES : (vector + 1) * LANES]
            panels = _nothing(LANES, slow_pairs)
            to_bfloat16(np.ascontiguousarray(some.T), 0, panels)
            panel_columns(panels, columns[number])
        return rows, np.zeros(0, np.float32), columns, np.zeros((0, 0), np.float32)
    steps = np.zeros(len(rebuilt), np.float32)
    if products == BYTES:
        rows = aligned(whole(len(rebuilt)), 2 * whole(rank // 4))
        to_bytes(rebuilt, 0, rows, steps)
    else:
        rows = _nothing(len(rebuilt), rank // 2)
        round_rows(rebuilt, rows, steps)
    columns, column_steps = _nothing(heads * rank // LANES, slow, LANES), np.zeros((heads, rank), np.float32)
    for head in range(heads):
        pairs = _nothing(rank, slow)
        round_rows(np.ascontiguousarray(expanded[head].T), pairs, column_steps[head])
        pair_columns(pairs, columns[head * rank // LANES : (head + 1) * rank // LANES])
    return rows, steps, columns, column_steps


def _nothing(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint32)
