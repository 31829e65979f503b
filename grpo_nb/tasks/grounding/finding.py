"""Finds the right answer in an answer: word by word, its members in any order, or a phrase in other words."""

import re
from collections.abc import Sequence
from itertools import pairwise

from grpo_nb.tasks.grounding.claims import Token, content, tokenise
from grpo_nb.tasks.grounding.items import Item
from grpo_nb.tasks.grounding.lexicon import VARIABLE, words
from grpo_nb.tasks.grounding.measures import converts
from grpo_nb.tasks.grounding.shapes import Shape, Slot, places_of
from grpo_nb.tasks.grounding.stems import people, stem
from grpo_nb.tasks.grounding.thesaurus import kin, opposed, synonyms

LONG = 5
"""Words of its own from which on a right answer may be given in part."""
MOST = 0.7
"""The share of them that must be there."""
APART = 5
"""Further claims that may stand between the words of a short phrase."""
_BEING = frozenset(words("was were is are be been being"))
_AUXILIARIES = _BEING | frozenset(words("had has have did to could would"))
_RANGES = frozenset(("to", "-", "until", "till", "through"))
_ENDINGS = ("", "e", "er", "or", "ing", "r")


def found(tokens: Sequence[Token], about: Item) -> set[int]:
    """Places of the right answer in an answer, by the first of its shapes that occurs."""
    gold_forms = {token.form for token in about.gold}
    claims = [
        place
        for place, token in enumerate(tokens)
        if token.claims or (token.form in gold_forms and token.kind == "small" and not content(about.gold))
    ]
    if places := max((_aligned(tokens, claims, shape, about) for shape in about.shapes), key=len):
        if _ranged(tokens, places, about) or _acts_on(tokens, places, about):
            return set()
        return _widened(tokens, _turned_name(tokens, places, gold_forms), about)
    bare = _unbracketed(tokens, claims)
    if len(bare) < len(claims) and (places := _aligned(tokens, bare, about.shapes[0], about)):
        return places
    return _members(tokens, claims, about) or _parts(tokens, claims, about) or _converted(tokens, claims, about)


def says(token: Token, slot: Slot, about: Item) -> bool:
    """Whether a token has the meaning of a word of the right answer."""
    if token.form == slot.form or people(token.form) & people(slot.form):
        return True
    if token.kind == "number":
        return slot.form.rstrip("th") == token.form.rstrip("th") != "" and slot.form[0].isdigit()
    return slot.common and token.form in synonyms(slot.form) and token.form not in about.others


def scattered(tokens: Sequence[Token], about: Item) -> set[int]:
    """The words of a right answer in another order, with others between them.

    Of a long one most of them, in an order that is mostly its own; of a short one all, near each other. A verb keeps
    its words before and after it. A name keeps its words side by side.
    """
    if re.search(r",|;", about.right):
        return set()
    slots = {slot.form: slot for slot in about.shapes[0] if slot.needed and slot.form not in about.asked}
    order = list(slots)
    placed = [
        (place, next((form for form in order if says(token, slots[form], about)), ""))
        for place, token in enumerate(tokens)
        if token.claims
    ]
    if len(order) > 2:
        placed = _nearly(tokens, placed, slots, about)
    matched = [(place, form) for place, form in placed if form]
    if len(order) < LONG:
        near = _near(tokens, placed, slots, about) if len(order) > 1 else _compound(tokens, about)
        return set() if _acts_on(tokens, near, about) else near
    ranks = [order.index(form) for _, form in matched]
    steps = [one < other for one, other in pairwise(ranks) if one != other]
    if len({form for _, form in matched}) < MOST * len(order) or not steps or sum(steps) < len(steps) / 2:
        return set()
    return set() if _turned(tokens, matched, order, about) else {place for place, _ in matched}


