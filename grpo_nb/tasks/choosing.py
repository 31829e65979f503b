"""Which option an answer names: by its letter, by its text, or by saying that the text does not tell.

The rules, in the order in which they apply:

1. A letter counts where it can only be a letter: alone, in brackets or before punctuation, before a word that no
   article stands before ("A because"), after "option". "A grandson" is no letter, "b." and "(b)" are.
2. An option's text counts with or without its article, accents and hyphens; so does a word that only this option has
   ("The British one", "Mary" of "Mary Smith"), unless the question has it. The longest text is found first.
3. Where an answer is taken back ("Wait, actually"), what follows counts, if it names an option.
4. Each sentence falls into clauses. What explains ("because", "while", "which"), what hangs on a condition and what is
   only thought possible names nothing; a claim that hangs on a condition or goes on with "or" is no claim.
5. An option behind a negation, or of which it is denied, is not named; where both persons are denied, the third option
   is. Of a clause that says that the text does not tell, the persons in it are not named.
6. What follows "so" or "therefore" beats what comes before it. A bare first line beats what explains it.
7. Two different options that are named are none: a letter that contradicts its text, a list, "A or C".
8. A text without any marker of an answer must repeat some word of the question, or be nothing but the option.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from grpo_nb.tasks.reading import LETTERS, Reading
from grpo_nb.tasks.wordings import (
    ABSTENTION,
    ARTICLES,
    CONCLUSIONS,
    CONDITIONS,
    CONTRASTS,
    CORRECTIONS,
    DANGLING,
    EXPLANATIONS,
    FRAME,
    HEDGES,
    NEGATIONS,
    NOT_ABSTENTION,
    REFUSAL,
    SOURCES,
    WRONG,
    folded,
    plain,
    words_of,
)

_AFTER_LETTER = (
    "is|was|because|since|as|and|or|but|for|given|due|based|would|seems|appears|which|who|unless|if|per|here|must|"
    "should|can|cannot|could|might|may|will|according|while|whereas|although|though|the|an?|has|looks|makes|follows|"
    "fits|in|on|by|from|with|over|rather|instead|then|so|therefore|isn't|wasn't|can't|does|did|also|only|both|remains"
)
"""Words that follow a letter and no article."""
_BEFORE_LETTER = r"(?:[Oo]ptions?|[Cc]hoices?|[Ll]etters?|OPTION)"
_LETTER = re.compile(
    r"(?<![\w'@#-])(?:(?<!Plan )(?<!itamin )([BC])(?![\w'&-]|\.[A-Za-z])"
    rf"|(A)(?=\s*(?:[).:,;/&!?(\]|=]|$|\n)| - |\s+(?:{_AFTER_LETTER})\b))"
)
_NAMED_LETTER = re.compile(rf"\b{_BEFORE_LETTER}[\s:]+\(?([a-cA-C])\b(?!')")
_FIRST_LETTER = re.compile(r"^\W*([a-c])\s*(?:[).:\]]|$)")
_LAST_LETTER = re.compile(r"(?<=\bis )\(?([a-c])\)?(?=\W*$)")
_BRACKETED = re.compile(r"[(\[]\s*([a-cA-C])\s*[)\]]")
_ONLY = re.compile(r"^\W*(?:(?:[a-cA-C]|and|or|options?)\b\W*)+$")
_PLACES = {"first": 0, "second": 1, "third": 2}

_MARKDOWN = re.compile(
    r"\\(?:text|mathrm|mathbf|textbf|boxed)\b|[*_`$\\{}~\"\u201c\u201d\u00ab\u00bb\u201e#@]|^[ \t]*[>\-+][ \t]", re.M
)
_MENTION = re.compile(r"[@#](\d)")
_JOINED = re.compile(r"@(\d)\s*[).:\-\]]+\s*(?=#\d\s*(?:$|[.,;:!?\n(@]|because\b|since\b|as\b))")
_SENTENCE = re.compile(r"[.!?\n]+(?:\s|$)|[.!?\n]+(?=[@#])")
_ASKED = "\u00bf"
"""Put at the end of a sentence that asks: it claims nothing."""
_NEGATION, _HEDGE, _CORRECTION = words_of(NEGATIONS), words_of(HEDGES), words_of(CORRECTIONS)
_WRONG = "|".join(WRONG)
_SOURCE = re.compile(SOURCES)
_TABLES = {"explain": EXPLANATIONS, "contrast": CONTRASTS, "conclude": CONCLUSIONS, "condition": CONDITIONS}
_CONNECTOR = re.compile(
    "|".join(rf"(?P<{kind}>{words_of(table).pattern})" for kind, table in _TABLES.items())
    + r"|(?P<relative>(?<=[@#]\d )who\b|(?<=, )(?:who|which)\b)|(?P<end>;)|(?P<comma>[,:()]| - )"
)
_NOT_NEGATIONS = re.compile(r"\b(?:no doubt|without (?:a |any )?doubt|not only|none other than|no question|if not)\b")
_BETWEEN = r"(?:(?:necessarily|be|been|to|the|a|option|about|that|it|is|was|either|just|simply|answer|because|of) )*"
MOST = 9
"""Mentions of options that are read of one clause: more name no single one."""
_OR = re.compile(r"[@#]\d(?: \w+)? or\b|\bor (?:\w+ ){0,2}?[@#]\d|[@#]\d ?/|/ ?[@#]\d")
_TURNS = {"explain": True, "relative": True, "condition": True, "end": False, "contrast": False, "conclude": False}
"""Whether what follows explains, by what it begins with; a comma changes nothing."""
_AMONG = re.compile(r"(?:between|among|of|out of|from among) (?=.*[@#]\d.*[@#]\d)")
_LISTED = re.compile(r"^(?:(?:and|or|nor|/|&) (?:option )?[@#]\d )+")
_OTHER, _PRONOUN = re.compile(r"\bother\b"), re.compile(r"\b(?:he|she|they|it|that (?:person|one|man|woman))\b")


@dataclass
class Claim:
    """What a clause, a sentence or a text says of the options."""

    named: set[int] = field(default_factory=set)
    denied: set[int] = field(default_factory=set)
    hedged: set[int] = field(default_factory=set)
    met: set[int] = field(default_factory=set)
    """Persons that it speaks of, in whatever way."""
    abstains: bool = False
    broken: bool = False
    """A condition or an "or" takes the claim back."""
    answers: bool = False
    """It repeats the question, or is nothing but the option."""
    bare: bool = False
    """It is nothing but the option."""
    concludes: bool = False

    @property
    def told(self) -> bool:
        """Whether it says something of an option."""
        return bool(self.named or self.denied or self.hedged or self.abstains or self.broken)

    def chosen(self, unknown: int) -> set[int]:
        """The options that it says are right."""
        return self.named | ({unknown} if self.abstains else set())

    def join(self, part: "Claim", unknown: int) -> None:
        """Take in what the next clause says; to think one person possible after a claim for another undoes it."""
        doubt = len(part.hedged - {unknown}) == 1 and bool(self.chosen(unknown) - part.hedged) and not part.abstains
        self.broken |= part.broken or doubt
        self.bare = part.bare and not self.chosen(unknown)
        self.abstains |= part.abstains
        self.answers |= part.answers
        for mine, its in ((self.named, part.named), (self.denied, part.denied), (self.hedged, part.hedged)):
            mine |= its
        self.met |= part.met


@dataclass(frozen=True)
class _Item:
    """What the clauses of an answer are held against."""

    unknown: int
    asked: frozenset[str]
    """Beginnings of the words that the question asks by."""
    denies: str
    """The word that the question denies ("Who was not polite?"), or empty."""
    whose: bool


def choose(answer: Reading | str, options: Sequence[str], unknown: int, question: str = "") -> int | None:
    """Index of the one option that an answer names, or None where it names none, or two different ones.

    Args:
        answer: a reading, or the text that follows `Answer:`.
        options: three texts; two name persons, the one at `unknown` says that the context does not tell.
        question: what was asked; it tells an answer in a sentence from a sentence about the persons.

    >>> options = ["The grandfather", "The grandson", "Not known"]
    >>> [choose(text, options, 2) for text in ("b) the grandson", "A or B", "It cannot be known if A", "A, as B rang")]
    [1, None, 2, 0]
    """
    text, marked = (answer, True) if isinstance(answer, str) else (answer.answer, bool(answer.marker))
    names, asked = _names(tuple(options), unknown, question), _item(question, unknown)
    for part in reversed(_corrected(_shown(text, names))):
        claims = [claim for sentence in _sentences(part) if (claim := _sentence(sentence, asked)).told]
        found = _settled(claims, asked.unknown, marked or not question)
        if found is not None:
            return next(iter(found)) if len(found) == 1 else None
    return None


# From characters to mentions


def _shown(text: str, names: Sequence[tuple[re.Pattern[str], int]]) -> str:
    """The text in folded words, each letter of an option as `@0`, each text of one as `#0`."""
    text = _MARKDOWN.sub(lambda mark: "" if mark[0] in "*_`" else " ", plain(text)).strip()
    text = folded(_letters(text))
    for pattern, index in names:
        text = pattern.sub(f" #{index} ", text)
    text = re.sub(r"#(\d)(?: #\1)+", r"#\1", re.sub(r"[^\S\n]+", " ", text))
    return _JOINED.sub(r"@\1 ", text).strip()


def _letters(text: str) -> str:
    if _ONLY.match(text):
        return re.sub(r"\b[a-cA-C]\b", _letter, text)
    text = re.sub(r"\b(first|second|third) (?:option|choice)\b", lambda m: f" @{_PLACES[m[1]]} ", text)
    text = _BRACKETED.sub(lambda m: f" @{LETTERS.index(m[1].upper())} ", text)
    for pattern in (_NAMED_LETTER, _FIRST_LETTER, _LAST_LETTER, _LETTER):
        text = pattern.sub(_letter, text)
    return text


def _letter(match: re.Match[str]) -> str:
    """The match with its letter as a mention: the only group that matched, or all of it."""
    letter = next((group for group in match.groups() if group), match[0])
    place = match[0].rindex(letter)
    return f"{match[0][:place]} @{LETTERS.index(letter.upper())} {match[0][place + 1 :]}"


@lru_cache(maxsize=4096)
def _names(options: tuple[str, ...], unknown: int, question: str) -> tuple[tuple[re.Pattern[str], int], ...]:
    """Patterns of the options' texts, the longest first, then of the words that one person alone has."""
    words = [[word for word in re.findall(r"[\w']+", folded(option)) if word not in ARTICLES] for option in options]
    full = [(w, i) for i, w in enumerate(words) if w and (i == unknown or not ABSTENTION.fullmatch(" ".join(w)))]
    people = [index for index in range(len(options)) if index != unknown]
    asked = set(re.findall(r"[\w']+", folded(question)))
    single = [
        ([word], index)
        for index in people
        for word in words[index]
        if len(word) > 1
        and not any(word in words[other] for other in range(len(options)) if other != index)
        and word not in asked | FRAME | DANGLING
        and not ABSTENTION.fullmatch(word)
    ]
    full.sort(key=lambda entry: -len(" ".join(entry[0])))
    return tuple((_name_pattern(found), index) for found, index in (*full, *single))


