"""Actions of this process when its script has ended, or a training in it.

Nothing here references a worker: Python keeps exit handlers until the end of the process, and with them complete
sessions.
"""

import contextlib
import ctypes
import gc
import importlib
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_nb.printable import clean_logger

logger = clean_logger(__name__)

POLL_SECONDS = 0.1
STARTS_NO_THREAD = (3, 12) <= sys.version_info < (3, 12, 2)
"""Whether this Python starts no thread once the script has ended, as 3.12.0 and 3.12.1 (python/cpython#113964)."""


@dataclass
class Failure:
    """Error that ended a training in this process."""

    text: str
    reported: bool = False
    """Whether somebody has read the error."""


_CANNOT_GO_ON = (
    "Python 3.12.0 and 3.12.1 start no thread from then on: {name} stops after the present step. "
    "End the script with `session.wait_blocking()`, or use Python 3.12.2 or newer"
)
_failures: deque[Failure] = deque(maxlen=100)
_waits: list[bool] = []


def failed(text: str) -> Failure:
    """Log this when the script ends, unless it was reported by then."""
    _failures.append(Failure(text))
    return _failures[-1]


def outlast_script() -> None:
    """Let this process, when its script has ended, wait for the trainings in its threads."""
    if _waits:
        return
    # `atexit` comes too late: no thread may be started by then. These are called last come, first served, and that of
    # the thread pools, which closes them to trainings, is registered when their module is loaded.
    importlib.import_module("concurrent.futures.thread")
    threading._register_atexit(_at_the_end)  # type: ignore[attr-defined]
    _waits.append(True)


def return_memory() -> None:
    """Return free memory: glibc keeps pages of each thread that trained, some MiB a time, and CUDA's pool all."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _at_the_end() -> None:
    for thread in threading.enumerate():
        job = getattr(thread, "job", None)
        if hasattr(thread, "grpo_nb_session") and job is not None and not job.apart:
            _outlast(thread)
    for failure in _failures:
        if not failure.reported:
            logger.error("%s", failure.text)


def _outlast(worker: Any) -> None:
    name = worker.job.run.name
    with _interrupts() as interrupts:
        if STARTS_NO_THREAD:
            logger.error("the script has ended, and %s", _CANNOT_GO_ON.format(name=name))
            worker.grpo_nb_session.stop()
        else:
            logger.warning("the script has ended, %s trains on: Ctrl-C stops it after the present step and saves", name)
        while worker.is_alive():
            time.sleep(POLL_SECONDS)  # a `join` that is interrupted takes the thread for ended (bpo-45274)
            if not interrupts:
                continue
            interrupts.clear()
            if worker.asked_to_stop.is_set():
                logger.warning("%s was left without saving; it can continue from its newest checkpoint", name)
                return
            logger.warning("stopping %s after this step, then saving (interrupt again to leave at once)", name)
            worker.grpo_nb_session.stop()


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Interrupts that come inside the block, in place of a KeyboardInterrupt anywhere in it: none is lost."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # they are ignored, or another's affair
        yield came
        return
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
