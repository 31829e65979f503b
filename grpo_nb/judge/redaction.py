"""Removes secrets from text that leaves this machine: known values in any encoding, and everything like a key."""

import base64
import binascii
import os
import re
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

from grpo_nb.judge.secrets import STRUCK, strike

SECRET_NAME = re.compile(
    r"(?i)((^|_)(key|auth|cookie|pat|dsn|jwt)|api_?key|token|secret|passw(or)?d|pwd|pass|credential)s?(_|$)"
)
"""Names of environment variables whose values are secrets."""
SHORTEST_SECRET = 4
SHORTEST_NUMBER = 8
"""Digits alone are a count or a port below this."""
HARMLESS = frozenset({"true", "false", "none", "null", "yes", "auto", "disabled", "enabled"})
"""Values of such variables that are switches."""
_MORE = r"(?:[\s\"'+\\,]{1,8}(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{8,})*"
"""Further pieces of a key that was split over strings or lines."""
_SHAPES = re.compile(
    "|".join(
        (
            rf"\b(?:sk|pk|rk)-[\w-]{{8,}}{_MORE}",
            rf"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AIza|nvapi-|gsk_)(?=[\w-]*\d)[\w-]{{6,}}{_MORE}",
            r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
            r"\beyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?",
            r"(?i:\b(?:bearer|basic))\s+[\w.~+/=-]{12,}",
            r"(?<=://)[^\s\"'<>]+(?=@)",  # user and password of an address
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
            # a name of a secret, and a value with a digit and eight characters or more
            r"(?i:(?<=key|ken|ret|ord|pwd))[\"']?\s*[:=]\s*[\"']?(?=[^\s\"',;]*\d)(?=[^\s\"',;]*[A-Za-z])[^\s\"',;]{8,}",
        )
    ),
    re.DOTALL,
)
_SHAPES_INSIDE = re.compile(_SHAPES.pattern.replace(r"\b", ""), re.DOTALL)
"""Shapes of keys anywhere in a word, for decoded text."""
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{16,}={0,2}")
_ESCAPE = re.compile(r"\\+u([0-9a-fA-F]{4})|\\+x([0-9a-fA-F]{2})|%(?:25)*([0-9a-fA-F]{2})|\\+([/nrt\"'])")
_HOMES = re.compile(r"(?:/home|/Users)/[^/\s\"'\\:,;)\]}>]+|[A-Za-z]:(?:\\+|/)Users(?:\\+|/)[^\\/\s\"':,;)\]}>]+")


def known_secrets(names: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> list[str]:
    """Values of the environment variables whose names say that they are secret, and of `names`; the longest first."""
    variables, extra = os.environ if environment is None else environment, {*names}
    found = {value for name, value in variables.items() if name in extra or SECRET_NAME.search(name)}
    found |= {part for value in variables.values() for part in _of_address(value)}
    return sorted((value for value in found if _is_secret(value)), key=len, reverse=True)


def _of_address(value: str) -> Iterator[str]:
    """User and password in an address, such as a proxy's."""
    _, scheme, rest = value.partition("://")
    login, at, _ = rest.rpartition("@")
    if scheme and at:
        for part in (login, *login.split(":", 1)):
            yield from (part, unquote(part))


def _is_secret(value: str) -> bool:
    plain = value.strip()
    switch = plain.lower() in HARMLESS or (plain.isdigit() and len(plain) < SHORTEST_NUMBER)
    return len(plain) >= SHORTEST_SECRET and not switch and not (os.path.isabs(plain) and os.path.exists(plain))


def redacted(text: str, secrets: Collection[str] = ()) -> str:
    """The text without secrets, with home folders as `~` and this machine's name as `<host>`.

    The given `secrets` are found in plain text, in escapes, base64 and hex, cut and spaced out (`judge.secrets`). Keys
    of others are found by their shape, in plain text, escapes and base64.

    >>> redacted("key sk-4711abcdefgh0815 of /home/ada/runs")
    'key *** of ~/runs'
    """
    # Shapes first: a given key that begins like another one would take that one's beginning, and so its shape.
    return shortened(_unshaped(strike(_unshaped(text), secrets)))


def _unshaped(text: str) -> str:
    return _without_spans(text, [*_shaped(text), *_shaped_in_base64(text)])


def shortened(text: str) -> str:
    """Home folders as `~`, and this machine's name as `<host>`."""
    for home in {str(Path.home()), os.path.realpath(Path.home())} - {"/"}:
        for written in (home, home.replace("/", r"\/"), home.replace("\\", r"\\")):
            text = re.sub(rf"(?<![\w/.\\-]){re.escape(written)}(?![\w.-])", "~", text)
    text = _HOMES.sub("~", text)
    host = socket.gethostname()
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "<host>", text) if len(host) >= SHORTEST_SECRET else text


def _shaped(text: str) -> Iterator[tuple[int, int]]:
    """Positions of keys in the text, escapes decoded."""
    letters: list[str] = []
    places: list[tuple[int, int]] = []
    end = 0
    for escape in _ESCAPE.finditer(text):
        letters += text[end : escape.start()]
        places += [(i, i + 1) for i in range(end, escape.start())]
        code = escape[1] or escape[2] or escape[3]
        letters.append(chr(int(code, 16)) if code else " " if escape[4] in "nrt" else escape[4])
        places.append(escape.span())
        end = escape.end()
    letters += text[end:]
    places += [(i, i + 1) for i in range(end, len(text))]
    for match in _SHAPES.finditer("".join(letters)):
        if match.end() > match.start():
            yield places[match.start()][0], places[match.end() - 1][1]


def _shaped_in_base64(text: str) -> Iterator[tuple[int, int]]:
    for match in _BASE64.finditer(text):
        coded = match[0].rstrip("=").replace("-", "+").replace("_", "/")
        if any(_SHAPES_INSIDE.search(_decoded(coded[offset:])) for offset in range(4)):
            yield match.span()


def _decoded(coded: str) -> str:
    whole = coded[: len(coded) - (len(coded) % 4 == 1)]
    try:
        return base64.b64decode(whole + "=" * (-len(whole) % 4)).decode("latin-1").replace("\0", "")
    except binascii.Error:
        return ""


def _without_spans(text: str, spans: list[tuple[int, int]]) -> str:
    parts, end = [], 0
    for first, last in sorted(spans):
        if last > end:
            parts += [text[end : max(first, end)], STRUCK]
            end = last
    return "".join([*parts, text[end:]])
