"""Facts of the source that an answer attaches to another thing than the source does. Each check gives a cause, or ''.

A number stands in the source with what it counts or dates, an agent behind its `by`, a place behind its `in`. An answer
that takes the fact and leaves the thing is made up, though each of its words is in the source.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from grpo_nb.tasks.grounding.claims import Token, related
from grpo_nb.tasks.grounding.hearing import ARTICLES, Heard, in_source
from grpo_nb.tasks.grounding.items import Item
from grpo_nb.tasks.grounding.lexicon import ACTING, CLASSIFIERS, CONVERSIONS

_INSIDE = frozenset(("in", "at", "near"))
_YEAR = re.compile(r"1\d{3}|20\d\d")
_LIFE = ACTING["born"][0]
_WIDE = 8
"""Tokens that a bracket opens at most before a year in it."""
_AHEAD = 4
"""Words that may stand between `by` and a name: `by the Danish engineer X`."""


def misattached(heard: Heard) -> str:
    """A number, agent or place that belongs elsewhere in the source, or the right answer under an opposite verb."""
    for first, last in heard.runs():
        if cause := _number_elsewhere(heard, first, last) or _agent_as_place(heard, first, last):
            return cause
    return _other_agent(heard) or _opposite_act(heard)


def converts(about: Item, run: Sequence[str]) -> bool:
    """Whether a number with its unit says in another unit what the right answer or the source says near it.

    `14.6 km` is about 9.1 miles: within 3 percent.
    """
    if len(run) != 2 or run[1] not in CONVERSIONS:
        return False
    kind, size = CONVERSIONS[run[1]]
    texts = [tuple(t.form for t in about.gold), *(about.passage.sentences[place].forms for place in about.near)]
    measures = [
        _number(number) * CONVERSIONS[unit][1]
        for line in texts
        for number, unit in pairwise(line)
        if unit in CONVERSIONS and unit != run[1] and CONVERSIONS[unit][0] == kind
    ]
    return any(measure and abs(_number(run[0]) * size / measure - 1) <= 0.03 for measure in measures)


def _number(form: str) -> float:
    try:
        return float(form)
    except ValueError:
        return 0.0


def _number_elsewhere(heard: Heard, first: int, last: int) -> str:
    """Whether a number stands in the source with another thing: beside a sentence on the answer, or before its noun."""
    about, passage = heard.item, heard.item.passage
    run = heard.forms(first, last)
    if not run or not all(heard.tokens[p].kind == "number" for p in range(first, last + 1)):
        return ""
    following = heard.tokens[last + 1] if last + 1 < len(heard.tokens) else None
    if (
        following
        and heard.part[last + 1] == "new"
        and following.kind == "word"
        and not in_source(about, following.form)
    ):
        return f"'{following.word}' is not what the source counts"
    if _YEAR.fullmatch(run[-1]) and (cause := _gloss(heard, first, last) or _dated_otherwise(heard, first, last)):
        return cause
    places = passage.spoken(run, about.near)
    if not places or places & passage.thread(about.evidence):
        return ""
    bracket = any(t.form == "(" for t, n in zip(heard.tokens, heard.segment, strict=True) if n == heard.segment[first])
    beside = [
        heard.tokens[p]
        for p in range(len(heard.tokens))
        if heard.segment[p] in (heard.segment[first], heard.segment[first] - bracket)
        and not first <= p <= last
        and heard.part[p] in ("new", "asked")
        and (heard.tokens[p].kind == "name" or (heard.tokens[p].kind == "word" and heard.tokens[p - 1].word == "the"))
    ]
    if any(held_in(about, token.form, passage.thread([place])) for place in places for token in beside):
        return ""
    return f"'{' '.join(run)}' stands in the source with another thing"


def held_in(about: Item, form: str, places: Collection[int]) -> bool:
    """Whether one of these sentences has a form, or one of the same word."""
    return any(related(form, other) for place in places for other in about.passage.sentences[place].forms)


def differs(heard: Heard, first: int, run: Sequence[str]) -> bool:
    """Whether a number is how far two numbers near the answer are apart: `X, by three years`."""
    if not heard.item.chooses or not first or heard.tokens[first - 1].word != "by":
        return False
    found = {_number(form) for place in heard.item.near for form in heard.item.passage.sentences[place].forms} - {0.0}
    return any(one - other == _number(run[0]) for one in found for other in found if one > other)


def _gloss(heard: Heard, first: int, last: int) -> str:
    """Whether a year that the source only has in brackets behind a name, a life's, dates something else."""
    run = heard.forms(first, last)
    if heard.item.chooses or any(
        t.form in ("(", "-") or ACTING.get(t.word, (0, 0))[0] == _LIFE or t.word == "lived" for t in heard.tokens
    ):
        return ""
    inside = [
        any(mark.form == "(" for mark in sentence.tokens[max(0, place - _WIDE) : place])
        and not any(mark.form == ")" for mark in sentence.tokens[max(0, place - _WIDE) : place])
        for sentence in heard.item.passage.sentences
        for place, token in enumerate(sentence.tokens)
        if token.form == run[-1]
    ]
    return f"'{run[-1]}' is a date of a life in the source" if inside and all(inside) else ""


