"""Answers that take the right one back, leave it open, or name another thing by it. Each check gives a cause, or ''."""

import re
from collections.abc import Sequence

from grpo_nb.tasks.grounding.claims import Token, tokenise
from grpo_nb.tasks.grounding.hearing import ARTICLES, Heard
from grpo_nb.tasks.grounding.items import Item
from grpo_nb.tasks.grounding.lexicon import (
    CLASSIFIERS,
    COLLECTIVES,
    DENIALS,
    DISPLACERS,
    HEDGES,
    RELATIVES,
    TITLES,
    UNIVERSAL,
    words,
)
from grpo_nb.tasks.grounding.stems import stem
from grpo_nb.tasks.grounding.thesaurus import any_alike

_ORDERS = frozenset(words("after before like against over above over under below behind"))
_ABOVE = frozenset(words("more over above exceeding least"))
_BELOW = frozenset(words("fewer less under below most"))
_BESIDE = frozenset(words("near next close beside opposite adjacent nearby"))
_WH = frozenset(words("who whom whose what which where when how"))

_CLASSIFIERS = frozenset(stem(word) for word in CLASSIFIERS)

RELATIVE_FORMS = frozenset(
    stem(form)
    for word in RELATIVES
    for form in (word, f"{word}inlaw", *(f"{before}{word}" for before in ("great", "half", "step")))
)


def taken_back(heard: Heard) -> str:
    """Denials of the right answer: `not X`, `anyone but X`, `X is wrong`."""
    negative = any(token.kind == "not" for token in tokenise(heard.item.right))
    for place in heard.gold:
        if heard.segment[place] in heard.denied and not negative and not _asks_for_denial(heard, heard.segment[place]):
            return "it denies the right answer"
    known = heard.item.passage.holds | heard.item.asked | set(heard.item.essential)
    for place, token in enumerate(heard.tokens):
        if heard.segment[place] in heard.denied and token.kind != "not":
            continue
        tells_apart = (
            token.word == "other"
            and heard.tokens[place - 1].word == "the"
            and heard.part[place + 1 :][:1] in (["asked"], ["new"])
        )
        if token.word in UNIVERSAL and token.form not in known and not tells_apart and _covers(heard, place):
            return f"'{token.word}' leaves the right answer out"
        if token.word in DENIALS and stem(token.word) not in known:
            return f"'{token.word}' takes the right answer back"
        before = {t.word for t in heard.tokens[max(0, place - 3) : place]}
        if token.word == "but" and before & (UNIVERSAL | {"one", "every", "each"}):
            return "'but' leaves the right answer out"
    return ""


def _asks_for_denial(heard: Heard, segment: int) -> bool:
    """Whether a question asks for a negative, and a segment repeats the question's words."""
    if not re.search(r"\b(?:not|never|no|without|except)\b|n't\b", heard.item.question):
        return False
    return sum(part == "asked" and heard.segment[place] == segment for place, part in enumerate(heard.part)) > 1


def _covers(heard: Heard, place: int) -> bool:
    """Whether `anyone` or `others` precedes the right answer or is joined to it: `anyone but X`, `X and others`."""
    behind = [p for p in heard.gold if p < place]
    joined = behind and set(heard.between(max(behind), place)) & {"and", "or", "&", "plus", "nor"}
    return (joined or not behind) and not _excepts(heard, place)


def _excepts(heard: Heard, place: int) -> bool:
    """`none other than X`, `any`/`all` inside a noun phrase that claims nothing about the answer."""
    if place and heard.tokens[place - 1].word in ("none", "nobody"):
        return True
    words = [token.word for token in heard.tokens[place : place + 3]]
    return words in (["none", "other", "than"], ["nobody", "else", "than"]) or words[:1] in (["all"], ["any"])


def wrong_side(heard: Heard) -> str:
    """Whether an answer takes the right one's number from the other side: `fewer than 1,600` for `more than 1,600`."""
    right = _side(tokenise(heard.item.right))
    for first, _ in heard.blocks if right else ():
        ours = _side(heard.tokens[max(0, first - 3) : first + 3])
        if ours and ours != right:
            return "it is on the other side of the number"
    return ""


