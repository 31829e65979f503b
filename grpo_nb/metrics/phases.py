"""The part of a long call that runs now, how far it is, and its time: one line under the cell that waits for it.

Plain text and no widget, so that a saved notebook has nothing that needs a kernel; it is empty when the call has ended.
"""

import contextvars
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 1.0
"""Seconds after which a part has a line, and between two updates of it."""


def watched() -> bool:
    """Whether a notebook cell waits for this work; a training in a thread has its status line instead."""
    if "ipykernel" not in sys.modules or threading.current_thread() is not threading.main_thread():
        return False
    from IPython.core.getipython import get_ipython

    return get_ipython() is not None  # ipykernel may be imported where no kernel runs


@contextmanager
def timed(what: str) -> Iterator[Callable[[str], None]]:
    """Show `what` and the time passed while the block runs in a notebook; output of the block comes between them."""
    told = [what]

    def say(progress: str) -> None:
        told[1:] = [progress]

    if not watched():
        yield say
        return
    ended, context, began = threading.Event(), contextvars.copy_context(), time.monotonic()  # shown under this cell

    def tick() -> None:
        while not ended.wait(SECONDS):
            if _parts[-1] is told:
                _show(", ".join([*told, f"{time.monotonic() - began:.0f} s"]))

    _parts.append(told)
    ticking = threading.Thread(target=context.run, args=(tick,), name="grpo_nb phase", daemon=True)
    ticking.start()
    try:
        yield say
    finally:
        ended.set()
        ticking.join()
        _parts.remove(told)
        if not _parts and time.monotonic() - began >= SECONDS:
            _show("")


_parts: list[list[str]] = []
"""Texts of the running phases, outermost first; the innermost is shown."""
_line: dict[int, Any] = {}
"""The output of the newest cell that had one, by the cell's number."""


def _show(text: str) -> None:
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    cell, data = getattr(get_ipython(), "execution_count", 0), {"text/plain": text}
    if cell in _line:
        _line[cell].update(data, raw=True)
    elif text:
        _line.clear()
        _line[cell] = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
