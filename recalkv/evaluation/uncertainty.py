"""Standard errors of means."""

import numpy as np
from numpy.typing import ArrayLike


def standard_error(values: ArrayLike, axis: int = -1) -> np.ndarray:
    """Return the standard error of the mean of independent values along an axis; 0 for a single value."""
    numbers = np.asarray(values, float)
    count = numbers.shape[axis]
    if count < 2:
        return np.zeros(numbers.mean(axis).shape)
    deviation: np.ndarray = numbers.std(axis, ddof=1)
    return deviation / count**0.5
