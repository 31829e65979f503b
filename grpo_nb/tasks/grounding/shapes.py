"""The forms in which an answer may give a right one: without titles and classes, by surname, by year, by short name."""

import re
from collections.abc import Iterator, Sequence, Set
from difflib import SequenceMatcher
from typing import NamedTuple

from grpo_nb.tasks.grounding.claims import Token, content, forms, tokenise
from grpo_nb.tasks.grounding.lexicon import (
    CLASSES,
    CLASSIFIERS,
    COLLECTIVES,
    MONTHS,
    PARTICLES,
    PLACE_PAIRS,
    PLACES,
    TITLES,
    UNIT_FORMS,
)
from grpo_nb.tasks.grounding.passages import Passage, within
from grpo_nb.tasks.grounding.thesaurus import is_word


class Slot(NamedTuple):
    """One word of a right answer, whether an answer must have it, and whether another word may stand for it."""

    form: str
    needed: bool = True
    common: bool = False


class Asked(NamedTuple):
    """Question and source of a right answer: the question's forms and words, and the source."""

    forms: frozenset[str]
    words: tuple[str, ...]
    passage: Passage
    source: str


Shape = tuple[Slot, ...]


_NAMING = frozenset(
    ("name", "named", "real", "birth", "alias", "stage", "full", "original", "known", "called", "nickname")
)
"""Words of a question that asks for a name by its kind."""
_KNOWN = (
    r"(?:known (?:\w+ ){0,3}(?:as|by)[a-z ]*|nicknamed|abbreviated|born(?! [A-Z][a-z]+ \d)|n\u00e9e|formerly)"
    r"[ \"\u201c]+"
)
_DIMENSIONS = frozenset(("long", "high", "tall", "wide", "deep", "old", "heavy", "away"))


def gold_of(text: str) -> tuple[Token, ...]:
    """The tokens of a right answer that claim something; all of its words where none does (`The Who`)."""
    tokens = tokenise(text)
    return tuple(content(tokens) or [token for token in tokens if token.kind != "mark"])


def members(right: str) -> list[str]:
    """The parts of a right answer that lists several: `Arland and Vostria`; one part where it lists none.

    >>> members("Egypt, Libya and Tunisia"), members("Salt Lake City, Utah")
    (['Egypt', 'Libya', 'Tunisia'], ['Salt Lake City, Utah'])
    """
    parts = [part.strip(" .") for part in re.split(r",\s*(?:and\b)?|\band\b|&", right)]
    parts = [part for part in parts if part]
    listed = len(parts) > 1 and re.search(r"\band\b|&", right) and all(forms(part) for part in parts)
    return parts if listed else [right]


def shapes(right: str, asked: Asked) -> tuple[Shape, ...]:
    """The forms in which a right answer may be given, the full one first."""
    return tuple(dict.fromkeys(shape for shape in _shapes(right, asked) if any(slot.needed for slot in shape)))


def places_of(right: str, asked: Asked) -> Iterator[Shape]:
    """`Las Vegas, Nevada` as `Las Vegas`."""
    gold = gold_of(right)
    place, *wider = [part.strip() for part in right.strip(" .").split(",")]
    if not wider or re.search(r"\band\b|&", right):
        return
    if len(forms(place)) > 1 or all(" ".join(forms(part)) in PLACES or _wide_place(part) for part in wider):
        needed = set(forms(place)) - (asked.forms if len(forms(place)) > 1 else frozenset())
        yield tuple(Slot(token.form, token.form in needed) for token in gold)


def _shapes(right: str, asked: Asked) -> Iterator[Shape]:
    gold = gold_of(right)
    spare = _spare(right, gold)
    slots = tuple(Slot(token.form, token.form not in spare, token.kind == "word") for token in gold)
    bare = tuple(slot._replace(needed=slot.needed and slot.form not in asked.forms) for slot in slots)
    yield bare if any(slot.needed for slot in bare) and not _shared(bare, asked) else slots
    numbers = [token for token in gold if token.kind == "number"]
    years = [token for token in numbers if re.fullmatch(r"\d{4}", token.form)]
    if "year" in asked.forms and len(years) == 1 and any(token.form.startswith("month-") for token in numbers):
        yield tuple(Slot(token.form, token in years) for token in gold)
    if len(gold) == 3 and gold[1].form in UNIT_FORMS and gold[2].word in _DIMENSIONS:
        yield tuple(Slot(token.form, token is not gold[2]) for token in gold)
    if len(gold) > 1 and gold[0].kind == "number" and {token.form for token in gold[1:]} <= {"year", "old", "age"}:
        yield (Slot(gold[0].form),)
    if len(gold) == 2 and gold[0].kind == "number" and gold[1].form in UNIT_FORMS:
        yield (Slot(gold[0].form),)
    yield from places_of(right, asked)
    yield from _without_class(gold, asked)
    if all(token.kind == "name" for token in gold) and not re.search(r",|\band\b|&", right):
        yield from _longer(gold, asked)
    if all(token.kind in ("name", "number") for token in gold) and any(token.kind == "name" for token in gold):
        yield from _aliases(right, asked)
    yield from _surname(right, gold, asked)
    yield from _head(right, gold, asked)
    yield from _initials(gold)
    yield from _whole(right, gold)
    yield from _described(right, gold)
    yield from _short_name(right, asked)


