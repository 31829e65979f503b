"""Sessions: start, stop, resume, wait and attach."""

import asyncio
import importlib
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ipywidgets
import pytest

import grpo_nb
import grpo_nb.training.grpo
import grpo_nb.training.sft
from grpo_nb.config import ConfigError
from grpo_nb.jupyter import kernel, session
from grpo_nb.jupyter.interrupts import Stopped
from grpo_nb.jupyter.start import attach, start
from grpo_nb.jupyter.workers import AlreadyTraining, Job
from grpo_nb.run.knobs import Knobs
from grpo_nb.run.run import Run, RunError
from tests.support.stage import FOREVER, Stage, until, workers
from tests.support.tiny import stable, tiny_config, tiny_run
from tests.support.tokens import names, pattern

pytestmark = pytest.mark.usefixtures("narrow_model")


@pytest.mark.ux(2, at="unit")
def test_start_does_not_wait_for_the_model(stage: Stage, run: Run) -> None:
    live = start(run)
    assert live.live and live.step == 0 and live.state in ("starting", "running")
    stage.release(6)
    assert names(repr(live.wait_blocking()), "tiny", "done", 6)
    assert (live.state, live.step) == ("done", 6)


def test_start_makes_a_run_from_a_path_and_a_config(stage: Stage, tmp_path: Path) -> None:
    stage.release(FOREVER)
    live = start(tmp_path / "new", config=tiny_config(run__steps=2))
    live.wait_blocking()
    assert (live.run.path, live.step) == (tmp_path / "new", 2)


def test_a_wait_after_one_step_ends_once_the_run_is_held(stage: Stage, run: Run) -> None:
    live = start(run)
    stage.release(2)
    live.wait_blocking(step=2)
    live.pause()
    run.log_event("paused", step=2)
    assert names(live.wait_blocking(), "paused", 2)
    live.step_once()
    ended: list[str] = []
    waiting = threading.Thread(target=lambda: ended.append(live.wait_blocking()))
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive(), "held at the step before"
    stage.release(1)
    waiting.join(60)
    assert names(ended[0], "paused", 3)
    live.stop()
    live.wait_blocking()


