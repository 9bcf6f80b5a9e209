"""Cache bytes, dense and compressed, and how much cache fits beside the weights: computed without running a model."""

import bisect
import functools
import operator
from collections.abc import Mapping, Sequence

from recalkv.model.sizes import ModelSizes
from recalkv.model.support import AttentionGeometry
from recalkv.reports import tables

GIB = 2**30
WEIGHT_BYTES = 2
CONTEXTS = tuple(1024 << step for step in range(2, 8))
"""Context lengths: 4K to 128K tokens."""
MEMORIES_GIB = (24, 80, 141)
_SEQUENCES = (4096, 32768)
BITS = (16, 8, 4, 3, 2)
"""Bits per cached element, including scales: the bit budgets given to codecs and mixed-bit latents, which they meet."""


_MOST = 1 << 40
"""Upper bound of counted tokens; if all layers have a sliding window, the cache is bounded and any length may fit."""


def layer_bytes(sizes: AttentionGeometry, bits: float) -> list[float]:
    """Return the bytes that each layer caches per token, without the 16-bit tokens of a residual window."""
    return [2 * sizes.kv_width * bits / 8] * sizes.layers


def _held(sizes: ModelSizes, layers: Sequence[float], context: int) -> float:
    """Return the cache bytes of one sequence from the bytes per token of each layer."""
    return sum(map(operator.mul, layers, sizes.cached_tokens(context)))


def table(sizes: ModelSizes, own: Sequence[int] | None = None) -> dict[str, dict[str, float]]:
    """Return the figures of one model, by the bits per element of its cache.

    Parameters
    ----------
    sizes
        Sizes of the model.
    own
        Bytes per token of each layer of a checkpoint that gets an additional row.

    Returns
    -------
    dict
        For each kind of cache: ``bytes_per_token``; ``gib_at_N_tokens``, where layers with a sliding window hold no
        more tokens than the window; and for each memory size, beside the dense model's weights in 16 bits,
        ``tokens_in_N_gib`` of one sequence and ``sequences_of_M_in_N_gib`` (0 if the weights do not fit).
    """
    kinds = {f"{bits} bits": layer_bytes(sizes.attention, bits) for bits in BITS}
    if own is not None:
        kinds["this checkpoint"] = [float(layer) for layer in own]
    result = {}
    for name, layers in kinds.items():
        row: dict[str, float] = {"bytes_per_token": sum(layers)}
        held = functools.partial(_held, sizes, layers)
        row |= {f"gib_at_{context}_tokens": held(context) / GIB for context in CONTEXTS}
        for memory in MEMORIES_GIB:
            left = float(max(0, memory * GIB - WEIGHT_BYTES * sizes.parameters))
            row[f"tokens_in_{memory}_gib"] = bisect.bisect_right(range(1, _MOST), left, key=held)
            row |= {f"sequences_of_{tokens}_in_{memory}_gib": int(left // held(tokens)) for tokens in _SEQUENCES}
        result[name] = row
    return result


def markdown(name: str, sizes: ModelSizes, rows: dict[str, dict[str, float]]) -> str:
    """Render two tables of one model: GiB by context length, and the tokens and sequences that fit."""
    weights = WEIGHT_BYTES * sizes.parameters
    shape = sizes.attention
    own = f" with keys and values of {shape.layers + shape.others}" if shape.others else ""
    windows = [each for each in sizes.windows if each]
    sliding = f" ({len(windows)} layers hold {max(windows):,} tokens at most)" if windows else ""
    lines = [
        f"## {name}",
        "",
        f"{shape.layers} layers{own}, hidden size {shape.hidden}, {shape.heads} heads, {shape.kv_heads} "
        f"KV heads of {shape.head_dim}, made for {sizes.positions:,} tokens; "
        f"{sizes.parameters / 1e9:.2f} x 10^9 parameters, {weights / GIB:.2f} GiB in 16 bits.",
        "",
        f"Cache of one sequence, GiB{sliding}:",
        "",
        tables.markdown(
            ["cache", "bytes per token", *(f"{context // 1024}K tokens" for context in CONTEXTS)],
            (
                [kind, f"{row['bytes_per_token']:,.0f}", *(f"{row[f'gib_at_{each}_tokens']:.3f}" for each in CONTEXTS)]
                for kind, row in rows.items()
            ),
        ),
        "",
        f"Tokens of one sequence that fit beside the weights, and (sequences of "
        f"{' / '.join(f'{tokens // 1024}K' for tokens in _SEQUENCES)} tokens):",
        "",
        tables.markdown(
            ["cache", *(f"{memory} GiB" for memory in MEMORIES_GIB)],
            (
                [
                    kind,
                    *(
                        _fitting(row, memory) if memory * GIB > weights else "weights do not fit"
                        for memory in MEMORIES_GIB
                    ),
                ]
                for kind, row in rows.items()
            ),
        ),
        "",
    ]
    return "\n".join(lines)


def _fitting(row: Mapping[str, float], memory: int) -> str:
    tokens = row[f"tokens_in_{memory}_gib"]
    sequences = " / ".join(f"{row[f'sequences_of_{each}_in_{memory}_gib']:,}" for each in _SEQUENCES)
    return f"{'any' if tokens == _MOST - 1 else f'{tokens:,}'} ({sequences})"
