"""Detects answers which state that the text does not say, and whether they give an answer anyway.

A clause is silent where it negates a verb of telling or finding, a word for information, or the text itself. The rest
of it, whatever its words, is the missing information.
"""

import re
from collections.abc import Collection, Sequence
from itertools import pairwise

from grpo_nb.tasks.grounding.claims import Token, content, forms, tokenise
from grpo_nb.tasks.grounding.framing import shown, unasked
from grpo_nb.tasks.grounding.hearing import FRAMING, Heard
from grpo_nb.tasks.grounding.items import Item
from grpo_nb.tasks.grounding.lexicon import CLASSIFIERS, DOUBTS, INFORMATION, LACKS, REFUSING, SOURCES, TELLING, words
from grpo_nb.tasks.grounding.stems import stem
from grpo_nb.tasks.grounding.thesaurus import is_adverb, is_word

_KINDS = frozenset(("1th", *(stem(word) for word in CLASSIFIERS)))
"""Words for the kind or rank of something."""
_ASKING = frozenset(("which", "who", "whose", "what", "where", "when", "why", "how", "whether", "if"))
_SPEAKERS = frozenset(words("i we you me my us your our"))
_SURE = frozenset(words("sure certain confident positive convinced"))
_LIMITS = frozenset(words("only just merely"))
_NOTHING = (["null"], ["n", "a"], ["none"], ["nil"])
_FAMILIES = {
    "who": frozenset(words("who whom whose")),
    "when": frozenset(words("when year date day month decade century time")),
    "where": frozenset(words("where city country state county place town region location")),
    "why": frozenset(["why"]),
    "how": frozenset(["how"]),
}
"""Question words, each with the words that a question for the same may have."""
_FURTHER = frozenset(words("further additional else other"))
LOOP = 6
"""Words that an answer may not say twice over."""
MOST = 0.6
"""Share of a question's claims above which an answer only repeats it."""
_ENDS = frozenset(".!?;")
_PLAIN = FRAMING | frozenset(stem(word) for word in (*TELLING, *INFORMATION, *SOURCES, *LACKS, *_SURE, "ai", "access"))


def tells_nothing(answer: str, limits: bool = True) -> bool:
    """Whether a clause of an answer states that the text does not say, or, with `limits`, that it only says so much.

    >>> tells_nothing("The name of her husband isn't mentioned in the text."), tells_nothing("No, it is red.")
    (True, False)
    >>> tells_nothing("It gives no figure for that."), tells_nothing("I'm not quite sure, but it is red.")
    (True, False)
    """
    clauses = _clauses(tokenise(shown(answer)))
    named = False
    for clause in clauses:
        spoken = {token.word for token in clause}
        if named and clause[0].word == "not" and len(spoken) <= 4:
            return True
        named = named or bool(spoken & SOURCES and spoken & TELLING)
    told = (clause for clause in clauses if len(clause) > 1 or len(clauses) == 1)
    return any(_silent(clause) or (limits and _limited(clause)) for clause in told)


def ends_silent(answer: str, about: Item) -> bool:
    """Whether an answer ends by stating that the text does not answer the question.

    Not where `but` leads on to an answer, nor where it is silent on another thing, `X; it does not say when`.
    """
    last = re.split(r"[,;.]\s*but\b", unasked(shown(answer), about.question))[-1]
    return any(_silent(clause) and not _otherwise(clause, about) for clause in _clauses(tokenise(last)))


def _otherwise(clause: list[Token], about: Item) -> bool:
    """Whether a clause declares another thing missing than the question's: `when` for who, other words."""
    asks = next((token.word for token in clause[1:] if token.word in _FAMILIES), None)
    if asks is not None:
        return not _FAMILIES[asks] & set(about.asked_words)
    gold = {token.form for token in about.gold}
    told = [t for t in clause if t.claims and t.word not in TELLING | SOURCES | INFORMATION and t.form not in FRAMING]
    more = _FURTHER & {token.word for token in clause}
    return bool(more or told) and not any(
        token.form in gold or (token.kind == "word" and token.form in about.asked) for token in told
    )


