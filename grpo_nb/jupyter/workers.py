"""Workers that train for a session: a thread of this kernel, or a separate process that outlives it.

Both are threads here. The one trains; the other waits for the process, which needs neither it nor the kernel.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_nb import fingerprint
from grpo_nb.jupyter import kernel, process_exit
from grpo_nb.printable import clean_logger
from grpo_nb.ranks import launch
from grpo_nb.run.lock import LOCK, RunLock, release_here
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage import safe_open
from grpo_nb.storage.files import separate
from grpo_nb.storage.vocabulary import Command, RunState

if TYPE_CHECKING:  # slow to import, so `start` leaves them to the worker
    from grpo_nb.rewards.rubric import RewardFunction
    from grpo_nb.tasks import Task
    from grpo_nb.types import Steps

logger = clean_logger(__name__)

Stage = Literal["sft", "grpo"]
Where = Literal["thread", "process", "foreground", "torchrun"]
Rewards = Mapping[str, Sequence["RewardFunction | tuple[RewardFunction, float]"]]

LOG = "worker.log"
"""Output of the newest process, in the run's folder."""
POLL_SECONDS = 0.1
TAIL_LINES, TAIL_BYTES = 20, 8192
LAST_WORDS = "; the end of "
"""Text between the error that ended a process and the end of its log."""
HANG_SECONDS = 30.0
"""Seconds that a step may take after a requested stop before the session reports what it waits for."""
HEAD_START = 0.3
"""Seconds that a cell has to end before a thread starts to train: the first imports would hold it up."""
ENDED_WELL = (0, 130)
"""Exit status of `grpo-nb`: done, or interrupted and saved."""


class WorkerFailed(RunError):
    """The process that trained ended badly; the message has the end of its log."""


class AlreadyTraining(RunError):
    """Raised when a second trainer was refused. Shown as one line, which gives the choices."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@dataclass(frozen=True)
class Job:
    """Training of a session, and its place: enough to begin it again after a stop."""

    run: Run
    stage: Stage = "grpo"
    where: Where = "thread"
    tasks: "Mapping[str, Task] | None" = None
    rewards: Rewards | None = None
    steps: int | None = None
    accept_changed: frozenset[str] = frozenset()
    """Kinds of content that may differ from the run's start, at this one start."""
    gpus: int = 1
    """Ranks, where torchrun starts them."""

    def __post_init__(self) -> None:
        if self.apart:
            from grpo_nb.jupyter import project  # a thread needs none of it

            project.refuse_objects(self.run, self.tasks or {}, self.rewards or {})

    @property
    def apart(self) -> bool:
        """Whether it trains in separate processes, which outlive this one."""
        return self.where in ("process", "torchrun")

    def complete(self) -> bool:
        """Whether a checkpoint of the last requested step exists already (GRPO; SFT finds out for itself)."""
        goal = self.run.config.run.steps if self.steps is None else self.steps
        saved = self.run.checkpoints.steps() if self.stage == "grpo" else []
        return bool(saved) and max(saved) >= goal and (self.run.last_step() or 0) >= goal

    def work(self) -> "Steps":
        """Run the training itself, in this process."""
        accepted: dict[str, Any] = {"accept_changed": self.accept_changed} if self.accept_changed else {}
        if self.stage == "sft":
            from grpo_nb.training.sft import finished, sft

            if not finished(self.run):
                yield from sft(self.run, tasks=self.tasks, **accepted)
        else:
            from grpo_nb.training.grpo import grpo

            yield from grpo(self.run, tasks=self.tasks, rewards=self.rewards, steps=self.steps, **accepted)

    def command(self) -> list[str]:
        """Command line of the job: GRPO from the run's newest step, as `work` does it."""
        verb = ["sft"] if self.stage == "sft" else ["train", "--no-sft"]
        steps = ["--steps", str(self.steps)] if self.steps is not None and self.stage == "grpo" else []
        accepted = [part for kind in sorted(self.accept_changed) for part in ("--accept-changed", kind)]
        program = ["grpo_nb", verb[0], str(self.run.path.resolve()), *verb[1:], *steps, *accepted]
        return launch.command(program, self.gpus) if self.where == "torchrun" else [sys.executable, "-m", *program]

    def worker(self, session: Any) -> "Worker":
        """Worker for the job; not started yet."""
        kind = {"process": ProcessWorker, "torchrun": TorchrunWorker}.get(self.where, ThreadWorker)
        return kind(session, self)


