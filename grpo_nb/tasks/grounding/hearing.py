"""An answer as it is heard: which part each of its tokens plays, in which clause, and what is denied."""

from collections.abc import Iterator, Sequence

from grpo_nb.tasks.grounding.claims import Token, tokenise
from grpo_nb.tasks.grounding.finding import found, scattered
from grpo_nb.tasks.grounding.framing import said, shown, unasked
from grpo_nb.tasks.grounding.items import Item
from grpo_nb.tasks.grounding.lexicon import BENIGN, CLASSES, CLASSIFIERS, DENIALS, POLES, UNIVERSAL, words
from grpo_nb.tasks.grounding.stems import stem
from grpo_nb.tasks.grounding.thesaurus import any_alike, is_adverb, kin, synonyms

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

LEAST = 5
RESTATED = 0.7
"""The share of a question's claims that an answer has which restates it."""
_LIFE = frozenset((stem("born"), stem("died")))
_DEFINITE = frozenset(words("the this that its"))
_OTHERS = frozenset(words("other others else opposite"))
_BEING = frozenset(words("was were is are be been being"))
_AUXILIARIES = _BEING | frozenset(words("had has have did to could would"))
_HONORIFICS = frozenset(words("mr mrs ms miss dr prof professor"))


class Heard:
    """An answer against its item: the part that each token plays, and the segments that tokens stand in."""

    def __init__(self, answer: str, about: Item, framed: bool = True) -> None:
        self.item = about
        told = said(answer, about.question) if framed else unasked(shown(answer), about.question)
        self.tokens = _unlisted(_declared(_common(tokenise(told), about)), about)
        self.segment = _segments(self.tokens)
        self.denied = _denied(self.tokens, self.segment)
        self.gold = found(self.tokens, about)
        loose = set() if self.gold else scattered(self.tokens, about)
        self.scattered = bool(loose)
        """Whether it gives the words of a long right answer in another order."""
        self.gold |= loose
        self._gold_forms = {token.form for token in about.gold}
        self.part = [self._part(place) for place in range(len(self.tokens))]

    def _part(self, place: int) -> str:
        token = self.tokens[place]
        if place in self.gold:
            return "gold"
        if not token.claims:
            return token.kind
        if token.word in UNIVERSAL and self.gold and place > max(self.gold) and token.word not in _OTHERS:
            return "small"
        if token.kind == "word" and is_adverb(token.word) and token.word not in DENIALS:
            return "small"
        if self._again(token):
            return "asked"
        if (
            token.word in _HONORIFICS
            or (token.form == "2" and (self.item.compared or self.item.chooses or self.item.yes_no))
            or (token.form in FRAMING and token.kind != "name" and token.form not in self.item.others)
            or (token.word in CLASSIFIERS and token.kind == "word" and self._word(place + 1) == "of")
            or self._points(place)
            or (token.kind == "word" and token.word in CLASSES and place and self.tokens[place - 1].word in _DEFINITE)
            or (token.form in self._gold_forms and {place - 1, place + 1} & self.gold)
            or (
                token.kind == "number" and self._word(place + 1) in ("sentence", "paragraph", "line", "passage", "part")
            )
            or self._respells(place)
            or (token.kind == "name" and token.form in self._gold_forms and self.item.named and self.gold)
            or self._abbreviates(place)
            or (token.form in _LIFE and self.item.passage.lives)
        ):
            return "benign"
        return "new"

    def _respells(self, place: int) -> bool:
        """Whether a name is the right answer's in another language, with that in brackets: `Lyonese (Lyon)`."""
        form = self.tokens[place].form
        glossed = self._word(place + 1) == "" and place + 2 in self.gold and self.tokens[place + 1].form == "("
        return glossed and len(form) > 5 and self.tokens[place + 2].form[:5] == form[:5]

    def _abbreviates(self, place: int) -> bool:
        """Whether brackets after the right answer hold its initials: `World Health Organization (WHO)`."""
        first = place - 1
        while first - 1 in self.gold:
            first -= 1
        letters = "".join(token.word[:1] for token in self.tokens[first : place - 1])
        return self.tokens[place - 1].form == "(" and len(letters) > 1 and self.tokens[place].word == letters

    def _word(self, place: int) -> str:
        return self.tokens[place].word if place < len(self.tokens) else ""

    def _again(self, token: Token) -> bool:
        """Whether a token repeats a word of the question, or has its meaning."""
        if token.form in self.item.asked:
            return True
        if token.word in POLES or token.word.endswith("est"):
            return POLES.get(token.word, 0) in [POLES.get(word) for word in self.item.asked_words]
        if token.kind != "word" or token.form in self.item.others:
            return False
        echoes = not kin(token.form).isdisjoint(self.item.asked_claims - self.item.kinds)
        return echoes or not synonyms(token.form).isdisjoint(self.item.kinds)

    def _points(self, place: int) -> bool:
        """Whether a rank stands for one of the two things that a question names: `the first and the second`."""
        following = self.tokens[place + 1] if place + 1 < len(self.tokens) else None
        alone = following is None or not following.claims or following.form in self.item.asked
        two = self.item.compared or self.item.chooses or self.item.yes_no
        return bool(two) and self.tokens[place].form in ("1th", "2th", "former", "latter") and alone

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
            ends = place and self.tokens[place - 1].owns
            if first is not None and (ends or not (new and self._class(place) == self._class(first))):
                yield first, place - 1
                first = None
            if new and first is None:
                first = place

    def _class(self, place: int) -> str:
        return "name" if self.tokens[place].form in self.item.passage.names else self.tokens[place].kind

    @property
    def restates(self) -> bool:
        """Whether it is most of the question as a statement that the right answer fills."""
        held = {token.form for token, part in zip(self.tokens, self.part, strict=True) if part == "asked"}
        asked = self.item.asked_claims - set(self.item.essential)
        return "new" not in self.part and len(asked) > LEAST and len(held) >= RESTATED * len(asked)

    def sentence(self, place: int) -> range:
        """The places of the sentence that a place is in."""
        begin = next((p + 1 for p in range(place - 1, -1, -1) if self.tokens[p].form in ".;!?"), 0)
        end = next((p for p in range(place, len(self.tokens)) if self.tokens[p].form in ".;!?"), len(self.tokens))
        return range(begin, end)

    def between(self, first: int, last: int) -> list[str]:
        """The words and marks strictly between two places."""
        return [token.word or token.form for token in self.tokens[first + 1 : last]]

    def forms(self, first: int, last: int) -> list[str]:
        """The claims from one place to another."""
        return [token.form for token in self.tokens[first : last + 1] if token.claims]


