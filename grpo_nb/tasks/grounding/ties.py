"""Compares the names of an answer with the source: who is where, who does what, whom the answer is about."""

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from grpo_nb.tasks.grounding.attachment import governor, held_in
from grpo_nb.tasks.grounding.claims import Token, tokenise
from grpo_nb.tasks.grounding.hearing import ARTICLES, LINKS, Heard, relative
from grpo_nb.tasks.grounding.items import Item
from grpo_nb.tasks.grounding.lexicon import PEOPLES, TITLES, VARIABLE, words
from grpo_nb.tasks.grounding.rivals import in_place
from grpo_nb.tasks.grounding.thesaurus import any_alike

_VERBS = frozenset(("is", "was", "are", "were", "has", "had", "came", "comes"))
_PLACING = frozenset(("in", "at", "of", "from", "on", "near", "by"))
_THE = frozenset(("a", "an", "the"))
_LISTS = frozenset(("and", "or", "&"))
_AHEAD = 8
"""Words that may stand between `by` and a name: `by the Danish engineer X`."""
_BEING = frozenset(("is", "was", "are", "were", "be", "been", "being"))
_RELATIVE = frozenset(("who", "which", "that", "had", "has", "have", "also", "then", "once"))
_OBJECTS = ARTICLES | frozenset(("a", "an", "the", "him", "them", "it", "some", "many"))
_ASIDE = frozenset(
    words(
        "in on at by for with from to of as than unlike while whereas although though because since and or but like "
        "after before"
    )
)
_BREAKS = frozenset(("while", "whereas", "although", "though", "because", "since", "but"))
NEAR = 2
"""Claims from one to the other that stand side by side."""


class Deed(NamedTuple):
    """An act: its verb, the verb's place, and the names of those who do it."""

    verb: str
    place: int
    actors: frozenset[str]


def deeds(tokens: Sequence[Token]) -> Iterator[Deed]:
    """The verbs of a text with somebody named who does it: `X made the`, `made by the engineer X`."""
    for place, token in enumerate(tokens):
        if token.word == "by" and (verb := _before_by(tokens, place)):
            if actors := _behind_by(tokens[place + 1 :]):
                yield Deed(verb, place, actors)
        elif place and _past(token) and place + 1 < len(tokens):
            follows = tokens[place + 1]
            transitive = follows.kind == "name" or follows.word in _OBJECTS
            if transitive and (actors := _before_verb(tokens[:place])):
                yield Deed(token.form, place, actors | _joined(tokens[:place], actors))


def _before_by(tokens: Sequence[Token], place: int) -> str:
    """The verb that a `by` belongs to: `launched by`, `launched in 1990 by`."""
    if place and tokens[place - 1].kind == "word":
        return tokens[place - 1].form
    ahead = range(place - 1, max(-1, place - 4), -1)
    verb = next((p for p in ahead if _past(tokens[p])), None)
    plain = verb is not None and all(tokens[p].kind in ("number", "small") for p in range(verb + 1, place))
    return tokens[verb].form if verb is not None and plain else ""


def _behind_by(tokens: Sequence[Token]) -> frozenset[str]:
    """The names after a `by`, past their description: `by the Danish engineer X`."""
    names: set[str] = set()
    for place, token in enumerate(tokens[:_AHEAD]):
        if token.kind == "name":
            names |= set() if token.owns or len(token.form) == 1 else {token.form}
        elif token.form in (".", ";", ":", "(", ",") and (names or token.form != ","):
            if not place or len(tokens[place - 1].word) > 1:
                break
        elif token.word in LINKS - {"of"} or token.word in _VERBS:
            break
    return frozenset(names)


def _before_verb(tokens: Sequence[Token]) -> frozenset[str]:
    """The name that stands right before a verb, past `who` and adverbs."""
    place = len(tokens) - 1
    while place >= 0 and (tokens[place].word in _RELATIVE or (place < len(tokens) - 1 and tokens[place].form == ",")):
        place -= 1
    names: set[str] = set()
    if place >= 0 and tokens[place].owns:
        return frozenset()
    while place >= 0 and tokens[place].kind == "name":
        names.add(tokens[place].form)
        place -= 1
    return frozenset(names)


def _joined(tokens: Sequence[Token], last: frozenset[str]) -> set[str]:
    """The names that `and` joins to the last one."""
    line = [token for token in tokens if token.claims or token.form in ",.;:(" or token.word == "and"]
    ands = [p for p, token in enumerate(line) if token.word == "and"]
    if not ands or len(line) - ands[-1] > 3 + len(last):
        return set()
    begin = next((p + 1 for p in range(ands[-1] - 1, -1, -1) if not line[p].claims), 0)
    return {token.form for token in line[begin : ands[-1]] if token.kind == "name"}


