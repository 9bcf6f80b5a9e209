"""Offline_Calibration and beyond: refit each layer on inputs that passed through the layers compressed before it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recalkv.method.factors import LayerFactors
from recalkv.method.lowrank import LowRank
from recalkv.method.methods import Method
from recalkv.method.output_fit import OutputMoments, fit_output, output_error
from recalkv.method.ovc import calibrate_values
from recalkv.method.problem import value_groups
from recalkv.method.svd import group_columns
from recalkv.model.layers import LayerSource, attention_input, run_layer
from recalkv.statistics.whitening import MomentAccumulator


@dataclass(frozen=True)
class LayerStart:
    """Starting point of a layer's refit.

    Attributes
    ----------
    factors
        Factors of keys and values for the dense model's inputs.
    groups
        Heads of each key group.
    """

    factors: LayerFactors
    groups: Sequence[Sequence[int]]


@dataclass(frozen=True)
class LayerRefit:
    """One layer after the refit.

    Attributes
    ----------
    keys, values
        Factors, refitted or unchanged, float32.
    output : (h * d_h, m) float32 or None
        Refitted output projection, rows in the model's head order.
    error_before, error_after : float
        Relative squared error of the refitted outputs (of values or of attention) against the target, on inputs from
        the compressed prefix. Without a refit both are the error of the values on the dense model's inputs.
    """

    keys: LowRank
    values: LowRank
    output: Tensor | None
    error_before: float
    error_after: float


@torch.no_grad()
def refit_layers(
    source: LayerSource,
    windows: Tensor,
    batch_size: int,
    starts: Callable[[int], LayerStart],
    method: Method,
    fitted: Callable[[int], LayerRefit | None] = lambda index: None,
) -> Iterator[tuple[int, LayerRefit]]:
    """Yield every layer after the method's refit (Algorithm 1, Offline_Calibration, for ``values``).

    One pass in layer order: a layer's statistics come from inputs that passed through the layers compressed and
    refitted so far. The dense model runs alongside if its residual stream is the target.

    Parameters
    ----------
    windows : (samples, length) int64
        Calibration windows.
    batch_size
        Windows per step; affects memory, not results.
    starts
        Returns the starting point of a layer.
    fitted
        Returns the finished refit of a layer, which is then reused and not yielded, or None.
    """
    if method.refit == "none":
        for number in range(source.num_layers):
            if fitted(number) is None:
                own = starts(number).factors
                yield number, LayerRefit(own.keys, own.values, None, own.value_error, own.value_error)
        return
    hidden = source.embed(windows, batch_size)
    dense_hidden = list(hidden) if method.refit == "output" else []
    for place, index in source.decoder_layers():
        if place > source.places[-1]:
            return
        if index is None:
            with source.layer(place) as between:
                for stream in (hidden, dense_hidden):
                    stream[:] = [run_layer(source, between, place, states) for states in stream]
            continue
        refit = done = fitted(index)
        last = index + 1 == source.num_layers
        if last and done is not None:
            return
        start = starts(index)
        order = torch.cat(group_columns(start.groups, source.geometry.head_dim))
        with source.layer(place) as dense_layer:
            layer = _Layer(source, dense_layer, place, order)
            if method.refit == "output":
                contexts, refit = _fit_output(layer, hidden, dense_hidden, start.factors, refit)
                if not last:
                    pairs = zip(hidden, contexts, strict=True)
                    hidden = [layer.run_from_contexts(states, own) for states, own in pairs]
            else:
                if refit is None:
                    refit = _fit_values(layer, hidden, start, method)
                layer.install(refit.keys, refit.values)
                hidden = [] if last else [layer.run(states) for states in hidden]
        if done is None:
            yield index, refit


def _fit_values(layer: "_Layer", hidden: Sequence[Tensor], start: LayerStart, method: Method) -> LayerRefit:
    """Fit the value factors to inputs from the compressed prefix (OVC)."""
    moments = MomentAccumulator(layer.source.geometry.hidden, layer.source.device)
    for states in hidden:
        moments.add(attention_input(layer.source, layer.layer, states))
    gram = moments.finish(f"layer {layer.place} (after the compressed prefix)").gram
    weight = layer.attention.v_proj.weight.T.double()
    columns = group_columns(value_groups(start.groups, method), layer.source.geometry.head_dim)
    fit = calibrate_values(start.factors.values.to(gram.device), columns, weight, gram, method.damping)
    return LayerRefit(start.factors.keys, fit.factors.float(), None, fit.error_before, fit.error_after)


def _fit_output(
    layer: "_Layer", hidden: Sequence[Tensor], dense_hidden: list[Tensor], start: LayerFactors, done: LayerRefit | None
) -> tuple[list[Tensor], LayerRefit]:
    """Fit W_o to the contexts of compressed keys and values, and install all three; return contexts by batch and refit.

    The target is what the layer should add to the compressed stream or, in models with a norm after attention, the
    dense projection's output. It is computed for one batch at a time as the dense stream advances.
    """
    family = layer.source.family
    scale = family.residual_scale(layer.source.config)
    weight = layer.attention.o_proj.weight.T.double()
    moments = OutputMoments.zeros(weight.shape[0], weight.shape[1], layer.source.device)
    dense = layer.weights()
    layer.install(start.keys, start.values)
    compressed, contexts = layer.weights(), []
    for batch, states in enumerate(hidden):
        layer.put(dense)
        before = dense_hidden[batch]
        added, dense_hidden[batch] = layer.run_and_watch(before)
        layer.put(compressed)
        contexts.append(layer.contexts(states))
        if done is None:
            moments.add(contexts[-1], added if family.post_norm else added + (before - states) / scale)
    if done is None:
        output = fit_output(moments, weight)
        errors = output_error(moments, weight), output_error(moments, output)
        done = LayerRefit(start.keys, start.values, output.float(), *errors)
    layer.install(start.keys, start.values, done.output)
    return contexts, done


class _Reached(Exception):  # noqa: N818
    """Ends a forward pass early."""


@dataclass(frozen=True)
class _Layer:
    """A materialized dense layer that can be run whole, or in two halves split at its output projection."""

    source: LayerSource
    layer: Any
    place: int
    order: Tensor

    @property
    def attention(self) -> Any:
        return self.layer.self_attn

    def install(self, keys: LowRank, values: LowRank, output: Tensor | None = None) -> None:
        install(self.layer, keys, values, output, self.order)

    def weights(self) -> tuple[Tensor, Tensor]:
        return self.attention.k_proj.weight.data, self.attention.v_proj.weight.data

    def put(self, weights: tuple[Tensor, Tensor]) -> None:
        self.attention.k_proj.weight.data, self.attention.v_proj.weight.data = weights

    def run(self, states: Tensor) -> Tensor:
        return run_layer(self.source, self.layer, self.place, states)

    def run_and_watch(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run the layer; return the output projection's output without bias, and the layer's output."""
        seen: list[Tensor] = []
        projection = self.attention.o_proj
        hook = projection.register_forward_hook(lambda module, args, output: seen.append(output))
        try:
            result = self.run(states)
        finally:
            hook.remove()
        output = seen[0].float()
        return output if projection.bias is None else output - projection.bias, result

    def contexts(self, states: Tensor) -> Tensor:
        """Return the concatenated head outputs, (batch, length, h * d_h) float32, and stop the layer there."""
        seen: list[Tensor] = []

        def stop(module: Any, args: tuple[Tensor, ...]) -> None:
            seen.append(args[0])
            raise _Reached

        hook = self.attention.o_proj.register_forward_pre_hook(stop)
        try:
            with contextlib.suppress(_Reached):
                self.run(states)
        finally:
            hook.remove()
        return seen[0].float()

    def run_from_contexts(self, states: Tensor, contexts: Tensor) -> Tensor:
        """Run the layer from contexts that are already computed, starting at the output projection."""
        attention = self.attention
        attention.forward = lambda *args, **kwargs: (attention.o_proj(contexts), None)
        try:
            return self.run(states)
        finally:
            del attention.forward


def install(layer: Any, keys: LowRank, values: LowRank, output: Tensor | None, order: Tensor) -> None:
    """Install the reconstructed key and value weights, and a refitted output projection, in a dense layer.

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
    if output is not None:
        attention.o_proj.weight.data = output.T.to(attention.o_proj.weight)


def in_model_order(columns: Tensor, order: Tensor) -> Tensor:
    """Reorder columns (..., n) from the order of the factors to the model's head order."""
    restored = torch.empty_like(columns)
    restored[..., order] = columns
    return restored
