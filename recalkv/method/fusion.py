"""Step 8, fold all constant transforms into the weights (paper, "Matrix Fusion" and HSR's reordering).

* The head permutation is folded into W_q, W_k, W_v and W_o: query heads and output rows move with their
  KV head, so nothing is permuted at run time.
* The value bias passes through attention unchanged (softmax weights sum to 1) and is folded into the output bias.
* ``R_v`` is fused into ``W_o`` where that is cheaper than applying both.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recalkv.method.lowrank import LowRank
from recalkv.method.methods import resolve_method
from recalkv.method.refit import LayerRefit
from recalkv.model.layers import LayerSource
from recalkv.model.spec import LatentSpec, LayerSpec
from recalkv.model.support import AttentionGeometry, head_order
from recalkv.params import CalibrationParams, CompressionParams, public_name

_CALIBRATION = {"text", "split", "samples", "length", "seed", "precision"}
_RESOLVED = ("metric", "joint", "grouping", "allocation", "refit", "bits", "damping")
"""Parameters whose ``auto`` the method resolves; the checkpoint records the resolved values."""


def stored_layers(
    geometry: AttentionGeometry, specs: Sequence[LayerSpec], permutations: Sequence[Sequence[int]]
) -> list[LayerSpec]:
    """Return the spec of every layer as stored in a checkpoint, with head permutation and value layout."""
    return [
        dataclasses.replace(
            spec, value_layout=choose_value_layout(geometry, spec.value_ranks), head_permutation=permutation
        )
        for spec, permutation in zip(specs, permutations, strict=True)
    ]


def stored_latents(
    source: LayerSource,
    specs: Sequence[LayerSpec],
    permutations: Sequence[Sequence[int]],
    parameters: CompressionParams,
    provenance: dict[str, str | None],
    calibration: CalibrationParams | None = None,
) -> LatentSpec:
    """Return the description of the latents that a checkpoint stores.

    Parameters
    ----------
    provenance
        ``name``, ``revision`` and ``fingerprint`` of the dense model.
    calibration
        Calibration parameters, for the model card; None if unknown.
    """
    geometry, names = source.geometry, source.layer_tensor_names(source.places[0])
    method = resolve_method(parameters, geometry.kv_heads)
    return LatentSpec(
        geometry,
        stored_layers(geometry, specs, permutations),
        key_group_size=method.group_size,
        value_group_size=method.value_group_size(geometry.kv_heads),
        joint=method.joint,
        biases=[letter for letter in "qkvo" if f"self_attn.{letter}_proj.bias" in names],
        latents_centered=method.quantized,
        exact_window=method.exact_window if method.quantized else 0,
        qk_norm="self_attn.k_norm.weight" in names,
        method=parameters.method,
        parameters=parameters.model_dump(mode="json") | {name: getattr(method, name) for name in _RESOLVED},
        source=provenance,
        calibration=None if calibration is None else _calibration_record(calibration),
    )


def _calibration_record(calibration: CalibrationParams) -> dict[str, Any]:
    """Return the calibration record of a checkpoint; local files by name only, since checkpoints are published."""
    settings = calibration.model_dump(mode="json", include=_CALIBRATION)
    return settings | {"text": [public_name(text) for text in settings["text"]]}


def fuse_layer(
    source: LayerSource,
    index: int,
    spec: LayerSpec,
    refit: LayerRefit,
    input_mean: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return all tensors of one compressed layer by their names in the layer (Algorithm 1, Matrix_Fusion).

    Tensors that the method does not change are returned as stored in the source.

    Parameters
    ----------
    spec
        Spec of the layer from :func:`stored_layers`.
    refit
        Final factors and output projection.
    input_mean : (m,) or None
        Mean attention input, given if latents are quantized.
    dtype
        Dtype of new tensors.
    """
    prefix, place = "self_attn.", source.places[index]
    given = {name.removeprefix(prefix): tensor for name, tensor in source.layer_tensors(place, prefix).items()}
    dense = _without_gate(given, source.geometry) if source.geometry.gated else given
    # Tensors from a store are on the CPU.
    keys, values = refit.keys.to(source.device), refit.values.to(source.device)
    output, mean = (None if part is None else part.to(source.device) for part in (refit.output, input_mean))
    order = head_order(source.config, source.geometry.head_dim)
    if order is not None:
        dense, keys = _in_rotary_order(dense, keys, torch.tensor(order))
    fused = fused_attention_tensors(dense, source.geometry, spec, keys, values, output, mean)
    alone = [name for name in fused if name in given and source.holds(prefix + name)]
    kept = {name for name in alone if torch.equal(fused[name], given[name])}
    new = {prefix + name: tensor.to(dtype) for name, tensor in fused.items() if name not in kept}
    return source.stored_layer(place, without=[prefix + name for name in given if name not in kept]) | new


