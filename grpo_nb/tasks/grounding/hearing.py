"""An answer as it is heard: which part each of its tokens plays, in which clause, and what is denied."""

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from grpo_nb.tasks.grounding.claims import Token, content, related, stem, tokenise
from grpo_nb.tasks.grounding.framing import said
from grpo_nb.tasks.grounding.items import Item, Slot, _places
from grpo_nb.tasks.grounding.lexicon import BENIGN, VARIABLE, words

LONG = 5
"""Words of its own from which on a right answer may be given in another order."""
MOST = 0.7
"""The share of them that must be there."""
JOINS = frozenset(("and", "or", ",", ";", "&", "+", "/", " - ", "-", "(", ")", "|", "plus", ":", "\\"))

_BREAKS = frozenset((",", ";", ":", ".", "!", "?", "(", ")", "/", "+", " - ", "|"))

_BREAKING = frozenset(
    words("but while whereas although though because since who which that rather instead unlike where")
)

LINKS = frozenset(
    words(
        "of in from at on by with for to near during since between under about before after over above below until "
        "against among into onto as than"
    )
)
ARTICLES = frozenset(words("a an the his her its their this that"))

FRAMING = frozenset(stem(word) for word in BENIGN)

_BEING = frozenset(words("was were is are be been being"))
_AUXILIARIES = _BEING | frozenset(words("had has have did to could would"))
_HONORIFICS = frozenset(words("mr mrs ms miss dr prof professor"))


class Heard:
    """An answer against its item: the part that each token plays, and the segments that tokens stand in."""

    def __init__(self, answer: str, about: Item) -> None:
        self.item = about
        self.tokens = _unlisted(_declared(tokenise(said(answer, about.question))), about)
        self.segment = _segments(self.tokens)
        self.denied = _denied(self.tokens, self.segment)
        self.gold = _found(self.tokens, about)
        scattered = set() if self.gold else _scattered(self.tokens, about)
        self.scattered = bool(scattered)
        """Whether it gives the words of a long right answer in another order."""
        self.gold |= scattered
        self.part = [self._part(place) for place in range(len(self.tokens))]

    def _part(self, place: int) -> str:
        token = self.tokens[place]
        if place in self.gold:
            return "gold"
        if not token.claims:
            return token.kind
        superlative = len(token.word) > 5 and token.word.endswith("est")
        if token.form in self.item.asked or any(
            not superlative and related(token.form, form) for form in self.item.asked if len(form) > 4
        ):
            return "asked"
        if (
            token.word in _HONORIFICS
            or (token.form == "2" and (self.item.chooses or self.item.yes_no))
            or (token.form in FRAMING and token.kind != "name")
            or self._points(place)
        ):
            return "benign"
        return "new"

    def _points(self, place: int) -> bool:
        """Whether a rank stands for one of the two things that a question names: `the first and the second`."""
        following = self.tokens[place + 1] if place + 1 < len(self.tokens) else None
        alone = following is None or not following.claims or following.form in self.item.asked
        two = self.item.chooses or self.item.yes_no
        return two and self.tokens[place].form in ("1th", "2th", "former", "latter") and alone

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """First and last place of each stretch of the right answer."""
        places = sorted(self.gold)
        found: list[tuple[int, int]] = []
        for place in places:
            between = self.part[found[-1][1] + 1 : place] if found else []
            if found and all(part in ("small", "mark") for part in between) and place - found[-1][1] <= 3:
                found[-1] = (found[-1][0], place)
            else:
                found.append((place, place))
        return found

    def runs(self, denied: bool = False) -> Iterator[tuple[int, int]]:
        """First and last place of each stretch of new claims that is asserted, with `denied` of the others too."""
        first = None
        for place in range(len(self.tokens) + 1):
            new = (
                place < len(self.tokens)
                and self.part[place] == "new"
                and (denied or self.segment[place] not in self.denied)
            )
            if first is not None and not (new and self._class(place) == self._class(first)):
                yield first, place - 1
                first = None
            if new and first is None:
                first = place

    def _class(self, place: int) -> str:
        return "name" if self.tokens[place].form in self.item.passage.names else self.tokens[place].kind

    def between(self, first: int, last: int) -> list[str]:
        """The words and marks strictly between two places."""
        return [token.word or token.form for token in self.tokens[first + 1 : last]]

    def forms(self, first: int, last: int) -> list[str]:
        """The claims from one place to another."""
        return [token.form for token in self.tokens[first : last + 1] if token.claims]


