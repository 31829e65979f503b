"""Several runs on one set of plots, with the settings that differ and where each run has come to."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_nb.evaluation.compare import is_of, logged
from grpo_nb.metrics import keys, limits
from grpo_nb.plots.canvas import Picture
from grpo_nb.plots.overlay import MOST_RUNS, Look, overlay
from grpo_nb.printable import printable
from grpo_nb.report import aloud
from grpo_nb.report.markup import Markup, html
from grpo_nb.report.report import shown_as_html
from grpo_nb.report.run_comparison import compare, read_or
from grpo_nb.report.tables import Table, interval
from grpo_nb.run.run import Run, RunError

WINDOW = 5
"""Newest steps whose mean stands for where a run has come to."""
MEASURES = ("accuracy", "reward")
"""Held-out measures that are shown, the first that an objective has."""


@dataclass(frozen=True)
class SeveralRuns:
    """Result of `several`; shows itself in a notebook and as text."""

    runs: Mapping[str, Run]
    settings: pd.DataFrame
    """Table with one row per setting that is not the same in all: setting, and a column for each run."""
    standing: pd.DataFrame
    """Table with one row per run: state, step, and of each objective the mean reward and KL of the newest steps and its
    newest held-out measure."""
    looks: Mapping[str, Look] | None = field(default=None, repr=False)

    @property
    def figure(self) -> Picture:
        """The curves, drawn from the logs as they are now."""
        objectives = [*dict.fromkeys(name for run in self.runs.values() for name in run.config.objectives)]
        rows = {name: read_or(partial(run.stored, "metrics"), pd.DataFrame()) for name, run in self.runs.items()}
        return overlay(rows, objectives, self.looks)

    def tables(self) -> Iterator[Table]:
        """Settings that differ, and where each run stands."""
        found = len(self.settings)
        yield Table(self.settings, f"{found} settings differ" if found else "no settings differ")
        yield Table(self.standing, f"means of the newest {WINDOW} steps; held-out measures with 95% intervals")

    def rows(self) -> dict[str, Any]:
        """The tables as plain lists of rows, for JSON."""
        return {name: getattr(self, name).to_dict(orient="records") for name in ("settings", "standing")}

    def _ipython_display_(self) -> None:
        from IPython.display import display

        aloud.show_picture(self.figure)
        for table in self.tables():
            display(table)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return printable("\n\n".join(map(repr, self.tables())))


def several(runs: Sequence[Run | str | Path], looks: Mapping[str, Look] | None = None) -> SeveralRuns:
    """Runs on one set of plots; they may be training meanwhile.

    Args:
        runs: Runs, or their names or paths.
        looks: colour and dashes by name of the run, where not all of a set are shown.

    Raises:
        RunError: one of them cannot be opened, or their number is 0 or more than colours and dashes distinguish.
    """
    if not 1 <= len(runs) <= MOST_RUNS:
        raise RunError(f"{len(runs)} runs to compare; needs 1 to {MOST_RUNS}, which colours and dashes distinguish")
    named = _named([Run.of(run) for run in runs])
    return SeveralRuns(named, _settings(named), _standing(named), looks)


def page(runs: Sequence[Run | str | Path]) -> str:
    """Runs on one set of plots as one HTML page, without kernel or network; for two runs with the result of `compare`.

    Raises:
        RunError: as `several`.
    """
    found = several(runs)
    parts: dict[str, list[Markup]] = {
        "Curves": [shown_as_html(found.figure)],
        "Settings and standing": [table._repr_html_() for table in found.tables()],
    }
    if len(found.runs) == 2:
        parts["Side by side"] = [compare(*found.runs.values())._repr_html_()]
    return str(html("report", name=" · ".join(found.runs), parts=parts))


def _named(runs: Sequence[Run]) -> dict[str, Run]:
    """The runs by unique names."""
    names = [run.name for run in runs]
    if len({*names}) < len(names):
        names = [run.shown for run in runs]
    found: dict[str, Run] = {}
    for name, run in zip(names, runs, strict=True):
        count = sum(known == name or known.startswith(f"{name} (") for known in found)
        found[f"{name} ({count + 1})" if count else name] = run
    return found


def _settings(runs: Mapping[str, Run]) -> pd.DataFrame:
    first, *others = runs.values()
    differing = [first.config.differences(other.config) for other in others]
    lines = []
    for key in dict.fromkeys(key for found in differing for key in found):
        usual = next(found[key][0] for found in differing if key in found)
        values = [usual, *(found[key][1] if key in found else usual for found in differing)]
        lines.append([key, *map(_text, values)])
    return pd.DataFrame(lines, columns=["setting", *runs])


def _standing(runs: Mapping[str, Run]) -> pd.DataFrame:
    return pd.DataFrame([{"run": name} | read_or(partial(_line, run), {}) for name, run in runs.items()])


def _line(run: Run) -> dict[str, Any]:
    status = run.status()
    line: dict[str, Any] = {"state": str(status.state), "step": status.step}
    newest = [*islice(run.newest_first("metrics"), WINDOW)]
    for name in run.config.objectives:
        for title, key in (("reward", keys.REWARD.of(name)), ("KL", keys.KL.of(name))):
            line[f"{name}: {title}"] = _mean(newest, key)
        line |= _held_out(run, name)
    return line


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = limits.bounded(
        key, pd.to_numeric(pd.Series([row.get(key) for row in rows]), errors="coerce").to_numpy(float)
    )
    known = values[pd.notna(values)]
    return float(known.mean()) if len(known) else None


def _held_out(run: Run, objective: str) -> dict[str, str]:
    """The newest measure of the newest weights on held-out examples, by its title; empty without one."""
    for mode in ("greedy", "quick"):
        rows = [row for row in logged(run, "test", mode) if row["objective"] == objective]
        rows = [row for row in rows if is_of(row, "latest") or str(row["stage"]).startswith("step")]
        if rows and (metric := next((name for name in MEASURES if name in rows[-1]["metrics"]), None)):
            numbers = rows[-1]["metrics"][metric]
            return {
                f"{objective}: {metric}, {mode}": interval(*(float(numbers[part]) for part in ("value", "low", "high")))
            }
    return {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