def _without_gate(dense: Mapping[str, Tensor], geometry: AttentionGeometry) -> dict[str, Tensor]:
    """Split the query projection into queries and gate, head by head."""
    parts: dict[str, Tensor] = {}
    for kind in {"q_proj.weight", "q_proj.bias"} & dense.keys():
        by_head = dense[kind].unflatten(0, (geometry.heads, 2, geometry.head_dim))
        parts |= {kind: by_head[:, 0].flatten(0, 1), kind.replace("q_", "gate_"): by_head[:, 1].flatten(0, 1)}
    return {**dense, **parts}


def _in_rotary_order(dense: Mapping[str, Tensor], keys: LowRank, order: Tensor) -> tuple[dict[str, Tensor], LowRank]:
    """Reorder the dimensions of each head in queries, keys and their norms."""

    def ordered(tensor: Tensor, dim: int) -> Tensor:
        starts = torch.arange(0, tensor.shape[dim], len(order))
        return tensor.index_select(dim, (starts[:, None] + order).flatten().to(tensor.device))

    reordered = {"q_proj.weight", "q_proj.bias", "k_proj.bias", "q_norm.weight", "k_norm.weight"}
    moved = {name: ordered(tensor, 0) if name in reordered else tensor for name, tensor in dense.items()}
    return moved, LowRank(keys.down, [ordered(up, 1) for up in keys.up])


def fusion_rank_limit(geometry: AttentionGeometry) -> float:
    """Return the rank up to which fusing costs no more multiplications per token than R_v followed by W_o.

    ``h r m <= h r d_h + h d_h m``, so ``r <= d_h m / (m - d_h)``: about ``1.03 d_h`` for m = 4096.
    """
    m, d_h = geometry.hidden, geometry.head_dim
    return float("inf") if m <= d_h else d_h * m / (m - d_h)


def choose_value_layout(geometry: AttentionGeometry, value_ranks: Sequence[int]) -> str:
    """Return ``fused`` if every group's rank is within :func:`fusion_rank_limit`, else ``separate``.

    Sink logits or a gate always give ``separate``: a constant of the values then cannot move to the output, and a
    gate acts on the dimensions of each head.
    """
    return "fused" if geometry.values_pass and max(value_ranks) <= fusion_rank_limit(geometry) else "separate"


def head_columns(order: Sequence[int], head_dim: int) -> Tensor:
    """Return the column indices that reorder a projection's heads, (len(order) * d_h,) int64."""
    return (torch.tensor(order)[:, None] * head_dim + torch.arange(head_dim)).reshape(-1)


def query_order(permutation: Sequence[int], queries_per_kv: int) -> list[int]:
    """Return the order of the query heads when each moves with its KV head."""
    return [head * queries_per_kv + offset for head in permutation for offset in range(queries_per_kv)]


def fuse_output(value_up: Sequence[Tensor], output: Tensor, geometry: AttentionGeometry) -> Tensor:
    """Compute the fused output projection ``W~_o`` (paper eq. for W~_o, one block per query head).

    Parameters
    ----------
    value_up : list of (r_g, w_g)
        ``R_v`` of each group, columns in the order of the (permuted) heads.
    output : (h * d_h, m)
        ``W_o`` with rows in the same order.

    Returns
    -------
    (sum over query heads of r_g, m)
        Rows of query head i are ``R_v,g[:, kv(i)] W_o[i]``.
    """
    blocks = []
    rows = output.reshape(geometry.heads, geometry.head_dim, -1)
    for query, (group, offset) in enumerate(_group_of_query(value_up, geometry)):
        part = value_up[group][:, offset * geometry.head_dim : (offset + 1) * geometry.head_dim]
        blocks.append(part.double() @ rows[query].double())
    return torch.cat(blocks)


