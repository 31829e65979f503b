"""Opens a run or a configuration from the command line."""

import re
import shutil
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb.cli.options import UsageError, changes, preset
from grpo_nb.config import Config
from grpo_nb.evaluation.compare import Stage
from grpo_nb.run import dependencies_file, places, settings
from grpo_nb.run.lock import LOCK
from grpo_nb.run.places import CONFIG
from grpo_nb.run.run import Run, RunError

if TYPE_CHECKING:  # few runs have some
    from grpo_nb.jupyter.project import Own

MADE = frozenset({CONFIG, "knobs.json", dependencies_file.FILE, LOCK, "data"})
"""Entries of a run folder before any work, in addition to the locks of its files."""


@contextmanager
def open_run(arguments: Namespace, steps: int | None = None) -> Iterator[Run]:
    """The run of the command line, created where it is missing and settings are given.

    One that is made here is removed again where the command fails before anything was logged or saved in it.

    Raises:
        UsageError, RunError: as `_opened`.
    """
    path = path_of(arguments.run)
    there = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    run = _opened(arguments, steps)
    try:
        yield run
    except Exception:
        if CONFIG not in there:
            with suppress(RunError, OSError):  # e.g. another process trains it by now
                _remove(run, there, missing)
        raise


def _remove(run: Run, there: Collection[str], missing: Sequence[Path]) -> None:
    """Remove an unused run: all but the entries `there` before, and the folders that were `missing`."""
    with run.lock():
        made = [entry for entry in run.path.iterdir() if entry.name not in there]
        if not all(entry.name in MADE or re.fullmatch(r"\..*\.lock", entry.name) for entry in made):
            return
        for entry in sorted(made, key=lambda entry: entry.name != CONFIG):  # without it, it is no run any more
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for folder in missing:
        folder.rmdir()


def check_arguments(arguments: Namespace) -> None:
    """Refuse what can be refused without the model: a missing run, unknown settings, settings that contradict.

    Raises:
        UsageError: as `_refuse_missing`, or two tasks of one objective, two totals of steps, or settings that the run
            does not have.
        ConfigError: a setting is unknown or does not validate.
    """
    _refuse_missing(arguments)
    _refuse_two_tasks(arguments)
    path, given, steps = path_of(arguments.run), changes(arguments), getattr(arguments, "steps", None)
    start = preset(arguments.preset) if arguments.preset else None
    if not (path / CONFIG).exists():
        config = (start or preset("demo")).replace(**given)
        _refuse_two_totals(arguments.run, given, config.run.steps, steps)
        return
    run = Run.open(path)
    wanted = (start or run.config).replace(**given)
    if (differences := settings.contradictions(run.config, wanted, given)) and run.has_work():
        try:
            settings.refuse_contradiction(path, differences)
        except RunError as error:
            raise UsageError(str(error)) from error


def _refuse_two_tasks(arguments: Namespace) -> None:
    objectives = [objective for objective, _ in getattr(arguments, "task", None) or []]
    if twice := [name for name in objectives if objectives.count(name) > 1]:
        raise UsageError(f"--task names {twice[0]} {objectives.count(twice[0])} times; an objective has one task")


def _refuse_two_totals(name: str, given: Mapping[str, Any], total: int, steps: int | None) -> None:
    if steps is None or "run.steps" not in given or total == steps:
        return
    fewer, more = sorted((total, steps))
    raise UsageError(
        f"--steps {steps} and --set run.steps={total} both set the total of a new run; give one: "
        f"grpo-nb train {name} --steps {fewer}, and later grpo-nb train {name} --steps {more} to continue"
    )


def _refuse_missing(arguments: Namespace) -> None:
    """Refuse a missing run where no settings are given to create it.

    Raises:
        UsageError: names the path, and a command that makes it.
    """
    if not arguments.run.strip():
        raise UsageError("RUN is empty (an unset variable?); give the run directory, e.g. runs/demo")
    path = path_of(arguments.run)
    if not (path / CONFIG).exists() and arguments.preset is None and not changes(arguments):
        raise UsageError(f"{places.missing(path)}\nto make it, say how: grpo-nb train {path} --preset demo")


def _opened(arguments: Namespace, steps: int | None) -> Run:
    """The run, opened or made.

    Raises:
        UsageError: it is missing and no settings are given to create it, or it contradicts the settings given.
        RunError: it cannot be made or read.
    """
    _refuse_missing(arguments)
    path, given = path_of(arguments.run), changes(arguments)
    made = (path / CONFIG).exists()
    start = preset(arguments.preset) if arguments.preset else None
    try:
        run = Run.open_or_create(path, start, changes=given, steps=steps)
    except RunError as error:
        if made and "other settings" in str(error):
            raise UsageError(str(error)) from error
        raise
    if getattr(arguments, "yes", False):
        from grpo_nb.judge import host_trust

        host_trust.confirm(host_trust.pairs_of(run.config))
    return run


def existing_run(name: str) -> Run:
    """The run of that name or path.

    Raises:
        UsageError: it does not exist.
    """
    path = path_of(name)
    if not (path / CONFIG).exists():
        raise UsageError(places.missing(path))
    return Run.open(path)


def path_of(name: str) -> Path:
    """The folder of a run by its name or path; the path as given if it does not exist.

    Raises:
        RunError: as `places.locate`.
    """
    return places.locate(name) or places.as_path(name)


def settings_of(arguments: Namespace) -> Config:
    """The configuration of an existing run or of a preset, with the changes of the command line.

    Raises:
        UsageError: both a run and a preset are named.
    """
    if arguments.run is None:
        return preset(arguments.preset or "demo").replace(**changes(arguments))
    if arguments.preset is not None:
        raise UsageError(f"RUN ({arguments.run}) and --preset both name settings; give one of them")
    return existing_run(arguments.run).config.replace(**changes(arguments))


def accepted(arguments: Namespace) -> dict[str, Any]:
    """Option that accepts changed content, where it was given."""
    return {"accept_changed": arguments.accept_changed} if arguments.accept_changed else {}


def own_code(run: Run, arguments: Namespace | None = None, *, trains: bool = False) -> "Own":
    """The run's own tasks and reward functions, of --task and --reward or as this user's project file remembers them.

    Args:
        trains: whether GRPO follows, which needs the reward functions that the run was trained with.

    Raises:
        NotReady: a task or reward that the run needs is named nowhere.
        ConfigError: a path that cannot be imported.
    """
    from grpo_nb.jupyter import project

    tasks, rewards, named = getattr(arguments, "task", None), getattr(arguments, "reward", None), None
    if tasks or rewards:
        listed: dict[str, list[tuple[str, float]]] = {}
        for objective, entry in rewards or []:
            listed.setdefault(objective, []).append(entry)
        named = project.name_own(run, dict(tasks) if tasks else None, listed if rewards else None)
    return project.own_apart(run, named) if trains else project.imported(project.own_paths(run, named))


def newest_stage(run: Run) -> Stage:
    """The last stage that the run has weights of.

    Raises:
        RunError: it has GRPO checkpoints, and none of them verifies.
    """
    newest, damaged = run.checkpoints.latest()
    if newest is None and damaged:
        raise RunError(
            f"no GRPO checkpoint of {run.shown} verifies ({damaged[0].reason}); name a stage, e.g. --stage sft"
        )
    if newest is not None:
        return "latest"
    return "sft" if run.sft_checkpoints.latest()[0] is not None else "base"
