"""A rank that is always the slowest is named; ranks that take turns are uneven; small and rare waits are neither."""

from typing import Any

import pytest

from grpo_nb import presets, rules
from grpo_nb.metrics import keys
from grpo_nb.rules.finding import Finding
from grpo_nb.rules.ranks import ROWS

CONFIG = presets.demo().replace(**{"batch.prompts": 6})


def row(step: int, *seconds: float) -> dict[str, Any]:
    waited = max(seconds) - sum(seconds) / len(seconds)
    ranks = {keys.TIME_RANK.of(str(rank)): value for rank, value in enumerate(seconds)}
    return {keys.STEP: step, keys.TIME_STEP: max(seconds), keys.TIME_RANKS_WAITED: waited, **ranks}


def found(*steps: tuple[float, ...]) -> list[Finding]:
    every = rules.check([row(n, *seconds) for n, seconds in enumerate(steps, 1)], CONFIG)
    return [finding for finding in every if finding.rule in ("straggler", "uneven_ranks")]


@pytest.mark.parametrize("others", [(1.0,), (1.0, 1.1, 0.9)])
def test_a_straggler_is_named(others: tuple[float, ...]) -> None:
    (finding,) = found(*[(*others, 2.0)] * ROWS)
    assert finding.rule == "straggler" and finding.evidence["rank"] == len(others)
    assert finding.evidence["ratio"] == pytest.approx(2.0) and finding.severity == "warning"


def test_ranks_that_take_turns_are_uneven() -> None:
    (finding,) = found(*[(1.0, 3.0), (3.0, 1.0)] * (ROWS // 2))
    assert finding.rule == "uneven_ranks" and finding.evidence["waited"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "steps",
    [
        [(1.0, 1.1)] * 10,
        [(1.0, 3.0)] * (ROWS - 1),
        [(1.0, 1.0)] * 9 + [(1.0, 9.0)],
        [(5.0,)] * 10,
        [(1.0, 3.0)] * 5 + [(1.0, 3.0, 1.0)] * 5,
    ],
    ids=["small", "few", "once", "one rank", "another number of ranks"],
)
def test_what_is_neither(steps: list[tuple[float, ...]]) -> None:
    assert found(*steps) == []


def test_hostile_rows_say_nothing() -> None:
    strange = {keys.TIME_RANK.of("x/9"): 1.0, keys.TIME_RANK.of("9" * 5000): 1.0, keys.TIME_STEP: 0}
    every = rules.check([{**row(n, 1.0, 3.0), **strange} for n in range(9)], CONFIG)
    assert not [finding for finding in every if finding.rule in ("straggler", "uneven_ranks")]
