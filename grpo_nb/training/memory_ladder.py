"""Recovery from a full device memory: free what can be freed, halve the rows at a time, and repeat the step.

The effective batch stays, so the gradient is the same to rounding. The halved size is kept for the rest of the run and
on resuming: the bits change from the step that failed. A step whose updates are settled is never repeated: work after
them takes fewer rows at a time by itself, or is left out and logged.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from grpo_nb.policy.full_memory import full_memory
from grpo_nb.printable import Clean, clean_logger
from grpo_nb.run.run import Run
from grpo_nb.training.state import TrainState

logger = clean_logger(__name__)

T = TypeVar("T")


class RolloutMemoryError(Clean, RuntimeError):
    """Raised when the memory was full while completions were sampled; its cause is torch's error."""


@contextmanager
def sampling() -> Iterator[None]:
    """Raise `RolloutMemoryError` for a full memory inside the block, to separate it from the rest of a step."""
    try:
        with full_memory():
            yield
    except torch.OutOfMemoryError as error:
        raise RolloutMemoryError(str(error)) from error


def take_less(state: TrainState, less: tuple[str, int], error: Exception) -> None:
    """Take what `halved` gave at a time from the next step on; the state is that of a step boundary."""
    name, now = less
    state.numerics = state.numerics.model_copy(update={name: now})
    if release := getattr(state.engine, "release", None):
        release()
    freed_for_less(state.run, state.step + 1, f"{name}={now}", error)


def spared(work: Callable[[], T], failed: Callable[[str], object]) -> T | None:
    """Result of `work`; None where the memory is full, which `failed` logs.

    For work that comes after a step is settled: a lack of memory in it neither undoes the step nor ends the run.
    """
    try:
        with full_memory():
            return work()
    except torch.OutOfMemoryError as error:
        found = first_line(error)
    free()
    failed(found)
    return None


def halved(state: TrainState, error: Exception) -> tuple[str, int] | None:
    """The choice that is too much at a time, and half of it; None where it cannot be less."""
    if isinstance(error, RolloutMemoryError):
        name, now, least = "rows_at_once", rows_at_once(state), state.config.batch.group_size
    else:
        name, now, least = "micro_batch", micro_rows(state), 1
    return (name, max(now // 2, least)) if now > least else None


def rows_at_once(state: TrainState) -> int:
    """Completions that are sampled at a time, on each rank."""
    batch = state.config.batch
    every = -(-batch.prompts // state.ranks.size) * batch.group_size
    return min(state.numerics.rows_at_once or every, getattr(state.engine, "max_rows", every), every)


def micro_rows(state: TrainState) -> int:
    """Completions in the largest forward and backward pass: of one objective and one update, on one rank."""
    batch, parts = state.config.batch, len(state.objectives) * state.ranks.size
    return min(state.numerics.micro_batch_of(batch.micro_batch), -(-batch.update_size // parts))


def freed_for_less(run: Run, step: int, setting: str, error: Exception, stage: str = "") -> None:
    """Return the memory that torch caches, and log the choice that is lower from here on."""
    free()
    run.log_event(f"{stage}out_of_memory", step=step, now=setting, error=first_line(error))
    logger.warning("memory was full in step %d: now %s (%s)", step, setting, first_line(error))


def free() -> None:
    """Free unreferenced memory, and the memory that torch caches."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
