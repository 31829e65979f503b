"""Columns of metrics in which a label, a kind of failure or a provider is 0 in the rows in which it did not occur."""

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from grpo_nb.metrics import keys

Column = NDArray[np.float64]


class Columns:
    """Columns by key, one value per row: nan where a row has none, 0 where `keys.counted_with` applies."""

    def __init__(self, names: Collection[str], read: Callable[[str], Column]) -> None:
        """`names` are the keys of all columns; `read` gives one of them as it was logged, nan where a row has none."""
        self._names, self._read = names, read
        self._counted: dict[tuple[str, ...], NDArray[np.bool_]] = {}

    def __getitem__(self, key: str) -> Column:
        values = self._read(key)
        others = tuple(keys.counted_with(key, self._names))
        if not others:
            return values
        if others not in self._counted:
            self._counted[others] = np.any([~np.isnan(self._read(other)) for other in others], axis=0)
        return np.where(np.isnan(values) & self._counted[others], 0.0, values)
