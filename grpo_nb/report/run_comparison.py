"""Two runs side by side: settings and versions that differ, metrics over the steps that both have, findings of each."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo_nb.doctor import diagnose
from grpo_nb.metrics import keys
from grpo_nb.metrics.counted import Columns
from grpo_nb.printable import clean_logger, printable
from grpo_nb.report.markup import Markup
from grpo_nb.report.tables import Table, cell
from grpo_nb.run import dependencies_file
from grpo_nb.run.run import Run
from grpo_nb.storage.index import LogRows
from grpo_nb.storage.index.frames import dense
from grpo_nb.storage.index.packing import Floats, Places

logger = clean_logger(__name__)

HEADLINES = (
    *(keys.REWARD, keys.KL, keys.BETA, keys.ENTROPY, keys.LENGTH_MEAN, keys.TRUNCATION, keys.FRAC_REWARD_ZERO_STD),
    *(keys.TABLE[name] for name in (keys.GRAD_NORM, keys.GRAD_UPDATE, keys.TIME_STEP, keys.MEMORY_PEAK)),
)
"""Kinds of metrics that a comparison shows unfolded."""
MOST_KEYS = 400
"""Metrics that are compared, in the order of the table; a log may hold any number of them."""
_WHEN = {"time", "step", "kind", "goal"}
"""Fields of a start's event that say when it was and how far it went; the others say what it ran with."""
_ABSENT = "not set"
_PARTS = ("last", "last_step", "mean", "spread")
"""Values shown of a metric of one run."""


@dataclass(frozen=True)
class RunComparison:
    """Result of `compare`, each part as a table; shows itself in a notebook and as text."""

    names: tuple[str, str]
    settings: pd.DataFrame
    """Table with one row per setting that differs: setting, a, b."""
    versions: pd.DataFrame
    """Table of packages, device, code, and the content of data and weights that differ, as of the newest start."""
    metrics: pd.DataFrame
    """Table with one row per metric: metric, unit, and of each run over the shared steps last, the step of last, mean,
    spread (standard deviation); difference of the means, b - a."""
    findings: pd.DataFrame
    """Table with one row per finding: run, severity, step, rule, message."""
    steps: str
    """Sentence about the shared steps."""

    def tables(self) -> Iterator[Table]:
        """The parts for reading; metrics that are no headlines, folded."""
        yield self._differing(self.settings, "setting", "settings differ")
        yield self._differing(self.versions, "version", "versions differ")
        rows = [row for row in map(keys.row_of, self.metrics["metric"])]
        headline = np.array([row in HEADLINES for row in rows], bool)
        yield self._side_by_side(self.metrics[headline], self.steps)
        if not headline.all():
            yield self._side_by_side(self.metrics[~headline], f"{(~headline).sum()} more metrics", folded=True)
        named = self.findings.assign(run=self.findings["run"].map(dict(zip("ab", self.names, strict=True))))
        yield Table(named, f"{len(named)} finding(s)" if len(named) else "no rule fired for either")

    def rows(self) -> dict[str, Any]:
        """The parts as plain lists of rows, for JSON."""
        parts = ("settings", "versions", "metrics", "findings")
        return {name: getattr(self, name).to_dict(orient="records") for name in parts} | {"steps": self.steps}

    def _differing(self, frame: pd.DataFrame, what: str, title: str) -> Table:
        a, b = self.names
        return Table(frame.set_axis([what, a, b], axis=1), f"{len(frame)} {title}" if len(frame) else f"no {title}")

    def _side_by_side(self, frame: pd.DataFrame, caption: str, folded: bool = False) -> Table:
        shown = {"metric": frame["metric"], "unit": frame["unit"]}
        newest = np.nanmax(self.metrics[["a_last_step", "b_last_step"]].to_numpy(), initial=-math.inf)
        for run, name in zip("ab", self.names, strict=True):
            ends = zip(frame[f"{run}_last"], frame[f"{run}_last_step"], strict=True)
            shown[f"{name}: last"] = [f"{cell(v)} (step {step:.0f})" if step < newest else v for v, step in ends]
            pairs = zip(frame[f"{run}_mean"], frame[f"{run}_spread"], strict=True)
            shown[f"{name}: mean ± spread"] = [f"{cell(m)} ± {cell(s)}" if m == m else "" for m, s in pairs]
        return Table(pd.DataFrame(shown | {"difference of means": frame["difference"]}), caption, folded)

    def _repr_html_(self) -> Markup:
        return Markup("").join(table._repr_html_() for table in self.tables())

    def __repr__(self) -> str:
        return printable("\n\n".join(map(repr, self.tables())))


def compare(a: Run | str | Path, b: Run | str | Path) -> RunComparison:
    """Compare run `b` with run `a`: their settings and versions, and their results over the steps that both have.

    Reads the runs' logs by column, so that memory grows with the number of steps and not with the size of the files;
    both may be training meanwhile. A part that cannot be read is left empty, with a warning.

    Args:
        a, b: Runs, or their names or paths.

    Raises:
        RunError: one of them cannot be opened.
    """
    runs = Run.of(a), Run.of(b)
    rows = [read_or(partial(run.stored, "metrics"), None) for run in runs]
    shared, places = _shared(rows)
    return RunComparison(
        names=_names(runs),
        settings=read_or(lambda: _settings(runs), _differences({}, {})),
        versions=read_or(lambda: _differences(*map(_ran_with, runs)), _differences({}, {})),
        metrics=_metrics(rows, places, shared),
        findings=pd.DataFrame(
            [finding for name, run in zip("ab", runs, strict=True) for finding in _findings(name, run)],
            columns=["run", "severity", "step", "rule", "message"],
        ),
        steps=_in_words(shared, rows),
    )


