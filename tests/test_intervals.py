"""Intervals: drawing counts is drawing rows."""

import numpy as np
import pytest

from grpo_nb.intervals import bootstrap, bootstrap_counts


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
