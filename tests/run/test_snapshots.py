"""After a snapshot by hard links (`cp -al`) a run can be trained and steered, and the snapshot stays as it is."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_nb import presets
from grpo_nb.jupyter.workers import _spawn
from grpo_nb.run.lock import RunLock, RunLocked
from grpo_nb.run.run import Run
from grpo_nb.storage import safe_open
from grpo_nb.storage.lock import Lock, exclusive
from grpo_nb.training.grpo import grpo
from tests.run.test_lock import holder, wait_for
from tests.support.tiny import REWARDS, small_tasks, tiny_run

pytestmark = pytest.mark.usefixtures("narrow_model")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.create(tmp_path / "run", presets.demo())
    with run.lock():
        run.log_event("start", step=0, goal=5)
    run.knobs.request("pause")
    (run.path / "worker.log").write_text("of the worker before\n")
    return run


def snapshot(run: Run) -> tuple[Path, dict[str, bytes]]:
    copy = run.path.with_name("snapshot")
    shutil.copytree(run.path, copy, copy_function=os.link)
    return copy, content(copy)


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _train(run: Run) -> None:
    with run.lock() as lock:
        lock.check()
        run.log_event("start", step=0, goal=5)


def _follow(run: Run) -> None:
    with exclusive(run.path / "dependencies.json"):
        pass


ACTIONS: dict[str, Callable[[Run], object]] = {
    "start": _train,
    "command": lambda run: run.knobs.request("run"),
    "knob": lambda run: run.knobs["temperature"].set(0.5),
    "reset": lambda run: run.knobs.reset(),
    "dependencies": _follow,
    "worker": lambda run: _spawn(["true"], run.path / "worker.log").wait(),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_a_run_goes_on_after_a_snapshot_which_stays_as_it_is(run: Run, name: str) -> None:
    _follow(run)
    copy, before = snapshot(run)
    ACTIONS[name](run)
    ACTIONS[name](run)
    assert content(copy) == before
    assert not [file for file in run.path.iterdir() if file.name.endswith(".tmp")]
    ACTIONS[name](Run.open(copy))


def test_a_snapshot_of_a_run_that_trains_is_a_run_of_its_own(run: Run) -> None:
    with RunLock(run.path / "lock", heartbeat=0.02) as lock:
        copy, _ = snapshot(run)
        with pytest.raises(RunLocked):
            RunLock(run.path / "lock").acquire()
        wait_for(lambda: not os.path.samefile(run.path / "lock", copy / "lock"))
        lock.check()
        with pytest.raises(RunLocked):
            RunLock(run.path / "lock").acquire()
        assert Run.open(run.path).status().owner is not None and Run.open(copy).status().owner is None
        with Run.open(copy).lock() as other:
            other.check()
            lock.check()
    assert Run.open(run.path).status().owner is None


def test_of_many_that_want_a_lock_of_two_names_one_has_it(run: Run) -> None:
    snapshot(run)
    locks = [RunLock(run.path / "lock") for _ in range(8)]
    held = []
    for lock in locks:
        try:
            lock.acquire()
            held.append(lock)
        except RunLocked:
            pass
    assert held == locks[:1] and held[0].mine()
    held[0].release()


def test_whoever_opened_the_lock_before_it_was_replaced_does_not_get_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second trainer comes between the look at the lock and its replacement, each time that there is one."""
    snapshot(run)
    first, second, whole = RunLock(run.path / "lock"), RunLock(run.path / "lock", heartbeat=0.1), Lock._opened

    def slow(lock: Lock) -> tuple[int, bool]:
        found = whole(lock)
        if lock is second and not first.held:
            first.acquire()
        return found

    monkeypatch.setattr(Lock, "_opened", slow)
    with pytest.raises(RunLocked):
        second.acquire()
    assert first.mine() and not second.held
    first.release()


def test_a_dead_owner_is_named_where_the_lock_has_two_names(run: Run) -> None:
    with holder(run.path / "lock") as child:
        child.kill()
        child.wait()
        snapshot(run)
        with run.lock() as lock:
            assert lock.took_over is not None and lock.took_over["pid"] == child.pid


def test_a_link_in_the_place_of_a_lock_is_refused_still(run: Run, tmp_path: Path) -> None:
    snapshot(run)
    for name, action in (("lock", "start"), (".knobs.json.lock", "knob"), ("worker.log", "worker")):
        (run.path / name).unlink()
        (run.path / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(safe_open.Irregular, match="elsewhere"):
            ACTIONS[action](run)
    assert not (tmp_path / "elsewhere").exists()


def test_a_save_asked_for_after_a_snapshot_is_done_once(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=3, run__checkpoint_every=50)
    walk = grpo(run, tasks=small_tasks(), rewards=REWARDS)
    next(walk)
    copy, before = snapshot(run)
    run.knobs.request("save")
    next(walk)
    assert run.checkpoints.steps() == [0, 1] and run.knobs.snapshot().orders == []
    assert [stats.step for stats in walk] == [3]
    after = content(copy)
    assert [name for name in before if after[name] != before[name]] in ([], ["lock"]), "the lock until the next beat"
    assert Run.open(copy).checkpoints.steps() == [0] and Run.open(copy).status().owner is None
