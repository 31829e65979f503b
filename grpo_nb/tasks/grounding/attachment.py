"""Facts of the source that an answer attaches to another thing than the source does. Each check gives a cause, or ''.

In the source a number stands with the thing it counts or dates, an agent after its `by`, a place after its `in`. An
answer that takes the fact without the thing is made up, though each of its words is in the source.
"""

import re
from collections.abc import Collection, Sequence

from grpo_nb.tasks.grounding.claims import Token
from grpo_nb.tasks.grounding.hearing import ARTICLES, Heard, in_source
from grpo_nb.tasks.grounding.items import Item
from grpo_nb.tasks.grounding.lexicon import ACTING, CLASSIFIERS, UNIT_FORMS
from grpo_nb.tasks.grounding.measures import number_of
from grpo_nb.tasks.grounding.owners import belongs
from grpo_nb.tasks.grounding.stems import related

_YEAR = re.compile(r"1\d{3}|20\d\d")
_TIMES = frozenset(("year", "decade", "century"))
_LIFE = ACTING["born"][0]
_WIDE = 8
"""Tokens that a bracket opens at most before a year in it."""


def misattached(heard: Heard) -> str:
    """A number, agent or place that belongs elsewhere in the source, or the right answer under an opposite verb."""
    seen: set[str] = set()
    for first, last in heard.runs():
        run = heard.forms(first, last)
        again = heard.item.chooses and set(run) <= seen
        if cause := not again and (_number_elsewhere(heard, first, last) or _agent_as_place(heard, first, last)):
            return cause
        seen |= set(run)
    return _opposite_act(heard)


def _number_elsewhere(heard: Heard, first: int, last: int) -> str:
    """Whether the source has a number with another thing: outside the sentences on the answer, or before its noun."""
    about, passage = heard.item, heard.item.passage
    run = heard.forms(first, last)
    if not run or not all(heard.tokens[p].kind == "number" for p in range(first, last + 1)):
        return ""
    following = heard.tokens[last + 1] if last + 1 < len(heard.tokens) else None
    if (
        following
        and not _YEAR.fullmatch(run[-1])
        and heard.part[last + 1] == "new"
        and following.kind == "word"
        and not in_source(about, following.form)
        and not derived(heard, first, run)
    ):
        return f"'{following.word}' is not what the source counts"
    if _YEAR.fullmatch(run[-1]) and of_noun(heard, last):
        return ""
    if _YEAR.fullmatch(run[-1]) and (cause := _gloss(heard, first, last)):
        return cause
    timed = following is not None and following.form in _TIMES and not _YEAR.fullmatch(run[-1])
    if timed and following and not passage.spoken((*run, following.form), about.near):
        return "" if derived(heard, first, run) else f"'{run[-1]} {following.word}' is not in the source"
    places = passage.spoken(run, about.near)
    own = about.evidence if about.named else about.near
    if not places or places & passage.thread(own) or derived(heard, first, run) or belongs(heard, first):
        return ""
    bracket = any(t.form == "(" for t, n in zip(heard.tokens, heard.segment, strict=True) if n == heard.segment[first])
    alone = sum(t.claims for t, n in zip(heard.tokens, heard.segment, strict=True) if n == heard.segment[first]) == len(
        run
    )
    beside = [
        heard.tokens[p]
        for p in range(len(heard.tokens))
        if heard.segment[p] in (heard.segment[first], heard.segment[first] - (bracket or alone))
        and not first <= p <= last
        and heard.part[p] in ("new", "asked")
        and (heard.tokens[p].kind == "name" or (alone and _acts(heard, p)) or heard.tokens[p - 1].word == "the")
        and heard.tokens[p].kind in ("name", "word")
    ]
    if any(held_in(about, token.form, passage.thread([place])) for place in places for token in beside):
        return ""
    return f"'{' '.join(run)}' stands in the source with another thing"


def _acts(heard: Heard, place: int) -> bool:
    return heard.tokens[place].word.endswith("ed")


def held_in(about: Item, form: str, places: Collection[int]) -> bool:
    """Whether one of these sentences has this form, or another form of the same word."""
    return any(related(form, other) for place in places for other in about.passage.sentences[place].forms)


def derived(heard: Heard, first: int, run: Sequence[str]) -> bool:
    """Whether a number follows from the source: a count of things it lists, or a sum or difference."""
    return _counts(heard, first, run) or _differs(heard, first, run)


def _counts(heard: Heard, first: int, run: Sequence[str]) -> bool:
    """Whether a small number is how many things a sentence near the answer lists: `four members`."""
    if len(run) > 1 or not re.fullmatch(r"\d|1\d", run[0]):
        return False
    about = heard.item
    behind = next((t.form for t in heard.tokens[first + 1 : first + 4] if t.claims or t.form in ".,;"), ".")
    if behind in ".,;" and not about.chooses:
        return False
    counted = "" if behind in about.asked or behind in (*".,;", "member") else behind
    return any((counted, int(run[0])) in about.passage.sentences[place].listings for place in about.near)


