"""Text from anywhere, made fit for a terminal: no control character of it reaches one."""

import logging
import re
import reprlib
from typing import Any

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""C0 and C1 but tab and line feed, marks that turn or hide text (bidi, zero width), and lone surrogates. The joiners
of Persian and of emojis stay."""


def printable(text: object) -> str:
    r"""The text with its control characters as escapes; its line breaks stay.

    >>> printable("\x1b[31mred\u202e\n")
    '\\x1b[31mred\\u202e\n'
    """
    return _CONTROLS.sub(_escape, str(text))


def one_line(text: object) -> str:
    r"""`printable`, with line breaks and tabs as escapes too: a name cannot begin a line of its own.

    >>> one_line("a\nb")
    'a\\nb'
    """
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def json_text(text: str) -> str:
    """JSON whose strings hold no control character: those that JSON allows as they are become escapes."""
    return _CONTROLS.sub(lambda found: "".join(f"\\u{unit:04x}" for unit in _units(found[0])), text)


LONGEST_VALUE = 80
"""Characters of a value that a message quotes."""


class _Brief(reprlib.Repr):
    """A repr that turns only the beginning of large values into text."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 20
        self.maxstring = self.maxlong = self.maxother = LONGEST_VALUE

    def repr_int(self, value: int, level: int) -> str:
        bits = value.bit_length()
        return repr(value) if bits < 4 * LONGEST_VALUE else f"an integer of {bits} bits"  # repr refuses huge ones


_BRIEF = _Brief()


def brief(value: Any) -> str:
    """A value as Python writes it, in at most 80 characters, whatever its size and depth.

    >>> brief("auto")
    "'auto'"
    >>> brief(10**5000)
    'an integer of 16610 bits'
    """
    return cut(_BRIEF.repr(value))


def cut(text: str) -> str:
    """One line of at most 80 characters; a longer text ends in `...`."""
    line = one_line(text[: LONGEST_VALUE + 1])
    return line if len(line) <= LONGEST_VALUE else f"{line[: LONGEST_VALUE - 3]}..."


class Clean(Exception):
    """An error fit for a terminal, whatever it quotes: a traceback shows it as its text is."""

    def __str__(self) -> str:
        return printable(super().__str__())


class _Cleaning(logging.Filter):
    """Filter that removes control characters from log records, so that any handler may write them anywhere."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = printable(record.msg)
        if isinstance(record.args, tuple):
            record.args = tuple(arg if isinstance(arg, int | float) else printable(arg) for arg in record.args)
        if record.exc_info and not record.exc_text:
            record.exc_text = printable(logging.Formatter().formatException(record.exc_info))
        return True


def clean_logger(name: str) -> logging.Logger:
    """Logger of a module of this package, whose records have no control characters."""
    logger = logging.getLogger(name)
    if not any(isinstance(known, _Cleaning) for known in logger.filters):
        logger.addFilter(_Cleaning())
    return logger


class Formatter(logging.Formatter):
    """Log records fit for a terminal, whatever they quote."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _escape(found: "re.Match[str]") -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _units(character: str) -> list[int]:
    """UTF-16, as JSON's escapes count."""
    data = character.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)]
