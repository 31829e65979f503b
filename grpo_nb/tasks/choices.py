"""Finds the option that an answer names: by its letter, by its text, or by stating that the text does not say.

The rules, in the order in which they apply:

1. A letter counts where it can only be a letter: alone, in brackets or before punctuation, before a word that no
   article stands before ("A because"), after "option". "A grandson" is no letter, "b." and "(b)" are.
2. An option's text counts with or without its article, accents and hyphens; so does a word that only this option has
   ("The British one", "Mary" of "Mary Smith"), unless the question has it. The longest text is found first.
3. Where an answer is taken back ("Wait, actually"; tasks/turns.py), what follows counts, if it names an option. So does
   a sentence below an answer that is a conclusion and nothing more: "So C.", "It is C.", "C is correct."
4. Each sentence falls into clauses. A clause that explains ("because", "while", "which"), is conditional or only
possible names nothing; a claim that is conditional or continues with "or" is no claim.
5. An option after a negation, or that is denied, is not named; where both persons are denied, the third option is. A
clause which states that the text does not say does not name the persons in it.
6. What follows "so" or "therefore" beats what comes before it. A bare first line beats what explains it.
7. Two different options that are named are none: a letter that contradicts its text, a list, "A or C".
8. A sentence that neither repeats a word of the question nor is nothing but the option counts after a marker only,
and not next to one which states that the text does not say.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from grpo_nb.tasks.mentions import MENTION, with_mentions
from grpo_nb.tasks.reading import Reading
from grpo_nb.tasks.turns import parts, sentences, without_turn
from grpo_nb.tasks.wordings import (
    ABSTENTION,
    CONCLUSIONS,
    CONDITIONS,
    CONTRASTS,
    DANGLING,
    EXPLANATIONS,
    FRAME,
    HEDGES,
    NEGATIONS,
    NOT_ABSTENTION,
    SOURCES,
    WRONG,
    folded,
    words_of,
)

MOST = 9
"""Mentions of options that are read of one clause: more name no single one."""

_RESTATED = "\u2261"
"""Put in place of the words that a question denies, and of their negation."""
_NEGATION, _HEDGE = words_of(NEGATIONS), words_of(HEDGES)
_WRONG = "|".join(WRONG)
_SOURCE = re.compile(SOURCES)
_ASIDE = re.compile(r"(?<=[@#]\d) *\(([^()]*)\)")
_TABLES = {"explain": EXPLANATIONS, "contrast": CONTRASTS, "conclude": CONCLUSIONS, "condition": CONDITIONS}
_CONNECTOR = re.compile(
    "|".join(rf"(?P<{kind}>{words_of(table).pattern})" for kind, table in _TABLES.items())
    + r"|(?P<relative>(?<=[@#]\d )who\b|(?<=, )(?:who|which)\b)|(?P<end>;)"
    r"|(?P<comma>[,:()]| - |(?<![@#]\d )\band\b(?= [@#]\d \w))"
)
_TURNS = {"explain": True, "relative": True, "condition": True, "end": False, "contrast": False, "conclude": False}
"""Whether a clause explains, by its opening connector; a comma changes nothing."""
_NOT_NEGATIONS = re.compile(r"\b(?:no doubt|without (?:a |any )?doubt|not only|none other than|no question|if not)\b")
_BETWEEN = r"(?:(?:necessarily|be|been|to|the|a|option|about|that|it|is|was|either|just|simply|answer|because|of) )*"
_AMONG = re.compile(r"(?:between|among|of|out of|from among) (?=.*[@#]\d.*[@#]\d)")
_LISTED = re.compile(r"^(?:(?:and|or|nor|/|&) (?:option )?[@#]\d )+")
_JOINS = re.compile(r"[@#]\d(?: \w+)?\s*(?:and|or|,|/|&|as well as|plus|\+)\s*(?:\w+ )?[@#]\d|\bby [@#]\d")
_OR = re.compile(r"[@#]\d(?: \w+)? or\b|\bor (?:\w+ ){0,2}?[@#]\d|[@#]\d ?/|/ ?[@#]\d")
_IDENTIFIES = re.compile(r"[@#]\d (?:is|was|must be|has to be|would be) (?:\w+ly )?the\b|\b(?:is|was|be) [@#]\d$")
_OTHER, _PRONOUN = re.compile(r"\bother\b"), re.compile(r"\b(?:he|she|they|it|that (?:person|one|man|woman))\b")
_ASSERTS = re.compile(r"^it (?:is|must be|has to be) [@#]\d|[@#]\d is (?:the )?(?:correct|right|best|better)\b")
_AUXILIARY = r"(?:is|was|are|were|did|does|do|has|had|can|could|would|should)"


@dataclass
class Claim:
    """Claims of a clause, or a sentence, about the options."""

    named: set[int] = field(default_factory=set)
    weak: set[int] = field(default_factory=set)
    """Options named in words that neither repeat the question nor are nothing but the option."""
    denied: set[int] = field(default_factory=set)
    hedged: set[int] = field(default_factory=set)
    met: set[int] = field(default_factory=set)
    """Options that are mentioned at all."""
    abstains: bool = False
    broken: bool = False
    """Whether a condition or an "or" takes the claim back."""
    bare: bool = False
    """Whether it is an option, with no more around it than "it is" or "the answer"."""
    concludes: bool = False

    @property
    def told(self) -> bool:
        """Whether it claims anything about an option."""
        return bool(self.named or self.weak or self.denied or self.hedged or self.abstains or self.broken)

    def chosen(self, unknown: int, marked: bool = True) -> set[int]:
        """Options that it claims are right; weak names count after a marker, where nothing else is claimed."""
        strong = self.named | ({unknown} if self.abstains else set())
        return strong or (self.weak if marked else set())

    def join(self, part: "Claim", unknown: int) -> None:
        """Add the claims of the next clause; to call one person possible after a claim for another cancels it."""
        doubt = len(part.hedged - {unknown}) == 1 and bool(self.chosen(unknown) - part.hedged) and not part.abstains
        self.broken |= part.broken or doubt
        self.abstains |= part.abstains
        self.named |= part.named
        self.weak |= part.weak
        self.denied |= part.denied
        self.hedged |= part.hedged
        self.met |= part.met


@dataclass(frozen=True)
class _Item:
    """Item that the clauses of an answer are compared with."""

    unknown: int
    asked: frozenset[str]
    """Beginnings of the question's words."""
    denies: str
    """The word that the question denies ("Who was not polite?"), or empty."""
    hedges: frozenset[str]
    """Words of doubt that are the question's own ("Who could ...?")."""
    whose: bool
    frame: frozenset[str]
    """Words around an option that only present it as the answer: the options' own too."""


