"""A question with its right answer: the forms in which an answer may give it, and where its source shows it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from grpo_nb.tasks.grounding.claims import Token, content, forms, tokenise
from grpo_nb.tasks.grounding.lexicon import PLACE_PAIRS, PLACES, TITLES, UNIT_FORMS
from grpo_nb.tasks.grounding.passages import Passage, passage

Label = Literal["correct", "wrong", "undecided", "absent", "abstained", "invented", "unparsed"]
"""`absent`: the answer does not hold the right one."""


class Verdict(NamedTuple):
    """A label and, where it is not `correct`, why."""

    label: Label
    cause: str = ""


class Slot(NamedTuple):
    """One word of the right answer, and whether an answer must have it."""

    form: str
    needed: bool = True


@dataclass(frozen=True)
class Item:
    """What a short answer is compared with, each text read once."""

    right: str
    hallucinated: str
    question: str
    source: str

    @cached_property
    def gold(self) -> tuple[Token, ...]:
        """The tokens of the right answer that claim something; all of its words where none does (`The Who`)."""
        tokens = tokenise(self.right)
        return tuple(content(tokens) or [token for token in tokens if token.kind != "mark"])

    @cached_property
    def asked(self) -> frozenset[str]:
        """What the question says."""
        return frozenset(token.form for token in tokenise(self.question))

    @cached_property
    def asked_words(self) -> tuple[str, ...]:
        """The question's words in order."""
        return tuple(token.word for token in tokenise(self.question) if token.kind != "mark")

    @cached_property
    def passage(self) -> Passage:
        """The source."""
        return passage(self.source)

    @cached_property
    def essential(self) -> tuple[str, ...]:
        """The forms of the right answer that the question does not give away; all where it gives away all."""
        own = tuple(slot.form for slot in self.shapes[0] if slot.needed)
        return own or tuple(token.form for token in self.gold)

    @cached_property
    def evidence(self) -> frozenset[int]:
        """The sentences of the source that hold the right answer."""
        if self.yes_no:
            return _about_question(self)
        everything = tuple(token.form for token in self.gold)
        places = range(len(self.passage.sentences))
        return self.passage.spoken(everything, places) or self.passage.having(self.essential)

    @cached_property
    def yes_no(self) -> bool:
        """Whether the right answer is a yes or a no."""
        return [token.word for token in tokenise(self.right) if token.kind != "mark"] in (["yes"], ["no"])

    @cached_property
    def subject(self) -> tuple[frozenset[str], frozenset[str]]:
        """The names of the question, and its other words that claim something."""
        asked = content(tokenise(self.question))
        names = frozenset(token.form for token in asked if token.kind == "name")
        return names, frozenset(token.form for token in asked) - names

    @cached_property
    def near(self) -> frozenset[int]:
        """Those sentences, their neighbours, and the sentences that the question is about or that speak on of it."""
        return self.passage.near(self.evidence) | self.passage.thread(_about_question(self))

    @cached_property
    def shapes(self) -> tuple[tuple[Slot, ...], ...]:
        """The forms in which the right answer may be given, the full one first."""
        return tuple(dict.fromkeys(shape for shape in _shapes(self) if any(slot.needed for slot in shape)))

    @cached_property
    def chooses(self) -> bool:
        """Whether the question names the candidates, the right answer among them."""
        return "or" in self.asked_words and {token.form for token in self.gold} <= self.asked

    @cached_property
    def named(self) -> bool:
        """Whether the right answer is a name."""
        return any(token.kind == "name" for token in self.gold) or any(t.form in self.passage.names for t in self.gold)


@lru_cache(maxsize=1024)
def item(right: str, hallucinated: str, question: str, source: str) -> Item:
    """The item of these texts."""
    return Item(right, hallucinated, question, source)


def _about_question(about: Item) -> frozenset[int]:
    """The sentences that hold what a question is about: one of its names, or the most of its words."""
    asked = content(tokenise(about.question))
    names = {token.form for token in asked if token.kind == "name"}
    everything = {token.form for token in asked}
    shared = [len(everything & sentence.holds) for sentence in about.passage.sentences]
    least = max(2, max(shared, default=0) / 2)
    return frozenset(
        place
        for place, sentence in enumerate(about.passage.sentences)
        if shared[place] >= least and (not names or names & sentence.holds)
    ) or frozenset(place for place, count in enumerate(shared) if count and count == max(shared))


