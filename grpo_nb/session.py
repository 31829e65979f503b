"""A run as a notebook holds it: training in a worker thread, watched and steered through the run directory.

`start` returns at once; the cell that wants to wait says `await session.wait()`, the one form of waiting
that leaves widgets alive. Everything shown comes from the run's files, so a session can be attached to a
run that trains here, elsewhere, or not at all.
"""

import asyncio
import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from grpo_nb.config import Config
from grpo_nb.knobs import Knobs
from grpo_nb.run import Run, RunError
from grpo_nb.types import Steps

if TYPE_CHECKING:  # slow to import, so `start` leaves them to the worker and the dashboard
    from grpo_nb.report import Report
    from grpo_nb.rewards import RewardFunction
    from grpo_nb.tasks import Task
    from grpo_nb.widgets.dashboard import Dashboard

log = logging.getLogger(__name__)

Stage = Literal["sft", "grpo"]
Rewards = Mapping[str, Sequence["RewardFunction | tuple[RewardFunction, float]"]]
Work = Callable[[], Steps]

POLL_SECONDS = 0.1
LIVE = ("running", "paused")


class Stopped(Exception):
    """A wait was interrupted: the run has saved and stopped. Shown as one line, and ends Run All."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Summary(str):
    """A sentence that a notebook shows as it is."""

    def __repr__(self) -> str:
        return str(self)


class Worker(threading.Thread):
    """The training thread; it knows its session, so the threads alive are the register of live sessions.

    A register in a module would be emptied when the module is reloaded, and would then let a second
    trainer start; a thread outlives every reload.
    """

    def __init__(self, session: "Session", work: Work) -> None:
        super().__init__(name=f"grpo_nb {session.run.name}", daemon=True)
        self.grpo_nb_session = session
        self.work = work
        self.error: BaseException | None = None
        self.asked_to_stop = threading.Event()

    def run(self) -> None:
        try:
            with contextlib.closing(self.work()) as steps:
                for _ in steps:
                    if self.asked_to_stop.is_set() and not self._passed_on():
                        break
        except BaseException as error:  # whatever it is, the cell that waits raises it
            self.error = error
            self.grpo_nb_session._failed(error)

    def _passed_on(self) -> bool:
        """Ask GRPO to stop, again: what was asked while it was loading is forgotten. SFT has to be closed.

        So has GRPO where knobs.json cannot be written: closing it saves as well, but logs no `stopped`.
        """
        session = self.grpo_nb_session
        if session.stage == "sft":
            return False
        try:
            session.run.knobs.request("stop")
        except RunError as error:
            log.warning("%s: %s is closed instead", error, session.run.name)
            return False
        return True


class Session:
    """One run, live or not: `state`, `wait`, `pause`, `resume`, `stop`, `knobs`, `metrics`, `report`, `dashboard`."""

    def __init__(self, run: Run, work: Work, stage: Stage = "grpo") -> None:
        self.run = run
        self.stage: Stage = stage
        self._work = work
        self._worker: Worker | None = None
        self._dashboard: Dashboard | None = None

    # ------------------------------------------------------------------ what it is doing

    @property
    def live(self) -> bool:
        """Whether this kernel is training it."""
        return self._worker is not None and self._worker.is_alive()

    @property
    def followed(self) -> bool:
        """Whether there is more to come: of this kernel's training, or of the run's where this is a view of it."""
        return self.live if self._worker is not None else self.run.status().state in LIVE

    @property
    def error(self) -> BaseException | None:
        """What ended the training in this kernel, if it failed."""
        return self._worker.error if self._worker else None

    @property
    def state(self) -> str:
        """new, starting, running, paused, stopping, stopped, done, failed, dead; continued: by a later start."""
        if self._worker is not None and self._worker.is_alive():
            if self._worker.asked_to_stop.is_set():
                return "stopping"
            recorded = self.run.status().state
            return recorded if recorded in LIVE else "starting"
        if self.error is not None:
            return "failed"
        recorded = self.run.status().state
        if recorded in LIVE:
            return recorded if self._worker is None else "continued"
        return recorded if self.stage == "grpo" else self._sft_state()

    @property
    def step(self) -> int:
        """Steps in the log."""
        if self.stage == "grpo":
            return self.run.last_step() or 0
        rows = self.run.rows("sft")
        return int(rows[-1]["step"]) if rows else 0

    @property
    def steps(self) -> int:
        """Steps that the stage has in all."""
        config = self.run.config
        return config.sft.steps if self.stage == "sft" else config.run.steps

    @property
    def knobs(self) -> Knobs:
        """Live settings by name: `knobs["beta/fairness"].set(0.1)`; in use from the next step on."""
        return self.run.knobs

    def metrics(self) -> pd.DataFrame:
        """One row a step, always read from the run's files."""
        return self.run.sft_metrics() if self.stage == "sft" else self.run.metrics()

    # ------------------------------------------------------------------ steering

    def pause(self) -> None:
        """Hold before the next step; the model stays in memory."""
        self.run.knobs.request("pause")

    def stop(self) -> None:
        """Finish this step, save, end. Harmless when nothing runs.

        Raises:
            RunError: it trains in another process, and the request cannot be written.
        """
        if self._worker is not None:
            self._worker.asked_to_stop.set()
        if not self.live and self.run.status().state not in LIVE:
            return
        try:
            self.run.knobs.request("stop")
        except RunError:
            if not self.live:  # in this kernel the worker has been told already
                raise

    def resume(self) -> None:
        """Go on: after a pause where it holds, after a stop or a restart from the newest checkpoint.

        Raises:
            RunError: the run trains elsewhere and is not paused.
        """
        if self.live or self.run.status().state == "paused":
            if self._worker is not None:
                self._worker.asked_to_stop.clear()
            self.run.knobs.request("run")
        else:
            self._launch()

    async def wait(self, step: int | None = None) -> Summary:
        """Wait until the run ends, or until `step` is in the log; widgets stay alive meanwhile. Says where it stands.

        The first interrupt (the stop button of the notebook) lets the step finish and saves; the
        second stops waiting at once.

        Raises:
            Stopped: interrupted, and saved.
            Exception: whatever ended the training, so that the cell fails and Run All stops.
        """
        try:
            while self._waiting_for(step):
                await asyncio.sleep(POLL_SECONDS)
        except (asyncio.CancelledError, KeyboardInterrupt):
            self._interrupted()
            while self.live:
                await asyncio.sleep(POLL_SECONDS)
            self._raise_error()
            raise Stopped(self._stopped_sentence()) from None
        self._raise_error()
        return self.summary()

    def wait_blocking(self, step: int | None = None) -> Summary:
        """`wait` for scripts: blocks the thread, and with it the widgets.

        Raises:
            Stopped: interrupted, and saved.
            Exception: whatever ended the training.
        """
        try:
            while self._waiting_for(step):
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            self._interrupted()
            while self.live:
                time.sleep(POLL_SECONDS)
            self._raise_error()
            raise Stopped(self._stopped_sentence()) from None
        self._raise_error()
        return self.summary()

    # ------------------------------------------------------------------ looking

    def dashboard(self) -> "Dashboard":
        """The live view; every call shows the same one again."""
        if self._dashboard is None:
            from grpo_nb.widgets.dashboard import Dashboard

            self._dashboard = Dashboard(self)
        self._dashboard.watch()
        return self._dashboard

    def report(self) -> "Report":
        """A picture and a table that need no kernel and no widgets to be read."""
        from grpo_nb.report import report

        return report(self.run)

    def summary(self) -> Summary:
        """One line: what the run is doing, at which step, and what ended it."""
        words = f"{self.run.name}: {self.state}, step {self.step} of {self.steps}"
        return Summary(f"{words}; {type(self.error).__name__}: {self.error}" if self.error else words)

    def __repr__(self) -> str:
        return f"<Session {self.summary()}>"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return self.dashboard()._repr_mimebundle_(**options)

    # ------------------------------------------------------------------ inside

    def _launch(self) -> None:
        refuse_if_live(self.run)
        self._worker = Worker(self, self._work)
        self._worker.start()
        if self._dashboard is not None:
            self._dashboard.watch()

    def _sft_state(self) -> str:
        """The run's own state speaks of GRPO."""
        if self.step == 0:
            return "new"
        return "done" if self.step >= self.steps else "stopped"

    def _waiting_for(self, step: int | None) -> bool:
        return self.live and (step is None or self.step < step)

    def _interrupted(self) -> None:
        _say(f"stopping {self.run.name} after this step, then saving (interrupt again to stop waiting)")
        self.stop()

    def _stopped_sentence(self) -> str:
        return f"{self.run.name} stopped at step {self.step} of {self.steps} and is saved; start it again to go on."

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _failed(self, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error))
        traceback.clear_frames(error.__traceback__)  # they hold the model and the batch: memory for the next start
        log.error("%s failed: %s", self.run.name, error)
        if isinstance(error, RunError):  # nothing of this run's doing, and another process may own its log
            return
        with contextlib.suppress(OSError):  # a full or read-only disk must not hide the first error
            self.run.log_event("traceback", step=self.step, error=type(error).__name__, traceback=trace)


