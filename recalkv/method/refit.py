"""Calibration under error: each layer is fitted again on inputs that passed through the compressed ones."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recalkv.method.allocation import LayerRanks
from recalkv.method.basis import quantizable_factors
from recalkv.method.factors import LayerFactors, LayerStatistics, factorize_layer, input_mean, key_weight, value_weight
from recalkv.method.groups import value_groups
from recalkv.method.lowrank import LowRank
from recalkv.method.methods import resolve_method
from recalkv.method.output_fit import OutputMoments, fit_output, output_error
from recalkv.method.ovc import calibrate_values, dense_output_target
from recalkv.method.svd import group_columns, relative_error
from recalkv.model.layers import LayerSource, attention_input, run_layer
from recalkv.params import CalibrationParams, CompressionParams
from recalkv.statistics import distributed
from recalkv.statistics.loss_metric import LossMoments
from recalkv.statistics.whitening import InputMoments, MomentAccumulator, damped
from recalkv.store.resume import Pass

__all__ = ["LayerRefit", "in_model_order", "install", "refit_layers"]


@dataclass(frozen=True)
class LayerRefit:
    """One layer after calibration.

    Attributes
    ----------
    keys, values
        Factors, refitted or as they were.
    output : (h * d_h, m) float64 or None
        Refitted output projection, rows in the model's head order.
    error_before, error_after : float
        Relative squared error of what was refitted (value outputs, key and value outputs together, or
        the attention's output), against the target, behind the compressed prefix. Without a refit both
        are that of the values on the dense model's inputs.
    """

    keys: LowRank
    values: LowRank
    output: Tensor | None
    error_before: float
    error_after: float
    input_mean: Tensor | None = None


@torch.no_grad()
def refit_layers(
    source: LayerSource,
    windows: Tensor,
    calibration: CalibrationParams,
    starts: Callable[[int], LayerFactors],
    statistics: Callable[[int], LayerStatistics],
    groups: Sequence[Sequence[Sequence[int]]],
    ranks: Sequence[LayerRanks],
    parameters: CompressionParams,
    work: Pass | None = None,
) -> Iterator[LayerRefit]:
    """Yield every layer after the method's refit (Algorithm 1, Offline_Calibration, for ``values``).

    One pass, in order: a layer's statistics come from inputs that passed through the layers compressed
    and refitted so far. Targets of the dense model run it beside. Several processes share the windows, and
    each yields the fit to all.

    Parameters
    ----------
    starts
        Factors of a layer.
    statistics
        Statistics of a layer on the dense model; ``factors`` takes the output gradients from there.
    groups
        Heads of each layer's key groups.
    ranks
        Ranks of each layer; where they say that latents are quantised, the factors are in the basis for it.
    work
        Where to start, and what keeps both streams for the next run.
    """
    work = work or Pass()
    refits = _refit_layers(source, windows, calibration, starts, statistics, groups, ranks, parameters, work)
    for index, refit in enumerate(refits, start=work.done):
        if ranks[index].key_segments is None:
            yield refit
            continue
        weights = key_weight(source, index), value_weight(source, index)
        keys, values = quantizable_factors(
            refit.keys, refit.values, weights, statistics(index), groups[index], ranks[index],
            source.geometry.head_dim, parameters, index,
        )  # fmt: skip
        yield replace(refit, keys=keys, values=values, input_mean=input_mean(statistics(index), parameters))


def _refit_layers(
    source: LayerSource,
    windows: Tensor,
    calibration: CalibrationParams,
    starts: Callable[[int], LayerFactors],
    statistics: Callable[[int], LayerStatistics],
    groups: Sequence[Sequence[Sequence[int]]],
    ranks: Sequence[LayerRanks],
    parameters: CompressionParams,
    work: Pass,
) -> Iterator[LayerRefit]:
    method = resolve_method(parameters)
    if method.refit == "none":
        for index in range(work.done, source.num_layers):
            start = starts(index)
            yield LayerRefit(start.keys, start.values, None, start.value_error, start.value_error)
            work.offer(index + 1, dict)
        return
    used = windows[: parameters.refit_samples]
    mine, saved = distributed.share(len(used)), work.state()
    follow_dense = method.refit_target != "same-input"
    if saved is None:
        hidden = list(source.embed(used[mine.start : mine.stop], calibration.batch_size))
        dense_hidden = list(hidden) if follow_dense else None
    else:
        hidden = [states.to(source.device) for states in saved["hidden"]]
        dense_hidden = [states.to(source.device) for states in saved["dense"]] if follow_dense else None
    for index in range(work.done, source.num_layers):
        order = torch.cat(group_columns(groups[index], source.geometry.head_dim))
        with source.layer(index) as layer:
            if method.refit == "output":
                refit = _refit_output(source, layer, index, hidden, dense_hidden, starts(index), order, parameters)
            else:
                refit = _refit_factors(
                    source, layer, index, hidden, dense_hidden, starts(index), statistics(index), groups[index],
                    ranks[index], calibration, parameters,
                )  # fmt: skip
            # The output's fit advances both streams itself.
            if index + 1 < source.num_layers and method.refit != "output":
                if dense_hidden is not None:
                    dense_hidden = [run_layer(source, layer, index, states) for states in dense_hidden]
                install(layer, refit.keys, refit.values, refit.output, order)
                hidden = [run_layer(source, layer, index, states) for states in hidden]
        yield refit
        if index + 1 < source.num_layers:
            work.offer(index + 1, partial(dict, hidden=hidden, dense=dense_hidden or []))


def _refit_factors(
    source: LayerSource,
    layer: Any,
    index: int,
    hidden: list[Tensor],
    dense_hidden: list[Tensor] | None,
    start: LayerFactors,
    statistics: LayerStatistics,
    groups: Sequence[Sequence[int]],
    ranks: LayerRanks,
    calibration: CalibrationParams,
    parameters: CompressionParams,
) -> LayerRefit:
    """Fit value factors (OVC), or key and value factors, to inputs behind the compressed prefix."""
    width, d_h = source.geometry.hidden, source.geometry.head_dim
    moments = MomentAccumulator(width, source.device)
    sinks = torch.zeros(width, width, dtype=torch.float64, device=source.device)
    cross, sink_sum = torch.zeros_like(sinks), torch.zeros_like(sinks[0])
    skip = calibration.sink_tokens
    for batch, states in enumerate(hidden):
        inputs = attention_input(layer, states)
        moments.add(inputs)
        first = inputs[:, :skip].flatten(0, 1)
        sinks += first.T @ first
        sink_sum += first.sum(dim=0, dtype=torch.float64)
        if dense_hidden is not None:
            dense_inputs = attention_input(layer, dense_hidden[batch])
            cross += inputs.flatten(0, 1).T @ dense_inputs.flatten(0, 1)
    for part in (sinks, cross, sink_sum):
        distributed.total(part)
    collected = moments.finish(f"layer {index} (behind the compressed prefix)")
    gram = collected.gram
    attention = layer.self_attn
    weights = (attention.k_proj.weight.T.double(), attention.v_proj.weight.T.double())
    targets = list(weights)
    if dense_hidden is not None:
        aimed = [dense_output_target(gram, cross / collected.tokens, w, parameters.damping) for w in weights]
        targets = [w + parameters.refit_blend * (aim - w) for w, aim in zip(weights, aimed, strict=True)]
    order = torch.cat(group_columns(groups, d_h))
    if resolve_method(parameters).refit == "values":
        columns = group_columns(value_groups([head for group in groups for head in group], parameters), d_h)
        moment = collected.centred_gram() if resolve_method(parameters).centre else gram
        fitted = calibrate_values(
            start.values, columns, targets[1], moment, parameters.damping, parameters.ovc_iterations
        )
        mean = collected.mean if resolve_method(parameters).centre else None
        values = fitted.factors.about(mean, targets[1][:, torch.cat(columns)])
        return LayerRefit(start.keys, values, None, fitted.error_before, fitted.error_after)
    loss = statistics.loss
    if loss is not None:
        # Gradients are not at hand here: tokens count alike, the sinks as in the fisher stage.
        windows = int(distributed.total(torch.tensor(sum(map(len, hidden)))))
        count = max(1, skip * windows)
        share = calibration.sink_weight if skip else 0.0
        weighted = gram + share * sinks / count
        offset = collected.mean / 2
        offset = offset + share * (sink_sum / count - offset)
        loss = LossMoments(weighted, loss.key_gradient, loss.value_gradient, loss.tokens, collected.mean, offset)
    behind = LayerStatistics(InputMoments(gram, collected.mean, collected.tokens), loss)
    fitted_factors = factorize_layer((targets[0], targets[1]), behind, groups, ranks, d_h, parameters)

    def error(factors: LayerFactors) -> float:
        both = torch.cat([factors.keys.dense(), factors.values.dense()], dim=1)
        return relative_error(
            torch.cat([target[:, order] for target in targets], dim=1), both, damped(gram, parameters.damping)
        )

    return LayerRefit(fitted_factors.keys, fitted_factors.values, None, error(start), error(fitted_factors))


def _refit_output(
    source: LayerSource,
    layer: Any,
    index: int,
    hidden: list[Tensor],
    dense_hidden: list[Tensor] | None,
    start: LayerFactors,
    order: Tensor,
    parameters: CompressionParams,
) -> LayerRefit:
    """Fit W_o to the contexts of compressed keys and values, and advance both streams by this layer."""
    method = resolve_method(parameters)
    attention = layer.self_attn
    blend = parameters.refit_blend if dense_hidden is not None else 0.0
    targets = [torch.zeros_like(states) for states in hidden]
    for batch, states in enumerate(hidden):
        if blend < 1:
            targets[batch] += (1 - blend) * _run_and_watch(source, layer, index, states)[1]
        if dense_hidden is not None:
            dense = dense_hidden[batch]
            _, aim, dense_hidden[batch] = _run_and_watch(source, layer, index, dense)
            if method.refit_target == "residual":
                aim = aim + (dense - states)
            targets[batch] += blend * aim
    weight = attention.o_proj.weight.T.double()
    install(layer, start.keys, start.values, None, order)
    moments = OutputMoments.zeros(weight.shape[0], weight.shape[1], source.device)
    contexts = []
    for states, target in zip(hidden, targets, strict=True):
        contexts.append(_contexts(source, layer, index, states))
        moments.add(contexts[-1], target)
    moments = moments.total()
    fitted = fit_output(moments, weight, parameters.refit_ridge)
    install(layer, start.keys, start.values, fitted, order)
    if index + 1 < source.num_layers:
        for batch, states in enumerate(hidden):
            hidden[batch] = _run_from_contexts(source, layer, index, states, contexts[batch])
    return LayerRefit(start.keys, start.values, fitted, output_error(moments, weight), output_error(moments, fitted))


def _run_and_watch(source: LayerSource, layer: Any, index: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run a layer: contexts before its output projection, what that adds without its bias, the layer's output."""
    seen: list[tuple[Tensor, Tensor]] = []
    projection = layer.self_attn.o_proj
    hook = projection.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    try:
        result = run_layer(source, layer, index, states)
    finally:
        hook.remove()
    contexts, output = (part.float() for part in seen[0])
    return contexts, output if projection.bias is None else output - projection.bias, result


def _contexts(source: LayerSource, layer: Any, index: int, states: Tensor) -> Tensor:
    """The heads' outputs side by side, (batch, length, h * d_h) float32; nothing after them is computed."""
    seen: list[Tensor] = []

    def stop(module: Any, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])
        raise _Reached

    hook = layer.self_attn.o_proj.register_forward_pre_hook(stop)
    try:
        with contextlib.suppress(_Reached):
            run_layer(source, layer, index, states)
    finally:
        hook.remove()
    return seen[0].float()


