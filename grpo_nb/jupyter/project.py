"""Folder of a project's runs, the current run, and opening a run from a notebook."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_nb import presets
from grpo_nb.config import Config, ConfigError
from grpo_nb.jupyter import kernel, project_file
from grpo_nb.jupyter.project_file import OwnPaths
from grpo_nb.printable import one_line
from grpo_nb.run import places
from grpo_nb.run.listing import list_runs
from grpo_nb.run.places import root
from grpo_nb.run.run import Run, RunError
from grpo_nb.run.status import RunSummary
from grpo_nb.storage.vocabulary import RunState
from grpo_nb.suggest import did_you_mean

if TYPE_CHECKING:  # slow to import, and the first import of the package in a kernel lists the runs
    from grpo_nb.report.tables import Table


class NotReady(RunError):
    """Raised when the run does not exist yet, or lacks the result of an earlier notebook. It shows as one line."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def run_path(name: str | Path) -> Path:
    """Folder of the run of that name or path; `runs/<name>` in the project if it does not exist.

    Raises:
        RunError: as `places.locate`.
    """
    return places.locate(name) or root() / "runs" / places.as_path(name)


def open_run(
    name: str | Path | None = None,
    *,
    preset: str | None = None,
    changes: Mapping[str, Any] | None = None,
    tasks: Mapping[str, str] | None = None,
    rewards: Mapping[str, Sequence[str | tuple[str, float]]] | None = None,
    needs: Literal["sft", "grpo"] | None = None,
) -> Run:
    """Open a notebook's run, and show which it is: by its name or path, or the project's current run.

    With `preset`, make it from the preset and the dotted `changes` where it is missing, and let it be the current run.

    Args:
        tasks, rewards: with `preset`, import paths of own tasks and reward functions by objective, which the project
            keeps for this run; None leaves those that it has. `own` imports them.
        needs: what must be in it already: the result of `sft`, or steps of `grpo`.

    Raises:
        NotReady: it is missing or lacks what is needed; the message names the notebook that makes it.
        RunError: it was made with other settings.
        ConfigError: unknown preset or setting, or a path that cannot be imported.
    """
    if preset is not None and name is not None:
        paths = None if tasks is None and rewards is None else OwnPaths.of(tasks or {}, rewards or {})
        imported(paths or OwnPaths())  # before anything is made
        run = Run.open_or_create(run_path(name), preset_of(preset), changes=changes)
        project_file.remember(run.path, f"{datetime.now():%Y-%m-%d %H:%M}", paths)
        return run
    path = current() if name is None else run_path(name)
    if not (path / places.CONFIG).is_file():
        there = places.missing(path if name is None or places.as_path(name).name == str(name) else name)
        raise NotReady(f"{there}; to make it, run notebook 01_load first, with RUN = {str(name)!r}")
    run = Run.open(path)
    if kernel.in_notebook():
        kernel.notify(opened(run, chosen=name is not None))
    if needs == "sft" and not _finished(run):
        raise NotReady(f"SFT of run {run.name} is not finished: run notebook 02_sft first")
    if needs == "grpo" and run.last_step() is None:
        raise NotReady(f"run {run.name} has no GRPO steps yet: run notebook 03_grpo first")
    return run


def current() -> Path:
    """The folder of the project's current run; without one, of its only run.

    Raises:
        NotReady: no run exists, the current one is missing, or several exist to choose from.
    """
    kept, found = project_file.read().run, places.run_folders(root() / "runs")
    if kept is not None and (root() / kept / places.CONFIG).is_file():
        return root() / kept
    if kept is None and len(found) == 1:
        return found[0]
    what = "this project has no current run" if kept is None else f"the project's current run {kept} is missing"
    names = ", ".join(sorted(folder.name for folder in found)[: places.MOST_NAMED])
    others = f", or choose one by RUN = 'name' in the settings cell (runs there: {names})" if found else ""
    raise NotReady(f"{what}; make one in notebook 01_load{others}")


def opened(run: Run, *, chosen: bool) -> str:
    """Sentence that names the run a notebook has opened; `chosen`: by name."""
    kept = project_file.read()
    if not chosen:
        why = f"the project's current run since {kept.since}" if kept.run else "the only run of this project"
        return f"run {run.name} in {run.shown}: {why}; RUN = 'name' opens another one"
    if kept.run in (None, project_file.key(run.path)):
        return f"run {run.name} in {run.shown}"
    return f"run {run.name} in {run.shown}: chosen here; notebooks without a RUN of their own open {kept.run}"