def _past(token: Token) -> bool:
    return token.kind == "word" and (token.word.endswith("ed") or (_irregular(token) and token.word[-2:] != "er"))


def other_actor(heard: Heard) -> str:
    """Whether an act is attributed to X that the source, or the question, attributes to others alone."""
    about = heard.item
    told = [
        (deed, about.passage.thread([place]))
        for place, sentence in enumerate(about.passage.sentences)
        for deed in deeds(sentence.tokens)
    ]
    asked = [deed for deed in deeds(tokenise(about.question))]
    gold = {token.form for token in about.gold}
    for verb, place, names in deeds(heard.tokens):
        segment = heard.segment[place]
        line = zip(heard.tokens, heard.segment, strict=True)
        others = {t.form for t, where in line if where == segment and t.kind == "name"} - names
        if about.yes_no:  # `X directed the first and Y the second`
            others -= {form for deed, _ in told if deed.verb == verb for form in deed.actors}
        ours = [(where, deed.actors) for deed, where in told if deed.verb == verb]
        same = [actors for where, actors in ours if all(held_in(about, form, where) for form in others)]
        turned = names <= gold and any(  # the source has the right answer in that sentence, and not as who does it
            others & actors and not names & actors and names <= about.passage.sentences[min(where)].holds
            for where, actors in ours
        )
        known = set().union(*(same if others and same else [actors for _, actors in ours]))
        known |= {form for deed in asked if deed.verb == verb for form in deed.actors}
        answers = names <= gold and verb in about.asked_claims and not any(deed.verb == verb for deed in asked)
        free = not turned and (answers or (names <= gold and not same))
        if segment not in heard.denied and known and not free and not names & known:
            return f"'{' '.join(sorted(names))}' is not who does it in the source: '{heard.tokens[place].word}'"
    return ""


def other_subject(heard: Heard) -> str:
    """Whether the right answer is attributed to somebody with whom no source sentence has it: `Y was born in X`."""
    about = heard.item
    if not about.holding or about.yes_no or about.chooses:
        return ""
    told = [(deed.verb, deed.actors) for sentence in about.passage.sentences for deed in deeds(sentence.tokens)]
    for first, _ in heard.blocks:
        places = _subject_of(heard, first)
        forms = {heard.tokens[p].form for p in places}
        does = any(t.form == verb and forms & actors for verb, actors in told for t in heard.tokens[:first])
        where = _said_of(about, forms) if forms and not does else frozenset()
        if where and not any(held_in(about, form, where) for form in forms):
            return f"'{heard.tokens[places[-1]].word}' stands in no sentence of the source with the right answer"
    return ""


def _subject_of(heard: Heard, first: int) -> list[int]:
    """Places of the name that the right answer is about: its sentence's first, or the referent of `who`."""
    ahead = range(heard.sentence(first).start, first)
    opens = heard.segment.index(heard.segment[first])
    if heard.tokens[opens].word in ("who", "which"):
        ends = next((p for p in range(opens - 1, ahead.start - 1, -1) if heard.tokens[p].kind != "mark"), opens)
        begins = ends
        while begins - 1 in ahead and heard.tokens[begins - 1].kind == "name":
            begins -= 1
        named = heard.tokens[ends].kind == "name"
        return [p for p in range(begins, ends + 1) if named and p not in heard.gold]
    begins = next((p for p in ahead if heard.tokens[p].kind == "name"), first)
    if any(heard.tokens[p].word in _ASIDE or p in heard.gold for p in range(ahead.start, begins)):
        return []
    ends = next(p for p in range(begins, first + 1) if p == first or heard.tokens[p].kind != "name") - 1
    between = [heard.tokens[p] for p in range(ends + 1, first)]
    acts = bool(between) and between[0].kind == "word" and between[0].word.endswith("s")  # `X goes by`
    says = acts or any(token.word in _VERBS or _past(token) for token in between)
    apart = heard.segment[first] in heard.denied or any(token.word in _BREAKS for token in between)
    owns = (
        any(heard.tokens[p].owns for p in range(begins, ends + 1))
        or heard.tokens[begins - 1 if begins else first].form == ","
    )
    verb = heard.tokens[min(opens + 1, first)]
    after = heard.tokens[opens].kind == "mark" and (verb.word in _VERBS or _past(verb))
    goes_on = after or heard.segment[begins] == heard.segment[first]
    return [] if owns or apart or not says or not goes_on else list(range(begins, ends + 1))


