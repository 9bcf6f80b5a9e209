"""What each method does at each step: one line per method, no branches elsewhere."""

from dataclasses import dataclass

from recalkv.errors import ParameterError
from recalkv.params import CompressionParams

__all__ = ["METHODS", "Method", "resolve_method"]


@dataclass(frozen=True)
class Method:
    """Choices that make up a compression method; each is a parameter of its own, too.

    Attributes
    ----------
    metric
        What the factors minimise: the error of the ``weight``, of its outputs on calibration inputs
        (``activation``), or the rise of the ``loss``.
    joint
        Keys and values of a group share one latent: ``[W_k, W_v]`` is one matrix.
    grouping
        Heads that share a latent: ``neighbours``, ``cka`` (HSR) or ``tail-energy``.
    whole_values
        One group for the whole value matrix; otherwise values are grouped like keys.
    allocation
        How the ranks share the budget: ``water-filling``, ``fisher`` or ``uniform``.
    refit
        What is fitted again behind the compressed prefix: ``none``, ``values`` (OVC), ``factors`` or
        ``output``.
    refit_target
        ``same-input``, ``dense-output`` or ``residual``; ``auto`` until it is resolved from ``refit``.
    centre
        Keys and values of the mean input are constants, which cost no rank; factors are those of the rest.
    """

    metric: str
    joint: bool
    grouping: str
    whole_values: bool
    allocation: str
    refit: str
    refit_target: str = "auto"
    centre: bool = False


METHODS = {
    # Beyond the paper: one metric for factors, ranks and groups; the output projection takes up the rest.
    "loss-aware": Method("loss", True, "tail-energy", False, "water-filling", "output"),
    # The paper: HSR for keys, whole-matrix SVD and OVC for values.
    "recalkv": Method("activation", False, "cka", True, "fisher", "values"),
    # Palu's G-LRD: grouped whitened SVD of both, neighbouring heads.
    "palu": Method("activation", False, "neighbours", False, "fisher", "none"),
    # Plain SVD of the weights, the same groups as palu.
    "svd": Method("weight", False, "neighbours", False, "fisher", "none"),
}

# What a fit aims at where the user does not say.
_TARGETS = {"none": "same-input", "values": "same-input", "factors": "same-input", "output": "residual"}


def resolve_method(parameters: CompressionParams) -> Method:
    """Return the method with every choice that is not ``auto`` put in its place.

    Raises
    ------
    ParameterError
        If two choices exclude each other.
    """
    method = METHODS[parameters.method]
    joint = method.joint if parameters.joint == "auto" else parameters.joint
    refit = method.refit if parameters.refit == "auto" else parameters.refit
    target: str = parameters.refit_target
    if target == "auto":
        target = _TARGETS[refit]
    resolved = Method(
        metric=method.metric if parameters.metric == "auto" else parameters.metric,
        joint=joint,
        grouping=method.grouping if parameters.grouping == "auto" else parameters.grouping,
        whole_values=method.whole_values and not joint,
        allocation=method.allocation if parameters.allocation == "auto" else parameters.allocation,
        refit=refit,
        refit_target=target,
        centre=method.centre if parameters.centre == "auto" else parameters.centre,
    )
    if resolved.refit == "values" and joint:
        raise ParameterError(
            "compression.refit=values moves the value latent alone, but compression.joint=true shares it with the "
            "keys; set joint to false, or refit to factors, output or none."
        )
    if target == "residual" and refit != "output":
        raise ParameterError(
            f"compression.refit_target=residual is for compression.refit=output, not {refit}; set it to same-input "
            f"or dense-output."
        )
    return resolved
