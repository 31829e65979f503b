"""Opening the files of a run folder: regular files only, never through a link that lies in the folder.

A run folder may come from anybody, and an archive can hold links, FIFOs and devices. The run folder itself, its
parents, data and model folders may be links: only what lies inside a run is refused.
"""

import errno
import os
import stat
from pathlib import Path

from grpo_nb.printable import Clean

_GUARDS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_WRITES = os.O_WRONLY | os.O_RDWR
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a folder"),
)


class RunError(Clean, ValueError):
    """Raised when a run directory does not allow an operation; the message has what was found and what to change."""


class Irregular(RunError):
    """Raised when an entry of a run folder is no file (or folder) of its own: a link, a FIFO, a socket, a device."""


def opened(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file of a run; with `os.O_CREAT` a new one if it is missing.

    Raises:
        Irregular: a link (with its target), FIFO, socket, device or folder; for writing, a file of several names.
        OSError: as `os.open`.
    """
    if os.path.lexists(path):
        refuse_irregular(path)
    try:
        fd = os.open(path, flags | _GUARDS, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):  # put there after the look above
            refuse_irregular(path)
        raise
    try:
        _refuse(path, os.fstat(fd), writes=bool(flags & _WRITES))
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_private(fd: int, rights: int) -> bool:
    """Whether an open file is this user's and gives nobody else any of the rights; Windows has no such modes."""
    found = os.fstat(fd)
    return os.name == "nt" or (found.st_uid == os.geteuid() and not found.st_mode & rights)


def read(path: Path, most: int) -> bytes:
    """The content of a regular file of at most so many bytes.

    Raises:
        Irregular: as `opened`.
        RunError: it is larger.
        OSError: as `os.open`.
    """
    with os.fdopen(opened(path), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise RunError(f"{path} has more than the {most:,} bytes that such a file may have; restore it from a copy")
    return data


def refuse_irregular(path: Path, *, writes: bool = False) -> None:
    """Refuse an existing path that is no regular file.

    Raises:
        Irregular: as `opened`.
        FileNotFoundError: the path does not exist.
    """
    _refuse(path, os.lstat(path), writes=writes)


def refuse_for_writing(path: Path) -> None:
    """Refuse to write where something other than a regular file with one name lies; a missing path is allowed."""
    if os.path.lexists(path):
        refuse_irregular(path, writes=True)


def refuse_linked(folder: Path) -> None:
    """Refuse a folder of a run that is a link, or no folder; a missing one is allowed.

    Raises:
        Irregular: with the link's target.
    """
    if os.path.lexists(folder) and not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise Irregular(_sentence(folder, os.lstat(folder).st_mode, "folder"))


def _refuse(path: Path, found: os.stat_result, *, writes: bool) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise Irregular(_sentence(path, found.st_mode, "file"))
    if writes and found.st_nlink > 1:
        raise Irregular(
            f"{path} is one file with {found.st_nlink} names (hard links), so writing it would change what lies under "
            "another name. A run writes files of its own only; put a copy in its place"
        )


def _sentence(path: Path, mode: int, needed: str) -> str:
    if stat.S_ISLNK(mode):
        what, change = f"a symbolic link to {os.readlink(path)!r}", f"put the {needed} itself there, or remove the link"
    else:
        what = next((words for test, words in _KINDS if test(mode)), "a file" if stat.S_ISREG(mode) else "no file")
        change = f"remove it, or restore the {needed}"
    return f"{path} is {what}. A run reads and writes regular files of its own folder only; {change}"
