"""Canaries: a jump away from the run's own recent steps is found when it happens, live and afterwards."""

from pathlib import Path
from typing import Any

import pytest

from grpo_nb import presets, rules
from grpo_nb.config import Config
from grpo_nb.rules import canaries, hindsight
from grpo_nb.rules.history import History
from grpo_nb.run.run import Run
from grpo_nb.storage.index import LogRows
from tests.support.made_rows import healthy

CONFIG = presets.demo()
JUMPS = {
    "length_jump": ("length/fairness/mean", 40.0, "guards.length_jump"),
    "entropy_jump": ("entropy/hallucination", 4.0, "guards.entropy_jump"),
    "truncation_jump": ("truncation/fairness", 0.9, "guards.truncation_jump"),
}
each = pytest.mark.parametrize(("rule", "key", "value", "setting"), [(rule, *rest) for rule, rest in JUMPS.items()])


def found(rows: list[dict[str, Any]], config: Config = CONFIG) -> list[tuple[str, int | None]]:
    return [(f.rule, f.step) for f in rules.post_mortem(rows, config) if f.rule in JUMPS]


def jumping(key: str, value: float, at: int = 30) -> list[dict[str, Any]]:
    return [row | {key: value} if row["step"] == at else row for row in healthy(60)]


def test_a_healthy_run_has_none() -> None:
    assert found(healthy(300)) == []


@each
def test_a_jump_is_found_where_it_happens(rule: str, key: str, value: float, setting: str) -> None:
    rows = jumping(key, value)
    assert found(rows) == [(rule, 30)]
    assert found(rows, CONFIG.replace(**{setting: None})) == []
    (finding,) = [f for f in rules.after_step(History(CONFIG, rows[:30]), CONFIG) if f.rule == rule]
    assert finding.evidence["now"] == value and finding.evidence["objective"] == key.split("/")[1]
    assert finding.action == ("warn" if rule == "length_jump" else "slow")
    unhalved = CONFIG.replace(**{"guards.canary_halves": False})
    (finding,) = [f for f in rules.after_step(History(unhalved, rows[:30]), unhalved) if f.rule == rule]
    assert finding.action == "warn"


@each
def test_a_level_that_is_usual_by_now_is_no_jump(rule: str, key: str, value: float, setting: str) -> None:
    rows = [row | {key: value} if row["step"] >= 30 else row for row in healthy(60)]
    assert max(step or 0 for name, step in found(rows) if name == rule) == 30
    history = History(CONFIG, rows[:45])
    assert not [f for f in rules.check(history, CONFIG) if f.rule == rule]


def test_too_few_steps_decide_nothing() -> None:
    assert found(jumping("length/fairness/mean", 40.0, at=canaries.USUAL_ROWS)) == []


@each
def test_a_long_log_is_suspected_where_a_rule_fires(
    rule: str, key: str, value: float, setting: str, tmp_path: Path
) -> None:
    """By column, as logs above `FEW_ROWS` are read: each place at which a rule fires is among the suspects."""
    run = Run.create(tmp_path / "run", CONFIG)
    rows = jumping(key, value)
    run._logs["metrics"].append(*rows)
    log: LogRows = run.stored("metrics")
    (asked,) = [one for one in hindsight.SUSPECTS if one.__name__ == rule]
    places = set(hindsight.SUSPECTS[asked](log, CONFIG).tolist())
    fired = {place for place in range(len(rows)) if asked(rows[: place + 1], CONFIG)}
    assert fired == {29} and fired <= places
