"""Of two things that a question names: which of them an answer, and its source, say a fact of."""

import re
from collections.abc import Collection, Sequence

from grpo_nb.tasks.grounding.attachment import governor, held_in
from grpo_nb.tasks.grounding.claims import Token
from grpo_nb.tasks.grounding.hearing import ARTICLES, Heard
from grpo_nb.tasks.grounding.items import Item
from grpo_nb.tasks.grounding.lexicon import TITLES, VARIABLE

_TURNS = frozenset(("for", "against", "vs", "by", "to", "is", "was"))
"""Words behind a fact whose owner follows: `1988 for the Tofte Bridge`."""


_VERBS = frozenset(("is", "was", "are", "were", "has", "had", "came", "comes"))
_PLACING = frozenset(("in", "at", "of", "from", "on", "near", "by"))
_THE = frozenset(("a", "an", "the"))
_LISTS = frozenset(("and", "or", "&"))
NEAR = 2
"""Claims from one to the other that stand side by side."""
_FIGURE = re.compile(r"\d{3,}(?:\.\d+)?")
"""A number that is its thing's own; small ones are said of many."""


def of_the_other(heard: Heard) -> str:
    """Whether a name or number is said of the one thing that the source only has of the other: roles turned round."""
    groups = _groups(heard.item)
    if len(groups) < 2 or not (heard.item.yes_no or heard.item.chooses):
        return ""
    for number in sorted(set(heard.segment) - heard.denied):
        part = [p for p, where in enumerate(heard.segment) if where == number]
        tokens = [heard.tokens[p] for p in part]
        for place, token in enumerate(tokens):
            fact = token.kind == "name" or _FIGURE.fullmatch(token.form)
            if not fact or token.form in heard.item.asked:
                continue
            owner, told = _owner(tokens, place, groups), _told_of(token.form, heard.item, groups)
            if owner is not None and told and owner not in told:
                return f"'{token.word}' is said in the source of the other one"
    return ""


def _groups(about: Item) -> tuple[frozenset[str], ...]:
    """The words that one of two things alone has which the question sets beside each other: `A and B`, `A before B`."""
    names = about.compared
    shared = {form for place, group in enumerate(names) for other in names[place + 1 :] for form in group & other}
    return tuple(group - shared for group in names if group - shared)


def _told_of(form: str, about: Item, groups: Sequence[frozenset[str]]) -> set[int]:
    """What the source says a form of; empty where one of its sentences does not show it."""
    found = set()
    for number, sentence in enumerate(about.passage.sentences):
        for place, token in enumerate(sentence.tokens):
            if token.form != form:
                continue
            owner = _owner(sentence.tokens, place, groups)
            if owner is None and number and sentence.continues:
                before = _named(about.passage.sentences[number - 1].tokens, groups)
                owner = before[0] if len(set(before)) == 1 else None
            if owner is None:
                return set()
            found.add(owner)
    return found


def _owner(tokens: Sequence[Token], place: int, groups: Sequence[frozenset[str]]) -> int | None:
    """The thing that a token is said of: the last one named before it, else the only one, else none."""
    if any(token.word in ("both", "they", "each", "neither") for token in tokens):
        return None
    ahead = [token for token in tokens[place + 1 : place + 5] if token.word not in ("the", "a", "an")]
    if len(ahead) > 1 and ahead[0].word in _TURNS and (following := _named(ahead[1:3], groups)):
        return following[0]
    before = _named(tokens[:place], groups)
    if before:
        return None if _joined(tokens[:place], groups) else before[-1]
    behind = set(_named(tokens[place + 1 :], groups))
    return behind.pop() if len(behind) == 1 else None


def _named(tokens: Sequence[Token], groups: Sequence[frozenset[str]]) -> list[int]:
    return [number for token in tokens for number, group in enumerate(groups) if token.form in group]


def _joined(tokens: Sequence[Token], groups: Collection[frozenset[str]]) -> bool:
    """Whether the last two names before a fact share it: `Ada and Tom were born in 1950`."""
    named = [place for place, token in enumerate(tokens) if any(token.form in group for group in groups)]
    things = _named(tokens, list(groups))
    for (one, first), (other, second) in zip(
        zip(named, things, strict=True), zip(named[1:], things[1:], strict=True), strict=False
    ):
        between = [token for token in tokens[one + 1 : other] if token.claims]
        joins = [token.word for token in tokens[one + 1 : other]]
        if first != second and "and" in joins and not between and second == things[-1]:
            return True
    return False