def _dated_otherwise(heard: Heard, first: int, last: int) -> str:
    """Whether a bare year stands beside the right answer where the source dates what is asked by another one."""
    about, segment = heard.item, heard.segment[first]
    others = [p for p, part in enumerate(heard.part) if part == "new" and heard.segment[p] == segment]
    if len(others) > 1 or about.yes_no or about.chooses:
        return ""
    verbs = about.subject[1]
    dated = {
        token.form
        for place in about.near
        for clause in _clauses(about.passage.sentences[place].tokens)
        if any(token.form in verbs for token in clause)
        for token in clause
        if _YEAR.fullmatch(token.form)
    }
    year = heard.tokens[first].form
    return f"'{year}' is not when, in the source" if dated and year not in dated else ""


def _clauses(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    part: list[Token] = []
    for token in tokens:
        if token.form in (",", ";") or token.word in ("and", "which", "who"):
            yield part
            part = []
        else:
            part.append(token)
    yield part


def _agent_as_place(heard: Heard, first: int, last: int) -> str:
    """Whether an answer is `in X` where the source only has things done `by X`."""
    run = heard.forms(first, last)
    if heard.tokens[first].kind != "name" or _governor(heard.tokens, first) not in _INSIDE:
        return ""
    found = [
        _governor(sentence.tokens, place)
        for sentence in heard.item.passage.sentences
        for place, token in enumerate(sentence.tokens)
        if token.form == run[0]
    ]
    return f"'{' '.join(run)}' is no place in the source" if found and set(found) == {"by"} else ""


def _governor(tokens: Sequence[Token], place: int) -> str:
    """The word that a name hangs on, past names, articles, joins and `city of`."""
    for token in reversed(tokens[:place]):
        past = token.kind == "name" or token.word in ARTICLES or token.word in ("the", "a", "an", "of", "and")
        if not (past or token.word in CLASSIFIERS or token.form == ","):
            return token.word
    return ""


def _agents(tokens: Sequence[Token]) -> Iterator[tuple[str, int, set[str]]]:
    """Each verb before a `by`, the place of the `by`, and the names behind it."""
    for place, token in enumerate(tokens):
        if token.word != "by" or not place or tokens[place - 1].kind != "word":
            continue
        names: set[str] = set()
        for other, behind in enumerate(tokens[place + 1 :]):
            if behind.kind == "name":
                names.add(behind.form)
            elif (names and behind.kind == "word") or (not names and other >= _AHEAD) or behind.form in ".;:(":
                break
        yield tokens[place - 1].form, place, names


def _other_agent(heard: Heard) -> str:
    """Whether something is done by X that the source has done, but by others."""
    passage = heard.item.passage
    told = [
        (verb, passage.thread([place]), names)
        for place, sentence in enumerate(passage.sentences)
        for verb, _, names in _agents(sentence.tokens)
    ]
    fixed = {token.form for token in heard.item.gold}
    for verb, place, names in _agents(heard.tokens):
        segment = heard.segment[place]
        line = zip(heard.tokens, heard.segment, strict=True)
        subject = {t.form for t, where in line if where == segment and t.kind == "name"} - names
        ours = [(where, agents) for known, where, agents in told if known == verb and agents]
        same = [agents for where, agents in ours if all(held_in(heard.item, form, where) for form in subject)]
        known = set().union(*(same if subject and same else [agents for _, agents in ours]))
        if segment not in heard.denied and names and known and not names & (known | fixed):
            return f"'{' '.join(sorted(names))}' is not whom the source has behind '{verb} by'"
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
