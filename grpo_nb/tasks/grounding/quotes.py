"""Quotations: does one stand in its source, and is it about the answer? And which one SFT learns to quote."""

import bisect
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from grpo_nb.tasks.grounding.claims import forms, tokenise
from grpo_nb.tasks.grounding.passages import Passage, squeeze

QUOTE_WORDS = (5, 40)
"""A quotation has at least so many words (fewer name nothing) and at most so many (more is copying)."""
WINDOW = 15
"""Words that a gold quotation has at most: of a longer sentence it is the part around the answer."""
SENTENCES = 8
"""Sentences of the source at most that a gold quotation is looked for in, the nearest ones."""
_CUT = re.compile(r"\[?(?:\.\s*){3,}\]?|\[?\u2026\]?")


class Subject(NamedTuple):
    """Subject that a quotation must be about."""

    sentences: Collection[int]
    """The sentences of the source that are evidence."""
    answer: Collection[str]
    """Forms of the answer, all of which show it; none where the answer is yes or no, or free."""
    names: Collection[str]
    """Without an answer: forms of which a quotation holds one, unless this is empty ..."""
    shared: Collection[str]
    """... and one of these, or most of a sentence."""


def grounds(quote: str, source: Passage, about: Subject) -> bool:
    """Whether a quotation stands in the source and shows the answer.

    It stands there word by word (letter case, quotation marks, dashes and spacing do not count), in 5 to 40 words
    (QUOTE_WORDS; a source of fewer may be quoted whole). It is made of evidence for the most part, begins and ends in
    no other sentence that it cuts, and holds the answer or half of its sentence; without an answer, a name and a word
    of its subject (two names where the source has no such word), or most of a sentence.
    """
    placed = _placed(quote, source)
    if placed is None:
        return False
    held = set(forms(quote))
    quoted = {place: words for start, text in placed for place, words in _spread(start, text, source).items()}
    counts = {place: len(words) for place, words in quoted.items()}
    evident = sum(count for place, count in counts.items() if place in about.sentences)
    if 2 * evident < sum(counts.values()):
        return False
    if any(place not in about.sentences and 2 * count <= _size(source, place) for place, count in counts.items()):
        return False
    if about.answer and set(about.answer) <= held:
        return True
    if about.answer:
        return any(place in about.sentences and 2 * count >= _size(source, place) for place, count in counts.items())
    if about.names and not set(about.names) & held:
        return False
    most = any(place in about.sentences and 5 * count >= 3 * _size(source, place) for place, count in counts.items())
    told = set(about.shared) & {form for place in about.sentences for form in source.sentences[place].holds}
    return most or bool(told & held) or (not told and len(set(about.names) & held) > 1)


def made_up(quote: str, source: Passage, asked: Collection[str]) -> bool:
    """Whether a quotation has names or numbers that its source does not have."""
    known = source.holds | set(asked)
    return any(
        token.form not in known
        for token in tokenise(quote)
        if token.kind == "name" or (token.kind == "number" and len(token.form) > 1)
    )


def best_quote(source: Passage, about: Subject, near: Sequence[str]) -> str | None:
    """The sentence, or the window of one, that grounds the answer and holds most of `near`; None where none does."""
    wanted, answer = set(near), set(about.answer)

    def rank(text: str) -> tuple[bool, int, int]:
        held = set(forms(text))
        return answer <= held, len(wanted & held), -len(text)

    best = sorted(sorted(about.sentences), key=lambda place: -len(wanted & source.sentences[place].gist))[:SENTENCES]
    found = [part for place in best for part in _windows(source.sentences[place].text)]
    return next((part for part in sorted(found, key=rank, reverse=True) if grounds(part, source, about)), None)


def _placed(quote: str, source: Passage) -> list[tuple[int, str]] | None:
    """Positions of the quotation's parts in the squeezed source; None where one is missing, or the size is wrong."""
    parts = [words for part in _CUT.split(quote) if (words := squeeze(part))]
    size = sum(len(words.split()) for words in parts)
    least, most = QUOTE_WORDS
    if not parts or not min(least, len(source.squeezed.split())) <= size <= most:
        return None
    starts = []
    begin = 0
    for words in parts:
        begin = source.squeezed.find(f" {words} ", begin)
        if begin < 0:
            return None
        starts.append((begin + 1, words))
    return starts


def _spread(start: int, text: str, source: Passage) -> dict[int, list[str]]:
    """The quoted words by sentence."""
    spread: dict[int, list[str]] = {}
    place = start
    for word in text.split():
        spread.setdefault(bisect.bisect_right(source.starts, place) - 1, []).append(word)
        place += len(word) + 1
    return spread


def _size(source: Passage, place: int) -> int:
    return len(source.sentences[place].squeezed.split())


def _windows(sentence: str) -> list[str]:
    words = sentence.split()
    if len(words) <= WINDOW:
        return [" ".join(words)]
    step = 1 if len(words) < 10 * WINDOW else WINDOW // 3
    return [" ".join(words[start : start + WINDOW]) for start in range(0, len(words) - WINDOW + step, step)]