def choose(answer: Reading | str, options: Sequence[str], unknown: int, question: str = "") -> int | None:
    """Index of the one option that an answer names, or None where it names none, or two different ones.

    Args:
        answer: a reading, or the text that follows `Answer:`.
        options: three texts; two name persons, the one at `unknown` states that the context is ambiguous.
        question: the question; it separates an answer in a sentence from a sentence about the persons.

    >>> options = ["The grandfather", "The grandson", "Not known"]
    >>> [choose(text, options, 2) for text in ("b) the grandson", "A or B", "It cannot be known if A", "A, as B rang")]
    [1, None, 2, 0]
    """
    text, marked = (answer, True) if isinstance(answer, str) else (answer.answer, bool(answer.marker))
    item = _item(question, unknown, tuple(options))
    first, *later = parts(with_mentions(text, options, unknown, question), within=True)
    rest = "" if isinstance(answer, str) else with_mentions(answer.rest, options, unknown, question)
    readings = [
        *(_settled(_claims(without_turn(part), item), unknown, False) for part in reversed(later)),
        _concluded(rest, item),
        _settled(_claims(first, item), unknown, marked or not question),
    ]
    found = next((found for found in readings if found is not None), set())
    return next(iter(found)) if len(found) == 1 else None


@lru_cache(maxsize=4096)
def _item(question: str, unknown: int, options: tuple[str, ...]) -> _Item:
    words = re.findall(r"[\w']+", folded(question))
    content = [word for word in words if word not in FRAME | DANGLING and word not in ("whose", "which", "not")]
    negation = next((place for place, word in enumerate(words) if word in ("not", "cannot", "never")), len(words))
    denied = next((word for word in words[negation + 1 :] if word in content), "")
    hedges = frozenset(_HEDGE.findall(folded(question)))
    own = frozenset(re.findall(r"[\w']+", folded(" ".join(options))))
    asked = frozenset(word[:4] for word in content)
    return _Item(unknown, asked, denied, hedges, "whose" in words, FRAME | own)


