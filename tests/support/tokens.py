"""What a message must name (settings, files, options, numbers), whatever the words between."""

import re
from collections.abc import Callable


def pattern(*tokens: object) -> str:
    """A regular expression for `match=`: the message names every token, in any order."""
    return r"(?s)\A" + "".join(f"(?=.*{_alone(str(token))})" for token in tokens)


def names(message: str, *tokens: object) -> bool:
    """Whether the message names every token."""
    return re.search(pattern(*tokens), message) is not None


def caused_by(*errnos: int) -> Callable[[BaseException], bool]:
    """A `check=` for `pytest.raises`: the error was raised from a system error with one of these numbers."""
    return lambda error: isinstance(error.__cause__, OSError) and error.__cause__.errno in errnos


def _alone(token: str) -> str:
    """The token, but not as a part of a longer name or number."""
    before = r"(?<![\w.])" if token[:1].isdigit() else r"(?<!\w)" if re.match(r"\w", token) else ""
    after = r"(?!\w|\.\d)" if token[-1:].isdigit() else r"(?!\w)" if re.search(r"\w\Z", token) else ""
    return before + re.escape(token) + after
