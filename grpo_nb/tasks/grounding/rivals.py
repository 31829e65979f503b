"""Answers that give a second candidate beside the right one, or turn roles round. Each check gives a cause, or ''."""

from collections.abc import Sequence

from grpo_nb.tasks.grounding.attachment import converts
from grpo_nb.tasks.grounding.claims import Token, stem, tokenise
from grpo_nb.tasks.grounding.hearing import ARTICLES, JOINS, LINKS, Heard, in_source, singles_out
from grpo_nb.tasks.grounding.items import Item
from grpo_nb.tasks.grounding.lexicon import DEMONYMS, PLACE_PAIRS, PLACES, POLES

_PEOPLES = frozenset(DEMONYMS.values()) | {"us", "uk"}


def chosen(heard: Heard) -> str:
    """Of a question that names its candidates: the other one is said, or the order is turned round."""
    about = heard.item
    if not about.chooses:
        return ""
    gold = {token.form for token in about.gold}
    others = {
        token.form for token in tokenise(about.question) if token.kind == "name" and token.form not in gold
    } - _poles_of(about.asked_words, forms_only=True)
    live = [p for p in range(len(heard.tokens)) if heard.segment[p] not in heard.denied]
    other = [p for p in live if heard.tokens[p].form in others]
    asked, told = pole(about.asked_words), pole([heard.tokens[p].word for p in live])
    turned = bool(asked and told and asked[0] == told[0] and asked[1] != told[1])
    first_gold = min(heard.gold)
    if other and other[0] < first_gold and not _subordinate(heard, other[0]):
        return "" if turned else "it names the other candidate"
    return "it turns the order round" if turned else ""


def _subordinate(heard: Heard, place: int) -> bool:
    words = [token.word for token in heard.tokens[max(0, place - 3) : place]]
    return bool(
        set(words) & {"than", "before", "after", "unlike", "to", "with", "while", "whereas", "although", "though"}
    )


def pole(words: Sequence[str]) -> tuple[int, int] | None:
    return next((POLES[word] for word in words if word in POLES), None)


def _poles_of(words: Sequence[str], forms_only: bool) -> set[str]:
    return {stem(word) for word in words if word in POLES}


def reversed_roles(heard: Heard) -> str:
    """`Who beat Bob?`: `Bob beat X`."""
    about, words = heard.item, heard.item.asked_words
    if not words or words[0] != "who" or len(words) < 3:
        return ""
    verb = tokenise(about.question)[1]
    if verb.kind != "word":
        return ""
    places = [p for p, token in enumerate(heard.tokens) if token.form == verb.form and p not in heard.gold]
    for place in places:
        ours = [p for p in range(len(heard.tokens)) if heard.segment[p] == heard.segment[place]]
        before = [p for p in ours if p < place]
        passive = any(heard.tokens[p].word == "by" for p in ours) or any(
            heard.tokens[p].word in ("was", "were", "is", "are", "been") for p in before
        )
        subject = [p for p in before if heard.part[p] == "asked" and heard.tokens[p].kind == "name"]
        if subject and not passive and not set(before) & heard.gold and set(ours) & heard.gold:
            relative = any(heard.tokens[p].word in ("who", "that", "which") for p in ours)
            if not relative:
                return "it turns the roles round"
    return ""


def listed(heard: Heard) -> str:
    """A second candidate beside the right answer: names of the question, or anything new, joined to it."""
    for first, last in heard.blocks:
        if cause := _listed_behind(heard, last) or _listed_before(heard, first):
            return cause
    return ""


def _listed_behind(heard: Heard, last: int) -> str:
    place = last + 1
    join: list[str] = []
    while place < len(heard.tokens) and (heard.tokens[place].word or heard.tokens[place].form) in JOINS | {
        "the",
        "also",
    }:
        join.append(heard.tokens[place].word or heard.tokens[place].form)
        place += 1
    if place >= len(heard.tokens) or heard.segment[place] in heard.denied or heard.part[place] not in ("new", "asked"):
        return ""
    end = place
    while end + 1 < len(heard.tokens) and heard.part[end + 1] in ("new", "asked") and _same_kind(heard, place, end + 1):
        end += 1
    if all(part == "asked" for part in heard.part[place : end + 1]):
        return _listed_asked(heard, place, end, join)
    return _listed_new(heard, last, place, end, join)


def _same_kind(heard: Heard, one: int, other: int) -> bool:
    return (heard.tokens[one].kind == "word") == (heard.tokens[other].kind == "word")


def _listed_asked(heard: Heard, place: int, end: int, join: Sequence[str]) -> str:
    if heard.item.chooses and join and _names_on(heard, place):
        return "it lists another name"
    if heard.tokens[place].kind != "name" or not join:
        return ""
    ends = end + 1 >= len(heard.tokens) or heard.tokens[end + 1].form in ".;,!"
    hard = {"and", "or", "&", "+", "/", "plus"} & set(join)
    return (
        "it lists another name"
        if (hard and (ends or heard.item.chooses)) or (ends and "(" not in join and ":" not in join)
        else ""
    )


