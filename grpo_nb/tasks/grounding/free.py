"""Judges replies and summaries: whether one has the meaning and the roles of the right text, and nothing made up.

Words alone do not separate `Mira directed it` from `It directed Mira`. An answer is read clause by clause: a clause
that is denied must be denied by the source or the right text, too; who does what is compared in its order, passives
made active; and words must stand together as in the source or the right text, or have words of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from grpo_nb.tasks.grounding.claims import Token, content, tokenise
from grpo_nb.tasks.grounding.framing import said
from grpo_nb.tasks.grounding.items import Verdict
from grpo_nb.tasks.grounding.lexicon import VARIABLE, words
from grpo_nb.tasks.grounding.passages import Passage, gist, passage, squeeze
from grpo_nb.tasks.grounding.quotes import QUOTE_WORDS

COPIED = 0.8
"""An answer that holds this share of the words of a source longer than a quotation repeats it."""
TAKEN = 0.5
"""Share, among the words that only the hallucinated text has, that an answer must stay below."""
COHERENT = 0.34
"""Share of neighbouring words, among those of source and right text, that must stand together there in the same order.
"""
ECHO = (0.7, 0.55)
"""An answer of which this share of words is the right text's own repeats that: it keeps its order, in this share."""
BROKEN = 0.15
"""Increase of that share for each article or preposition that stands where none can."""
UNSURE = 0.08
"""Distance below the needed share within which the rules are undecided; an answer further below is no text at all."""
_OPENERS = frozenset(words("try watch see check consider also look read listen enjoy meet then maybe perhaps"))
_WITHIN = 4
_ENDS = frozenset(".;:!?")
_BREAKING = frozenset(words("but and while whereas although though which who because since"))
_PLACING = frozenset(words("of in from at on by with for to near during since between under as about"))
_ARTICLES = frozenset(("a", "an", "the"))
_FINITE = frozenset(words("is was were are will would has had can could should may might does did and or but"))
_UNPHRASED = _FINITE | frozenset(words("of in from at on by with for to it he she they that which who a an the"))
_BEING = frozenset(words("is are was were been be being"))


@dataclass(frozen=True)
class Reference:
    """Reference of a reply or a summary, each text parsed once."""

    right: str
    hallucinated: str
    asked: str
    source: str

    @cached_property
    def passage(self) -> Passage:
        """The source."""
        return passage(self.source)

    @cached_property
    def of_right(self) -> frozenset[str]:
        """Claims of the right text alone."""
        return _held(self.right) - _held(self.hallucinated)

    @cached_property
    def of_hallucinated(self) -> frozenset[str]:
        """Claims of the hallucinated text alone."""
        return _held(self.hallucinated) - _held(self.right)

    @cached_property
    def known(self) -> frozenset[str]:
        """Claims that an answer may make."""
        return self.told | _held(self.asked)

    @cached_property
    def told(self) -> frozenset[str]:
        """Claims of source and right text."""
        return self.passage.holds | _held(self.right)

    @cached_property
    def clauses(self) -> tuple["Clause", ...]:
        """The clauses of the right text and of the source."""
        return (*_clauses(tokenise(self.right)), *(c for s in self.passage.sentences for c in _clauses(s.tokens)))

    @cached_property
    def orders(self) -> dict[tuple[str, str], bool]:
        """Pairs of claims that stand near each other in the right text or a sentence of the source, in their order."""
        texts = [*_sentences(tokenise(self.right)), *(sentence.tokens for sentence in self.passage.sentences)]
        return {pair: True for tokens in texts for pair in _pairs(_active(tokens))}

    def has_behind(self, one: str, other: str) -> bool:
        """Whether a sentence of the right text or the source has a claim only after another one."""
        lines = (*(_line(tokens) for tokens in _sentences(tokenise(self.right))), *self._lines)
        return any(one in line and other in line and line.index(other) < line.index(one) for line in lines)

    @cached_property
    def _lines(self) -> tuple[list[str], ...]:
        return tuple(_line(sentence.tokens) for sentence in self.passage.sentences)

    @cached_property
    def evidence(self) -> frozenset[int]:
        """The sentences of the source that share most with the right text."""
        right = gist(squeeze(self.right))
        wanted = right - gist(squeeze(self.asked)) or right
        shared = [len(wanted & sentence.gist) for sentence in self.passage.sentences]
        least = max(1.0, max(shared, default=0) / 2)
        return frozenset(place for place, count in enumerate(shared) if count >= least)


