"""Tokens of a text that claim something: names, numbers, dates, units, negations, in one form each.

>>> [t.form for t in tokenise("It opened on May 4th, 1932, and is 2.4 million m long.") if t.claims]
['open', '4', 'month-5', '1932', '2400000', 'metre', 'long']
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from grpo_nb.tasks.grounding.lexicon import (
    METRIC,
    MONTHS,
    NEGATIONS,
    NUMBERS,
    OPEN,
    ORDINALS,
    SCALES,
    SHORT_UNITS,
    SMALL,
    SYMBOLS,
    TITLES,
    UNIT_FORMS,
    UNITS,
    VARIABLE,
    WIDE_NAMES,
    words,
)
from grpo_nb.tasks.grounding.stems import stem
from grpo_nb.tasks.grounding.thesaurus import is_adverb, is_word

Kind = Literal["name", "number", "word", "small", "not", "mark"]


class Token(NamedTuple):
    """One token of a text in its normal form."""

    form: str
    kind: Kind
    """`mark`: punctuation; `not`: a negation; `small`: a word that claims nothing of its own."""
    word: str = ""
    """Lower case, as it is written but for accents."""
    owns: bool = False
    """Whether it is a genitive, `Ada's`."""

    @property
    def claims(self) -> bool:
        """Whether it claims something by itself."""
        return self.kind in ("name", "number", "word")


_LETTERS = str.maketrans(
    {"\u00f8": "o", "\u00d8": "O", "\u0142": "l", "\u0141": "L", "\u00df": "ss", "\u00e6": "ae", "\u00c6": "Ae"}
    | {"\u0153": "oe", "\u0111": "d", "\u0131": "i", "\u00f0": "d", "\u00fe": "th"}
)
"""Letters that Unicode does not take apart."""
_DASHES = re.compile("[\u2010-\u2015\u2212\u00ad\ufe58\ufe63\uff0d]")
_APOSTROPHES = re.compile("[\u2018\u2019\u02bc\u00b4`\u2032]")
_QUOTES = re.compile("[\"\u201c\u201d\u201e\u00ab\u00bb\u2033*_~|]|(?<!\\w)'|''+|'(?=[\\s.,;:!?)]*$)")
_ISO = re.compile(r"\b(\d{4})-(\d{1,2})-(\d{1,2})\b")
_SLASHED = re.compile(r"\b(\d{1,2})[/.](\d{1,2})[/.](\d{4})\b")
_SHORT_RANGE = re.compile(r"\b(\d\d)(\d\d)-(\d\d)\b(?!-)")
_RANKED = re.compile(r"(?:\b(?:[Nn]o\.|[Nn]r\.)|#) ?(?=\d)")
_SPACED = re.compile(r"(?<![\w.,])\d{1,3}(?: \d{3})+(?![\w,]|\.\d)")
_KIN = re.compile(r"\b(?:great|half|step|grand)-(?=[a-z])(?:grand-?)?[a-z]+|\b[a-z]+-in-law\b", re.IGNORECASE)
_PROFIT = re.compile(r"\bnot-for-(?=[a-z])", re.IGNORECASE)
_NOT = re.compile(r"\b(?:ca(?:n't|nnot)|(\w+)n't)\b", re.IGNORECASE)
_TOKEN = re.compile(
    r"(?P<initials>(?<![^\W\d_])(?:[^\W\d_]\.){1,}[^\W\d_](?![^\W\d_])\.?)"
    r"|(?P<number>\d+(?:[.,]\d+)*)(?P<tail>[^\W\d_]*)"
    r"|(?P<symbol>[$\u00a3\u20ac%\u00b0])"
    r"|(?P<word>[^\W\d_][^\W_]*(?:'[^\W\d_]+)*'?)"
    r"|(?P<mark>[^\w\s])"
)
_MONTH_NAMES = words("january february march april may june july august september october november december")


def plain(text: str) -> str:
    """The text without accents, with plain dashes and apostrophes; case and spacing stay.

    >>> plain("Vále \\u2013 Saint\\u2011Rémy\\u2019s")
    "Vale - Saint-Remy's"
    """
    if text.isascii():
        return text.replace("`", "'")
    parts = unicodedata.normalize("NFKD", text.translate(_LETTERS))
    bare = "".join(c for c in parts if not unicodedata.combining(c) and unicodedata.category(c) != "Cf")
    return _DASHES.sub("-", _APOSTROPHES.sub("'", bare))


@lru_cache(maxsize=8192)  # references and sources are compared with every completion
def tokenise(text: str) -> tuple[Token, ...]:
    """The tokens of a text in their normal forms and order; dates as day, month, year, money as number, currency."""
    bare = _QUOTES.sub(" ", plain(text))
    bare = _SLASHED.sub(_day_first, _ISO.sub(_spelt_date, bare))
    bare = _SHORT_RANGE.sub(r"\1\2-\1\3", bare)
    bare = _RANKED.sub("", bare)
    bare = _SPACED.sub(lambda found: found[0].replace(" ", ""), bare)
    bare = _KIN.sub(lambda found: found[0].replace("-", ""), bare)
    bare = _PROFIT.sub("non", bare)
    bare = _NOT.sub(lambda found: f"{found[1] or 'can'} not ", bare)
    return tuple(_dated(_wide(_metric(_counted(_initials(_split(bare)))))))


def content(tokens: Sequence[Token]) -> list[Token]:
    """The tokens that claim something."""
    return [token for token in tokens if token.claims]


def forms(text: str) -> list[str]:
    """The normal forms of what a text claims, in order."""
    return [token.form for token in tokenise(text) if token.claims]


def _spelt_date(found: re.Match[str]) -> str:
    month = int(found[2])
    return f"{int(found[3])} {_MONTH_NAMES[month - 1]} {found[1]}" if 1 <= month <= 12 else found[0]


def _day_first(found: re.Match[str]) -> str:
    """17/07/1879, and 07/17/1879 where only one order is a date."""
    day, month = int(found[1]), int(found[2])
    day, month = (month, day) if month > 12 else (day, month)
    return f"{day} {_MONTH_NAMES[month - 1]} {found[3]}" if 1 <= month <= 12 else found[0]


def _split(text: str) -> list[Token]:
    tokens: list[Token] = []
    begins = True
    for found in _TOKEN.finditer(text):
        if found["mark"]:
            mark = found["mark"]
            spaced = mark == "-" and text[found.start() - 1 : found.start()].isspace()
            tokens.append(Token(" - " if spaced else mark, "mark"))
            begins = mark in "!?" or (mark == "." and not _abbreviates(tokens))
            continue
        tokens += _token(found, begins, text)
        begins = False
    return tokens


def _abbreviates(tokens: Sequence[Token]) -> bool:
    """Whether the full stop just read belongs to an initial or a title, and ends no sentence."""
    before = tokens[-2].word if len(tokens) > 1 else ""
    return (len(before) == 1 and before.isalpha()) or before in TITLES


def _token(found: re.Match[str], begins: bool, text: str) -> list[Token]:
    if found["number"]:
        return _number(found["number"], found["tail"].lower())
    if found["symbol"]:
        return [Token(SYMBOLS[found["symbol"]], "number", found["symbol"])]
    if found["initials"]:
        return [_word(found["initials"].replace(".", ""), begins=False, ahead="", initials=True)]
    return [_word(found["word"], begins, text[found.end() : found.end() + 2])]


def _number(digits: str, tail: str) -> list[Token]:
    digits = re.sub(r",(?=\d{3}(?!\d))", "", digits).rstrip(".,")
    if "." in digits and digits.count(".") == 1:
        digits = digits.rstrip("0").rstrip(".")
    if tail in ("st", "nd", "rd", "th", "s"):
        return [Token(f"{digits}{'s' if tail == 's' else 'th'}", "number", digits + tail)]
    number = Token(digits, "number", digits)
    if not tail:
        return [number]
    if tail == "k" and re.fullmatch(r"\d+(?:\.\d+)?", digits):
        thousands = f"{float(digits) * SCALES['k']:.10g}"
        return [Token(thousands, "number", thousands)]
    unit = UNITS.get(tail) or SHORT_UNITS.get(tail)
    return [number, Token(unit, "number", tail)] if unit else [Token(digits + tail, "number", digits + tail)]


def _word(raw: str, begins: bool, ahead: str, initials: bool = False) -> Token:
    owns = raw.lower().endswith("'s") or raw.endswith("'")
    raw = re.sub(r"'(?:s|re|ll|ve|d|m)?$", "", raw, flags=re.IGNORECASE)
    word = raw.lower()
    opens = begins and ahead[:1] == " " and ahead[1:2].isupper() and not is_adverb(word)
    capital = raw[:1].isupper() and (not begins or opens or _strange(word))
    if initials and word in ("ie", "eg", "aka"):
        return Token(word, "small", word)
    if initials:
        return Token(VARIABLE.get(word, word), "name", word, owns)
    if raw.isupper() and len(raw) > 1 and word not in SMALL | NEGATIONS and word not in UNITS:
        return Token(stem(word), "name", word, owns)
    if raw == "US":
        return Token("us", "name", word, owns)
    if word in NEGATIONS:
        return Token(word, "name" if raw[0].isupper() and not begins and ahead[1:2].isupper() else "not", word)
    if word in SMALL:
        return Token(word, "small", word, owns)
    if word in UNITS:
        return Token(UNITS[word], "number", word)
    if word in ORDINALS:
        return Token(f"{ORDINALS[word]}th", "number", word)
    return Token(stem(word), "name" if capital else "word", word, owns)


def _strange(word: str) -> bool:
    """Whether a word that begins a sentence is not an English word, and so a name."""
    return word not in OPEN and not is_word(word)


def _initials(tokens: list[Token]) -> list[Token]:
    """Initials that stand apart become one token: `J. K.` -> jk."""
    merged: list[Token] = []
    run: list[Token] = []
    place = 0
    while place < len(tokens):
        token = tokens[place]
        dotted = place + 1 < len(tokens) and tokens[place + 1].form == "."
        if len(token.word) == 1 and token.word.isalpha() and dotted:
            run.append(token)
            place += 2
            continue
        merged += _joined(run)
        run = []
        merged.append(token)
        place += 1
    return merged + _joined(run)


def _joined(run: Sequence[Token]) -> list[Token]:
    letters = "".join(token.word for token in run)
    return [Token(letters, "name", letters)] if run else []


def _wide(tokens: list[Token]) -> list[Token]:
    """Names of several words that have a short one: `United States` -> us."""
    made: list[Token] = []
    place = 0
    while place < len(tokens):
        words = tuple(token.word for token in tokens[place : place + 4])
        name = next((name for name in WIDE_NAMES if words[: len(name)] == name), None)
        made.append(Token(WIDE_NAMES[name], "name", WIDE_NAMES[name]) if name else tokens[place])
        place += len(name) if name else 1
    return made


def _counted(tokens: list[Token]) -> list[Token]:
    """Number words as digits, scales multiplied, units in one spelling, currency after its number."""
    made: list[Token] = []
    place = 0
    while place < len(tokens):
        value, used = _value(tokens, place)
        if rank := _rank(tokens, place):
            made.append(Token(rank, "number", rank))
            place += 3
        elif used:
            made.append(Token(value, "number", value))
            place += used
            place += _hyphen(tokens, place)
            _unit(tokens, place, made)
            place += _unit_length(tokens, place)
        elif tokens[place].word in ("$", "\u00a3", "\u20ac") and _value(tokens, place + 1)[1]:
            value, used = _value(tokens, place + 1, money=True)
            made += [Token(value, "number", value), tokens[place]]
            place += 1 + used
        else:
            made.append(tokens[place])
            place += 1
    return made


def _rank(tokens: Sequence[Token], place: int) -> str:
    """The rank that three tokens spell, `twenty-third` as 23th; else empty."""
    words = [token.word or token.form for token in tokens[place : place + 3]]
    tens, unit = NUMBERS.get(words[0], 0), ORDINALS.get(words[-1], 10)
    return f"{tens + unit}th" if len(words) == 3 and words[1] == "-" and tens >= 20 and unit < 10 else ""


def _hyphen(tokens: Sequence[Token], place: int) -> bool:
    """Whether a hyphen joins a number and its unit: `200-metre`."""
    return place + 1 < len(tokens) and tokens[place].form == "-" and tokens[place + 1].form in UNIT_FORMS


def _metric(tokens: list[Token]) -> list[Token]:
    """Kilometres as metres, `\u00b0C` as degrees of Celsius."""
    for place in range(1, len(tokens)):
        before, token = tokens[place - 1], tokens[place]
        if token.form in METRIC and re.fullmatch(r"\d+(?:\.\d+)?", before.form):
            unit, size = METRIC[token.form]
            tokens[place - 1] = before._replace(form=f"{float(before.form) * size:.10g}")
            tokens[place] = token._replace(form=unit)
        elif before.form == "degree" and token.word in ("c", "f"):
            tokens[place] = Token({"c": "celsius", "f": "fahrenheit"}[token.word], "number", token.word)
    return tokens


def _unit(tokens: Sequence[Token], place: int, made: list[Token]) -> None:
    if _unit_length(tokens, place):
        words = [token.word for token in tokens[place : place + 2]]
        made.append(Token("percent" if words[0] == "per" else SHORT_UNITS[words[0]], "number", words[0]))


def _unit_length(tokens: Sequence[Token], place: int) -> int:
    words = [token.word for token in tokens[place : place + 2]]
    if words == ["per", "cent"]:
        return 2
    return int(bool(words) and words[0] in SHORT_UNITS)


def _value(tokens: Sequence[Token], place: int, money: bool = False) -> tuple[str, int]:
    """The number that begins at a place, and how many tokens spell it; `one` alone is a pronoun."""
    total, used, group = 0.0, 0, None
    while place + used < len(tokens):
        word = tokens[place + used].word
        if group is not None and word in SCALES and (len(word) > 2 or money):
            group *= SCALES[word]
            total, group = (total + group, 0) if SCALES[word] > 100 else (total, group)
        elif re.fullmatch(r"\d+(?:\.\d+)?", word) and group is None:
            group = float(word)
        elif word in NUMBERS and _goes_on(group, NUMBERS[word]):
            group = (group or 0) + NUMBERS[word]
        elif group is not None and word == "point" and (digits := _decimals(tokens, place + used + 1)):
            group, used = float(f"{int(group)}.{digits}"), used + len(digits)
        elif group is not None and [t.word for t in tokens[place + used : place + used + 3]] == ["and", "a", "half"]:
            group, used = group + 0.5, used + 2
        elif not _links(tokens, place + used):
            break
        used += 1
    if group is None or (used == 1 and tokens[place].word == "one"):
        return "", 0
    total += group
    return (f"{total:.10g}" if not total.is_integer() else str(int(total))), used


def _decimals(tokens: Sequence[Token], place: int) -> str:
    """The digits that words from a place on spell: `three five` as 35."""
    found = ""
    while place < len(tokens) and NUMBERS.get(tokens[place].word, 10) < 10:
        found += str(NUMBERS[tokens[place].word])
        place += 1
    return found


def _goes_on(group: float | None, number: int) -> bool:
    """Whether a number word adds to the ones before it: `hundred` five, `twenty` five, `thousand` twenty."""
    return group is None or group % 100 == 0 or (group % 10 == 0 and group % 100 >= 20 and number < 10)


def _links(tokens: Sequence[Token], place: int) -> bool:
    """Whether a hyphen or an `and` continues a number: `forty-two`, `two hundred and six`."""
    before, after = (tokens[p].word if 0 <= p < len(tokens) else "" for p in (place - 1, place + 1))
    if tokens[place].form == "-":
        return (NUMBERS.get(before, 0) >= 20 and NUMBERS.get(after, 10) < 10) or (before in NUMBERS and after in SCALES)
    return tokens[place].word == "and" and before in ("hundred", "thousand") and after in NUMBERS


def _dated(tokens: list[Token]) -> list[Token]:
    """Dates as day, month, year, whatever their order; a month's name without a number stays a word."""
    made: list[Token] = []
    place = 0
    while place < len(tokens):
        date, used = _date(tokens, place)
        made += date if used else [tokens[place]]
        place += used or 1
    return made


def _date(tokens: Sequence[Token], place: int) -> tuple[list[Token], int]:
    found: dict[str, Token] = {}
    used = end = 0
    while place + used < len(tokens) and used < 7 and len(found) < 3:
        token = tokens[place + used]
        part = _date_part(token)
        if part and part not in found and (part != "year" or found):
            found[part] = token
            end = used + 1
        elif not ((found and token.word in ("of", "the")) or (token.form == "," and found)):
            break
        used += 1
    if "month" not in found or len(found) < 2:
        return [], 0
    day = found.get("day")
    days = [Token(re.sub(r"\D", "", day.form), "number", day.word)] if day else []
    months = [Token(MONTHS[found["month"].word], "number", found["month"].word)]
    return [*days, *months, *([found["year"]] if "year" in found else [])], end


def _date_part(token: Token) -> str:
    if token.word in MONTHS:
        return "month"
    if match := re.fullmatch(r"(\d{1,2})(?:th)?", token.form):
        return "day" if 1 <= int(match[1]) <= 31 else ""
    return "year" if re.fullmatch(r"\d{3,4}", token.form) else ""
