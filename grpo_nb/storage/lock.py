"""A lock file that names its owner: a dead owner cannot keep it, a living one cannot lose it unnoticed.

The kernel's file lock (flock) decides, because it ends with its process however that dies. The file's content shows
people and other machines the owner; each acquisition has a token of its own. Where the file system has no file locks,
or the owner is on another machine, process id and heartbeat decide instead.
"""

import getpass
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_nb.printable import clean_logger, one_line
from grpo_nb.storage import documents
from grpo_nb.storage.files import RunError, clear_errors, flock, flocked, is_own, same_file
from grpo_nb.storage.safe_open import Irregular, opened

logger = clean_logger(__name__)

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
"""An owner on another machine without a heartbeat for so long counts as dead."""
POLL_SECONDS = 0.05
LONGEST_DOING = 100
_SIZE = 1024
"""The content is padded to this and written over itself, so that a reader never meets an empty or cut file."""


class RunLocked(RunError):
    """Raised when another owner has the lock; `owner` is that one."""

    def __init__(self, message: str, owner: "Owner | None" = None) -> None:
        super().__init__(message)
        self.owner = owner


@dataclass(frozen=True)
class Owner:
    """Owner of a lock, as its file has it. Times are seconds since 1970."""

    pid: int
    host: str
    boot: str
    """Boot of the machine, which separates machines of one name, and a restarted one from itself."""
    user: str
    started: float
    """Start time of the process."""
    since: float
    """Time at which it took the lock."""
    heartbeat: float
    """Time of its last heartbeat, one every few seconds."""
    token: str
    """Different each time that the lock is taken."""
    doing: str = ""
    """Work before its first step, LONGEST_DOING characters at most; empty while it trains."""

    @classmethod
    def here(cls) -> "Owner":
        """Owner for this process, now."""
        now = time.time()
        return cls(os.getpid(), socket.gethostname(), _boot(), _user(), _started(), now, now, secrets.token_hex(8))

    @classmethod
    def parse(cls, data: bytes) -> "Owner | None":
        """Owner from the lock file's content; None where it names nobody."""
        try:
            return cls(**documents.lock_content(data))
        except ValueError:
            return None

    @property
    def age(self) -> float:
        """Seconds since its last heartbeat."""
        return time.time() - self.heartbeat

    def on_this_machine(self) -> bool:
        return (self.host, self.boot) == (socket.gethostname(), _boot())

    def alive(self, stale: float = STALE_SECONDS) -> bool:
        """Whether the owner is alive: on this machine its process exists; elsewhere its heartbeat is within `stale` s
        of now.

        One further ahead is by a clock that was wrong: it is alive if it moves (`Lock._moves`), as one far behind.
        """
        return _exists(self.pid, self.heartbeat) if self.on_this_machine() else abs(self.age) < stale

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        where = one_line(f"{self.host} ({self.user})")
        return f"process {self.pid} on {where}, since {since}, last sign of life {self.age:.0f} s ago"