# From sentences to claims


def _claims(text: str, item: _Item) -> list[Claim]:
    return [claim for sentence in sentences(text) if (claim := _sentence(sentence, item)).told]


def _sentence(sentence: str, item: _Item) -> Claim:
    """What a sentence claims; a conclusion that claims something replaces what comes before it."""
    claim, explaining, concluding, bare = Claim(), False, False, True
    sentence = " ".join(_ASIDE.sub(_aside, _SOURCE.sub(" ", sentence)).split())
    for kind, words in _main(_clauses(sentence), item):
        concluding = kind == "conclude" or (concluding and kind == "comma")
        explaining = _explains(kind, explaining, bare and bool(claim.named))
        if kind == "condition":
            claim.broken |= bool(claim.named or claim.weak)
        if explaining:
            _explained(claim, kind, words, item)
            continue
        part = _clause(words, item)
        bare &= part.bare
        if claim.abstains and kind == "comma" and re.search(r"\w or ", words):
            continue  # "it does not say which, A or B"
        if concluding:
            _resolve(part, words, claim.met - {item.unknown}, item)
            if part.told:
                claim, concluding = Claim(denied=claim.denied, met=claim.met, concludes=True), False
                bare = part.bare
        claim.join(part, item.unknown)
        claim.broken |= bool(claim.chosen(item.unknown)) and words.startswith("or ")
    claim.bare = bare and bool(claim.named)
    return claim


def _explains(kind: str, before: bool, named: bool) -> bool:
    """Whether a clause explains a choice: as the one before it, unless its connector changes that."""
    return (_TURNS[kind] or (kind == "end" and named)) if kind in _TURNS else before


def _aside(match: re.Match[str]) -> str:
    """Text in brackets after an option: an explanation is dropped; another option, or an "or", is not."""
    words = set(re.findall(r"[\w']+", MENTION.sub(" ", match[1])))
    kept = match[1].startswith(("or ", "and ")) or (MENTION.search(match[1]) and words <= FRAME)
    return f" , {match[1]} , " if kept else " "


def _explained(claim: Claim, kind: str, words: str, item: _Item) -> None:
    """Take in a clause that explains: it names nothing, but "which" may say that the name before it is the answer."""
    claim.met |= _met(words)
    told = claim.named or claim.abstains or _NEGATION.search(words)
    if kind == "relative" and item.asked & _stems(words) and not told:
        claim.named, claim.weak = claim.weak, set()


def _main(clauses: list[tuple[str, str]], item: _Item) -> list[tuple[str, str]]:
    """The main clause of a sentence that begins with a subordinate one: the last that claims something."""
    if len(clauses) < 2 or clauses[0][0] not in ("explain", "condition") or "conclude" in dict(clauses):
        return clauses
    for place in range(len(clauses) - 1, 0, -1):
        kind, words = clauses[place]
        part = _clause(words, item)
        if kind in ("comma", "contrast") and (part.chosen(item.unknown) or part.hedged):
            return [] if clauses[0][0] == "condition" else [("comma", words), *clauses[place + 1 :]]
    return clauses