def _told_side(heard: Heard, first: int) -> bool:
    """Whether the question or the source has the number from the side that an answer takes it from: `over 300`."""
    about, form = heard.item, heard.tokens[first].form
    told = [
        sentence.tokens[max(0, place - 3) : place]
        for sentence in about.passage.sentences
        for place, token in enumerate(sentence.tokens)
        if token.form == form
    ]
    sides = {_side(tokens) for tokens in (tokenise(about.question), *told)}
    return _side(heard.tokens[max(0, first - 3) : first]) in sides


def _side(tokens: Sequence[Token]) -> int:
    words = [token.word for token in tokens]
    return (1 if _ABOVE & set(words) else 0) or (-1 if _BELOW & set(words) else 0)


def left_open(heard: Heard) -> str:
    """Choices left to the reader: `X or Y`, `maybe X, maybe Y`."""
    if sum(token.word in HEDGES for token in heard.tokens) > 1:
        return "it hedges"
    around = {heard.segment[place] for place in heard.gold}
    one = sum(token.kind == "number" for token in heard.item.gold) == len(heard.item.gold) == 1
    if one and any(t.word == "between" and heard.segment[p] in around for p, t in enumerate(heard.tokens)):
        return "it gives a range"
    if "or" in re.findall(r"\w+", heard.item.right.lower()):
        return ""
    for place, token in enumerate(heard.tokens):
        if token.word == "or" and ({heard.segment[place], heard.segment[place] + 1, heard.segment[place] - 1} & around):
            return "it leaves a choice"
    return ""


def moved(heard: Heard) -> str:
    """Heads and prepositions that make another thing of the right answer: `the sister of X`, `X's rival`, `near X`."""
    for first, last in heard.blocks:
        if (
            cause := _moved_inside(heard, first, last)
            or _moved_before(heard, first)
            or _moved_behind(heard, last)
            or _object(heard, first)
        ):
            return cause
    return ""


def _moved_inside(heard: Heard, first: int, last: int) -> str:
    """Whether the right answer's class is kept and its place changed: `a university near Delhi`."""
    right = {token.word for token in tokenise(heard.item.right)}
    strange = [word for word in heard.between(first, last) if word in DISPLACERS and word not in right]
    return f"'{strange[0]}' names another thing" if strange else ""


def _object(heard: Heard, first: int) -> str:
    """Whether the right answer is what somebody unnamed does something to: `people who know X`."""
    clause = [p for p in range(first) if heard.segment[p] == heard.segment[first]]
    if not clause or heard.tokens[clause[0]].word not in ("who", "that", "which", "whom", "whose"):
        return ""
    acts = any(heard.part[p] in ("new", "benign") for p in clause)
    known = any(heard.part[p] == "asked" for p in clause) or any(
        heard.part[p] in ("asked", "new") and heard.tokens[p].kind != "mark" and heard.tokens[p].kind == "name"
        for p in range(clause[0])
    )
    return "the right answer is what another acts on" if acts and not known else ""


def _moved_before(heard: Heard, first: int) -> str:
    place = first - 1
    while place >= 0 and (
        heard.tokens[place].word in ARTICLES or heard.tokens[place].word in TITLES or heard.tokens[place].form == "."
    ):
        place -= 1
    if place < 0:
        return ""
    fixed = heard.item.named or any(token.kind == "number" for token in heard.item.gold)
    token, about = heard.tokens[place], heard.item
    right = {t.word for t in tokenise(about.right)}
    if (
        token.word in DISPLACERS
        and not (_follows_claims(heard, place) and (about.chooses or not fixed) and token.word in _ORDERS)
        and token.word not in about.asked_words
        and not (token.word in _ABOVE | _BELOW and _side(tokenise(about.right)))
        and not (token.word in _BESIDE and _BESIDE & set(about.asked_words))
        and token.word not in right
        and not about.passage.preceded(token.word, heard.tokens[first].form)
    ):
        return f"'{token.word}' names another thing"
    if token.word == "than" and not about.named and "than" not in right and not _told_side(heard, first):
        return "it compares with the right answer"
    if token.word in ("of", "to", "for", "with", "from"):
        return _headed(heard, place, token.word)
    return ""


