"""Relations that an answer turns round, or gives to another than the source does. Each check gives a cause, or ''."""

import re
from collections.abc import Iterator, Sequence

from grpo_nb.tasks.grounding.attachment import of_noun
from grpo_nb.tasks.grounding.claims import Token
from grpo_nb.tasks.grounding.hearing import ARTICLES, Heard
from grpo_nb.tasks.grounding.lexicon import ACTING, TITLES
from grpo_nb.tasks.grounding.owners import belongs
from grpo_nb.tasks.grounding.thesaurus import any_alike

_THE = ARTICLES | frozenset(("a", "an", "the"))
_YEAR = re.compile(r"1\d{3}|20\d\d")
_LIFE = ACTING["born"][0]
_PEOPLE = frozenset(("person", "inhabitant", "resident", "citizen", "soul", "live", "time"))
_TIMES = frozenset(("year", "annum", "month", "week", "day", "hour", "minute", "second"))
_BEING = frozenset(("is", "was", "are", "were", "has", "had", "who", "which"))
_HANGING = frozenset(("from", "of", "by", "with"))
_BOUNDS = frozenset((",", ";", ".", ":", "(", ")", "!", "?"))


def misrelated(heard: Heard) -> str:
    """The first of these that holds."""
    for check in (
        _turned_round,
        _kind_of_another,
        _role_of_another,
        _attached_elsewhere,
        _renamed,
        _counted_otherwise,
        _dated_by_another,
        _numbered_otherwise,
        _life_turned,
    ):
        if cause := check(heard):
            return cause
    return ""


def _heads(tokens: Sequence[Token]) -> Iterator[tuple[str, str, int]]:
    """Each `R of X`: the head R, the first word of X, and the place of `of`."""
    for place, token in enumerate(tokens):
        if token.word == "of" and place and tokens[place - 1].kind == "word":
            ahead = next((p for p in range(place + 1, len(tokens)) if tokens[p].word not in _THE), None)
            if ahead is not None and tokens[ahead].claims:
                yield tokens[place - 1].form, tokens[ahead].form, place


def _turned_round(heard: Heard) -> str:
    """Whether the right answer is called R of something, where the source only has something that is R of it."""
    gold = {token.form for token in heard.item.gold}
    told: dict[str, set[str]] = {}
    for sentence in heard.item.passage.sentences:
        for head, of, _ in _heads(sentence.tokens):
            told.setdefault(head, set()).add(of)
    for head, of, place in _heads(heard.tokens):
        said_of_gold = any(p in heard.gold for p in range(place) if heard.segment[p] == heard.segment[place])
        known = told.get(head, set())
        turned = said_of_gold and gold & known and of not in known | gold
        if turned and heard.segment[place] not in heard.denied:
            return f"it turns '{head} of' round"
    return ""


def _kind_of_another(heard: Heard) -> str:
    """Whether the right answer is called what the source only calls another name: `X is a village`."""
    gold = {token.form for token in heard.item.gold}
    told = [pair for sentence in heard.item.passage.sentences for pair in _called(sentence.tokens)]
    behind = [heard.tokens[last + 1].word for _, last in heard.blocks if last + 1 < len(heard.tokens)]
    direct = bool({"is", "was"} & set(behind))
    for names, kinds in _called(heard.tokens) if direct else ():
        if not names & gold or not heard.item.named:
            continue
        for kind in kinds - heard.item.kinds:
            others = [known for known, called in told if kind in called]
            if others and not any(gold & known for known in others):
                return f"'{kind}' is another one in the source"
    return ""


def _called(tokens: Sequence[Token]) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
    """Each name before `is a`, with the common words after it."""
    for place, token in enumerate(tokens):
        behind = tokens[place + 1].word if place + 1 < len(tokens) else ""
        if token.word not in ("is", "was") or behind not in ("a", "an"):
            continue
        ends = (p for p in range(place - 1, 0, -1) if tokens[p].form in ".!?" and tokens[p - 1].word not in TITLES)
        begins = next(ends, -1) + 1
        names = frozenset(t.form for t in tokens[begins:place] if t.claims)
        phrase: list[str] = []
        for other in tokens[place + 2 :]:
            if not other.claims and other.form not in ("-", ","):
                break
            phrase += [other.form] if other.kind == "word" else []
        if names and phrase:
            yield names, frozenset(phrase)