def _nearly(
    tokens: Sequence[Token], placed: Sequence[tuple[int, str]], slots: dict[str, Slot], about: Item
) -> list[tuple[int, str]]:
    """The placed words with one more that the rest supports: a word of the same class as the missing one."""
    missing = [form for form in slots if form not in {form for _, form in placed} and slots[form].common]
    if len(missing) != 1:
        return list(placed)
    for number, (place, form) in enumerate(placed):
        token = tokens[place]
        acts = token.word.endswith("ed") or token.word in VARIABLE
        free = not form and token.kind == "word" and not acts and token.form not in about.others
        wider = token.form in kin(missing[0]) or missing[0] in kin(token.form)
        if free and wider and not opposed(token.form, missing[0]):
            return [*placed[:number], (place, missing[0]), *placed[number + 1 :]]
    return list(placed)


def _near(tokens: Sequence[Token], placed: Sequence[tuple[int, str]], slots: dict[str, Slot], about: Item) -> set[int]:
    """All words of a short phrase within one stretch of a sentence."""
    order = list(slots)
    named = not any(slot.common for slot in slots.values())
    linked = any(token.word in ("of", "for") for token in tokenise(about.right))
    most = len(order) + (0 if named else APART)
    for start in range(len(placed)):
        window = placed[start : start + most]
        held = [(place, form) for place, form in window if form]
        for end in range(1, len(held) + 1):
            part = held[:end]
            if {form for _, form in part} == set(order):
                inside = tokens[part[0][0] : part[-1][0]]
                apart = any(token.form in ".;!" or token.kind == "not" for token in inside)
                joined = named and not linked and not any(token.form == "," for token in inside)
                if apart or joined or _turned(tokens, part, order, about):
                    break
                return {place for place, _ in part}
    return set()


def _compound(tokens: Sequence[Token], about: Item) -> set[int]:
    """`goal keeper`, `kept goal` for `goalkeeper`."""
    if len(about.gold) != 1 or about.gold[0].kind != "word":
        return set()
    word = about.gold[0].word
    claims = [place for place, token in enumerate(tokens) if token.claims]
    for one, other in pairwise(claims):
        for first, second in ((tokens[one], tokens[other]), (tokens[other], tokens[one])):
            whole = first.form + second.form
            if len(whole) > 5 and any(stem(whole + ending) == stem(word) for ending in _ENDINGS):
                return {one, other}
            if first.word + second.word == word:
                return {one, other}
    return set()


def _unbracketed(tokens: Sequence[Token], claims: Sequence[int]) -> list[int]:
    depth, kept = 0, []
    for place, token in enumerate(tokens):
        depth += (token.form == "(") - (token.form == ")" and depth > 0)
        kept += [] if depth else [place]
    return [place for place in claims if place in set(kept)]


def _acts_on(tokens: Sequence[Token], places: set[int], about: Item) -> bool:
    """Whether an answer turns the right one's agent into an object: `it crushed ice` for `crushed by ice`."""
    agents = {agent for _, agent in _agents(about)}
    return any(tokens[p].form in agents and p - 1 in places and tokens[p - 1].kind == "word" for p in places)


def _agents(about: Item) -> set[tuple[str, str]]:
    """The passive verbs of a right answer, each with the agent after its `by`."""
    right = [token for token in tokenise(about.right) if token.kind != "mark" and token.word not in ("a", "an", "the")]
    return {
        (one.form, agent.form)
        for one, by, agent in zip(right, right[1:], right[2:], strict=False)
        if by.word == "by" and (one.word.endswith("ed") or (one.word in VARIABLE and one.word != one.form))
    }


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


def _turned(tokens: Sequence[Token], matched: Sequence[tuple[int, str]], order: Sequence[str], about: Item) -> bool:
    """Whether a verb that is not passive has before it what the right answer has after it."""
    passives = {verb for verb, _ in _agents(about)}
    for (_, one), (place, verb) in pairwise(matched):
        if verb in passives:
            continue
        passive = {token.word for token in tokens[max(0, place - 2) : place]} & _BEING
        if verb in _finite(about) and not passive and order.index(one) > order.index(verb):
            return True
    return False