def test_a_wait_for_a_paused_run_says_what_holds_it(stage: Stage, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where it began after the pause, in its result; else in a line under the waiting cell, once a pause."""
    said: list[str] = []
    monkeypatch.setattr(kernel, "notify", said.append)
    live = start(run)
    stage.release(2)
    asyncio.run(live.wait(step=2))
    assert not said
    waiting = threading.Thread(target=lambda: live.wait_blocking(step=3))
    waiting.start()
    live.pause()
    run.log_event("paused", step=2)
    until(lambda: said)
    time.sleep(0.3)
    assert len(said) == 1 and names(said[0], "tiny", 3, "session.resume()", f"grpo-nb tell {run.shown} resume")
    assert names(asyncio.run(live.wait()), "paused", "session.resume()", f"grpo-nb tell {run.shown} resume")
    live.resume()
    stage.release(1)
    waiting.join(60)
    assert "resume()" not in live.summary()
    live.stop()
    live.wait_blocking()


@pytest.mark.ux(12, at="unit")
def test_second_start_is_refused_with_choices(stage: Stage, run: Run) -> None:
    start(run)
    with pytest.raises(AlreadyTraining, match=pattern("tiny", "wait", "stop", "attach")) as caught:
        start(str(run.path))
    assert caught.value._render_traceback_() == [str(caught.value)], "one line, no traceback"
    assert len(workers()) == 1


@pytest.mark.ux(26, at="unit")
def test_reloaded_module_still_knows_the_live_session(stage: Stage, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    start(run)
    monkeypatch.setattr(grpo_nb.jupyter, "session", session)  # to have it back afterwards
    monkeypatch.delitem(sys.modules, "grpo_nb.jupyter.session")
    again = importlib.import_module("grpo_nb.jupyter.session")
    assert again is not session
    with pytest.raises(again.RunError, match=pattern("tiny", "wait", "stop", "attach")):
        again.refuse_if_live(run)


@pytest.mark.ux(37, at="unit")
def test_run_that_trains_elsewhere_is_refused_and_named(stage: Stage, run: Run) -> None:
    with run.lock(), pytest.raises(AlreadyTraining, match=pattern("tiny", os.getpid(), socket.gethostname())):
        start(run)
    assert not workers()


@pytest.mark.ux(13, at="unit")
def test_wait_raises_what_ended_the_worker(stage: Stage, run: Run) -> None:
    stage.error = ZeroDivisionError("worker-fault")
    stage.release()
    live = start(run)
    with pytest.raises(ZeroDivisionError, match="worker-fault"):
        asyncio.run(live.wait())
    assert live.state == "failed" and "worker-fault" in live.summary()
    logged = run.events().set_index("kind").loc["traceback"]
    assert "ZeroDivisionError" in logged["traceback"]


def test_wait_for_a_step_leaves_the_run_alone(stage: Stage, run: Run) -> None:
    live = start(run)
    stage.release(2)
    asyncio.run(live.wait(step=2))
    assert live.live and live.step == 2


@pytest.mark.ux(7, at="unit")
def test_first_interrupt_stops_and_saves_in_one_line(stage: Stage, run: Run) -> None:
    stage.release(2)
    live = start(run)

    async def interrupt() -> None:
        waiting = asyncio.ensure_future(live.wait())
        await asyncio.sleep(0)
        until(lambda: live.step == 2)
        waiting.cancel()  # what the kernel does on the stop button
        await waiting

    with pytest.raises(Stopped, match=pattern("tiny", 2, 6)) as caught:
        asyncio.run(interrupt())
    assert caught.value._render_traceback_() == [str(caught.value)]
    assert live.state == "stopped"


def test_stop_asked_while_loading_is_not_forgotten(stage: Stage, run: Run) -> None:
    live = start(run)
    live.stop()
    assert live.state == "stopping"
    stage.release(FOREVER)
    live.wait_blocking()
    assert live.step == 1 and live.state == "stopped"


@pytest.mark.parametrize("whose", ["session", "view"])
def test_stop_works_when_knobs_are_broken(stage: Stage, run: Run, whose: str) -> None:
    stage.release(2)
    live = start(run)
    live.wait_blocking(step=2)
    (run.path / "knobs.json").write_text("{broken")
    (live if whose == "session" else session.Session(Run.open(run.path))).stop()
    live.wait_blocking()
    assert live.error is None and (live.state, live.step) == ("stopped", 2)


def test_stop_works_when_knobs_cannot_be_written(
    stage: Stage, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Any, command: str, by: str = "") -> None:
        raise RunError("read-only")

    stage.release(2)
    live = start(run)
    live.wait_blocking(step=2)
    monkeypatch.setattr(Knobs, "request", refuse)
    live.stop()
    stage.release()
    live.wait_blocking()
    assert live.error is None and (live.state, live.step) == ("stopped", 3)
    assert names(caplog.text, "read-only", "tiny")


@pytest.mark.ux(8, at="unit")
def test_resume_after_a_stop_goes_on(stage: Stage, run: Run) -> None:
    stage.release(2)
    live = start(run, steps=4)
    live.wait_blocking(step=2)
    live.stop()
    live.wait_blocking()
    live.resume()
    stage.release(FOREVER)
    live.wait_blocking()
    assert run.metrics()["step"].tolist() == [1, 2, 3, 4] and stage.calls == [4, 4]
    assert live.state == "stopped", "4 of 6 steps is not done"


def test_pause_and_resume_are_knob_requests(stage: Stage, run: Run) -> None:
    stage.release()
    live = start(run)
    live.wait_blocking(step=1)
    live.pause()
    assert run.knobs.command == "pause"
    live.resume()
    assert run.knobs.command == "run" and len(workers()) == 1


def test_an_idle_run_is_not_steered_which_is_said(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    before = run.knobs.snapshot()
    attach(run).stop()
    assert run.knobs.snapshot() == before
    assert names(caplog.text, "tiny", "new", "stop")
    with pytest.raises(RunError, match=pattern("tiny", "pause")):
        attach(run).pause()
    assert run.knobs.snapshot() == before


def test_resume_of_a_finished_run_says_that_it_is(
    stage: Stage, run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "complete", lambda job: True)
    attach(run).resume()
    assert names(caplog.text, "tiny", "complete") and not workers()


def test_where_a_run_trains_that_another_process_has(run: Run) -> None:
    assert attach(run).where == "thread"
    with run.lock():
        assert attach(run).where == "process"


@pytest.mark.ux(10, at="unit")
def test_attach_shows_a_finished_run(stage: Stage, run: Run) -> None:
    stage.release(FOREVER)
    start(run).wait_blocking()
    seen = attach(str(run.path))
    assert not seen.live and (seen.state, seen.step) == ("done", 6) and len(seen.metrics()) == 6


def test_sft_is_stopped_between_two_steps(stage: Stage, run: Run) -> None:
    stage.release()
    live = start(run, stage="sft")
    until(lambda: live.step == 1)
    live.stop()
    stage.release()
    live.wait_blocking()
    assert (live.state, live.step, live.steps) == ("stopped", 2, 3)


def test_foreground_trains_in_the_cell(stage: Stage, run: Run) -> None:
    stage.release(FOREVER)
    live = start(run, where="foreground")
    assert not live.live and (live.state, live.where) == ("done", "foreground")


@pytest.mark.ux(13, at="unit")
def test_foreground_waits_on_where_its_picture_cannot_be_drawn(
    stage: Stage, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage.release(FOREVER)
    monkeypatch.setattr(kernel, "shell", lambda: SimpleNamespace(events=SimpleNamespace(register=lambda *_: None)))
    monkeypatch.setattr(kernel, "shield_from_autoreload", lambda: None)
    monkeypatch.setattr(kernel.Still, "_bundle", lambda still: 1 / 0)
    live = start(run, where="foreground")
    assert live.state == "done" and names(caplog.text, "tiny", "picture")


def test_foreground_fails_in_its_cell(stage: Stage, run: Run) -> None:
    stage.error = ZeroDivisionError("worker-fault")
    stage.release()
    with pytest.raises(ZeroDivisionError, match="worker-fault"):
        start(run, where="foreground")


@pytest.mark.usefixtures("unchecked")
def test_start_makes_nothing_that_it_was_not_asked_for(tmp_path: Path, run: Run) -> None:
    with pytest.raises(RunError, match="absent"):
        start(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()
    with pytest.raises(ConfigError, match=pattern("where='proces'", "thread", "process", "foreground")):
        start(run, where="proces")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=pattern("stage='grop'", "sft", "'grpo'")):
        start(run, stage="grop")  # type: ignore[arg-type]
    assert not workers()


def test_fewer_steps_than_all_are_no_end(stage: Stage, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.log_metrics({"step": 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "complete", lambda job: True)
        attach(run).resume()
    assert names(caplog.text, 2, f"steps={run.config.run.steps}")


def test_run_of_a_process_that_goes_on_in_the_kernel_says_so(
    stage: Stage, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    (run.path / "worker.log").write_text("a process was here\n")
    live = attach(run)
    live.resume()
    assert names(caplog.text, "tiny", "where='process'")
    live.stop()
    stage.release(FOREVER)


@pytest.mark.ux(27, at="unit")
def test_finished_run_is_reused_and_can_be_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run(tmp_path, run__steps=2)
    start(run).wait_blocking()
    first = run.metric_rows()
    run.knobs["temperature"].set(0.7)
    done = start(run)
    assert not workers() and done.state == "done" and names(repr(done.summary()), "tiny", "done", 2)
    assert names(caplog.text, "tiny", 2, "fresh=True")
    start(run, fresh=True).wait_blocking()
    assert [stable(row) for row in run.metric_rows()] == [stable(row) for row in first], (
        "the same bits, knobs as at first"
    )
    assert (run.path / "metrics.discarded.jsonl").read_bytes().count(b"\n") == 2
    start(run, steps=3).wait_blocking()
    assert run.last_step() == 3, "a run may always go further"


@pytest.mark.ux(5, 8, 20, at="unit")
def test_real_run_stops_part_way_and_joins(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=4)
    start(run, stage="sft").wait_blocking()
    start(run, steps=2).wait_blocking()
    run.knobs["beta/fairness"].set(0.3)
    done = start(run)
    done.wait_blocking()
    rows = done.metrics()
    assert rows["step"].tolist() == [1, 2, 3, 4]
    assert rows["beta/fairness"].tolist()[2:] == [0.3, 0.3] and rows["beta/fairness"][1] != 0.3
    assert run.events()["kind"].tolist().count("resume") == 1
    assert isinstance(done.dashboard().widget, ipywidgets.VBox)
