"""One trainer a run: a lock that a dead owner cannot keep and a living one cannot lose.

The kernel's file lock (flock) decides, because it ends with its process however that dies. The file's
content tells people and other machines who it is. Where the file system has no such locks, or where the
owner is on another machine, process id and heartbeat decide instead.
"""

import errno
import getpass
import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grpo_nb.storage import documents
from grpo_nb.storage.files import RunError, clear_errors, flock, same_file
from grpo_nb.storage.regular import opened
from grpo_nb.terminal import clean_logger, one_line

logger = clean_logger(__name__)

LOCK = "lock"
"""The lock's name in the run directory."""
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
"""An owner on another machine that has given no sign of life for so long is taken for dead."""
_SIZE = 1024
"""The content is padded to this and written over itself, so that a reader never meets an empty or cut file."""


class RunLocked(RunError):
    """Somebody else trains this run; `owner` says who."""

    def __init__(self, message: str, owner: "Owner | None" = None) -> None:
        super().__init__(message)
        self.owner = owner


@dataclass(frozen=True)
class Owner:
    """Who trains a run, as the lock file has it. Times are seconds since 1970."""

    pid: int
    host: str
    boot: str
    """The machine's boot, which tells machines of one name apart, and a restarted one from itself."""
    user: str
    started: float
    """When the process started."""
    since: float
    """When it took the lock."""
    heartbeat: float
    """Its last sign of life, one every few seconds."""
    token: str
    """Different each time that the lock is taken."""

    @classmethod
    def here(cls) -> "Owner":
        """This process, now."""
        now = time.time()
        return cls(os.getpid(), socket.gethostname(), _boot(), _user(), _started(), now, now, secrets.token_hex(8))

    @classmethod
    def parse(cls, data: bytes) -> "Owner | None":
        """From the lock file's content; None where it names nobody."""
        try:
            return cls(**documents.lock_content(data))
        except ValueError:
            return None

    @property
    def age(self) -> float:
        """Seconds since its last sign of life."""
        return time.time() - self.heartbeat

    def on_this_machine(self) -> bool:
        return (self.host, self.boot) == (socket.gethostname(), _boot())

    def alive(self, stale: float = STALE_SECONDS) -> bool:
        """Whether it still trains: here its process exists; elsewhere its heartbeat is younger than `stale` s."""
        return _exists(self.pid, self.heartbeat) if self.on_this_machine() else self.age < stale

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        where = one_line(f"{self.host} ({self.user})")
        return f"process {self.pid} on {where}, since {since}, last sign of life {self.age:.0f} s ago"