def _run_from_contexts(source: LayerSource, layer: Any, index: int, states: Tensor, contexts: Tensor) -> Tensor:
    """Run a layer whose attention has already been done up to the output projection."""
    attention = layer.self_attn
    attention.forward = lambda *args, **kwargs: (attention.o_proj(contexts), None)
    try:
        return run_layer(source, layer, index, states)
    finally:
        del attention.forward


class _Reached(Exception):  # noqa: N818
    """Ends a forward pass where the rest is not wanted."""


def install(layer: Any, keys: LowRank, values: LowRank, output: Tensor | None, order: Tensor) -> None:
    """Put the reconstructed key and value weights, and a refitted output projection, into a dense layer.

    Again into the same layer, it starts from the layer's own biases.

    Parameters
    ----------
    output : (h * d_h, m) or None
        Rows in the model's head order.
    order : (n,)
        Columns of the projections in the order of the factors.
    """
    attention = layer.self_attn
    for projection, factors in ((attention.k_proj, keys), (attention.v_proj, values)):
        projection.weight.data = in_model_order(factors.dense(), order).T.to(projection.weight)
        if factors.constant is not None:
            if not hasattr(projection, "dense_bias"):
                projection.dense_bias = projection.bias
            bias = in_model_order(factors.constant, order).to(projection.weight)
            own = projection.dense_bias
            projection.bias = torch.nn.Parameter(bias if own is None else bias + own, requires_grad=False)
    if output is not None:
        attention.o_proj.weight.data = output.T.to(attention.o_proj.weight)


def in_model_order(columns: Tensor, order: Tensor) -> Tensor:
    """Columns (..., n) in the order of the factors, back in the model's head order."""
    restored = torch.empty_like(columns)
    restored[..., order] = columns
    return restored
