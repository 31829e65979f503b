"""Judges short answers: whether one claims the right answer, and nothing that its source does not support.

An answer is read as claims. Words of the question, function words and frames (`According to the text`) claim nothing.
The rest must be the right answer, or stand in the source near it:

- no denial of it (`not X`, `anyone but X`), no head over it (`the sister of X`), no alternative to it (`X or Y`);
- no second candidate (`X and Y`), in whatever join;
- no name, number, date or superlative that the source does not have near the right answer.

Common words that the source does not have may still paraphrase it. A few of them among known ones are accepted; where
they are as many as the answer's own claims, rules cannot decide, and the verdict is `undecided`.
"""

import re
from collections.abc import Sequence

from grpo_nb.tasks.grounding.attachment import derived, held_in, misattached, of_noun
from grpo_nb.tasks.grounding.claims import content, tokenise
from grpo_nb.tasks.grounding.denials import RELATIVE_FORMS, left_open, moved, taken_back, wrong_side
from grpo_nb.tasks.grounding.hearing import ARTICLES, FRAMING, JOINS, LINKS, Heard, in_source, relative, singles_out
from grpo_nb.tasks.grounding.items import Item, Verdict
from grpo_nb.tasks.grounding.lexicon import VARIABLE
from grpo_nb.tasks.grounding.measures import converts
from grpo_nb.tasks.grounding.owners import of_the_other
from grpo_nb.tasks.grounding.relations import misrelated
from grpo_nb.tasks.grounding.rivals import acts, begins_clause, chosen, listed, of_one_alone, reversed_roles
from grpo_nb.tasks.grounding.stems import stem
from grpo_nb.tasks.grounding.thesaurus import synonyms
from grpo_nb.tasks.grounding.ties import other_actor, other_subject, stray
from grpo_nb.tasks.turns import standing

_THEIRS = frozenset(("his", "her", "its", "their"))


def judge_short(answer: str, about: Item) -> Verdict:
    """Whether a short answer claims the right one and nothing that the source does not hold near it."""
    if _claims(answer) == _claims(about.right) != []:
        return Verdict("correct")
    if holds_whole(answer, about.hallucinated, about.right):
        return Verdict("wrong", "it is the hallucinated answer")
    heard = Heard(standing(answer), about)
    if _hallucinates(heard):
        return Verdict("wrong", "it says what only the hallucinated answer says")
    if not heard.gold:
        return Verdict("absent", "it does not give the right answer")
    checks = (
        taken_back,
        left_open,
        wrong_side,
        moved,
        chosen,
        reversed_roles,
        listed,
        of_one_alone,
        of_the_other,
        stray,
        other_actor,
        other_subject,
        misrelated,
    )
    for check in checks[:3] if heard.scattered else checks[:6] if heard.restates and not about.chooses else checks:
        if cause := check(heard):
            return Verdict("wrong", cause)
    return added(heard)


def _claims(text: str) -> list[str]:
    """The forms of all words but articles."""
    return [token.form for token in tokenise(text) if token.kind != "mark" and token.word not in ("a", "an", "the")]


def _hallucinates(heard: Heard) -> bool:
    """Whether all that only the hallucinated answer claims is asserted."""
    about = heard.item
    claims = [t for t in content(tokenise(about.hallucinated)) if t.form not in about.asked and t not in about.gold]
    own = {token.form for token in claims} - {token.form for token in about.gold}
    if heard.gold and len(own) == 1 and all(token.word in VARIABLE for token in claims if token.form in own):
        return False  # a verb alone: `she was born on X`
    asserted = {form for first, last in heard.runs() for form in heard.forms(first, last)}
    known = frozenset().union(*(about.passage.sentences[place].holds for place in about.near)) | FRAMING
    return own <= asserted and not own <= known


def holds_whole(answer: str, hallucinated: str, right: str) -> bool:
    """Whether an answer is or contains the hallucinated text, where the right text does not."""
    hallucinated = next((line for line in hallucinated.splitlines() if line.strip()), "")
    ours, bad, gold = (
        f" {' '.join(t.form for t in tokenise(text) if t.kind != 'mark')} " for text in (answer, hallucinated, right)
    )
    return bad not in gold and len(bad) > 2 and (bad == ours or (len(bad.split()) > 3 and bad in ours))


