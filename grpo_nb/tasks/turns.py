"""Splits an answer into sentences, and into parts, each of which may replace the answer before it.

A part begins at an entry of CORRECTIONS ("wait", "actually"), wherever it stands, or where a sentence begins with an
entry of REVISIONS ("Edit:", "Upon review", "it should be"). A part that names no answer replaces none: an explanation
that mentions another option, or a check that confirms the answer.
"""

import re

from grpo_nb.tasks.wordings import (
    ABSTENTION,
    CONFIRMING,
    CORRECTIONS,
    DANGLING,
    FRAME,
    REFUSAL,
    REVISIONS,
    folded,
    words_of,
)

_LEAD = r"[^\w.!?;\n]*(?:(?:no|oh|ah|but|so|well|then)\b,? )?"
_CORRECTION = re.compile(words_of(CORRECTIONS).pattern, re.IGNORECASE)
_REVISION = re.compile(rf"(?:^|(?<=[.!?;\n])){_LEAD}{words_of((*CORRECTIONS, *REVISIONS)).pattern}", re.IGNORECASE)

_SENTENCE = re.compile(r"[.!?\n]+(?:\s|$)|[.!?\n]+(?=[@#])")
_ASKED = "\u00bf"
"""Mark at the end of a question, which claims nothing."""


def takes_back(line: str) -> bool:
    """Whether a line begins with words that withdraw the text before it.

    >>> takes_back("**Edit:** it should be C."), takes_back("B is wrong."), takes_back("The edit: C")
    (True, False, False)
    """
    return _REVISION.match(folded(line)) is not None


def parts(text: str, within: bool = False) -> list[str]:
    """The text up to where it is taken back, and each part that takes back what stands before it.

    Args:
        text: an answer; its letter case does not matter.
        within: whether a word of correction counts inside a sentence too.

    >>> parts("A. Upon review, C"), parts("A, wait, C", within=True), parts("A, wait, C")
    (['A.', ' Upon review, C'], ['A, ', 'wait, C'], ['A, wait, C'])
    """
    found = {match.start() for match in _REVISION.finditer(text) if match.start()}
    if within:
        found |= {match.start() for match in _CORRECTION.finditer(text) if match.start()}
    starts = sorted(found)
    return [text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True)]


def standing(text: str) -> str:
    """The last part of a text that does more than confirm the one before it, without the words that begin it.

    >>> standing("Lisbon. Edit: it should be Oslo"), standing("Oslo. Upon review, the answer stands")
    ('Oslo', 'Oslo.')
    """
    first, *later = parts(text)
    said = (without_turn(part) for part in reversed(later))
    return next((part for part in said if not _confirms(part)), first)


def _confirms(part: str) -> bool:
    words = set(re.findall(r"[\w']+", re.sub(r"\b(?:no change|says so)\b", "unchanged", folded(part))))
    return not words or (bool(words & CONFIRMING) and words <= FRAME | CONFIRMING | {"for", "any"})


def without_turn(part: str) -> str:
    """A part without the words that it begins with to take something back; "sorry, I cannot" stays.

    >>> without_turn("Edit: it should be C")
    'C'
    """
    while (match := _REVISION.match(part)) and not _refuses(part):
        part = part[match.end() :].lstrip(" :,\u2014-")
    return part


def sentences(text: str) -> list[str]:
    """Sentences of a text, without questions, refusals to help, and a last one that is cut off."""
    found = [part.strip() for part in _SENTENCE.split(re.sub(r"\?+(?=\s|$)", f"{_ASKED}\n", text))]
    if found and found[-1] and (found[-1].split() or [""])[-1].strip(",;:") in DANGLING:
        found.pop()  # cut off
    return [part for part in found if part and part[-1] != _ASKED and not _refuses(part)]


def _refuses(sentence: str) -> bool:
    """Whether a sentence refuses to help, and states nothing about the text."""
    return REFUSAL.search(sentence) is not None and ABSTENTION.search(REFUSAL.sub(" ", sentence)) is None
