"""What each method does at each step: one line per method, no branches elsewhere."""

from dataclasses import dataclass

from recalkv.params import CompressionParams

__all__ = ["METHODS", "Method", "resolve_method"]


@dataclass(frozen=True)
class Method:
    """Choices that make up a compression method.

    Attributes
    ----------
    whiten
        Minimise the error of the projection's outputs on calibration inputs, not that of the weight.
    reorder
        Group key heads by CKA similarity (HSR); otherwise neighbours share a group.
    whole_values
        One group for the whole value matrix; otherwise values are grouped like keys.
    calibrate
        Offline value calibration (OVC).
    """

    whiten: bool
    reorder: bool
    whole_values: bool
    calibrate: bool


METHODS = {
    # The paper: HSR for keys, whole-matrix SVD and OVC for values.
    "recalkv": Method(whiten=True, reorder=True, whole_values=True, calibrate=True),
    # Palu's G-LRD: grouped whitened SVD of both, neighbouring heads.
    "palu": Method(whiten=True, reorder=False, whole_values=False, calibrate=False),
    # Plain SVD of the weights, the same groups as palu.
    "svd": Method(whiten=False, reorder=False, whole_values=False, calibrate=False),
}


def resolve_method(parameters: CompressionParams) -> Method:
    """Return the method with the two switches of the paper's ablation (``hsr``, ``ovc``) applied."""
    method = METHODS[parameters.method]
    return Method(
        whiten=method.whiten,
        reorder=method.reorder and parameters.hsr,
        whole_values=method.whole_values,
        calibrate=method.calibrate and parameters.ovc,
    )