def says_nothing(answer: str, about: Item) -> bool:
    """Whether an answer without the right one only asks, repeats the question, loops, or breaks off."""
    tokens = Heard(answer, about).tokens
    spoken = [token.word for token in tokens if token.kind != "mark"]
    again = sum(one == other for one, other in pairwise(spoken))
    if not any(token.claims for token in tokens):
        return not set(spoken) & {"yes", "no", "both", "neither", "none", "nothing", "nobody", "all"}
    asks = spoken[0] in _ASKING and all(token.form in about.asked for token in tokens if token.claims)
    return (
        asks
        or again >= len(spoken) / 3 > 1
        or _goes_round(spoken)
        or _breaks_off(answer, about)
        or _echoes(tokens, about)
    )


def _echoes(tokens: Sequence[Token], about: Item) -> bool:
    """Whether an answer is most of the question in its order, as a statement: it has nothing in the answer's place."""
    said = [token.form for token in tokens if token.claims]
    asked = forms(about.question)
    rest = iter(asked)
    opens = bool(_ASKING & set(about.asked_words))
    return len(said) > max(3, MOST * len(asked)) and opens and not about.chooses and all(f in rest for f in said)


def _goes_round(spoken: Sequence[str]) -> bool:
    """Whether the same words come again and again."""
    runs = [tuple(spoken[place : place + LOOP]) for place in range(len(spoken) - LOOP + 1)]
    return len(runs) - len(set(runs)) >= 2


def _breaks_off(answer: str, about: Item) -> bool:
    """Whether the last word is the beginning of one that the item has: `in Max Schm`."""
    words = answer.split()
    last = words[-1].lower() if len(words) > 5 else ""
    known = re.findall(r"[^\W\d_]+", f"{about.source} {about.question}".lower())
    return last.isalpha() and last not in known and not is_word(last) and any(word.startswith(last) for word in known)


def refuses(answer: str) -> bool:
    """Whether an answer refuses to help.

    >>> refuses("I'm sorry, but I can't assist with that."), refuses("I cannot find it in the text.")
    (True, False)
    """
    return any(_refuses([token.word for token in clause]) for clause in _clauses(tokenise(shown(answer))))


def names_something(answer: str, about: Item) -> bool:
    """Whether an answer which states that the text does not say gives an answer anyway."""
    heard = Heard(answer, about, framed=False)
    asked = {token.form for token in tokenise(about.question)}
    bad = {token.form for token in content(tokenise(about.hallucinated))} - asked - _PLAIN - _KINDS
    if _leaves_open(heard):
        return True
    live = {t.form for p, t in enumerate(heard.tokens) if heard.segment[p] not in heard.denied}
    if bad & live - about.passage.holds:
        return True
    for first, last in heard.runs(denied=True):
        run = [
            form for form in heard.forms(first, last) if (form not in _PLAIN | _KINDS and len(form) > 1) or form in bad
        ]
        if not run or (_reports(heard, first) and set(run) <= about.passage.holds):
            continue
        if heard.segment[first] in heard.denied and not _outside_denial(heard, first, bad):
            continue
        if bad & set(run):
            return True
        if _asks_indirectly(heard, first, last):
            continue
        held = [form for form in run if form in about.passage.holds]
        kinds = {heard.tokens[p].kind for p in range(first, last + 1)}
        if kinds & {"name", "number"}:
            if len(held) < len(run) or not (_reports(heard, first) or _clause_of(heard, first)):
                return True
        elif _bare(heard, first) and not _reports(heard, first):
            return True
    return False


def _leaves_open(heard: Heard) -> bool:
    """Whether silence is one of two choices: `either a medal or not stated`."""
    return any(
        token.word == "or" and any(t.kind == "not" for t in heard.tokens[place + 1 : place + 3])
        for place, token in enumerate(heard.tokens)
    )


def _clauses(tokens: tuple[Token, ...]) -> list[list[Token]]:
    found: list[list[Token]] = [[]]
    for token in tokens:
        if token.form in _ENDS or token.form in (",", ":", " - ", "(", ")") or token.word in ("but", "though", "so"):
            found.append([])
        else:
            found[-1].append(token)
    return [clause for clause in found if clause]


