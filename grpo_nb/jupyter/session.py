"""A run as a notebook holds it: a worker trains, the notebook watches and steers through the run directory.

`start` returns at once; a cell that waits calls `await session.wait()`, the one form of waiting that
leaves widgets alive. Everything shown comes from the run's files, so a session can be attached to a
run that trains here, elsewhere, or not at all.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpo_nb import fingerprint
from grpo_nb.config import ConfigError
from grpo_nb.jupyter import interrupts, kernel
from grpo_nb.jupyter.interrupts import Detached, Stopped
from grpo_nb.jupyter.workers import (
    LOG,
    Job,
    Stage,
    Where,
    Worker,
    recorded_failure,
    refuse_if_live,
)
from grpo_nb.printable import printable
from grpo_nb.run.dependencies_file import accepted_kinds
from grpo_nb.run.knobs import Knobs
from grpo_nb.run.run import Run, RunError
from grpo_nb.run.status import shown
from grpo_nb.storage.vocabulary import Command, RunState

if TYPE_CHECKING:  # slow to import, so `start` leaves them to the worker and the dashboard
    import pandas as pd

    from grpo_nb.jupyter.dashboard import Dashboard
    from grpo_nb.report.report import Report

POLL_SECONDS = 0.1


class Summary(str):
    """A sentence that a notebook shows as it is."""

    def __repr__(self) -> str:
        return printable(self)


class Session:
    """One run, live or not: `state`, `wait`, `pause`, `resume`, `stop`, `knobs`, `metrics`, `report`, `dashboard`."""

    def __init__(self, run: Run, job: Job | None = None) -> None:
        self.run = run
        self._job = job or Job(run)
        self._worker: Worker | None = None
        self._dashboard: Dashboard | None = None
        self._held_from = 0
        """Step that the newest `step_once` requested."""
        self._phase = "", 0.0
        """Work of the training before its next step, and the time at which it was first seen."""
        self._pause_noted = False
        self._guard: asyncio.Task[None] | None = None
        """Task that waits for the interrupt which stops the training, after an interrupt that ended a wait."""

    # ------------------------------------------------------------------ what it is doing

    @property
    def live(self) -> bool:
        """Whether the worker that this kernel started is running."""
        return self._worker is not None and self._worker.is_alive()

    @property
    def followed(self) -> bool:
        """Whether more rows will come: of this kernel's training, or of the run's where this is a view of it."""
        return self.live if self._worker is not None else self.run.status().state.is_live

    def doing(self, now: str) -> str:
        """Work of the training before its next step, as its owner reports it, and the seconds that this session saw."""
        if self._phase[0] != now:
            self._phase = now, time.monotonic()
        passed = int(time.monotonic() - self._phase[1])
        return f"{now}, {passed} s" if now and passed else now

    @property
    def asked_to_stop(self) -> bool:
        """Whether a stop of this kernel's training was requested, without a later request to continue."""
        return self._worker is not None and self._worker.asked_to_stop.is_set()

    @property
    def stage(self) -> Stage:
        """`sft` or `grpo`."""
        return self._job.stage

    @property
    def where(self) -> Where:
        """Place of the current training, else of the next `resume`: `thread`, `foreground`, `process` or `torchrun`."""
        elsewhere = self._worker is None and self.run.status().state.is_live
        return "process" if elsewhere else self._job.where

    @property
    def error(self) -> BaseException | None:
        """Error that ended the training, if it failed: the exception here, else the one in the run's files."""
        if self._worker is None:
            return recorded_failure(self.run)
        if self._worker.failure is not None:
            self._worker.failure.reported = True
        return self._worker.error

    @property
    def state(self) -> RunState:
        """State of the run as this session sees it."""
        if self._worker is not None and self._worker.is_alive():
            if self.asked_to_stop:
                return RunState.STOPPING
            recorded = self.run.status().state
            return recorded if recorded.is_live else RunState.STARTING
        if self._worker is not None and self._worker.error is not None:
            return RunState.FAILED
        recorded = self.run.status().state
        if recorded.is_live:
            return recorded if self._worker is None else RunState.CONTINUED
        return recorded if self.stage == "grpo" else self._sft_state()

    @property
    def step(self) -> int:
        """Steps in the log."""
        if self.stage == "grpo":
            return self.run.last_step() or 0
        return self.run.last_step("sft") or 0

    @property
    def steps(self) -> int:
        """Steps that the stage has in all, never fewer than are done."""
        return max(self.run.config.sft.steps, self.step) if self.stage == "sft" else self.run.goal()

    @property
    def target(self) -> int | None:
        """The step at which the training of this session ends, while it trains with one; else None."""
        return self._job.steps if self.live and self.stage == "grpo" else None

    @property
    def knobs(self) -> Knobs:
        """Live settings by name: `knobs["beta/fairness"].set(0.1)`; active from the next step on."""
        return self.run.knobs

    def metrics(self) -> "pd.DataFrame":
        """Table with one row per step, always read from the run's files."""
        return self.run.sft_metrics() if self.stage == "sft" else self.run.metrics()

    # ------------------------------------------------------------------ steering

    def pause(self) -> None:
        """Hold before the next step; the model stays in memory.

        Raises:
            RunError: no training runs.
        """
        self._refuse_idle(Command.PAUSE)
        self.run.knobs.request(Command.PAUSE)

    def step_once(self) -> None:
        """Do one step, then hold.

        Raises:
            RunError: GRPO is not training.
        """
        self._held_from = self.step + 1
        self._request_once(Command.STEP)

    def save_now(self) -> None:
        """Write a checkpoint at the next step boundary.

        Raises:
            RunError: GRPO is not training.
        """
        self._request_once(Command.SAVE)

    def evaluate_now(self) -> None:
        """Measure on held-out examples at the next step boundary; the result is `run.evaluations()`'s newest.

        Raises:
            RunError: GRPO is not training.
        """
        self._request_once(Command.EVALUATE)

    def stop(self) -> None:
        """Finish this step, save, end. Where nothing trains, it shows a notice and does nothing.

        Raises:
            RunError: it trains in another process, and the request cannot be written.
        """
        if self._worker is not None:
            self._worker.ask_to_stop()
        if not self._trains():
            kernel.notify(f"{self.run.name}: {self.state}, nothing trains it that could stop")
            return
        try:
            self.run.knobs.request(Command.STOP)
        except RunError:
            if not self.live:  # in this kernel the worker has the request already
                raise

    def resume(self, *, accept_changed: Collection[str] = ()) -> None:
        """Continue: after a pause at the same step, after a stop or a restart from the newest checkpoint.

        A run that has all its steps is left as it is, with a notice. `accept_changed` names the kinds of content that
        may differ from the run's start, e.g. `{"data"}`, at this one start.

        Raises:
            RunError: the run trains elsewhere and is not paused.
        """
        if self.live or self.run.status().state is RunState.PAUSED:
            if self._worker is not None:
                self._worker.asked_to_stop.clear()
                self._worker.overdue.clear()
            self.run.knobs.request(Command.RUN)
        else:
            self._job = replace(self._job, accept_changed=accepted_kinds(accept_changed))
            self.begin()

    def train_more(self, steps: int) -> None:
        """Train so many steps beyond the newest one, whatever the run's settings are.

        Raises:
            RunError: it is training, here or elsewhere.
        """
        refuse_if_live(self.run)
        self._job = replace(self._job, steps=self.step + steps)
        self.begin()

    async def wait(self, step: int | None = None) -> Summary:
        """Wait until the run ends, or until `step` is in the log; widgets stay alive meanwhile. Returns a summary.

        Without a step, after `pause` or `step_once`, it waits until the training is held.

        In a notebook the first interrupt (the stop button) ends the wait and not the training, and the next one
        lets the step finish and saves; elsewhere the first does that. A run that another kernel trains continues.

        Raises:
            Detached: interrupted; the training continues.
            Stopped: interrupted, and saved.
            Exception: the error that ended the training, so that the cell fails and Run All stops.
        """
        from grpo_nb.jupyter import waiting  # ipywidgets: 0.2 s that `start` need not take

        held = self._held_by(step)
        with waiting.followed(self, to_the_end=step is None):
            try:
                while self._waiting_for(step) and not held():
                    self._note_pause()
                    await asyncio.sleep(POLL_SECONDS)
            except (asyncio.CancelledError, KeyboardInterrupt):
                if self.live and kernel.in_notebook():
                    self._guard = interrupts.stops_next(self)
                    raise Detached(self._detached_sentence()) from None
                self._interrupted()
                while self.live:
                    await asyncio.sleep(POLL_SECONDS)
                self._raise_error()
                raise Stopped(self.stopped_sentence()) from None
        self._raise_error()
        return self.summary()

    def wait_blocking(self, step: int | None = None) -> Summary:
        """`wait` for scripts: blocks the thread, and with it the widgets.

        Raises:
            Stopped: interrupted, and saved.
            Exception: the error that ended the training.
        """
        self._block(step, lambda: None)
        return self.summary()

    # ------------------------------------------------------------------ looking

    def dashboard(self) -> "Dashboard":
        """The live view; every call shows the same one again, or a new one where that was closed."""
        if self._dashboard is None or self._dashboard.closed:
            from grpo_nb.jupyter.dashboard import Dashboard

            self._dashboard = Dashboard(self)
        self._dashboard.watch()
        return self._dashboard

    def report(self) -> "Report":
        """A picture and a table that need no kernel and no widgets to be read."""
        from grpo_nb.report.report import report

        return report(self.run, self.stage)

    def summary(self) -> Summary:
        """Summary in one line: the run's state, its step, the error that ended it, and edits of its code meanwhile."""
        own = (self.step, self.steps)
        state, step, steps = shown(self.state, own, own if self.stage == "sft" else self.run.status().sft)
        if self.target is not None and self.target < steps:
            steps, total = max(self.target, step), f" ({steps} in all)"
        else:
            total = ""
        words = [f"{self.run.name}: {state}, step {step} of {steps}{total}"]
        if self.state.is_active and (owner := self.run.status().owner) is not None and owner.doing:
            words.append(self.doing(owner.doing))
        if self.state is RunState.PAUSED:
            words.append(self._resumed_by())
        if (error := self.error) is not None:
            words.append(f"{type(error).__name__}: {error}")
        return Summary(printable("; ".join([*words, *filter(None, [self.stale])])))

    @property
    def stale(self) -> str | None:
        """Sentence about files of the package edited since this kernel loaded them; None if the run is unaffected."""
        files = fingerprint.changed() if self.live and not self._job.apart else []
        return fingerprint.sentence(files) if files else None

    def __repr__(self) -> str:
        return f"<Session {self.summary()}>"

    def _ipython_display_(self) -> None:
        self.dashboard()._ipython_display_()

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return self.dashboard()._repr_mimebundle_(**options)

    # ------------------------------------------------------------------ inside

    def begin(self) -> None:
        """Launch the training, unless nothing is left to do; `start` and `resume` call it."""
        run = self.run
        if not self._job.complete():
            self._launch()
            return
        step, steps = run.last_step(), run.config.run.steps
        further = f"start(…, steps={steps}) trains on, " if step is not None and step < steps else ""
        kernel.notify(
            f"{run.name} is already complete at step {step} and is reused; {further}start(…, fresh=True) begins it anew"
        )

    def _launch(self) -> None:
        refuse_if_live(self.run)
        if not self._job.apart:
            kernel.shield_from_autoreload()
        if self._worker is None and self.where == "thread" and (self.run.path / LOG).exists():
            kernel.notify(
                f"{self.run.name} trained in a process of its own and continues in this kernel; "
                "start(…, where='process') trains in its own process again"
            )
        self._worker = self._job.worker(self)
        self._worker.start()
        self._job = replace(self._job, accept_changed=frozenset())  # what was accepted once is not for ever
        if self._dashboard is not None:
            self._dashboard.watch()
        if self.where == "foreground":
            still = kernel.Still(self)
            try:
                self._block(None, still.refresh)
            finally:
                still.refresh(now=True)

    def _request_once(self, command: Command) -> None:
        self._refuse_idle(command, " with GRPO", idle=self.stage == "sft")
        self.run.knobs.request(command)

    def _refuse_idle(self, command: Command, how: str = "", idle: bool = False) -> None:
        if idle or not self._trains():
            raise RunError(f"nothing trains {self.run.name}{how} now that could {command}; start or resume it first")

    def _trains(self) -> bool:
        """Whether the run trains, here or elsewhere."""
        return self.live or self.run.status().state.is_live

    def _sft_state(self) -> RunState:
        """State of SFT, since the run's own state is GRPO's."""
        if self.step == 0:
            return RunState.NEW
        return RunState.DONE if self.step >= self.steps else RunState.STOPPED

    def _block(self, step: int | None, meanwhile: Callable[[], None]) -> None:
        try:
            held = self._held_by(step)
            while self._waiting_for(step) and not held():
                self._note_pause()
                meanwhile()
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            self._interrupted()
            while self.live:
                time.sleep(POLL_SECONDS)
            self._raise_error()
            raise Stopped(self.stopped_sentence()) from None
        self._raise_error()

    def _waiting_for(self, step: int | None) -> bool:
        return self.followed and (step is None or self.step < step)

    def _held_by(self, step: int | None) -> Callable[[], bool]:
        """Function that tests whether the requested pause holds; a later pause keeps the wait waiting."""
        if step is None and self.run.knobs.command is Command.PAUSE:
            return lambda: self.state is RunState.PAUSED and self.step >= self._held_from
        return lambda: False

    def _resumed_by(self) -> str:
        """Sentence about how to end a pause."""
        buttons = "the button Resume, " if kernel.in_notebook() else ""
        return f"{buttons}session.resume() or `grpo-nb tell {self.run.shown} resume` continues"

    def _note_pause(self) -> None:
        """Show once, while a cell or a script waits, that the run is held and will not end by itself."""
        paused = self.run.knobs.command is Command.PAUSE and self.state is RunState.PAUSED
        if paused and not self._pause_noted:
            kernel.notify(f"{self.run.name} is paused before step {self.step + 1}: {self._resumed_by()}")
        self._pause_noted = paused

    def _interrupted(self) -> None:
        if self._worker is None:
            raise Detached(f"{self.run.name} keeps training in the background; `session.stop()` ends it.") from None
        self.stop_aloud()

    def stop_aloud(self) -> None:
        """Stop after an interrupt, with a notice."""
        kernel.notify(f"stopping {self.run.name} after this step, then saving")
        self.stop()

    def _detached_sentence(self) -> str:
        return (
            f"{self.run.name} keeps training (step {self.step} of {self.steps}); this cell no longer waits for it. To "
            "stop and save it, interrupt the kernel again or press Stop; to wait again, run this cell again."
        )

    def stopped_sentence(self) -> str:
        """Sentence about the result of an interrupt."""
        return f"{self.run.name} stopped at step {self.step} of {self.steps} and is saved; start it again to continue."

    def _raise_error(self) -> None:
        if (error := self.error) is not None:
            spoken = isinstance(error, RunError | ConfigError)
            kernel.shorten(error, self.run.name, None if spoken else str(self.run.path / "events.jsonl"))
            raise error
