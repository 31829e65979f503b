"""Where runs live in a project, and opening one from a notebook by its name."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_nb import presets
from grpo_nb.config import Config, ConfigError
from grpo_nb.printable import one_line
from grpo_nb.run import places
from grpo_nb.run.listing import list_runs
from grpo_nb.run.places import root
from grpo_nb.run.run import Run, RunError
from grpo_nb.run.status import RunSummary
from grpo_nb.storage.vocabulary import RunState

if TYPE_CHECKING:  # slow to import, and the first import of the package in a kernel lists the runs
    from grpo_nb.report.tables import Table


class NotReady(RunError):
    """The run is not there yet, or lacks what an earlier notebook makes. A notebook shows it as one line."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def run_path(name: str | Path) -> Path:
    """Where the run of that name or path lives; where there is none, `runs/<name>` in the project.

    Raises:
        RunError: as `places.locate`.
    """
    return places.locate(name) or root() / "runs" / places.as_path(name)


def open_run(
    name: str | Path,
    *,
    preset: str | None = None,
    changes: Mapping[str, Any] | None = None,
    needs: Literal["sft", "grpo"] | None = None,
) -> Run:
    """Open a notebook's run by its name or path; with `preset`, make it from the preset and the dotted `changes`.

    Args:
        needs: what must be in it already: the result of `sft`, or steps of `grpo`.

    Raises:
        NotReady: it is missing or lacks what is needed; the message names the notebook that makes it.
        RunError: it was made with other settings.
        ConfigError: unknown preset or setting.
    """
    path = run_path(name)
    if preset is not None:
        return Run.open_or_create(path, _preset(preset), changes=changes)
    if not (path / places.CONFIG).is_file():
        there = places.missing(path if places.as_path(name).name == str(name) else name)
        raise NotReady(f"{there}; to make it, run notebook 01_load first, with RUN = {str(name)!r}")
    run = Run.open(path)
    if needs == "sft" and not _finished(run):
        raise NotReady(f"SFT of run {run.name} is not finished: run notebook 02_sft first, with RUN = {str(name)!r}")
    if needs == "grpo" and run.last_step() is None:
        raise NotReady(f"run {run.name} has no GRPO steps yet: run notebook 03_grpo first, with RUN = {str(name)!r}")
    return run


def runs(folder: str | Path | None = None) -> "Table":
    """Every run in `folder` (by default the project's runs): its state, its steps, and what to do with it."""
    import pandas as pd

    from grpo_nb.report.tables import Table

    folder = root() / "runs" if folder is None else Path(folder)
    rows = [
        {"run": s.name} | dict(zip(("state", "step", "steps"), s.shown, strict=True)) | {"next": _next(s)}
        for s in list_runs(folder)
    ]
    return Table(pd.DataFrame(rows), f"runs in {folder}" if rows else f"no runs in {folder} yet")


def runs_summary(folder: str | Path | None = None, limit: int = 5) -> str | None:
    """The newest runs of `folder` (by default the project's), a line each with what to do; None without any."""
    found = list_runs(root() / "runs" if folder is None else folder)
    lines = [one_line("{}: {}, step {} of {}; {}".format(s.name, *s.shown, _next(s))) for s in found[:limit]]
    if len(found) > limit:
        lines.append(f"and {len(found) - limit} older: grpo_nb.jupyter.project.runs() lists them")
    return "\n".join(lines) or None


def _finished(run: Run) -> bool:
    from grpo_nb.training.sft import finished

    return finished(run)


def _next(summary: RunSummary) -> str:
    """What to do with a run: a line that can be pasted into a cell of this folder."""
    state = "warmed up" if summary.state is RunState.NEW and _warmed_up(summary.path) else summary.state
    if summary.state is RunState.UNREADABLE:
        return summary.problem or "it cannot be read"
    if summary.sft is not None and summary.sft[0] < summary.sft[1] and not summary.state.is_live:
        state = "SFT begun"
    return _NEXT.get(state, "").format(repr(os.path.relpath(summary.path)))


def _warmed_up(path: Path) -> bool:
    """Whether nothing is left of SFT; the newest folder's name says it, which is enough for a list."""
    run = Run.open(path)
    return max(run.sft_checkpoints.steps(), default=0) >= run.config.sft.steps


_NEXT = {
    RunState.NEW: "02_sft, then 03_grpo",
    "warmed up": "03_grpo",
    "SFT begun": "resume: grpo_nb.start({}, stage='sft')",
    RunState.RUNNING: "look at it: grpo_nb.attach({})",
    RunState.PAUSED: "look at it: grpo_nb.attach({})",
    RunState.STOPPED: "resume: grpo_nb.start({})",
    RunState.DEAD: "its kernel is gone; resume: grpo_nb.start({})",
    RunState.FAILED: "read 04_diagnostics, then resume: grpo_nb.start({})",
    RunState.DONE: "04_diagnostics",
}


def _preset(name: str) -> Config:
    if name not in presets.PRESETS:
        raise ConfigError(f"there is no preset {name!r}; there are {', '.join(sorted(presets.PRESETS))}")
    return presets.PRESETS[name]()