def _shared(shape: Shape, asked: Asked) -> bool:
    """Whether the needed part of a name is in another name of the source, too: `Jardine` of two companies."""
    needed, own = {slot.form for slot in shape if slot.needed}, {slot.form for slot in shape}
    return not any(slot.common for slot in shape) and any(
        needed <= set(unit) and not own <= set(unit) and not set(unit) <= own for unit in asked.passage.units
    )


def _longer(gold: Sequence[Token], asked: Asked) -> Iterator[Shape]:
    """A name as the source has it elsewhere, with more words inside, or fewer: `John Charles Layfield`."""
    own = tuple(token.form for token in gold)
    for unit in asked.passage.units:
        if len(own) > 1 and unit != own and within(own, unit):
            yield tuple(Slot(form, form in own) for form in unit)
        elif len(own) > 2 and unit[0] == own[0] and within(unit, own):
            yield tuple(Slot(form, form in unit) for form in own)


def _initials(gold: Sequence[Token]) -> Iterator[Shape]:
    """`World Health Organization` as `WHO`, `Tyndall Air Force Base` as `Tyndall AFB`, `NBC 10` as `NBC10`."""
    if len(gold) == 2 and gold[1].kind == "number" and gold[0].kind == "name":
        yield (Slot("".join(token.form for token in gold)),)
    others = [place for place, token in enumerate(gold) if token.kind != "name"]
    names = gold[others[-1] + 1 if others else 0 :]
    for first in range(len(names) - 1):
        for end in range(first + 2, len(names) + 1):
            letters = "".join(t.word if re.fullmatch("[ivx]+", t.word) else t.word[0] for t in names[first:end])
            around = (*names[:first], Token(letters, "name", letters), *names[end:])
            yield tuple(Slot(token.form) for token in around)


def _aliases(right: str, asked: Asked) -> Iterator[Shape]:
    """Other names in the source: `X, better known as Y`, `X (born Y)`; not where the question asks for names."""
    if _NAMING & set(asked.words):
        return
    full = re.escape(right.strip(" ."))
    for found in re.finditer(rf"{full}\b[^.;]{{0,80}}?\b{_KNOWN}([A-Z][\w-]*(?: [A-Z\d][\w-]*)*)", asked.source):
        names = forms(found[1])
        if (
            set(names) - set(forms(right))
            and not any(form.startswith("month-") or form in asked.forms for form in names)
            and found[1].lower() not in MONTHS
        ):
            yield tuple(Slot(form) for form in names)


def _spare(right: str, gold: Sequence[Token]) -> set[str]:
    """Words that an answer may omit: titles, initials, and a name in quotation marks or brackets inside another."""
    if len(gold) < 2:
        return set()
    quoted = re.findall(r"(?<=\w\s)[\"\u201c(]([^\"\u201d)]+)[\"\u201d)](?=\s\w)", right)
    spelt = any(len(token.word) > 1 for token in gold)
    return {form for name in quoted for form in forms(name)} | {
        token.form
        for token in gold
        if token.word in TITLES or (spelt and len(token.word) == 1 and token.word.isalpha())
    }


def _without_class(gold: Sequence[Token], asked: Asked) -> Iterator[Shape]:
    """`Mount Ober` as `Ober`, where no other name of the source has that word."""
    own = [token for token in gold if token.word not in CLASSES]
    if len(own) == len(gold) and not {"who", "whom", "whose"} & set(asked.words):
        own = [token for token in gold if not is_word(token.word)]
    named = all(token.kind == "name" or token.word in CLASSIFIERS for token in gold)
    if 0 < len(own) < len(gold) <= 3 and named and all(_only(token.form, gold, asked.passage) for token in own):
        chosen = {token.form for token in gold} <= asked.forms
        yield tuple(Slot(t.form, t in own and (chosen or t.form not in asked.forms)) for t in gold)


def _only(form: str, gold: Sequence[Token], passage: Passage) -> bool:
    """Whether the source has a form of a name nowhere next to a name that the right answer lacks."""
    known = {token.form for token in gold}
    for sentence in passage.sentences:
        for place, token in enumerate(sentence.tokens):
            if token.form != form:
                continue
            beside = [sentence.tokens[p] for p in (place - 1, place + 1) if 0 <= p < len(sentence.tokens)]
            if any(other.kind == "name" and other.form not in known and not other.owns for other in beside):
                return False
    return True


