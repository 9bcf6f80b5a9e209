"""Fold one layer's factors, permutation and biases into the tensors of the compressed layer."""

from collections.abc import Sequence

from torch import Tensor

from recalkv.method.fusion import choose_value_layout, fused_attention_tensors
from recalkv.method.lowrank import LowRank
from recalkv.method.methods import resolve_method
from recalkv.model.layers import LayerSource
from recalkv.params import CompressionParams

__all__ = ["fuse_layer"]


def fuse_layer(
    source: LayerSource,
    index: int,
    permutation: Sequence[int],
    keys: LowRank,
    values: LowRank,
    output: Tensor | None,
    parameters: CompressionParams,
    input_mean: Tensor | None = None,
) -> dict[str, Tensor]:
    """All tensors of one compressed decoder layer, by their names within it (Algorithm 1, Matrix_Fusion).

    ``output`` is a refitted output projection, (h * d_h, m), or None for the dense one; ``input_mean`` is
    given where latents are quantised.
    """
    prefix = "self_attn."
    tensors = source.layer_tensors(index)
    dense = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    layout = choose_value_layout(source.geometry, values.ranks, parameters.value_mode)
    joint = resolve_method(parameters).joint
    fused = fused_attention_tensors(
        dense, source.geometry, permutation, keys, values, layout, joint, output, input_mean
    )
    return tensors | {prefix + name: tensor for name, tensor in fused.items()}