class Worker(threading.Thread):
    """Thread that trains. It references its session, so the threads alive are the register of live sessions.

    A register in a module would be emptied when the module is reloaded, and would then let a second
    trainer start; a thread outlives every reload.
    """

    def __init__(self, session: Any, job: Job) -> None:
        super().__init__(name=f"grpo_nb {job.run.name}", daemon=True)
        self.grpo_nb_session = session
        self.job = job
        self.error: BaseException | None = None
        self.failure: process_exit.Failure | None = None
        """Failure as which `error` is logged at the end of a script."""
        self.asked_to_stop = threading.Event()
        self.overdue = threading.Event()
        """Set when a requested stop has taken longer than HANG_SECONDS; the next request interrupts the step."""
        self._delayed: threading.Timer | None = None
        """Timer that reports a stop that takes too long."""

    def run(self) -> None:
        try:
            self.work()
        finally:
            if self._delayed is not None:
                self._delayed.cancel()  # else it keeps the session for HANG_SECONDS

    def work(self) -> None:
        """Work of the thread."""
        raise NotImplementedError

    def ask_to_stop(self) -> None:
        """Request a stop after the present step. A second request, once it is overdue, interrupts the step."""
        if self.asked_to_stop.is_set() and self.overdue.is_set():
            self.break_off()
        elif not self.asked_to_stop.is_set():
            self.asked_to_stop.set()
            self._delayed = threading.Timer(HANG_SECONDS, self._report_delay)
            self._delayed.daemon = True
            self._delayed.start()

    def break_off(self) -> None:
        """End the training within the step, whose work is lost."""
        raise NotImplementedError

    def waits_for(self) -> str:
        """Description of the running step's work."""
        raise NotImplementedError

    def _report_delay(self) -> None:
        if not self.is_alive() or not self.asked_to_stop.is_set():
            return
        self.overdue.set()
        session, run = self.grpo_nb_session, self.job.run
        with contextlib.suppress(RunError, OSError):  # another trainer may have taken over; the warning is for here
            run.log_event("stop_delayed", step=session.step, seconds=HANG_SECONDS, waits_for=self.waits_for())
        logger.warning(
            "%s has not stopped %.0f s after the request: it waits for %s. It stops when that returns; "
            "`session.stop()` again breaks the step off, and the run resumes from its newest checkpoint",
            *(run.name, HANG_SECONDS, self.waits_for()),
        )