class Lock:
    """One lock file. Held by at most one `Lock` of one process."""

    def __init__(self, path: Path, *, heartbeat: float = HEARTBEAT_SECONDS, stale: float = STALE_SECONDS) -> None:
        self.path = path
        self.took_over: dict[str, Any] | None = None
        """The dead owner whose lock this one took over, if it did."""
        self._heartbeat, self._stale = heartbeat, stale
        self._fd: int | None = None
        self._file: os.stat_result | None = None
        self._me: Owner | None = None

    @property
    def held(self) -> bool:
        """Whether this process acquired it; a forked child did not."""
        return self._fd is not None and self._me is not None and self._me.pid == os.getpid()

    def owner(self) -> Owner | None:
        """Owner in the lock file, dead or alive; None once it was released.

        Raises:
            RunError: the lock is a link, or no regular file.
        """
        return self._read()[0]

    def look(self) -> tuple[Owner | None, bool]:
        """Owner that holds the lock or died holding it, and whether it is alive.

        A copy of the lock of a training that runs on this machine names a living owner that does not hold the copy:
        it has no owner. The file lock shows the difference; inode numbers do not, as some file systems change them.

        Raises:
            RunError: as `owner`.
        """
        owner, held = self._read()
        if owner is None or not owner.alive(self._stale):
            return owner, False
        return (None, False) if held == "free" and owner.on_this_machine() else (owner, True)

    def acquire(self) -> None:
        """Take the lock, from a dead owner too (then `took_over` has that owner).

        Raises:
            RunLocked: a living process has it, this one included.
            RunError: the folder is missing or read-only, or the lock is a link.
        """
        if self.held:
            raise RunLocked(f"{self.path} is already held by this very lock", self._me)
        with clear_errors("lock", self.path):
            fd, previous = self._take()
            with _closed_on_error(fd):
                me = self._me = Owner.here()
                self._write(fd, me)
                if flock(fd) == "unsupported":  # two may take over at once: the last to write has it
                    time.sleep(4 * POLL_SECONDS)
                if not self._names_me(owner := self.owner()):
                    raise self._refusal(owner)
        self._fd, self._file = fd, os.fstat(fd)
        self.took_over = asdict(previous) if previous else None

    def mine(self) -> bool:
        """Whether it is held, and nobody took it over or put a copy in its place meanwhile."""
        try:
            owner, held = self._read()
            # a copy names this owner too, but is not locked; inode numbers alone do not show it (see `look`)
            return self.held and self._names_me(owner) and (held != "free" or self._has_its_file())
        except RunError:  # something else was put in its place
            return False

    def refuse_if_taken(self) -> None:
        """Raise at once what `acquire` would raise, without taking the lock.

        Raises:
            RunLocked: a living process has the lock.
        """
        owner, alive = self.look()
        if owner is not None and (alive or (not owner.on_this_machine() and self._moves(owner))):
            raise self._refusal(owner)

    def release(self) -> None:
        """Give the lock back; harmless when it is not held, or was taken over."""
        if not self.held or self._fd is None:
            return
        fd, self._fd = self._fd, None
        try:
            self._give_back(fd)
        except OSError as error:  # the file names this owner still, and is not locked: the next owner sees both
            logger.warning("%s is released, but still names its owner: %s", self.path, error)

    def _give_back(self, fd: int) -> None:
        if is_file(fd, self._file):  # under whatever name: the folder may have been moved
            try:
                if self._names_me(Owner.parse(os.pread(fd, _SIZE, 0))):
                    os.ftruncate(fd, 0)
            finally:
                flock(fd, release=True)  # a forked child has the file open too
                os.close(fd)
        elif self._names_me(self.owner()):  # somebody closed it, and its number may be another file's
            with os.fdopen(opened(self.path, os.O_RDWR), "rb+") as file:
                file.truncate(0)

    def _read(self) -> tuple[Owner | None, str]:
        """Owner in the file, and whether the file is locked (see `flocked`)."""
        try:
            with os.fdopen(opened(self.path), "rb") as file:
                return Owner.parse(file.read(_SIZE)), flocked(file.fileno())
        except OSError:
            return None, "unsupported"

    def _refusal(self, owner: Owner | None) -> RunLocked:
        return RunLocked(f"{self.path} is held by {owner or 'an unknown process'}", owner)

    def _take(self) -> tuple[int, Owner | None]:
        """Descriptor of the lock file, locked, and the dead owner it was taken from."""
        patience = time.monotonic() + self._heartbeat
        while True:
            fd, shared = self._opened()
            with _closed_on_error(fd):
                answer = flock(fd)
                previous = Owner.parse(os.pread(fd, _SIZE, 0))
                watched = answer == "busy" and flocked(fd) == "free"  # by another process that looks who holds it
                if answer == "busy" and not watched and self._kept_for_the_dead(previous, patience):
                    return self._replaced(fd), previous
                if answer != "busy" and same_file(fd, self.path):
                    # a free lock proves that no process here has it, but another machine may not see our locks
                    if answer == "unsupported" or (previous and not previous.on_this_machine()):
                        self.refuse_if_taken()
                    # a living owner holds the file that this one is a copy of
                    dead = None if previous and previous.alive(self._stale) else previous
                    return self._replaced(fd) if shared else fd, dead
            os.close(fd)
            time.sleep(POLL_SECONDS)

    def _opened(self) -> tuple[int, bool]:
        """The lock file, made where it is missing, and whether it must not be written: a hard link is another name.

        A snapshot by hard links gives the lock such a name. Where the file is this user's, a copy can take its place.
        """
        try:
            return opened(self.path, os.O_RDWR | os.O_CREAT), False
        except Irregular:
            fd = opened(self.path)
            with _closed_on_error(fd):
                if not is_own(fd):
                    raise
            return fd, True

    def _kept_for_the_dead(self, owner: Owner | None, patience: float) -> bool:
        """Whether a file lock has no living owner: a server keeps it for a dead machine, or a forked child has it."""
        if owner is not None and owner.alive(self._stale):
            raise self._refusal(owner)
        if time.monotonic() < patience:  # it soon gets a name, or goes with the memory of a process that dies
            return False
        if owner is None or self._moves(owner):
            raise self._refusal(owner)
        return True

    def _moves(self, owner: Owner) -> bool:
        """Whether a heartbeat that looks stale moves after all: clocks differ, so it is watched a while."""
        for _ in range(5):
            time.sleep(self._heartbeat / 2)
            if self.owner() != owner:
                return True
        return False

    def _separate(self) -> None:
        """Put a copy, held as well, in the place of the held file where a snapshot by hard links named it again."""
        if self._fd is not None and os.fstat(self._fd).st_nlink > 1 and same_file(self._fd, self.path):
            self._fd = self._replaced(self._fd)
            self._file = os.fstat(self._fd)

    def _replaced(self, old: int) -> int:
        """A copy, locked, in the place of the open lock file, which is closed; under other names it stays as it is."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with _closed_on_error(fd):
            try:
                flock(fd)
                os.pwrite(fd, os.pread(old, _SIZE, 0), 0)
                os.replace(temporary, self.path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        os.close(old)
        return fd

    def _has_its_file(self) -> bool:
        """Whether the file that was locked is still the one at `path`."""
        try:
            return self._file is not None and os.path.samestat(self._file, os.lstat(self.path))
        except OSError:
            return False

    def _names_me(self, owner: Owner | None) -> bool:
        return owner is not None and self._me is not None and owner.token == self._me.token

    def _write(self, fd: int, owner: Owner) -> None:
        os.pwrite(fd, json.dumps(asdict(owner)).encode().ljust(_SIZE - 1) + b"\n", 0)


@contextmanager
def exclusive(path: Path, wait_seconds: float = 10.0) -> Iterator[None]:
    """One thread of one process at a time, while `path` is read, changed and replaced.

    Raises:
        RunError: another one takes longer than `wait_seconds`, the folder is read-only, or the lock is a link.
    """
    lock = Lock(path.with_name(f".{path.name}.lock"), heartbeat=1.0, stale=wait_seconds)
    end = time.monotonic() + wait_seconds
    while True:
        try:
            lock.acquire()
            break
        except RunLocked as error:
            if time.monotonic() > end:
                owner = f"{lock.path} for {wait_seconds:g} s ({error.owner})"
                raise RunError(f"another process has held {owner}; try again") from None
            time.sleep(POLL_SECONDS / 5)
    try:
        yield
    finally:
        lock.release()


def is_file(fd: int, file: os.stat_result | None) -> bool:
    """Whether the descriptor is still that of the file."""
    try:
        return file is not None and os.path.samestat(os.fstat(fd), file)
    except OSError:
        return False


@contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


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
