"""Class bands: an order that quality cannot invert."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.tasks.bands import Bands

ENDS = st.lists(st.floats(-5, 5), min_size=4, max_size=12, unique=True).map(sorted)


@given(ENDS, st.lists(st.floats(-3, 3), min_size=12, max_size=12))
def test_no_quality_lifts_a_class_over_the_next(ends: list[float], qualities: list[float]) -> None:
    bands = Bands({str(i): (low, high) for i, (low, high) in enumerate(pairwise(ends)) if i % 2 == 0})
    values = [bands.value(label, quality) for label, quality in zip(bands.classes, qualities, strict=False)]
    assert all(worse < better for worse, better in pairwise(values))
    for label, value in zip(bands.classes, values, strict=True):
        assert bands.classes[label][0] <= value <= bands.classes[label][1]


def test_ends_and_middle() -> None:
    bands = Bands({"wrong": (0.1, 0.1), "right": (0.5, 1.0)})
    assert [bands.value("right", quality) for quality in (0.0, 0.5, 1.0, 7.0)] == [0.5, 0.75, 1.0, 1.0]
    assert bands.value("wrong", 0.0) == bands.value("wrong") == 0.1
    assert bands.best == 1.0


@pytest.mark.parametrize(
    "classes",
    [
        {"a": (0.0, 0.5), "b": (0.5, 1.0)},
        {"a": (0.5, 0.6), "b": (0.0, 0.1)},
        {"a": (0.5, 0.4)},
        {"a": (0.5, math.inf)},
        {"a": (math.nan, 1.0)},
    ],
)
def test_bands_that_touch_cross_or_have_no_end_are_refused(classes: dict[str, tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match=r"'[ab]'.*\[.*\].* < low <= high"):
        Bands(classes)