def _holders(tokens: Sequence[Token]) -> Iterator[tuple[str, frozenset[str]]]:
    """Each role next to a name: `the thesis supervisor X`, `X, the thesis supervisor`, `X was the supervisor`."""
    place = 0
    while place < len(tokens):
        if tokens[place].kind != "name" or tokens[place].word in TITLES:
            place += 1
            continue
        end = place
        while end + 1 < len(tokens) and tokens[end + 1].kind == "name" and not tokens[end].owns:
            end += 1
        names = frozenset(token.form for token in tokens[place : end + 1])
        if place and tokens[place - 1].kind == "word" and tokens[place - 1].claims:
            yield tokens[place - 1].form, names
        behind = tokens[end + 1 : end + 7]
        opens = [t.word or t.form for t in behind[:2]]
        if (
            len(opens) > 1
            and opens[0] in (",", "is", "was")
            and opens[1] in ("the", "a", "an")
            and not tokens[end].owns
        ):
            phrase = []
            for token in behind[2:]:
                if token.kind != "word":
                    break
                phrase.append(token.form)
            if phrase:
                yield phrase[-1], names
        copula = [t.word for t in tokens[max(0, place - 2) : place]]
        if len(copula) == 2 and copula[1] in ("is", "was") and tokens[place - 2].kind == "word":
            yield tokens[place - 2].form, names
        place = end + 1


def _role_of_another(heard: Heard) -> str:
    """Whether a name gets a role that the source gives to other names, while this one has another role there."""
    about = heard.item
    told = [pair for sentence in about.passage.sentences for pair in _holders(sentence.tokens)]
    called = [pair for sentence in about.passage.sentences for pair in _called(sentence.tokens)]
    gold = {token.form for token in about.gold}
    for role, names in _holders(heard.tokens):
        holders = set().union(*(others for known, others in told if known == role))
        holders |= set().union(*(others for others, kinds in called if role in kinds))
        own = any(names & others and known != role for known, others in told)
        apart = own if role not in about.asked else not names & about.asked
        if holders and apart and not names & (holders | gold) and names <= about.passage.names:
            return f"'{role}' is another one in the source"
    return ""


def _attached_elsewhere(heard: Heard) -> str:
    """Whether the right answer gets a name with the same preposition that attaches it to another name in the source."""
    about, gold = heard.item, {token.form for token in heard.item.gold}
    told: dict[tuple[str, str], set[str]] = {}
    for sentence in about.passage.sentences:
        for owner, link, name in _hung(sentence.tokens):
            told.setdefault((link, name), set()).add(owner)
    for owner, link, name in _hung(heard.tokens):
        owners = told.get((link, name), set())
        if owner in gold and name not in about.asked and owners and not owners & gold:
            return f"'{link} {name}' hangs on another name in the source"
    return ""


def _hung(tokens: Sequence[Token]) -> Iterator[tuple[str, str, str]]:
    """Each `X from the Y`: the last word of a name, the preposition, the first word of the name after it."""
    line = [token for token in tokens if token.word not in _THE and token.form != ","]
    for one, link, other in zip(line, line[1:], line[2:], strict=False):
        if one.kind == other.kind == "name" and link.word in _HANGING:
            yield one.form, link.word, other.form


def _renamed(heard: Heard) -> str:
    """Whether the right name continues with a word that makes another name of it: `the X Trophy`."""
    about, gold = heard.item, {token.form for token in heard.item.gold}
    for _, last in heard.blocks if about.named else ():
        following = heard.tokens[last + 1] if last + 1 < len(heard.tokens) else None
        if following is None or following.kind != "name" or heard.tokens[last].owns or following.form in gold:
            continue
        beside = about.passage.spoken((heard.tokens[last].form, following.form), range(len(about.passage.sentences)))
        if heard.part[last + 1] in ("asked", "benign") and not beside:
            return f"'{following.word}' makes another name of the right one"
    return ""


def _counted_otherwise(heard: Heard) -> str:
    """Whether the right number counts other things than the source's, or is set against something: `743 households`."""
    about = heard.item
    if not about.gold or any(token.kind != "number" for token in about.gold):
        return ""
    for _, last in heard.blocks:
        following = [token for token in heard.tokens[last + 1 : last + 4] if token.form not in _BOUNDS]
        if not following or following[0] != heard.tokens[last + 1]:
            continue
        words = [token.word for token in following]
        if (
            "per" in words
            and not _TIMES & set(words)
            and not about.passage.preceded("per", heard.tokens[min(last + 3, len(heard.tokens) - 1)].form)
        ):
            return "it sets the number against something"
        noun = following[0]
        known = noun.form in _PEOPLE or any_alike(noun.form, about.passage.holds | about.asked_claims)
        if noun.kind == "word" and noun.word.endswith("s") and not known:
            return f"'{noun.word}' is not what the source counts"
    return ""