@dataclass(frozen=True)
class Own:
    """A run's own tasks and reward functions by objective, as `start` and `evaluate` take them."""

    tasks: dict[str, Any]
    rewards: dict[str, list[tuple[Any, float]]]

    def given(self, *names: str) -> dict[str, Any]:
        """Those of `tasks` and `rewards` that are in `names` and not empty, as keyword arguments."""
        return {name: value for name in names if (value := getattr(self, name))}


def own(run: Run) -> Own:
    """Import the tasks and reward functions that this user's project file names for this run.

    Raises:
        NotReady: an objective's task is not built in, and the project has no path for it.
        ConfigError: a path that cannot be imported.
    """
    found = imported(own_paths(run))
    if lacking := _lacking(run, found):
        kernel.notify(f"{_unnamed(run, lacking)}, else its next steps go without")
    return found


def own_apart(run: Run, named: OwnPaths | None = None) -> Own:
    """Tasks and rewards for a training in another process, unwatched: none of the run's rewards may be missing.

    Args:
        named: the paths, where they were just named, whether the project's file could be written or not.

    Raises:
        NotReady: as `own`; or reward functions that the run was trained with have no path, and nothing was named for
            this run.
        ConfigError: a path that cannot be imported.
    """
    found = imported(own_paths(run, named))
    known = named is not None or project_file.key(run.path) in project_file.read().own
    if not known and (lacking := _lacking(run, found)):
        first = lacking[0].rpartition(" of ")[2]
        raise NotReady(
            f"{_unnamed(run, lacking)}, or on the command line (--reward {first}=own:name=0.1). "
            "REWARDS = {} in that cell lets its next steps go without"
        )
    return found


def name_own(
    run: Run,
    tasks: Mapping[str, str] | None,
    rewards: Mapping[str, Sequence[str | tuple[str, float]]] | None,
) -> OwnPaths:
    """Keep import paths of a run's own tasks and reward functions, and give them; None leaves those that are kept.

    Raises:
        ConfigError: a path that cannot be imported, or an objective that the run does not have.
    """
    before = project_file.read().own.get(project_file.key(run.path), OwnPaths())
    now = OwnPaths.of(before.tasks if tasks is None else tasks, before.rewards if rewards is None else rewards)
    if strangers := {*now.tasks, *now.rewards} - run.config.objectives.keys():
        raise ConfigError(
            f"own code is named for {min(strangers)!r}; the objectives of {run.name} are "
            f"{', '.join(run.config.objectives)}{did_you_mean(min(strangers), run.config.objectives)}"
        )
    now = now.model_copy(update={"beside": os.getcwd()})
    imported(now)  # before anything is kept
    project_file.name(run.path, now)
    return now


def refuse_objects(run: Run, tasks: Mapping[str, Any], rewards: Mapping[str, Any]) -> None:
    """Refuse tasks and rewards for another process that are not what this user's project file names for the run.

    Raises:
        NotReady: they are not, or as `own_apart`.
        ConfigError: a path that cannot be imported.
    """
    found = own_apart(run)
    unknown = [f"tasks[{name!r}]" for name, task in tasks.items() if not _same(task, found.tasks.get(name))]
    for name, given in rewards.items():
        weighed = [entry if isinstance(entry, tuple) else (entry, 1.0) for entry in given]
        known = found.rewards.get(name, [])
        if len(weighed) != len(known) or not all(
            _same(function, other) and weight == same
            for (function, weight), (other, same) in zip(weighed, known, strict=True)
        ):
            unknown.append(f"rewards[{name!r}]")
    if unknown:
        raise NotReady(
            f"{', '.join(unknown)}: a Python object of this kernel cannot reach a process of its own. Put it into a "
            "file (own.py in the notebook's folder) and name it in the settings cell of 01_load (TASKS, REWARDS), or "
            "train in a thread (where='thread')"
        )


def _same(given: Any, found: Any) -> bool:
    """Whether two tasks or reward functions are identical, or equal and of one class."""
    if given is found:
        return True
    try:
        return type(given) is type(found) and bool(vars(given) == vars(found))
    except (TypeError, ValueError, RuntimeError):  # no attributes, or some that cannot be compared
        return False


