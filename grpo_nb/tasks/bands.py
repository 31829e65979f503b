"""Class bands: which answer is better is decided by its class; style and length only move it inside its band."""

import math
from collections.abc import Mapping


class Bands:
    """value(label, quality) = low + quality (high - low), where the intervals [low, high] of the classes are disjoint.

    An order that cannot be inverted: the best answer of a class stays below the worst one of the next. A class whose
    two ends are equal is a point, and quality moves nothing there.

    Args:
        classes: [low, high] by label, from the worst class to the best.

    Raises:
        ValueError: an interval that is upside down, or that touches the one before it.

    >>> bands = Bands({"wrong": (0.0, 0.2), "right": (0.8, 1.0)})
    >>> bands.value("wrong", quality=1.0), bands.value("right", quality=0.5)
    (0.2, 0.9)
    """

    def __init__(self, classes: Mapping[str, tuple[float, float]]) -> None:
        self.classes = dict(classes)
        floor = -math.inf
        for label, (low, high) in self.classes.items():
            if not floor < low <= high < math.inf:
                raise ValueError(f"class '{label}' has the band [{low}, {high}]; needs {floor} < low <= high")
            floor = high

    def value(self, label: str, quality: float = 1.0) -> float:
        """The reward of an answer of this class; quality is in [0, 1]; a value outside counts as the nearer end."""
        low, high = self.classes[label]
        # The ends themselves where quality is 0 or 1, free of rounding: classes must not touch.
        return min(high, max(low, low + (high - low) * quality))

    @property
    def best(self) -> float:
        """The highest value of all."""
        return max(high for _, high in self.classes.values())