def _name_pattern(words: Sequence[str]) -> re.Pattern[str]:
    inside = r"[\s,-]+(?:(?:the|a|an|his|her|their) )?".join(re.escape(word) for word in words)
    return re.compile(rf"(?<![\w@#])(?:(?:the|an?) )?{inside}(?:e?s)?(?![\w])")


def _item(question: str, unknown: int) -> _Item:
    words = re.findall(r"[\w']+", folded(question))
    content = [word for word in words if word not in FRAME | DANGLING and word not in ("whose", "which", "not")]
    after = words[words.index("not") + 1 :] if "not" in words else []
    denied = next((word for word in after if word in content), "")
    return _Item(unknown, frozenset(word[:4] for word in content), denied, "whose" in words)


# From sentences to claims


def _corrected(text: str) -> list[str]:
    """The text up to where it is taken back, and each part that takes back what came before."""
    starts = [match.start() for match in _CORRECTION.finditer(text) if match.start()]
    return [text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True)]


def _sentences(text: str) -> list[str]:
    found = [part.strip() for part in _SENTENCE.split(re.sub(r"\?+(?=\s|$)", f"{_ASKED}\n", text))]
    if found and found[-1] and (found[-1].split() or [""])[-1].strip(",;:") in DANGLING:
        found.pop()  # cut off
    return [part for part in found if part and part[-1] != _ASKED and not _refuses(part)]


