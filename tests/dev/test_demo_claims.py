"""The demo keeps its promise over three seeds (slow), and the promise can be broken (quick)."""

from pathlib import Path

import pandas as pd
import pytest

from grpo_nb.dev import demo_claims


def table(**after: float) -> pd.DataFrame:
    good = {
        "accuracy_ambiguous": (0.4, 0.97),
        "bias_ambiguous": (0.5, 0.02),
        "accuracy_disambiguated": (0.95, 0.94),
        "hallucinated_rate": (0.4, 0.1),
        "accuracy_answerable": (0.95, 0.93),
    }
    rows = [
        {"seed": seed, "stage": stage, "objective": claim.objective, "metric": claim.metric, "value": value}
        for claim in demo_claims.CLAIMS
        for seed in (0, 1)
        for stage, value in zip(
            ("sft", "latest"), (good[claim.metric][0], after.get(claim.metric, good[claim.metric][1])), strict=True
        )
    ]
    return demo_claims.summary(pd.DataFrame(rows))


def test_a_kept_promise_holds_in_every_line() -> None:
    assert table()["holds"].all()


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("accuracy_ambiguous", 0.89),
        ("bias_ambiguous", 0.2),
        ("bias_ambiguous", -0.2),
        ("accuracy_disambiguated", 0.91),
        ("hallucinated_rate", 0.21),
        ("accuracy_answerable", 0.9),
    ],
)
def test_each_line_can_break(metric: str, value: float) -> None:
    assert list(table(**{metric: value})["holds"]).count(False) == 1


@pytest.mark.slow
def test_the_demo_keeps_its_promise_over_three_seeds(tmp_path: Path) -> None:
    result = demo_claims.summary(demo_claims.measure([0, 1, 2], tmp_path))
    assert result["holds"].all(), demo_claims.markdown(result)
