"""Bounds of the values read from a row, which may come from anyone and hold any number.

A finite value beyond the bounds of its key is read as the bound. nan and inf stay: they are a diverged run's evidence.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from grpo_nb.metrics import keys

LARGEST = 1e100
"""Largest size of a value that is read: no measurement is larger, and sums and products of such values are finite."""


@lru_cache(maxsize=20_000)
def of(key: str) -> tuple[float, float]:
    """Lowest and highest finite value of a key.

    >>> of("truncation/fairness"), of("loss")
    ((0.0, 1.0), (-1e+100, 1e+100))
    """
    row = keys.row_of(key)
    return (0.0, 1.0) if row is not None and row.unit == keys.SHARE else (-LARGEST, LARGEST)


def bounded(key: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values of a key, the finite ones within its bounds."""
    return np.where(np.isfinite(values), np.clip(values, *of(key)), values)