def _refuses(sentence: str) -> bool:
    """Whether a sentence refuses to help, and says nothing about the text besides."""
    return REFUSAL.search(sentence) is not None and ABSTENTION.search(REFUSAL.sub(" ", sentence)) is None


def _sentence(sentence: str, item: _Item) -> Claim:
    """What a sentence claims; a conclusion that claims something replaces what comes before it."""
    claim, explaining, concluding = Claim(), False, False
    for kind, words in _main(_clauses(_SOURCE.sub(" ", sentence)), item):
        concluding = kind == "conclude" or (concluding and kind == "comma")
        if kind in _TURNS:
            explaining = _TURNS[kind] or (kind == "end" and claim.bare)
        if kind == "condition":
            claim.broken |= bool(claim.named)
        if explaining:
            claim.met |= _met(words)
            continue
        part = _clause(words, item)
        if claim.abstains and kind == "comma" and re.search(r"\w or ", words):
            continue  # "it does not say which, A or B"
        if concluding:
            _resolve(part, words, claim.met - {item.unknown}, item)
            if part.told:
                claim, concluding = Claim(denied=claim.denied, met=claim.met, concludes=True), False
        claim.join(part, item.unknown)
        claim.broken |= bool(claim.named) and words.startswith("or ")
    return claim


def _main(clauses: list[tuple[str, str]], item: _Item) -> list[tuple[str, str]]:
    """The main clause of a sentence that begins with a subordinate one: the last that claims something."""
    if len(clauses) < 2 or clauses[0][0] not in ("explain", "condition") or ("conclude" in dict(clauses)):
        return clauses
    for place in range(len(clauses) - 1, 0, -1):
        kind, words = clauses[place]
        part = _clause(words, item)
        if kind in ("comma", "contrast") and (part.named or part.abstains or part.hedged):
            if clauses[0][0] == "condition":
                return []
            return [("comma", words), *clauses[place + 1 :]]
    return clauses