def _silent(clause: list[Token]) -> bool:
    """Whether a clause denies that something is stated."""
    spoken = [token.word for token in clause if token.kind != "mark"]
    clause = [token for token in clause if token.kind != "mark"]
    lacks = next((place for place, word in enumerate(spoken) if word in LACKS), None)
    negation = next((place for place, token in enumerate(clause) if token.kind == "not"), lacks)
    if spoken in _NOTHING:
        return True
    if negation is None or set(spoken) & DOUBTS or _refuses(spoken):
        return False
    if set(spoken) & SOURCES or spoken[negation] in LACKS:
        return spoken[negation] in LACKS or not _about_source(spoken)
    behind = spoken[negation + 1 :]
    near = [word for word in behind if not is_adverb(word)][:4]
    return bool(set(near) & (TELLING | INFORMATION)) or (spoken[negation] == "nothing" and "about" in near)


def _limited(clause: list[Token]) -> bool:
    """Whether a clause limits what the text states: `the passage only gives the year`."""
    spoken = {token.word for token in clause}
    return bool(_LIMITS & spoken and (SOURCES | {"it"}) & spoken and TELLING & spoken)


def _refuses(spoken: Sequence[str]) -> bool:
    """Whether a clause is a refusal: `I cannot assist with that`, `I'm just an AI`."""
    return bool(_SPEAKERS & set(spoken) and REFUSING & set(spoken)) and bool({"not", "unable", "ai"} & set(spoken))


def _about_source(spoken: list[str]) -> bool:
    """Whether the text is only cited as the source of a statement: `according to the text, X did not stay`."""
    place = next(place for place, word in enumerate(spoken) if word in SOURCES)
    return bool({"according", "based"} & set(spoken[max(0, place - 4) : place]))


def _outside_denial(heard: Heard, place: int, bad: Collection[str]) -> bool:
    """Whether a word of a clause that denies is not denied: `Lunt, not stated`, `not stated or Lunt`."""
    here = [p for p, number in enumerate(heard.segment) if number == heard.segment[place]]
    negation = next((p for p in here if heard.tokens[p].kind == "not"), place)
    between = range(min(place, negation), max(place, negation))
    apart = heard.part[negation - 1] == "new" or any(heard.part[p] in ("benign", "gold") for p in between)
    named = heard.tokens[place].kind != "word" or heard.tokens[place].form in bad
    return (place < negation and apart and named) or any(heard.tokens[p].word == "or" for p in between)


def _asks_indirectly(heard: Heard, first: int, last: int) -> bool:
    """Whether a run of common words stands in the missing information: `it is not clear which arena they use`."""
    here = heard.segment[first]
    opens = heard.segment.index(here)
    common = all(heard.tokens[p].kind == "word" for p in range(first, last + 1))
    return common and here - 1 in heard.denied and heard.tokens[opens].word in _ASKING


def _reports(heard: Heard, place: int) -> bool:
    """Whether the sentence of a place reports what the text does state: `it does mention that ...`."""
    begin = next((p + 1 for p in range(place - 1, -1, -1) if heard.tokens[p].form in _ENDS), 0)
    own = heard.segment[place] if heard.segment[place] in heard.denied else None
    spoken = {heard.tokens[p].word for p in range(begin, place) if heard.segment[p] != own}
    return bool(spoken & TELLING) and not spoken & DOUBTS


def _bare(heard: Heard, place: int) -> bool:
    """Whether common words stand alone, as an answer would: `not stated, but a painter`."""
    number = heard.segment[place]
    here = [token for token, where in zip(heard.tokens, heard.segment, strict=True) if where == number]
    spoken, claims = {token.word for token in here}, [token for token in here if token.claims]
    known = any(token.form in heard.item.passage.holds for token in claims)
    short = len(claims) <= 2 and all(token.kind == "word" for token in claims)
    return known and (bool(spoken & DOUBTS) or (short and not spoken & (_SPEAKERS | TELLING | SOURCES)))


def _clause_of(heard: Heard, place: int) -> bool:
    """Whether other claims stand in the segment of a place: the text's own statement, not a bare name.

    What stands in brackets belongs to what is before them, unless that denies: `the year it was opened (1876)`.
    """
    number = heard.segment[place]
    opened = place > 0 and heard.tokens[place - 1].form == "(" and number - 1 not in heard.denied
    return any(
        heard.segment[p] in (number, number - opened)
        and heard.part[p] in ("new", "asked")
        and heard.tokens[p].kind == "word"
        for p in range(len(heard.tokens))
    )
