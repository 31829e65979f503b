"""No rule raises on any number that a row may hold, whoever wrote the row."""

import random
from typing import Any

import numpy as np
import pytest

from grpo_nb import presets, rules
from grpo_nb.config import Config
from grpo_nb.metrics import limits
from grpo_nb.rules import learning, regressions, sft
from grpo_nb.rules.finding import number
from tests.support import hostile
from tests.support.made_rows import Row, healthy

HOSTILE = (*hostile.FINITE, 10**400, -(10**400))
NOT_FINITE = (*hostile.NOT_FINITE, "nan", "-Infinity")


def judged() -> Config:
    provider: dict[str, Any] = {"model": "m", "base_url": "http://localhost:1/v1", "api_key_env": None}
    provider |= {"usd_per_million_in": 1.0, "usd_per_million_out": 1.0}
    judge = {"providers": [provider], "budget_tokens": 1000, "budget_usd": 1.0}
    tree = presets.demo().model_dump(mode="json")
    for objective in tree["objectives"].values():
        objective["judge"] = judge
    return Config.model_validate(tree)


CONFIG = judged()


def ask_all(rows: list[Row], *, every: int = 10) -> None:
    """All rules, as a training asks them at every so many rows, and as `diagnose` does at the end."""
    past = rules.History(CONFIG)
    for row in rows:
        past.append(row)
        rules.before_update(past, CONFIG)
        if len(past) % every == 0:
            assert all(str(finding) and finding.to_dict() for finding in rules.check(past, CONFIG))
    assert all(str(finding) for finding in rules.post_mortem(rows[-10:], CONFIG))
    losses = [{"step": 0, "loss": rows[0].get("loss")}, {"step": 9, "loss": rows[-1].get("loss")}]
    sft.check(rows, losses, CONFIG)


PLAIN = healthy(42)


@pytest.mark.parametrize("key", hostile.all_keys())
def test_no_rule_raises_on_a_number_of_one_key(key: str) -> None:
    alternating = [(1e308, -1e308), (5e-324, 1.7e308), (-1, 10**400)]
    blocks = [*((value, value) for value in (*HOSTILE, *NOT_FINITE)), *alternating]
    values = [pair[n % 2] for pair in blocks for n in range(10)]
    ask_all([PLAIN[min(step, 41)] | {"step": step + 1, key: value} for step, value in enumerate(values)])


@pytest.mark.parametrize("seed", range(8))
def test_no_rule_raises_on_such_numbers_in_all_keys(seed: int) -> None:
    draw, names = random.Random(seed), hostile.all_keys()
    values: tuple[Any, ...] = (*HOSTILE, *NOT_FINITE) if seed % 2 else HOSTILE
    rows: list[Row] = []
    for step in range(seed % 3, 42):
        drawn = {name: draw.choice(values) for name in names}
        status = draw.choice(("ok", "skipped", "rolled_back", "clipped"))
        rows.append(PLAIN[step] | drawn | {"step": step, "status": status})
    ask_all(rows, every=1)


@pytest.mark.parametrize("was", hostile.FINITE)
@pytest.mark.parametrize("now", hostile.FINITE)
def test_no_rule_raises_on_a_number_of_an_evaluation(was: float, now: float) -> None:
    def evaluation(stage: str, step: int, value: float) -> Row:
        known = {"value": value, "low": value, "high": value, "n": 8}
        row = {"stage": stage, "step": step, "split": "test", "mode": "greedy", "objective": "fairness", "pool": "p"}
        metrics = dict.fromkeys(("accuracy", "accuracy_told", "unknown_rate"), known)
        return row | {"n": 8, "clusters": 8, "metrics": metrics, "resamples": {name: [value] * 3 for name in metrics}}

    rows = [evaluation("sft", 0, was), evaluation("latest", 42, now)]
    for rule in (regressions.accuracy_fell, regressions.reward_without_accuracy):
        finding = rule(PLAIN, CONFIG, "fairness", rows)
        assert finding is None or str(finding)
    probes = [row | {"objective": "probe", "stage": stage} for row, stage in zip(rows, ("base", "latest"), strict=True)]
    finding = learning.forgetting(probes)
    assert finding is None or str(finding)


@pytest.mark.parametrize("key", ["truncation/fairness", "loss", "of no table"])
def test_a_column_of_numbers_is_read_as_each_number_is(key: str) -> None:
    values = [*map(float, hostile.FINITE), *hostile.NOT_FINITE]
    column = limits.bounded(key, np.array(values))
    np.testing.assert_array_equal(column, [number({key: value}, key) for value in values])
    low, high = limits.of(key)
    assert column[np.isfinite(column)].min() == low and column[np.isfinite(column)].max() == high