def _differs(heard: Heard, first: int, run: Sequence[str]) -> bool:
    """Whether a number is the difference or the sum of two numbers near the answer.

    `X, by three years`; where the question does not choose between two things, only of years.
    """
    about = heard.item
    years = heard.tokens[first + 1].form in _TIMES if first + 1 < len(heard.tokens) else False
    if len(run) > 1 + (run[-1] in UNIT_FORMS) or not (about.chooses or about.yes_no or years):
        return False
    found = {number_of(form) for place in about.near for form in about.passage.sentences[place].forms} - {0.0}
    found = {number for number in found if 1000 < number < 2100} if years else found
    return any(number_of(run[0]) in (one - other, one + other) for one in found for other in found if one > other)


def _gloss(heard: Heard, first: int, last: int) -> str:
    """Whether a year of a life span, which the source only has in brackets after a name, dates something else."""
    run = heard.forms(first, last)
    computed = not {token.form for token in heard.item.gold} & heard.item.passage.holds
    if (
        computed
        or heard.item.chooses
        or any(
            t.form in ("(", "-") or ACTING.get(t.word, (0, 0))[0] == _LIFE or t.word == "lived" for t in heard.tokens
        )
    ):
        return ""
    inside = [
        _in_life(sentence.tokens, place)
        for sentence in heard.item.passage.sentences
        for place, token in enumerate(sentence.tokens)
        if token.form == run[-1]
    ]
    return f"'{run[-1]}' is a date of a life in the source" if inside and all(inside) else ""


def _in_life(tokens: Sequence[Token], place: int) -> bool:
    """Whether a year stands in brackets with another one, or as that of a birth: `(1838-1902)`, `(born 1968)`."""
    opens = next((p for p in range(place, max(-1, place - _WIDE), -1) if tokens[p].form in "()"), None)
    if opens is None or tokens[opens].form != "(":
        return False
    closes = next((p for p in range(place, len(tokens)) if tokens[p].form == ")"), len(tokens))
    inside = tokens[opens:closes]
    years = sum(_YEAR.fullmatch(token.form) is not None for token in inside)
    return years > 1 or any(ACTING.get(token.word, (None, 0))[0] == _LIFE for token in inside)


def of_noun(heard: Heard, last: int) -> bool:
    """Whether a year modifies a noun as the source could: `the 1964 film`."""
    following = heard.tokens[last + 1] if last + 1 < len(heard.tokens) else None
    if following is None or following.kind != "word" or following.word.endswith("s"):
        return False
    year = heard.tokens[last].form
    return any({year, following.form} <= sentence.holds for sentence in heard.item.passage.sentences)


def _agent_as_place(heard: Heard, first: int, last: int) -> str:
    """Whether an answer is `in X` where the source only has things done `by X`."""
    run = heard.forms(first, last)
    following = heard.tokens[last + 1] if last + 1 < len(heard.tokens) else None
    describes = following is not None and following.kind == "word"
    if heard.tokens[first].kind != "name" or describes or governor(heard.tokens, first) not in ("in", "at", "near"):
        return ""
    found = [
        governor(sentence.tokens, place)
        for sentence in heard.item.passage.sentences
        for place, token in enumerate(sentence.tokens)
        if token.form == run[0]
    ]
    return f"'{' '.join(run)}' is no place in the source" if found and set(found) == {"by"} else ""


def governor(tokens: Sequence[Token], place: int) -> str:
    """The word that a name hangs on, past names, articles, joins and `city of`."""
    for token in reversed(tokens[:place]):
        past = token.kind == "name" or token.word in ARTICLES or token.word in ("the", "a", "an", "of", "and")
        if not (past or token.word in CLASSIFIERS or token.form == ","):
            return token.word
    return ""


def _opposite_act(heard: Heard) -> str:
    """Whether the right answer stands under the opposite of the question's verb: `what did X give`: `X took it`."""
    if heard.item.chooses or heard.item.yes_no:
        return ""
    asked = [ACTING[word] for word in heard.item.asked_words if word in ACTING]
    spoken = [token.word for place in heard.item.evidence for token in heard.item.passage.sentences[place].tokens]
    around = {heard.segment[place] for place in heard.gold}
    here = [
        token
        for place, token in enumerate(heard.tokens)
        if heard.part[place] != "gold" and heard.segment[place] in around and token.word not in spoken
    ]
    ours = {ACTING[token.word] for token in here if token.word in ACTING}
    return next(
        (
            "it turns what is asked for into its opposite"
            for act, end in asked
            if (act, 1 - end) in ours and (act, end) not in ours
        ),
        "",
    )
