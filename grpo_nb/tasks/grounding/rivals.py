"""Checks for answers with a second candidate or with swapped roles. Each check returns a cause, or ''."""

from collections.abc import Collection, Sequence

from grpo_nb.tasks.grounding.attachment import derived
from grpo_nb.tasks.grounding.claims import Token, tokenise
from grpo_nb.tasks.grounding.hearing import ARTICLES, JOINS, LINKS, Heard, in_source, singles_out
from grpo_nb.tasks.grounding.items import Item
from grpo_nb.tasks.grounding.lexicon import CLASSES, LATER, PEOPLES, PLACE_PAIRS, PLACES, POLES
from grpo_nb.tasks.grounding.measures import converts
from grpo_nb.tasks.grounding.stems import stem
from grpo_nb.tasks.grounding.thesaurus import alike, is_word

_DEEDS = frozenset(POLES[word][0] for word in ("born", "won", "open"))
"""Scales of acts: a comparison with them is what counts, `born first`."""
_PLACED = frozenset(("where", "country", "state", "county", "city", "town", "province", "region", "place", "village"))


def chosen(heard: Heard) -> str:
    """Cause where the question names its candidates and the answer takes the other one, or reverses the order."""
    about = heard.item
    if not about.chooses:
        return ""
    gold = {token.form for token in about.gold}
    poles = {stem(word) for word in about.asked_words if word in POLES}
    names = {token.form for token in tokenise(about.question) if token.kind == "name"}
    pair = [group for group in about.compared if not gold & names <= group]
    others = (frozenset().union(*pair) if len(pair) == 1 else names) - gold - poles
    votes = [vote for part in _statements(heard) if (vote := _votes(heard, part, others)) is not None]
    if votes:
        return "" if all(votes) else "it turns the order round"
    live = [p for p in range(len(heard.tokens)) if heard.segment[p] not in heard.denied]
    other = [p for p in live if heard.tokens[p].form in others]
    return (
        "it names the other candidate"
        if other and other[0] < min(heard.gold) and not _subordinate(heard, other[0])
        else ""
    )


def _statements(heard: Heard) -> list[list[int]]:
    """The places of each clause that is asserted; what follows `than` or `before` is still of the clause before it."""
    parts: dict[int, list[int]] = {}
    for place, number in enumerate(heard.segment):
        if number not in heard.denied:
            parts.setdefault(number, []).append(place)
    return list(parts.values())


def _votes(heard: Heard, part: Sequence[int], others: Collection[str]) -> bool | None:
    """Whether a clause gives the right candidate the property, or the other one its opposite; None for neither."""
    spoken = [heard.tokens[p].word for p in part if p not in heard.gold and heard.tokens[p].form not in others]
    said, asked = pole(spoken), pole(heard.item.asked_words)
    subject = next((p for p in part if p in heard.gold or heard.tokens[p].form in others), None)
    if said is None or asked is None or said[0] != asked[0] or subject is None:
        return None
    if _subordinate(heard, subject) and subject > next(p for p in part if heard.tokens[p].word in POLES):
        return None
    return (subject in heard.gold) == (said[1] == asked[1])


def _subordinate(heard: Heard, place: int) -> bool:
    words = [token.word for token in heard.tokens[max(0, place - 3) : place]]
    return bool(
        set(words) & {"than", "before", "after", "unlike", "to", "with", "while", "whereas", "although", "though"}
    )


def pole(words: Sequence[str]) -> tuple[int, int] | None:
    found = [POLES[word] for word in words if word in POLES]
    return next((end for end in found if end[0] not in _DEEDS), found[0] if found else None)


def reversed_roles(heard: Heard) -> str:
    """`Who beat Bob?`: `Bob beat X`."""
    about, words = heard.item, heard.item.asked_words
    if cause := _made_subject(heard):
        return cause
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


def _made_subject(heard: Heard) -> str:
    """Whether the right answer does what the question says that a name does to it: `X made Ann` for `Ann made X`."""
    words = heard.item.asked_words
    if (words[:1] and words[0] in ("who", "which", "what")) or heard.item.chooses:
        return ""
    for _, last in heard.blocks:
        verb, behind = (heard.tokens[p] if p < len(heard.tokens) else None for p in (last + 1, last + 2))
        if verb is None or behind is None or heard.segment[last + 2] in heard.denied:
            continue
        acts_on = behind.kind == "name" and behind.form in heard.item.names and verb.form in heard.item.asked
        if acts_on and verb.kind == "word" and verb.word.endswith("ed") and heard.item.named:
            return "it turns the roles round"
    return ""


