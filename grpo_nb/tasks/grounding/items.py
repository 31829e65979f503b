"""A question with its right answer: the forms in which an answer may give it, and where its source shows it."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from grpo_nb.tasks.grounding.claims import Token, content, forms, tokenise
from grpo_nb.tasks.grounding.lexicon import PEOPLES, POLES, TITLES
from grpo_nb.tasks.grounding.passages import Passage, passage
from grpo_nb.tasks.grounding.shapes import Asked, Shape, Slot, gold_of, members, shapes

Label = Literal["correct", "wrong", "undecided", "absent", "abstained", "invented", "unparsed"]
"""`absent`: the answer does not hold the right one."""


class Verdict(NamedTuple):
    """A label and, where it is not `correct`, why."""

    label: Label
    cause: str = ""


@dataclass(frozen=True)
class Item:
    """Item that a short answer is compared with, each text parsed once."""

    right: str
    hallucinated: str
    question: str
    source: str

    @cached_property
    def gold(self) -> tuple[Token, ...]:
        """The tokens of the right answer that claim something; all of its words where none does (`The Who`)."""
        return gold_of(self.right)

    @cached_property
    def asked(self) -> frozenset[str]:
        """Forms of the question."""
        return frozenset(token.form for token in tokenise(self.question))

    @cached_property
    def asked_claims(self) -> frozenset[str]:
        """Forms that the question claims."""
        return frozenset(forms(self.question))

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Kinds that the question asks for, as `colour` in `what colour`; such a word in an answer is no echo."""
        tokens = tokenise(self.question)
        return frozenset(
            other.form for token, other in pairwise(tokens) if token.word in ("what", "which", "whose") and other.claims
        )

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
    def holding(self) -> frozenset[int]:
        """The sentences of the source that hold the right answer."""
        if self.yes_no:
            return _about_question(self)
        everything = tuple(token.form for token in self.gold)
        places = range(len(self.passage.sentences))
        return self.passage.spoken(everything, places, exact=True) or self.passage.having(self.essential)

    @cached_property
    def evidence(self) -> frozenset[int]:
        """Those sentences and those with a short form of a name; else the sentences that the question is about."""
        if self.yes_no or not self.named:
            return self.holding or _about_question(self)
        everywhere = range(len(self.passage.sentences))
        short = [tuple(slot.form for slot in shape if slot.needed) for shape in self.shapes]
        named = frozenset(place for run in short for place in self.passage.spoken(run, everywhere))
        return self.holding | named or _about_question(self)

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
    def names(self) -> frozenset[str]:
        """The names of the question."""
        return self.subject[0]

    @cached_property
    def candidates(self) -> tuple[frozenset[str], ...]:
        """The names of the question, those side by side as one."""
        groups: list[set[str]] = [set()]
        for token in tokenise(self.question):
            if token.kind == "name":
                groups[-1].add(token.form)
            elif groups[-1]:
                groups.append(set())
        return tuple(frozenset(group) for group in groups if group)

    @cached_property
    def compared(self) -> tuple[frozenset[str], ...]:
        """The names of the question that a conjunction or a comparison joins; empty where none are."""
        groups: list[set[str]] = [set()]
        joins: list[set[str]] = [set()]
        for token in tokenise(self.question):
            if token.kind == "name" and token.form not in PEOPLES:
                if groups[-1] and joins[-1]:
                    groups.append(set())
                    joins.append(set())
                groups[-1].add(token.form)
            elif groups[-1]:
                joins[-1].add(token.word or token.form)
        pairs = (place for place in range(len(groups) - 1) if joins[place] & _COMPARING)
        first = next(pairs, None)
        return () if first is None else (frozenset(groups[first]), frozenset(groups[first + 1]))

    @cached_property
    def near(self) -> frozenset[int]:
        """Those sentences, their neighbours, and the sentences that the question is about or that continue about it."""
        return self.passage.near(self.evidence) | self.passage.thread(self.evidence | _about_question(self), loose=True)

    @cached_property
    def against(self) -> Asked:
        """Question and source, which the forms of the right answer depend on."""
        return Asked(self.asked, self.asked_words, self.passage, self.source)

    @cached_property
    def lines(self) -> tuple[tuple[str, ...], ...]:
        """Claims of the right answer and of each sentence near it, in order."""
        return (tuple(t.form for t in self.gold), *(self.passage.sentences[place].forms for place in self.near))

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The forms in which the right answer may be given, the full one first."""
        found = shapes(self.right, self.against)
        if not self.chooses or len(self.compared) < 2:
            return found
        gold = {token.form for token in self.gold}
        other = frozenset().union(*(group for group in self.compared if not gold & self.names <= group))
        own = gold & self.names - other
        return (*found, tuple(Slot(token.form, token.form in own) for token in self.gold)) if own else found

    @cached_property
    def members(self) -> tuple[tuple[Shape, ...], ...]:
        """Shapes of each member of a right answer that lists several."""
        return tuple(shapes(part, self.against) for part in members(self.right))

    @cached_property
    def others(self) -> frozenset[str]:
        """Forms that only the hallucinated text claims."""
        return frozenset(forms(self.hallucinated)) - {token.form for token in self.gold} - self.asked

    @cached_property
    def chooses(self) -> bool:
        """Whether the question names the candidates, the right answer among them."""
        own = {token.form for token in self.gold if token.word not in TITLES} or {token.form for token in self.gold}
        picks = ("which", "one") in pairwise(self.asked_words) or any(
            POLES.get(word, (None, 0))[0] in _GRADES for word in self.asked_words
        )
        compares = "or" in self.asked_words or (self.compared and picks)
        one = len(self.compared) > 1 and sum(bool(group & own) for group in self.compared) == 1
        return bool(compares) and (own <= self.asked or one) and not self.yes_no

    @cached_property
    def named(self) -> bool:
        """Whether the right answer is a name."""
        return any(token.kind == "name" for token in self.gold) or any(t.form in self.passage.names for t in self.gold)


_GRADES = frozenset(POLES[word][0] for word in ("older", "more", "faster", "closer"))
"""Scales on which two things are compared."""
_COMPARING = frozenset(("and", "or", "than", "before", "after", "with"))


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