def _turned_name(tokens: Sequence[Token], places: set[int], gold: set[str]) -> set[int]:
    """The places with the rest of a name after a comma: `Collins, Ada`."""
    behind = {p + 2 for p in places if p + 2 < len(tokens) and tokens[p + 1].form == ","}
    return places | {p for p in behind if tokens[p].form in gold - {tokens[p - 2].form}}


def _widened(tokens: Sequence[Token], places: set[int], about: Item) -> set[int]:
    """The places with small words of the right answer's end: `Doctor Who`."""
    ends = [token.word for token in tokenise(about.right) if token.kind != "mark"]
    small = {token.word for token in tokenise(about.right)[-2:] if token.kind in ("small", "not")}
    if ends and ends[-1] in small:
        return places | {p + 1 for p in places if p + 1 < len(tokens) and tokens[p + 1].word == ends[-1]}
    return places


def _aligned(tokens: Sequence[Token], claims: Sequence[int], shape: Shape, about: Item) -> set[int]:
    places: set[int] = set()
    for start in range(len(claims)):
        places |= _at(tokens, claims[start:], shape, about)
    return places


def _at(tokens: Sequence[Token], claims: Sequence[int], shape: Shape, about: Item) -> set[int]:
    matched: set[int] = set()
    ahead = 0
    for slot in shape:
        if ahead < len(claims) and says(tokens[claims[ahead]], slot, about):
            matched.add(claims[ahead])
            ahead += 1
        elif slot.needed:
            return set()
    first = min(matched, default=0)
    headed = not shape[0].needed and shape[0].common and len(matched) < len(shape)
    return set() if headed and first and tokens[first - 1].kind == "word" else matched


def _converted(tokens: Sequence[Token], claims: Sequence[int], about: Item) -> set[int]:
    """`about 9.1 miles` for `14.6 km`."""
    if len(about.gold) != 2:
        return set()
    pairs = (
        pair for pair in pairwise(claims) if converts([tokens[p].form for p in pair], [[t.form for t in about.gold]])
    )
    return set(next(pairs, ()))


def _members(tokens: Sequence[Token], claims: Sequence[int], about: Item) -> set[int]:
    """All members of a list, each in one of its shapes, in any order."""
    if len(about.members) < 2:
        return set()
    places: set[int] = set()
    for shapes in about.members:
        own = next((p for shape in shapes if (p := _aligned(tokens, claims, shape, about))), set())
        if not own - places:
            return set()
        places |= own
    return set() if _ranged(tokens, places, about) else places


def _ranged(tokens: Sequence[Token], places: set[int], about: Item) -> bool:
    """Whether an answer gives a range between two numbers that the right one lists: `2017 to 2019`."""
    between = {token.word or token.form for token in tokens[min(places) : max(places)]}
    if tokenise(about.right)[0].word in ("between", "from"):
        return False
    return len(about.members) > 1 and all(tokens[p].kind == "number" for p in places) and bool(between & _RANGES)


def _parts(tokens: Sequence[Token], claims: Sequence[int], about: Item) -> set[int]:
    """`Stanley Brightwell and his wife Maud` as `Stanley and Maud Brightwell`: all of a list's names, side by side."""
    names = {token.form for token in about.gold if token.kind in ("name", "number")} - (
        about.asked if not about.chooses else frozenset()
    )
    if len(names) < 2 or not re.search(r",|\band\b|&", about.right) or any(places_of(about.right, about.against)):
        return set()
    everything = {token.form for token in about.gold}
    places = [place for place in claims if tokens[place].form in everything]
    if not names <= {tokens[place].form for place in places}:
        return set()
    inside = [place for place in claims if places[0] <= place <= places[-1]]
    return set(places) if inside == places else set()