def own_paths(run: Run, named: OwnPaths | None = None) -> OwnPaths:
    """The import paths of a run, one for each task that is not built in; `named`, or as the project's file has them.

    Raises:
        NotReady: one is missing.
    """
    from grpo_nb.tasks import BUILT_IN

    paths = named or project_file.read().own.get(project_file.key(run.path), OwnPaths())
    for name, objective in run.config.objectives.items():
        if objective.task not in BUILT_IN and name not in paths.tasks:
            raise NotReady(
                f"objective {name} of run {run.name} has the task {objective.task!r}, which is not built in, and "
                f"{project_file.file()} has no import path for it. Name its class in the settings cell of 01_load "
                f"(own.py lies in the same folder): TASKS = {{{name!r}: 'own:Name'}}; on the command line: --task "
                f"{name}=own:Name"
            )
    return paths


def imported(paths: OwnPaths) -> Own:
    """The objects that import paths mean; of a class, an object.

    Raises:
        ConfigError: a path that cannot be imported, or a class that cannot make an object by itself.
    """

    def found(path: str) -> Any:
        return project_file.made(path, project_file.load(path, paths.beside))

    rewards = {name: [(found(path), weight) for path, weight in listed] for name, listed in paths.rewards.items()}
    return Own({name: found(path) for name, path in paths.tasks.items()}, rewards)


def _unnamed(run: Run, lacking: Sequence[str]) -> str:
    return (
        f"run {run.name} was trained with reward functions that this project does not name ({', '.join(lacking)}): "
        "give their import paths as REWARDS in the settings cell of 01_load"
    )


def _lacking(run: Run, found: Own) -> list[str]:
    """Reward functions that the run's newest checkpoint names and that were not found."""
    from grpo_nb.judge.tally import NAME as JUDGE
    from grpo_nb.rewards.rubric import function_name

    newest, _ = run.checkpoints.latest()
    judged: dict[str, list[str]] = {}
    if newest is not None:
        with suppress(RunError):  # a resume reports the checkpoint's error
            judged = newest.state("judged_by")["judged_by"]
    lacking = []
    for objective, settings in run.config.objectives.items():
        known = {function_name(function) for function, _ in found.rewards.get(objective, [])}
        known |= {JUDGE} if settings.judge is not None else set()
        names = [entry.partition(" x ")[2] for entry in judged.get(objective, [])[1:]]  # the first is the task
        lacking += [f"{name} of {objective}" for name in names if name not in known]
    return lacking


def runs(folder: str | Path | None = None) -> "Table":
    """Table of every run in `folder` (by default the project's runs): its state, its steps, and the next action."""
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
    """Next action for a run: a line that can be pasted into a cell of this folder."""
    state = "warmed up" if summary.state is RunState.NEW and _warmed_up(summary.path) else summary.state
    if summary.state is RunState.UNREADABLE:
        return summary.problem or "it cannot be read"
    if summary.sft is not None and summary.sft[0] < summary.sft[1] and not summary.state.is_live:
        state = "SFT begun"
    return _NEXT.get(state, "").format(repr(os.path.relpath(summary.path)))


def _warmed_up(path: Path) -> bool:
    """Whether SFT is complete; the newest folder's name shows it, which is enough for a list."""
    run = Run.open(path)
    return max(run.sft_checkpoints.steps(), default=0) >= run.config.sft.steps


_NEXT = {
    RunState.NEW: "02_sft, then 03_grpo",
    "warmed up": "03_grpo",
    "SFT begun": "resume: grpo_nb.start({}, stage='sft')",
    RunState.RUNNING: "watch: grpo_nb.attach({})",
    RunState.PAUSED: "watch: grpo_nb.attach({})",
    RunState.STOPPED: "resume: grpo_nb.start({})",
    RunState.DEAD: "its kernel is gone; resume: grpo_nb.start({})",
    RunState.FAILED: "read 04_diagnostics, then resume: grpo_nb.start({})",
    RunState.DONE: "04_diagnostics",
}


def preset_of(name: str) -> Config:
    """The settings of a preset.

    Raises:
        ConfigError: no preset has that name.
    """
    if name not in presets.PRESETS:
        raise ConfigError(f"there is no preset {name!r}; there are {', '.join(sorted(presets.PRESETS))}")
    return presets.PRESETS[name]()