def _clauses(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """The parts of a sentence that a year may belong to; a bracket belongs to what is before it."""
    part: list[Token] = []
    for place, token in enumerate(tokens):
        ahead = tokens[min(place + 1, len(tokens) - 1)]
        joins = token.word in ("and", "but") and not (part and part[-1].kind == ahead.kind == "number")
        if (token.form in ",;)" or joins or token.word in ("which", "who")) and any(t.kind == "word" for t in part):
            yield part
            part = []
        else:
            part.append(token)
    yield part


def _dated_by_another(heard: Heard) -> str:
    """Whether a year stands with words that the source has with another year: `written in 1963`."""
    about = heard.item
    clauses = [clause for place in sorted(about.near) for clause in _clauses(about.passage.sentences[place].tokens)]
    dated = [
        ({t.form for t in clause}, years)
        for clause in clauses
        if (years := {t.form for t in clause if _YEAR.fullmatch(t.form)})
    ]
    for place, token in enumerate(heard.tokens):
        if not _YEAR.fullmatch(token.form) or heard.part[place] == "benign" or belongs(heard, place):
            continue
        if heard.segment[place] in heard.denied or about.chooses or of_noun(heard, place):
            continue
        words = _words_of(heard, place) or (about.subject[1] if _bare(heard, place) else set())
        fits = [len(words & clause) for clause, years in dated if token.form in years]
        other = [len(words & clause) for clause, years in dated if token.form not in years]
        if other and max(other) > max(fits, default=0) and 2 * max(other) >= len(words):
            return f"'{token.form}' is not when, in the source"
    return ""


def _bare(heard: Heard, place: int) -> bool:
    """Whether a new year stands right after the right answer: `X, from 2011`."""
    gold = max((p for p in heard.gold if p < place), default=None)
    if gold is None or heard.part[place] != "new":
        return False
    between = heard.tokens[gold + 1 : place]
    if any(token.form == "(" for token in between):
        return False
    alone = all(t.kind in ("small", "mark") for t in between if heard.segment[gold] != heard.segment[place])
    return alone or not any(t.word in _BEING or t.word.endswith("ed") for t in between)


def _words_of(heard: Heard, place: int) -> set[str]:
    """The common words before a year, back to the number or the break before it."""
    found: set[str] = set()
    for p in range(place - 1, -1, -1):
        token = heard.tokens[p]
        if heard.segment[p] != heard.segment[place] or (token.kind == "number" and _YEAR.fullmatch(token.form)):
            break
        if token.kind == "word" and heard.part[p] in ("new", "asked"):
            found.add(token.form)
    return found


def _numbered_otherwise(heard: Heard) -> str:
    """Whether a number counts what the source counts with another one: `twenty wins` for `seven wins`."""
    told: dict[str, set[str]] = {}
    for sentence in heard.item.passage.sentences:
        for number, noun in _numbered(sentence.tokens):
            told.setdefault(noun, set()).add(number)
    for place, token in enumerate(heard.tokens):
        if heard.part[place] in ("new", "gold") and token.kind == "number" and heard.segment[place] not in heard.denied:
            pairs = list(_numbered(heard.tokens[place : place + 3]))[:1]
            if any(noun in told and number not in told[noun] for number, noun in pairs):
                return f"'{token.word}' is not how many, in the source"
    return ""


def _numbered(tokens: Sequence[Token]) -> Iterator[tuple[str, str]]:
    """Each number right before what it counts, or with one word between."""
    for place, token in enumerate(tokens):
        if token.kind != "number" or not token.form.isdigit():
            continue
        ahead = tokens[place + 1 : place + 3]
        noun = next((t for t in ahead if t.kind == "word" and t.word.endswith("s")), None)
        if noun and all(t.kind == "word" for t in ahead[: ahead.index(noun) + 1]):
            yield token.form, noun.form


def _life_turned(heard: Heard) -> str:
    """Whether a year of death is called one of birth, or the other way round: `born in 1659` for `(1587-1659)`."""
    about = heard.item
    spans = [
        (tokens[p].form, tokens[q].form)
        for sentence in about.passage.sentences
        for tokens in [sentence.tokens]
        for p, token in enumerate(tokens)
        if _YEAR.fullmatch(token.form)
        for q in [next((q for q in range(p + 1, min(p + 7, len(tokens))) if _YEAR.fullmatch(tokens[q].form)), None)]
        if q is not None
        and any(t.form in ("-", " - ") for t in tokens[p:q])
        and any(t.form == "(" for t in tokens[max(0, p - 12) : p])
    ]
    for place, token in enumerate(heard.tokens):
        acts = [
            ACTING[t.word][1] if ACTING.get(t.word, (None, 0))[0] == _LIFE else None
            for p, t in enumerate(heard.tokens[:place])
            if heard.segment[p] == heard.segment[place] and (t.word in ACTING or t.word.endswith("ed"))
        ]
        if acts and acts[-1] is not None and heard.segment[place] not in heard.denied and _YEAR.fullmatch(token.form):
            ours = {number for span in spans for number in (0, 1) if span[number] == token.form}
            if ours and acts[-1] not in ours:
                return f"'{token.form}' is the other end of the life"
    return ""
