"""Strikes keys out of text that came from a server, in whatever encoding they are written there."""

import base64
import re
import unicodedata
from collections.abc import Iterable, Sequence

STRUCK = "***"
SHORTEST_PIECE = 8
"""Characters of a key, in a row, that are struck out wherever they stand: a key may be cut anywhere."""
FEWEST_LETTERS = 5
"""Letters and digits of a piece: fewer cannot be distinguished from other text."""
FEWEST_OWN = 4
"""Characters beyond a provider's prefix that make a piece a secret's own."""
_PREFIX = re.compile(r"[spr]k-(?:proj|svcacct|admin|ant-[a-z]+\d*|or-v\d+)-|github_pat_|hf_|nvapi-|glpat-")
"""What the keys of a provider begin with: struck out alone, it would hide the shape of somebody else's key."""

_ENCODINGS = {"utf-8": SHORTEST_PIECE, "utf-16-le": 2 * SHORTEST_PIECE, "utf-16-be": 2 * SHORTEST_PIECE}
"""Encodings of secrets inside base64 or hex, and the characters of each that make a piece."""
_ESCAPES = (  # JSON and Python, C, percent (also encoded twice), HTML
    r"\\+u\{?(?P<u>[0-9a-f]{4})\}?|\\+x(?P<x>[0-9a-f]{2})|\\+(?P<octal>[0-3][0-7]{2})"
    r"|%(?:25)*(?P<percent>[0-9a-f]{2})|&(?:amp;)*#x0*(?P<hex>[0-9a-f]{1,5});|&(?:amp;)*#0*(?P<decimal>[0-9]{1,6});"
)
_TOKEN = re.compile(rf"{_ESCAPES}|\\+[nrtbfv]|(?P<letter>[^\W_])", re.IGNORECASE)
_BASE = {"u": 16, "x": 16, "octal": 8, "percent": 16, "hex": 16, "decimal": 10}


def strike(text: str, secrets: Iterable[str]) -> str:
    """The text with every secret replaced by `***`, in every form in which a server may repeat it: the key as it is,
    cut off or spaced out; with the escapes of JSON, Python, C, HTML or percent encoding; and in base64 or hex, of its
    UTF-8 or UTF-16. Other forms, such as base32 or a cipher, are not searched for: nothing writes a request down like
    that by accident, and a server that wants to hide the key has it already.

    Only letters and digits are compared, so line breaks, spaces and punctuation inside a secret do not hide it. Of a
    secret with fewer than SHORTEST_PIECE of them only the exact word is struck.

    >>> strike("Bearer sk-4711-abcdefgh, cut: sk-4711-abcd; %73k-4711-abcdefgh", ["sk-4711-abcdefgh"])
    'Bearer ***, cut: ***; ***'
    """
    for secret in filter(None, secrets):
        pieces = _pieces(secret)
        text = _strike_pieces(text, pieces) if pieces else re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", STRUCK, text)
    return text


def _pieces(secret: str) -> set[str]:
    """The letters and digits of every piece of a secret, as it is and encoded; none of a short one."""
    if len(_plain(secret)) < SHORTEST_PIECE:
        return set()
    windows = _own_windows(secret)
    for encoding, size in _ENCODINGS.items():
        data = secret.encode(encoding, "surrogatepass")  # what is no UTF-8 in the environment comes as surrogates
        windows += _windows(data.hex(), size)
        for offset in range(3):  # base64 differs with the place of the secret in what was encoded
            encoded = base64.b64encode(b"\0" * offset + data).decode().rstrip("=")
            # no letters that hold bits of its neighbours
            windows += _windows(encoded[-(-8 * offset // 6) : -1], size)
    return {piece for window in windows if len(piece := _plain(window)) >= FEWEST_LETTERS}


def _own_windows(secret: str) -> list[str]:
    """Windows of the secret as it is, but for those with hardly more than a provider's prefix."""
    windows, prefix = _windows(secret, SHORTEST_PIECE), _PREFIX.search(secret)
    if prefix is None:
        return windows
    own = [not prefix.start() <= i < prefix.end() and c.isalnum() for i, c in enumerate(secret)]
    return [window for i, window in enumerate(windows) if sum(own[i : i + SHORTEST_PIECE]) >= FEWEST_OWN]


def _windows(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(len(text) - size + 1)]


def _plain(text: str) -> str:
    return "".join(c for c in text.casefold() if c.isalnum())


def _letters(text: str) -> list[tuple[str, int, int]]:
    """The letters and digits of a text, decoded and in lower case, each with its place."""
    found = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind is None:
            continue
        letter = match[kind] if kind == "letter" else chr(int(match[kind], _BASE[kind]))
        if letter.isascii() and letter.isalnum():
            found.append((letter.lower(), *match.span()))
            continue
        found += [(c, *match.span()) for c in unicodedata.normalize("NFKC", letter).casefold() if c.isalnum()]
    return found


def _strike_pieces(text: str, pieces: set[str]) -> str:
    letters = _letters(text)
    plain = "".join(letter for letter, _, _ in letters)
    parts, end = [], 0
    for first, last in _runs(plain, pieces):
        start, stop = letters[first][1], letters[last][2]
        parts += [text[end : max(start, end)], STRUCK]
        end = stop
    return "".join([*parts, text[end:]])


def _runs(plain: str, pieces: set[str]) -> Sequence[tuple[int, int]]:
    """First and last place of each stretch that pieces cover."""
    runs: list[tuple[int, int]] = []
    lengths = sorted({len(piece) for piece in pieces}, reverse=True)
    beginnings = {piece[:FEWEST_LETTERS] for piece in pieces}
    for i in [i for i in range(len(plain)) if plain[i : i + FEWEST_LETTERS] in beginnings]:
        length = next((len(piece) for n in lengths if (piece := plain[i : i + n]) in pieces), 0)
        if length and runs and i <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], i + length - 1))
        elif length:
            runs.append((i, i + length - 1))
    return runs
