"""One trainer a run: held, refused, given back, taken over from the dead, and lost without harm."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from grpo_nb.run.lock import Owner, RunLock, RunLocked, held_here
from grpo_nb.storage import files
from grpo_nb.storage import lock as module
from grpo_nb.storage.files import RunError
from tests.support.kill_points import ROOT
from tests.support.tokens import caused_by, names, pattern

HOLDER = """
import sys
from pathlib import Path
from grpo_nb.run.lock import RunLock
lock = RunLock(Path(sys.argv[1]), heartbeat=0.05)
lock.acquire()
print("held", flush=True)
sys.stdin.read()
lock.release()
print("released", flush=True)
"""


@contextmanager
def holder(path: Path, code: str = HOLDER) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until its stdin is closed or it is killed."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without file locks."""
    monkeypatch.setattr(module, "flock", lambda fd, **_: "unsupported")
    monkeypatch.setattr(module, "flocked", lambda fd: "unsupported")


def write(path: Path, owner: Owner) -> Owner:
    path.write_text(json.dumps(asdict(owner)).ljust(1023) + "\n")
    return owner


def elsewhere(heartbeat_age: float) -> Owner:
    return replace(Owner.here(), host="another-machine", heartbeat=time.time() - heartbeat_age, token="theirs")


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("waited 5 s in vain")


# ---- held and given back


def test_the_file_says_who_and_where(path: Path) -> None:
    with RunLock(path) as lock:
        owner = lock.owner()
        assert lock.held and lock.took_over is None and owner is not None
        assert (owner.pid, owner.host) == (os.getpid(), socket.gethostname())
        assert owner.started <= owner.since <= owner.heartbeat <= time.time()
        assert owner.user and owner.alive() and owner.on_this_machine()
        assert f"process {os.getpid()} on {socket.gethostname()} ({owner.user}), since 20" in str(owner)
        raw = json.loads(path.read_text())
        assert {"pid", "started", "host", "user", "since", "heartbeat"} <= raw.keys()
    assert not lock.held and lock.owner() is None


def test_a_released_lock_is_taken_again_without_a_takeover(path: Path) -> None:
    lock = RunLock(path)
    for _ in range(2):
        with lock:
            assert lock.took_over is None
        lock.release()  # twice is harmless
    with RunLock(path) as another:
        assert another.took_over is None


