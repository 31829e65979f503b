"""The form that the inflections of a word share, and whether two forms are of one word."""

import re
from functools import lru_cache

from grpo_nb.tasks.grounding.lexicon import DEMONYMS, VARIABLE


@lru_cache(maxsize=65536)
def stem(word: str) -> str:
    """The form that a word's inflections share; British spelling becomes American, a country its people.

    >>> stem("designed"), stem("theatres"), stem("wrote"), stem("Hungary".lower())
    ('design', 'theater', 'write', 'hungarian')
    """
    for table in (VARIABLE, DEMONYMS):
        if word in table:
            return table[word]
    word = _american(_singular(word))
    for ending in ("ing", "ed"):
        if word.endswith(ending) and len(word) - len(ending) >= 4 - (ending == "ed"):
            return _bare_verb(word[: -len(ending)])
    word = word[:-1] if word.endswith("ll") and len(word) > 5 else word
    return word[:-1] if word.endswith("e") and len(word) > 4 else word


def _bare_verb(word: str) -> str:
    doubled = len(word) > 3 and word[-1] == word[-2] and (word[-1] not in "lsz" or (word[-1] == "l" and len(word) > 5))
    word = word[:-1] if doubled else word
    return word[:-1] if word.endswith("e") and len(word) > 4 else word


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return f"{word[:-3]}y"
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and len(word) > 3 and not word.endswith(("ss", "us", "is")) else word


def _american(word: str) -> str:
    word = re.sub(r"(?<=\w{3})our$", "or", word)
    word = re.sub(r"(?<=[a-z][a-z])([bt])re$", r"\1er", word)
    return re.sub(r"is(e|ed|ing)$", r"iz\1", word) if len(word) > 6 else word


def related(one: str, other: str) -> bool:
    """Whether two forms are of one word, `design` and `designer`: equal, or with five letters or more in common.

    >>> related("automat", "automatic"), related("compar", "compos")
    (True, False)
    """
    shortest = min(len(one), len(other))
    return one == other or (shortest >= 5 and one[: max(5, shortest - 1)] == other[: max(5, shortest - 1)])


@lru_cache(maxsize=8192)
def people(form: str) -> frozenset[str]:
    """The country that a people may be of, by its ending: `libyan`, `tunisian`, `vostrian`."""
    ends = ("n", "an", "ian", "ese", "i", "er", "ish")
    return frozenset(
        (form, *(form[: -len(e)].rstrip("e") for e in ends if form.endswith(e) and len(form) - len(e) >= 4))
    )