def _clauses(sentence: str) -> list[tuple[str, str]]:
    """The clauses of a sentence, each with the kind of what it begins with."""
    found, start, kind = [], 0, "start"
    for match in _CONNECTOR.finditer(sentence):
        if words := sentence[start : match.start()].strip():
            found.append((kind, words))
            kind = "comma"
        if match.lastgroup != "comma" or kind not in ("conclude", "explain", "condition", "contrast", "relative"):
            kind = str(match.lastgroup)
        start = match.end()
    if words := sentence[start:].strip(" ."):
        found.append((kind, words))
    return found


def _clause(words: str, item: _Item) -> Claim:
    """What a clause claims by itself."""
    words = _NOT_NEGATIONS.sub(" ", words)
    stems = _stems(words)
    opposite = False
    if item.denies:
        restated = re.sub(rf"\b(?:not|never) (?:\w+ )?{re.escape(item.denies[:5])}\w*", " asked ", words)
        opposite = restated == words and re.search(rf"\b{re.escape(item.denies[:5])}", words) is not None
        words = restated
    mentions = list(_MENTION.finditer(words))
    claim = Claim(met=_met(words))
    if _AMONG.match(words):
        return claim
    abstention = _abstention(words)
    if abstention is not None:
        claim.abstains, claim.answers = True, True
        mentions = [m for m in mentions if m[0][0] == "@" and m.start() < abstention]
    for mention in mentions[:MOST]:
        _place(claim, mention, words, item, stems)
    if abstention is None and opposite:
        claim.named.clear()
    if _HEDGE.search(words):
        claim.hedged, claim.named = claim.named | claim.hedged, set()
    rest = set(re.findall(r"[\w']+", _MENTION.sub(" ", _NEGATION.sub(" ", words) if claim.denied else words)))
    claim.bare = bool(claim.named) and rest <= ARTICLES
    claim.answers |= bool(claim.named) and (rest <= FRAME or bool(item.asked & stems) or "asked" in words)
    claim.answers |= any(m[0][0] == "@" for m in mentions) or (bool(claim.named) and rest <= FRAME)
    claim.named = _subject(claim.named, mentions, words, claim)
    if len(claim.named) > 0 and _OR.search(words):
        claim.broken = True
    return claim


def _abstention(words: str) -> int | None:
    """Where a clause says that the text does not tell, or None."""
    hidden = NOT_ABSTENTION.sub(lambda m: "~" * len(m[0]), words)
    for match in ABSTENTION.finditer(hidden):
        before = hidden[: match.start()]
        if re.search(r"[@#]\d (?:(?:is|was|are|were|did|does|do|has|had|could|can|would|also|be) ){0,2}$", before):
            continue  # said of an option: "B is not supported"
        return match.start()
    return None


