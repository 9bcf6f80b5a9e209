"""Predicted cost of one decoding step of one attention module: bytes, operations, time; no measurement.

A roofline: a kernel takes the longer of its memory traffic and its tensor-core work, plus what runs on the plain
cores, plus a constant; kernels run one after the other. Efficiencies are guesses from the literature, and
``python -m benchmarks.gpu kernels`` on a GPU has the last word. ``python -m benchmarks.decode_roofline``
prints the predictions; nothing is decided by them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from recalkv.kernels.plan import JOINT_TILE, MAX_JOINT_ROWS, one_pass_serves

__all__ = [
    "DEVICES",
    "Cost",
    "Device",
    "LayerShape",
    "dense_growing",
    "dense_static",
    "latent_kernels",
    "one_pass",
    "served_in_one_pass",
]

ELEMENT = 2
"""Bytes of a bfloat16."""

MEMORY_EFFICIENCY = 0.85
TENSOR_EFFICIENCY = 0.6
VECTOR_EFFICIENCY = 0.5

NARROW_SHARE = 0.62
"""What products of single warps (mma.sync) reach of a warp group's rate; one pass makes its directions by them."""

KERNEL_SECONDS = 2e-6
"""Start and end of a kernel within a CUDA graph."""

LAUNCH_SECONDS = 5e-6
"""What the host needs for an operation without a graph; hides behind a longer kernel."""

FUNCTIONS = 4
"""Functions of the place in a tile that the turns of slow RoPE pairs are sums of, in one pass."""

_SHARED = 232_448
"""Bytes of shared memory that one program may have."""

_LEAST_ROWS, _FEWEST_ROWS = 16, 8
"""Rows that tensor cores multiply at least, and in one pass, where queries are on the short side."""

_DENSE_OPERATIONS = 25
"""Operations of a dense step without a graph, by benchmarks.decode_launches."""


@dataclass(frozen=True)
class Device:
    """Peak rates of a GPU: bytes/s of memory and of the level-2 cache, its bytes, dense products/s x 2, FLOP/s.

    ``narrow`` is the part of the products' rate that single warps reach.
    """

    memory: float
    cache: float
    cache_bytes: float
    bf16: float
    int8: float
    vector: float
    narrow: float = NARROW_SHARE


DEVICES = {
    # 790 TFLOP/s was measured in bf16 products; int8 is twice that.
    "H200": Device(4.8e12, 10e12, 50e6, 790e12, 1.6e15, 67e12),
    "H100": Device(3.35e12, 10e12, 50e6, 790e12, 1.6e15, 67e12),
    "A100": Device(2.0e12, 6e12, 40e6, 312e12, 624e12, 19.5e12, narrow=1.0),
}


