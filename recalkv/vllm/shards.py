"""Tensor parallelism: every process owns whole groups of heads, with their latents, queries and part of W_o.

What the processes give adds up to the layer's output.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from recalkv.errors import ParameterError
from recalkv.model.spec import LatentSpec

__all__ = ["shard", "shard_weight"]


def shard(spec: LatentSpec, rank: int, ranks: int) -> LatentSpec:
    """What one of ``ranks`` processes holds of a compressed model.

    Raises
    ------
    ParameterError
        If a group of heads, whose latent is one, would be cut.
    """
    if ranks == 1:
        return spec
    heads = spec.geometry.kv_heads
    own, rest = divmod(heads, ranks)
    if rest:
        raise ParameterError(
            f"tensor_parallel_size={ranks} does not divide the model's {heads} key/value heads; use {_listed(heads)}."
        )
    if own % spec.key_group_size or own % spec.value_group_size:
        size = max(spec.key_group_size, spec.value_group_size)
        raise ParameterError(
            f"tensor_parallel_size={ranks} would cut groups of {size} of the {heads} key/value heads, whose latents "
            f"belong to one process; group sizes that fit are {_listed(own)}: compress with one of them "
            f"(--group-size), or serve with a smaller tensor_parallel_size and more replicas."
        )
    geometry = dataclasses.replace(spec.geometry, heads=spec.geometry.heads // ranks, kv_heads=own)
    layers = []
    for layer in spec.layers:
        parts: dict[str, Any] = {
            name: None if groups is None else groups[_groups(groups, rank, ranks)]
            for name in ("key_ranks", "value_ranks", "key_segments", "value_segments")
            for groups in [getattr(layer, name)]
        }
        chain = layer.parts[_groups(layer.parts, rank, ranks)]
        layers.append(dataclasses.replace(layer, **parts, parts=chain, head_permutation=()))
    return dataclasses.replace(spec, geometry=geometry, layers=layers)


def shard_weight(
    spec: LatentSpec, layer: int, rank: int, ranks: int, name: str, weight: Tensor
) -> tuple[str, Tensor] | None:
    """One process's part of a tensor of an attention module.

    Parameters
    ----------
    spec
        Of the whole model.
    layer
        Index of the decoder layer.
    name
        Of the tensor, within the module.
    weight
        As the checkpoint has it.

    Returns
    -------
    Its name in the process's module, and the part; None where it is another's.
    """
    geometry, own = spec.geometry, spec.layers[layer]
    module, _, rest = name.partition(".")
    queries = [heads * geometry.queries_per_kv for heads in spec.value_heads]
    if module in ("key_up", "value_up", "feedback"):
        groups = _groups(spec.value_heads if module == "value_up" else spec.key_heads, rank, ranks)
        number = int(rest)
        return (f"{module}.{number - groups.start}", weight) if groups.start <= number < groups.stop else None
    if module == "o_proj":
        if rest == "bias":
            # Outputs are added up.
            return name, weight if rank == 0 else weight.new_zeros(weight.shape)
        widths = own.value_ranks if own.value_layout == "fused" else [geometry.head_dim] * len(queries)
        columns = [count * width for count, width in zip(queries, widths, strict=True)]
        return name, weight[:, _places(columns, rank, ranks)]
    rows = {
        "q_proj": [count * geometry.head_dim for count in queries],
        "k_proj": own.key_ranks,
        "v_proj": own.value_ranks,
        "gate_proj": [count * geometry.head_dim for count in queries],
        "sinks": queries,
        "key_bias": [heads * geometry.head_dim for heads in spec.key_heads],
        "value_bias": [heads * geometry.head_dim for heads in spec.value_heads],
    }
    return name, weight[_places(rows[module], rank, ranks)] if module in rows else weight


def _groups(groups: Sequence[Any], rank: int, ranks: int) -> slice:
    """A process's groups."""
    count = len(groups) // ranks
    return slice(rank * count, (rank + 1) * count)


def _places(sizes: Sequence[int], rank: int, ranks: int) -> slice:
    """Where a process's groups of these sizes are, one after the other."""
    groups = _groups(sizes, rank, ranks)
    start = sum(sizes[: groups.start])
    return slice(start, start + sum(sizes[groups]))


def _listed(number: int) -> str:
    """Its divisors."""
    return ", ".join(str(each) for each in range(1, number + 1) if number % each == 0)
