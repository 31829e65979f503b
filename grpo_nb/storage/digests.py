"""Content digests of a run's inputs: files, examples, tokenizers, weights in memory.

Files are hashed in one pass (SHA-256). The digest of a large file is kept in the user's cache by path, size, times and
inode, so that a model of many gigabytes is read once and not at every start.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_nb.printable import clean_logger
from grpo_nb.storage import user_cache
from grpo_nb.storage.file_stamps import Stamp, canonical
from grpo_nb.storage.files import RunError, from_json, to_json, write_atomically
from grpo_nb.storage.lock import exclusive

logger = clean_logger(__name__)

CACHED_FROM = 1 << 20
"""Bytes of the smallest file whose digest is cached: a smaller one is read as quickly as the cache."""
SETTLED = 60.0
"""Seconds since its last change after which a file's times show the next change on any file system.

What is written through a memory map changes the times only once a page that was written back is written again: Linux
writes back within 35 s by default."""
BLOCKS = 512
"""Parts of the lines of a file, at most, that have a mark of their own."""
MARK = 6
"""Hexadecimal digits of a mark."""
LINES = (".json", ".jsonl", ".csv", ".txt")
"""Files whose lines are marked, to name the first that differs."""
SHORT = 12


class Part(BaseModel):
    """A file, or a set of examples."""

    model_config = ConfigDict(frozen=True)
    name: str = Field(max_length=4096)
    digest: str = Field(max_length=128)
    count: int = 0
    """Number of its lines or examples."""
    unit: str = Field(default="", max_length=32)
    marks: str = Field(default="", max_length=BLOCKS * MARK)
    """Short hashes of equal blocks of its lines or examples, one after the other."""
    names: tuple[str, ...] = Field(default=(), exclude=True)
    """Ids of its examples, while they are in memory."""
    earlier: str = Field(default="", exclude=True)
    """The digest that earlier versions gave it, where that is another."""


class Entry(BaseModel):
    """A dependency of a run, by content."""

    model_config = ConfigDict(frozen=True)
    digest: str = Field(max_length=128)
    source: str = Field(default="", max_length=4096)
    """Place where it was found, for people; it is no part of the content."""
    revision: str = Field(default="", max_length=256)
    """Revision of the hub."""
    parts: tuple[Part, ...] = ()
    earlier: str = Field(default="", exclude=True)
    """Digest of an earlier version, as of a part."""

    def is_as(self, before: "Entry") -> bool:
        """Whether the content is unchanged, by this version's digest or by an earlier one's."""
        return before.digest in (self.digest, self.earlier)


class Changed(RunError):
    """Raised when a file changed between being stamped and being hashed."""


def entry(parts: Iterable[Part], source: str = "", revision: str = "") -> Entry:
    """The entry of parts: their digests in their order, whatever their names and places."""
    parts = tuple(parts)
    earlier = _total(part.earlier or part.digest for part in parts) if any(part.earlier for part in parts) else ""
    total = _total(part.digest for part in parts)
    return Entry(digest=total, source=source, revision=revision, parts=parts, earlier=earlier)


def _total(each: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(each).encode()).hexdigest()


def of_text(name: str, text: str) -> Part:
    """A text in memory, as a part."""
    return Part(name=name, digest=hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())


def of_json(name: str, value: Any) -> Part:
    """A JSON value, as a part; the order of its keys does not count."""
    return Part(name=name, digest=hashlib.sha256(canonical(value)).hexdigest())


def of_file(path: Path, stamp: Stamp | None = None) -> Part:
    """The content of a file, which must still be the one of the stamp.

    Raises:
        Changed: it changed since the stamp was taken, or while it was read.
        RunError: it cannot be read.
    """
    try:
        found = Stamp.of(path.stat())
        if stamp not in (None, found):
            raise Changed(f"{path} changed while it was being loaded; let its writer finish, then start again")
        known = _cached(path, found) if found.size >= CACHED_FROM else None
        return known or _hashed(path, found)
    except OSError as error:
        raise RunError(f"{path} cannot be read ({(error.strerror or str(error)).lower()}); restore it") from error


def of_examples(name: str, unit: str, items: Sequence[Any], names: Sequence[str] = ()) -> Part:
    """JSON values in their order, as a part."""
    each = [hashlib.sha256(canonical(item)).digest() for item in items]
    digest = hashlib.sha256(b"".join(each)).hexdigest()
    return Part(name=name, digest=digest, count=len(each), unit=unit, marks=_marks(each), names=tuple(names))


def first_difference(old: Entry, new: Entry) -> str:
    """The first part that differs and, where marks show it, from which line or example on."""
    before = {part.name: part for part in old.parts}
    for part in new.parts:
        was = before.get(part.name) or (old.parts[0] if len(old.parts) == len(new.parts) == 1 else None)
        if was is None:
            return f"{part.name} is new"
        if was.digest != part.digest:
            return part.name + _place(was, part)
    gone = [name for name in before if name not in {part.name for part in new.parts}]
    return f"{gone[0]} is missing" if gone else "their order"


def _place(was: Part, now: Part) -> str:
    """Position of the change, `, from line 3 on`; empty where nothing is known of its lines."""
    if not was.marks or not now.marks:
        return ""
    if was.count != now.count:
        return f", {was.count} {now.unit}s before and {now.count} now"
    size = _block(now.count)
    pairs = range(0, min(len(was.marks), len(now.marks)), MARK)
    differing = (i // MARK for i in pairs if was.marks[i : i + MARK] != now.marks[i : i + MARK])
    if (block := next(differing, None)) is None:
        return ""
    start = block * size
    named = f" ({now.names[start]})" if now.names and size == 1 else ""
    where = f"{now.unit} {start + 1}" if size == 1 else f"{now.unit}s {start + 1} to {min(start + size, now.count)}"
    return f", first in {where}{named}"


def _block(count: int) -> int:
    return max(1, -(-count // BLOCKS))


def _marks(each: Sequence[bytes]) -> str:
    size = _block(len(each))
    blocks = (b"".join(each[i : i + size]) for i in range(0, len(each), size))
    return "".join(hashlib.sha256(block).hexdigest()[:MARK] for block in blocks)


def _hashed(path: Path, found: Stamp) -> Part:
    """Hash a file by reading it once."""
    began = time.time_ns()
    with path.open("rb") as file:
        if path.suffix.lower() in LINES:
            total, each = hashlib.sha256(), []
            for line in file:
                total.update(line)
                each.append(hashlib.sha256(line).digest()[:8])
            digest, marks, count, unit = total.hexdigest(), _marks(each), len(each), "line"
        else:
            digest, marks, count, unit = hashlib.file_digest(file, "sha256").hexdigest(), "", 0, ""
        if Stamp.of(os.fstat(file.fileno())) != found or Stamp.of(path.stat()) != found:
            raise Changed(f"{path} changed while it was read; let its writer finish, then start again")
    part = Part(name=path.name, digest=digest, count=count, unit=unit, marks=marks)
    if found.size >= CACHED_FROM and began - max(found.mtime, found.ctime) > SETTLED * 1e9:
        _remember(path, found, part)
    return part


# The user's cache


def cache_file() -> Path:
    """File in which digests of large files are kept for this user."""
    return user_cache.folder() / "digests.json"


def _cached(path: Path, stamp: Stamp) -> Part | None:
    name = str(path.resolve())
    kept = _read_cache().get(name)
    if not isinstance(kept, Mapping) or kept.get("stamp") != vars(stamp):
        return None
    try:
        if kept.get("seal") != _seal(name, stamp, kept.get("part")):
            return None  # of an earlier version, or not written by this user
        return Part.model_validate({**kept.get("part", {}), "name": path.name})
    except (ValidationError, TypeError, OSError, RunError):
        return None


def _seal(name: str, stamp: Stamp, part: Any) -> int:
    return user_cache.seal(user_cache.key(), canonical([vars(stamp), part]), name)


def _remember(path: Path, stamp: Stamp, part: Part) -> None:
    """Keep a digest; a cache that cannot be written costs time at the next start and nothing else."""
    file = cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(file):
            kept = {name: value for name, value in _read_cache().items() if os.path.exists(name)}
            name, plain = str(path.resolve()), part.model_dump()
            kept[name] = {"stamp": vars(stamp), "part": plain, "seal": _seal(name, stamp, plain)}
            write_atomically(file, to_json(kept))
    except (OSError, RunError) as error:
        logger.info("the digest of %s is not cached: %s", path, error)


def _read_cache() -> dict[str, Any]:
    try:
        kept = from_json(cache_file().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}
