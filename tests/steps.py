"""Algorithm 1 on tiny models, step by step and once per session, and activations of plain forward passes."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recalkv.compression import Statistics, collect_statistics
from recalkv.method.allocation import allocate
from recalkv.method.factors import LayerFactors, factorize_layer
from recalkv.method.grouping import group_heads
from recalkv.method.methods import Method, resolve_method
from recalkv.method.problem import LayerProblem, LayerStatistics, value_groups
from recalkv.method.refit import LayerRefit, LayerStart, install, refit_layers
from recalkv.method.svd import group_columns
from recalkv.model.layers import ModuleSource
from recalkv.statistics.whitening import InputMoments, MomentAccumulator
from tests.tiny import calibration, dense_model, plain, windows


def method_of(metric: str | None = None, **changes: Any) -> Method:
    """Return the method of these compression parameters; by default, half the bytes and pairs of heads."""
    method = resolve_method(plain(**changes))
    return method if metric is None else dataclasses.replace(method, metric=metric)


@functools.cache
def statistics_of(family: str, samples: int = 8, length: int = 48) -> Statistics:
    """Collect all calibration statistics of a tiny model."""
    return collect_statistics(ModuleSource(dense_model(family)), windows(samples, length), calibration(), method_of())


class Steps:
    """A tiny model and the results of every step; models and results are shared, so tests change copies.

    Parameters
    ----------
    family
        Name in :data:`tests.tiny.ALL_FAMILIES`.
    samples, length
        Number and length of the calibration windows.
    changes
        Arguments of :func:`method_of`.
    """

    def __init__(self, family: str, samples: int = 6, length: int = 40, **changes: Any) -> None:
        self.model, self.ids = dense_model(family), windows(samples, length)
        self.source, self.method = ModuleSource(self.model), method_of(**changes)
        self.geometry, self.statistics = self.source.geometry, statistics_of(family, samples, length)

    @functools.cached_property
    def groups(self) -> list[list[list[int]]]:
        """Key groups of every layer."""
        return [group_heads(self.problem(index)).groups for index in range(self.geometry.layers)]

    @functools.cached_property
    def specs(self) -> list[Any]:
        """Spec of every layer, with its ranks."""
        energies = None
        if self.method.allocation == "water-filling":
            energies = [self.problem(index).energies(groups) for index, groups in enumerate(self.groups)]
        return allocate(self.geometry, self.statistics.scores, self.method, energies)[0]

    @functools.cached_property
    def factors(self) -> list[LayerFactors]:
        """Factors of every layer, fitted to the dense model's inputs."""
        layers = zip(range(self.geometry.layers), self.groups, self.specs, strict=True)
        return [factorize_layer(self.problem(index), groups, spec) for index, groups, spec in layers]

    @functools.cached_property
    def refits(self) -> list[LayerRefit]:
        """Refit of every layer, in batches of three windows."""
        return list(self.refit().values())

    def problem(self, index: int) -> LayerProblem:
        """Return the problem of one layer."""
        return LayerProblem.of(self.source, index, self.statistics.layer(index), self.method)

    def value_groups(self, index: int) -> list[list[int]]:
        """Return the value groups of one layer."""
        return value_groups(self.groups[index], self.method)

    def order(self, index: int) -> Tensor:
        """Return the columns of the projections in the order of the factors."""
        return torch.cat(group_columns(self.groups[index], self.geometry.head_dim))

    def refit(
        self, batch_size: int = 3, fitted: Callable[[int], LayerRefit | None] = lambda index: None
    ) -> dict[int, LayerRefit]:
        """Refit all layers except the fitted ones; return the refits by layer index."""
        return dict(refit_layers(self.source, self.ids, batch_size, self.start, self.method, fitted))

    def start(self, index: int) -> LayerStart:
        """Return the starting point of one layer's refit."""
        return LayerStart(self.factors[index], self.groups[index])

    def prefix(self, depth: int, refits: Sequence[LayerRefit] | None = None) -> Any:
        """Return a copy of the dense model whose first ``depth`` layers have the reconstructed weights."""
        model = copy.deepcopy(self.model)
        for index, refit in enumerate((refits or self.refits)[:depth]):
            install(model.model.layers[index], refit.keys, refit.values, refit.output, self.order(index))
        return model


@functools.cache
def steps(family: str, samples: int = 6, length: int = 40, **changes: Any) -> Steps:
    """Return the same :class:`Steps` for the same arguments."""
    return Steps(family, samples, length, **changes)


@torch.no_grad()
def watched(model: Any, ids: Tensor, index: int) -> dict[str, Tensor]:
    """Record the activations of one layer in a plain forward pass, (windows, length, .) float32.

    ``stream``: input of the layer; ``read``: input of its projections; ``contexts``: concatenated outputs of the heads;
    ``output``: output of the output projection without its bias.
    """
    layer, seen = model.model.layers[index], {}
    attention = layer.self_attn
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: seen.__setitem__("stream", args[0])),
        attention.k_proj.register_forward_hook(lambda _, args, out: seen.__setitem__("read", args[0])),
        attention.o_proj.register_forward_hook(lambda _, args, out: seen.update(contexts=args[0], output=out)),
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    if attention.o_proj.bias is not None:
        seen["output"] = seen["output"] - attention.o_proj.bias
    return seen


def inputs_of(model: Any, ids: Tensor, index: int) -> Tensor:
    """Return the inputs of one layer's projections in a plain forward pass, (tokens, m) float64."""
    return watched(model, ids, index)["read"].flatten(0, 1).double()


def moments_of(rows: Tensor) -> InputMoments:
    """Return the moments of (tokens, m) inputs."""
    sums = MomentAccumulator(rows.shape[1])
    sums.add(rows)
    return sums.finish("layer 0")


def problem_of(keys: Tensor, values: Tensor, rows: Tensor, head_dim: int, **changes: Any) -> LayerProblem:
    """Return the problem of these weights, with the plain moments of these inputs."""
    return LayerProblem(keys, values, LayerStatistics(moments_of(rows)), head_dim, method_of(**changes))


def left_out(energies: Sequence[Tensor], ranks: Sequence[int]) -> float:
    """Return the energy that these ranks discard."""
    return sum(float(own[rank:].sum()) for own, rank in zip(energies, ranks, strict=True))