def listed(heard: Heard) -> str:
    """A second candidate in addition to the right answer: names of the question, or anything new, joined to it."""
    for first, last in heard.blocks:
        if cause := _listed_behind(heard, last) or _listed_before(heard, first) or _accompanies(heard, first):
            return cause
    return ""


def _listed_behind(heard: Heard, last: int) -> str:
    place = last + 1
    join: list[str] = []
    while place < len(heard.tokens) and _continues(heard, place, join):
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


def _continues(heard: Heard, place: int, join: list[str]) -> bool:
    """Whether a token only joins: a mark or conjunction, then articles and adverbs: `and later the`."""
    token = heard.tokens[place]
    spoken = [t.word for t in heard.tokens[place : place + 3]]
    if spoken[:2] in (["together", "with"], ["along", "with"]) or spoken == ["as", "well", "as"]:
        join.append("and")
        return True
    if "and" in join and token.word in ("with", "well", "as"):
        return True
    if (token.word or token.form) in JOINS | {"the", "also"} or (token.word in ("a", "an") and not heard.item.named):
        return True
    return bool(set(join) & JOINS) and token.word in LATER


def _same_kind(heard: Heard, one: int, other: int) -> bool:
    return (heard.tokens[one].kind == "word") == (heard.tokens[other].kind == "word")


def _listed_asked(heard: Heard, place: int, end: int, join: Sequence[str]) -> str:
    if heard.item.chooses and join and _names_on(heard, place):
        return "it lists another name"
    if heard.tokens[place].kind != "name" or not join or in_place(heard, place, heard.forms(place, end)):
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
    if not run or (_numeric(heard) and heard.tokens[place].kind == "name" and join == [","] and min(heard.gold) > 2):
        return ""
    named = heard.tokens[place].kind in ("name", "number") or (run[0] in about.passage.names)
    if named and (_described(heard, place, end) or _bracketed(heard, place, join) or in_place(heard, place, run)):
        return ""
    if not named and (about.named or not join):
        return ""
    if not named and (_follows(about, heard.tokens[last].form, run) and "the" in join):
        return ""
    if (
        not named
        and len(run) > 1
        and "," not in join
        and acts(heard.tokens[place])
        and _follows(about, heard.tokens[last].form, run)
    ):
        return ""
    if not named:
        predicate = acts(heard.tokens[place]) and any(heard.part[p] == "asked" for p in range(last))
        clause = "," in join and begins_clause(heard, end)
        return "" if predicate or clause else "it lists another answer"
    beside = _follows(about, heard.tokens[last].form, run) and heard.tokens[last].form not in PEOPLES
    hard = {"and", "or", "&", "+", "/", "plus", ";"} & set(join)
    if (
        beside
        and not hard
        and (
            {"(", "the"} & set(join)
            or not join
            or " ".join(t.word for t in heard.tokens[place : end + 1]) in PLACES | PLACE_PAIRS
            or _numbers(heard, place, end)
        )
    ):
        return ""
    if begins_clause(heard, end) and ("," in join or not hard - {";"}):
        return ""
    own = about.near if about.chooses else about.passage.thread(about.evidence)
    if "(" in join and _numbers(heard, place, end) and (about.passage.spoken(run, own) or converts(run, about.lines)):
        return ""
    if _numbers(heard, place, end) and derived(heard, place, run):
        return ""
    return "it lists another answer"


def _bracketed(heard: Heard, place: int, join: Sequence[str]) -> bool:
    """Whether brackets after the right answer describe it: they stand together near it, and are no bare name."""
    if join[:1] != ["("]:
        return False
    closes = next((p for p in range(place, len(heard.tokens)) if heard.tokens[p].form == ")"), len(heard.tokens))
    inside = [t for p, t in enumerate(heard.tokens[place:closes], place) if heard.part[p] in ("new", "asked")]
    forms = {token.form for token in inside}
    return (_numeric(heard) or any(token.kind != "name" for token in inside)) and any(
        forms <= heard.item.passage.sentences[p].holds for p in heard.item.near
    )


def in_place(heard: Heard, place: int, run: Sequence[str]) -> bool:
    """Whether a state or country after a comma is the place of the right answer: `Lawrence County, South Dakota`."""
    about = heard.item
    if place < 2 or heard.tokens[place - 1].form != "," or heard.part[place - 2] not in ("gold", "asked", "benign"):
        return False
    if heard.part[place] == "asked" and about.passage.spoken((heard.tokens[place - 2].form, *run), about.near):
        return True
    spoken = " ".join(token.word for token in heard.tokens[place : place + len(run)])
    wide = spoken in PLACES | PLACE_PAIRS or (len(run) == 1 and run[0] in PEOPLES)
    asks = _PLACED & set(about.asked_words) or any(token.word in CLASSES for token in about.gold)
    return (
        bool(asks)
        and about.named
        and wide
        and bool(about.passage.spoken(run, about.passage.thread(about.evidence, loose=True)))
    )