def _follows_claims(heard: Heard, place: int) -> bool:
    return any(token.claims for token in heard.tokens[:place])


def _headed(heard: Heard, link: int, word: str) -> str:
    """Whether `the N of X` stands in place of X."""
    about, head = heard.item, heard.tokens[link - 1] if link else None
    if head is None or not head.claims or heard.part[link - 1] == "gold" or head.form in _CLASSIFIERS:
        return ""
    if _asked_for(about, head.form):
        return ""
    before = [
        place
        for place in range(link - 1)
        if heard.segment[place] == heard.segment[link]
        and heard.part[place] in ("asked", "new")
        and heard.tokens[place].kind in ("name", "word")
    ]
    subject = any(heard.tokens[place].kind == "name" for place in before)
    if _follows_claims(heard, link - 1) and _told_head(heard, link - 1, link + 1):
        return ""
    if head.word in RELATIVES or head.form in RELATIVE_FORMS:
        return "" if subject and heard.part[link - 1] == "asked" else f"'{head.word} {word}' names another thing"
    told = any_alike(head.form, {form for place in about.evidence for form in about.passage.sentences[place].holds})
    opens = not subject and (len(before) <= 1 or _article(heard, link - 1)) and not told
    if head.kind == "number" and word == "of" and opens_answer(heard, link - 1):
        return f"'{head.word} of' names a part"
    counts = (
        head.word in COLLECTIVES
        and about.gold[0].kind == "number"
        and re.fullmatch(r"\d{4}", about.gold[0].form) is None
    )
    idiom = link > 1 and heard.tokens[link - 2].word in ("in", "on", "at", "by")
    if word == "of" and opens and head.kind == "word" and not counts and not idiom:
        return f"'{head.word} of' names another thing"
    return ""


def _told_head(heard: Heard, head: int, link: int) -> bool:
    """Whether the source has the right answer after this head: `in the suburbs of X`, `son and third child of X`."""
    gold = next((token.form for token in heard.tokens[link:] if token.claims), "")
    sentences = [heard.item.passage.sentences[place] for place in heard.item.evidence]
    return any(sentence.follows(heard.tokens[head].form, gold, 3) for sentence in sentences)


def _article(heard: Heard, head: int) -> bool:
    """Whether a head is one of several: `a rebadged variant of X`."""
    return bool({"a", "an", "another"} & {token.word for token in heard.tokens[max(0, head - 3) : head]})


def opens_answer(heard: Heard, place: int) -> bool:
    """Whether nothing that claims stands before a place."""
    return not _follows_claims(heard, place)


def _asked_for(about: Item, head: str) -> bool:
    """Whether the question asks for the X of `head of X`: `the mother of whom`, `which head`."""
    words = about.asked_words
    for place, word in enumerate(words):
        if stem(word) != head:
            continue
        if words[place + 1 : place + 2] == ("of",) and set(words[place + 2 : place + 4]) & _WH:
            return True
        if place and words[place - 1] in ("what", "which"):
            return True
    return False


def _moved_behind(heard: Heard, last: int) -> str:
    following = heard.tokens[last + 1] if last + 1 < len(heard.tokens) else None
    if following is None or not following.claims or not heard.tokens[last].owns:
        return ""
    if following.form in RELATIVE_FORMS:
        return f"'{following.word}' of the right answer is another thing"
    ends = last + 2 >= len(heard.tokens) or heard.tokens[last + 2].kind == "mark"
    known = heard.part[last + 1] in ("asked", "benign") and not (ends and last < 4)
    return "" if known or following.form in _CLASSIFIERS else f"'{following.word}' of the right answer is another thing"