def _clauses(sentence: str) -> list[tuple[str, str]]:
    """The clauses of a sentence, each with the kind of its opening."""
    found, start, kind = [], 0, "start"
    for match in _CONNECTOR.finditer(sentence):
        if words := sentence[start : match.start()].strip():
            found.append((kind, words))
            kind = "comma"
        if match.lastgroup != "comma" or kind not in _TURNS or kind == "end":
            kind = str(match.lastgroup)
        start = match.end()
    if words := sentence[start:].strip(" ."):
        found.append((kind, words))
    return found


def _clause(words: str, item: _Item) -> Claim:
    """Claims of a single clause."""
    words, opposite = _without_the_questions(_NOT_NEGATIONS.sub(" ", words), item)
    claim, mentions = Claim(met=_met(words)), list(MENTION.finditer(words))[:MOST]
    if _AMONG.match(words):
        return claim
    abstention = _abstention(words)
    if abstention is not None:
        claim.abstains = True
        mentions = [m for m in mentions if m[0][0] == "@" and m.start() < abstention]
    for mention in mentions:
        _place(claim, mention, words, item)
    if abstention is None and opposite:
        claim.named.clear()
    if set(_HEDGE.findall(words)) - item.hedges:
        claim.hedged, claim.named = claim.named, set()
    claim.broken = bool(claim.named) and _OR.search(words) is not None
    _weigh(claim, mentions, words, item)
    return claim


def _weigh(claim: Claim, mentions: Sequence[re.Match[str]], words: str, item: _Item) -> None:
    """Decide whether the options that a clause mentions are its answer or only its subject."""
    spoken = MENTION.sub(" ", _NEGATION.sub(" ", words) if claim.denied else words)
    rest = set(re.findall(r"[\w']+", spoken))
    letters = any(mention[0][0] == "@" for mention in mentions)
    claim.bare = rest <= item.frame
    repeats = (not item.denies and bool(item.asked & _stems(words))) or _RESTATED in words
    if rest <= item.frame or letters or repeats or _IDENTIFIES.search(words):
        if not letters:
            claim.named = _subject(claim.named, mentions, words)
    else:
        claim.named, claim.weak = set(), claim.named


def _without_the_questions(words: str, item: _Item) -> tuple[str, bool]:
    """A clause without the negation that the question has itself; and whether the clause lacks it."""
    if not item.denies:
        return words, False
    stem = re.escape(item.denies[:5])
    restated = re.sub(rf"\b(?:{_AUXILIARY} )?(?:not|never|cannot) (?:\w+ )?{stem}\w*", f" {_RESTATED} ", words)
    return restated, restated == words and re.search(rf"\b{stem}", words) is not None


def _abstention(words: str) -> int | None:
    """Position where a clause states that the text does not say, or None."""
    hidden = NOT_ABSTENTION.sub(lambda m: "~" * len(m[0]), words)
    for match in ABSTENTION.finditer(hidden):
        before = hidden[: match.start()]
        if not re.search(rf"[@#]\d (?:(?:{_AUXILIARY}|also|be) ){{0,2}}$", before):
            return match.start()  # else it is about an option: "B is not supported"
    return None


def _place(claim: Claim, mention: re.Match[str], words: str, item: _Item) -> None:
    """Sort one mention of a clause: named, denied, or neither."""
    index, before, after = int(mention[1]), words[: mention.start()], words[mention.end() :].strip()
    if index == item.unknown and mention[0][0] == "#":
        claim.abstains |= not _denied_after(after, item)
        return
    listed = re.search(r"[@#](\d)[ ,]*(?:or|nor|and|/)(?: option)? $", before) and claim.denied and not claim.named
    if listed or re.search(rf"{_NEGATION.pattern} {_BETWEEN}$", before) or _denied_after(after, item):
        claim.denied.add(index)
    elif (claim.named or not _NEGATION.search(before)) and (item.whose or not after.startswith("'s ")):
        claim.named.add(index)


