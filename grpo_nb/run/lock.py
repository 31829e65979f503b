"""Lock of a run directory: one trainer per run, with a heartbeat."""

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from grpo_nb.printable import clean_logger
from grpo_nb.storage.files import RunError as RunError
from grpo_nb.storage.lock import HEARTBEAT_SECONDS, LONGEST_DOING, STALE_SECONDS, Lock, is_file
from grpo_nb.storage.lock import Owner as Owner
from grpo_nb.storage.lock import RunLocked as RunLocked

logger = clean_logger(__name__)

LOCK = "lock"
"""The lock's name in the run directory."""


class RunLock(Lock):
    """The right to write one run.

    >>> import tempfile
    >>> with RunLock(Path(tempfile.mkdtemp()) / "lock") as lock:
    ...     lock.held
    True
    """

    def __init__(
        self,
        path: Path,
        *,
        heartbeat: float = HEARTBEAT_SECONDS,
        stale: float = STALE_SECONDS,
        taken: "Callable[[RunLock], None]" = lambda lock: None,
    ) -> None:
        """`taken` is called with this lock each time that it is acquired."""
        super().__init__(path, heartbeat=heartbeat, stale=stale)
        self.fences = False
        """Whether a training that acquired it still runs: everything that it writes must `check` first."""
        self._taken = taken
        self._writing = threading.Lock()
        """Held around each change of the owner's entry in the file."""
        self._stop = threading.Event()
        self._beating: threading.Thread | None = None

    def acquire(self) -> None:
        """Acquire the lock as `Lock.acquire` does, and start the owner's heartbeat."""
        super().acquire()
        _held.add(self)
        self.fences = True
        self._taken(self)
        self._stop.clear()
        self._beating = threading.Thread(target=self._beat, name=f"heartbeat {self.path}", daemon=True)
        self._beating.start()

    def note(self, doing: str) -> None:
        """Publish the current work in the lock; an empty text means that it trains."""
        if self.mine():
            self._say(doing[:LONGEST_DOING].encode("ascii", "replace").decode())  # the file's size is fixed

    def release(self) -> None:
        """Give the lock back at the end of a training; harmless when it is not held, or was taken over."""
        try:
            self.revoke()
        finally:
            self.fences = False

    def revoke(self) -> None:
        """Give the lock back while its training is left open: its later writes are refused."""
        self._stop.set()
        try:
            if self._beating not in (None, threading.current_thread()):
                self._beating.join()
        finally:  # an interrupt while it waits must not leave the run locked
            super().release()
            _held.discard(self)

    def check(self) -> None:
        """Make sure that the lock is still this one's: after a machine was asleep, somebody may have taken over.

        Raises:
            RunLocked: somebody has, or it was released; nothing may be written any more.
        """
        if self.mine():
            return
        if self.held and not self.path.parent.is_dir():
            raise RunLocked(
                f"{self.path.parent} is gone: it was moved, renamed or removed while it was trained. This training "
                "writes nothing more. Start the run again from where it is now; it resumes from its newest "
                "checkpoint"
            )
        owner = self.owner()
        found = f"belongs to {owner}" if owner else "is free"
        if self.held and self._names_me(owner):
            found = "is a copy: another folder or file was put in its place"
        raise RunLocked(
            f"{self.path.parent} is no longer trained here: its lock {found}. This training writes nothing more. "
            "Watch the run, or start it again when it is free",
            owner,
        )

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _refusal(self, owner: Owner | None) -> RunLocked:
        """Names the owner and the choices."""
        if owner is not None and owner.pid == os.getpid() and owner.on_this_machine():
            who = "this process itself"
            choices = (
                "stop the session that trains it; a training that was left open (a generator that nobody closed) is "
                f"ended by `grpo_nb.release({str(self.path.parent)!r})`"
            )
        else:
            who = str(owner) if owner else "an unknown process"
            choices = "watch it from here, stop it (`run.knobs.request('stop')`), or use another run folder"
        return RunLocked(f"run {self.path.parent} is being trained by {who}; {choices}", owner)

    def _beat(self) -> None:
        while not self._stop.wait(self._heartbeat):
            if not self.mine() or self._me is None or self._fd is None:
                logger.error("%s was taken over by %s: training here must stop", self.path, self.owner())
                return
            self._say()

    def _say(self, doing: str | None = None) -> None:
        """Write a heartbeat, and the current work if that is new."""
        with self._writing:
            if self._me is None or self._fd is None:
                return
            self._me = replace(self._me, heartbeat=time.time(), doing=self._me.doing if doing is None else doing)
            try:
                if not is_file(self._fd, self._file):
                    raise OSError(errno.EBADF, "its descriptor was closed by other code")
                self._separate()
                self._write(self._fd, self._me)
            except OSError as error:  # a full or absent disk: the next beat may succeed
                logger.warning("no heartbeat in %s: %s", self.path, error)


def held_here() -> list[Path]:
    """The locks that this process holds."""
    return [lock.path for lock in list(_held) if lock.held]


def release_here(path: Path) -> bool:
    """Release the lock at `path` if this process holds it; returns whether it did. Its training can write no more."""
    held = [lock for lock in list(_held) if lock.held and lock.path.resolve() == path.resolve()]
    for lock in held:
        lock.revoke()
    return bool(held)


_held: "weakref.WeakSet[RunLock]" = weakref.WeakSet()
