"""What is logged can be read: rows and names beyond the readers' bounds are refused where they arise."""

from pathlib import Path

import pytest

from grpo_nb import presets
from grpo_nb.config import ConfigError
from grpo_nb.metrics import keys
from grpo_nb.rewards.context import MOST_METRICS, Notes
from grpo_nb.run.run import Run
from grpo_nb.storage import schema
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