class Clause(NamedTuple):
    """Claims of one clause, and whether it denies them."""

    holds: frozenset[str]
    denies: bool


@lru_cache(maxsize=512)
def reference(right: str, hallucinated: str, asked: str, source: str) -> Reference:
    """The reference of these texts."""
    return Reference(right, hallucinated, asked, source)


def judge_free(answer: str, share: float, about: Reference) -> Verdict:
    """Whether a reply or a summary has the meaning of the right one.

    Of the words that only the right text has it holds `share`, of those that only the hallucinated one has less than
    half, and a smaller part than of the right one's. A rule sees nearness to the references, not truth: a right answer
    in quite other words is wrong.
    """
    tokens = tokenise(said(answer, ""))
    ours = frozenset(token.form for token in content(tokens))
    if cause := _strayed(ours, share, about) or _repeats(ours, about):
        return Verdict("wrong", cause)
    if squeeze(answer) == squeeze(about.right):
        return Verdict("correct")
    if cause := _invented(tokens, about) or _denies(tokens, about):
        return Verdict("wrong", cause)
    if _swapped(tokens, about):
        return Verdict("wrong", "it turns the roles round")
    return _ordered(tokens, about)


def copied(answer: str, source: str, whole: bool = False) -> bool:
    """Whether an answer is the source with something around it, or, unless `whole`, a stretch of it."""
    words, text = squeeze(answer), passage(source).squeezed
    return len(words.split()) >= 5 and (text.strip() in words or (not whole and f" {words} " in text))


def _strayed(ours: frozenset[str], share: float, about: Reference) -> str:
    held = len(about.of_right & ours) / len(about.of_right) if about.of_right else None
    taken = len(about.of_hallucinated & ours) / len(about.of_hallucinated) if about.of_hallucinated else 0.0
    if taken >= TAKEN:
        return "it says what the hallucinated text says"
    if held is None:
        near = len(ours & _held(about.right)) / max(1, len(ours | _held(about.right)))
        far = len(ours & _held(about.hallucinated)) / max(1, len(ours | _held(about.hallucinated)))
        return "" if near > far else "it is nearer to the hallucinated text"
    return "" if held >= share and held > taken else "it says too little of what the right text says"


def _invented(tokens: Sequence[Token], about: Reference) -> str:
    found = [
        token.word
        for token in tokens
        if token.kind in ("name", "number") and token.form not in about.known and token.word not in _OPENERS
    ]
    return f"'{' '.join(found)}' is not in the source" if found else ""


def _repeats(ours: frozenset[str], about: Reference) -> str:
    rough = gist(about.passage.squeezed)
    if len(about.passage.squeezed.split()) <= QUOTE_WORDS[1] or len(ours) < COPIED * len(rough) / 2:
        return ""  # a source has at least half as many claims as stems: a long one is not read for a short answer
    source = about.passage.holds
    return "it repeats the source" if len(source & ours) >= COPIED * len(source) else ""


def _denies(tokens: Sequence[Token], about: Reference) -> str:
    for clause in _clauses(tokens):
        if len(clause.holds) < 2:
            continue
        same, other = (
            max(
                (len(clause.holds & c.holds) / len(clause.holds) for c in about.clauses if c.denies is denies),
                default=0.0,
            )
            for denies in (clause.denies, not clause.denies)
        )
        if other > same and other >= 0.6:
            return "it denies what the source says, or says what the source denies"
    return ""


def _swapped(tokens: Sequence[Token], about: Reference) -> bool:
    """Whether the answer makes the subject of somebody who is the object in the source."""
    for sentence in _sentences(tokens):
        line = _active(sentence)
        for place, (one, verb) in enumerate(pairwise(line)):
            before = line[place - 1].word if place else ""
            if not (one.claims and one.kind != "number" and not one.owns and _verb(verb)) or before in _PLACING:
                continue
            if (one.form, verb.form) not in about.orders and about.has_behind(one.form, verb.form):
                return True
        if any(_verb(verb) and _takes_other(verb, one, about) for verb, one in pairwise(content(line))):
            return True
    return False


def _takes_other(verb: Token, one: Token, about: Reference) -> bool:
    """Whether a name comes right after a verb that another name follows in the source, and this one only later."""
    if one.kind != "name" or (verb.form, one.form) in about.orders or not about.has_behind(one.form, verb.form):
        return False
    return any((verb.form, name) in about.orders for name in about.passage.names if name != one.form)


