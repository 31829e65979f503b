"""The forms in which an answer may give a right one: without titles and classes, by surname, by year, by short name."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from grpo_nb.tasks.grounding.claims import Token, content, forms, tokenise
from grpo_nb.tasks.grounding.lexicon import CLASSES, COLLECTIVES, PARTICLES, PLACE_PAIRS, PLACES, TITLES, UNIT_FORMS
from grpo_nb.tasks.grounding.passages import Passage
from grpo_nb.tasks.grounding.thesaurus import is_word


class Slot(NamedTuple):
    """One word of a right answer, whether an answer must have it, and whether another word may stand for it."""

    form: str
    needed: bool = True
    common: bool = False


class Asked(NamedTuple):
    """What a right answer stands against: the question's forms and words, and the source."""

    forms: frozenset[str]
    words: tuple[str, ...]
    passage: Passage
    source: str


Shape = tuple[Slot, ...]


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
    yield bare if any(slot.needed for slot in bare) else slots
    numbers = [token for token in gold if token.kind == "number"]
    years = [token for token in numbers if re.fullmatch(r"\d{4}", token.form)]
    if "year" in asked.forms and len(years) == 1 and any(token.form.startswith("month-") for token in numbers):
        yield tuple(Slot(token.form, token in years) for token in gold)
    if len(gold) == 2 and gold[0].kind == "number" and gold[1].form in UNIT_FORMS:
        yield (Slot(gold[0].form),)
    yield from places_of(right, asked)
    yield from _without_class(gold, asked)
    yield from _surname(right, gold, asked)
    yield from _head(right, gold, asked)
    yield from _whole(right, gold)
    yield from _short_name(right, asked)


def _spare(right: str, gold: Sequence[Token]) -> set[str]:
    """What an answer may leave out: titles, initials, and a name in quotation marks or brackets inside another."""
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
    named = all(token.kind == "name" for token in gold)
    if 0 < len(own) < len(gold) <= 3 and named and all(_only(token.form, gold, asked.passage) for token in own):
        chosen = {token.form for token in gold} <= asked.forms
        yield tuple(Slot(t.form, t in own and (chosen or t.form not in asked.forms)) for t in gold)


def _only(form: str, gold: Sequence[Token], passage: Passage) -> bool:
    """Whether the source has a form of a name nowhere beside a name that the right answer lacks."""
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
    """`Ada Collins` as `Collins` or `A. Collins`, where the source has no other Collins."""
    names = [token for token in tokenise(right) if token.kind != "mark"]
    first, last = names[0], names[-1]
    person = all(token.kind == "name" or token.word in PARTICLES or len(token.word) == 1 for token in names)
    titled = any(token.word in TITLES for token in names)
    if "," in right or not 2 <= len(names) <= 5 or not person or last.word in CLASSES:
        return
    if len(gold) < 2 or any(token.kind == "number" for token in gold):
        return
    given = {token.form for token in names}
    before = {
        sentence.forms[place - 1]
        for sentence in asked.passage.sentences
        for place, form in enumerate(sentence.forms)
        if form == last.form and place
    }
    if before & asked.passage.names - given:
        return
    if len(first.form) > 1:
        yield (Slot(first.form[0]), *(Slot(t.form, False) for t in gold[1:-1]), Slot(last.form))
    alone = bool(before - given) or titled or bool({"who", "whom", "whose"} & set(asked.words))
    chosen = {token.form for token in gold} <= asked.forms
    if (alone or chosen or _acts(names, asked) or not is_word(first.word)) and (chosen or last.form not in asked.forms):
        yield tuple(Slot(token.form, token.form == last.form) for token in gold)


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


def _whole(right: str, gold: Sequence[Token]) -> Iterator[Shape]:
    """`scenes from the harvest` as `the harvest`, `the forces of Ober` as `Ober`."""
    tokens = [token for token in tokenise(right) if token.word not in ("a", "an", "the")]
    if len(gold) > 1 and tokens[0].word in COLLECTIVES and tokens[1].word in ("of", "from"):
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