def fused_attention_tensors(
    dense: Mapping[str, Tensor],
    geometry: AttentionGeometry,
    spec: LayerSpec,
    keys: LowRank,
    values: LowRank,
    fitted_output: Tensor | None = None,
    input_mean: Tensor | None = None,
) -> dict[str, Tensor]:
    """Build all tensors of one :class:`recalkv.model.attention.LatentAttention`.

    Parameters
    ----------
    dense
        Tensors of the dense attention by their Hugging Face names (``q_proj.weight``, ...).
    spec
        Spec of the layer from :func:`stored_layers`; if it is ``joint``, ``keys.down`` serves keys and values.
    keys, values
        Factors with groups in the order of the permuted heads.
    fitted_output : (h * d_h, m) or None
        Replaces the dense W_o (:mod:`recalkv.method.output_fit`); rows in the model's head order.
    input_mean : (m,) or None
        Mean attention input. Its latents are subtracted before caching (quantized latents should carry no
        constant), and their reconstruction is added to the key bias and the output bias (or the value bias).

    Returns
    -------
    dict
        Float64 for sums and products; factors and tensors that were only reordered keep their dtype.
    """
    d_h = geometry.head_dim
    queries = head_columns(query_order(spec.head_permutation, geometry.queries_per_kv), d_h)
    heads = head_columns(spec.head_permutation, d_h)
    output = (dense["o_proj.weight"].T if fitted_output is None else fitted_output)[queries]  # [h * d_h, m]
    tensors = {"q_proj.weight": dense["q_proj.weight"][queries], "k_proj.weight": torch.cat(keys.down, dim=1).T}
    if not spec.joint:
        tensors["v_proj.weight"] = torch.cat(values.down, dim=1).T
    for number, up in enumerate(keys.up):
        tensors[f"key_up.{number}"] = up
    if spec.value_layout == "fused":
        tensors["o_proj.weight"] = fuse_output(values.up, output, geometry).T
    else:
        tensors["o_proj.weight"] = output.T
        for number, up in enumerate(values.up):
            tensors[f"value_up.{number}"] = up
    for name in {"q_proj.bias", "gate_proj.weight", "gate_proj.bias"} & dense.keys():
        tensors[name] = dense[name][queries]
    if "k_proj.bias" in dense:
        tensors["key_bias"] = dense["k_proj.bias"][heads]
    bias = dense.get("o_proj.bias")
    constant = dense["v_proj.bias"][heads].double() if "v_proj.bias" in dense else None
    if input_mean is not None:
        tensors["k_proj.bias"], key_mean = _centered(input_mean, keys)
        center, value_mean = _centered(input_mean, values)
        if not spec.joint:
            tensors["v_proj.bias"] = center
        tensors["key_bias"] = _sum(tensors.get("key_bias"), key_mean)
        constant = _sum(constant, value_mean)
    if constant is not None and not geometry.values_pass:
        tensors["value_bias"] = constant
    elif constant is not None:
        per_head = constant.reshape(geometry.kv_heads, d_h)
        through = per_head.repeat_interleave(geometry.queries_per_kv, dim=0).reshape(-1) @ output.double()
        bias = through if bias is None else bias.double() + through
    if bias is not None:
        tensors["o_proj.bias"] = bias
    for norm, order in (("q_norm.weight", queries), ("k_norm.weight", heads)):
        if norm in dense:
            # The norm's weight covers one head, or all heads together.
            tensors[norm] = dense[norm] if len(dense[norm]) == d_h else dense[norm][order]
    if geometry.sink_logits:
        tensors["sinks"] = dense["sinks"][query_order(spec.head_permutation, geometry.queries_per_kv)]
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _sum(first: Tensor | None, second: Tensor) -> Tensor:
    """Return the float64 sum; the first summand may be None."""
    return second.double() if first is None else first.double() + second.double()


def _centered(input_mean: Tensor, factors: LowRank) -> tuple[Tensor, Tensor]:
    """Return the bias that subtracts the mean from the latents, and the contribution of the mean to the outputs."""
    means = [input_mean.double() @ left.double() for left in factors.down]
    constants = [mean @ right.double() for mean, right in zip(means, factors.up, strict=True)]
    return -torch.cat(means), torch.cat(constants)


def _group_of_query(value_up: Sequence[Tensor], geometry: AttentionGeometry) -> list[tuple[int, int]]:
    """Return for each (permuted) query head its value group and the position of its KV head in that group."""
    places = [
        (group, offset) for group, up in enumerate(value_up) for offset in range(up.shape[1] // geometry.head_dim)
    ]
    return [place for place in places for _ in range(geometry.queries_per_kv)]
