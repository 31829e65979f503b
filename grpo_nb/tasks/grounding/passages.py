"""A source, read once: its sentences, what each claims, where a phrase stands, and which sentences hold an answer."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from grpo_nb.tasks.grounding.claims import Token, content, plain, tokenise
from grpo_nb.tasks.grounding.lexicon import SMALL
from grpo_nb.tasks.grounding.stems import people, stem

_SENTENCE = re.compile(r"(?<=[\w)\"\u201d%'][.!?])[\"\u201d)]*\s*(?=[A-Z\"\u201c(])|\n+")
_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Z]|v|cf|Mr|Mrs|Ms|Dr|St|Jr|Sr|vs|No|Inc|Ltd|Co|Prof|Rev|Gen|Col|Capt|Lt|Sgt|Gov|Sen|Rep)\.)$"
)

_LIFE = re.compile(r"\([^()]*\b1\d{3}\b[^()]*-[^()]*\b[12]\d{3}\b[^()]*\)")
_OPENING = 16
"""Tokens at the start of a sentence within which it names its subject."""
PRONOUNS = frozenset(("it", "he", "she", "they"))
_REFERS = re.compile(
    r"(?:It|He|She|They|Its|His|Her|Their)\b"
    r"|[A-Z][a-z]+(?:ing|ed)\b[^.]*?, (?:it|he|she|they) (?!and\b|or\b)"
    r"|[A-Z][a-z]*,?(?: [a-z0-9][\w,]*){0,5}? (?:it|he|she|they|his|her|its|their)\b"
)


@dataclass(frozen=True)
class Sentence:
    """One sentence of a source."""

    text: str

    @cached_property
    def tokens(self) -> tuple[Token, ...]:
        """Tokens of the sentence; computed only where an answer must be compared with it, since this is slow."""
        return tokenise(self.text)

    @cached_property
    def squeezed(self) -> str:
        """Words of the sentence (squeeze)."""
        return squeeze(self.text)

    @cached_property
    def gist(self) -> frozenset[str]:
        """The stems of its words but function words."""
        return gist(self.squeezed)

    @cached_property
    def forms(self) -> tuple[str, ...]:
        """Claims of the sentence, in order."""
        return tuple(token.form for token in content(self.tokens))

    @cached_property
    def holds(self) -> frozenset[str]:
        """Claims of the sentence, unordered."""
        return frozenset(self.forms)

    @cached_property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """Names of several words, each as its adjacent forms."""
        found: list[list[str]] = [[]]
        for token in self.tokens:
            if token.kind == "name":
                found[-1].append(token.form)
                if token.owns:
                    found.append([])
            elif token.form not in (".", "-") and found[-1]:
                found.append([])
        return tuple(tuple(unit) for unit in found if len(unit) > 1)

    @cached_property
    def listings(self) -> frozenset[tuple[str, int]]:
        """Number of things it lists, and the number from each word before or inside the list on."""
        parts: list[list[str]] = [[]]
        last, depth = 0, 0
        for token in self.tokens:
            depth += (token.form == "(") - (token.form == ")" and depth > 0)
            if depth or token.form == ")":
                continue
            if token.form == "," or token.word == "and":
                last = len(parts) if token.word == "and" else last
                parts += [[]] if parts[-1] else []
            elif token.claims:
                parts[-1].append(token.form)
        parts = parts[: last + 1]
        found = {(form, len(parts) - place) for place, part in enumerate(parts) for form in part}
        return frozenset({("", len(parts)), *found} if last else ())

    @cached_property
    def continues(self) -> bool:
        """Whether it begins with a pronoun, and so continues the subject of the sentence before."""
        return self.squeezed.split(" ", 1)[0] in PRONOUNS

    @cached_property
    def refers(self) -> bool:
        """Whether a pronoun comes before any name: `After the war she ...`, `Her brother ...`."""
        return _REFERS.match(self.text) is not None

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of thing that it speaks on of: `The band`, `Set in Lyon, the series`, `this genus`."""
        return frozenset(
            other.form
            for one, other in pairwise(self.tokens[:_OPENING])
            if one.word in ("the", "this") and other.kind == "word"
        )

    def follows(self, first: str, second: str, within: int) -> bool:
        """Whether one form comes at most `within` claims after another."""
        places = [place for place, form in enumerate(self.forms) if form == first]
        return any(second in self.forms[place + 1 : place + 1 + within] for place in places)