def _ordered(tokens: Sequence[Token], about: Reference) -> Verdict:
    """Verdict by the share of an answer's claims from source and right text that keep their order there."""
    pairs = [pair for sentence in _sentences(tokens) for pair in _neighbours(_active(sentence), about)]
    if len(pairs) < 3:
        return Verdict("correct")
    share = sum(pairs) / len(pairs)
    ours = {token.form for token in content(tokens)}
    echoes = len(ours & _held(about.right)) > ECHO[0] * len(ours)
    needed = ECHO[1] + BROKEN * _breaks(tokens) if echoes else COHERENT
    if share >= needed:
        return Verdict("correct")
    if share < needed - UNSURE:
        return Verdict("wrong", "its words stand in no order that the source or the right text has")
    return Verdict("undecided", f"{share:.0%} of its neighbouring words stand in an order that the source has")


def _breaks(tokens: Sequence[Token]) -> int:
    """Articles and prepositions with no phrase after them: `the to`, `of was`, a preposition at the end."""
    line = [*(token for token in tokens if token.form not in ("'", "-")), Token(".", "mark")]
    return sum(
        (one.word in _ARTICLES and (other.kind == "mark" or other.word in _UNPHRASED))
        or (one.word in _PLACING and (other.kind == "mark" or other.word in _FINITE))
        for one, other in pairwise(line)
    )


def _neighbours(line: Sequence[Token], about: Reference) -> Iterator[bool]:
    """For each two neighbouring claims of source and right text, whether they stand there in the same order.

    A preposition or a hyphen between them reverses it: `a drama from 1999` is a 1999 drama.
    """
    places = [place for place, token in enumerate(line) if token.claims and token.form in about.told]
    for place, other in pairwise(places):
        pair = line[place].form, line[other].form
        turned = any(token.word in _PLACING or token.form == "-" for token in line[place + 1 : other])
        if pair[0] != pair[1] and other - place <= _WITHIN:
            yield pair in about.orders or (turned and pair[::-1] in about.orders)


def _verb(token: Token) -> bool:
    return token.kind == "word" and (token.word.endswith("ed") or (token.word in VARIABLE and token.word != token.form))


def _clauses(tokens: Sequence[Token]) -> Iterator[Clause]:
    part: list[Token] = []
    for token in (*tokens, Token(".", "mark")):
        if token.form in _ENDS or token.form == "," or token.word in _BREAKING:
            if any(t.claims for t in part):
                yield Clause(frozenset(t.form for t in part if t.claims), any(t.kind == "not" for t in part))
            part = []
        else:
            part.append(token)


def _sentences(tokens: Sequence[Token]) -> Iterator[tuple[Token, ...]]:
    part: list[Token] = []
    for token in (*tokens, Token(".", "mark")):
        if token.form in _ENDS:
            if part:
                yield tuple(part)
            part = []
        else:
            part.append(token)


def _active(tokens: Sequence[Token]) -> list[Token]:
    """A sentence with its passives turned round: `it was directed by Mira` as `Mira directed it`."""
    line = list(tokens)
    by = next((place for place, token in enumerate(line) if token.word == "by"), None)
    if by is None:
        return line
    being = next((place for place in range(by - 1, max(-1, by - 4), -1) if line[place].word in _BEING), None)
    end = next(
        (
            place
            for place in range(by + 1, len(line))
            if not line[place].claims and line[place].word not in ("the", "a", "an")
        ),
        len(line),
    )
    if being is None:
        return line
    begin = next(
        (place + 1 for place in range(being - 1, -1, -1) if line[place].form == "," or line[place].word in _BREAKING), 0
    )
    return [*line[:begin], *line[by + 1 : end], *line[being + 1 : by], *line[begin:being], *line[end:]]


def _line(tokens: Sequence[Token]) -> list[str]:
    return [token.form for token in content(_active(tokens))]


def _pairs(tokens: Sequence[Token]) -> Iterator[tuple[str, str]]:
    line = [token.form for token in content(tokens)]
    for place, one in enumerate(line):
        for other in line[place + 1 : place + 1 + _WITHIN]:
            yield one, other


@lru_cache(maxsize=4096)
def _held(text: str) -> frozenset[str]:
    return frozenset(token.form for token in content(tokenise(text)))