def test_it_is_released_when_the_body_raises(path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunLock(path):
        raise ZeroDivisionError
    RunLock(path).acquire()


def test_it_is_released_though_its_file_cannot_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, RunLock(path) as lock:
        patch.setattr(module.os, "ftruncate", raising(OSError(errno.EIO, "Input/output error")))
    assert not lock.fences and RunLock(path).look() == (None, False)
    with RunLock(path) as another:
        assert another.took_over is None


def test_it_is_released_though_an_interrupt_comes_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = RunLock(path)
    lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(lock._beating, "join", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            lock.release()
    assert not lock.fences and path not in held_here()
    with RunLock(path):
        pass


def raising(error: BaseException) -> Callable[..., None]:
    def fails(*_: object) -> None:
        raise error

    return fails


def test_a_second_lock_in_the_same_process_is_refused(path: Path) -> None:
    with RunLock(path) as lock:
        with pytest.raises(RunLocked, match=pattern(path.parent, "grpo_nb.release")) as refusal:
            RunLock(path).acquire()
        assert refusal.value.owner is not None and refusal.value.owner.pid == os.getpid()
        with pytest.raises(RunLocked, match=pattern(path)):
            lock.acquire()
        lock.check()
    with RunLock(path):
        pass


def test_the_heart_beats_until_it_is_released(path: Path) -> None:
    lock = RunLock(path, heartbeat=0.02)
    with lock:
        first = lock.owner()
        assert first is not None
        wait_for(lambda: (now := lock.owner()) is not None and now.heartbeat > first.heartbeat)
        beating = lock._beating
    assert beating is not None and not beating.is_alive()
    time.sleep(0.1)
    assert lock.owner() is None


def test_a_reader_never_meets_an_empty_or_cut_file(path: Path) -> None:
    with RunLock(path, heartbeat=0.0005) as lock:
        assert all(lock.owner() is not None for _ in range(3000))


def test_a_heartbeat_that_cannot_be_written_does_not_stop_the_heart(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with RunLock(path, heartbeat=0.01) as lock:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(module.os, "pwrite", full)
            wait_for(lambda: "no heartbeat" in caplog.text)
        first = lock.owner()
        assert first is not None
        wait_for(lambda: (now := lock.owner()) is not None and now.heartbeat > first.heartbeat)


def test_a_descriptor_that_somebody_closed_is_not_written_through(path: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"rows of another file\n")
    with RunLock(path, heartbeat=0.01) as lock:
        assert lock._fd is not None
        with open(precious, "rb+") as other:
            os.dup2(other.fileno(), lock._fd)  # as a reward does that closes what it finds, and opens a file
        reused = lock._fd
        time.sleep(0.1)
    assert precious.read_bytes() == b"rows of another file\n"
    assert lock.owner() is None and os.fstat(reused).st_size > 0, "nor closed"
    os.close(reused)
    with RunLock(path) as another:
        assert another.took_over is None


# ---- two processes


def test_a_living_process_is_named_and_refused_then_succeeded(path: Path) -> None:
    with holder(path) as child:
        with pytest.raises(RunLocked) as refusal:
            RunLock(path).acquire()
        message = str(refusal.value)
        assert names(message, path.parent, child.pid, socket.gethostname(), "0 s", "run.knobs.request('stop')")
        assert child.communicate()[0] == "released\n"
        with RunLock(path) as lock:
            assert lock.took_over is None


def test_a_killed_owner_is_taken_over_and_remembered(path: Path) -> None:
    with holder(path) as child:
        child.kill()
        child.wait()
        left = RunLock(path).owner()
        assert left is not None and left.pid == child.pid and not left.alive()
        with RunLock(path) as lock:
            assert lock.took_over is not None and lock.took_over["pid"] == child.pid
            assert json.loads(json.dumps(lock.took_over)) == asdict(left)


def test_a_killed_owner_nobody_has_waited_for_is_dead(path: Path) -> None:
    with holder(path) as child:
        child.kill()  # a zombie until it is waited for
        wait_for(lambda: not (owner := RunLock(path).owner()) or not owner.alive())
        with RunLock(path) as lock:
            assert lock.took_over is not None and lock.took_over["pid"] == child.pid


def test_a_stopped_owner_is_alive_however_old_its_heartbeat(path: Path) -> None:
    with holder(path) as child:
        child.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        with pytest.raises(RunLocked, match=f"process {child.pid}"):
            RunLock(path, heartbeat=0.01, stale=0.05).acquire()


def test_of_many_that_want_it_one_has_it(path: Path) -> None:
    """Four processes at once, twenty takings each: never two inside, and each gets through."""
    code = """
import os, sys
from pathlib import Path
from grpo_nb.run.lock import RunLock, RunLocked
path, inside = Path(sys.argv[1]), Path(sys.argv[1]).with_name("inside")
taken = 0
while taken < 20:
    try:
        with RunLock(path):
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
            os.unlink(inside)
            taken += 1
    except RunLocked:
        pass
"""
    crowd = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for child in crowd:
        _, errors = child.communicate(timeout=60)
        assert child.returncode == 0, errors


def test_a_forked_child_does_not_keep_the_lock_of_its_killed_parent(path: Path) -> None:
    """A data loader's worker outlives its parent: the run must not stay locked by it."""
    code = HOLDER.replace(
        'print("held"', 'import os\nif os.fork() == 0:\n    os._exit(len(sys.stdin.read()))\nprint("held"'
    )
    with holder(path, code) as child:
        child.kill()
        child.wait()
        with RunLock(path, heartbeat=0.2) as lock:
            assert lock.took_over is not None and lock.took_over["pid"] == child.pid


def test_a_dying_owner_is_waited_for(path: Path) -> None:
    """A killed process keeps its file locks until its memory is gone, which takes seconds for a large model."""
    dead = write(path, replace(Owner.here(), pid=2**22 + 1))
    dying = os.open(path, os.O_RDWR)
    assert files.flock(dying) == "taken"
    gone = threading.Timer(0.3, os.close, [dying])
    gone.start()
    with RunLock(path) as lock:
        assert lock.took_over == asdict(dead)
    gone.join()


def test_a_dead_owner_whose_file_lock_stays_is_taken_over(path: Path) -> None:
    dead = write(path, replace(Owner.here(), pid=2**22 + 1))
    kept = os.open(path, os.O_RDWR)
    assert files.flock(kept) == "taken"
    with RunLock(path, heartbeat=0.1) as lock:
        assert lock.took_over == asdict(dead)
    os.close(kept)


def test_a_process_that_is_not_seen_here_but_beats_keeps_its_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of this machine has process numbers of its own."""
    owner = write(path, replace(Owner.here(), pid=2**22 + 1))
    kept = os.open(path, os.O_RDWR)
    assert files.flock(kept) == "taken"
    monkeypatch.setattr(module.time, "sleep", lambda _: write(path, replace(owner, heartbeat=time.time())))
    with pytest.raises(RunLocked, match=f"process {2**22 + 1}"):
        RunLock(path, heartbeat=0.01).acquire()
    os.close(kept)


def test_a_forked_child_neither_holds_the_lock_nor_keeps_it_from_others(path: Path) -> None:
    with RunLock(path) as lock:
        child = os.fork()
        if child == 0:
            held = lock.held or lock.mine()
            lock.release()
            time.sleep(60 * (not held))
            os._exit(0)
        lock.check()
    with RunLock(path) as another:
        assert another.took_over is None and os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_an_owner_that_has_not_written_its_name_yet_keeps_its_lock(path: Path) -> None:
    """Between taking the file lock and writing who has it, a starved process may be held up for long."""
    unnamed = os.open(path, os.O_RDWR | os.O_CREAT)
    assert files.flock(unnamed) == "taken"
    with pytest.raises(RunLocked, match=pattern(path.parent, "run.knobs.request('stop')")) as refusal:
        RunLock(path, heartbeat=0.1).acquire()
    assert refusal.value.owner is None and files.same_file(unnamed, path)
    named = threading.Timer(0.2, write, [path, Owner.here()])
    named.start()
    with pytest.raises(RunLocked, match=r"grpo_nb\.release"):
        RunLock(path).acquire()
    named.join()
    os.close(unnamed)
    with RunLock(path):
        pass


def test_a_copy_of_a_held_lock_is_free(path: Path) -> None:
    """`cp -r` of a run that trains copies the name of an owner who is alive, and not its file lock."""
    copy = path.with_name("copy")
    with holder(path) as child:
        copy.write_bytes(path.read_bytes())
        owner, alive = RunLock(path).look()
        assert owner is not None and owner.pid == child.pid and alive
        assert RunLock(copy).look() == (None, False)
        RunLock(copy).refuse_if_taken()
        with pytest.raises(RunLocked):
            RunLock(path).refuse_if_taken()
        with RunLock(copy) as lock:
            assert lock.took_over is None, "nobody died"
            assert RunLock(copy).look() == (lock.owner(), True)


@pytest.mark.parametrize("watched", [False, True])
def test_a_copy_in_the_place_of_a_held_lock_is_not_that_lock(path: Path, watched: bool) -> None:
    with RunLock(path) as lock:
        copy = Path(shutil.copy(path, path.with_name("copy")))
        assert lock.mine()
        original = path.rename(path.with_name("original"))
        copied = copy.rename(path).read_bytes()
        with open(path, "rb") as watcher:
            if watched:
                assert files.fcntl is not None
                files.fcntl.flock(watcher, files.fcntl.LOCK_SH)
            assert not lock.mine()
            with pytest.raises(RunLocked, match=pattern(path.parent)):
                lock.check()
    assert path.read_bytes() == copied and RunLock(original).owner() is None


def test_where_inode_numbers_change_the_file_lock_tells(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLock(path) as lock:
        monkeypatch.setattr(os.path, "samestat", lambda one, two: False)
        assert lock.mine()
        monkeypatch.undo()


def test_to_look_who_holds_it_refuses_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a watcher looks, it shares the lock of a copy whose written owner is alive elsewhere in this machine."""
    write(path, Owner.here())
    watching = os.open(path, os.O_RDONLY)
    assert files.fcntl is not None
    files.fcntl.flock(watching, files.fcntl.LOCK_SH)
    monkeypatch.setattr(module.time, "sleep", lambda _: os.close(watching))
    with RunLock(path) as lock:
        assert lock.took_over is None


# ---- other machines, and file systems without locks


def test_another_machine_with_a_fresh_heartbeat_is_refused(path: Path) -> None:
    write(path, elsewhere(heartbeat_age=30))
    with pytest.raises(RunLocked, match=pattern("another-machine", "30 s")):
        RunLock(path).acquire()


@pytest.mark.parametrize("age", [61, -61, -1e9])
def test_another_machine_with_a_heartbeat_far_from_now_is_taken_over(path: Path, age: float) -> None:
    """Behind, or ahead by a clock that was wrong when it died."""
    dead = write(path, elsewhere(heartbeat_age=age))
    with RunLock(path, heartbeat=0.02) as lock:
        assert lock.took_over == asdict(dead)


@pytest.mark.parametrize("age", [3600, -3600])
def test_another_machine_whose_clock_is_wrong_is_alive_while_its_heart_beats(
    path: Path, monkeypatch: pytest.MonkeyPatch, age: float
) -> None:
    owner = write(path, elsewhere(heartbeat_age=age))
    monkeypatch.setattr(module.time, "sleep", lambda _: write(path, replace(owner, heartbeat=owner.heartbeat + 5)))
    with pytest.raises(RunLocked, match="another-machine"):
        RunLock(path).acquire()


def test_a_file_lock_that_a_server_keeps_for_a_dead_machine_is_replaced(path: Path) -> None:
    dead = write(path, elsewhere(heartbeat_age=61))
    kept = os.open(path, os.O_RDWR)
    assert files.flock(kept) == "taken"
    with RunLock(path, heartbeat=0.02) as lock:
        assert lock.took_over == asdict(dead)
        with pytest.raises(RunLocked, match=r"grpo_nb\.release"):
            RunLock(path).acquire()
    os.close(kept)
    assert [p.name for p in path.parent.iterdir()] == ["lock"]


def test_a_restarted_machine_is_not_the_same_machine(path: Path) -> None:
    """After a reboot a process number says nothing; a name shared by two machines says as little."""
    mine = Owner.here()
    assert not replace(mine, boot="before").on_this_machine()
    assert replace(mine, boot="before", heartbeat=time.time() - 61).alive() is False
    assert replace(mine, boot="before", pid=2**22 + 1).alive() is True  # cannot be told: its heartbeat counts


@pytest.mark.usefixtures("no_flock")
def test_without_file_locks_a_living_process_is_refused(path: Path) -> None:
    with holder(path) as child:
        with pytest.raises(RunLocked, match=f"process {child.pid}"):
            RunLock(path).acquire()
        child.kill()
        child.wait()
        with RunLock(path) as lock:
            assert lock.took_over is not None and lock.took_over["pid"] == child.pid
            with pytest.raises(RunLocked, match=r"grpo_nb\.release"):
                RunLock(path).acquire()
        with RunLock(path) as lock:
            assert lock.took_over is None


@pytest.mark.usefixtures("no_flock")
def test_without_file_locks_a_later_process_of_the_same_number_is_not_the_owner(path: Path) -> None:
    mine = Owner.here()
    write(path, replace(mine, heartbeat=mine.started - 30, token="long dead"))
    with RunLock(path) as lock:
        assert lock.took_over is not None and lock.took_over["token"] == "long dead"


@pytest.mark.usefixtures("no_flock")
def test_without_file_locks_the_last_of_two_to_take_over_has_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _: write(path, elsewhere(heartbeat_age=0)))
    loser = RunLock(path)
    with pytest.raises(RunLocked, match="another-machine"):
        loser.acquire()
    assert not loser.held


def test_whoever_was_taken_over_is_told_and_does_no_harm(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = RunLock(path, heartbeat=0.02)
    with lock:
        lock.check()
        thief = write(path, elsewhere(heartbeat_age=0))
        wait_for(lambda: lock._beating is not None and not lock._beating.is_alive())
        assert names(caplog.text, "another-machine", thief.pid)
        with pytest.raises(RunLocked, match=pattern("another-machine", thief.pid)):
            lock.check()
    assert RunLock(path).owner() == thief, "releasing must not wipe the new owner's name"


# ---- bad files and places


@pytest.mark.parametrize("content", [b"", b"junk", b"[1]", b'{"pid": 1}', b'{"pid": "x"}', b"\0" * 1024, b"\xff\xfe"])
def test_an_unreadable_content_names_nobody_and_locks_nothing(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert RunLock(path).owner() is None
    with RunLock(path) as lock:
        assert lock.took_over is None and lock.owner() is not None


@pytest.mark.parametrize("pid", [0, -5, 2**40])
def test_an_impossible_process_is_dead(path: Path, pid: int) -> None:
    write(path, replace(Owner.here(), pid=pid))
    owner = RunLock(path).owner()
    assert owner is not None and not owner.alive()


def test_a_folder_that_cannot_be_written_is_one_clear_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=pattern(path.parent / "absent"), check=caused_by(errno.ENOENT)):
        RunLock(path.parent / "absent" / "lock").acquire()
    path.write_text("")
    with pytest.raises(RunError, match=pattern(path / "lock"), check=caused_by(errno.ENOTDIR)):
        RunLock(path / "lock").acquire()

    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(module.os, "open", read_only)
    with pytest.raises(RunError, match=pattern(path), check=caused_by(errno.EROFS)):
        RunLock(path).acquire()


def test_where_file_locks_do_not_exist_at_all_the_package_imports_and_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; sys.modules['fcntl'] = None; import grpo_nb.run.run, grpo_nb.storage.files as d; print(d.fcntl)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
    monkeypatch.setattr(files, "fcntl", None)
    with pytest.raises(RunError, match=pattern("POSIX", "Windows", "WSL")):
        RunLock(path).acquire()


@pytest.mark.parametrize("code", sorted(files.NO_LOCKS))
def test_every_answer_of_a_file_system_without_locks_is_known(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(code, "no locks")

    monkeypatch.setattr(files.fcntl, "flock", unsupported)
    with RunLock(path) as lock:
        assert lock.held
        with pytest.raises(RunLocked):
            RunLock(path).acquire()
