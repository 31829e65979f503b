"""What is logged can be read: rows and names beyond the readers' bounds are refused where they arise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_nb import presets
from grpo_nb.config import ConfigError
from grpo_nb.metrics import keys
from grpo_nb.rewards.context import MOST_METRICS, Notes
from grpo_nb.run.run import Run
from grpo_nb.storage import files, journal, schema
from grpo_nb.training.grpo import grpo
from tests.support.tiny import REWARDS, small_tasks, tiny_run
from tests.support.tokens import pattern


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", presets.demo())


@pytest.mark.parametrize(
    ("row", "bound"),
    [
        ({keys.USER.of("a", str(i)): 1.0 for i in range(schema.MOST_KEYS)}, schema.MOST_KEYS),
        ({keys.USER.of("a", "x" * schema.LONGEST_KEY): 1.0}, schema.LONGEST_KEY),
    ],
    ids=["many", "long"],
)
def test_a_row_that_no_reader_accepts_is_not_written(run: Run, row: dict[str, float], bound: int) -> None:
    run.log_metrics({"step": 1})
    with pytest.raises(ValueError, match=pattern("metrics.jsonl", bound)):
        run.log_metrics({"step": 2} | row)
    assert run.metric_rows() == [{"step": 1}]


@pytest.mark.parametrize("log", ["metrics", "sft", "events", "samples", "evaluations"])
def test_a_row_is_written_as_json_once(run: Run, log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written, to_json = list[object](), journal.to_json
    monkeypatch.setattr(journal, "to_json", lambda row: (written.append(row), to_json(row))[1])
    monkeypatch.setattr(files, "to_json", journal.to_json)
    rows: dict[str, dict[str, Any]] = {"samples": {"step": 1, "completion": "c"}, "events": {"kind": "note"}}
    rows |= {"evaluations": {"stage": "base"}}
    run._log(log, row := rows.get(log, {"step": 1, "loss": 0.5}))  # type: ignore[arg-type]
    assert written == [row]


def test_other_logs_too(run: Run) -> None:
    with pytest.raises(ValueError, match=pattern("events.jsonl", "'by'")):
        run.log_event("knob", by="x" * (schema.LONGEST_KEY + 1))
    assert not [row for row in run.rows("events") if row["kind"] == "knob"]


@pytest.mark.parametrize("name", ["", "x" * (schema.LONGEST_NAME + 1), "a\nb", "\x1b[31m"])
def test_names_that_no_key_can_hold_are_refused(tmp_path: Path, name: str) -> None:
    config = presets.demo()
    with pytest.raises(ConfigError, match=pattern("objectives", schema.LONGEST_NAME)):
        Run.create(tmp_path / "run", config.model_copy(update={"objectives": {name: config.objectives["fairness"]}}))
    with pytest.raises(ValueError, match=pattern("log_metric", schema.LONGEST_NAME)):
        Notes(1).log_metric(name, 1.0)


def test_metrics_beyond_the_bound_are_counted_and_left_out() -> None:
    notes = Notes(1)
    for i in [*range(MOST_METRICS + 5), 0]:
        notes.log_metric(f"m{i}", float(i))
    assert len(notes.row("a")) == MOST_METRICS and notes.dropped == 5
    assert notes.metrics["m0"] == [0.0, 0.0]


def test_metrics_that_a_step_drops_are_an_event_once(tmp_path: Path) -> None:
    def noisy(completions: list[str], log_metric: Callable[[str, float], None]) -> list[float]:
        for i in range(MOST_METRICS + 5):
            log_metric(f"m{i}", 1.0)
        return [float(len(text)) for text in completions]

    run = tiny_run(tmp_path, run__steps=2)
    for _ in grpo(run, tasks=small_tasks(), rewards=REWARDS | {"fairness": [noisy]}):
        pass
    (event,) = (row for row in run.rows("events") if row["kind"] == "metrics_dropped")
    assert (event["step"], event["dropped"], event["most"]) == (1, {"fairness": 5}, MOST_METRICS)
    for row in run.metric_rows():
        assert sum(keys.USER.has(key) for key in row) == MOST_METRICS
