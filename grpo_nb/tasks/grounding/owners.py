"""Assigns facts to one of the two things that a question names, in an answer and in its source."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from grpo_nb.tasks.grounding.claims import Token
from grpo_nb.tasks.grounding.hearing import Heard
from grpo_nb.tasks.grounding.items import Item

_TURNS = frozenset(("for", "against", "vs", "by", "to", "is", "was"))
"""Words after a fact whose owner follows: `1988 for the Tofte Bridge`."""
_FIGURE = re.compile(r"\d{3,}(?:\.\d+)?")
"""A number that belongs to one thing; small numbers occur with many."""
_BECAUSE = frozenset(("because", "since", "as", "who", "which"))
_SHARED = frozenset(("both", "common", "share", "shared", "same", "alike", "similar"))
_PRONOUNS = frozenset(("he", "she", "it"))
_ALL = frozenset(("both", "they", "each", "neither"))


def of_the_other(heard: Heard) -> str:
    """Whether a fact about one thing is one that the source only has about the other.

    A name or a number is a fact by itself; of common words it takes two in a clause.
    """
    about = heard.item
    shared = about.compared and _SHARED & set(about.asked_words)
    if not (about.yes_no or about.chooses or shared) or len((things := _things(about)).groups) < 2:
        return ""
    for number in sorted(set(heard.segment) - heard.denied):
        part = [p for p, where in enumerate(heard.segment) if where == number]
        tokens, turned = [heard.tokens[p] for p in part], []
        for place, token in enumerate(tokens):
            fact = token.kind == "name" or _FIGURE.fullmatch(token.form) is not None
            if not (fact or heard.part[part[place]] == "new") or things.of(token) is not None:
                continue
            owner, told = things.owner(tokens, place), things.told_of(token.form, about)
            refers = tokens[0].word in _BECAUSE or any(t.word in _PRONOUNS for t in tokens[:place])
            if owner is None and refers and not things.among(tokens[:place]):
                owner = _antecedent(heard, things, part[0])
            if owner is not None and told and owner not in told:
                turned += [token.word] * (1 + fact)
        if len(turned) > 1:
            return f"'{turned[0]}' is said in the source of the other one"
    return ""


def _antecedent(heard: Heard, things: "_Things", place: int) -> int | None:
    """The thing that a clause without one is about: before `who` the last one, else the first of the last sentence."""
    if heard.tokens[place].word in ("who", "which"):
        return next(iter(things.among(heard.tokens[:place])[::-1]), None)
    while place > 0:
        sentence = heard.sentence(place - 1)
        tokens = heard.tokens[sentence.start : place]
        if named := things.among(tokens):
            return named[0]
        place = sentence.start - 1
    return None


def belongs(heard: Heard, place: int) -> bool:
    """Whether a fact is stated about the same one of two things as in the source."""
    things = _things(heard.item)
    if len(things.groups) < 2:
        return False
    part = heard.sentence(place)
    line = [heard.tokens[p] for p in part]
    owner = things.owner(line, part.index(place))
    clause = [token for token, where in zip(heard.tokens, heard.segment, strict=True) if where == heard.segment[place]]
    compares = heard.item.chooses and sum(token.kind == "number" for token in clause) > 1
    if compares and not things.among(clause):  # `as 1908 is earlier than 1971`
        return bool(things.told_of(heard.tokens[place].form, heard.item))
    return owner is not None and owner in things.told_of(heard.tokens[place].form, heard.item)


@dataclass(frozen=True)
class _Things:
    """Two things: of each the words that it alone has, and all words that the source writes as names."""

    groups: tuple[frozenset[str], ...]
    names: frozenset[str]

    def of(self, token: Token) -> int | None:
        """Index of the thing, of two, that a token names; None for neither."""
        if token.kind == "word" and token.form in self.names:
            return None
        return next((number for number, group in enumerate(self.groups) if token.form in group), None)

    def among(self, tokens: Sequence[Token]) -> list[int]:
        """Things that are named, of the two, in order; among adjacent words the first decides."""
        found = [None if self._within(tokens, place) else self.of(token) for place, token in enumerate(tokens)]
        return [
            n
            for place, n in enumerate(found)
            if n is not None and {None} == set(found[max(0, place - 2) : place]) | {None}
        ]

    def _within(self, tokens: Sequence[Token], place: int) -> bool:
        """Whether a word of one thing stands alone next to another name: `Lower Manhattan`."""
        first, last = place, place
        while first and tokens[first - 1].kind == "name":
            first -= 1
        while last + 1 < len(tokens) and tokens[last + 1].kind == "name":
            last += 1
        known = [token for token in tokens[first : last + 1] if self.of(token) is not None]
        return tokens[place].kind == "name" and last > first and len(known) == 1

    def owner(self, tokens: Sequence[Token], place: int) -> int | None:
        """The thing that a token is about: the last one named before it, else the only one, else none."""
        if any(token.word in _ALL for token in tokens):
            return None
        ahead = [token for token in tokens[place + 1 : place + 5] if token.word not in ("the", "a", "an")]
        if len(ahead) > 1 and ahead[0].word in _TURNS and (following := self.among(ahead[1:3])):
            return following[0]
        if before := self.among(tokens[:place]):
            return None if self._joined(tokens[:place]) else before[-1]
        if any(token.word in _PRONOUNS for token in tokens[:place]):
            return None
        behind = set(self.among(tokens[place + 1 :]))
        return behind.pop() if len(behind) == 1 else None

    def told_of(self, form: str, about: Item) -> set[int]:
        """Things that the source states a form about; empty if one of its sentences does not show it."""
        found = set()
        for number, sentence in enumerate(about.passage.sentences):
            for place, token in enumerate(sentence.tokens):
                if token.form != form:
                    continue
                owner = self.owner(sentence.tokens, place)
                if owner is None and number and sentence.continues:
                    before = set(self.among(about.passage.sentences[number - 1].tokens))
                    owner = before.pop() if len(before) == 1 else None
                if owner is None:
                    return set()
                found.add(owner)
        return found

    def _joined(self, tokens: Sequence[Token]) -> bool:
        """Whether the last two names before a fact share it: `Ada and Tom were born in 1950`."""
        named = [place for place, token in enumerate(tokens) if self.of(token) is not None]
        for one, other in pairwise(named):
            between = tokens[one + 1 : other]
            joins = any(token.word == "and" for token in between) and not any(token.claims for token in between)
            if joins and self.of(tokens[one]) != self.of(tokens[other]) == self.of(tokens[named[-1]]):
                return True
        return False


def _things(about: Item) -> _Things:
    """The two things that the question compares: `A and B`, `A before B`."""
    names = about.compared
    shared = {form for place, group in enumerate(names) for other in names[place + 1 :] for form in group & other}
    return _Things(tuple(group - shared for group in names if group - shared), about.passage.names)