def stray(heard: Heard) -> str:
    """A name of the source that nothing in the answer ties to what the source says of it: a second candidate.

    `X, then Y`, `X with Y`, `it was Y`: such a name stands in the source beside what it stands beside here, or its
    sentence has a word that the source has with it, or the right answer is said of it (`Y is from X`).
    """
    about, passage = heard.item, heard.item.passage
    for first, last in heard.runs():
        tokens, run = heard.tokens[first : last + 1], heard.forms(first, last)
        named = all(token.kind == "name" and token.word not in TITLES for token in tokens)
        if not named or _beside(heard, first, last) or _retracted(heard, last):
            continue
        holders = passage.having(run)
        words = _words_with(heard, first, last)
        tied = any(held_in(about, heard.tokens[p].form, passage.thread(holders, loose=True)) for p in words)
        placed = tokens[-1].owns or governor(heard.tokens, first) in _PLACING
        near = bool(holders & about.evidence) and (placed or any(heard.part[p] == "asked" for p in words))
        if holders and not (tied or near or _subject(heard, first, last)):
            return f"'{' '.join(run)}' stands beside the right answer"
    return ""


def _words_with(heard: Heard, first: int, last: int) -> list[int]:
    """The places of the words and the question's names that the sentence of a name has, but in the answer's clauses."""
    own = heard.segment[first]
    bracket = own - 1 if heard.tokens[heard.segment.index(own)].form == "(" else own
    gold = {heard.segment[p] for p in heard.gold} - {own, bracket}
    return [
        p
        for p in _sentence(heard, first)
        if heard.segment[p] not in gold
        and not first <= p <= last
        and (heard.part[p] == "asked" or (heard.part[p] == "new" and heard.tokens[p].kind in ("word", "number")))
    ]


def _sentence(heard: Heard, place: int) -> range:
    begin = next((p + 1 for p in range(place - 1, -1, -1) if heard.tokens[p].form in ".;!?"), 0)
    end = next((p for p in range(place, len(heard.tokens)) if heard.tokens[p].form in ".;!?"), len(heard.tokens))
    return range(begin, end)


def _subject(heard: Heard, first: int, last: int) -> bool:
    """Whether the right answer is said of a name before it in its sentence: `Y, the composer, was X`."""
    gold = next((p for p in _sentence(heard, last) if p > last and p in heard.gold), None)
    ahead = [heard.tokens[p].word for p in range(_sentence(heard, first).start, first)]
    if gold is None or set(ahead) & _VERBS:
        return False
    between = [heard.tokens[p] for p in range(last + 1, gold)]
    finite = any(token.word in _VERBS or token.word.endswith("ed") or _irregular(token) for token in between)
    return (
        finite and between[-1].word not in ("with", "by", "and", "or") and "although" not in [t.word for t in between]
    )


def _irregular(token: Token) -> bool:
    return token.kind == "word" and token.word in VARIABLE and token.word != token.form


def _retracted(heard: Heard, last: int) -> bool:
    return any(token.word == "no" for token in heard.tokens[last + 1 : last + 4])


def _beside(heard: Heard, first: int, last: int) -> bool:
    """Whether the source has a name close to the claim before or behind it, joined by the same words."""
    before = next((p for p in range(first - 1, -1, -1) if heard.tokens[p].claims), None)
    behind = next((p for p in range(last + 1, len(heard.tokens)) if heard.tokens[p].claims), None)
    pairs = [pair for pair in ((before, first), (last, behind)) if None not in pair]
    return any(
        heard.tokens[p].form in sentence.holds and _close(sentence.tokens, heard, p, q)
        for sentence in heard.item.passage.sentences
        for p, q in pairs
        if p is not None and q is not None
    )


def _close(tokens: Sequence[Token], heard: Heard, p: int, q: int) -> bool:
    """Whether two claims of an answer stand close in a sentence, and not as members of a list with the right answer."""
    pair = {heard.tokens[p].form, heard.tokens[q].form}
    link = {word for word in heard.between(p, q) if word.isalpha()} - ARTICLES - _THE
    claims = [place for place, token in enumerate(tokens) if token.claims]
    for number, place in enumerate(claims):
        for other in claims[number + 1 : number + 1 + NEAR]:
            if {tokens[place].form, tokens[other].form} == pair:
                around = {token.word or token.form for token in tokens[max(0, place - 3) : other + 4]}
                between = {token.word or token.form for token in tokens[place + 1 : other]}
                listed = between & {",", *_LISTS} and around & _LISTS and {p, q} & heard.gold
                if not listed and link <= between:
                    return True
    return False