def added(heard: Heard, slack: int = 1) -> Verdict:
    """Verdict on the claims of an answer beyond the right one: they must stand in the source near it."""
    about, strange = heard.item, []
    if cause := misattached(heard):
        return Verdict("wrong", cause)
    known = sum(part == "asked" and heard.tokens[p].kind != "name" for p, part in enumerate(heard.part))
    for first, last in heard.runs():
        run = heard.forms(first, last)
        if _supported(heard, first, last, run):
            known += len(run)
            continue
        if any(singles_out(heard.tokens[p], about) for p in range(first, last + 1)):
            return Verdict("wrong", f"'{' '.join(run)}' is not in the source near the answer")
        new = [form for form in run if not (told if _hangs(heard, first) else in_source)(about, form)]
        if _apposed(heard, first) and not new:
            return Verdict("wrong", f"'{' '.join(run)}' is said in the source of another thing")
        if (new and _hangs(heard, first)) or _joined(heard, first):
            return Verdict("wrong", f"'{' '.join(run)}' adds to the answer what is not in the source")
        strange += new
    if any(form in RELATIVE_FORMS for form in strange):
        return Verdict("wrong", f"'{' '.join(strange)}' is not in the source")
    if strange and heard.scattered and len({heard.tokens[p].form for p in heard.gold}) < len(set(about.essential)):
        return Verdict("undecided", f"'{' '.join(strange)}' may say otherwise what the right answer says")
    if len(strange) == 1 and _acts_otherwise(heard):
        return Verdict("undecided", f"'{strange[0]}' may say otherwise what the source says, or another thing")
    if len(strange) <= max(slack, 2 if _closes(heard) or not about.named else 0, known):
        return Verdict("correct")
    if len(strange) - known > 2:
        return Verdict("wrong", f"'{' '.join(strange)}' is not in the source")
    return Verdict("undecided", f"'{' '.join(strange)}' may paraphrase the source or add to it")


def told(about: Item, form: str) -> bool:
    """Whether the source has a form or a synonym near the right answer."""
    held = synonyms(form) | {form}
    return any(not held.isdisjoint(about.passage.sentences[place].holds) for place in about.near)


def _acts_otherwise(heard: Heard) -> bool:
    """Whether a strange verb stands between the right answer and the question's act: `X hated the bridge`."""
    asked = heard.item.asked_words
    if not heard.blocks or asked[:1] != ("who",) or len(asked) < 3:
        return False
    place = heard.blocks[0][1] + 1
    verb = stem(asked[1])
    return (
        place < len(heard.tokens)
        and heard.part[place] == "new"
        and not in_source(heard.item, heard.tokens[place].form)
        and all(token.form != verb for token in heard.tokens)
    )


def _closes(heard: Heard) -> bool:
    """Whether the answer ends by identifying the right one: `her co-author on the proof was X`."""
    if not heard.gold:
        return False
    first, last = heard.blocks[-1]
    place = first - 1
    while place >= 0 and heard.tokens[place].word in ARTICLES:
        place -= 1
    ends = all(heard.part[p] == "mark" for p in range(last + 1, len(heard.tokens)))
    return ends and place >= 0 and heard.tokens[place].word in ("is", "was", "are", "were", "be", "by")


def _supported(heard: Heard, first: int, last: int, run: Sequence[str]) -> bool:
    """Whether a run stands in the source near the answer; a detail of the answer, in a sentence that holds it."""
    about = heard.item
    if not any(singles_out(heard.tokens[p], about) for p in range(first, last + 1)):
        if _apposed(heard, first):
            own = about.passage.thread(about.evidence)
            return held_in(about, run[0], own) and all(in_source(about, form) for form in run)
        close = _joined(heard, first) or _hangs(heard, first)
        return all((told if close else in_source)(about, form) for form in run)
    following = next((t.form for t in heard.tokens[last + 1 :] if t.claims), "")
    ranks = re.fullmatch(r"\d+th", run[-1]) and following
    places = about.passage.spoken([*run, following] if ranks else run, about.near)
    if places and of_noun(heard, last):
        return True
    if _detail(heard, first):
        where = about.evidence if ranks else about.passage.thread(about.evidence if about.named else about.near, True)
        if about.asked_words[:1] == ("who",):  # `it` is no person
            things = frozenset(p for p in where if about.passage.sentences[p].squeezed.startswith("it "))
            where -= things - about.evidence
        return bool(places & where) or converts(run, about.lines) or derived(heard, first, run)
    if all(token.kind == "name" for token in heard.tokens[first : last + 1]) and all(map(about.passage.peoples, run)):
        return bool(places) or first == last or not set(run) <= about.passage.names
    return (
        bool(places) or converts(run, about.lines) or derived(heard, first, run) or _told_elsewhere(heard, first, run)
    )


