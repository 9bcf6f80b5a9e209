"""Choices of each method at each step: one line per method, resolved once, so no other code branches on names."""

from dataclasses import dataclass

from recalkv.errors import ParameterError
from recalkv.params import CompressionParams


@dataclass(frozen=True)
class Choices:
    """Choices that define a compression method; most can also be set as parameters.

    Attributes
    ----------
    metric
        Objective of the factors: the error of the ``weight``, the error of its outputs on calibration inputs
        (``activation``), or the rise of the ``loss``.
    joint
        Whether keys and values of a group share one latent: ``[W_k, W_v]`` is factorized as one matrix.
    grouping
        Selection of heads that share a latent: ``neighbors`` or ``cka`` (HSR).
    whole_values
        Whether the whole value matrix is one group; otherwise values are grouped like keys.
    allocation
        Division of the budget among ranks: ``water-filling``, ``fisher`` or ``uniform``.
    refit
        Weights fitted again after the compressed prefix: ``none``, ``values`` (OVC) or ``output``, which ``auto``
        changes to ``none`` for mixed bits up to a ratio of :data:`FIT_ABOVE`.
    """

    metric: str
    joint: bool
    grouping: str
    whole_values: bool
    allocation: str
    refit: str


METHODS = {
    # Beyond the paper: one metric for factors and ranks; the output projection compensates part of the error.
    "loss-aware": Choices("loss", True, "cka", False, "water-filling", "output"),
    # The paper: HSR for keys, whole-matrix SVD and OVC for values.
    "recalkv": Choices("activation", False, "cka", True, "fisher", "values"),
    # Palu's G-LRD: grouped whitened SVD of both, neighboring heads.
    "palu": Choices("activation", False, "neighbors", False, "fisher", "none"),
    # Plain SVD of the weights, the same groups as palu.
    "svd": Choices("weight", False, "neighbors", False, "fisher", "none"),
}


FIT_ABOVE = 0.9
"""Ratio above which fitting the output helps with mixed bits; it does not at 0.875 (reports/frontier.md)."""

DAMPING = {"loss": 0.1}
"""Default of ``compression.damping`` by metric; see docs/method.md for its measured gain."""


@dataclass(frozen=True)
class Method(Choices):
    """Resolved method with its parameters, which are documented in :class:`recalkv.params.CompressionParams`."""

    ratio: float
    group_size: int
    bits: int | str
    rank_multiple: int
    damping: float
    exact_window: int

    @property
    def quantized(self) -> bool:
        """Whether latents are cached in fewer than 16 bits."""
        return self.bits != 16

    def value_group_size(self, kv_heads: int) -> int:
        """Return the number of KV heads that share a value latent: all of them, or the group size."""
        return kv_heads if self.whole_values else self.group_size


def resolve_method(parameters: CompressionParams, kv_heads: int | None = None) -> Method:
    """Resolve the parameters to a method, replacing each ``auto`` with the method's choice.

    Parameters
    ----------
    kv_heads
        Number of KV heads of the model, which bounds the group size; None to only check the parameters.

    Raises
    ------
    ParameterError
        If two choices are incompatible.
    """
    base = METHODS[parameters.method]
    joint = base.joint if parameters.joint == "auto" else parameters.joint
    allocation = base.allocation if parameters.allocation == "auto" else parameters.allocation
    mixed = allocation == "water-filling" and parameters.rank_multiple == 1
    bits = ("mixed" if mixed else 16) if parameters.bits == "auto" else parameters.bits
    refit = base.refit if parameters.refit == "auto" else parameters.refit
    if parameters.refit == "auto" and refit == "output" and bits == "mixed" and parameters.ratio <= FIT_ABOVE:
        refit = "none"
    method = Method(
        metric=base.metric,
        joint=joint,
        grouping=base.grouping if parameters.grouping == "auto" else parameters.grouping,
        whole_values=base.whole_values and not joint,
        allocation=allocation,
        refit=refit,
        ratio=parameters.ratio,
        group_size=parameters.group_size if kv_heads is None else min(parameters.group_size, kv_heads),
        bits=bits,
        rank_multiple=parameters.rank_multiple,
        damping=DAMPING.get(base.metric, 1e-6) if parameters.damping is None else parameters.damping,
        exact_window=parameters.exact_window,
    )
    if method.refit == "values" and joint:
        raise ParameterError(
            "compression.refit=values moves the value latent alone, but compression.joint=true shares it with the "
            "keys; set joint to false, or refit to output or none."
        )
    if method.bits == "mixed" and method.allocation != "water-filling":
        raise ParameterError(
            f"compression.bits=mixed decides ranks and bits by energies, which compression.allocation="
            f"{method.allocation} does not use; set allocation to water-filling, or method to loss-aware, or bits to a "
            f"number."
        )
    if method.quantized and method.rank_multiple != 1:
        raise ParameterError(
            f"compression.rank_multiple={method.rank_multiple} must be 1 with compression.bits={method.bits}: it is "
            f"for latents of 16 bits alone."
        )
    return method