def _found(tokens: Sequence[Token], about: Item) -> set[int]:
    """The places of the right answer in an answer, in the first of its shapes that is there."""
    gold_forms = {token.form for token in about.gold}
    claims = [
        place
        for place, token in enumerate(tokens)
        if token.claims or (token.form in gold_forms and token.kind == "small" and not content(about.gold))
    ]
    for shape in about.shapes:
        if found := _aligned(tokens, claims, shape):
            return _widened(tokens, found, about)
    bare = _unbracketed(tokens, claims)
    if len(bare) < len(claims) and (found := _aligned(tokens, bare, about.shapes[0])):
        return found
    return _parts(tokens, claims, about)


def _unbracketed(tokens: Sequence[Token], claims: Sequence[int]) -> list[int]:
    depth, kept = 0, []
    for place, token in enumerate(tokens):
        depth += (token.form == "(") - (token.form == ")" and depth > 0)
        kept += [] if depth else [place]
    return [place for place in claims if place in set(kept)]


def _scattered(tokens: Sequence[Token], about: Item) -> set[int]:
    """The words of a long right answer in one sentence: most of them, in an order that is mostly its own.

    A name or a number among them must be there; a verb keeps what stands before it and what behind it.
    """
    wanted = [token for token in about.gold if token.form not in about.asked]
    order = list(dict.fromkeys(token.form for token in wanted))
    if len(order) < LONG or re.search(r",|;", about.right):
        return set()
    found = [(place, token.form) for place, token in enumerate(tokens) if token.claims and token.form in order]
    held = {form for _, form in found}
    ranks = [order.index(form) for _, form in found]
    steps = [one < other for one, other in pairwise(ranks) if one != other]
    if len(held) < MOST * len(order) or not steps or sum(steps) < len(steps) / 2:
        return set()
    return set() if _turned(tokens, found, order, _finite(about)) else {place for place, _ in found}


def _finite(about: Item) -> set[str]:
    """The verbs of a right answer that have a subject: `made`, `had cut`."""
    tokens = [token for token in tokenise(about.right) if token.kind != "mark"]
    return {
        token.form
        for place, token in enumerate(tokens)
        if token.kind == "word"
        and (
            token.word.endswith("ed")
            or (token.word in VARIABLE and token.word != token.form)
            or (place and tokens[place - 1].word in _AUXILIARIES)
        )
    }


def _turned(
    tokens: Sequence[Token], found: Sequence[tuple[int, str]], order: Sequence[str], verbs: Collection[str]
) -> bool:
    """Whether a verb that is not passive has before it what the right answer has behind it."""
    for (_, one), (place, verb) in pairwise(found):
        passive = {token.word for token in tokens[max(0, place - 2) : place]} & _BEING
        if verb in verbs and not passive and order.index(one) > order.index(verb):
            return True
    return False


def _widened(tokens: Sequence[Token], found: set[int], about: Item) -> set[int]:
    """The places with small words of the right answer's end: `Doctor Who`."""
    ends = [token.word for token in tokenise(about.right) if token.kind != "mark"]
    small = {token.word for token in tokenise(about.right)[-2:] if token.kind in ("small", "not")}
    if ends and ends[-1] in small:
        return found | {place + 1 for place in found if place + 1 < len(tokens) and tokens[place + 1].word == ends[-1]}
    return found


def _aligned(tokens: Sequence[Token], claims: Sequence[int], shape: Sequence[Slot]) -> set[int]:
    found: set[int] = set()
    for start in range(len(claims)):
        if matched := _at(tokens, claims[start:], shape):
            found |= matched
    return found


