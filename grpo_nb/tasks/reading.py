"""Extracts the answer of a completion: the text after the thinking, the strongest marker, the evidence.

The grammar is the same for every task, for training and for `grpo-nb score`:

1. Thinking is left out (tasks/thinking.py), and so is a question that the model asks itself after its answer.
2. The answer follows a marker; the strongest kind of marker that the text has counts, and of this kind the last:
   `\\boxed{...}`, an answer tag (`<answer>`), a JSON field ("answer": ...), a final answer ("Final answer:", "Correct
   answer:"), an answer ("Answer:", "The answer is", a heading or the row of a table "Answer"), a conclusion
   ("Conclusion:", "Final:", "TL;DR:"). Inside the first three it is read again.
   A marker that is denied or doubted ("the answer is not", "if the answer is") is none.
3. The answer is the rest of the line; where that is empty, the next line that is not. Markdown is dropped. A list
   with a bullet before each entry is one answer.
   Below it, the lines from one on that takes it back (tasks/turns.py) belong to the answer.
4. A list of three or more answer lines that differ is no answer.
5. Evidence follows `Evidence:`, on the line or below it: what stands between quotation marks of any kind, or all of it.
6. A text without a marker is an answer as it is.

The meaning of a short answer is read by `choose` (tasks/choosing.py), `abstains` and `yes_or_no`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from grpo_nb.tasks.thinking import after_thinking
from grpo_nb.tasks.turns import parts, takes_back
from grpo_nb.tasks.wordings import (
    DANGLING,
    EXPLANATIONS,
    NOT_ABSTENTION,
    PLAIN_ABSTENTION,
    SINGLE_ABSTENTIONS,
    folded,
    words_of,
)
from grpo_nb.tasks.wordings import UNKNOWN_WORDINGS as UNKNOWN_WORDINGS
from grpo_nb.tasks.wordings import normalise as normalise

LETTERS = "ABC"

_MARKS = r"[*_`#>\s]*"
_WORD = (
    r"(?:answers?|antwort|r[ée]ponse|respuesta|risposta|resposta|antwoord|svar|odpowied[źz]|cevap|ответ|答案|回答|答え"
    r"|정답)"
)
_STRONG = r"(?:final|corrected|correct|revised|updated|actual|true|right|best|ultimate|definitive)"
_IS = r"(?:is|would be|should be|must be|will be|has to be|ist|est|es|è|é|是|为)"
_COLON = r"[*_`)\]]*\s*[:：=]"


class Marker(NamedTuple):
    """One way to mark an answer; the answer follows the match, or is its group."""

    name: str
    strength: int
    pattern: re.Pattern[str]
    again: bool = False
    """Whether the answer is parsed again as a text of its own."""


def _marker(name: str, strength: int, pattern: str, again: bool = False) -> Marker:
    return Marker(name, strength, re.compile(pattern, re.IGNORECASE | re.MULTILINE | re.DOTALL), again)


_TAG = r"(?:final_?answer|answer|final|response|output|solution|result|choice|option|conclusion)"
MARKERS = (
    _marker("boxed", 6, r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}", again=True),
    _marker("tag", 5, rf"<({_TAG})>(?P<text>.*?)(?:</\1>|\Z)", again=True),
    _marker(
        "json", 4,
        r"[\"'](?:final_?answer|answer|choice|option|selected_option|selected|prediction|response)[\"']\s*:\s*"
        r"(?:\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)'|([\w]+))",
        again=True,
    ),
    _marker(
        "final", 3,
        rf"\b(?:(?:final|corrected|revised|updated) {_WORD}|correct {_WORD}(?={_COLON})){_MARKS}(?:{_COLON}|{_IS}\b:?)",
    ),
    _marker("final", 3, rf"^{_MARKS}(?:my )?(?:final|corrected|correct) {_WORD}{_MARKS}$"),
    _marker("answer", 2, rf"(?<![\w<\"'])(?:{_STRONG} |my |the |most \w+ ){{0,4}}{_WORD}(?:\s*\([^)\n]*\))?{_COLON}"),
    _marker(
        "answer", 2,
        rf"\b(?:{_STRONG} |likely ){{0,3}}(?:{_WORD}|option|choice)(?: to (?:the|this) question| here)? {_IS}\b[:：]?",
    ),
    _marker("answer", 2, r"(?:答案|回答)(?:应该)?(?:是|为)"),
    _marker("answer", 2, rf"^{_MARKS}(?:the |my )?{_WORD}{_MARKS}$"),
    _marker("answer", 2, rf"^{_MARKS}ans\b\s*[.:)\-]+\s*[-:]*"),
    _marker("row", 2, rf"^\s*\|{_MARKS}{_WORD}{_MARKS}\|"),
    _marker(
        "conclusion", 1,
        rf"^{_MARKS}(?:conclusion|final|result|verdict|summary|tl;?dr|in short|so|therefore){_COLON}{_MARKS}(?=\S)",
    ),
)  # fmt: skip
"""Markers of an answer. The strongest counts, and the last of the strongest."""
NESTED = 4
"""Markers inside a marker that are followed."""

_UNDONE = re.compile(
    r"(?:\b(?:if|whether|unless|suppose|assuming|cannot|can't|not|don't|doesn't|might|may|could|some|one|first|tempt\w*|"
    r"n't|why|stereotyp\w*|wrong|incorrect|assume)\b[^.\n]*|\bno )$",
    re.IGNORECASE,
)
_NOT_THIS = re.compile(
    r"\s*(?:consistent|supported|confirmed|found|given|stated|based|clear)\b"
    r"|\s*(?:not|n't|neither|never)\b(?! (?:enough|know|answer|possib|determin|stat|clear|giv|specif|mention|provid|"
    r"indicat|suffic|be |able|in the|explicit|avail))",
    re.IGNORECASE,
)
_NEXT = re.compile(
    r"\n\s*[*#]*\s*(?:next )?(?:question|context|passage|text|user|human|instruction|input|q|problem|example)\b"
    r"[^\n:]{0,12}:",
    re.IGNORECASE,
)
_EVIDENCE = re.compile(r"(?<!no )(?<!any )\b(?:supporting )?evidence\b[\s*_`\"']*:", re.IGNORECASE)
_JSON_EVIDENCE = re.compile(r"\"evidence\"\s*:\s*\"((?:[^\"\\]|\\.)*)\"", re.IGNORECASE)
_JSON_OTHERS = re.compile(
    r"\"(?:answer_?[2-9]|(?:second|other|alternative)_?(?:answer)?)\"\s*:\s*\"((?:[^\"\\]|\\.)*)\"", re.IGNORECASE
)
_QUOTES = {'"': '"', "\u201c": "\u201d", "\u201e": "\u201c\u201d", "\u00ab": "\u00bb", "\u2018": "\u2019", "'": "'"}
_QUOTES |= {"\u300c": "\u300d", "\u2039": "\u203a", "`": "`", "\u201d": "\u201d"}
_LEFTOVER = re.compile(
    r"<[|｜][^<>|｜\n]{1,40}[|｜]>(?:(?<=start\|>)\s*assistant\b)?|</?s>|<(?:eos|bos|pad|unk|end_of_turn|start_of_turn)>"
    r"|<turn\|>|\[/?INST\]"
)
_LINE_MARKS = "*_`#>| \t"


@dataclass(frozen=True)
class Reading:
    """Answer of a completion, after its thinking."""

    answer: str
    """The answer, without its marker, markdown and evidence: after a marker one line and the lines that take it back,
    else the complete text; empty without one."""
    evidence: str | None
    """Quotation that supports it."""
    marker: str
    """Name of the marker that the answer follows; empty: the text has none, and all of it is the answer."""
    block: str
    """All lines of the answer, joined: free answers (replies, summaries) continue after the first one."""
    rest: str = ""
    """The lines below an answer that follows a marker: what explains it, or concludes otherwise."""


@lru_cache(maxsize=4096)  # completions of a group are often the same, and a check reads each wording for every item
def read(text: str) -> Reading:
    """The answer of a completion and its evidence.

    >>> read("<think>A?</think>So:\\n**Answer:** B\\nEvidence: 'x'")
    Reading(answer='B', evidence='x', marker='answer', block='B', rest='')
    """
    return _read(_LEFTOVER.sub("", after_thinking(text)).strip(), NESTED)


def evidence(text: str) -> str | None:
    """Text after the last `Evidence:`: the part between its quotation marks, or all of it; None without one.

    >>> evidence('Answer: goats\\nEvidence: the text says "Ablo keeps goats."')
    'Ablo keeps goats.'
    """
    places = [match.end() for match in _EVIDENCE.finditer(text)]
    if not places:
        quoted = _JSON_EVIDENCE.search(text)
        return quoted[1].strip() or None if quoted else None
    lines = [line.strip().strip("*_>").strip() for line in text[places[-1] :].splitlines()]
    given = [line for line in lines if line]
    return _quoted(given[0]) if given else None


def yes_or_no(text: str) -> bool | None:
    """Whether an answer is a yes or a no, as a word of its own; None for neither, or both.

    What explains it is left out, and "no" before a noun is no answer ("Yes, there is no support").

    >>> yes_or_no("Answer: Yes."), yes_or_no("None of it, no"), yes_or_no("Yes and no"), yes_or_no("Nonsense")
    (True, False, None, None)
    """
    for part in reversed(parts(folded(read(text).answer))):
        head = re.split(r"[.!?\n]", words_of(EXPLANATIONS).split(part)[0].strip())[0]
        if said := set(_YES_NO.findall(head)):
            return None if len(said) != 1 else said == {"yes"}
    return None


@lru_cache(maxsize=4096)  # an item's two texts are read several times each
def abstains(answer: str) -> bool:
    """Whether an answer states that the text does not say.

    A single word such as `Unknown` must be the complete answer; a phrase must come within the first words.

    >>> abstains("The text does not say."), abstains("The Unknown Soldier"), abstains("It is not known for beetles")
    (True, False, False)
    """
    words = " ".join(re.findall(r"[\w']+", folded(answer)))
    if words in _UNKNOWN or _ALONE.match(words):
        return True
    found = PLAIN_ABSTENTION.search(NOT_ABSTENTION.sub(lambda match: "~" * len(match[0]), words))
    return found is not None and (words[: found.start()].count(" ") <= 3 or _ABOUT_TEXT.match(words) is not None)


def cut_off(answer: str) -> bool:
    """Whether a text stops before its end: at a word that cannot end a sentence, or within a sentence after others.

    >>> cut_off("The bridge was opened on"), cut_off("What it was made of."), cut_off("In")
    (True, False, False)
    """
    words = answer.split()
    within = len(words) > 7 and words[-1][-1].isalnum() and re.search(r"[.!?][*_]*\s", answer) is not None
    return len(words) > 2 and (words[-1].lower() in DANGLING or words[-1][-1] in ",:" or within)


def contains(words: str, phrase: str) -> bool:
    """Whether a normalised phrase occurs in normalised words, as complete words."""
    return bool(phrase) and f" {phrase} " in f" {words} "


def denied(words: str, phrase: str) -> bool:
    """Whether a negation stands right before the first place of a normalised phrase in normalised words.

    >>> denied("it was not grandson", "grandson"), denied("grandson who was not late", "grandson")
    (True, False)
    """
    before, found, _ = f" {words} ".partition(f" {phrase} ")
    return bool(found) and re.search(r"\b(?:not|nor|neither|never|except|isn't|wasn't)$", before) is not None


def _read(text: str, depth: int) -> Reading:
    own = _own(text)
    found = _marked(own) if depth else None
    if found is None:
        whole = _without_notes(_before_evidence(own).strip())
        return Reading(whole, evidence(text), "", " ".join(whole.split()))
    marker, answer, below = found
    if marker.again:
        inner = _read(_with_others(answer, own, marker.name), depth - 1)
        rest, turned = _turned(_lines(below) if marker.name != "json" else [])
        quote, name = evidence(text) or inner.evidence, inner.marker or marker.name
        return Reading(inner.answer + turned, quote, name, inner.block, inner.rest or rest)
    lines = _lines(answer)
    if not lines or _lists(own):
        return Reading("", evidence(text), marker.name, "")
    if items := _bulleted(_before_evidence(answer)):
        return Reading(", ".join(items), evidence(text), marker.name, " ".join(lines))
    rest, turned = _turned(lines[1:])
    return Reading(lines[0] + turned, evidence(text), marker.name, " ".join(lines), rest)


def _with_others(answer: str, text: str, marker: str) -> str:
    """An answer in JSON with further ones, `"answer_2": ...`: two answers are none."""
    others = [found[1] for found in _JSON_OTHERS.finditer(text)] if marker == "json" else []
    return "; ".join([answer, *others])


def _own(text: str) -> str:
    """The text up to a further question that the model makes up after an answer."""
    answered = min((place.end() for _, place in _places(text)), default=len(text))
    for match in _NEXT.finditer(text):
        before = text[: match.start()].strip()
        short = "\n" not in before and 0 < len(before.split()) <= 8 and before[-1] != ":"
        if short or match.start() >= answered:
            return before
    return text


def _lines(text: str) -> list[str]:
    """The lines of a text before its evidence, without markdown and empty ones."""
    return [line for part in _before_evidence(text).splitlines() if (line := part.strip().strip(_LINE_MARKS))]


def _marked(text: str) -> tuple[Marker, str, str] | None:
    """The last of the strongest markers, its answer, and what stands below an answer that has an end."""
    found = sorted(_places(_without_evidence(text)), key=lambda entry: (entry[0].strength, entry[1].end()))
    for marker, place in reversed(found):
        if marker.again:
            answer = next(group for group in place.groups()[::-1] if group is not None)
            return marker, answer, text[place.end() :].lstrip(" .,$")
        if _meant(place):
            return marker, text[place.end() :], ""
    return None


def _places(text: str) -> Iterator[tuple[Marker, re.Match[str]]]:
    return ((marker, place) for marker in MARKERS for place in marker.pattern.finditer(text))


def _meant(place: re.Match[str]) -> bool:
    """Whether a marker stands for an answer: it is not denied or doubted."""
    before = place.string[max(0, place.start() - 200) : place.start()].rsplit("\n", 1)[-1]
    return not _UNDONE.search(before) and not _NOT_THIS.match(place.string, place.end())


def _lists(text: str) -> bool:
    """Whether three answer lines or more stand together and differ."""
    lines = [line.strip().strip(_LINE_MARKS) for line in text.splitlines() if line.strip()]
    run: list[str] = []
    for line in lines:
        match = _LINE_ANSWER.match(line)
        run = [*run, normalise(match[1])] if match else []
        if len(run) >= 3 and len(set(run)) > 1:
            return True
    return False


def _bulleted(text: str) -> list[str]:
    """The entries of a text that is a list of two or more, one a line after a bullet each; else none."""
    lines = [line.strip() for line in text.splitlines() if line.strip(_LINE_MARKS)]
    found = [_BULLET.match(line) for line in lines]
    return [match[1] for match in found if match] if len(found) > 1 and all(found) else []


def _turned(lines: list[str]) -> tuple[str, str]:
    """Lines after an answer, split before the first that takes it back."""
    place = next((place for place, line in enumerate(lines) if takes_back(line)), len(lines))
    return "\n".join(lines[:place]), "".join(f"\n{line}" for line in lines[place:])


def _before_evidence(text: str) -> str:
    match = _EVIDENCE.search(text)
    return text[: match.start()] if match else text


def _without_evidence(text: str) -> str:
    """The text with the lines of evidence blanked: a quotation starts no answer."""
    return "\n".join(
        line[: match.start()] + " " * (len(line) - match.start()) if (match := _EVIDENCE.search(line)) else line
        for line in text.split("\n")
    )


def _quoted(line: str) -> str | None:
    """Text from the first quotation mark to the last one that closes it; the complete line without quotation marks."""
    start = next((place for place, mark in _openings(line)), None)
    if start is None:
        return line.strip() or None
    closing = _QUOTES[line[start]]
    end = max((place for place, mark in enumerate(line) if mark in closing and place > start), default=len(line))
    return line[start + 1 : end].strip() or None


def _without_notes(text: str) -> str:
    """The text without lines that speak of the answer: `Confidence: 99%`, `Note: ...`; all of it where none is left."""
    kept = [line for line in text.split("\n") if not _NOTE.match(line)]
    return "\n".join(kept).strip() or text


def _openings(line: str) -> Iterator[tuple[int, str]]:
    """The marks that open a quotation; an apostrophe inside a word opens none."""
    for place, mark in enumerate(line):
        if mark in _QUOTES and (mark not in "'\u2019`" or place == 0 or not line[place - 1].isalnum()):
            yield place, mark


_BULLET = re.compile(r"(?:[-*+\u2022]|\d{1,2}[.)])\s+(.*)$")
_LINE_ANSWER = re.compile(rf"{_WORD}{_COLON}\s*(.*)$", re.IGNORECASE)
_NOTE = re.compile(
    rf"{_MARKS}(?:confidence|certainty|score|explanation|reasoning|rationale|note|justification|sources?|verification|"
    rf"check|draft|thoughts?){_COLON}",
    re.IGNORECASE,
)
_YES_NO = re.compile(r"\byes\b|\bno\b(?=\W*(?:$|[.,;:!?)\-\n]|and\b|or\b|it\b|the\b|this\b))")
_UNKNOWN = frozenset(normalise(folded(wording)) for wording in UNKNOWN_WORDINGS)
_ALONE = re.compile(
    rf"(?:(?:it|the|this|that|answer|is|was|remains|still|are|be|remain|seems|very) )*{SINGLE_ABSTENTIONS}"
    r"(?=$| (?:who|whether|which|what|where|when|how|why|whose|from|based|given|in|as|because|since|and|if|at)\b)"
)
_ABOUT_TEXT = re.compile(
    r"(?:\w+ ){0,3}?(?:text|context|passage|article|document|information|source|knowledge|paragraph|story)\b"
)
