"""Explains a well-known error: its cause and the change to make, from `known_errors`."""

import re
from collections.abc import Iterator

from grpo_nb.doctor.known_errors import KNOWN, Known


def explain(error: BaseException) -> str | None:
    """Cause and remedy of an error, or of the one it was raised from; None for an unknown error.

    >>> explain(RuntimeError("CUDA error: no kernel image is available for execution on the device"))[:44]
    'This torch was built for other GPU architect'
    """
    texts = (f"{type(link).__name__}: {link}" for link in _chain(error))
    return next((words for text in texts if (words := explain_text(text))), None)


def explain_text(text: str) -> str | None:
    """Cause, remedy and page of an error by its words, as they stand in a log."""
    known = recognise(text)
    if known is None:
        return None
    size = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
    asked = f" ({size[1]} were requested.)" if size else ""
    module = re.search(r"No module named '([\w]+)", text)
    change = known.change.replace("NAME", module[1]) if module else known.change
    return f"{known.cause}{asked} {change}. More: {known.page} (`make docs`)."


def recognise(text: str) -> Known | None:
    """The row of the table that an error's words belong to."""
    return next((known for known in KNOWN if re.search(known.pattern, text, re.IGNORECASE)), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
