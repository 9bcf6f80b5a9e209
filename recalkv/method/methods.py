"""What each method does at each step: one line per method, resolved once, no branches on names elsewhere."""

from dataclasses import dataclass

from recalkv.errors import ParameterError
from recalkv.params import CompressionParams


@dataclass(frozen=True)
class Choices:
    """Choices that make up a compression method; most are parameters of their own, too.

    Attributes
    ----------
    metric
        What the factors minimize: the error of the ``weight``, of its outputs on calibration inputs
        (``activation``), or the rise of the ``loss``.
    joint
        Keys and values of a group share one latent: ``[W_k, W_v]`` is one matrix.
    grouping
        Heads that share a latent: ``neighbors`` or ``cka`` (HSR).
    whole_values
        One group for the whole value matrix; otherwise values are grouped like keys.
    allocation
        How the ranks share the budget: ``water-filling``, ``fisher`` or ``uniform``.
    refit
        What is fitted again after the compressed prefix: ``none``, ``values`` (OVC) or ``output``, which ``auto``
        leaves out in mixed bits up to a ratio of :data:`FIT_ABOVE`.
    """

    metric: str
    joint: bool
    grouping: str
    whole_values: bool
    allocation: str
    refit: str


METHODS = {
    # Beyond the paper: one metric for factors and ranks; the output projection takes up the rest.
    "loss-aware": Choices("loss", True, "cka", False, "water-filling", "output"),
    # The paper: HSR for keys, whole-matrix SVD and OVC for values.
    "recalkv": Choices("activation", False, "cka", True, "fisher", "values"),
    # Palu's G-LRD: grouped whitened SVD of both, neighboring heads.
    "palu": Choices("activation", False, "neighbors", False, "fisher", "none"),
    # Plain SVD of the weights, the same groups as palu.
    "svd": Choices("weight", False, "neighbors", False, "fisher", "none"),
}


FIT_ABOVE = 0.9
"""Ratio above which mixed bits leave so much out that a fit of the output gains; not at 0.875 (reports/frontier.md)."""

DAMPING = {"loss": 0.1}
"""``compression.damping`` where it is null, by metric. See docs/method.md for what it was measured to gain."""


@dataclass(frozen=True)
class Method(Choices):
    """A method and its numbers, which mean what :class:`recalkv.params.CompressionParams` says of them."""

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
        """Key/value heads that share a value latent: all of them, or the group size."""
        return kv_heads if self.whole_values else self.group_size


def resolve_method(parameters: CompressionParams, kv_heads: int | None = None) -> Method:
    """Return the method with every choice put in its place: ``auto`` is the method's own.

    Parameters
    ----------
    kv_heads
        Key/value heads of the model, which bound the size of a group; None to check the parameters alone.

    Raises
    ------
    ParameterError
        If two choices exclude each other.
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
