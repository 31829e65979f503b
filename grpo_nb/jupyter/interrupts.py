"""The notebook's stop button: the first press ends a wait, the next one the training that was waited for.

The second press comes when no cell runs. ipykernel ignores interrupts then, so a handler of our own takes them until
the training has ended; a cell that runs meanwhile is interrupted as usual, and the training continues.
"""

import asyncio
import contextvars
import signal
import threading
from typing import Any

from grpo_nb.jupyter import kernel
from grpo_nb.printable import Clean

POLL_SECONDS = 0.1


class Stopped(Clean):
    """Raised when a wait was interrupted and the run has saved and stopped. It shows as one line, and ends Run All."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Detached(Clean):
    """Raised when a wait was interrupted and the training continues. It shows as one line, and ends Run All."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def stops_next(session: Any) -> "asyncio.Task[None] | None":
    """Let the kernel's next interrupt stop the training of `session`; the task that sees to it, to be kept.

    None outside the main thread, which alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    loop, told = asyncio.get_running_loop(), contextvars.copy_context()  # its output appears under this cell

    def handle(*_: Any) -> None:
        if session.live:
            loop.call_soon_threadsafe(session.stop_aloud, context=told)
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # as an idle kernel has it

    signal.signal(signal.SIGINT, handle)  # the press that comes while this cell ends
    return loop.create_task(_guard(session, handle))


async def _guard(session: Any, handle: Any) -> None:
    while session.live:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # no cell runs
            signal.signal(signal.SIGINT, handle)
        await asyncio.sleep(POLL_SECONDS)
    if session.asked_to_stop and session.error is None:
        kernel.notify(session.stopped_sentence())
    if signal.getsignal(signal.SIGINT) is handle:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