def _place(claim: Claim, mention: re.Match[str], words: str, item: _Item, stems: set[str]) -> None:
    """Sort one mention of a clause: named, denied, or neither."""
    index, before, after = int(mention[1]), words[: mention.start()], words[mention.end() :].strip()
    if index == item.unknown and mention[0][0] == "#":
        if not _denied_after(after, item, stems):
            claim.abstains = claim.answers = True
        return
    if re.search(rf"{_NEGATION.pattern} {_BETWEEN}$", before) or (
        re.search(r"[@#](\d)[ ,]*(?:or|nor|and|/)(?: option)? $", before) and claim.denied and not claim.named
    ):
        claim.denied.add(index)
    elif _NEGATION.search(re.sub(r"^.*[@#]\d", "", before)) and not claim.named:
        pass
    elif _denied_after(after, item, stems):
        claim.denied.add(index)
    elif after.startswith("'s ") and not item.whose:
        pass
    else:
        claim.named.add(index)


def _denied_after(after: str, item: _Item, stems: set[str]) -> bool:
    """Whether what follows an option denies it: "is not right", "did not" and what the question asks, "is wrong"."""
    after = _LISTED.sub("", after)
    if re.match(rf"(?:is|was|are|were|seems|would be) (?:\w+ )?(?:{_WRONG})\b", after):
        return True
    match = re.match(
        r"(?:\w+ ){0,6}?(?:(?:is|was|are|were|did|does|do|has|had|can|could|would|should) not|cannot)\b", after
    )
    if match is None or _MENTION.search(match[0]):
        return False
    rest = re.findall(r"[\w']+", after[match.end() :])
    about = {word[:4] for word in rest}
    near = match[0].count(" ") <= 2
    return (
        bool(about & item.asked)
        or not rest
        or (near and (rest[0] in FRAME or rest[0][:5] in ("suppo", "menti", "state")))
    )


def _subject(named: set[int], mentions: Sequence[re.Match[str]], words: str, claim: Claim) -> set[int]:
    """Of two persons in a clause that repeats the question, the one that it begins with, if nothing joins the two."""
    if len(named) < 2 or not claim.answers or any(m[0][0] == "@" for m in mentions):
        return named
    places = [m for m in mentions if int(m[1]) in named]
    joined = re.search(r"[@#]\d(?: \w+)?\s*(?:and|or|,|/|&|as well as|plus|\+)\s*(?:\w+ )?[@#]\d", words)
    starts = set(re.findall(r"[\w']+", words[: places[0].start()])) <= FRAME
    return (
        {int(places[0][1])} if starts and not joined and words[places[0].end() : places[1].start()].strip() else named
    )


def _resolve(part: Claim, words: str, people: set[int], item: _Item) -> None:
    """A conclusion about "she" or "the other one": of the one person that the sentence has spoken of."""
    if part.told or len(people) != 1 or _NEGATION.search(words):
        return
    if _OTHER.search(words):
        part.named, part.answers = set(range(3)) - people - {item.unknown}, True
    elif _PRONOUN.search(words) and item.asked & _stems(words):
        part.named, part.answers = set(people), True


def _met(words: str) -> set[int]:
    return {int(index) for index in _MENTION.findall(words)}


def _stems(words: str) -> set[str]:
    return {word[:4] for word in re.findall(r"[\w']+", words)}


# From claims to the option


def _settled(claims: Sequence[Claim], unknown: int, marked: bool) -> set[int] | None:
    """The options that a text names: one, or several that contradict each other; None: it names none."""
    telling = [c for c in claims if c.chosen(unknown) and (marked or c.answers)]
    if not telling:
        return _left_over(claims, unknown)
    if any(c.broken for c in telling):
        return set()
    concluding = [c for c in telling if c.concludes]
    if concluding:
        return concluding[-1].chosen(unknown)
    first = telling[0]
    if first.bare or marked:
        rest = [c.chosen(unknown) for c in telling[1:] if c.bare]
        return first.chosen(unknown).union(*rest)
    return set().union(*(c.chosen(unknown) for c in telling))


def _left_over(claims: Sequence[Claim], unknown: int) -> set[int] | None:
    """The third option where the two others are denied."""
    denied = set().union(*(c.denied for c in claims))
    hedged = set().union(*(c.hedged for c in claims))
    return set(range(3)) - denied if len(denied) == 2 and not hedged - denied else None
