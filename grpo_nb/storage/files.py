"""Files that survive a kill: each is complete or missing, for every writer and reader.

Basis of the run directory: atomic replacement, locks, JSON that keeps nan and inf, and errors that state the remedy.
Every function here names the file it failed on.
"""

import errno
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from grpo_nb.storage import schema
from grpo_nb.storage.safe_open import RunError as RunError
from grpo_nb.storage.safe_open import opened

try:
    import fcntl
except ImportError:  # Windows: the package must still import
    fcntl = None  # type: ignore[assignment]


NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP})
"""Error numbers of a file system without file locks (NFS without lockd, Lustre mounted without flock, ...)."""

_READ_ONLY = "it is read-only for this user; make it writable or choose another run folder"
_FULL = "no space is left on the disk"
KEEP_FEWER = (
    "free some and start again: what was saved before is untouched. Of a run's checkpoints only 000000 and the newest "
    "are needed to go on; a new run keeps fewer with a lower run.keep_checkpoints"
)
_NO_FOLDER = "a part of this path is a file and not a folder; choose another path"
_ADVICE = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _READ_ONLY),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FULL),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.EISDIR), _NO_FOLDER),
}


@contextmanager
def clear_errors(action: str, path: Path) -> Iterator[None]:
    """Turn the operating system's errors into a RunError: `cannot <action> <path>: <reason>; <advice>`."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        advice = _ADVICE.get(error.errno or 0, "check the disk and the path, then start again")
        if advice == _FULL:
            advice += f" ({_free(path)} bytes are free); {KEEP_FEWER}"
        raise RunError(f"cannot {action} {path}: {reason}; {advice}") from error


def _free(path: Path) -> str:
    """Bytes free on the disk of `path`, which need not exist yet."""
    there = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
    try:
        return f"{shutil.disk_usage(there).free:,}"
    except OSError:
        return "an unknown number of"


def write_atomically(path: Path, data: bytes | Iterable[bytes], mode: int = 0o666) -> None:
    """Replace `path` by a file that holds `data`, or its parts; a reader, or a kill, meets the old one or the new one.

    Raises:
        RunError: the folder is read-only, missing, or the disk is full; `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with clear_errors("write", path):
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.writelines([data] if isinstance(data, bytes) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)
        _sweep(path)


def _sweep(path: Path, older_than: float = 60.0) -> None:
    """Remove what killed writers of `path` left; a living one is done long before a minute has passed."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        with _vanishing():
            if time.time() - leftover.stat().st_mtime > older_than:
                leftover.unlink()


@contextmanager
def _vanishing() -> Iterator[None]:
    """Context in which another process may remove the same file first, which is harmless."""
    try:
        yield
    except FileNotFoundError:
        return


def sync(path: Path) -> None:
    """fsync a file, or a folder's list of names, so that it outlives a power cut too.

    Kills need none of this: written data belongs to the kernel. File systems that cannot sync a folder say
    EINVAL, and have nothing better to offer.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def flock(fd: int, *, wait: bool = False, release: bool = False) -> Literal["taken", "busy", "unsupported"]:
    """Take, or release, the exclusive lock of an open file, which goes with the last copy of `fd` or its process.

    Raises:
        RunError: on Windows, which has no such locks.
    """
    if fcntl is None:
        raise RunError("writing a run needs POSIX file locks, which Windows lacks; run inside WSL instead")
    try:
        fcntl.flock(fd, fcntl.LOCK_UN if release else fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return "unsupported"
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return "busy"
        raise
    return "taken"


def flocked(fd: int) -> Literal["held", "free", "unsupported"]:
    """Whether the exclusive lock of an open file is "held" through another descriptor, or "free"; takes no lock."""
    if not hasattr(fcntl, "flock"):  # Windows, where a run can only be watched
        return "unsupported"
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        return "held" if error.errno in (errno.EACCES, errno.EAGAIN) else "unsupported"
    return "free"


def separate(path: Path) -> bool:
    """Put a copy in the place of a file of this user that has other names (hard links), which keep what they have.

    Whether it is this user's. Its lock is held meanwhile, so that nothing is appended to it that the copy lacks.

    Raises:
        Irregular: it is a link, or no regular file.
        OSError: it cannot be read.
        RunError: the copy cannot be written; the file is as it was.
    """
    fd = opened(path)
    try:
        flock(fd, wait=True)
        found = os.fstat(fd)
        if not is_own(fd):
            return False
        if found.st_nlink > 1 and same_file(fd, path):  # else another process was first
            with os.fdopen(os.dup(fd), "rb") as file:
                write_atomically(path, iter(lambda: file.read(1 << 20), b""), found.st_mode & 0o777)
        return True
    finally:
        os.close(fd)


def is_own(fd: int) -> bool:
    """Whether an open file is this user's."""
    return os.fstat(fd).st_uid == os.geteuid()


def same_file(fd: int, path: Path) -> bool:
    """Whether `path` still names the open file, and was not replaced or removed meanwhile."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


# JSON has no nan and no inf, and a diverged run is when they matter most. They are kept as the words that
# JavaScript, pandas and float() all understand; a text that is such a word is marked by a backslash.
_WORD = re.compile(r"\\*(?:NaN|-?Infinity)")


def to_json(value: Any, indent: int | None = None) -> bytes:
    """UTF-8 JSON that `from_json` turns back into the same value: floats to the bit, nan and inf included.

    Tuples come back as lists and keys as strings; numpy and torch scalars are taken as numbers.

    Raises:
        TypeError: something that is no JSON value, with the key it was found under.
    """
    text = json.dumps(_plain(value, ""), ensure_ascii=False, allow_nan=False, indent=indent)
    # a lone surrogate has no UTF-8; what backslashreplace makes of it is just its JSON escape
    return text.encode("utf-8", "backslashreplace")


def _plain(value: Any, key: str) -> Any:
    if isinstance(value, str):
        return "\\" + value if _WORD.fullmatch(value) else value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _word(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, key) for v in value]
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return _plain(value.item(), key)
    raise TypeError(f"'{key}' is a {type(value).__name__}, which JSON cannot hold; give numbers, texts, lists, dicts")


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def from_json(data: bytes) -> Any:
    """The value that `to_json` wrote.

    Raises:
        ValueError: not JSON, not UTF-8, or nested too deep.
    """
    value = schema.loads(data)
    # looking at every text costs more than parsing; most files hold no such word, and its first letter is soon sought
    words = (b"N" in data and b"NaN" in data) or (b"I" in data and b"Infinity" in data)
    return _revive(value) if words else value


def _revive(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _revive(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_revive(v) for v in value]
    if isinstance(value, str) and _WORD.fullmatch(value):
        return value[1:] if value[0] == "\\" else float(value)
    return value
