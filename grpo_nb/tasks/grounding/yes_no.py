"""Answers to yes/no questions: by a yes or a no, or by saying the question's words again."""

import re
from collections.abc import Set

from grpo_nb.tasks.grounding.claims import content, forms, tokenise
from grpo_nb.tasks.grounding.hearing import Heard
from grpo_nb.tasks.grounding.items import Item, Verdict
from grpo_nb.tasks.grounding.lexicon import POLES, words
from grpo_nb.tasks.grounding.owners import of_the_other
from grpo_nb.tasks.grounding.rivals import of_one_alone, pole
from grpo_nb.tasks.grounding.short import added, holds_whole, told
from grpo_nb.tasks.grounding.ties import other_actor
from grpo_nb.tasks.turns import parts

_YES = frozenset(words("yes yeah yep correct true indeed affirmative"))

_NO = frozenset(words("no nope false incorrect negative not neither"))

_SHARED = frozenset(words("same both share shared common alike"))
_DIFFERENT = frozenset(word for word, end in POLES.items() if end == (POLES["same"][0], 1)) | {"separate"}
_NO_NO = re.compile(r"\bno (?:doubt|question|wonder|surprise|less|more|two|difference)\b")
"""A `no` that denies nothing of the question."""
_STATES = frozenset(words("is was are were does did do has have had"))
SLACK = 8
"""Common words that the source lacks, around a yes or a no: they claim nothing."""


def judge_yes_no(answer: str, about: Item) -> Verdict:
    """The verdict on an answer to a yes/no question."""
    heard = Heard(answer, about)
    says = _polarity(heard, len(parts(answer, within=True)) > 1)
    true = set(forms(about.hallucinated)) <= about.passage.holds and says_yes_or_no(answer)
    if len(forms(about.hallucinated)) > 1 and not true and holds_whole(answer, about.hallucinated, about.right):
        return Verdict("wrong", "it is the hallucinated answer")
    if says is None:
        return Verdict("absent", "it says neither yes nor no")
    if says != (tokenise(about.right)[0].word == "yes"):
        return Verdict("wrong", "it says the other of yes and no")
    if _contradicts(heard, says):
        return Verdict("wrong", "it contradicts its own yes or no")
    if cause := of_one_alone(heard):
        return Verdict("wrong", cause)
    if cause := of_the_other(heard) or other_actor(heard) or _other_kind(heard):
        return Verdict("wrong", cause)
    return added(heard, slack=SLACK)


def _polarity(heard: Heard, turned: bool) -> bool | None:
    """Whether an answer is a yes; of both words, the last counts after a correction, else it is neither (None)."""
    words = [token.word for token in heard.tokens if token.kind != "mark"]
    text = " ".join(words)
    if re.search(r"\bnot (?:yes|no)\b|\b(?:false|incorrect|untrue) that\b.*\bnot\b", text):
        return None
    words = _NO_NO.sub("", text).split()
    found = [word in _YES for word in words if word in ("yes", "no", "yeah", "yep", "nope")]
    if len(set(found)) > 1:
        return found[-1] if turned else None
    if found:
        return found[0]
    if re.search(r"\bnot (?:true|correct|right|so|the case) that\b", " ".join(words)):
        return _restated(heard)
    lead = next(
        (word for word in words if word not in ("probably", "it", "that", "this", "is", "are", "they", "certainly")), ""
    )
    if lead in _YES or lead in _NO:
        return lead in _YES
    return _restated(heard)


def _restated(heard: Heard) -> bool | None:
    """Yes where an answer restates the question, no where it denies it or states its opposite."""
    about = heard.item
    words = [token.word for token in heard.tokens]
    if "neither" in words or "only" in words:
        return False
    claims = [place for place, token in enumerate(heard.tokens) if token.claims]
    if not claims and words[:1] and {"it", "they", "he", "she", "both"} & set(words) and _STATES & set(words):
        return not heard.denied
    asked = about.subject[1]
    said_again = [place for place in claims if heard.tokens[place].form in asked]
    ends = {end for word in words if word in POLES for scale, end in [POLES[word]]}
    turned = (
        pole(words) is not None
        and pole(about.asked_words) is not None
        and (
            pole(words)[0] == pole(about.asked_words)[0] and not (ends & {pole(about.asked_words)[1]})  # type: ignore[index]
        )
    )
    again = {heard.tokens[p].form for p in said_again}
    all_again = bool(claims) and all(heard.tokens[p].form in about.asked for p in claims)
    alike = bool(_SHARED & set(about.asked_words)) and "both" in words
    enough = (
        alike
        or (all_again and bool({"both", "they"} & set(words)))
        or (bool(again) and len(again) * 2 >= len(asked))
        or turned
        or (not claims and bool({"both", "they"} & set(words)))
    )
    return (not heard.denied) != turned if enough else None


def _told_apart(about: Item, said: Set[str]) -> bool:
    """Whether words call two things different that the question calls the same."""
    return "same" in about.asked_words and bool(_DIFFERENT & said)


def _other_kind(heard: Heard) -> str:
    """Cause where an answer calls a thing something that the source does not: `no, it is a drama`."""
    for place, token in enumerate(heard.tokens):
        before = [t.word for t in heard.tokens[max(0, place - 2) : place]]
        calls = before[-1:] in (["a"], ["an"]) and set(before) & {"is", "was", "it", "are", "were"}
        known = token.form in heard.item.asked or heard.part[place] not in ("new", "asked")
        if calls and not known and not told(heard.item, token.form):
            return f"'{token.word}' is not what the source calls it"
    return ""


def _contradicts(heard: Heard, says: bool) -> bool:
    about = heard.item
    parts: dict[int, list[int]] = {}
    for place, number in enumerate(heard.segment):
        parts.setdefault(number, []).append(place)
    asked = {token.form for token in content(tokenise(about.question)) if token.kind != "name"}
    for number, places in parts.items():
        words = {heard.tokens[p].word for p in places}
        new = [p for p in places if heard.part[p] == "new" and heard.tokens[p].word not in _DIFFERENT]
        denied = (number in heard.denied) != _told_apart(about, words)
        again = {heard.tokens[p].form for p in places if heard.part[p] == "asked"}
        if says and denied and not new and not words & {"no", "only", "just"}:
            return True
        if says and {"but", "only"} <= words and any(heard.part[p] == "asked" for p in places):
            return True
        whole = words & {"both", "they"} or all(again & group for group in about.candidates)
        if not says and not denied and "both" in words and "same" in about.asked_words:
            return True
        if not says and not denied and whole and asked and len(asked & again) >= 0.6 * len(asked) and not new:
            return True
    return False


def says_yes_or_no(answer: str) -> bool:
    """Whether an answer begins with a yes or a no."""
    return bool(re.match(r"\W*(?:yes|no)\b(?! information)", answer, re.IGNORECASE))