def _apposed(heard: Heard, first: int) -> bool:
    """Whether a run describes the right answer directly before it: `X, a novel`."""
    place = first - 1
    while place >= 0 and heard.tokens[place].word in ARTICLES | {"the", "a", "an"}:
        place -= 1
    return 0 < place < first - 1 and heard.tokens[place].form == "," and heard.part[place - 1] == "gold"


def _told_elsewhere(heard: Heard, first: int, run: Sequence[str]) -> bool:
    """Whether the source has a run, wherever, in one sentence with the claim right before it: `stands in Kentshire`."""
    about = heard.item
    before = next((p for p in range(first - 1, -1, -1) if heard.tokens[p].claims), None)
    if before is None or heard.segment[before] != heard.segment[first] or heard.tokens[before].kind != "word":
        return False
    everywhere = about.passage.spoken(run, range(len(about.passage.sentences)))
    return any(heard.tokens[before].form in about.passage.sentences[place].holds for place in everywhere)


def _joined(heard: Heard, first: int) -> bool:
    """Whether a new claim stands in a second statement after the right answer: `X and the hill was sinking`."""
    behind = range(max((p for p in heard.gold if p < first), default=first), first)
    return any(
        heard.tokens[p].word == "and" and (heard.tokens[p + 1].kind in ("small", "name") or p + 1 == first)
        for p in behind
    )


def _detail(heard: Heard, first: int) -> bool:
    """Whether a new claim is attached to the right answer as its detail: `X of zanzibar`, `X, a plumber`."""
    if relative(heard, first):
        return True
    place = first - 1
    link: list[str] = []
    while (
        place >= 0 and heard.part[place] in ("small", "mark", "asked", "benign") and heard.tokens[place].kind != "name"
    ):
        link.append(heard.tokens[place].word or heard.tokens[place].form)
        place -= 1
    if place < 0 or heard.part[place] != "gold":
        return False
    if place + 1 == first and heard.tokens[first].word.endswith("ed"):
        return any(token.word == "by" for token in heard.tokens[first + 1 : first + 2])
    edge = place + 1
    if heard.tokens[place].kind == "number":  # `11 million viewers, a record`: what is counted belongs to the number
        counted = next((p for p in range(edge, first) if heard.part[p] not in ("asked", "benign")), edge)
        edge = counted if heard.tokens[counted].form == "," else edge
        link = link[: first - edge]
    if ";" in link and begins_clause(heard, first):
        return False
    if link == [","] and _apposition(heard, place) and acts(heard.tokens[first]):
        return False
    if "and" in link and heard.tokens[first - 1].word in _THEIRS:
        return False
    if any(part in ("asked", "benign") for part in heard.part[edge:first]):
        return link[-1] == "," and len(link) > 1 and link[-2] in ("a", "an", "the")
    return (
        bool(set(link) & LINKS)
        or ("," in link and bool(set(link) & {"a", "an", "the"}))
        or bool(link and set(link) <= JOINS | ARTICLES)
    )


def _hangs(heard: Heard, first: int) -> bool:
    """Whether a claim is a detail of the right answer, or continues one: `X, for the Danish national team`."""
    if _detail(heard, first):
        return True
    verbs = {"is", "was", "are", "were", "has", "had", "did", "does"}
    for place in range(first - 1, -1, -1):
        if heard.segment[place] != heard.segment[first] or heard.tokens[place].word in verbs:
            return False
        if heard.part[place] == "new" and (not place or heard.part[place - 1] != "new") and _detail(heard, place):
            return True
    return False


def _apposition(heard: Heard, place: int) -> bool:
    """Whether the right answer that ends at a place stands between commas: `her cousin, the poet X, wrote it`."""
    begins = next(first for first, last in heard.blocks if first <= place <= last)
    before = next((p for p in range(begins - 1, -1, -1) if heard.tokens[p].kind == "mark"), None)
    return before is not None and heard.tokens[before].form == "," and any(t.claims for t in heard.tokens[:before])
