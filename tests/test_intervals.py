"""Intervals: drawing counts is drawing rows."""

import numpy as np
import pytest

from grpo_nb.intervals import bootstrap, bootstrap_counts, interval, paired, with_intervals


def test_drawn_counts_are_those_of_drawn_rows() -> None:
    random = np.random.default_rng(0)
    counts = random.integers(0, 2, size=(40, 3)).astype(float)
    clusters = [f"c{i}" for i in random.integers(0, 7, size=40)]
    slow = bootstrap(lambda rows: {str(k): counts[rows][:, k].sum() for k in range(3)}, clusters, seed=5, count=50)
    fast = bootstrap_counts(counts, clusters, seed=5, count=50)
    assert fast.shape == (50, 3)
    for k in range(3):
        assert fast[:, k] == pytest.approx(slow[str(k)])
    assert not np.array_equal(fast, bootstrap_counts(counts, clusters, seed=6, count=50))


def test_a_measure_of_a_part_counts_its_own_rows_and_clusters() -> None:
    """20 clusters, of which the part has rows in 2: nothing seen in 2 clusters says less than nothing in 20."""
    clusters = [f"c{i % 20}" for i in range(60)]
    part = [cluster in ("c0", "c1") for cluster in clusters]
    values = {"accuracy": 1.0, "accuracy_part": 1.0, "failed_rate": 0.0}
    drawn = {name: np.full(9, value) for name, value in values.items()}
    found = with_intervals(values, drawn, clusters, {"accuracy_part": part})
    assert found == {
        "accuracy": {"value": 1.0, "low": 1 - 3 / 20, "high": 1.0, "n": 60, "clusters": 20},
        "accuracy_part": {"value": 1.0, "low": 0.0, "high": 1.0, "n": 6, "clusters": 2},
        "failed_rate": {"value": 0.0, "low": 0.0, "high": 3 / 20, "n": 60, "clusters": 20},
    }
    wide = with_intervals(values, drawn, clusters, {"accuracy_part": [c < "c14" for c in clusters]})["accuracy_part"]
    assert wide["n"] == 18 and wide["low"] == 1 - 3 / 6


@pytest.mark.parametrize(
    ("value", "clusters", "expected"),
    [(0.0, 30, (-0.1, 0.1)), (1.0, 30, (0.8, 1.0)), (-1.0, 30, (-1.0, -0.8)), (0.0, 0, (-1.0, 1.0))],
)
def test_no_bias_seen_is_not_no_bias(value: float, clusters: int, expected: tuple[float, float]) -> None:
    assert interval("bias_ambiguous", value, np.full(9, value), clusters) == pytest.approx(expected)
    assert interval("bias_ambiguous", value, np.append(np.full(99, value), 0.5 - value), clusters)[0] <= value


def test_other_measures_without_spread_stay_a_point() -> None:
    assert interval("reward", 1.0, np.ones(9), 10) == (1.0, 1.0)
    assert interval("accuracy", 0.5, np.full(9, 0.5), 10) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("name", "value", "clusters", "expected"),
    [
        ("accuracy", 1.0, 3, (-1.0, 1.0)),  # three items that all changed for the better: nothing is known yet
        ("accuracy", 1.0, 60, (0.9, 1.0)),
        ("unparsed_rate", 0.0, 30, (-0.1, 0.1)),
        ("bias_ambiguous", -2.0, 30, (-2.0, -1.7)),
        ("accuracy", 0.0, 0, (-1.0, 1.0)),
        ("reward", 0.5, 3, (0.5, 0.5)),
    ],
)
def test_a_difference_that_no_draw_changes_is_not_certain(
    name: str, value: float, clusters: int, expected: tuple[float, float]
) -> None:
    assert paired(name, value, np.full(50, value), clusters) == pytest.approx(expected)


def test_a_difference_that_draws_change_has_their_percentiles() -> None:
    draws = np.linspace(-0.1, 0.3, 1001)
    assert paired("accuracy", 0.1, draws, 9) == pytest.approx((-0.09, 0.29))
