"""Fold one layer's factors, permutation and biases into the tensors of the compressed layer."""

from collections.abc import Sequence

from torch import Tensor

from recalkv.method.fusion import choose_value_layout, fused_attention_tensors
from recalkv.method.refit import LayerRefit
from recalkv.model.layers import LayerSource
from recalkv.model.spec import LayerSpec

__all__ = ["fuse_layer"]


def fuse_layer(
    source: LayerSource,
    index: int,
    spec: LayerSpec,
    permutation: Sequence[int],
    refit: LayerRefit,
    input_mean: Tensor | None = None,
) -> dict[str, Tensor]:
    """All tensors of one compressed decoder layer, by their names within it (Algorithm 1, Matrix_Fusion).

    ``input_mean`` is given where latents are quantised.
    """
    prefix = "self_attn."
    tensors = source.layer_tensors(index)
    dense = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    layout = choose_value_layout(source.geometry, refit.values.ranks, "auto")
    fused = fused_attention_tensors(
        dense, source.geometry, permutation, refit.keys, refit.values, layout, spec.joint, refit.output, input_mean
    )
    return tensors | {prefix + name: tensor for name, tensor in fused.items()}
