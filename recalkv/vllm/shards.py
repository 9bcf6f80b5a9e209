"""Tensor parallelism: each process holds its KV heads as whole groups of heads that share a code."""

from recalkv.codec.layer import LayerCodec
from recalkv.errors import ParameterError


def shard(codec: LayerCodec, rank: int, ranks: int) -> LayerCodec:
    """Return the codec of one rank's KV heads; with more ranks than heads, several ranks hold the same heads.

    Raises
    ------
    ParameterError
        If a group of heads would be split.
    """
    heads, size = codec.kv_heads, codec.kv_heads_per_code
    copies = max(1, ranks // heads)
    parts = ranks // copies
    if ranks % copies or heads % parts or (heads // parts) % size:
        fitting = [each for each in range(1, heads + 1) if heads % each == 0 and heads // each % size == 0]
        raise ParameterError(
            f"codec: tensor_parallel_size={ranks} would cut groups of {size} of the {heads} KV heads, which share "
            f"a code; sizes that fit are {', '.join(map(str, fitting))}. Fit with fewer heads per code "
            f"(`recalkv fit MODEL --heads 1`), or serve with one of those and more replicas."
        )
    if parts == 1:
        return codec
    own, groups = heads // parts, codec.groups // parts
    place = rank // copies
    inside, codes = slice(place * own, (place + 1) * own), slice(place * groups, (place + 1) * groups)
    return LayerCodec(
        codec.keys[codes], codec.values[codes], codec.key_mean[inside], codec.value_mean[inside], codec.rotation
    )
