"""Under the cell that waits: where the run stands, as it moves; at the end its picture and numbers, without a widget.

A saved notebook has no kernel behind it, so what a widget showed is gone; what this leaves is read anywhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ipywidgets as w
from IPython.display import display

from grpo_nb.jupyter import kernel
from grpo_nb.printable import clean_logger

logger = clean_logger(__name__)


@contextmanager
def followed(session: Any, *, to_the_end: bool) -> Iterator[None]:
    """Show the run's standing while the block waits for it; `to_the_end`: leave its picture and table when it ended."""
    if not kernel.in_notebook() or kernel.limits() is not None:
        yield
        return
    line, ended = _Line(session), False
    try:
        yield
        ended = to_the_end and not session.followed and session.error is None
    finally:
        line.end(ended)


class _Line:
    """The live view's own status line and bar, once more."""

    def __init__(self, session: Any) -> None:
        self._session, self._handle = session, None
        if session.followed:
            board = session.dashboard()
            self._shown = w.VBox([board.status, board.bar])
            self._handle = self._display(self._shown._repr_mimebundle_() or {}, display_id=True)

    def end(self, ended: bool) -> None:
        """Take the widget away and leave what needs none; that it cannot be drawn ends neither cell nor run."""
        try:
            report = self._session.report() if ended and self._session.step else None
            data, metadata = report.picture() if report else ({}, {})
        except Exception:
            logger.exception("the picture of %s could not be drawn", self._session.run.name)
            report, data, metadata = None, {}, {}
        if self._handle is not None:
            left = data or {"text/plain": ""}
            self._handle.update(left, raw=True, metadata=metadata)
            self._shown.close()
        elif data:
            self._display(data, metadata=metadata)
        if report is not None:
            display(report.table)  # type: ignore[no-untyped-call]

    def _display(self, data: Any, **options: Any) -> Any:
        text = {"text/plain": str(self._session.summary())}
        return display(text | data, raw=True, **options)  # type: ignore[no-untyped-call]
