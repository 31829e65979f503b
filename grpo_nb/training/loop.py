"""The loop of SFT and GRPO: one step after the other, saved at step boundaries only, by the lock's owner only."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import torch

from grpo_nb import trackers
from grpo_nb.policy.full_memory import full_memory
from grpo_nb.policy.model import Policy
from grpo_nb.printable import clean_logger
from grpo_nb.ranks.link import RankError
from grpo_nb.run.checkpoints import Checkpoints, NotFinite
from grpo_nb.run.knob_file import KnobSnapshot
from grpo_nb.run.lock import RunLock
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage.vocabulary import Command
from grpo_nb.training import memory_ladder
from grpo_nb.training.guards import TrainingError
from grpo_nb.types import Steps, StepStats

logger = clean_logger(__name__)

POLL_SECONDS = 0.2


class Progress(Protocol):
    """Position of a training: its run, its goal and its newest step."""

    run: Run
    goal: int
    """Steps to reach."""
    step: int
    """Steps done: the newest step boundary."""
    saved: int
    """The step of the newest checkpoint; -1 before the first."""
    mid_update: bool
    """Whether the state is between two step boundaries, so that it must not be saved."""


class Stage(ABC):
    """A training that `walk` takes to its goal, with the parts particular to SFT or to GRPO."""

    prefix: Literal["", "sft_"]
    """Prefix of the kind of each event of the loop."""
    progress: Progress
    problem: str | None = None
    """Reason why knobs.json cannot be used, once logged; None while it can."""

    @property
    @abstractmethod
    def checkpoints(self) -> Checkpoints:
        """Directory of the checkpoints."""

    @property
    @abstractmethod
    def save_every(self) -> int:
        """Steps between two checkpoints; 0: one at the end."""

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """Policy that the stage trains."""

    @abstractmethod
    def begin(self) -> None:
        """Hook that runs before the first step of this start."""

    def check(self) -> None:  # noqa: B027
        """Check the step boundary before any other work there; an exception ends the training."""

    @abstractmethod
    def accept(self, knobs: KnobSnapshot) -> None:
        """Make the knobs those of the next step."""

    def serve(self, knobs: KnobSnapshot) -> None:
        """Carry out the commands that are done once between two steps; called while the training is paused, too."""
        if Command.SAVE in knobs.orders:
            save(self)
            done(self, Command.SAVE, knobs)

    @abstractmethod
    def advance(self) -> StepStats:
        """Run one step: set `mid_update` before the weights move; count the step and clear it when it is logged."""

    def undo(self) -> bool:
        """Restore the state of the newest step boundary; returns whether it could, which takes a copy of that state."""
        return False

    @abstractmethod
    def store(self) -> None:
        """Write a checkpoint of this step boundary, and set `saved`."""

    def finish(self) -> None:  # noqa: B027
        """Hook that runs after the last step, before it is saved."""


def walk(stage: Stage, lock: RunLock) -> Steps:
    """Yield step after step up to the goal. However it ends, the newest step boundary is saved, or stays as saved.

    A step that is broken off is undone, where the stage can, so that none of those before it is lost. Meanwhile the
    run's trackers mirror what it logs.

    Raises:
        RunLocked: another trainer took the run over; nothing was written since.
        PolicyTaken: another training claimed the policy; nothing was written since.
        TrainingError: the weights are not finite at a step boundary; the newest checkpoint stays.
    """
    with trackers.mirroring(stage.progress.run):
        yield from _walk(stage, lock)


def _walk(stage: Stage, lock: RunLock) -> Steps:
    at = stage.progress
    try:
        stage.begin()
        at.run.doing("")
        while at.step < at.goal:
            lock.check()
            stage.policy.ownership.check(lock)
            with torch.enable_grad():  # as it was after it, too: an interrupt can break off the way out of `no_grad`
                stats = _next(stage)
            if stats is None:
                _leave(stage, "stopped")
                break
            with _lent(stage.policy, lock):
                yield stats
        else:
            stage.finish()
            at.run.doing("")
            _leave(stage, "done")
    except Exception as error:
        if lock.mine():
            _log_at_last(stage, "failed", goal=at.goal, error=f"{type(error).__name__}: {error}")
        raise
    finally:
        try:
            _end(stage, lock)
        except KeyboardInterrupt:
            logger.warning(
                "interrupted again while step %d of %s is saved; once more ends it at once", at.step, at.run.name
            )
            _end(stage, lock)
            raise


def _next(stage: Stage) -> StepStats | None:
    """The next step, saved where it is time to; None where the training is to stop before it."""
    stage.check()
    if _obey(stage).command is Command.STOP:
        return None
    stats = stage.advance()
    if stage.save_every and stage.progress.step % stage.save_every == 0:
        save(stage)
    return stats


def _end(stage: Stage, lock: RunLock) -> None:
    """Leave the policy and the run at the newest step boundary; it can be repeated after an interrupt."""
    at, owned = stage.progress, stage.policy.ownership.is_of(lock)
    if owned:
        stage.policy.settle()
    if not (owned and lock.mine()):
        _log_lost(stage)
    elif at.mid_update and not _undone(stage):
        _log_at_last(stage, "torn", resumes_from=at.saved)
    elif _unsaved(stage):
        _save_at_last(stage)


@contextmanager
def _lent(policy: Policy, lock: RunLock) -> Iterator[None]:
    """Lend the policy between two steps: others may read it inside the block; the date of its prompts stays."""
    date = policy.tokenization.date
    with policy.ownership.at_rest(lock):
        yield
    if policy.ownership.is_of(lock):
        policy.set_date(date)


def save(stage: Stage) -> None:
    """Write a checkpoint of this step boundary; where the device's memory is full, once more when it is freed.

    Raises:
        TrainingError: a weight or an optimizer moment is not finite; nothing was written.
    """
    try:
        _store(stage)
    except NotFinite as error:
        _log(stage, "checkpoint_refused", reason=str(error), resumes_from=stage.progress.saved)
        raise TrainingError(
            f"{error}. These weights cannot be trained further. Resume from step {stage.progress.saved} with a lower "
            "learning rate, and look for code that writes into the weights outside the optimizer"
        ) from error


def _store(stage: Stage) -> None:
    try:
        with full_memory():
            stage.store()
    except torch.OutOfMemoryError as error:
        at = stage.progress
        memory_ladder.freed_for_less(at.run, at.step, "the checkpoint once more", error, stage.prefix)
        stage.store()


def done(stage: Stage, command: Command, knobs: KnobSnapshot) -> None:
    """Remove a command that was carried out; an error of knobs.json is only logged."""
    run = stage.progress.run
    run.fence()
    run.knobs.done(command, knobs.at[command])
    _note_problem(stage, run.knobs.snapshot())


def _leave(stage: Stage, kind: str) -> None:
    """Log that the training ends in good order, once the step that it ends with is saved."""
    if _unsaved(stage):
        save(stage)
    _log(stage, kind)


def _unsaved(stage: Stage) -> bool:
    """Whether the newest step boundary has no checkpoint, because none was written or it was removed."""
    at = stage.progress
    return at.saved < at.step or (at.step > 0 and not stage.checkpoints.holds(at.step))


def _undone(stage: Stage) -> bool:
    """Whether the interrupted step could be undone, which is logged; a device that failed keeps nothing."""
    try:
        undone = stage.undo()
    except Exception as error:
        logger.error("the step that was broken off could not be undone: %s", error)
        return False
    if undone:
        _log_at_last(stage, "step_undone")
    return undone


def _log_at_last(stage: Stage, kind: str, **data: object) -> None:
    """Log on the way out: a failure to write must not hide why the training ends."""
    try:
        stage.progress.run.log_event(f"{stage.prefix}{kind}", step=stage.progress.step, **data)
    except RunError as error:
        logger.error("%s", error)


def _save_at_last(stage: Stage) -> None:
    """Save on the way out, where no caller is left to catch an exception."""
    try:
        save(stage)
    except (TrainingError, RankError) as error:  # a rank that holds a part of the weights is gone
        logger.error("%s", error)


def _log_lost(stage: Stage) -> None:
    """Log whether the newest step boundary is saved, once nothing more may be written."""
    at = stage.progress
    if at.saved < at.step:
        logger.error("%s was not saved at step %d: its lock or policy is no longer its own", at.run.name, at.step)
    else:
        logger.warning("%s is saved at step %d; its lock or policy is no longer its own", at.run.name, at.step)


def _obey(stage: Stage) -> KnobSnapshot:
    """Knobs for the next step; waits while a pause is requested."""
    run, paused = stage.progress.run, False
    while True:
        now = run.knobs.snapshot()
        _note_problem(stage, now)
        stage.serve(now)
        if now.command is not Command.PAUSE:
            break
        if Command.STEP in now.orders:
            done(stage, Command.STEP, now)
            _log(stage, "stepping")
            break
        if not paused:
            _log(stage, "paused")
            paused = True
        time.sleep(POLL_SECONDS)
    stage.accept(now)
    return now


def _note_problem(stage: Stage, knobs: KnobSnapshot) -> None:
    """Log once that knobs.json cannot be used, so that the last good values stay."""
    if knobs.problem and knobs.problem != stage.problem:
        _log(stage, "knobs_unreadable", problem=knobs.problem)
        logger.warning("%s; the last good values stay", knobs.problem)
    stage.problem = knobs.problem


def _log(stage: Stage, kind: str, **data: object) -> None:
    at = stage.progress
    at.run.log_event(f"{stage.prefix}{kind}", step=at.step, goal=at.goal, **data)
