"""CPU threads that a training computes with: measured where it starts, kept in its checkpoints, used when it resumes.

A second thread halves a pass on a quiet machine and multiplies its time on a busy one, where each parallel region
waits for a thread that is not running. Sums over several threads are rounded in another order, so the number is one of
the choices of `numerics.Numerics`. Nothing is measured where the user gave a number (`OMP_NUM_THREADS`,
`MKL_NUM_THREADS`) or wants the same bits each time (`run.deterministic=true`): what is fastest changes with the load.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_nb.policy.model import Policy
from grpo_nb.printable import clean_logger
from grpo_nb.ranks import launch
from grpo_nb.run.run import Run

logger = clean_logger(__name__)

ROWS, TOKENS, ROUNDS = 8, 32, 3
LONG_SECONDS = 1.0
"""Seconds of a pass from which it is timed only once."""
CLEARLY = 1.25
"""More threads have to be so many times as fast as fewer: runs on one machine then mostly choose alike."""
GIVEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def choose(run: Run, policy: Policy, prefix: str = "") -> int | None:
    """The number for a training that starts, logged with the seconds that each took; None on a GPU and among ranks."""
    if policy.device.type != "cpu" or launch.place() is not None:
        return None
    now = torch.get_num_threads()
    if now == 1 or run.config.run.deterministic is True or any(os.environ.get(name) for name in GIVEN):
        return now
    if (other := _active.threads) is not None:
        return other
    run.doing("measuring how many threads are fastest")
    seconds = measured(policy, sorted({1, max(now // 2, 1), now}))
    chosen = fewest(seconds)
    times = ", ".join(f"{count}: {1000 * took:.3g} ms" for count, took in seconds.items())
    message = f"computes with {chosen} of {now} CPU threads; a short pass took, by threads, {times}"
    by_count = {str(count): took for count, took in seconds.items()}
    run.log_event(f"{prefix}threads", step=0, threads=chosen, seconds=by_count, message=message)
    logger.info("%s %s", run.name, message)
    return chosen


def fewest(seconds: dict[int, float]) -> int:
    """The fewest threads that no larger number beats clearly.

    >>> fewest({1: 1.0, 2: 0.9}), fewest({1: 1.0, 2: 0.55, 4: 0.5}), fewest({1: 1.5, 2: 16.4})
    (1, 2, 1)
    """
    best = min(seconds.values())
    return next(count for count in sorted(seconds) if seconds[count] <= CLEARLY * best)


def measured(policy: Policy, counts: list[int]) -> dict[int, float]:
    """Seconds of a short forward pass by the number of threads; the numbers take turns."""
    ids = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % policy.text_config.vocab_size
    before, rounds, found = torch.get_num_threads(), 0, dict.fromkeys(counts, 0.0)
    try:
        with policy.eval_mode():
            policy.model(input_ids=ids)  # the first pass sets things up
            while rounds < ROUNDS and max(found.values()) < LONG_SECONDS:
                rounds += 1
                for count in counts:
                    found[count] += _seconds(policy, ids, count)
    finally:
        torch.set_num_threads(before)
    return {count: total / rounds for count, total in found.items()}


def _seconds(policy: Policy, ids: torch.Tensor, count: int) -> float:
    torch.set_num_threads(count)
    began = time.perf_counter()
    policy.model(input_ids=ids)
    return time.perf_counter() - began


@contextmanager
def computing(threads: int | None) -> Iterator[None]:
    """Compute with so many threads inside the block, in the thread that enters it; None, and ranks: as it is."""
    if threads is None or launch.place() is not None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    _active.enter(threads)
    try:
        yield
    finally:
        _active.leave(threads)
        torch.set_num_threads(before)


class _Active:
    """Matrix products have one number for the process, so a second training takes that of the first."""

    def __init__(self) -> None:
        self._lock, self._trainings = threading.Lock(), list[int]()

    @property
    def threads(self) -> int | None:
        """Threads of the training that began first; None without a training."""
        with self._lock:
            return self._trainings[0] if self._trainings else None

    def enter(self, threads: int) -> None:
        with self._lock:
            others = {other for other in self._trainings if other != threads}
            self._trainings.append(threads)
        if others:
            logger.warning(
                "a training that resumes with %d threads runs in the same process as one with %d: the bits of "
                "both may differ from a lone run's. Train them one after the other, or with where='process'",
                threads,
                min(others),
            )

    def leave(self, threads: int) -> None:
        with self._lock:
            self._trainings.remove(threads)


_active = _Active()
