"""Choice of a run's stage: the front of several objectives, the best of each, and the knee between them.

Read from evaluations.jsonl alone. One stage dominates another only where it is better in every objective and each
paired bootstrap interval of the difference leaves out 0: stages that a few dozen questions cannot separate stay on the
front together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from grpo_nb.evaluation.compare import Logged, Row, Split, Stage, count, different, logged, same_questions
from grpo_nb.evaluation.dominance import NEITHER, Comparison, dominators, orient
from grpo_nb.evaluation.intervals import PARTS
from grpo_nb.printable import clean_logger
from grpo_nb.run.run import Run, RunError
from grpo_nb.suggest import did_you_mean

logger = clean_logger(__name__)

Metrics = Mapping[str, str]
"""The metric that counts, by objective."""


@dataclass(frozen=True)
class Point:
    """A stage that was evaluated on every objective: its row of each."""

    stage: Stage
    step: int
    rows: Mapping[str, Row]

    @property
    def name(self) -> str:
        return f"step {self.stage}" if isinstance(self.stage, int) else self.stage

    def objective_vector(self, by: Metrics) -> list[float]:
        """The value of each objective's metric, turned so that more is better."""
        values = [self.rows[objective]["metrics"][metric]["value"] for objective, metric in by.items()]
        return [float(orient(metric, np.array([v]))[0]) for metric, v in zip(by.values(), values, strict=True)]


def pareto(run: Run, by: Metrics | None = None, *, mode: Logged | None = None, split: Split = "test") -> pd.DataFrame:
    """Every evaluated stage with its values, whether it is on the front, and the stages that dominate it.

    Args:
        by: the metric of each objective that counts; None: `accuracy`, or a task's own first one.
        mode: which evaluations; None: the quick ones if any, else the greedy ones.

    Returns:
        One row a stage, by step: stage, step, saved (its weights can be loaded); for each objective
        `<objective>/<metric>` with `_low` and `_high`; front, knee, dominated_by (stages of the front that dominate it,
        three at most), and n, the items that its smallest metric is over.

    Raises:
        ValueError: an objective or metric that no evaluation has, or a metric of which neither more nor less is better.
    """
    rows = _rows(run, mode, split)
    _report_left_out(run, rows)
    by = _chosen(run, rows, by)
    points = _points(rows, by)
    dominators = _dominators(points, by)
    knee_point, saved = _knee(points, dominators, by), _loadable(run)
    lines = [
        {
            "stage": point.name,
            "step": point.step,
            "saved": point.stage in saved,
            **_values(point, by),
            "front": not over,
            "knee": point is knee_point,
            "dominated_by": ", ".join(other.name for other in over),
            "n": min(count(point.rows[objective], metric) for objective, metric in by.items()),
        }
        for point, over in zip(points, dominators, strict=True)
    ]
    values = [f"{objective}/{metric}{part}" for objective, metric in by.items() for part in PARTS.values()]
    return pd.DataFrame(lines, columns=["stage", "step", "saved", *values, "front", "knee", "dominated_by", "n"])


def best(
    run: Run, objective: str, metric: str | None = None, *, mode: Logged | None = None, split: Split = "test"
) -> Stage:
    """The stage with a checkpoint whose value is best; of equal ones the earliest, which drifted least.

    Raises:
        RunError: no such stage was evaluated.
        ValueError: as `pareto`.
    """
    if objective not in run.config.objectives:
        raise ValueError(
            f"'{objective}' is no objective of {run.name}; it has {', '.join(run.config.objectives)}"
            + did_you_mean(objective, run.config.objectives)
        )
    rows = [row for row in _rows(run, mode, split) if row["objective"] == objective]
    _report_left_out(run, rows)
    by = _chosen(run, rows, None if metric is None else {objective: metric}, only=objective)
    return _first_best(_there(run, _points(rows, by)), by).stage


def knee(run: Run, by: Metrics | None = None, *, mode: Logged | None = None, split: Split = "test") -> Stage:
    """The stage with a checkpoint on the front that gives up least of any objective.

    argmin_s sum_o ((best_o - v_so) / (best_o - worst_o))^2, v turned so that more is better, best and worst over the
    front (compromise programming: Zeleny 1973).

    Raises:
        RunError: no such stage was evaluated.
        ValueError: as `pareto`.
    """
    rows = _rows(run, mode, split)
    _report_left_out(run, rows)
    by = _chosen(run, rows, by)
    points = _there(run, _points(rows, by))
    found = _knee(points, _dominators(points, by), by)
    assert found is not None  # the points have checkpoints
    return found.stage


def steps_to_keep(run: Run, rows: Sequence[Row]) -> tuple[int, ...]:
    """Steps of the checkpoints that these rows of quick evaluation find best in an objective, and of the knee."""
    by, there = _chosen(run, rows, None), {*run.checkpoints.steps()}
    points = [point for point in _points(rows, by) if point.stage in there]
    if not points:
        return ()
    chosen = [_first_best(points, {objective: metric}) for objective, metric in by.items()]
    knee_point = _knee(points, _dominators(points, by), by)
    return tuple(sorted({point.step for point in (*chosen, knee_point) if point is not None}))


