"""State of a run in one sentence and one colour: dead, failed, a full disk, another owner, nothing logged yet."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_nb.doctor.errors import explain_text
from grpo_nb.jupyter.workers import LAST_WORDS, LOG, WorkerFailed
from grpo_nb.report.markup import html
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage.vocabulary import Command, RunState

Severity = Literal["error", "warning", "info", "good"]

LOW_DISK = 64 * 2**20
"""Bytes free under which a checkpoint of the smallest runs may not fit."""
FULL_DISK = 2**20
BADGES: dict[Severity, str] = {"error": "#B3261E", "warning": "#8A5A00", "info": "#0B5CAD", "good": "#1A7F37"}
"""White on these is readable, and the badge brings its own ground: light and dark themes show the same."""
_STATES: dict[RunState, Severity] = {
    RunState.STARTING: "good",
    RunState.RUNNING: "good",
    RunState.PAUSED: "warning",
    RunState.STOPPING: "warning",
    RunState.FAILED: "error",
    RunState.DEAD: "error",
}


@dataclass(frozen=True)
class Notice:
    """One notice about the run at present."""

    severity: Severity
    text: str
    more: str = ""
    """Cause and the change to make, where they are known."""


def colour(state: RunState) -> str:
    """The ground of the badge of a state."""
    return BADGES[_STATES.get(state, "info")]


def notice_html(notices: Sequence[Notice], rest: str = "") -> str:
    """A line each with its badge in the theme's own ink, and in small what to do about it, as HTML."""
    return str(html("notices", notices=notices, colours=BADGES, rest=rest))


def notices(session: Any, state: RunState, step: int) -> list[Notice]:
    """Notices about the run in this state, the worst first."""
    disk, about = _disk(session.run, state, step), _about(session, state, step)
    ended = disk is not None and disk.severity == "error" and state.has_crashed  # the disk is why
    return [notice for notice in (disk, None if ended else about) if notice]


def _about(session: Any, state: RunState, step: int) -> Notice | None:
    run: Run = session.run
    if state is RunState.FAILED:
        cause = _cause(session)
        return Notice("error", f"failed after step {step}: {cause}", explain_text(cause) or "")
    if state is RunState.DEAD:
        owner = run.status().owner
        return Notice(
            "error",
            f"the trainer ({owner}) died after step {step} without saying why, as when a kernel is killed or memory "
            f"runs out. {_saved(run)}",
        )
    if state.is_active and not session.live and (owner := run.status().owner) is not None:
        return Notice(
            "info",
            f"trained by process {owner.pid} on {owner.host}, not by this kernel: this is a view of its files; "
            "knobs and buttons reach it.",
        )
    if state is RunState.RUNNING and run.knobs.command is not Command.RUN:
        return Notice("info", f"{run.knobs.command} requested: it takes effect after the current step.")
    if state is RunState.PAUSED:
        return Notice("info", f"paused before step {step + 1}; the model stays in memory. Press Resume to continue.")
    if state is RunState.CONTINUED:
        return Notice("info", "a later start continues this run: see its own view.")
    return _empty(run, state) if step == 0 else None


def _empty(run: Run, state: RunState) -> Notice | None:
    """Notice that the log is empty, and why."""
    if state in (RunState.STARTING, RunState.RUNNING):
        return Notice("info", "nothing logged yet: the model is being loaded, or the first step is under way.")
    return Notice("info", f"nothing logged yet: train it with grpo_nb.start('{run.shown}').")


def _cause(session: Any) -> str:
    """Error that ended the run, and where its details are: this kernel's exception, else the logged one."""
    error = session.error
    if isinstance(error, WorkerFailed):  # a process's last words may be twenty lines
        more = " and ".join(name for name in ("events.jsonl", LOG) if (session.run.path / name).exists())
        return f"{str(error).partition(LAST_WORDS)[0].rstrip('.')}. More is in {more}."
    if error is not None:
        more = "" if isinstance(error, RunError) else " The traceback is in events.jsonl."  # of a RunError none is kept
        return f"{type(error).__name__}: {error}".rstrip(".") + f".{more}"
    return "no cause was logged."


def _saved(run: Run) -> str:
    steps = run.checkpoints.steps()
    if not steps:
        return "No checkpoint was saved: Resume starts again from step 0."
    return f"Resume continues from the newest checkpoint, step {steps[-1]}."


def _disk(run: Run, state: RunState, step: int) -> Notice | None:
    try:
        free = shutil.disk_usage(run.path).free
    except OSError as error:
        return Notice(
            "error", f"{run.shown} cannot be reached ({error.strerror or error}): this view may be out of date."
        )
    if free >= LOW_DISK:
        return None
    if free >= FULL_DISK:
        return Notice("warning", f"the disk of {run.shown} is nearly full: {free / 2**20:.0f} MiB are free.")
    ended = f"training ended after step {step}" if state.has_crashed else "nothing can be logged or saved"
    return Notice("error", f"the disk of {run.shown} is full: {ended}. Free some space, then Resume.")
