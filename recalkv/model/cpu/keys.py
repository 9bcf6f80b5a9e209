"""How each RoPE pair of a key group is scored: chosen and laid out once for all steps."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from recalkv.model.cpu.halves import TOLERANCE, pair_columns, round_rows
from recalkv.model.cpu.loops import LANES
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
    rebuilt_pairs, rebuilt_steps : (heads * 2 fast, pairs) uint32, (heads * 2 fast,) float32
        The first in 16 bits (:func:`recalkv.model.cpu.halves.round_rows`); no rows where products are float32.
    expanded_pairs, expanded_steps : (heads * vectors, slow, LANES) uint32, (heads, >= r) float32
        The second in 16 bits (:func:`recalkv.model.cpu.halves.pair_columns`).
    fast_cos, fast_sin : (fast, tile), direct_cos, direct_sin : (tile, direct) float32
        Turns of the rebuilt and the direct pairs.
    functions : (any, tile) float32
        Of the expansion.
    coefficients_cos, coefficients_sin : (functions, slow) float32
        Of the expansion.
    bias : (heads, d_h) float32
        Added to keys; no rows where there is none.
    fast_bias : (heads, 2 fast), direct_bias : (heads, 2 direct) float32
        The bias of the rebuilt and of the direct columns; no rows where there is none.
    norm : (d_h,) float32
        Weight of the keys' norm; empty where there is none.
    epsilon : (1,) float32
        Of the norm.
    """

    fast: np.ndarray
    slow: np.ndarray
    direct: np.ndarray
    rebuilt: np.ndarray
    expanded: np.ndarray
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


def group_keys(
    up: Tensor,
    head_dim: int,
    rope: TileRope,
    queries: int,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    coarse: bool = False,
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
    coarse
        Latents are multiplied in 16 bits (:mod:`recalkv.model.cpu.halves`).
    """
    heads, half = up.shape[1] // head_dim, head_dim // 2
    direct = direct_pairs(up, head_dim) if norm is None else []
    rest = [pair for pair in range(half) if pair not in set(direct)]
    chosen = None
    if norm is None and rest:
        tolerance = TOLERANCE if coarse else FLOAT32_TOLERANCE
        chosen = expansion(tuple(rope.frequencies[rest].tolist()), rope.tile, 2 * heads, queries, tolerance)
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
        numbers(fast), numbers(slow), numbers(direct), rebuilt, expanded, *_rounded(rebuilt, expanded, coarse),
        array(rope.cos[fast]), array(rope.sin[fast]), array(rope.cos[direct].T), array(rope.sin[direct].T),
        array(functions), array(coefficients.real), array(coefficients.imag),
        array(biases),
        # A norm comes between the bias and the turns.
        array(by_half[..., fast].flatten(1) if norm is None else torch.zeros(0, head_dim)),
        array(by_half[..., direct].flatten(1)),
        array(torch.zeros(0) if norm is None else norm[0].cpu()),
        np.array([0.0 if norm is None else norm[1]], np.float32),
    )  # fmt: skip


def _rounded(
    rebuilt: np.ndarray, expanded: np.ndarray, coarse: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rebuilt columns in 16 bits and their steps, expanded ones and theirs; empty where not ``coarse``."""
    heads, slow, rank = len(expanded), expanded.shape[1] // 2, rebuilt.shape[1]
    own = (len(rebuilt) if coarse else 0), (heads if coarse else 0)
    rows, steps = np.zeros((own[0], rank // 2), np.uint32), np.zeros(own[0], np.float32)
    columns = np.zeros((own[1] * rank // LANES, slow, LANES), np.uint32)
    column_steps = np.zeros((own[1], rank), np.float32)
    round_rows(rebuilt[: own[0]], rows, steps)
    for head in range(own[1]):
        pairs = np.empty((rank, slow), np.uint32)
        round_rows(np.ascontiguousarray(expanded[head].T), pairs, column_steps[head])
        pair_columns(pairs, columns[head * rank // LANES : (head + 1) * rank // LANES])
    return rows, steps, columns, column_steps
