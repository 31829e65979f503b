"""One step, a checkpoint now, an evaluation now: ordered through the knobs, done between two steps."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.jupyter.session import Session
from grpo_nb.jupyter.start import attach, start
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage.vocabulary import Command
from grpo_nb.training import commands, loop
from grpo_nb.training.grpo import grpo
from tests.support.tiny import REWARDS, rows, small_tasks, tiny_run
from tests.support.tokens import names

PATIENCE = 60.0


def train(run: Run, **options: Any) -> Iterator[Any]:
    return grpo(run, tasks=small_tasks(), rewards=REWARDS, **options)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def kinds(run: Run) -> list[str]:
    return list(run.events()["kind"])


def test_save_and_evaluation_come_between_steps_and_change_no_bit(tmp_path: Path) -> None:
    straight = rows(list(train(tiny_run(tmp_path, "straight", run__steps=3))))
    run = tiny_run(tmp_path, run__steps=3, run__checkpoint_every=50)
    walk = train(run)
    steps = [next(walk)]
    run.knobs.request("evaluate")
    run.knobs.request("save")
    steps.append(next(walk))
    assert run.checkpoints.steps() == [0, 1] and run.knobs.snapshot().orders == []
    measured = run.evaluations()
    assert set(measured["objective"]) == {"fairness", "hallucination"} and set(measured["step"]) == {1}
    steps += walk
    assert rows(steps) == straight
    assert kinds(run).count("evaluated") == 1 and run.checkpoints.steps() == [0, 1, 3]


@pytest.mark.parametrize("broken", ["evaluate", "dependencies.watch"])
def test_evaluation_that_fails_is_logged_and_training_goes_on(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"grpo_nb.training.commands.{broken}", lambda *_, **__: 1 / 0)
    run = tiny_run(tmp_path, run__steps=2)
    run.knobs.request("evaluate")
    assert len(list(train(run))) == 2
    assert run.events().set_index("kind").loc["evaluation_failed", "error"].startswith("ZeroDivisionError")
    assert names(caplog.text, "evaluation", "step 0") and run.knobs.snapshot().orders == []


JUNK = b'{"version": 1, "command": "\x00'


@pytest.mark.parametrize(("order", "quick_every"), [(Command.SAVE, 0), (Command.EVALUATE, 2)])
def test_junk_in_the_knobs_while_an_order_is_carried_out_ends_nothing(
    order: Command, quick_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path, run__steps=3, run__quick_eval_every=quick_every)
    run.knobs["temperature"].set(0.9)
    run.knobs.request(order)
    carry_out = {Command.SAVE: (loop, "save"), Command.EVALUATE: (commands, "evaluate")}[order]
    kept = []

    def spoilt(*_: Any, **__: Any) -> None:
        kept.append(run.knobs.path.read_bytes())
        run.knobs.path.write_bytes(JUNK)
        monkeypatch.undo()

    monkeypatch.setattr(*carry_out, spoilt)
    steps = train(run)
    next(steps)
    run.knobs.path.write_bytes(kept[0])  # the order stands in it still
    rest = [step.metrics["temperature"] for step in steps]
    assert rest == [0.9, 0.9] and run.metrics()["temperature"].tolist() == [0.9] * 3
    assert kinds(run).count("knobs_unreadable") == 1 and len(kept) == 1
    assert run.knobs.snapshot().orders == []


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Session]:
    run = tiny_run(tmp_path, run__steps=500)
    live = start(run, tasks=small_tasks(), rewards=REWARDS)
    yield live
    live.stop()
    live.wait_blocking()


def test_one_step_then_it_holds_again(live: Session) -> None:
    live.wait_blocking(step=1)
    live.step_once()
    until(lambda: live.state == "paused")
    before = live.step
    live.step_once()
    until(lambda: live.step == before + 1)
    until(lambda: live.state == "paused")
    time.sleep(0.5)
    assert live.step == before + 1 and kinds(live.run).count("stepping") == 2
    live.save_now()  # while it holds
    until(lambda: live.run.checkpoints.steps()[-1] == before + 1)
    live.resume()
    live.wait_blocking(step=before + 3)


def test_step_out_of_a_pause_counts_as_running(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    with run.lock():
        run.knobs.request("pause")
        seen = []
        for kind in ("paused", "stepping", "paused"):
            run.log_event(kind, step=1)
            seen.append(run.status().state)
    assert seen == ["paused", "running", "paused"]


def test_nothing_is_ordered_of_a_run_that_rests(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    for order in ("step_once", "save_now", "evaluate_now"):
        with pytest.raises(RunError, match=r"\btiny\b.*\bGRPO\b"):
            getattr(attach(run), order)()
    assert run.knobs.snapshot().orders == []


def test_stop_asked_while_the_model_loads_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another kernel asks it: through the file alone."""
    from grpo_nb.training import resume

    loading, asked = threading.Event(), threading.Event()
    prepare = resume.prepare

    def slowly(*args: Any, **options: Any) -> Any:
        loading.set()
        assert asked.wait(PATIENCE)
        return prepare(*args, **options)

    monkeypatch.setattr(resume, "prepare", slowly)
    run = tiny_run(tmp_path, run__steps=5)
    run.knobs.request("stop")  # of last time: it must not hold this start up
    threading.Thread(target=lambda: (loading.wait(PATIENCE), run.knobs.request("stop"), asked.set())).start()
    assert list(train(run)) == [] and kinds(run)[-1] == "stopped"
    monkeypatch.setattr(resume, "prepare", prepare)
    assert len(list(train(run))) == 5