def _shapes(about: Item) -> Iterator[tuple[Slot, ...]]:
    quoted = {
        form
        for name in re.findall(r"(?<=\w\s)[\"\u201c(]([^\"\u201d)]+)[\"\u201d)](?=\s\w)", about.right)
        for form in forms(name)
    }
    many = len(about.gold) > 1
    long = any(len(token.word) > 1 for token in about.gold)
    slots = tuple(
        Slot(
            token.form,
            not (
                many
                and (
                    token.form in quoted
                    or token.word in TITLES
                    or (long and len(token.word) == 1 and token.word.isalpha())
                )
            ),
        )
        for token in about.gold
    )
    bare = tuple(Slot(slot.form, slot.needed and slot.form not in about.asked) for slot in slots)
    asks_number = any(token.kind == "number" for token in about.gold) and not about.named
    if any(slot.needed for slot in bare):
        yield bare
    else:
        yield slots
    numbers = [token for token in about.gold if token.kind == "number"]
    years = [token for token in numbers if re.fullmatch(r"\d{4}", token.form)]
    if "year" in about.asked and len(years) == 1 and any(token.form.startswith("month-") for token in numbers):
        yield tuple(Slot(token.form, token in years) for token in about.gold)
    if asks_number and len(about.gold) == 2 and about.gold[1].form in UNIT_FORMS:
        yield (Slot(about.gold[0].form),)
    yield from _places(about)
    yield from _surname(about)
    yield from _surnames(about)
    yield from _short_name(about)


def _places(about: Item) -> Iterator[tuple[Slot, ...]]:
    """`Las Vegas, Nevada` as `Las Vegas`."""
    place, *wider = [part.strip() for part in about.right.strip(" .").split(",")]
    if wider and len(forms(place)) > 1 and not re.search(r"\band\b|&", about.right):
        needed = set(forms(place)) - about.asked
        yield tuple(Slot(token.form, token.form in needed) for token in about.gold)
    elif wider and all(" ".join(forms(part)) in PLACES or _wide_place(part) for part in wider):
        needed = set(forms(place))
        yield tuple(Slot(token.form, token.form in needed) for token in about.gold)


def _wide_place(part: str) -> bool:
    words = part.lower().replace(".", "").split()
    return " ".join(words) in PLACE_PAIRS | PLACES or "".join(words) in PLACES


def _surname(about: Item) -> Iterator[tuple[Slot, ...]]:
    """`Ada Collins` as `Collins`, where the source itself says it so and has no other Collins."""
    names = [token.form for token in about.gold]
    if (
        "," in about.right
        or not 2 <= len(names) <= 3
        or not about.named
        or any(token.kind == "number" for token in about.gold)
    ):
        return
    alone = False
    for sentence in about.passage.sentences:
        for place, form in enumerate(sentence.forms):
            if form == names[-1]:
                before = sentence.forms[place - 1] if place else ""
                if before in about.passage.names and before not in names and before != "the":
                    return
                alone = alone or before not in names
    if about.gold[0].kind == "name" and len(names[0]) > 1:
        yield (Slot(names[0][0]), Slot(names[-1]))
    alone = alone or ("who" in about.asked_words[:1] and about.gold[0].kind == about.gold[-1].kind == "name")
    if alone and names[-1] not in about.asked:
        yield tuple(Slot(name, name == names[-1]) for name in names)


def _surnames(about: Item) -> Iterator[tuple[Slot, ...]]:
    """`Ada Collins and Tom Reed` as `Collins and Reed`, where the question asks who."""
    people = [forms(part) for part in re.split(r",\s*(?:and\b)?|\band\b|&", about.right) if part.strip()]
    plain = all(token.kind == "name" for token in about.gold) and all(2 <= len(names) <= 3 for names in people)
    if len(people) > 1 and plain and about.asked_words[:1] == ("who",):
        yield tuple(Slot(form, place == len(names) - 1) for names in people for place, form in enumerate(names))


def _short_name(about: Item) -> Iterator[tuple[Slot, ...]]:
    """The short name that the source gives in brackets: `World Health Organization (WHO)`."""
    full = re.escape(about.right.strip(" ."))
    if found := re.search(rf"{full}\s*\(([A-Z][A-Z.&]+)\)", about.source):
        yield tuple(Slot(form) for form in forms(found[1]))