def read_or(make: Callable[[], Any], otherwise: Any) -> Any:
    """The value that `make` reads from a run; `otherwise`, with a warning, where the run's files are damaged."""
    try:
        return make()
    except Exception:  # whatever one file contains, the rest is compared
        logger.warning("a part of the comparison is left out", exc_info=True)
        return otherwise


def _names(runs: Sequence[Run]) -> tuple[str, str]:
    """Names that distinguish the two."""
    a, b = (run.name for run in runs)
    if a == b:
        a, b = (run.shown for run in runs)
    return (a, b) if a != b else (f"{a} (1)", f"{b} (2)")


def _settings(runs: Sequence[Run]) -> pd.DataFrame:
    found = runs[0].config.differences(runs[1].config)
    return _frame([(name, _text(a), _text(b)) for name, (a, b) in found.items()])


def _differences(a: dict[str, str], b: dict[str, str]) -> pd.DataFrame:
    names = dict.fromkeys([*a, *b])
    rows = [(name, a.get(name, _ABSENT), b.get(name, _ABSENT)) for name in names]
    return _frame([row for row in rows if row[1] != row[2]])


def _frame(rows: Sequence[tuple[str, str, str]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["setting", "a", "b"])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _ran_with(run: Run) -> dict[str, str]:
    """Packages, device and code as of the newest start, and the content that the run depends on."""
    events = run.stored("events")
    starts = events.places("kind", {"start", "resume"})
    newest = events[int(starts[-1])] if len(starts) else {}
    said = {str(key): value for key, value in newest.items() if key not in _WHEN and not isinstance(value, dict)}
    ledger = read_or(lambda: dependencies_file.read(run.path), None)
    entries = {} if ledger is None else ledger.entries
    return {key: _text(value) for key, value in said.items()} | {
        f"content of {name}": entry.digest[:12] for name, entry in entries.items()
    }


def _shared(rows: Sequence[LogRows | None]) -> tuple[Floats, list[Places]]:
    """The steps that both logs have, ascending, and the place of each in either: of a step logged twice the last."""
    steps, places = [], []
    for log in rows:
        found = None if log is None else log.numbers("step")
        values, at = (np.zeros(0), np.zeros(0, np.int64)) if found is None else (found.values[::-1], found.at[::-1])
        unique, first = np.unique(values, return_index=True)
        steps.append(unique)
        places.append(at[first])
    shared, of_a, of_b = np.intersect1d(steps[0], steps[1], assume_unique=True, return_indices=True)
    return shared, [places[0][of_a], places[1][of_b]]


def _metrics(rows: Sequence[LogRows | None], places: Sequence[Places], shared: Floats) -> pd.DataFrame:
    """Table of metrics, computed one key at a time, so that no more than two columns are in memory."""
    order = {row.name: n for n, row in enumerate([*HEADLINES, *keys.TABLE.values()][::-1])}
    known = {key: row for log in rows if log is not None for key in log.keys if (row := keys.row_of(key)) is not None}
    known.pop(keys.STEP, None)
    chosen = sorted(known, key=lambda key: (-order[known[key].name], key))[:MOST_KEYS]
    columns = [None if log is None else Columns(log.keys, partial(dense, log)) for log in rows]
    table = []
    for key in chosen:
        a, b = (_summary(log, key, at, shared) for log, at in zip(columns, places, strict=True))
        if a["mean"] is not None or b["mean"] is not None:
            line = {"metric": key, "unit": known[key].unit}
            line |= {f"{run}_{name}": value for run, part in (("a", a), ("b", b)) for name, value in part.items()}
            both = a["mean"] is not None and b["mean"] is not None
            table.append(line | {"difference": b["mean"] - a["mean"] if both else None})
    parts = [f"{run}_{name}" for run in "ab" for name in _PARTS]
    frame = pd.DataFrame(table, columns=["metric", "unit", *parts, "difference"])
    return frame.astype(dict.fromkeys([*parts, "difference"], float))


def _summary(log: Columns | None, key: str, places: Places, steps: Floats) -> dict[str, Any]:
    """Last, its step, mean and standard deviation of a key's finite numbers in the rows at these places.

    None without any. A label that did not occur in a step has a share of 0 there.
    """
    if log is None or not len(places):
        return dict.fromkeys(_PARTS)
    values = log[key][places]
    known = np.isfinite(values)
    values, steps = values[known], steps[known]
    if not len(values):
        return dict.fromkeys(_PARTS)
    found = (values[-1], steps[-1], values.mean(), values.std())
    return dict(zip(_PARTS, map(float, found), strict=True))


def _findings(name: str, run: Run) -> Iterator[tuple[str, str, int | None, str, str]]:
    for finding in read_or(lambda: diagnose(run, quick=True), []):
        yield name, finding.severity, finding.step, finding.rule, finding.message


def _in_words(shared: Floats, rows: Sequence[LogRows | None]) -> str:
    counts = [0 if log is None else len(log) for log in rows]
    if not len(shared):
        return f"no step is in both logs, which have {counts[0]} and {counts[1]} rows"
    first, last = int(shared[0]), int(shared[-1])
    return (
        f"{len(shared)} shared steps, {first} to {last}, of {counts[0]} and {counts[1]}; the spread is the standard "
        "deviation over steps"
    )
