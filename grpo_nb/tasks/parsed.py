"""Parsed data sets, shared in memory: content that an existing task was made from is not parsed a second time."""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from weakref import WeakValueDictionary

from grpo_nb.storage import file_stamps
from grpo_nb.types import Example


@dataclass(eq=False)
class Parsed:
    """Parsed files of a task. It is shared, so it never changes once it is made."""

    examples: dict[Literal["train", "test"], list[Example]]
    rows: int
    set_aside: list[str] = field(default_factory=list)
    """Places of the rows that are in no split."""


_IN_USE: "WeakValueDictionary[Hashable, Parsed]" = WeakValueDictionary()


def once(settings: Hashable, files: Sequence[Path], parse: Callable[[], Parsed]) -> Parsed:
    """Result of `parse`, or its earlier result for the same content and settings while that is alive.

    The files are read in either case, to compare their content, and noted (see `reads`).

    Args:
        settings: everything else that `parse` depends on.
        files: what `parse` reads, in its order; empty where that is no file: nothing is shared then.
    """
    try:
        found = [file_stamps.FileRead(file, file_stamps.Stamp.of(file.stat())) for file in files]
        key = (settings, *((file.name, _digest(file)) for file in files))
    except OSError:  # parse raises the clear error
        return parse()
    if files and (kept := _IN_USE.get(key)) is not None:
        file_stamps.add(found)
        return kept
    made = parse()
    if files and not any(read.replaced() for read in found):
        _IN_USE[key] = made
    return made


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
