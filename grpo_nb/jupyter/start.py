"""`start(run)` and `attach(run)`: the two ways from a run to its session."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from grpo_nb.config import Config, ConfigError
from grpo_nb.jupyter import kernel
from grpo_nb.jupyter.session import Session
from grpo_nb.jupyter.workers import Job, Rewards, Stage, Where, live_session, refuse_if_live
from grpo_nb.ranks.launch import MOST_RANKS
from grpo_nb.run.dependencies_file import accepted_kinds
from grpo_nb.run.run import Run
from grpo_nb.suggest import did_you_mean

if TYPE_CHECKING:  # slow to import, so `start` leaves them to the worker and the dashboard
    from grpo_nb.tasks import Task


def start(
    run: Run | str | Path,
    *,
    config: Config | None = None,
    tasks: Mapping[str, "Task"] | None = None,
    rewards: Rewards | None = None,
    steps: int | None = None,
    stage: Stage = "grpo",
    where: Where | None = None,
    gpus: int | None = None,
    fresh: bool = False,
    accept_changed: Collection[str] = (),
) -> Session:
    """Start training `run` and return at once; a run that stopped earlier continues from its saved state.

    At its end, a script waits for the threads that train in it, and logs the wait and any failure: only
    `session.wait_blocking()` raises it, and makes it the exit status. A notebook's kernel waits for nothing.

    Args:
        run: a Run, or its name or path; made if it is missing where `config` is given.
        tasks, rewards: own tasks and extra reward functions by objective, as in `train.grpo`. A process of its own
            imports those that this user's project file names for the run (TASKS, REWARDS of 01_load; `--task`,
            `--reward` of `grpo-nb`), and may be given no others.
        steps: stop after this many steps in total; None: the configuration's number.
        stage: `grpo` or `sft`.
        where: `thread` of this kernel; `process` of its own, which lives on when the kernel dies (attach to it
            again with `attach`); `torchrun`, the same on several GPUs; `foreground`, where the cell waits. None: a
            thread, or the foreground in a kernel that would not serve a thread; with `gpus`, torchrun.
        gpus: with torchrun, how many processes train together, one on each GPU (on a machine without, on its CPU).
        accept_changed: kinds of content that may differ from the run's start (`data`, `weights`, `tokenizer`,
            `template`, `prompt`, `generation`, `optimizer`), at this one start; each change is logged.
        fresh: begin GRPO anew from its start; existing files are set aside, nothing is deleted.

    Raises:
        ConfigError: an unknown `stage`, `where` or kind in `accept_changed`; `gpus` without torchrun, or
            torchrun without `gpus`.
        RunError: the run is missing, or already trains, here or elsewhere; or a process needs tasks or rewards that the
            project file does not name for the run.
    """
    for name, value, known in (("stage", stage, get_args(Stage)), ("where", where, get_args(Where))):
        if value is not None and value not in known:
            raise ConfigError(f"{name}={value!r}; needs one of {', '.join(known)}{did_you_mean(str(value), known)}")
    accepted, ranks = accepted_kinds(accept_changed), _ranks(where, gpus)
    if isinstance(run, str | Path):
        run = Run.open(run) if config is None else Run.open_or_create(run, config)
    place = where or ("torchrun" if gpus is not None else kernel.usual_place())
    job = Job(run, stage, place, tasks, rewards, steps, accepted, ranks)
    refuse_if_live(run)
    if fresh:
        begin_anew(run)
    session = Session(run, job)
    session.begin()
    return session


def _ranks(where: Where | None, gpus: int | None) -> int:
    """Number of processes that train."""
    if (where == "torchrun") is (gpus is None) and where is not None:
        found = "where='torchrun' without gpus" if gpus is None else f"where={where!r} with gpus={gpus}"
        raise ConfigError(f"{found}; several GPUs need both: start(run, where='torchrun', gpus=2)")
    if gpus is not None and not (isinstance(gpus, int) and 1 <= gpus <= MOST_RANKS):
        raise ConfigError(f"gpus={gpus!r}; needs a number from 1 to {MOST_RANKS}")
    return gpus or 1


def attach(run: Run | str | Path) -> Session:
    """The session of a run that this kernel trains, or else a view of the files of a live, finished or dead run."""
    run = Run.of(run)
    found: Session | None = live_session(run.path)
    return found or Session(run)


def begin_anew(run: Run) -> None:
    """Take GRPO back to where it started: rows and checkpoints are set aside, knobs are as configured again.

    Raises:
        RunError: it trains just now.
    """
    with run.lock():
        moved = run.rewind(0)
        run.knobs.reset(by="fresh start")
        run.log_event("begun_anew", step=0, set_aside=moved)