@dataclass(frozen=True)
class Passage:
    """A source and what is read off it once, however often answers are compared with it."""

    sentences: tuple[Sentence, ...]

    @cached_property
    def holds(self) -> frozenset[str]:
        """Claims of all sentences."""
        return frozenset().union(*(sentence.holds for sentence in self.sentences))

    @cached_property
    def names(self) -> frozenset[str]:
        """Forms that it writes with a capital inside a sentence."""
        return frozenset(token.form for sentence in self.sentences for token in sentence.tokens if token.kind == "name")

    @cached_property
    def units(self) -> frozenset[tuple[str, ...]]:
        """Names of several words."""
        return frozenset(unit for sentence in self.sentences for unit in sentence.units)

    @cached_property
    def lower(self) -> frozenset[str]:
        """Forms that it writes in lower case somewhere."""
        return frozenset(token.form for s in self.sentences for token in s.tokens if token.kind == "word")

    @cached_property
    def common(self) -> frozenset[str]:
        """Forms that it writes in lower case, and never with a capital inside a sentence."""
        tokens = [token for sentence in self.sentences for token in sentence.tokens]
        return frozenset(token.form for token in tokens if token.kind == "word") - self.names

    @cached_property
    def lives(self) -> bool:
        """Whether it has two dates in brackets, from a birth to a death."""
        return any(_LIFE.search(plain(sentence.text)) for sentence in self.sentences)

    @cached_property
    def squeezed(self) -> str:
        """Words in lower case, without quotation marks and punctuation, single spaces, a space at both ends."""
        return f" {' '.join(sentence.squeezed for sentence in self.sentences)} "

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Start of each sentence in `squeezed`."""
        places, place = [], 1
        for sentence in self.sentences:
            places.append(place)
            place += len(sentence.squeezed) + 1
        return tuple(places)

    def having(self, forms: Collection[str]) -> frozenset[int]:
        """The sentences that hold all these forms."""
        return frozenset(i for i, sentence in enumerate(self.sentences) if set(forms) <= sentence.holds)

    def near(self, places: Collection[int]) -> frozenset[int]:
        """These sentences and their neighbours."""
        return frozenset(i for place in places for i in (place - 1, place, place + 1) if 0 <= i < len(self.sentences))

    def thread(self, places: Collection[int], loose: bool = False) -> frozenset[int]:
        """These sentences and those that continue their subject: each that begins with a pronoun, and so on.

        With `loose` also those that refer to something before without naming anything first, or by its kind, `The
        band`, and a first sentence whose pronoun has no referent.
        """
        found = set(places)
        if loose and found and self.sentences[0].refers:
            found.add(0)
        for place in places:
            while place and self._goes_on(place, loose):
                place -= 1
                found.add(place)
        for place in range(1, len(self.sentences)):
            if place - 1 in found and self._goes_on(place, loose):
                found.add(place)
        return frozenset(found)

    def peoples(self, form: str) -> bool:
        """Whether it has a country or its people, by their endings: `Malian`, `Mali`."""
        return any(not people(form).isdisjoint(people(name)) for name in self.names)

    def _goes_on(self, place: int, loose: bool) -> bool:
        sentence, before = self.sentences[place], self.sentences[place - 1]
        return sentence.continues or (loose and (sentence.refers or not sentence.kinds.isdisjoint(before.holds)))

    def preceded(self, word: str, form: str) -> bool:
        """Whether a word stands right before a form, but for articles."""
        return any(
            before.word == word and after.form == form
            for sentence in self.sentences
            for before, after in pairwise([t for t in sentence.tokens if t.word not in ("a", "an", "the")])
        )

    def spoken(self, forms: Sequence[str], places: Collection[int], exact: bool = False) -> frozenset[int]:
        """The sentences among `places` that hold the forms side by side, in their order.

        Unless it is `exact`, a name may leave out words inside: `Deanna Loveland` for `Deanna Marie Loveland`.
        """
        size = len(forms)
        wanted = tuple(forms)
        return frozenset(
            i
            for i in places
            if wanted[0] in self.sentences[i].holds
            and (
                any(self.sentences[i].forms[k : k + size] == wanted for k in range(len(self.sentences[i].forms)))
                or (size > 1 and not exact and any(within(wanted, unit) for unit in self.sentences[i].units))
            )
        )


def within(forms: Sequence[str], unit: Sequence[str]) -> bool:
    """Whether forms stand in a unit in their order."""
    rest = iter(unit)
    return all(form in rest for form in forms)


@lru_cache(maxsize=512)
def passage(text: str) -> Passage:
    """The passage that a text is."""
    return Passage(tuple(Sentence(part) for part in split(text)))


def split(text: str) -> list[str]:
    """The sentences of a text; HaluEval's sources often have no space between two of them."""
    parts, start = [], 0
    for found in _SENTENCE.finditer(text):
        if (found.end() > found.start() and "\n" in found[0]) or not _ABBREVIATION.search(text, start, found.start()):
            parts.append(text[start : found.end()])
            start = found.end()
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def gist(squeezed: str) -> frozenset[str]:
    """The stems of squeezed words but function words, in no order."""
    return frozenset(stem(word) for word in squeezed.split() if word not in SMALL)


def squeeze(text: str) -> str:
    """Words and numbers in lower case, in their order, single spaces.

    >>> squeeze("\\u201cVále\\u201d \\u2013 it\\u2019s  1,200 m.")
    "vale it's 1,200 m"
    """
    bare = plain(text).lower()
    return " ".join(re.findall(r"\d+(?:[.,:]\d+)*|[^\W\d_][^\W_]*(?:'[^\W\d_]+)*|\w+", bare))