@dataclass(frozen=True)
class LayerShape:
    """What decides the cost of a layer.

    Attributes
    ----------
    hidden, heads, kv_heads, head_dim
        Geometry of the attention.
    key_ranks, key_heads, value_ranks, value_heads
        Latent rank and key/value heads of each group.
    joint
        Keys and values share their latents.
    fused
        R_v is in the output projection.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    key_ranks: tuple[int, ...]
    key_heads: tuple[int, ...]
    value_ranks: tuple[int, ...]
    value_heads: tuple[int, ...]
    joint: bool = False
    fused: bool = False

    @property
    def dense_columns(self) -> int:
        """Cached elements per token of the dense layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def columns(self) -> int:
        """Cached elements per token."""
        return sum(self.key_ranks) + (0 if self.joint else sum(self.value_ranks))

    @property
    def dense_weights(self) -> int:
        """Elements of the dense projections."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def weights(self) -> int:
        """Elements of the projections and factors."""
        rebuilt = _rebuilt(self.key_ranks, self.key_heads) * self.head_dim
        values = _rebuilt(self.value_ranks, self.value_heads)
        inner = values * self.heads // self.kv_heads if self.fused else self.heads * self.head_dim
        up = 0 if self.fused else values * self.head_dim
        return self.hidden * (self.heads * self.head_dim + self.columns + inner) + rebuilt + up


@dataclass(frozen=True)
class Cost:
    """Of one step: bytes from and to memory, operations (multiply and add apart), seconds."""

    bytes: float
    operations: float
    seconds: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.operations + other.operations, self.seconds + other.seconds)


def dense_static(shape: LayerShape, device: Device, context: int, batch: int) -> Cost:
    """Flash decoding over a dense cache that is written in place, in a CUDA graph."""
    cache = ELEMENT * batch * context * shape.dense_columns
    operations = 4.0 * batch * context * shape.heads * shape.head_dim
    attention = Cost(cache, operations, _memory(cache, device) + 2 * KERNEL_SECONDS)
    return _projections(shape.dense_weights, 4, batch, device) + attention


def dense_growing(shape: LayerShape, device: Device, context: int, batch: int) -> Cost:
    """Transformers' eager attention over its growing cache.

    The cache is copied at every step (read, written), keys and values are repeated for each query head of a group
    (read, written) and read again; scores go through memory about six times.
    """
    cache = ELEMENT * batch * context * shape.dense_columns
    repeated = shape.heads // shape.kv_heads
    expanded = (1 + 2 * repeated) if repeated > 1 else 1
    scores = 6.0 * ELEMENT * batch * context * shape.heads
    moved = cache * (2 + expanded) + scores
    operations = 4.0 * batch * context * shape.heads * shape.head_dim
    step = _projections(shape.dense_weights, 4, batch, device) + Cost(moved, operations, _memory(moved, device))
    return Cost(step.bytes, step.operations, max(step.seconds, _DENSE_OPERATIONS * LAUNCH_SECONDS))


def latent_kernels(shape: LayerShape, device: Device, context: int, batch: int, int8: bool = False) -> Cost:
    """The kernels over a cache that is written in place, in a CUDA graph.

    ``int8``: latents are cached in 8 bits, with one scale per token and group, and keys are rebuilt by products of
    8-bit numbers.
    """
    tokens, element = float(batch * context), 1 if int8 else ELEMENT
    key_bytes = element * tokens * sum(shape.key_ranks)
    value_bytes = key_bytes if shape.joint else element * tokens * sum(shape.value_ranks)
    rebuilding = 2 * tokens * _rebuilt(shape.key_ranks, shape.key_heads) * shape.head_dim
    # Each head of a group reads the group's latents, all but the first from the level-2 cache.
    per_head = element * tokens * _rebuilt(shape.key_ranks, shape.key_heads)
    turning = 6 * tokens * shape.kv_heads * shape.head_dim
    # A single query head takes its products on the plain cores, several share a tensor-core tile.
    own, products = shape.heads // shape.kv_heads, 0.0
    if own == 1:
        turning += 2 * tokens * shape.heads * shape.head_dim
    else:
        rebuilding += 2 * tokens * max(_LEAST_ROWS, own) * shape.kv_heads * shape.head_dim
    logits = 4 * tokens * shape.heads
    for rank, heads in zip(shape.value_ranks, shape.value_heads, strict=True):
        products += 2 * tokens * rank * max(_LEAST_ROWS, heads * own)
    scores = (
        max(
            _memory(key_bytes, device),
            per_head / device.cache / MEMORY_EFFICIENCY,
            rebuilding / (device.int8 if int8 else device.bf16) / TENSOR_EFFICIENCY,
        )
        + turning / device.vector / VECTOR_EFFICIENCY
    )
    again = shape.joint and key_bytes < device.cache_bytes
    rate = device.cache if again else device.memory
    values = max(value_bytes / rate / MEMORY_EFFICIENCY, products / device.bf16 / TENSOR_EFFICIENCY)
    written = 2 * logits if logits > device.cache_bytes / 2 else 0
    moved = key_bytes + (0 if again else value_bytes) + written
    seconds = scores + values + _memory(written, device) + 3 * KERNEL_SECONDS
    attention = Cost(moved, rebuilding + turning + products, seconds)
    return _projections(shape.weights, 3 if shape.joint else 4, batch, device) + attention


def served_in_one_pass(shape: LayerShape) -> bool:
    """Whether one pass takes such a layer on an H100, given as many direct pairs as its ranks allow at most."""
    own, half = shape.heads // shape.kv_heads, shape.head_dim // 2
    direct = {_direct(shape, rank, heads) for rank, heads in zip(shape.key_ranks, shape.key_heads, strict=True)}
    rest = max(rank - 2 * min(direct) * heads for rank, heads in zip(shape.key_ranks, shape.key_heads, strict=True))
    heads, functions = max(shape.key_heads), 1 if min(direct) == half else FUNCTIONS
    serves = one_pass_serves(heads, half, min(direct), rest, functions, ELEMENT, _SHARED)
    return serves and shape.joint and len(direct) == 1 and heads * own <= MAX_JOINT_ROWS


def _direct(shape: LayerShape, rank: int, heads: int) -> int:
    most = min(shape.head_dim // 2, rank // (2 * heads))
    return 1 << (most.bit_length() - 1) if most else 0


def one_pass(shape: LayerShape, device: Device, context: int, batch: int) -> Cost:
    """One pass over joint latents in the identity gauge, over a cache that is written in place, in a CUDA graph.

    As many pairs are direct as a rank allows at most, a power of two, and real factors may have fewer; the others are
    expanded, by directions that each tile makes from queries and the factor.
    """
    tokens, own = float(batch * context), shape.heads // shape.kv_heads
    latents = ELEMENT * tokens * sum(shape.key_ranks)
    products = directions = turning = 0.0
    for rank, heads in zip(shape.key_ranks, shape.key_heads, strict=True):
        direct = _direct(shape, rank, heads)
        slow = heads * (shape.head_dim - 2 * direct)
        rows = max(_FEWEST_ROWS, heads * own)
        expanded = FUNCTIONS * rows if slow else 0
        products += 2 * tokens * (rows * (rank + 2 * heads * direct) + expanded * rank)
        directions += 2 * tokens / JOINT_TILE * expanded * slow * rank
        turning += 6 * tokens * 2 * heads * direct
    busy = (products + directions / device.narrow) / device.bf16 / TENSOR_EFFICIENCY
    seconds = max(_memory(latents, device), busy) + turning / device.vector / VECTOR_EFFICIENCY + 3 * KERNEL_SECONDS
    attention = Cost(latents, products + directions + turning, seconds)
    return _projections(shape.weights, 3, batch, device) + attention


def _projections(weights: int, kernels: int, batch: int, device: Device) -> Cost:
    """Products of the new tokens with weights that are read once."""
    moved, operations = float(ELEMENT * weights), 2.0 * batch * weights
    seconds = max(_memory(moved, device), operations / device.bf16 / TENSOR_EFFICIENCY)
    return Cost(moved, operations, seconds + kernels * KERNEL_SECONDS)


def _memory(moved: float, device: Device) -> float:
    return moved / device.memory / MEMORY_EFFICIENCY


def _rebuilt(ranks: Sequence[int], heads: Sequence[int]) -> int:
    """Sum over heads of the rank of their group."""
    return sum(rank * own for rank, own in zip(ranks, heads, strict=True))
