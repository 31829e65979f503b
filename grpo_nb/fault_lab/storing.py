"""Faults of files, clocks and processes, which a run depends on."""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_nb import fingerprint
from grpo_nb.fault_lab.patching import replaced, trainer
from grpo_nb.fault_lab.records import Patient
from grpo_nb.fault_lab.scoring import changed_target
from grpo_nb.run import checkpoints
from grpo_nb.run.lock import LOCK, RunLock

HOUR = 3600.0


@contextmanager
def disk_full(patient: Patient) -> Iterator[None]:
    """The disk is full at the first checkpoint after the start."""
    fill = checkpoints._fill

    def full(staging: Path, *given: Any) -> None:
        fill(staging, *given)
        if (patient.run.last_step() or 0) > 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(staging / "policy.safetensors"))

    with replaced(checkpoints, "_fill", full):
        yield


@contextmanager
def damaged_checkpoint(patient: Patient) -> Iterator[None]:
    """The newest checkpoint lost half of its weights, as a disk does whose cache was never written."""
    patient.train(2)
    newest = max(patient.run.checkpoints.folder.glob("[0-9]*"))
    weights = newest / "policy.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    yield


@contextmanager
def two_writers(patient: Patient) -> Iterator[None]:
    """Another machine takes the run over while this one sleeps, and then this one wakes up."""
    finish = trainer.finish
    other = RunLock(patient.run.path / LOCK)

    def slept(*given: Any) -> Any:
        stats = finish(*given)
        if stats.step == 2:
            other.path.unlink()
            other.acquire()
        return stats

    try:
        with replaced(trainer, "finish", slept):
            yield
    finally:
        other.release()


@contextmanager
def clock_set_back(patient: Patient) -> Iterator[None]:
    """The clock of the machine is set back by an hour after step 1."""
    now = time.time

    def late() -> float:
        return now() - HOUR if (patient.run.last_step() or 0) >= 1 else now()

    with replaced(time, "time", late):
        yield


@contextmanager
def stale_module(patient: Patient) -> Iterator[None]:
    """A file of the package was edited after this process loaded it; the fix is on disk, the bug in memory."""
    name = "grpo_nb.losses.kl"
    fingerprint.note()
    loaded = fingerprint._loaded[name]
    fingerprint._loaded[name] = replace(loaded, stamp=(0, 0), digest=b"")
    try:
        yield
    finally:
        fingerprint._loaded[name] = loaded


@contextmanager
def data_replaced(patient: Patient) -> Iterator[None]:
    """Between two starts the data file was replaced by one with another answer."""
    patient.train(1)
    patient.tasks = {name: changed_target(task) for name, task in patient.tasks.items()}
    yield