def _numeric(heard: Heard) -> bool:
    """Whether the right answer is a number: a name with it is no second one."""
    return all(token.kind == "number" for token in heard.item.gold)


def _described(heard: Heard, place: int, end: int) -> bool:
    """Whether an apparent second name describes the right answer: `X, the Brazilian driver`, `Koral's album`."""
    before = heard.tokens[place - 1].word
    following = heard.tokens[end + 1] if end + 1 < len(heard.tokens) else None
    if following is None or not following.claims or following.kind == "name":
        return False
    return before in ("the", "a", "an") or any(token.owns for token in heard.tokens[place : end + 1])


def acts(token: Token) -> bool:
    """Whether a word looks like a verb with an object after it: `plays` drums."""
    return token.word.endswith("ed") or (token.word != token.form and not token.word.endswith("ss"))


def begins_clause(heard: Heard, end: int) -> bool:
    """Whether a verb follows: an apparent second candidate begins a clause of its own."""
    following = heard.tokens[end + 1] if end + 1 < len(heard.tokens) else None
    if following is None:
        return False
    verb = following.kind == "word" and acts(following) and not following.word.endswith("s")
    return verb or following.word in ("is", "was", "were", "are", "has", "had", "did")


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
    if join == ["("] and _numeric(heard):
        return ""
    if ";" in join and begins_clause(heard, next(end for begin, end in heard.blocks if begin == first)):
        return ""
    start = place
    while start > 0 and heard.part[start - 1] == heard.part[place] and _same_kind(heard, place, start - 1):
        start -= 1
    article = start > 0 and heard.tokens[start - 1].word in ARTICLES
    if not singles_out(heard.tokens[place], heard.item) and (
        article
        or (heard.item.named and "," in join)
        or heard.part[place] == "asked"
        or not join
        or (heard.item.named and in_source(heard.item, heard.tokens[place].form))
    ):
        return ""
    if _holds(heard, start, place, first, join):
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


def _holds(heard: Heard, start: int, place: int, first: int, join: Sequence[str]) -> bool:
    """Whether a name before the right one is a place in it, `Lyon, France`, or its spelling, `Lyonnais (Lyon)`."""
    about, run = heard.item, heard.forms(start, place)
    wide = bool({"where", "country", "state", "county", "province", "region", "continent"} & set(about.asked_words))
    gold = heard.tokens[first].form
    if join == [","] and wide and about.passage.spoken((run[-1], gold), about.evidence):
        return True
    return join == ["("] and run[-1][:4] == gold[:4] and len(gold) > 4


def _accompanies(heard: Heard, first: int) -> str:
    """Whether the right answer only comes with what opens the answer: `The Mill, followed by X`."""
    words = [token.word or token.form for token in heard.tokens[:first]]
    joins = first > 2 and words[-1] in ("by", "with") and words[-2].endswith("ed") and heard.part[first - 2] != "asked"
    opened = {heard.part[p] for p in range(first - 2) if heard.tokens[p].kind == "name"}
    finite = {"is", "was", "are", "were", "by", "had", "has"} & set(words[:-2])
    return "it names another first" if joins and "new" in opened and not finite else ""


def _titled(heard: Heard, end: int) -> bool:
    """Whether an answer begins with a name that continues up to a place: `A Lamp for Cormac and X`."""
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
    kind = (
        not end
        and is_word(heard.tokens[end].word)
        and any(run[-1] in about.passage.sentences[p].holds for p in about.evidence)
    )
    return "" if kind else "it names somebody else"


def of_one_alone(heard: Heard) -> str:
    """Whether an answer states about both what the source states about one: `both are folk bands`."""
    passage = heard.item.passage
    pair = heard.item.compared
    about = [p for p in heard.item.evidence if heard.item.subject[0] & passage.sentences[p].holds]
    for place, token in enumerate(heard.tokens):
        if heard.part[place] != "new" or heard.segment[place] in heard.denied or len(about) < 2 or not pair:
            continue
        if heard.tokens[place - 1].word == "both":
            continue
        here = [p for p in range(len(heard.tokens)) if heard.segment[p] == heard.segment[place]]
        shared = heard.gold & set(here) and not heard.item.chooses and not any(heard.part[p] == "asked" for p in here)
        if not shared and not any(heard.tokens[p].word in ("both", "they") for p in here):
            continue
        held = [p for p, s in enumerate(passage.sentences) if any(alike(token.form, form) for form in s.forms)]
        if len(held) == 1 and not any("same" in s.squeezed.split() for s in passage.sentences):
            return f"'{token.word}' is said of one of them alone"
    return ""