def _surname(right: str, gold: Sequence[Token], asked: Asked) -> Iterator[Shape]:
    """`Ada Mary Collins` as `Ada Collins`, `Mary Collins`, `A. Collins`, and `Collins` where the source has no other.

    The source's own short name counts, too: `Don Henley` for `Donald Hugh Henley`.
    """
    names = [token for token in tokenise(right) if token.kind != "mark"]
    first, last = names[0], names[-1]
    person = all(token.kind == "name" or token.word in PARTICLES or len(token.word) == 1 for token in names)
    titled = any(token.word in TITLES for token in names)
    if "," in right or not 2 <= len(names) <= 5 or not person or last.word in CLASSES:
        return
    if len(gold) < 2 or any(token.kind == "number" for token in gold) or last.form in asked.passage.lower:
        return
    given = {token.form for token in names[:-1]}
    same = {tuple(slot.form for slot in shape) for shape in _aliases(right, asked)}
    bearers = [unit[:-1] for unit in asked.passage.units - same if unit[-1] == last.form]
    for form in sorted(given - asked.forms if len(given) > 1 else ()):
        yield tuple(Slot(token.form, token.form in (form, last.form)) for token in gold)
    for unit in bearers:
        if all(any(_short(form, whole) for whole in given) for form in unit):
            yield (*(Slot(form) for form in unit), Slot(last.form))
    if not all(any(_respelt(form, whole) for form in unit for whole in given) for unit in bearers):
        return
    if len(first.form) > 1:
        yield (Slot(first.form[0]), *(Slot(t.form, False) for t in gold[1:-1]), Slot(last.form))
    alone = _alone(last.form, given, asked) or titled or bool({"who", "whom", "whose"} & set(asked.words))
    chosen = {token.form for token in gold if token.word not in TITLES} <= asked.forms
    if (alone or chosen or _acts(names, asked) or not is_word(first.word)) and (chosen or last.form not in asked.forms):
        yield tuple(Slot(token.form, token.form == last.form) for token in gold)


def _alone(form: str, given: Set[str], asked: Asked) -> bool:
    """Whether the source has a surname without the given name before it."""
    return any(
        here == form and place and sentence.forms[place - 1] not in given | {form}
        for sentence in asked.passage.sentences
        for place, here in enumerate(sentence.forms)
    )


def _short(form: str, whole: str) -> bool:
    """Whether a given name is another one, or its beginning: `Don` of `Donald`."""
    return form == whole or (len(form) > 2 and whole.startswith(form))


def _respelt(form: str, whole: str) -> bool:
    """Whether a given name is another one in short, or in another spelling: `Frederick` of `Frideric`."""
    alike = min(len(form), len(whole)) > 5 and SequenceMatcher(None, form, whole, False).ratio() > 0.6
    return _short(form, whole) or _short(whole, form) or alike or form == whole[:1]


def _head(right: str, gold: Sequence[Token], asked: Asked) -> Iterator[Shape]:
    """`freshwater crabs` as `crabs`, where the source has no others."""
    spoken = [token for token in tokenise(right) if token.word not in ("a", "an", "the")]
    compound = len(spoken) == len(gold) and all(token.kind == "word" for token in gold)
    if not compound or not 2 <= len(gold) <= 3 or gold[-1].form in asked.forms:
        return
    before = [
        sentence.forms[place - 1] if place else ""
        for sentence in asked.passage.sentences
        for place, form in enumerate(sentence.forms)
        if form == gold[-1].form
    ]
    if before and all(form == gold[-2].form for form in before):
        yield tuple(Slot(token.form, token is gold[-1], True) for token in gold)


def _described(right: str, gold: Sequence[Token]) -> Iterator[Shape]:
    """`the alternative rock band Gorillaz` as `Gorillaz`: a name with what it is before it."""
    first = next((place for place, token in enumerate(gold) if token.kind == "name"), 0)
    named = all(token.kind == "name" for token in gold[first:])
    described = all(token.kind == "word" for token in gold[:first])
    if first and named and described and not re.search(r",|\b(?:and|of|in|for|to)\b|&", right):
        yield tuple(Slot(token.form, place >= first, token.kind == "word") for place, token in enumerate(gold))


def _whole(right: str, gold: Sequence[Token]) -> Iterator[Shape]:
    """`scenes from the harvest` as `the harvest`, `the forces of Ober` as `Ober`."""
    tokens = [token for token in tokenise(right) if token.word not in ("a", "an", "the")]
    if len(gold) > 1 and tokens[0].word in COLLECTIVES and tokens[1].word in ("of", "from", "on"):
        yield tuple(Slot(token.form, place > 0, token.kind == "word") for place, token in enumerate(gold))


def _acts(names: Sequence[Token], asked: Asked) -> bool:
    """Whether the source treats a name as a person's: `Ada Collins is a Welsh engineer`, `(born 3 May 1950)`."""
    for sentence in asked.passage.sentences:
        for place, token in enumerate(sentence.tokens[:-2]):
            following = [t.word for t in sentence.tokens[place + 1 : place + 4]]
            if token.form == names[-1].form and ("born" in following or sentence.tokens[place + 1].form == "("):
                return True
    return False


def _short_name(right: str, asked: Asked) -> Iterator[Shape]:
    """The short name that the source gives in brackets: `World Health Organization (WHO)`."""
    full = re.escape(right.strip(" ."))
    if found := re.search(rf"{full}\s*\(([A-Z][A-Z.&]+)\)", asked.source):
        yield tuple(Slot(form) for form in forms(found[1]))


def _wide_place(part: str) -> bool:
    words = part.lower().replace(".", "").split()
    return " ".join(words) in PLACE_PAIRS | PLACES or "".join(words) in PLACES
