"""Calls a user's code, e.g. a reward: whatever it does, training is unchanged, or one error names it."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from grpo_nb.printable import Clean, clean_logger

logger = clean_logger(__name__)

STANDARD = (0, 1, 2)
"""Standard input, output and error. Where one is closed, the next file gets its number, and receives the output."""
LONGEST_ERROR = 2000
"""Characters of a raised error that are quoted."""


class RewardError(Clean, ValueError):
    """Raised for a wrong reward function; the message has its name, its result and the expected one."""


@contextmanager
def calling(who: str, where: str = "") -> Iterator[None]:
    """Run a block of a user's code; its name `who` and `where`, e.g. ` on example 3`, are for the error.

    An interrupt passes: it is the user's. A process that the block forked ends where the block does, so that no second
    one trains.

    Raises:
        RewardError: for any exception of it, even one that would end the process.
    """
    process, open_before = os.getpid(), [fd for fd in STANDARD if _is_open(fd)]
    torch_as_before, signals_as_before, umask_as_before = _torch_settings(), _signals(), _umask()
    try:
        yield
    except (Exception, SystemExit, GeneratorExit) as error:
        raise RewardError(f"{who} raised {error_text(error)}{where}") from error
    except asyncio.CancelledError as error:
        if _cancelled():
            raise
        raise RewardError(f"{who} raised {error_text(error)}{where}") from error
    finally:
        if os.getpid() != process:
            os._exit(0)
        torch_as_before()
        signals_as_before()
        umask_as_before()
        for fd in open_before:
            if not _is_open(fd):
                _reopen(fd)
                logger.warning("%s closed file descriptor %d; it leads nowhere from here on", who, fd)


def error_text(error: BaseException) -> str:
    """Text of an error, also of one without a message."""
    try:
        text = str(error)
    except Exception:
        text = "an error without words"
    return f"{type(error).__name__}: {_cut(text, LONGEST_ERROR)}"


def kind(value: Any) -> str:
    """A value with its type, cut to fit a sentence."""
    try:
        text = repr(value)
    except Exception:  # Python does not write out an integer of more than 4300 digits
        text = "too long to show" if isinstance(value, int) else "that cannot be shown"
    return f"{type(value).__name__} {_cut(text, 60)}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _cancelled() -> bool:
    """Whether the current task was cancelled from elsewhere."""
    with suppress(RuntimeError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return False


def _signals() -> Callable[[], None]:
    """Function that restores the handlers of the signals that end a training; a no-op in other threads."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)

    return restore


def _umask() -> Callable[[], None]:
    """Function that restores the process's umask, which sets who may read files made from here on."""
    before = os.umask(0o077)  # it can only be read by setting it
    os.umask(before)

    def restore() -> None:
        os.umask(before)

    return restore


def _torch_settings() -> Callable[[], None]:
    """Function that restores PyTorch's settings that affect gradients and their bits; a no-op if it is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return lambda: None
    gradients, kind = torch.is_grad_enabled(), torch.get_default_dtype()
    threads, exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()

    def restore() -> None:
        torch.set_grad_enabled(gradients)
        if torch.get_default_dtype() != kind:
            torch.set_default_dtype(kind)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != exact:
            torch.use_deterministic_algorithms(exact)

    return restore


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _reopen(fd: int) -> None:
    """Make the descriptor lead nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, so perhaps `fd` itself
    if nowhere != fd:
        os.dup2(nowhere, fd)
        os.close(nowhere)
    else:
        os.set_inheritable(fd, True)