def _at(tokens: Sequence[Token], claims: Sequence[int], shape: Sequence[Slot]) -> set[int]:
    matched, next_claim = set(), 0
    for slot in shape:
        if next_claim < len(claims) and tokens[claims[next_claim]].form == slot.form:
            matched.add(claims[next_claim])
            next_claim += 1
        elif slot.needed:
            return set()
    needed = [slot.form for slot in shape if slot.needed]
    held = [tokens[place].form for place in matched]
    return matched if all(form in held for form in needed) else set()


def _parts(tokens: Sequence[Token], claims: Sequence[int], about: Item) -> set[int]:
    """`Stanley Brightwell and his wife Maud` as `Stanley and Maud Brightwell`: all of a list's names, side by side."""
    names = {token.form for token in about.gold if token.kind in ("name", "number")} - (
        about.asked if not about.chooses else frozenset()
    )
    if len(names) < 2 or not re.search(r",|\band\b|&", about.right) or any(_places(about)):
        return set()
    everything = {token.form for token in about.gold}
    found = [place for place in claims if tokens[place].form in everything]
    if not names <= {tokens[place].form for place in found}:
        return set()
    inside = [place for place in claims if found[0] <= place <= found[-1]]
    return set(found) if inside == found else set()


def _declared(tokens: Sequence[Token]) -> tuple[Token, ...]:
    """The tokens without sentences that ask."""
    kept: list[Token] = []
    sentence: list[Token] = []
    for token in tokens:
        sentence.append(token)
        if token.form in ".!?":
            kept += [] if token.form == "?" else sentence
            sentence = []
    return tuple([*kept, *sentence])


def _unlisted(tokens: tuple[Token, ...], about: Item) -> tuple[Token, ...]:
    """The tokens without `between A and B`, `of A and B`, where the question names both."""
    if not about.chooses:
        return tokens
    kept = list(tokens)
    for place, token in enumerate(tokens):
        if token.word in ("between", "of", "among", "comparing", "from"):
            end = place + 1
            joined = False
            while end < len(tokens) and (
                tokens[end].form in about.asked or tokens[end].word in ("and", "or", "the", "two")
            ):
                joined |= tokens[end].word in ("and", "or")
                end += 1
            if (joined and end < len(tokens) and tokens[end].form in (",", ":", ".")) or (
                joined and place > 0 and end == len(tokens)
            ):
                return tuple(kept[:place] + kept[end + 1 :])
            if joined and end < len(tokens) and tokens[end - 1].word not in ("is", "was"):
                linked = next((k for k in range(end - 1, place, -1) if tokens[k].word in ("is", "was")), None)
                if linked:
                    return tuple(kept[:place] + kept[linked:])
    return tokens


def _segments(tokens: Sequence[Token]) -> list[int]:
    """The number of the segment that each token is in: clauses, as far as marks and conjunctions tell them."""
    numbers, number = [], 0
    for place, token in enumerate(tokens):
        word, before = token.word, tokens[place - 1] if place else None
        negates = token.kind == "not" and before is not None and (before.kind == "mark" or before.word == "and")
        if token.form in _BREAKS or word in _BREAKING or negates:
            number += 1
        numbers.append(number)
    return numbers


def _denied(tokens: Sequence[Token], segment: Sequence[int]) -> set[int]:
    """The segments that are said not to hold."""
    found = set()
    for place, token in enumerate(tokens):
        following = tokens[place + 1].word if place + 1 < len(tokens) else ""
        if (token.word, following) == ("none", "other") or (place and tokens[place - 1].word == "none"):
            continue
        if (
            token.kind == "not"
            and not (token.word == "no" and place + 1 < len(tokens) and tokens[place + 1].kind == "mark")
            and not (token.word == "not" and following in ("only", "just"))
        ) or (token.word, following) in (
            ("rather", "than"),
            ("instead", "of"),
            ("opposed", "to"),
            ("other", "than"),
        ):
            found.add(segment[place])
    return found


def in_source(about: Item, form: str) -> bool:
    return any(
        form == other or related(form, other) for place in about.near for other in about.passage.sentences[place].forms
    )


def singles_out(token: Token, about: Item) -> bool:
    """Whether a token names, counts, dates or ranks."""
    return (
        token.kind in ("name", "number")
        or (token.claims and token.form in about.passage.names)
        or (token.kind == "word" and len(token.word) > 5 and token.word.endswith("est"))
    )