def start(
    run: Run | str | Path,
    *,
    config: Config | None = None,
    tasks: Mapping[str, "Task"] | None = None,
    rewards: Rewards | None = None,
    steps: int | None = None,
    stage: Stage = "grpo",
) -> Session:
    """Train `run` in a worker thread and return at once; a run that stopped earlier goes on where it was.

    Args:
        run: a Run, or the path of one; with `config` it is made if it is missing.
        tasks, rewards: own tasks and extra reward functions by objective, as in `train.grpo`.
        steps: stop after this many steps in total; None: the configuration's number.
        stage: `grpo`, or `sft` for the warm-up.

    Raises:
        RunError: the run is already training, here or elsewhere.
    """
    run = Run.open_or_create(Path(run), config) if isinstance(run, str | Path) else run
    session = Session(run, _work(run, stage, tasks, rewards, steps), stage)
    session._launch()
    return session


def attach(run: Run | str | Path) -> Session:
    """The session of a run that trains in this kernel, else a view of its files: live elsewhere, finished or dead."""
    run = Run.open(Path(run)) if isinstance(run, str | Path) else run
    return _live_session(run) or Session(run, _work(run, "grpo", None, None, None))


def refuse_if_live(run: Run) -> None:
    """Refuse a second trainer on one run.

    Raises:
        RunError: it trains in this kernel or in another process; the message gives the choices.
    """
    if (here := _live_session(run)) is not None:
        raise RunError(
            f"{run.name} is already training in this kernel (step {here.step} of {here.steps}): wait for it "
            f"(`await session.wait()`), stop it (`session.stop()`), or look at it (`grpo_nb.attach('{run.path}')`)"
        )
    status = run.status()
    if status.state in LIVE:
        raise RunError(
            f"{run.name} is {status.state} in another process ({status.owner}, step {status.step}): "
            f"look at it and stop it with `grpo_nb.attach('{run.path}')`, or wait until it ends"
        )


def _work(
    run: Run, stage: Stage, tasks: Mapping[str, "Task"] | None, rewards: Rewards | None, steps: int | None
) -> Work:
    def steps_of_sft() -> Steps:
        from grpo_nb.sft import finished, sft

        if not finished(run):
            yield from sft(run, tasks=tasks)

    def steps_of_grpo() -> Steps:
        from grpo_nb.train import grpo

        yield from grpo(run, tasks=tasks, rewards=rewards, steps=steps)

    return steps_of_sft if stage == "sft" else steps_of_grpo


def _live_session(run: Run) -> Session | None:
    for thread in threading.enumerate():
        session = getattr(thread, "grpo_nb_session", None)
        if session is not None and thread.is_alive() and Path(session.run.path).resolve() == Path(run.path).resolve():
            found: Session = session
            return found
    return None


def _say(text: str) -> None:
    """One line under the cell that waits; a script gets it as a log record."""
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:
        log.warning("%s", text)
        return
    if get_ipython() is None:
        log.warning("%s", text)
    else:
        display({"text/plain": text}, raw=True)  # type: ignore[no-untyped-call]
