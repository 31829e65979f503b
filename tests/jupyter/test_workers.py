"""Training in a process of its own: the same files, pauses and stops; it outlives its kernel and says why it died."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_nb.jupyter import kernel, session, workers
from grpo_nb.jupyter.interrupts import Detached
from grpo_nb.jupyter.start import attach, start
from grpo_nb.jupyter.workers import AlreadyTraining, Job, WorkerFailed
from grpo_nb.run.run import Run, RunError
from tests.conftest import ROOT
from tests.support import forked
from tests.support.tiny import REWARDS, small_tasks, tiny_run
from tests.support.tokens import names, pattern

PATIENCE = 120.0


def until(condition: Callable[[], object], what: str = "it") -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = tiny_run(tmp_path, run__steps=60, sft__steps=3)
    yield run
    for thread in session_threads():
        if isinstance(thread, workers.ProcessWorker):
            thread.process.kill()
            thread.join(PATIENCE)


def session_threads() -> list[workers.Worker]:
    return [thread for thread in threading.enumerate() if isinstance(thread, workers.Worker)]


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the process run `code` instead of training."""
    monkeypatch.setattr(Job, "command", lambda job: [sys.executable, "-c", code])


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers that this process starts are forks."""
    plain = Job.command
    monkeypatch.setattr(Job, "command", lambda job: forked.command(*plain(job)[1:]))


@pytest.mark.ux(2, 8, 12, at="unit")
def test_process_trains_pauses_stops_and_goes_on(run: Run, forks: None) -> None:
    live = start(run, where="process")
    assert live.live and live.state == "starting" and run.last_step() is None, "it returns at once"
    with pytest.raises(AlreadyTraining, match=pattern("tiny", "wait", "stop", "attach")):
        start(run)
    assert attach(str(run.path)) is live, "the same handle again"
    live.wait_blocking(step=2)
    assert run.status().owner is not None and run.status().owner.pid != os.getpid()  # type: ignore[union-attr]
    live.pause()
    until(lambda: live.state == "paused", "the pause")
    live.resume()
    live.stop()
    live.stop()
    assert live.state == "stopping"
    live.wait_blocking()
    assert live.error is None and live.state == "stopped"
    before = live.step
    assert run.checkpoints.steps()[-1] == before, "saved where it stopped"
    assert "from_sft" in run.events() and not run.events()["from_sft"].dropna().any(), "GRPO alone, as in a thread"
    again = start(run, where="process", steps=before + 1)
    again.wait_blocking()
    assert run.metrics()["step"].tolist() == list(range(1, before + 2))


def test_log_of_a_process_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a kernel has it
    code = "import rich.console; print(rich.console.Console().is_terminal)"
    assert workers._spawn([sys.executable, "-c", code], tmp_path / "log").wait() == 0
    assert (tmp_path / "log").read_text().splitlines()[-1] == "False"


KERNEL = """
import sys, time
from grpo_nb import start
from grpo_nb.jupyter.workers import Job
command = Job.command
Job.command = lambda job: [*sys.argv[3:], *command(job)[1:]]
live = start(sys.argv[1], where="process", stage=sys.argv[2])
while not live.step:
    time.sleep(0.05)
print("trains", flush=True)
time.sleep(600)
"""


# what a kernel started survives it; the next kernel attaches, steers, and may not start a second one
@pytest.mark.ux(5, 10, 37, at="unit")
def test_process_outlives_its_kernel(run: Run) -> None:
    command = [sys.executable, "-c", KERNEL, str(run.path), "grpo", *forked.command()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as first:
        assert first.stdout is not None and first.stdout.readline() == b"trains\n"
        os.killpg(first.pid, signal.SIGKILL)  # as Jupyter ends a kernel: with all of its process group
    owner = run.status().owner
    assert owner is not None and owner.pid != first.pid
    seen = attach(run)
    step = seen.step
    until(lambda: seen.step > step, "a step after the kernel's death")
    assert not seen.live and seen.followed and seen.state == "running"
    with pytest.raises(AlreadyTraining, match=pattern("tiny", owner.pid)):
        start(run, where="process")
    run.knobs["temperature"].set(0.7)
    seen.wait_blocking(step=seen.step + 2)
    assert run.metrics()["temperature"].iloc[-1] == 0.7
    seen.stop()
    seen.wait_blocking()
    assert seen.state == "stopped" and seen.error is None


@pytest.mark.slow
def test_sft_in_a_process_obeys_its_knobs(tmp_path: Path, forks: None) -> None:
    run = tiny_run(tmp_path, sft__steps=400)
    live = start(run, stage="sft", where="process")
    live.wait_blocking(step=1)
    view = session.Session(run, Job(run, "sft"))
    view.pause()
    until(lambda: run.status().state == "paused", "the pause")
    step = view.step
    time.sleep(0.3)
    assert view.step == step
    run.knobs.request("stop")  # as another kernel would
    live.wait_blocking()
    assert live.error is None and live.state == "stopped" and 0 < live.step < 400
    assert run.sft_checkpoints.steps() == [live.step]


@pytest.mark.ux(13, at="unit")
def test_failed_process_is_said_with_its_last_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "import sys; sys.stderr.write('line\\n' * 100 + 'no-such-model\\n'); sys.exit(3)")
    live = start(run, where="process")
    with pytest.raises(WorkerFailed, match=r"\b3\b.*worker.log:\n(line\n)+no-such-model"):
        live.wait_blocking()
    assert live.state == "failed" and str(live.error).count("line\n") < 20
    assert "no-such-model" in live.summary()


def test_killed_process_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    live = start(run, where="process")
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        live.wait_blocking()


def test_stop_before_the_process_listens_is_no_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, f"import time; time.sleep({10 * PATIENCE})")
    live = start(run, where="process")
    live.stop()
    began = time.monotonic()
    live.wait_blocking()
    assert live.error is None and live.state == "new" and time.monotonic() - began < PATIENCE, "it waited for its end"


class Cells:
    """IPython's events, of which a test says when they happen."""

    def __init__(self) -> None:
        self.events, self.hooks = self, []  # type: ignore[var-annotated]

    def register(self, event: str, hook: Callable[..., None]) -> None:
        assert event == "post_run_cell"
        self.hooks.append(hook)

    def unregister(self, event: str, hook: Callable[..., None]) -> None:
        self.hooks.remove(hook)

    def end_of_cell(self) -> None:
        for hook in list(self.hooks):
            hook(None)


