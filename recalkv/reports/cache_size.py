"""Bytes of the cache, dense and compressed, and what of it fits beside the weights: arithmetic, nothing is run."""

import math
from dataclasses import dataclass

from recalkv.cache.codebooks import UNIFORM_CODES
from recalkv.cache.rows import Segment
from recalkv.model.families import AttentionGeometry, group_sizes
from recalkv.model.sizes import ModelSizes
from recalkv.model.spec import LayerSpec, check_ratio

__all__ = ["CONTEXTS", "KINDS", "MEMORIES_GIB", "CacheKind", "bytes_per_token", "markdown", "table"]

GIB = 2**30
WEIGHT_BYTES = 2
CONTEXTS = tuple(1024 << step for step in range(2, 8))
"""4K to 128K tokens."""
MEMORIES_GIB = (24, 80, 141)
_SEQUENCES = (4096, 32768)


@dataclass(frozen=True)
class CacheKind:
    """One way to cache.

    Attributes
    ----------
    name
        For the table.
    ratio
        Fraction of the elements that are removed.
    bits
        Bits of an element; 16 is the model's own type.
    """

    name: str
    ratio: float
    bits: int = 16


KINDS = (
    CacheKind("dense, 16 bits", 0.0),
    CacheKind("50 %", 0.5),
    CacheKind("70 %", 0.7),
    CacheKind("70 %, 4 bits", 0.7, 4),
)


def bytes_per_token(sizes: AttentionGeometry, kind: CacheKind, group_size: int = 4) -> int:
    """Bytes that all layers cache of one token, at uniform ranks.

    Keys share a latent in groups, values all (the paper's layout); ranks are rounded down. Below 16 bits
    each latent carries its scale.

    Parameters
    ----------
    sizes
        The model's attention.
    kind
        Ratio and bits.
    group_size
        Key heads per group; all of them where the model has fewer.

    Raises
    ------
    ParameterError
        For a ratio outside [0, 1) or a group size below 1.
    """
    check_ratio(kind.ratio)
    if kind.ratio == 0 and kind.bits == 16:
        return 2 * sizes.dense_elements_per_token

    def rank(heads: int) -> int:
        # 1 - 0.7 is a little less than 0.3.
        return max(1, math.floor(heads * sizes.head_dim * (1 - kind.ratio) + 1e-9))

    keys = [rank(heads) for heads in group_sizes(sizes.kv_heads, min(group_size, sizes.kv_heads))]
    values = [rank(sizes.kv_heads)]
    layer = LayerSpec(keys, values)
    if kind.bits != 16:
        code = UNIFORM_CODES[kind.bits]
        segments = [[[Segment(each, *code)] for each in own] for own in (keys, values)]
        layer = LayerSpec(keys, values, key_segments=segments[0], value_segments=segments[1])
    return sizes.layers * layer.cached_bytes()


def table(sizes: ModelSizes, group_size: int = 4, own: int | None = None) -> dict[str, dict[str, float]]:
    """Figures of one model, by kind of cache.

    Parameters
    ----------
    sizes
        The model.
    group_size
        Key heads per group.
    own
        Bytes per token of a checkpoint that is to have a line of its own.

    Returns
    -------
    dict
        For each kind ``bytes_per_token``; ``gib_at_N_tokens``; and for each memory, beside 16-bit weights of the
        dense model, ``tokens_in_N_gib`` and ``sequences_of_M_in_N_gib`` (0 where the weights do not fit).
    """
    kinds = {kind.name: bytes_per_token(sizes.attention, kind, group_size) for kind in KINDS}
    if own is not None:
        kinds["this checkpoint"] = own
    result = {}
    for name, size in kinds.items():
        row: dict[str, float] = {"bytes_per_token": size}
        row |= {f"gib_at_{context}_tokens": size * context / GIB for context in CONTEXTS}
        for memory in MEMORIES_GIB:
            left = max(0, memory * GIB - WEIGHT_BYTES * sizes.parameters)
            row[f"tokens_in_{memory}_gib"] = left // size
            row |= {f"sequences_of_{tokens}_in_{memory}_gib": left // (size * tokens) for tokens in _SEQUENCES}
        result[name] = row
    return result


def markdown(name: str, sizes: ModelSizes, rows: dict[str, dict[str, float]]) -> str:
    """Two tables of one model: GiB by context, and what fits."""
    weights = WEIGHT_BYTES * sizes.parameters
    head = [f"{context // 1024}K" for context in CONTEXTS]
    shape = sizes.attention
    own = f" with keys and values of {shape.layers + shape.others}" if shape.others else ""
    lines = [
        f"## {name}",
        "",
        f"{shape.layers} layers{own}, hidden size {shape.hidden}, {shape.heads} heads, {shape.kv_heads} "
        f"key/value heads of {shape.head_dim}, made for {sizes.positions:,} tokens; "
        f"{sizes.parameters / 1e9:.2f} x 10^9 parameters, {weights / GIB:.2f} GiB in 16 bits.",
        "",
        "Cache of one sequence, GiB:",
        "",
        "| cache | bytes per token | " + " | ".join(f"{each} tokens" for each in head) + " |",
        "|---|" + "---:|" * (len(head) + 1),
    ]
    for kind, row in rows.items():
        cells = [f"{row[f'gib_at_{context}_tokens']:.3f}" for context in CONTEXTS]
        lines.append(f"| {kind} | {row['bytes_per_token']:,.0f} | " + " | ".join(cells) + " |")
    counts = " / ".join(f"{tokens // 1024}K" for tokens in _SEQUENCES)
    lines += [
        "",
        f"Tokens that fit beside the weights, and (sequences of {counts} tokens):",
        "",
        "| cache | " + " | ".join(f"{memory} GiB" for memory in MEMORIES_GIB) + " |",
        "|---|" + "---:|" * len(MEMORIES_GIB),
    ]
    for kind, row in rows.items():
        cells = []
        for memory in MEMORIES_GIB:
            if memory * GIB <= weights:
                cells.append("weights do not fit")
                continue
            sequences = " / ".join(f"{row[f'sequences_of_{tokens}_in_{memory}_gib']:,}" for tokens in _SEQUENCES)
            cells.append(f"{row[f'tokens_in_{memory}_gib']:,} ({sequences})")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])
