"""Answers that say that the text does not tell, and whether they name something all the same."""

import re

from grpo_nb.tasks.grounding.claims import content, plain, stem, tokenise
from grpo_nb.tasks.grounding.hearing import FRAMING, Heard
from grpo_nb.tasks.grounding.items import Item
from grpo_nb.tasks.grounding.lexicon import CLASSIFIERS, words

_SILENCE = frozenset(
    stem(word)
    for word in words(
        "enough insufficient detail clear unclear unknown possible impossible determine specify find contain include "
        "anywhere explicitly directly clearly available unavailable uncertain sufficient answerable unanswerable "
        "undetermined unspecified unstated mention sorry unable unfortunately reason whether silent nowhere exactly "
        "ask inform context only just merely simply any"
    )
)
_KINDS = frozenset(("1th", *(stem(word) for word in CLASSIFIERS)))
"""What says of which kind something is, or that it came first."""
_ASKING = frozenset(("which", "who", "whose", "what", "where", "when", "why", "how", "whether", "if"))

_SPEAKS = (
    r"(?:mention|stat|giv|sa(?:y|id)|t(?:ell|old)|provid|specif|indicat|know|disclos|nam|describ|includ|list|discuss|"
    r"reveal|cover|address|answer|contain|record|report|clear|information)"
)
_SILENT = re.compile(
    rf"\b(?:not|no|nothing|never|nowhere|without|\w+n't|cannot)\s+(?:\w+\s+){{0,3}}{_SPEAKS}\w*"
    r"|\b(?:text|passage|context|source|article|paragraph)\s+(?:\w+\s+){0,2}(?:no|nothing|not|\w+n't|omits|lacks|silent)\b"
    rf"|\b(?:text|passage|context|source|article|paragraph)\s+only\s+{_SPEAKS}\w*",
    re.IGNORECASE,
)


def tells_nothing(answer: str) -> bool:
    """Whether an answer says, anywhere in its first sentence, that the text does not tell.

    >>> tells_nothing("The name of her husband isn't mentioned in the text."), tells_nothing("No, it is red.")
    (True, False)
    """
    return _SILENT.search(re.split(r"(?<=\w[.!?])\s", plain(answer.strip()))[0]) is not None


def falls_silent(answer: str, about: Item) -> bool:
    """Whether a clause beside the right answer says that the text does not tell: `X, not stated`."""
    if not any(token.kind == "not" for token in tokenise(answer)):
        return False
    heard = Heard(answer, about)
    for number in heard.denied - {heard.segment[place] for place in heard.gold}:
        claims = [place for place, where in enumerate(heard.segment) if where == number and heard.tokens[place].claims]
        if claims and all(heard.tokens[place].form in FRAMING | _SILENCE for place in claims):
            return True
    return False


def names_something(answer: str, about: Item) -> bool:
    """Whether an answer that says that the text does not tell gives an answer all the same."""
    heard = Heard(answer, about)
    asked = {token.form for token in tokenise(about.question)}
    bad = {token.form for token in content(tokenise(about.hallucinated))} - asked - FRAMING - _SILENCE
    for first, last in heard.runs(denied=True):
        run = [form for form in heard.forms(first, last) if form not in _SILENCE | _KINDS or form in bad]
        if not run or (heard.segment[first] in heard.denied and not _outside_denial(heard, first)):
            continue
        if bad & set(run):
            return True
        if _asks_indirectly(heard, first, last):
            continue
        held = [form for form in run if form in about.passage.holds]
        kinds = {heard.tokens[p].kind for p in range(first, last + 1)}
        if len(held) < len(run) or (kinds <= {"name", "number"} and not _clause_of(heard, first)):
            return True
    return False


def _outside_denial(heard: Heard, place: int) -> bool:
    """Whether a word of a clause that denies is not denied: `Lunt, not stated`, `not stated or Lunt`."""
    here = [p for p, number in enumerate(heard.segment) if number == heard.segment[place]]
    negation = next((p for p in here if heard.tokens[p].kind == "not"), place)
    between = range(min(place, negation), max(place, negation))
    apart = heard.part[negation - 1] == "new" or any(heard.part[p] in ("benign", "gold") for p in between)
    return (place < negation and apart) or any(heard.tokens[p].word == "or" for p in between)


def _asks_indirectly(heard: Heard, first: int, last: int) -> bool:
    """Whether a run of common words stands in what is said not to be told: `it is not clear which arena they use`."""
    here = heard.segment[first]
    opens = heard.segment.index(here)
    plain = all(heard.tokens[p].kind == "word" for p in range(first, last + 1))
    return plain and here - 1 in heard.denied and heard.tokens[opens].word in _ASKING


def _clause_of(heard: Heard, place: int) -> bool:
    """Whether other claims stand in the segment of a place: the text's own statement, not a bare name.

    What stands in brackets belongs to what is before them, unless that denies: `the year it was opened (1876)`.
    """
    number = heard.segment[place]
    opened = place > 0 and heard.tokens[place - 1].form == "(" and number - 1 not in heard.denied
    return any(
        heard.segment[p] in (number, number - opened)
        and heard.part[p] in ("new", "asked")
        and heard.tokens[p].kind == "word"
        for p in range(len(heard.tokens))
    )