class ThreadWorker(Worker):
    """Trains in this kernel, once the cell that started it has ended; a script that comes to its end waits for it."""

    def __init__(self, session: Any, job: Job) -> None:
        super().__init__(session, job)
        self._cell_end = kernel.cell_end() if job.where == "thread" else None

    def start(self) -> None:
        if not kernel.in_notebook():
            process_exit.outlast_script()
        super().start()

    def work(self) -> None:
        if self._cell_end is not None:
            self._cell_end.wait(HEAD_START)  # a cell that starts and waits ends no sooner than the run
        try:
            with contextlib.closing(self.job.work()) as steps:
                for _ in steps:
                    if self.asked_to_stop.is_set() and not self._passed_on():
                        break
        except BaseException as error:  # the waiting cell raises it, whatever it is
            self._failed(error)
        process_exit.return_memory()

    def waits_for(self) -> str:
        """The innermost frames of the thread's stack, the caller's own code first."""
        frame = sys._current_frames().get(self.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
        own = str(fingerprint.ROOT)
        foreign = [
            f for f in stack if not f.filename.startswith(own) and f"{os.sep}site-packages{os.sep}" not in f.filename
        ]
        inner = [f for f in foreign if not f.filename.startswith((sys.base_prefix, "<frozen"))] or list(stack)
        return " < ".join(f"{f.name} ({f.filename}, line {f.lineno})" for f in reversed(inner[-2:])) or "its last call"

    def break_off(self) -> None:
        """Raise KeyboardInterrupt in the thread: it takes effect when the thread is back in Python code."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(KeyboardInterrupt))

    def _passed_on(self) -> bool:
        """Request a stop from GRPO again, since requests while it was loading are dropped. SFT has to be closed.

        So has GRPO where knobs.json cannot be written: closing it saves as well, but logs no `stopped`.
        """
        if self.job.stage == "sft":
            return False
        try:
            self.job.run.knobs.request(Command.STOP)
        except RunError as error:
            logger.warning("%s: %s is closed instead", error, self.job.run.name)
            return False
        return True

    def _failed(self, error: BaseException) -> None:
        run = self.job.run
        self.failure = process_exit.failed(f"{run.name} failed: {type(error).__name__}: {error}")
        self.error = error
        trace = "".join(traceback.format_exception(error))
        traceback.clear_frames(error.__traceback__)  # they hold the model and the batch: memory for the next start
        logger.info("%s failed: %s", run.name, error)  # no warning: it would stand under whichever cell ran last
        if isinstance(error, RunError):  # nothing of this run's doing, and another process may own its log
            return
        with contextlib.suppress(RunError, OSError):  # a full or read-only disk must not hide the first error
            step = self.grpo_nb_session.step
            run.log_event("traceback", step=step, error=type(error).__name__, traceback=trace)


class ProcessWorker(Worker):
    """Waits for a process that trains in a session of its own, so that no signal of the kernel's reaches it."""

    def __init__(self, session: Any, job: Job) -> None:
        super().__init__(session, job)
        self.process = _spawn(job.command(), job.run.path / LOG, self.variables())

    def variables(self) -> Mapping[str, str]:
        """Environment variables of the process in addition to this one's."""
        return {}

    def work(self) -> None:
        status = self.process.wait()
        stopped = self.asked_to_stop.is_set() and status == -signal.SIGTERM
        if status not in ENDED_WELL and not stopped:
            self.error = self.failed(status)
            logger.info("%s", self.error)

    def failed(self, status: int) -> WorkerFailed:
        """Error for a process that ended badly."""
        return WorkerFailed(_sentence(self.job.run, status))

    def ask_to_stop(self) -> None:
        """Send a signal too: requests in knobs are dropped while it loads; a second signal ends it at once."""
        first = not self.asked_to_stop.is_set()
        super().ask_to_stop()
        if first:
            self.terminate()

    def waits_for(self) -> str:
        return f"process {self.process.pid} (its output is in {self.job.run.path / LOG})"

    def break_off(self) -> None:
        """Send the second signal: the process ends within the step."""
        self.terminate()

    def terminate(self) -> None:
        """Send the process the signal to stop."""
        self.process.terminate()


class TorchrunWorker(ProcessWorker):
    """Worker for torchrun and its ranks, of which rank 0 obeys and saves."""

    def variables(self) -> Mapping[str, str]:
        return launch.environment(self.job.gpus)

    def failed(self, status: int) -> WorkerFailed:
        """torchrun's own last words are a table; rank 0 has logged which rank failed, and how."""
        return recorded_failure(self.job.run) or super().failed(status)

    def terminate(self) -> None:
        launch.stop(self.process, RunLock(self.job.run.path / LOCK))


def refuse_if_live(run: Run) -> None:
    """Refuse a second trainer on one run.

    Raises:
        AlreadyTraining: it trains in this kernel or in another process; the message gives the choices.
    """
    refuse_if_here(run.path)
    status = run.status()
    if status.state.is_live:
        raise AlreadyTraining(
            f"{run.name} is {status.state} in another process ({status.owner}, step {status.step}): watch it and "
            f"stop it with `grpo_nb.attach('{run.shown}')`, wait until it ends, or train a run of another name"
        )


def refuse_if_here(path: Path) -> None:
    """Refuse where a session of this kernel trains the run in `path`.

    Raises:
        AlreadyTraining: it trains it, in a thread or in a process that this kernel started.
    """
    if (here := live_session(path)) is not None:
        run = here.run
        place = "in this kernel" if here.where in ("thread", "foreground") else "in a process that this kernel started"
        raise AlreadyTraining(
            f"{run.name} is already training {place} (step {here.step} of {here.steps}): wait for it (`await "
            f"session.wait()`), stop it (`session.stop()`), watch it (`grpo_nb.attach('{run.shown}')`), or train "
            "a run of another name"
        )


def release(run: Run | str | Path) -> bool:
    """Release the lock of a run whose training was left open in this kernel; return whether it held one.

    A generator that nobody closed (`steps = grpo(run)`, or one that a traceback still holds) keeps the lock. It cannot
    write any more afterwards; the run continues from its newest checkpoint.

    Raises:
        AlreadyTraining: a session of this kernel trains the run; stop that instead.
    """
    path = run.path if isinstance(run, Run) else Path(run).absolute()
    refuse_if_here(path)
    return release_here(path / LOCK)


def live_session(path: Path) -> Any | None:
    """The session that trains the run in `path` here or in a process that this kernel started; else None."""
    for thread in threading.enumerate():
        session = getattr(thread, "grpo_nb_session", None)
        if session is not None and thread.is_alive() and Path(session.run.path).resolve() == path.resolve():
            return session
    return None


def recorded_failure(run: Run) -> WorkerFailed | None:
    """Error that ended a failed run, from its files: the logged one, with the process's last words if any."""
    newest = run.milestone()
    if newest.get("kind") != "failed" or run.status().state is not RunState.FAILED:
        return None
    return WorkerFailed(str(newest.get("error")) + _last_words(run, since=float(newest.get("time", 0.0))))


def _spawn(
    command: Sequence[str], output: Path, variables: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start the process; its output goes to a file, since a pipe would end, or fill up, with this kernel."""
    source = str(fingerprint.ROOT.resolve().parent)
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **(variables or {})}
    for colour in ("FORCE_COLOR", "CLICOLOR_FORCE"):  # a kernel has them, and the log is no terminal
        environment.pop(colour, None)
    if os.path.lexists(output):
        separate(output)  # a snapshot by hard links keeps the output of the worker before
    with os.fdopen(safe_open.opened(output, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.truncate()
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(command)}\n".encode())
        file.flush()
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )


def _sentence(run: Run, status: int) -> str:
    ended = f"ended with exit status {status}"
    if status < 0:
        ended = f"was killed by {signal.Signals(-status).name}"
    if status == -signal.SIGKILL:
        ended += " (by hand, or by the system for want of memory)"
    return f"the process that trained {run.name} {ended}{_last_words(run)}"


def _last_words(run: Run, since: float = 0.0) -> str:
    """The end of the process's log; empty where it has nothing after `since`."""
    path = run.path / LOG
    try:
        if path.stat().st_mtime < since:
            return ""
        with os.fdopen(safe_open.opened(path), "rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except (OSError, RunError):
        return ""
    return f"{LAST_WORDS}{path}:\n" + "\n".join(lines[-TAIL_LINES:])