class RunLock:
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
        self.path = path
        self.fences = False
        """Whether a training that acquired it has not come to its end: everything it writes must `check` first."""
        self._taken = taken
        self.took_over: dict[str, Any] | None = None
        """The dead owner whose lock this one took over, if it did."""
        self._heartbeat, self._stale = heartbeat, stale
        self._fd: int | None = None
        self._file = (0, 0)
        """Device and inode of the open file."""
        self._me: Owner | None = None
        self._stop = threading.Event()
        self._beating: threading.Thread | None = None

    @property
    def held(self) -> bool:
        return self._fd is not None

    def owner(self) -> Owner | None:
        """Who is written in the lock file, dead or alive; None once it was released.

        Raises:
            RunError: the lock is a link, or no regular file.
        """
        try:
            with os.fdopen(opened(self.path), "rb") as file:
                return Owner.parse(file.read(_SIZE))
        except OSError:
            return None

    def acquire(self) -> None:
        """Take the lock, from a dead owner too (then `took_over` says whose it was).

        Raises:
            RunLocked: a living process has it, this very one included; who, since when, and what one can do.
            RunError: the folder is missing or read-only, or the lock is a link.
        """
        if self.held:
            raise RunLocked(f"{self.path} is already held by this very lock", self._me)
        with clear_errors("lock", self.path):
            fd, previous = self._take()
            with _closed_on_error(fd):
                me = Owner.here()
                self._write(fd, me)
                self._confirm(fd, me)
        self._fd, self._me, self._file = fd, me, _identity(fd)
        self.took_over = asdict(previous) if previous else None
        _held.add(self)
        self.fences = True
        self._taken(self)
        self._stop.clear()
        self._beating = threading.Thread(target=self._beat, name=f"heartbeat {self.path}", daemon=True)
        self._beating.start()

    def refuse_if_taken(self) -> None:
        """Say at once what `acquire` would say, and take nothing.

        Raises:
            RunLocked: a living process has the lock.
        """
        self._refuse(self.owner(), unless_dead=True)

    def mine(self) -> bool:
        """Whether it is held and nobody took it over meanwhile."""
        return self.held and self._mine()

    def release(self) -> None:
        """Give the lock back at the end of a training; harmless when it is not held, or was taken over."""
        self.revoke()
        self.fences = False

    def revoke(self) -> None:
        """Give the lock back while its training is left open: whatever that still writes is refused."""
        if self._fd is None:
            return
        self._stop.set()
        if self._beating is not None and self._beating is not threading.current_thread():
            self._beating.join()
        fd, self._fd = self._fd, None
        if self._open(fd):  # under whatever name: the folder may have been moved
            if self._names_me(os.pread(fd, _SIZE, 0)):
                os.ftruncate(fd, 0)
            os.close(fd)
        elif self._mine():  # somebody closed it, and its number may be another file's
            with os.fdopen(opened(self.path, os.O_RDWR), "rb+") as file:
                file.truncate(0)
        _held.discard(self)

    def check(self) -> None:
        """Make sure that the lock is still this one's: after a machine was asleep, somebody may have taken over.

        Raises:
            RunLocked: somebody has, or it was released; nothing may be written any more.
        """
        if not self.mine():
            if self._fd is not None and not self.path.parent.is_dir():
                raise RunLocked(
                    f"{self.path.parent} is gone: it was moved, renamed or removed while it was trained. This training "
                    "writes nothing more. Start the run again from where it is now; it resumes from its newest "
                    "checkpoint"
                )
            owner = self.owner()
            found = f"belongs to {owner}" if owner else "is free"
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

    def _take(self) -> tuple[int, Owner | None]:
        """The lock file, locked, and the dead owner it was taken from."""
        patience = time.monotonic() + self._heartbeat
        while True:
            fd = opened(self.path, os.O_RDWR | os.O_CREAT)
            with _closed_on_error(fd):
                answer = flock(fd)
                previous = Owner.parse(os.pread(fd, _SIZE, 0))
                here = previous is not None and previous.on_this_machine()
                if answer == "busy" and time.monotonic() < patience and _may_change(previous):
                    pass  # its owner is about to write its name, or dies: the locks go only after the memory
                elif answer == "busy":
                    self._refuse(previous, unless_dead=previous is not None and not here)
                    return self._replaced(fd), previous
                elif same_file(fd, self.path):
                    # a free lock proves that nobody here has it, but another machine may not see our locks
                    if answer == "unsupported" or not here:
                        self._refuse(previous, unless_dead=True)
                    return fd, previous
            os.close(fd)
            time.sleep(0.05)

    def _refuse(self, owner: Owner | None, *, unless_dead: bool) -> None:
        """Raise, naming the owner and the choices; not if it is (or nobody is) known to be dead."""
        if unless_dead and (owner is None or not (owner.alive(self._stale) or self._moves(owner))):
            return
        if owner is not None and owner.pid == os.getpid() and owner.on_this_machine():
            who = "this process itself"
            choices = (
                "stop the session that trains it; a training that was left open (a generator that nobody closed) is "
                f"ended by `grpo_nb.release({str(self.path.parent)!r})`"
            )
        else:
            who = str(owner) if owner else "a process that has not said who it is"
            choices = "watch it from here, stop it (`run.knobs.request('stop')`), or use another run folder"
        raise RunLocked(f"run {self.path.parent} is being trained by {who}; {choices}", owner)

    def _moves(self, owner: Owner) -> bool:
        """Whether a stale heartbeat of another machine moves after all: clocks differ, so it is watched a while."""
        if owner.on_this_machine():
            return False
        for _ in range(5):
            time.sleep(self._heartbeat / 2)
            if self.owner() != owner:
                return True
        return False

    def _replaced(self, busy: int) -> int:
        """A new lock file in the place of one whose file lock a server still keeps for a dead machine."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with _closed_on_error(fd):
            flock(fd)
            os.replace(temporary, self.path)
        os.close(busy)
        return fd

    def _confirm(self, fd: int, me: Owner) -> None:
        """Where no kernel arbitrates, two may take over at once: the last to write has it, the other sees that."""
        if flock(fd) == "taken" and same_file(fd, self.path):
            return
        time.sleep(0.2)
        owner = self.owner()
        if owner is None or owner.token != me.token:
            self._refuse(owner, unless_dead=False)

    def _mine(self) -> bool:
        try:
            return self._is_me(self.owner())
        except RunError:  # something else was put in its place
            return False

    def _names_me(self, data: bytes) -> bool:
        return self._is_me(Owner.parse(data))

    def _is_me(self, owner: Owner | None) -> bool:
        return owner is not None and self._me is not None and owner.token == self._me.token

    def _open(self, fd: int) -> bool:
        """Whether the descriptor is still that of the lock file."""
        try:
            return _identity(fd) == self._file
        except OSError:
            return False

    def _write(self, fd: int, owner: Owner) -> None:
        os.pwrite(fd, json.dumps(asdict(owner)).encode().ljust(_SIZE - 1) + b"\n", 0)

    def _beat(self) -> None:
        while not self._stop.wait(self._heartbeat):
            if not self._mine():
                logger.error("%s was taken over by %s: training here must stop", self.path, self.owner())
                return
            if self._fd is not None and self._me is not None:
                self._me = replace(self._me, heartbeat=time.time())
                try:
                    if not self._open(self._fd):
                        raise OSError(errno.EBADF, "its descriptor was closed by other code")
                    self._write(self._fd, self._me)
                except OSError as error:  # a full or absent disk: the next beat may succeed
                    logger.warning("no heartbeat in %s: %s", self.path, error)


def held_here() -> list[Path]:
    """The locks that this process holds."""
    return [lock.path for lock in list(_held) if lock.held]


def release_here(path: Path) -> bool:
    """Release the lock at `path` if this process holds it; whether it did. Whoever trained with it writes no more."""
    held = [lock for lock in list(_held) if lock.held and lock.path.resolve() == path.resolve()]
    for lock in held:
        lock.revoke()
    return bool(held)


_held: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child (a data loader's worker) must not keep the lock when its parent dies."""
    for lock in list(_held):
        if lock._fd is not None:
            os.close(lock._fd)
            lock._fd = None
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


@contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def _may_change(owner: Owner | None) -> bool:
    """Whether a file lock that is held, by nobody known or by somebody dead here, soon has a name or goes."""
    return owner is None or (owner.on_this_machine() and not owner.alive())


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        return str(os.getuid())


def _started() -> float:
    import psutil  # type: ignore[import-untyped, unused-ignore]

    return float(psutil.Process().create_time())


def _exists(pid: int, last_seen: float) -> bool:
    """Whether process `pid` exists and is the one seen at `last_seen`: a later born one only has its number."""
    import psutil

    if pid <= 0:
        return False
    try:
        process = psutil.Process(pid)
        # boot times are known to the second, and move when the clock is set
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= last_seen + 2.0)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