def _names_on(heard: Heard, place: int) -> bool:
    """Whether the rest of an answer from a place on is a name of the question, and not a word more."""
    rest = range(place, len(heard.tokens))
    names = [heard.tokens[p].form in heard.item.subject[0] for p in rest]
    return (
        any(names)
        and all(heard.part[p] in ("asked", "small", "mark") for p in rest)
        and len(rest) <= 2 + 2 * sum(names)
    )


def _listed_new(heard: Heard, last: int, place: int, end: int, join: Sequence[str]) -> str:
    about, run = heard.item, heard.forms(place, end)
    if not run:
        return ""
    named = heard.tokens[place].kind in ("name", "number") or (run[0] in about.passage.names)
    if not named and (about.named or not join or "the" in join):
        return (
            ""
            if not join or about.named
            else ("" if _follows(about, heard.tokens[last].form, run) else "it lists another answer")
        )
    if not named and len(run) > 1 and acts(heard.tokens[place]) and _follows(about, heard.tokens[last].form, run):
        return ""
    if not named:
        return "it lists another answer"
    beside = _follows(about, heard.tokens[last].form, run) and heard.tokens[last].form not in _PEOPLES
    hard = {"and", "or", "&", "+", "/", "plus", ";"} & set(join)
    if (
        beside
        and not hard
        and ("(" in join or not join or " ".join(run) in PLACES | PLACE_PAIRS or _numbers(heard, place, end))
    ):
        return ""
    if _clause(heard, end):
        return ""
    own = about.passage.thread(about.evidence)
    if "(" in join and _numbers(heard, place, end) and (about.passage.spoken(run, own) or converts(about, run)):
        return ""
    return "it lists another answer"


def acts(token: Token) -> bool:
    """Whether a word looks like a verb with an object behind it: `plays` drums."""
    return token.word.endswith("ed") or (token.word != token.form and not token.word.endswith("ss"))


def _clause(heard: Heard, end: int) -> bool:
    """Whether a verb follows: what looked like a second candidate begins a clause of its own."""
    following = heard.tokens[end + 1].word if end + 1 < len(heard.tokens) else ""
    return following in ("is", "was", "were", "are", "has", "had", "did")


def _numbers(heard: Heard, first: int, last: int) -> bool:
    return all(token.kind == "number" for token in heard.tokens[first : last + 1] if token.claims)


def _follows(about: Item, form: str, run: Sequence[str]) -> bool:
    return bool(about.passage.spoken((form, *run[:2]), about.near))


def _listed_before(heard: Heard, first: int) -> str:
    place, join = first - 1, []
    while place >= 0 and (heard.tokens[place].word or heard.tokens[place].form) in JOINS | {"the", "also"}:
        join.append(heard.tokens[place].word or heard.tokens[place].form)
        place -= 1
    if place < 0 or heard.segment[place] in heard.denied or heard.part[place] not in ("new", "asked"):
        return ""
    start = place
    while start > 0 and heard.part[start - 1] == heard.part[place] and _same_kind(heard, place, start - 1):
        start -= 1
    article = start > 0 and heard.tokens[start - 1].word in ARTICLES
    if not singles_out(heard.tokens[place], heard.item) and (
        article
        or heard.part[place] == "asked"
        or not join
        or (heard.item.named and in_source(heard.item, heard.tokens[place].form))
    ):
        return ""
    if not [word for word in join if word != "the"]:
        acts = "the" in join and not singles_out(heard.tokens[place], heard.item)
        return "" if acts else _extends(heard, start, place, first)
    before = heard.tokens[start - 1].word if start else ""
    if before in LINKS or before in ("the", "and", "is", "was", "by"):
        before = heard.tokens[start - 2].word if start > 1 and before == "the" else before
    if before in LINKS and before != "by":
        return "it lists another name" if "and" in join and _titled(heard, start) else ""
    if (
        any(heard.part[p] in ("asked", "new") and heard.tokens[p].kind == "word" for p in range(start))
        and before != "by"
    ):
        return ""
    return "" if ":" in join or (heard.part[place] == "asked" and "(" in join) else "it lists another name"


def _titled(heard: Heard, end: int) -> bool:
    """Whether an answer begins with a name that goes on up to a place: `A Lamp for Cormac and X`."""
    claims = [place for place in range(end) if heard.tokens[place].claims]
    begins = next((token.word for token in heard.tokens if token.kind != "mark" and token.word not in ARTICLES), "")
    return (
        bool(claims)
        and begins not in LINKS
        and all(heard.part[place] == "new" and singles_out(heard.tokens[place], heard.item) for place in claims)
    )


def _extends(heard: Heard, start: int, end: int, first: int) -> str:
    """A name right before the right one, `New` before `Delhi`, must stand there in the source."""
    about, run = heard.item, heard.forms(start, end)
    if heard.part[end] == "asked" or heard.tokens[end].owns:
        return ""
    if about.passage.spoken((run[-1], heard.tokens[first].form), about.near):
        return ""
    return "it names somebody else"
