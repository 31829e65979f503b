"""Results of a study's runs, over seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.evaluation.compare import change, is_of, logged
from grpo_nb.evaluation.intervals import is_share, student
from grpo_nb.metrics import keys
from grpo_nb.report.tables import Table
from grpo_nb.run.run import Run
from grpo_nb.storage.index.frames import dense
from grpo_nb.sweeps.plan import Trial
from grpo_nb.sweeps.work import stages

COLUMNS = [
    *("arm", "stage", "objective", "metric", "seeds", "value", "low", "high"),
    *("difference", "difference_low", "difference_high", "differs"),
]
Curves = Mapping[str, Mapping[str, list[tuple[Any, Any]]]]
"""Steps and values of each seed, by key and arm."""
FEWEST_SEEDS = 3
SECONDS, PEAK = "seconds", "peak GiB"


@dataclass(frozen=True)
class Value:
    """One measure of one run."""

    value: float
    half: float = math.nan
    """Half of its 95% interval over the items that were measured."""
    row: Mapping[str, Any] | None = None
    """Row of evaluations.jsonl, for evaluated measures."""


class Key(NamedTuple):
    """A line of the table."""

    arm: str
    stage: str
    objective: str
    metric: str


def table(trials: Sequence[Trial]) -> pd.DataFrame:
    """Mean of each measure over the seeds that have it, with its 95% interval, and the change from the first arm.

    Changes are taken seed by seed, in pairs of the same questions; see `mean_interval`.

    Returns:
        One row for each arm, stage, objective and metric: seeds, value, low, high; difference, difference_low,
        difference_high and differs, from the first arm's own end (empty there). Seconds of GRPO and peak memory are
        rows without an objective.
    """
    return compared(_measures(trials), trials[0].arm)


def compared(found: Mapping[Key, Mapping[int, Value]], first: str) -> pd.DataFrame:
    """Table of measures by seed; the others are compared with the arm `first`."""
    ends = {key.arm: key.stage for key in found}  # stages come in order: the last is the arm's end
    rows = []
    for key, values in found.items():
        start = found.get(key._replace(arm=first, stage=ends.get(first, "")), {})
        changes = (
            [] if start is values else [_change(start[seed], values[seed], key) for seed in values if seed in start]
        )
        change, low, high = mean_interval([one for one in changes if one])
        differs = None if math.isnan(low) else bool(low > 0 or high < 0)
        mean = _within(key.metric, mean_interval([*values.values()]))
        rows.append([*key, len(values), *mean, change, low, high, differs])
    return pd.DataFrame(rows, columns=COLUMNS)


def _within(metric: str, mean: tuple[float, float, float]) -> tuple[float, float, float]:
    """Clip the interval of a share to [0, 1], whatever its half-width."""
    value, low, high = mean
    return (value, max(0.0, low), min(1.0, high)) if is_share(metric) and not math.isnan(low) else mean


def mean_interval(values: Sequence[Value]) -> tuple[float, float, float]:
    """Mean over seeds and its 95% interval; none below three seeds, or where the spread is unknown.

    The half-width is the larger of Student's t sd / sqrt(n) over the n seeds, and of the interval over items alone, the
    runs' mean half-width / sqrt(n): a few seeds that agree by chance do not make a mean certain. For two seeds t is
    12.7, so that an interval would be useless.

    >>> [round(x, 3) for x in mean_interval([Value(1.0), Value(2.0), Value(3.0)])]
    [2.0, -0.484, 4.484]
    >>> [round(x, 3) for x in mean_interval([Value(0.5, half=0.1)] * 4)]
    [0.5, 0.45, 0.55]
    >>> mean_interval([Value(1.0), Value(2.0)])
    (1.5, nan, nan)
    """
    finite = [one for one in values if math.isfinite(one.value)]
    if not finite:
        return math.nan, math.nan, math.nan
    mean, count = float(np.mean([one.value for one in finite])), len(finite)
    if count < FEWEST_SEEDS:
        return mean, math.nan, math.nan
    over_seeds = student(count - 1) * float(np.std([one.value for one in finite], ddof=1))
    over_items = [one.half for one in finite if math.isfinite(one.half)]
    margin = max(over_seeds, float(np.mean(over_items)) if over_items else 0.0) / math.sqrt(count) or math.nan
    return mean, mean - margin, mean + margin


def _change(start: Value, end: Value, key: Key) -> Value | None:
    """Change of a measure in one seed; None where the questions differ."""
    if start.row is None or end.row is None:
        return Value(end.value - start.value)
    found = change(start.row, end.row, key.metric)
    return None if found is None else Value(found[0], (found[2] - found[1]) / 2)


def _measures(trials: Sequence[Trial]) -> dict[Key, dict[int, Value]]:
    """The values of each line by seed."""
    found: dict[Key, dict[int, Value]] = {}
    for trial in trials:
        if (run := trial.readable()) is None:
            continue
        rows = logged(run, "test", "greedy")
        for stage in stages(trial):
            measured = {row["objective"]: row for row in rows if is_of(row, stage)}  # the newest of each
            lines = [(name, metric, row) for name, row in measured.items() for metric in row["metrics"]]
            for name, metric, row in lines:
                numbers = row["metrics"][metric]
                value = Value(float(numbers["value"]), (float(numbers["high"]) - float(numbers["low"])) / 2, row)
                found.setdefault(Key(trial.arm, str(stage), name, metric), {})[trial.seed] = value
        for metric, cost in _costs(run).items() if trial.grpo else ():
            found.setdefault(Key(trial.arm, "latest", "", metric), {})[trial.seed] = Value(cost)
    return found


def _costs(run: Run) -> dict[str, float]:
    rows = run.stored("metrics")
    if not len(rows):
        return {}
    seconds, peak = (dense(rows, key) for key in (keys.TIME_STEP, keys.MEMORY_PEAK))
    return {SECONDS: float(np.nansum(seconds)), PEAK: float(np.nanmax(peak, initial=0.0)) / 1024}


def shown(frame: pd.DataFrame, name: str) -> Table:
    """The table for reading: a row for each measure that has a number, a column for each arm and stage."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in frame[frame["value"].notna()].to_dict(orient="records"):
        limits = "" if math.isnan(row["low"]) else f" [{row['low']:.3g}, {row['high']:.3g}]"
        mark = "*" if row["differs"] is True else ""
        lines.setdefault((row["objective"], row["metric"]), {})[f"{row['arm']}, {row['stage']}"] = (
            f"{row['value']:.3g}{limits}{mark}"
        )
    if not lines:
        return Table(pd.DataFrame(), f"{name}: nothing measured yet")
    seeds = int(frame["seeds"].max())
    interval = "[95% interval]" if seeds >= FEWEST_SEEDS else f"(intervals need {FEWEST_SEEDS})"
    caption = f"{name}: mean over {seeds} seeds {interval}; * the change from the first arm's end leaves out 0"
    return Table(
        pd.DataFrame(
            [dict(zip(("objective", "metric"), key, strict=True)) | cells for key, cells in lines.items()]
        ).fillna(""),
        caption,
    )


def curves(trials: Sequence[Trial], wanted: Sequence[str]) -> Curves:
    """Steps and values of keys of metrics.jsonl, by arm and seed; without `wanted`, each objective's mean reward."""
    names = wanted or [keys.REWARD.of(name) for name in dict.fromkeys(n for t in trials for n in t.config.objectives)]
    found: dict[str, dict[str, list[tuple[Any, Any]]]] = {name: {} for name in names}
    for trial in trials:
        if (run := trial.readable()) is None or not len(rows := run.stored("metrics")):
            continue
        steps = dense(rows, keys.STEP)
        for name in names:
            values = dense(rows, name)
            if np.isfinite(values).any():
                found[name].setdefault(trial.arm, []).append((steps, values))
    return found