def _said_of(about: Item, forms: Set[str]) -> frozenset[int]:
    """The sentences that say whom the right answer is about: those that hold it, and before a pronoun what it is."""
    found: set[int] = set()
    for place in about.evidence:
        sentence = about.passage.sentences[place]
        gold = next((p for p, token in enumerate(sentence.tokens) if token.form in about.essential), 0)
        named = any(token.kind == "name" for token in sentence.tokens[:gold])
        ahead = [place] if named or not place else [place - 1, place]
        found |= about.passage.thread(ahead, loose=True) if sentence.refers or not named else {place}
    return frozenset(found) if not forms <= about.asked or about.passage.having(forms) else frozenset()


def stray(heard: Heard) -> str:
    """Cause for a name of the source that the answer does not connect as the source does: a second candidate.

    `X, then Y`, `X with Y`, `it was Y`: such a name is connected if the source has it next to the same words, if its
    sentence has a word that the source has with it, or if the right answer is about it (`Y is from X`).
    """
    about, passage = heard.item, heard.item.passage
    for first, last in heard.runs():
        tokens, run = heard.tokens[first : last + 1], heard.forms(first, last)
        named = all(token.kind == "name" and token.word not in TITLES for token in tokens)
        numeric = all(token.kind == "number" for token in about.gold) and heard.tokens[first - 1].form == "("
        if not named or numeric or _beside(heard, first, last) or in_place(heard, first, run):
            continue
        holders = passage.having(run)
        words = _words_with(heard, first, last)
        held = {form for place in passage.thread(holders, loose=True) for form in passage.sentences[place].forms}
        tied = any(any_alike(heard.tokens[p].form, held) for p in words)
        placed = tokens[-1].owns or governor(heard.tokens, first) in _PLACING
        near = bool(holders & about.evidence) and (placed or any(heard.part[p] == "asked" for p in words))
        described = set(run) <= PEOPLES and bool(holders & about.evidence) and _predicated(heard, first)
        aside = bool(holders & about.near) and (
            _concedes(heard, first) or (bool(holders & about.evidence) and relative(heard, first))
        )
        if holders and not (tied or near or described or aside or _subject(heard, first, last)):
            return f"'{' '.join(run)}' stands beside the right answer"
    return ""


def _concedes(heard: Heard, first: int) -> bool:
    """Whether a name stands in a clause of its own next to the answer's: `though the X was earlier`."""
    opens = heard.segment.index(heard.segment[first])
    return heard.tokens[opens].word in _BREAKS or heard.tokens[min(opens + 1, first)].word in _BREAKS


def _predicated(heard: Heard, first: int) -> bool:
    """Whether a nationality is a predicate: `he was Irish`."""
    before = [token.word for token in heard.tokens[max(0, first - 2) : first]]
    return bool(_BEING & set(before))


def _words_with(heard: Heard, first: int, last: int) -> list[int]:
    """The places of the words and the question's names that the sentence of a name has, but in the answer's clauses."""
    own = heard.segment[first]
    bracket = own - 1 if heard.tokens[heard.segment.index(own)].form == "(" else own
    gold = {heard.segment[p] for p in heard.gold} - {own, bracket}
    return [
        p
        for p in heard.sentence(first)
        if (heard.segment[p] not in gold or (p > max(heard.gold) and _past(heard.tokens[p])))
        and not first <= p <= last
        and (heard.part[p] == "asked" or (heard.part[p] == "new" and heard.tokens[p].kind in ("word", "number")))
    ]


def _subject(heard: Heard, first: int, last: int) -> bool:
    """Whether the right answer is about a name before it in its sentence: `Y, the composer, was X`."""
    gold = next((p for p in heard.sentence(last) if p > last and p in heard.gold), None)
    ahead = [heard.tokens[p].word for p in range(heard.sentence(first).start, first)]
    if gold is None or set(ahead) & _VERBS:
        return False
    between = [heard.tokens[p] for p in range(last + 1, gold)]
    asked = between[-1].word == "by" and heard.part[gold - 2] == "asked" and heard.tokens[gold - 2].kind == "word"
    finite = any(token.word in _VERBS or token.word.endswith("ed") or _irregular(token) for token in between)
    return (
        finite
        and (asked or between[-1].word not in ("with", "by", "and", "or"))
        and "although" not in [t.word for t in between]
    )


def _irregular(token: Token) -> bool:
    return token.kind == "word" and token.word in VARIABLE and token.word != token.form


def _beside(heard: Heard, first: int, last: int) -> bool:
    """Whether the source has a name close to the claim before or after it, joined by the same words."""
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
