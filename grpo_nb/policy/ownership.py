"""Ownership of a model: one training at a time, through whichever `Policy` objects it is reached.

A training claims its model when it starts. The claim lasts as long as the lock of its run does, so that it ends however
the training ends: done, stopped, closed, collected as garbage, failed at its start, or released by hand.
"""

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator

from torch import nn

from grpo_nb.policy.source import ModelError
from grpo_nb.run.lock import RunLock


class PolicyTaken(ModelError):
    """Raised when the policy belongs to a training that is still open."""


class Ownership:
    """The training that a model belongs to, if any, and the thread in which that training is at work."""

    def __init__(self) -> None:
        self._lock: weakref.ref[RunLock] | None = None
        self._thread: int | None = None
        """Thread in which the training works; None between two steps."""
        self._begun = 0
        """Steps that began since the model was registered."""

    def claim(self, lock: RunLock) -> None:
        """Claim the model for the training with this lock, which works in this thread.

        Raises:
            PolicyTaken: it belongs to another training, which is still open.
        """
        if self._other(lock) is not None:
            gc.collect()  # a generator in an unreachable cycle closes here
        with _claiming:
            if (other := self._other(lock)) is not None:
                raise PolicyTaken(
                    f"this policy is being trained by {_run(other)}, and that training is still open. A policy trains "
                    "in one run at a time. Close the other training (`steps.close()` on its generator, or "
                    f"`grpo_nb.release({_run(other)!r})` where the generator is lost), or pass another policy: "
                    "load_policy(run.config.model)"
                )
            self._lock, self._thread = weakref.ref(lock), threading.get_ident()

    def is_of(self, lock: RunLock) -> bool:
        """Whether the newest claim belongs to this training, open or not."""
        return self._lock is not None and self._lock() is lock

    def check(self, lock: RunLock) -> None:
        """Make sure that the model still belongs to the training with this lock.

        Raises:
            PolicyTaken: another training has claimed it since; its weights must not be saved as this run's.
        """
        if not self.is_of(lock):
            other = self._lock() if self._lock is not None else None
            raise PolicyTaken(
                f"the policy of {_run(lock)} was claimed by {_run(other) if other else 'another training'} while its "
                "own lock could not be read. This training writes nothing more. Start the run again with another "
                "policy: load_policy(run.config.model); it resumes from its newest checkpoint"
            )

    @contextlib.contextmanager
    def at_rest(self, lock: RunLock) -> Iterator[None]:
        """The training with this lock is between two steps inside the block: others may read the model."""
        if self.is_of(lock):
            self._thread = None
        try:
            yield
        finally:
            if self.is_of(lock):
                self._thread, self._begun = threading.get_ident(), self._begun + 1

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Keep the weights unchanged inside the block, so that all that it reads is of one step.

        Raises:
            PolicyTaken: another thread trains the model, and is within a step or began one meanwhile.
        """
        self.refuse_reading()
        begun = self._begun
        yield
        if self._begun != begun:
            raise PolicyTaken(
                "another thread trained a step while this policy was read, so the values read "
                "belong to no single step. Read it in the loop over the steps, request it from the training "
                "(`run.knobs.request('evaluate')`), or evaluate a checkpoint: evaluate(run) without `policy`"
            )

    def refuse_reading(self) -> None:
        """Refuse to another thread a model that is within a step, when it may compute as its reference.

        Raises:
            PolicyTaken: names the run.
        """
        if self._thread not in (None, threading.get_ident()) and (lock := self._open()) is not None:
            raise PolicyTaken(
                f"{_run(lock)} trains this policy in another thread, and is within a step. Reading it needs a step "
                "boundary. Use it in the loop over the steps, request it from the training "
                "(`run.knobs.request('evaluate')`), or evaluate a checkpoint: evaluate(run) without `policy`"
            )

    def refuse_writing(self) -> None:
        """Refuse weights from anybody but the training that the model belongs to.

        Raises:
            PolicyTaken: names the run.
        """
        if self._thread != threading.get_ident() and (lock := self._open()) is not None:
            raise PolicyTaken(
                f"{_run(lock)} trains this policy, and that training is still open. Only it may write the weights. "
                f"Close it first (`steps.close()` on its generator, or `grpo_nb.release({_run(lock)!r})`), or load "
                "another policy: load_policy(run.config.model)"
            )

    def _other(self, lock: RunLock) -> RunLock | None:
        """Another training that the model belongs to."""
        owner = self._open()
        return owner if owner is not lock else None

    def _open(self) -> RunLock | None:
        """The lock of the training that the model belongs to; None where that training has ended or lost its run."""
        lock = self._lock() if self._lock is not None else None
        if lock is None or not lock.fences:
            return None
        within_a_step = self._thread not in (None, threading.get_ident())  # though its lock may be gone
        return lock if within_a_step or lock.mine() else None


_claiming = threading.Lock()
_known: "weakref.WeakKeyDictionary[nn.Module, Ownership]" = weakref.WeakKeyDictionary()


def ownership(model: nn.Module) -> Ownership:
    """Ownership of a model without adapters around it; all policies around one model share it."""
    return _known.setdefault(model, Ownership())


def _run(lock: RunLock) -> str:
    return str(lock.path.parent)