def _denied_after(after: str, item: _Item) -> bool:
    """Whether the text after an option denies it: "is not right", "did not" and the question's verb, "is wrong"."""
    after = _LISTED.sub("", after)
    if re.match(rf"(?:is|was|are|were|seems|would be) (?:\w+ )?(?:{_WRONG})\b", after):
        return True
    match = re.match(rf"(?:\w+ ){{0,6}}?(?:{_AUXILIARY} not|cannot)\b", after)
    if match is None or MENTION.search(match[0]):
        return False
    rest = re.findall(r"[\w']+", after[match.end() :])
    near = match[0].count(" ") <= 2
    return (
        bool({word[:4] for word in rest} & item.asked)
        or not rest
        or (near and (rest[0] in FRAME or rest[0][:5] in ("suppo", "menti", "state")))
    )


def _subject(named: set[int], mentions: Sequence[re.Match[str]], words: str) -> set[int]:
    """Of two persons in a clause that repeats the question, the one that it begins with, if nothing joins the two."""
    places = [m for m in mentions if int(m[1]) in named]
    if len(named) < 2 or _JOINS.search(words):
        return named
    starts = set(re.findall(r"[\w']+", words[: places[0].start()])) <= FRAME
    between = words[places[0].end() : places[1].start()].strip()
    return {int(places[0][1])} if starts and between else named


def _resolve(part: Claim, words: str, people: set[int], item: _Item) -> None:
    """A conclusion about "she" or "the other one": the one person that the sentence has mentioned."""
    if part.told or len(people) != 1:
        return
    asked = bool(item.asked & _stems(words))
    if _NEGATION.search(words):
        part.denied = set(people) if asked else set()
    elif _OTHER.search(words):
        part.named = set(range(3)) - people - {item.unknown}
    elif _PRONOUN.search(words) and (asked or set(re.findall(r"[\w']+", words)) <= FRAME):
        part.named = set(people)


def _met(words: str) -> set[int]:
    return {int(index) for index in MENTION.findall(words)}


def _stems(words: str) -> set[str]:
    return {word[:4] for word in re.findall(r"[\w']+", words)}


# From claims to the option


def _settled(claims: Sequence[Claim], unknown: int, marked: bool) -> set[int] | None:
    """The options that a text names: one, or several that contradict each other; None: it names none."""
    telling = [claim for claim in claims if claim.chosen(unknown, marked)]
    if not telling:
        return _left_over(claims, unknown)
    if any(claim.broken for claim in telling):
        return set()
    if concluding := [claim for claim in telling if claim.concludes]:
        return concluding[-1].chosen(unknown, marked)
    chosen = [claim.chosen(unknown, marked) for claim in telling]
    if marked or telling[0].bare:
        return chosen[0].union(*(found for found, claim in zip(chosen, telling, strict=True) if claim.bare))
    return set().union(*chosen)


def _concluded(text: str, item: _Item) -> set[int] | None:
    """The option that the lines below an answer end in: "so C", "it is C", "C is right", and nothing more around it."""
    for sentence in reversed(sentences(text)):
        claim = _sentence(sentence, item)
        if claim.concludes and claim.abstains and sentence.endswith(f"#{item.unknown}"):
            return {item.unknown}
        if claim.bare and not claim.broken and (claim.concludes or _ASSERTS.search(sentence)) and len(claim.named) == 1:
            return claim.named
    return None


def _left_over(claims: Sequence[Claim], unknown: int) -> set[int] | None:
    """The third option where the two others are denied."""
    denied = set().union(*(claim.denied for claim in claims))
    hedged = set().union(*(claim.hedged for claim in claims))
    return set(range(3)) - denied if len(denied) == 2 and not hedged - denied else None
