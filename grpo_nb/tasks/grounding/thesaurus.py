"""Thesaurus: words of nearly the same meaning, wider classes and opposites, in a table made from WordNet 3.1.

Single words of some frequency, in their main senses, as `tests/support/make_thesaurus.py` takes them from WordNet
(Princeton University); `thesaurus-license.txt` is its licence. Words are compared in the form that `stem` returns.
"""

import gzip
from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import cache, lru_cache
from importlib.resources import files
from typing import NamedTuple

from grpo_nb.tasks.grounding.stems import related, stem


class _Table(NamedTuple):
    synsets: tuple[frozenset[str], ...]
    broader: tuple[tuple[int, ...], ...]
    places: dict[str, list[int]]
    """Synsets of each form."""
    family: dict[str, set[str]]
    opposites: frozenset[tuple[str, str]]
    adverbs: frozenset[str]


def alike(one: str, other: str) -> bool:
    """Whether two forms are of one family of words, share a sense, or one is the other's class.

    >>> alike("attorney", "lawyer"), alike("botanist", "botany"), alike("lawyer", "doctor")
    (True, True, False)
    """
    return one == other or related(one, other) or other in kin(one)


def any_alike(form: str, others: Collection[str]) -> bool:
    """Whether a form is alike one of others."""
    return form in others or not kin(form).isdisjoint(others) or any(related(form, other) for other in others)


@lru_cache(maxsize=32768)
def kin(form: str) -> frozenset[str]:
    """The forms of the same family, of the same senses, and of the classes one step up."""
    table = _table()
    places = table.places.get(form, ())
    return synonyms(form).union(*(table.synsets[wider] for place in places for wider in table.broader[place]))


@lru_cache(maxsize=32768)
def synonyms(form: str) -> frozenset[str]:
    """The forms of the same family and of the same senses."""
    table = _table()
    family = {form} | table.family.get(form, set())
    return frozenset(family.union(*(table.synsets[place] for word in family for place in table.places.get(word, ()))))


def opposed(one: str, other: str) -> bool:
    """Whether two forms are opposites.

    >>> opposed("young", "old"), opposed("young", "new")
    (True, False)
    """
    return (one, other) in _table().opposites


def is_adverb(word: str) -> bool:
    """Whether a word is an adverb of degree or manner: `mainly`, `especially`.

    >>> is_adverb("mainly"), is_adverb("family")
    (True, False)
    """
    return word.endswith("ly") and word in _table().adverbs


def is_word(word: str) -> bool:
    """Whether a word is in the table: `ferry`, not `Ferdinand`."""
    return stem(word) in _table().places


@cache
def _table() -> _Table:
    text = gzip.decompress(files(__package__).joinpath("thesaurus.txt.gz").read_bytes()).decode()
    senses, derived, opposites = (part.splitlines() for part in text.split("\n\n"))
    synsets, broader, places = [], [], defaultdict(list)
    adverbs = set()
    for number, line in enumerate(senses):
        words, wider = line[1:].split("|")
        forms = frozenset(stem(word) for word in words.split())
        synsets.append(forms)
        broader.append(tuple(map(int, wider.split())))
        for form in forms:
            places[form].append(number)
        if line[0] == "r":
            adverbs |= set(words.split())
    family: dict[str, set[str]] = defaultdict(set)
    for one, other in _stems(derived):
        family[one].add(other)
        family[other].add(one)
    apart = frozenset(pair for one, other in _stems(opposites) for pair in ((one, other), (other, one)))
    return _Table(tuple(synsets), tuple(broader), dict(places), dict(family), apart, frozenset(adverbs))


def _stems(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    return ((stem(one), stem(other)) for one, other in map(str.split, lines))