def _rows(run: Run, mode: Logged | None, split: Split) -> list[Row]:
    if mode is not None:
        return logged(run, split, mode)
    return logged(run, split, "quick") or logged(run, split, "greedy")


def _report_left_out(run: Run, rows: Sequence[Row]) -> None:
    """Log the stages whose questions differ from the newest's."""
    newest = {row["objective"]: row for row in rows}
    for objective, last in newest.items():
        own = [row for row in rows if row["objective"] == objective and not same_questions(row, last)]
        if own:
            stages = ", ".join(dict.fromkeys(str(row["stage"]) for row in own))
            logger.warning(
                "%s: %s of %s were asked other questions than the newest evaluation (%s) and are left out; evaluate "
                "them again to compare them",
                run.name,
                stages,
                objective,
                different(own[-1], last),
            )


def _chosen(run: Run, rows: Sequence[Row], by: Metrics | None, only: str | None = None) -> dict[str, str]:
    """The metrics to compare by, checked; by default one for each of the run's objectives that were evaluated."""
    known = {row["objective"]: row["metrics"] for row in rows}
    if by is None:
        names = [only] if only else list(run.config.objectives)
        return {name: _usual(known[name]) for name in names if name in known}
    for objective, metric in by.items():
        if rows and metric not in known.get(objective, ()):
            raise ValueError(
                f"no evaluation of {run.name} has '{metric}' of '{objective}'; there are "
                + "; ".join(f"{name}: {', '.join(metrics)}" for name, metrics in known.items())
            )
        orient(metric, np.zeros(1))
    return dict(by)


def _usual(metrics: Mapping[str, Any]) -> str:
    directed = [name for name in metrics if name not in NEITHER]
    return next((name for name in ("accuracy", "reward") if name in metrics), directed[0])


def _points(rows: Sequence[Row], by: Metrics) -> list[Point]:
    """The stages with a number for every metric, on one pool an objective (the newest's), by step."""
    newest = {row["objective"]: row for row in rows}
    found: dict[Stage, dict[str, Row]] = {}
    for row in rows:  # of two rows of one stage the newer stays
        metric = by.get(row["objective"])
        if metric is not None and same_questions(row, newest[row["objective"]]) and _measured(row, metric):
            found.setdefault(_stage(row), {})[row["objective"]] = row
    points = [
        Point(stage, max(row["step"] for row in own.values()), own)
        for stage, own in found.items()
        if len(own) == len(by)
    ]
    return sorted(points, key=lambda point: (point.step, isinstance(point.stage, int), str(point.stage)))


def _measured(row: Row, metric: str) -> bool:
    value = row["metrics"].get(metric, {}).get("value")
    return value is not None and math.isfinite(value)


def _stage(row: Row) -> Stage:
    """Stage that the row measured; a row of `latest` becomes the step of its time."""
    name: Any = row["stage"]
    stage: Stage = row["step"] if name == "latest" or name.startswith("step ") else name
    return stage


def _values(point: Point, by: Metrics) -> dict[str, float]:
    return {
        f"{objective}/{metric}{part}": point.rows[objective]["metrics"][metric][key]
        for objective, metric in by.items()
        for key, part in PARTS.items()
    }


def _first_best(points: Sequence[Point], by: Metrics) -> Point:
    return max(points, key=lambda point: point.objective_vector(by))  # of equal ones max takes the first


def _dominators(points: Sequence[Point], by: Metrics) -> list[list[Point]]:
    """For each point a few points that dominate it; points without any are the front.

    One dominates another where it is better in every objective, each paired 95% interval of the difference above 0.
    """
    if not points:
        return []
    found = dominators([Comparison([p.rows[name] for p in points], metric) for name, metric in by.items()])
    return [[points[place] for place in over] for over in found]


def _knee(points: Sequence[Point], dominators: Sequence[Sequence[Point]], by: Metrics) -> Point | None:
    """The knee of their front; None only without points, since dominance has no cycles."""
    front = [point for point, over in zip(points, dominators, strict=True) if not over]
    if not front:
        return None
    values = np.array([point.objective_vector(by) for point in front])
    span = np.ptp(values, axis=0)
    lost = (values.max(axis=0) - values) / np.where(span > 0, span, 1.0)
    return front[int((lost**2).sum(axis=1).argmin())]


def _loadable(run: Run) -> set[Stage]:
    there: set[Stage] = {"base", *run.checkpoints.steps()}
    return there | {"sft"} if run.sft_checkpoints.steps() or run.config.sft.steps == 0 else there


def _there(run: Run, points: Sequence[Point]) -> list[Point]:
    loadable = _loadable(run)
    there = [point for point in points if point.stage in loadable]
    if not there:
        gone = f"; evaluated but no longer there: {', '.join(point.name for point in points)}" if points else ""
        raise RunError(
            f"{run.name} has no evaluated stage that can be loaded{gone}: set run.quick_eval_every in a new run (a "
            "multiple of run.checkpoint_every), or evaluate stages whose checkpoints exist"
        )
    if len(there) == 1:
        logger.warning(
            "%s: only %s was evaluated on every objective and can be loaded, so it is best without a rival; set "
            "run.quick_eval_every to a multiple of run.checkpoint_every in a new run, or evaluate more stages in one "
            "mode (`evaluate(run, stage=...)`)",
            run.name,
            there[0].name,
        )
    return there
