"""Output of a waiting cell: the run's status while it moves; at the end its picture and numbers, without a widget.

A saved notebook has no kernel, so the output of a widget is gone; this output can be read anywhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ipywidgets as w
from IPython.display import display

from grpo_nb.jupyter import kernel, standing
from grpo_nb.jupyter.without_kernel import Words
from grpo_nb.printable import clean_logger, printable

logger = clean_logger(__name__)


@contextmanager
def followed(session: Any, *, to_the_end: bool) -> Iterator[None]:
    """Show the run's standing while the block waits for it; `to_the_end`: leave its picture and table when it ended."""
    if not kernel.in_notebook() or kernel.limits() is not None:
        yield
        return
    line, ended = _begun(session), False
    try:
        yield
        ended = to_the_end and not session.followed and session.error is None
    finally:
        if line is not None:
            line.end(ended)


def _begun(session: Any) -> "_Line | None":
    try:
        return _Line(session)
    except Exception:  # no view is worth the wait
        logger.exception("where %s stands could not be shown", session.run.name)
        return None


class _Line:
    """Line of a wait: the live view's status line and bar."""

    def __init__(self, session: Any) -> None:
        self._session, self._handle = session, None
        if session.followed:
            self._board = session.dashboard()
            self._shown = w.VBox([self._board.status, self._board.bar]).add_class(standing.CLASS)
            shown = {**(self._shown._repr_mimebundle_() or {}), "text/plain": str(session.summary())}
            self._handle = display(shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]
            self._words = Words(f"{session.summary()}, when this notebook was saved.", standing.CLASS)

    def end(self, ended: bool) -> None:
        """Put the last numbers in the widget's place, and leave picture and table; no failure of that ends the cell."""
        try:
            if self._handle is not None:
                self._handle.update({"text/plain": printable(" · ".join(self._numbers()))}, raw=True)
                self._words.say("")
                self._shown.close()
            if ended and self._session.step:
                display(self._session.report())  # type: ignore[no-untyped-call]
        except Exception:
            logger.exception("what %s left could not be shown", self._session.run.name)

    def _numbers(self) -> list[str]:
        self._board.followed.read()
        rows = self._board.followed.newest()
        return standing.numbers(self._session, rows[-1]) if rows else []
