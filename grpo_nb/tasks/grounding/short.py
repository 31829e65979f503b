"""Short answers: does one claim the right answer, and nothing more than its source holds?

An answer is read as claims. What the question says already, function words and frames (`According to the text`) claim
nothing. The rest must be the right answer, or stand in the source near it:

- no denial of it (`not X`, `anyone but X`), no head over it (`the sister of X`), no choice beside it (`X or Y`);
- no second candidate (`X and Y`), in whatever join;
- no name, number, date or superlative that the source does not have near the right answer.

Common words that the source does not have may still paraphrase it. Few of them beside known ones are let pass; where
they are as many as the answer's own claims, rules cannot decide, and the verdict is `undecided`.
"""

import re
from collections.abc import Sequence

from grpo_nb.tasks.grounding.claims import content, stem, tokenise
from grpo_nb.tasks.grounding.denials import RELATIVE_FORMS, left_open, moved, taken_back
from grpo_nb.tasks.grounding.hearing import ARTICLES, FRAMING, JOINS, LINKS, Heard, in_source, singles_out
from grpo_nb.tasks.grounding.items import Item, Verdict
from grpo_nb.tasks.grounding.rivals import chosen, listed, reversed_roles


def judge_short(answer: str, about: Item) -> Verdict:
    """Whether a short answer claims the right one and nothing that the source does not hold near it."""
    if _claims(answer) == _claims(about.right) != []:
        return Verdict("correct")
    if holds_whole(answer, about.hallucinated, about.right):
        return Verdict("wrong", "it is the hallucinated answer")
    heard = Heard(answer, about)
    if _hallucinates(heard):
        return Verdict("wrong", "it says what only the hallucinated answer says")
    if not heard.gold:
        return Verdict("absent", "it does not give the right answer")
    for check in (taken_back, left_open, moved, chosen, reversed_roles, listed):
        if cause := check(heard):
            return Verdict("wrong", cause)
    return added(heard)


def _claims(text: str) -> list[str]:
    """The forms of all words but articles."""
    return [token.form for token in tokenise(text) if token.kind != "mark" and token.word not in ("a", "an", "the")]


def _hallucinates(heard: Heard) -> bool:
    """Whether all that only the hallucinated answer claims is asserted."""
    about = heard.item
    own = {token.form for token in content(tokenise(about.hallucinated))} - about.asked - {t.form for t in about.gold}
    asserted = {form for first, last in heard.runs() for form in heard.forms(first, last)}
    known = frozenset().union(*(about.passage.sentences[place].holds for place in about.near)) | FRAMING
    return own <= asserted and not own <= known


def holds_whole(answer: str, hallucinated: str, right: str) -> bool:
    """Whether an answer is the hallucinated text, or has it whole, where the right text does not."""
    hallucinated = next((line for line in hallucinated.splitlines() if line.strip()), "")
    ours, bad, gold = (
        f" {' '.join(t.form for t in tokenise(text) if t.kind != 'mark')} " for text in (answer, hallucinated, right)
    )
    return bad not in gold and len(bad) > 2 and (bad == ours or (len(bad.split()) > 3 and bad in ours))


def added(heard: Heard, slack: int = 1) -> Verdict:
    """Whether what an answer says beyond the right one stands in the source near it."""
    about, known, strange = heard.item, 0, []
    known = sum(part == "asked" and heard.tokens[p].kind != "name" for p, part in enumerate(heard.part))
    for first, last in heard.runs():
        run = heard.forms(first, last)
        if _supported(heard, first, last, run):
            known += len(run)
            continue
        if any(singles_out(heard.tokens[p], about) for p in range(first, last + 1)):
            return Verdict("wrong", f"'{' '.join(run)}' is not in the source near the answer")
        new = [form for form in run if not in_source(about, form)]
        if new and _detail(heard, first):
            return Verdict("wrong", f"'{' '.join(run)}' adds to the answer what is not in the source")
        strange += new
    if any(form in RELATIVE_FORMS for form in strange):
        return Verdict("wrong", f"'{' '.join(strange)}' is not in the source")
    if len(strange) == 1 and _acts_otherwise(heard):
        return Verdict("undecided", f"'{strange[0]}' may say otherwise what the source says, or another thing")
    if len(strange) <= max(2 if _closes(heard) else slack, known):
        return Verdict("correct")
    if len(strange) - known > 2:
        return Verdict("wrong", f"'{' '.join(strange)}' is not in the source")
    return Verdict("undecided", f"'{' '.join(strange)}' may paraphrase the source or add to it")


def _acts_otherwise(heard: Heard) -> bool:
    """Whether a strange verb stands between the right answer and what the question asks of it: `X hated the bridge`."""
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
    """Whether the answer ends in what it says is the right one: `her co-author on the proof was X`."""
    if not heard.gold:
        return False
    first, last = heard.blocks[-1]
    place = first - 1
    while place >= 0 and heard.tokens[place].word in ARTICLES:
        place -= 1
    ends = all(heard.part[p] == "mark" for p in range(last + 1, len(heard.tokens)))
    return ends and place >= 0 and heard.tokens[place].word in ("is", "was", "are", "were", "be", "by")


def _supported(heard: Heard, first: int, last: int, run: Sequence[str]) -> bool:
    """Whether a run stands in the source near the answer; one that hangs on the answer, in a sentence that holds it."""
    about = heard.item
    if not any(singles_out(heard.tokens[p], about) for p in range(first, last + 1)):
        return all(in_source(about, form) for form in run)
    following = next((t.form for t in heard.tokens[last + 1 :] if t.claims), "")
    ranks = re.fullmatch(r"\d+th", run[-1]) and following
    places = about.passage.spoken([*run, following] if ranks else run, about.near)
    if _detail(heard, first):
        return bool(places & about.evidence)
    return bool(places) or _told_elsewhere(heard, first, run)


def _told_elsewhere(heard: Heard, first: int, run: Sequence[str]) -> bool:
    """Whether the source has a run, wherever, in one sentence with the claim right before it: `stands in Kentshire`."""
    about = heard.item
    before = next((p for p in range(first - 1, -1, -1) if heard.tokens[p].claims), None)
    if before is None or heard.segment[before] != heard.segment[first] or heard.tokens[before].kind != "word":
        return False
    everywhere = about.passage.spoken(run, range(len(about.passage.sentences)))
    return any(heard.tokens[before].form in about.passage.sentences[place].holds for place in everywhere)


def _detail(heard: Heard, first: int) -> bool:
    """Whether a new claim hangs on the right answer as its detail: `X of zanzibar`, `X, a plumber`."""
    place = first - 1
    link: list[str] = []
    while (
        place >= 0 and heard.part[place] in ("small", "mark", "asked", "benign") and heard.tokens[place].kind != "name"
    ):
        link.append(heard.tokens[place].word or heard.tokens[place].form)
        place -= 1
    if place < 0 or heard.part[place] != "gold":
        return False
    if any(part in ("asked", "benign") for part in heard.part[place:first]):
        return link[-1] == "," and len(link) > 1 and link[-2] in ("a", "an", "the")
    return (
        bool(set(link) & LINKS)
        or ("," in link and bool(set(link) & {"a", "an", "the"}))
        or bool(link and set(link) <= JOINS | ARTICLES)
    )