def _common(tokens: Sequence[Token], about: Item) -> tuple[Token, ...]:
    """The tokens, those that only look like names as words: the source has them in lower case, and not as names."""
    plain = about.passage.common
    return tuple(
        token._replace(kind="word") if token.kind == "name" and token.form in plain else token for token in tokens
    )


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
    """The number of the segment that each token is in: clauses, as far as marks and conjunctions show them."""
    numbers, number = [], 0
    for place, token in enumerate(tokens):
        word, before = token.word, tokens[place - 1] if place else None
        negates = token.kind == "not" and before is not None and (before.kind == "mark" or before.word == "and")
        following = tokens[place + 1].word if place + 1 < len(tokens) else ""
        points = word == "that" and following in CLASSIFIERS
        if token.form in _BREAKS or (word in _BREAKING and not points) or negates:
            number += 1
        numbers.append(number)
    return numbers


def _denied(tokens: Sequence[Token], segment: Sequence[int]) -> set[int]:
    """The segments that are denied."""
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


def relative(heard: Heard, first: int) -> bool:
    """Whether a claim stands in a relative clause of the right answer: `X, who built the mint`."""
    opens = next(
        p for p in range(heard.segment.index(heard.segment[first]), first + 1) if heard.tokens[p].kind != "mark"
    )
    before = next((p for p in range(opens - 1, -1, -1) if heard.tokens[p].kind != "mark"), None)
    token, following = heard.tokens[opens], heard.tokens[min(opens + 1, first)]
    apposed = token.word.endswith("ed") and heard.tokens[opens - 1].form == "," and following.word in LINKS
    says = token.word in ("who", "which", "whose", "where", "when") or (token.kind == "word" and apposed)
    return says and before in heard.gold


def in_source(about: Item, form: str) -> bool:
    return any(any_alike(form, about.passage.sentences[place].holds) for place in about.near)


def singles_out(token: Token, about: Item) -> bool:
    """Whether a token names, counts, dates or ranks."""
    return (
        token.kind in ("name", "number")
        or (token.claims and token.form in about.passage.names)
        or (token.kind == "word" and len(token.word) > 5 and token.word.endswith("est"))
    )