@pytest.mark.ux(2, at="unit")
def test_thread_of_a_kernel_trains_when_the_cell_has_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(Job, "work", lambda job: (step for step in done.append(job.where) or ()))
    monkeypatch.setattr(Job, "complete", lambda job: False)
    cells = Cells()
    monkeypatch.setattr(kernel, "shell", lambda: cells)
    monkeypatch.setattr(kernel, "shield_from_autoreload", lambda: None)
    monkeypatch.setattr(kernel.Still, "refresh", lambda still, now=False: None)
    monkeypatch.setattr(workers, "HEAD_START", PATIENCE)
    live = start(run, where="thread")
    assert (live.state, done, len(cells.hooks)) == ("starting", [], 1)
    cells.end_of_cell()
    live.wait_blocking()
    assert done == ["thread"] and not cells.hooks, "and the next cell's end is nobody's"
    start(run, where="foreground")
    assert done[1:] == ["foreground"] and not cells.hooks, "its cell ends no sooner"
    monkeypatch.setattr(workers, "HEAD_START", 0.0)
    start(run, where="thread").wait_blocking()
    assert done[2:] == ["thread"], "a cell that starts and waits does not wait for its own end"
    cells.end_of_cell()
    monkeypatch.setattr(kernel, "shell", lambda: None)
    monkeypatch.setattr(workers, "HEAD_START", PATIENCE)
    start(run, where="thread").wait_blocking()
    assert done[3:] == ["thread"], "nor does a script"


def test_a_full_disk_does_not_hide_why_a_thread_failed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(job: Job) -> Iterator[None]:
        yield
        raise ZeroDivisionError

    def full(self: Run, kind: str, **data: object) -> None:
        raise RunError("no space is left on the disk")

    unhandled: list[object] = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    monkeypatch.setattr(Job, "work", failing)
    monkeypatch.setattr(Run, "log_event", full)
    live = start(run, where="thread")
    with pytest.raises(ZeroDivisionError):
        live.wait_blocking()
    assert not unhandled


# seen from another kernel
@pytest.mark.ux(13, at="unit")
def test_recorded_failure_is_seen_from_elsewhere(run: Run) -> None:
    assert attach(run).error is None
    run.log_event("start", step=0)
    run.log_event("failed", step=3, error="TrainingError: nan-KL")
    seen = attach(run)
    assert (seen.state, str(seen.error)) == ("failed", "TrainingError: nan-KL")
    (run.path / workers.LOG).write_text("last-words")
    assert str(seen.error).endswith("last-words")
    with pytest.raises(WorkerFailed, match="nan-KL"):
        seen.wait_blocking()
    os.utime(run.path / workers.LOG, (1, 1))  # of an earlier process
    assert str(seen.error) == "TrainingError: nan-KL"


def test_python_objects_do_not_cross_into_a_process(run: Run) -> None:
    with pytest.raises(RunError, match=pattern("tasks", "rewards", "where='thread'")):
        start(run, where="process", tasks=small_tasks(), rewards=REWARDS)
    assert not (run.path / workers.LOG).exists() and not session_threads()


# of a run that another kernel trains
@pytest.mark.ux(7, at="unit")
def test_interrupt_of_a_view_leaves_the_run_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with run.lock():
        monkeypatch.setattr(time, "sleep", interrupt)
        with pytest.raises(Detached, match=pattern("tiny", "`session.stop()`")):
            attach(run).wait_blocking()
        assert run.knobs.command == "run"


# ---- the foreground


def test_old_kernels_and_colab_train_in_the_foreground(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert kernel.usual_place() == "thread", "a script has no widgets to keep alive"
    monkeypatch.setattr(kernel, "shell", lambda: object())
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    said: list[str] = []
    monkeypatch.setattr(kernel, "notify", said.append)
    for version, place in (
        ("6.17.1", "foreground"),
        ("7.3.0", "foreground"),
        ("7.4.0", "thread"),
        ("7.10a1", "thread"),
    ):
        monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
        assert kernel.usual_place() == place, version
    assert len(said) == 2 and names(said[0], "foreground", "ipykernel 6.17.1")
    monkeypatch.setitem(sys.modules, "google.colab", sys)
    assert kernel.usual_place() == "foreground" and "Colab" in said[-1]
