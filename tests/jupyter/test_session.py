"""Sessions, dashboard, controls and reports on a stand-in for training whose every step the test releases."""

import asyncio
import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ipywidgets
import nbformat
import pandas as pd
import pytest
import torch
from ipywidgets.widgets.widget import _instances
from nbclient.exceptions import CellExecutionError

import grpo_nb
import grpo_nb.training.grpo
import grpo_nb.training.sft
from grpo_nb import fingerprint, plots, rules
from grpo_nb.config import ConfigError
from grpo_nb.dev import render
from grpo_nb.jupyter import dashboard, kernel, notices, project, session
from grpo_nb.jupyter.controls import Controls
from grpo_nb.jupyter.dashboard import Dashboard
from grpo_nb.jupyter.session import Stopped, attach, start
from grpo_nb.jupyter.workers import AlreadyTraining, Job
from grpo_nb.report import report
from grpo_nb.report.tables import Table
from grpo_nb.run.knobs import Knobs
from grpo_nb.run.run import Run, RunError
from grpo_nb.training import guards
from grpo_nb.types import StepStats
from tests.conftest import ROOT
from tests.support import made_rows
from tests.support.tiny import stable, tiny_config, tiny_run
from tests.support.tokens import names, pattern

PATIENCE = 60.0
FOREVER = 10**6


class Stage:
    """Trains by writing rows, one for each `release`; obeys and logs as the real generators do."""

    def __init__(self) -> None:
        self.loaded = threading.Event()
        self.released = threading.Semaphore(0)
        self.calls: list[int | None] = []
        self.error: Exception | None = None

    def release(self, steps: int = 1) -> None:
        self.loaded.set()
        self.released.release(steps)

    def grpo(
        self, run: Run, *, tasks: Any = None, rewards: Any = None, steps: int | None = None
    ) -> Iterator[StepStats]:
        self.calls.append(steps)
        with run.lock():
            assert self.loaded.wait(PATIENCE)
            run.knobs.request("run")
            run.log_event("resume" if run.last_step() else "start", step=run.last_step() or 0)
            yield from self._steps(run, steps or run.config.run.steps)

    def _steps(self, run: Run, goal: int) -> Iterator[StepStats]:
        for step in range((run.last_step() or 0) + 1, goal + 1):
            while not self.released.acquire(timeout=0.02):
                if run.knobs.command == "stop":
                    break
            if run.knobs.command == "stop":
                run.log_event("stopped", step=step - 1)
                return
            if self.error:
                raise self.error
            run.log_metrics(row(run, step))
            yield StepStats(step, row(run, step))
        run.log_event("done", step=goal)

    def sft(self, run: Run, *, tasks: Any = None) -> Iterator[StepStats]:
        with run.lock():
            for step in range(1, run.config.sft.steps + 1):
                assert self.released.acquire(timeout=PATIENCE)
                run.log_sft({"step": step, "loss": 1.0})
                yield StepStats(step, {})


def row(run: Run, step: int) -> dict[str, Any]:
    knobs = run.knobs.snapshot()
    betas = {name: value for name, value in knobs.values.items() if name.startswith("beta/")}
    return {"step": step, "status": "ok", "reward/fairness": 0.5, "temperature": knobs.values["temperature"], **betas}


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage()
    monkeypatch.setattr(grpo_nb.training.grpo, "grpo", stage.grpo)
    monkeypatch.setattr(grpo_nb.training.sft, "sft", stage.sft)
    yield stage
    stage.release(FOREVER)
    for thread in workers():
        thread.join(PATIENCE)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny_run(tmp_path, run__steps=6)


@pytest.fixture(autouse=True)
def no_dashboard_is_left() -> Iterator[None]:
    yield
    ipywidgets.Widget.close_all()


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if hasattr(thread, "grpo_nb_session")]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


# ---- sessions


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


def test_a_start_without_its_warm_up_says_what_it_trains_from(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage.release(FOREVER)

    def said(name: str, steps: int, saved: int = 0, **changes: Any) -> str:
        caplog.clear()
        run = tiny_run(tmp_path, name, run__steps=1, sft__steps=steps)
        if saved:
            run.sft_checkpoints.save(saved, {"policy": {"w": torch.zeros(1)}}, {"step": saved})
        start(run, **changes).wait_blocking()
        return caplog.text

    assert names(said("cold", 3), "cold", 3, "SFT")
    assert names(said("half", 3, saved=2), "half", 2, 3, "SFT")
    assert said("warm", 3, saved=3) == said("none", 0) == said("warming", 3, stage="sft") == ""


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


# ---- controls


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def controls(run: Run, said: list[str]) -> Controls:
    return Controls(attach(run), said.append)


@pytest.mark.ux(21, at="unit")
def test_beta_is_shown_exactly(controls: Controls) -> None:
    controls.follow("new", {})
    control = controls.knobs["beta/fairness"]
    assert control.entry.value == 0.04 and control.slider.value == pytest.approx(0.04)
    assert not control.slider.readout, "its readout rounds"


@pytest.mark.ux(3, at="unit")
def test_moving_a_slider_requests_the_knob(controls: Controls, run: Run) -> None:
    control = controls.knobs["beta/fairness"]
    control.slider.value = 0.2
    assert (run.knobs["beta/fairness"].value, run.knobs["beta/fairness"].mode) == (0.2, "manual")
    assert run.knobs.snapshot().by["beta/fairness"] == "dashboard"
    assert control.entry.value == 0.2 and control.auto is not None and control.auto.value is False
    assert run.knobs["beta/hallucination"].mode == "auto"


@pytest.mark.ux(21, at="unit")
@pytest.mark.parametrize("typed", [0.05, 0.0, 3.0, 0.0123456])
def test_typed_beta_is_taken_exactly(controls: Controls, run: Run, typed: float) -> None:
    controls.knobs["beta/fairness"].entry.value = typed
    assert run.knobs["beta/fairness"].value == typed
    controls.follow("running", {"beta/fairness": 0.04})
    assert controls.knobs["beta/fairness"].entry.value == typed


@pytest.mark.ux(24, at="unit")
@pytest.mark.parametrize(
    ("name", "typed", "bound"),
    [("temperature", 99.0, "0.05 to 5"), ("beta/fairness", -0.1, "0 to 10"), ("learning_rate", 2.0, "0 to 1")],
)
def test_typed_value_beyond_the_bounds_is_refused(
    controls: Controls, run: Run, said: list[str], name: str, typed: float, bound: str
) -> None:
    before = run.knobs.snapshot()
    control = controls.knobs[name]
    shown, at = control.entry.value, control.slider.value
    control.entry.value = typed
    assert run.knobs.snapshot() == before and (control.entry.value, control.slider.value) == (shown, at)
    assert f"{typed}" in said[-1] and bound in said[-1] and bound in control.entry.tooltip


def test_refusal_goes_away_with_the_next_turn(controls: Controls, said: list[str]) -> None:
    controls.knobs["temperature"].entry.value = 99.0
    controls.knobs["temperature"].entry.value = 0.9
    assert said[-1] == ""


@pytest.mark.ux(3, 4, at="unit")
def test_requested_and_in_use_are_told_apart(controls: Controls) -> None:
    for name, value, old in (("beta/fairness", 0.1, 0.04), ("temperature", 0.7, 1.0)):
        control = controls.knobs[name]
        control.entry.value = value
        controls.follow("running", {name: old})
        assert names(control.label.value, "requested", f"<b>{value:g}</b>", f"{old:g}")
        controls.follow("running", {name: value})
        assert names(control.label.value, f"<b>{value:g}</b>", "dashboard")


@pytest.mark.ux(23, at="unit")
def test_beta_of_the_controller_is_in_use_until_the_step_that_took_it_over(controls: Controls, run: Run) -> None:
    control = controls.knobs["beta/fairness"]
    row = {"step": 3, "beta/fairness": 0.0523, "beta_mode/fairness": "auto"}
    control.entry.value = 0.0523
    controls.follow("running", row)
    assert names(control.label.value, "requested", "<b>0.0523</b>", "(auto)")
    controls.follow("running", row | {"beta_mode/fairness": "manual"})
    assert names(control.label.value, "<b>0.0523</b>", "dashboard") and "auto" not in control.label.value
    run.knobs["beta/fairness"].set_auto()
    controls.follow("running", row | {"beta_mode/fairness": "manual"})
    assert names(control.label.value, "requested", "<b>auto</b>", 0.0523)


def test_learning_rate_in_use_is_told_without_its_warm_up(tmp_path: Path, said: list[str]) -> None:
    run = tiny_run(tmp_path, algorithm__learning_rate=3e-4, algorithm__warmup_steps=10)
    controls = Controls(attach(run), said.append)
    control = controls.knobs["learning_rate"]
    assert control.entry.value == control.slider.value == 3e-4
    controls.follow("running", {"step": 2, "lr": 6e-5})
    assert names(control.label.value, "<b>0.0003</b>", "20%")
    control.entry.value = 1e-5
    controls.follow("running", {"step": 10, "lr": 3e-4})
    assert names(control.label.value, "requested", "<b>1e-05</b>", 0.0003)
    assert run.knobs["learning_rate"].value == 1e-5


def test_name_of_who_turned_a_knob_is_data(controls: Controls, run: Run) -> None:
    run.knobs["temperature"].set(0.8, by="<img>")
    controls.follow("running", {"temperature": 0.8})
    assert names(controls.knobs["temperature"].label.value, "&lt;img&gt;")


@pytest.mark.ux(22, at="unit")
def test_every_control_has_a_name_and_the_keys_move_it(controls: Controls) -> None:
    for control in controls.knobs.values():
        assert control.entry.description == control.name and control.name in control.slider.tooltip
        assert control.auto is None or control.auto.tooltip.startswith(control.name)
        assert control.slider.step > 0 and control.entry.step > 0 and not control.slider.continuous_update
        assert all(part.tabbable is not False for part in (control.entry, control.slider))
    for button in controls.buttons.values():
        assert button.tooltip.startswith(button.description)


@pytest.mark.ux(23, at="unit")
def test_automatic_slider_follows_the_controller_and_writes_nothing(controls: Controls, run: Run) -> None:
    before = run.knobs.snapshot()
    controls.follow("running", {"beta/fairness": 0.0523})
    control = controls.knobs["beta/fairness"]
    assert control.slider.value == pytest.approx(0.0523) and control.entry.value == 0.0523
    assert names(control.label.value, "<b>0.0523</b>", "(auto)") and "requested" not in control.label.value
    assert run.knobs.snapshot() == before


@pytest.mark.ux(23, at="unit")
def test_auto_button_gives_the_knob_back(controls: Controls, run: Run) -> None:
    control = controls.knobs["beta/fairness"]
    control.slider.value = 0.2
    assert control.auto is not None
    control.auto.value = True
    assert run.knobs["beta/fairness"].mode == "auto"


def test_knob_turned_elsewhere_moves_the_slider(controls: Controls, run: Run) -> None:
    Run.open(run.path).knobs["temperature"].set(0.73, by="the command line")
    controls.follow("running", {"temperature": 1.0})
    control = controls.knobs["temperature"]
    assert control.slider.value == 0.73 and control.entry.value == 0.73
    assert run.knobs.snapshot().by["temperature"] == "the command line"


@pytest.mark.parametrize("setting", [{"kl_band": None}, {"controller": "fixed"}])
def test_beta_without_a_band_or_a_controller_has_no_auto(
    tmp_path: Path, said: list[str], setting: dict[str, Any]
) -> None:
    run = tiny_run(tmp_path, **{f"objectives__fairness__{key}": value for key, value in setting.items()})
    assert Controls(attach(run), said.append).knobs["beta/fairness"].auto is None


def test_knob_that_cannot_be_written_is_said(controls: Controls, run: Run, said: list[str]) -> None:
    (run.path / "knobs.json").write_text("{")
    controls.knobs["temperature"].slider.value = 0.5
    assert "knobs.json" in said[-1]


@pytest.mark.parametrize(
    ("state", "allowed"),
    [
        ("running", "pause step stop save evaluate"),
        ("paused", "step resume stop save evaluate"),
        ("stopped", "resume"),
        ("dead", "resume"),
        ("failed", "resume"),
        ("stopping", ""),
        ("continued", ""),
        ("done", ""),
    ],
)
def test_buttons_allow_what_makes_sense(controls: Controls, state: str, allowed: str) -> None:
    controls.follow(state, {})
    assert " ".join(name for name, button in controls.buttons.items() if not button.disabled) == allowed


def test_every_command_reaches_the_session(
    controls: Controls, run: Run, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for method in ("pause", "step_once", "resume", "stop", "save_now"):
        monkeypatch.setattr(session.Session, method, lambda self, method=method: asked.append(method))
    for button in controls.buttons.values():
        button.click()
    assert list(controls.buttons) == ["pause", "step", "resume", "stop", "save", "evaluate"]
    assert asked == ["pause", "step_once", "resume", "stop", "save_now"]
    assert names(said[-1], "Evaluate", "tiny"), "what is refused is said"


@pytest.mark.ux(22, at="unit")
def test_typed_number_moves_the_slider(controls: Controls) -> None:
    control = controls.knobs["temperature"]
    control.entry.value = 0.9
    assert control.slider.value == 0.9, "else its next arrow key would go on from the old number"


@pytest.mark.ux(3, at="unit")
def test_turn_of_a_resting_run_is_shown_at_once(run: Run) -> None:
    run.log_metrics(row(run, 1) | {"beta_mode/fairness": "auto"})
    board = Dashboard(attach(run))
    assert board.controls is not None
    control = board.controls.knobs["beta/fairness"]
    control.entry.value = 0.2
    until(lambda: control.label.value == "requested <b>0.2</b>, in use 0.04 (auto)")
    until(board.resting.is_set)


# ---- dashboard


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of metric rows in each picture that was drawn."""
    drawn: list[int] = []

    def picture(run: Run, rows: pd.DataFrame, page: str, events: pd.DataFrame) -> Any:
        drawn.append(len(rows))
        return plots.Picture(figsize=(1, 1))

    monkeypatch.setattr(report, "picture", picture)
    return drawn


def test_dashboard_follows_to_the_last_row_and_ends_when_closed(
    stage: Stage, run: Run, drawings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_nb.jupyter.dashboard.DRAWING_SHARE", 1e-9)  # no picture is due but the last
    stage.release(3)
    live = start(run)
    board = live.dashboard()
    assert live.dashboard() is board
    stage.release(FOREVER)
    live.wait_blocking()
    until(board.resting.is_set)
    assert drawings[-1] == 6 and board.bar.value == 6 and "done" in board.status.value
    board.close()
    until(lambda: not board._thread.is_alive())  # type: ignore[union-attr]


@pytest.mark.ux(10, 37, at="unit")
def test_resting_dashboard_notices_that_its_run_is_taken_up_again(
    run: Run, drawings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "REST_SECONDS", 0.01)
    looks: list[str] = []
    status, words = Run.status, Dashboard._refresh_words
    monkeypatch.setattr(Run, "status", lambda run: looks.append("look") or status(run))
    monkeypatch.setattr(Dashboard, "_refresh_words", lambda board: looks.append("words") or words(board))
    run.log_metrics(row(run, 1))
    run.log_event("stopped", step=1)
    board = attach(run).dashboard()
    until(board.resting.is_set)
    looks.clear()
    until(lambda: len(looks) > 9)
    assert set(looks) == {"look"} and drawings == [1], "at rest it looks where the run stands, and no more"
    with Run.open(run.path).lock():  # as another process would
        run.log_event("resume", step=1)
        until(lambda: "running" in board.status.value and not board.resting.is_set())
        run.log_metrics(row(run, 2))
        until(lambda: board.bar.value == 2)
        run.log_event("stopped", step=2)
    until(board.resting.is_set)
    assert "stopped" in board.status.value and drawings[-1] == 2
    board.widget.close()  # as ipywidgets does when all widgets are closed
    until(lambda: not board._thread.is_alive())  # type: ignore[union-attr]


def test_folder_that_is_gone_is_said_and_what_was_known_stays(
    run: Run, drawings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "REST_SECONDS", 0.01)
    run.log_metrics(row(run, 1))
    board = attach(run).dashboard()
    until(board.resting.is_set)
    away = run.path.rename(run.path.with_name("away"))
    until(lambda: "(No such file or directory)" in board.notices.value)
    assert names(board.status.value, 1, 6) and "knobs.json" in board.message.value and drawings == [1]
    away.rename(run.path)
    until(lambda: board.notices.value == "" and board.message.value == "")
    board.close()


def test_dashboard_that_is_closed_leaves_nothing_and_can_be_shown_again(run: Run, drawings: list[int]) -> None:
    seen = attach(run)
    for trained in (seen, session.Session(run, Job(run, "sft"))):
        before, shown = len(_instances), []
        for _ in range(3):
            board = trained.dashboard()
            shown.append(board)
            assert not board.closed and trained.dashboard() is board and len(_instances) > before
            board.close()
            board.close()
            until(lambda board=board: not board._thread.is_alive())
            assert len(_instances) == before, "no widget is kept"
        assert len({id(board) for board in shown}) == 3


@pytest.mark.ux(16, at="unit")
@pytest.mark.parametrize("trained", ["grpo", "sft"])
def test_place_of_the_picture_is_kept_before_there_is_one(
    stage: Stage, run: Run, monkeypatch: pytest.MonkeyPatch, trained: Any
) -> None:
    live = session.Session(run, Job(run, trained))
    board = Dashboard(live)
    drawn = board.picture.value
    monkeypatch.setattr(session.Session, "followed", True)
    empty = Dashboard(live).picture.value
    assert empty != drawn and empty[:24] == drawn[:24], "a PNG of the same size"


def test_nothing_new_is_not_drawn_again(run: Run, drawings: list[int]) -> None:
    board = Dashboard(attach(run))
    board.refresh(draw_now=True)
    assert drawings == [0]
    run.log_metrics(row(run, 1))
    board.refresh(draw_now=True)
    assert drawings == [0, 1]


def test_row_written_while_drawing_is_drawn_next(
    run: Run, drawings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Dashboard(attach(run))
    read = board._followed.frames

    def meanwhile() -> tuple[pd.DataFrame, pd.DataFrame]:
        rows, events = read()
        run.log_metrics(row(run, len(rows) + 1))
        return rows, events

    run.log_metrics(row(run, 1))
    monkeypatch.setattr(board._followed, "frames", meanwhile)
    board.refresh(draw_now=True)
    monkeypatch.setattr(board._followed, "frames", read)
    board.refresh(draw_now=True)
    assert drawings == [0, 1, 2]


@pytest.mark.ux(17, 18, at="unit")
def test_warnings_are_shown_as_they_come_and_remarks_are_not(run: Run) -> None:
    board = Dashboard(attach(run))
    for severity in ("info", "warning", "error"):
        run.log_event("finding", step=3, severity=severity, message=f"<{severity}>", advice=f"raise {severity}_cap")
    board.refresh()
    shown = board.findings.value
    assert "step 3: &lt;warning&gt;" in shown and "raise warning_cap" in shown and "info" not in shown
    assert shown.index("error_cap") < shown.index("warning_cap"), "the worst first"
    for step in (4, 5, 6):
        run.log_event("finding", step=step, severity="warning", message="later", advice="")
    board.refresh()
    order = [board.findings.value.find(word) for word in ("error_cap", "step 6: later", "step 5: later", "and 2 more")]
    assert -1 not in order and order == sorted(order) and "step 4" not in board.findings.value
    assert all(f"background:{notices.BADGES[severity]}" in shown for severity in ("warning", "error"))


@pytest.mark.ux(17, 18, at="unit")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"truncation/fairness": 0.6}, "max_completion"),
        ({"dead_groups/fairness": 1.0}, "signal"),
    ],
)
def test_findings_of_the_guards_reach_the_panel(run: Run, change: dict[str, Any], said: str) -> None:
    rows: list[dict[str, Any]] = []
    for step in range(1, 21):
        rows.append(made_rows.healthy(step)[-1] | change)
        guards.act_on(run, [f for f in rules.after_step(rows, run.config) if f.action != "stop"])
    board = Dashboard(attach(run))
    assert said in board.findings.value


@pytest.mark.ux(19, at="unit")
def test_panel_explains_the_loss_and_has_reward_for_its_headline(run: Run) -> None:
    run.log_metrics(row(run, 1) | {"loss": 0.0})
    board = Dashboard(attach(run))
    assert names(board.caption.value, "loss", "Reward")
    figure = report.picture(run)
    assert "fairness   reward 0.50" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_pages_are_turned_by_the_drawing_thread(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, str]] = []

    def picture(run: Run, rows: pd.DataFrame, page: str, events: pd.DataFrame) -> Any:
        drawn.append((page, threading.current_thread().name))
        return plots.Picture(figsize=(1, 1))

    monkeypatch.setattr(report, "picture", picture)
    board = Dashboard(attach(run))
    for page in ("rewards", "machinery"):
        board.pages.value = page
        until(lambda page=page: drawn[-1] == (page, "grpo_nb drawing"))
    until(board.resting.is_set)
    assert len(drawn) == 3, "each page once"


def test_samples_take_the_place_of_the_picture(run: Run) -> None:
    board = Dashboard(attach(run))
    assert board.samples is not None and board.samples.widget.layout.display == "none"
    run.log_samples([{"step": 1, "objective": "fairness", "example": "e", "completion": "so it is"}])
    board.pages.value = "samples"
    until(lambda: "so it is" in board.samples.text.value)  # type: ignore[union-attr]
    assert board._frame.layout.display == "none" and board.samples.widget.layout.display is None
    board.pages.value = "overview"
    assert board._frame.layout.display is None and board.samples.widget.layout.display == "none"


@pytest.mark.ux(16, 36, at="unit")
def test_drawing_takes_a_small_share_of_the_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"wall": 1000.0, "thread": 0.0}
    monkeypatch.setattr(dashboard.time, "monotonic", lambda: clock["wall"])
    monkeypatch.setattr(dashboard.time, "thread_time", lambda: clock["thread"])

    def slow(run: Run, rows: pd.DataFrame, page: str, events: pd.DataFrame) -> plots.Picture:
        clock["thread"] += 0.4
        return plots.Picture(figsize=(1, 1))

    monkeypatch.setattr(report, "picture", slow)
    board, drawn = Dashboard(attach(run)), []
    for step in range(1, 101):
        clock["wall"] += 1.0
        run.log_metrics({"step": step})
        before = clock["thread"]
        board.refresh()
        drawn.append(clock["thread"] > before)
    steps = [step for step, was in enumerate(drawn, 1) if was]
    assert steps == [1, 41, 81], "the first step at once, then every 40 s, of which 0.4 s are 1%"


def test_view_of_a_run_that_trains_leaves_the_drawing_to_its_thread(
    stage: Stage, run: Run, drawings: list[int]
) -> None:
    """The cell that starts need not wait for a picture."""
    live = start(run)
    stage.release(1)
    live.wait_blocking(step=1)
    Dashboard(live)
    assert drawings == []
    live.dashboard()
    until(lambda: drawings)


def test_sft_has_no_pages_to_turn(stage: Stage, run: Run) -> None:
    board = Dashboard(session.Session(run, Job(run, "sft")))
    assert board.pages.layout.display == "none" and board.samples is None and not board.caption.value


# ---- states


def told(live: session.Session) -> str:
    return " ".join(notice.text for notice in notices.notices(live, live.state, live.step))


def test_run_with_nothing_logged_says_so(stage: Stage, run: Run) -> None:
    assert "grpo_nb.start(" in told(attach(run))
    live = start(run)
    assert told(live) and "grpo_nb.start(" not in told(live), "it was started: the model is being loaded"


def test_healthy_run_needs_no_notice(stage: Stage, run: Run) -> None:
    live = start(run)
    stage.release()
    live.wait_blocking(step=1)
    assert told(live) == ""


@pytest.mark.ux(13, at="unit")
def test_trainer_that_failed_says_what_ended_it(stage: Stage, run: Run) -> None:
    stage.error = ZeroDivisionError("of <the> worker")
    stage.release()
    live = start(run)
    with pytest.raises(ZeroDivisionError):
        live.wait_blocking()
    board = live.dashboard()
    until(lambda: "ZeroDivisionError: of &lt;the&gt; worker" in board.notices.value)
    assert f"background:{notices.BADGES['error']}" in board.status.value
    run.log_event("failed", step=0, error="ZeroDivisionError: as logged")
    (run.path / "worker.log").write_text("line\n" * 99)
    said = told(attach(Run.open(run.path)))
    assert names(said, 0, "ZeroDivisionError: as logged", "events.jsonl") and "line" not in said


@pytest.mark.parametrize("error", [RunError("full-disk."), KeyError("a fault")])
def test_panel_speaks_of_a_traceback_only_where_one_is_kept(stage: Stage, run: Run, error: Exception) -> None:
    stage.error = error
    stage.release()
    live = start(run)
    with pytest.raises(type(error)):
        live.wait_blocking()
    kept = any(event["kind"] == "traceback" for event in run.rows("events"))
    assert ("traceback" in told(live)) == kept == isinstance(error, KeyError)


@pytest.mark.ux(14, at="unit")
def test_memory_that_ran_out_is_explained_freed_and_can_be_started_again(stage: Stage, run: Run) -> None:
    stage.error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8 GiB of which 1 GiB is free."
    )
    stage.release()
    live = start(run)
    until(lambda: not live.live)
    trace = live.error.__traceback__ if live.error else None
    while trace is not None:
        assert "goal" not in trace.tb_frame.f_locals, "frames of the training would hold the model and the batch"
        trace = trace.tb_next
    with pytest.raises(torch.OutOfMemoryError):
        live.wait_blocking()
    (notice,) = notices.notices(live, live.state, live.step)
    assert names(notice.text, "2.50 GiB", "1 GiB")
    for setting in ("batch.micro_batch", "model.gradient_checkpointing", "sampling.max_completion"):
        assert setting in notice.more
    stage.error = None
    stage.release(FOREVER)
    again = start(run)
    again.wait_blocking()
    assert again.state == "done"


def test_trainer_that_died_says_where_resume_goes_on(run: Run) -> None:
    code = (
        "import os, sys; from pathlib import Path; from grpo_nb.run.run import Run; run = Run.open(Path(sys.argv[1])); "
        "lock = run.lock(); lock.__enter__(); run.log_event('start', step=0); run.log_metrics({'step': 1}); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(run.path)], check=False, cwd=ROOT)
    seen = attach(run)
    assert seen.state == "dead"
    assert told(seen).count("step 1") == 1
    run.checkpoints.save(1, {}, {"step": 1})
    assert told(seen).count("step 1") == 2, "where it died, and where Resume continues from"
    controls = Controls(seen, lambda text: None)
    controls.follow(seen.state, {})
    assert not controls.buttons["resume"].disabled and controls.buttons["stop"].disabled


@pytest.mark.ux(37, at="unit")
def test_run_of_another_process_names_its_owner(run: Run) -> None:
    run.log_metrics(row(run, 1))
    with run.lock():
        run.log_event("start", step=0)
        seen = attach(Run.open(run.path))
        assert names(told(seen), os.getpid(), socket.gethostname())


@pytest.mark.parametrize(
    ("free", "severity", "said"),
    [(0, "error", r"tiny.*\bfull\b.*Resume"), (2**25, "warning", r"\b32 MiB\b")],
)
def test_full_disk_is_said(run: Run, monkeypatch: pytest.MonkeyPatch, free: int, severity: str, said: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    first = notices.notices(attach(run), "running", 1)[0]
    assert first.severity == severity and re.search(said, first.text)


@pytest.mark.parametrize("state", ["failed", "dead"])
def test_trainer_that_a_full_disk_ended_has_one_notice(run: Run, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    (notice,) = notices.notices(attach(run), state, 3)
    assert names(notice.text, "full", 3)


def test_folder_that_is_gone_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(path: Path) -> None:
        raise OSError(2, "No such file or directory")

    monkeypatch.setattr(shutil, "disk_usage", gone)
    assert "(No such file" in notices.notices(attach(run), "done", 6)[0].text


def test_what_was_asked_of_a_running_step_is_said(stage: Stage, run: Run) -> None:
    stage.release()
    live = start(run)
    live.wait_blocking(step=1)
    live.pause()
    assert "pause" in told(live), "it is requested, not yet held"


def test_badges_are_readable_on_their_own_ground() -> None:
    """WCAG contrast of white on each, so that a dark page and a light one show the same."""
    for colour in notices.BADGES.values():
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        assert 1.05 / (luminance + 0.05) >= 4.5


# ---- drawing


def test_drawing_waits_for_its_turn(run: Run, drawings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard.time, "monotonic", lambda: 1000.0)
    board = Dashboard(attach(run))
    for step in (1, 2, 3):
        run.log_metrics(row(run, step))
        board.refresh()
    assert drawings == [0, 1], "the first steps at once, then at most one picture a second"
    assert board.bar.value == 3, "numbers do not wait"


def test_held_run_is_drawn_at_once(run: Run, drawings: list[int]) -> None:
    with run.lock():
        board = Dashboard(attach(Run.open(run.path)))
        for step in (1, 2):
            run.log_metrics(row(run, step))
            board.refresh()
        run.knobs.request("pause")
        run.log_event("paused", step=2)
        board.refresh()
    assert drawings == [1, 2], "a picture takes nothing from a run that holds"


def test_failed_picture_is_said_and_the_watching_goes_on(
    stage: Stage, run: Run, monkeypatch: pytest.MonkeyPatch, drawings: list[int]
) -> None:
    live = start(run)
    board = live.dashboard()
    monkeypatch.setattr(report, "picture", lambda run, rows, page, events: 1 / 0)
    stage.release()
    until(lambda: "division by zero" in board.message.value)
    assert board._thread is not None and board._thread.is_alive()


def test_closed_dashboard_leaves_the_run_alone(stage: Stage, run: Run, drawings: list[int]) -> None:
    live = start(run)
    board = live.dashboard()
    board.close()
    assert live.live
    stage.release(FOREVER)
    live.wait_blocking()


def test_resume_wakes_the_dashboard(stage: Stage, run: Run, drawings: list[int]) -> None:
    live = start(run)
    board = live.dashboard()
    live.stop()
    stage.release()
    live.wait_blocking()
    until(board.resting.is_set)
    stage.release(FOREVER)
    live.resume()
    live.wait_blocking()
    until(board.resting.is_set)
    assert drawings[-1] == 6


def test_dashboard_of_an_earlier_start_rests(stage: Stage, run: Run, drawings: list[int]) -> None:
    stage.release(2)
    first = start(run, steps=2)
    board = first.dashboard()
    first.wait_blocking()
    second = start(run)
    until(board.resting.is_set)
    assert second.live and board.bar.value == 2
    until(lambda: second.state == "running")
    assert first.state == "continued"


def test_dashboard_follows_a_run_of_another_process(stage: Stage, run: Run, drawings: list[int]) -> None:
    with run.lock():
        board = attach(Run.open(run.path)).dashboard()
        run.log_metrics(row(run, 1))
        until(lambda: board.bar.value == 1)
        assert board._thread is not None
    until(board.resting.is_set)


@pytest.mark.ux(31, at="unit")
def test_session_shows_widget_picture_and_text(run: Run) -> None:
    assert set(attach(run)._repr_mimebundle_()) == {"application/vnd.jupyter.widget-view+json", "text/plain"}
    run.log_metrics(row(run, 1))
    bundle = attach(run)._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    assert bundle["image/png"].startswith("iVBORw0KGgo")
    assert names(bundle["text/plain"], "tiny", "stopped", 1, 6)


def test_what_is_shown_is_escaped(tmp_path: Path, drawings: list[int]) -> None:
    board = Dashboard(attach(tiny_run(tmp_path, name="<b>run")))
    board.say("<script>")
    assert "&lt;b&gt;run" in board.status.value and "<script>" not in board.message.value
    assert "<img" not in Table(pd.DataFrame({"<img": ["<img src=x>"]}), "<img")._repr_html_()


# ---- report


def test_report_needs_no_kernel(run: Run) -> None:
    for step in range(1, 4):
        run.log_metrics(row(run, step) | {"reward/fairness": step / 10})
    shown = report.report(run)
    assert shown.bundle()["image/png"].startswith("iVBORw0KGgo") and "0.2" in repr(shown)
    assert names(shown.bundle()["text/plain"], "tiny", "stopped", 3, 6)
    assert "script" not in shown.table._repr_html_()


def test_empty_run_reports_without_failing(run: Run) -> None:
    for shown in (report.samples(run), report.events(run), report.starts(run), report.sft_losses(run)):
        assert repr(shown) and shown._repr_html_()
    assert report.report(run).table.frame.empty


def test_events_are_told_in_clock_times_and_short_numbers(run: Run) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5).timestamp()
    run.log_event("knob", step=3, key="temperature", old=1.0, new=0.6666666666, by="dashboard", at=at + 0.123)
    run.log_event("takeover", step=4, dead_owner={"pid": 12, "since": at, "token": "x"})
    table = report.events(run)
    taken, knob = table.frame["what"]
    assert names(knob, "temperature", 1, 0.6667, "dashboard", "2026-01-02 03:04:05")
    assert names(taken, "dead_owner", 12, "2026-01-02 03:04:05", "x")
    assert list(table.frame.columns) == ["time", "step", "kind", "what"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", time) for time in table.frame["time"])


def test_samples_are_newest_first_and_no_answer_comes_twice(run: Run) -> None:
    prompt = [{"role": "user", "content": "Who?"}]
    for step, text in ((1, "A"), (1, "B"), (2, "B"), (3, "C")):
        run.log_samples([{"step": step, "objective": "fairness", "prompt": prompt, "completion": text}] * 2)
    frame = report.samples(run, objective="fairness", limit=2).frame
    assert frame[["step", "completion"]].values.tolist() == [[3, "C"], [2, "B"]] and frame["prompt"][0] == "Who?"
    assert report.samples(run, step=1).frame["completion"].tolist() == ["A", "B"]


def test_knob_trace_shows_both_sides_of_the_turn(run: Run) -> None:
    for step in range(1, 7):
        run.log_metrics({"step": step, "beta/fairness": 0.04 if step <= 3 else 0.1, "beta_mode/fairness": "auto"})
    trace = report.knob_trace(run, "beta/fairness", around=3, window=2).frame
    assert trace["step"].tolist() == [2, 3, 4, 5] and trace["beta/fairness"].tolist() == [0.04, 0.04, 0.1, 0.1]


def test_dollars_in_a_table_are_dollars() -> None:
    """JupyterLab typesets all HTML of an output but what has this class."""
    full = Table(pd.DataFrame({"completion": ["$x$"]}), "$y$")
    for table in (full, Table(full.frame, "$y$", folded=True), Table(pd.DataFrame(), "$y$")):
        shown = re.sub(r"<(\w+) class=\"mathjax_ignore\">.*?</\1>", "", table._repr_html_())
        assert "$" not in shown


def test_long_text_is_cut() -> None:
    assert len(Table(pd.DataFrame({"completion": ["x" * 10**6]}))._repr_html_()) < 2000


# ---- finding runs


def test_runs_live_in_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert project.run_path("demo") == tmp_path / "runs" / "demo"
    assert project.run_path("/elsewhere/demo") == Path("/elsewhere/demo")


@pytest.mark.ux(29, at="unit")
def test_notebook_out_of_order_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(project.NotReady, match="01_load") as caught:
        project.open_run(tmp_path / "none", needs="sft")
    assert caught.value._render_traceback_() == [str(caught.value)], "one line, no traceback"
    run = tiny_run(tmp_path)
    with pytest.raises(project.NotReady, match="02_sft"):
        project.open_run(run.path, needs="sft")
    with pytest.raises(project.NotReady, match="03_grpo"):
        project.open_run(run.path, needs="grpo")


def test_settings_cell_makes_the_run_once(tmp_path: Path) -> None:
    made = project.open_run(tmp_path / "r", preset="demo", changes={"run.steps": 7})
    assert made.config.run.steps == 7
    assert project.open_run(tmp_path / "r", preset="demo", changes={"run.steps": 7}).config == made.config
    made.log_metrics({"step": 1})
    with pytest.raises(RunError, match=r"run\.seed"):
        project.open_run(tmp_path / "r", preset="demo", changes={"run.steps": 7, "run.seed": 3})
    with pytest.raises(ValueError, match="'demmo'"):
        project.open_run(tmp_path / "s", preset="demmo")


def test_list_of_runs_says_what_to_do(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run.log_metrics(row(run, 2))
    frame = project.runs(tmp_path).frame
    assert frame.to_dict("records") == [
        {"run": "tiny", "state": "stopped", "step": 2, "steps": 6, "next": "resume: grpo_nb.start('tiny')"}
    ]


def test_module_imported_while_the_sources_are_looked_at_is_looked_at_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = fingerprint._modules()
    found = iter([known, [*known, ("grpo_nb.late", known[0][1], fingerprint.ROOT / "late.py")]] * 2)
    monkeypatch.setattr(fingerprint, "_modules", lambda: next(found))
    assert fingerprint.changed() == [] and len(fingerprint.fingerprint()) == 16


def test_many_edited_files_are_counted() -> None:
    assert names(fingerprint.sentence(["train.py"]), "train.py")
    many = fingerprint.sentence([f"{letter}.py" for letter in "abcdef"])
    assert names(many, "a.py", "d.py", 2) and "e.py" not in many


def test_lines_of_the_first_import_are_few_and_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert project.standing(tmp_path) is None
    for number in range(4):
        made = tiny_run(tmp_path, f"r{number}")
        made.log_event("start", step=0)
        made.log_metrics(row(made, 1))
    made.sft_checkpoints.save(3, {}, {"step": 3})
    lines = (project.standing(tmp_path, limit=2) or "").splitlines()
    assert names(lines[0], "r3", "stopped", 1, 4, "grpo_nb.start('r3')") and lines[1].startswith("r2: ")
    assert len(lines) == 3 and names(lines[2], 2, "grpo_nb.jupyter.project.runs()")
    fresh = tiny_run(tmp_path, "fresh")
    assert names((project.standing(tmp_path, limit=9) or "").splitlines()[0], "fresh", "new", 0, 4, "02_sft", "03_grpo")
    fresh.sft_checkpoints.save(3, {}, {"step": 3})
    line = (project.standing(tmp_path, limit=9) or "").splitlines()[0]
    assert names(line, "fresh", "new", 0, 4, "03_grpo") and "02_sft" not in line


# ---- pages


def book(*sources: str) -> Any:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata["tags"] = ["parameters"]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def test_parameters_replace_settings_and_nothing_else() -> None:
    changed = render.with_parameters(book('RUN = "demo"', "RUN"), {"RUN": "/elsewhere"})
    assert changed.cells[0].source == "RUN = \"demo\"\nRUN = '/elsewhere'"
    with pytest.raises(ValueError, match=pattern("['STEP']", "['RUN']")):
        render.with_parameters(book('RUN = "demo"'), {"STEP": 1})


@pytest.mark.ux(31, at="unit")
def test_widgets_become_their_last_picture_and_text() -> None:
    notebook = book("x = 1")
    parts = {
        "box": ("VBoxModel", {"children": ["IPY_MODEL_slider", "IPY_MODEL_label", "IPY_MODEL_image"]}, []),
        "slider": ("FloatTextModel", {"description": "β fairness", "value": 0.04}, []),
        "label": ("HTMLModel", {"value": "step <b>3</b>"}, []),
        "image": ("ImageModel", {}, [{"path": ["value"], "data": "QUJD", "encoding": "base64"}]),
    }
    state = {key: {"model_name": n, "state": s, "buffers": b} for key, (n, s, b) in parts.items()}
    notebook.metadata["widgets"] = {render.STATE: {"state": state}}
    notebook.cells[0].outputs = [
        nbformat.v4.new_output("display_data", {render.WIDGET: {"model_id": "box"}, "image/png": "OLD"})
    ]
    page = render.page(notebook, "title")
    assert "β fairness" in page and "step <b>3</b>" in page and "base64,QUJD" in page and "OLD" not in page
    assert 'src="http' not in page, "a page needs no network"


def test_progress_that_was_cleared_leaves_nothing() -> None:
    notebook = book("x = 1")
    label = {"model_name": "HTMLModel", "state": {"value": "100%", "layout": "IPY_MODEL_l"}}
    layout = {"model_name": "LayoutModel", "state": {"display": "none"}}
    notebook.metadata["widgets"] = {render.STATE: {"state": {"label": label, "l": layout}}}
    notebook.cells[0].outputs = [nbformat.v4.new_output("display_data", {render.WIDGET: {"model_id": "label"}})]
    assert "100%" not in render.without_widgets(notebook).cells[0].outputs[0].data["text/html"]


def test_notebook_that_fails_leaves_its_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nbformat.write(book("RUN = 1", "1 / RUN"), tmp_path / "good.ipynb")
    nbformat.write(book("RUN = 1", "1 / 0"), tmp_path / "bad.ipynb")
    assert render.main([str(tmp_path / "good.ipynb"), "--out", str(tmp_path), "--set", "RUN=4"]) == 0
    assert "0.25" in (tmp_path / "good.html").read_text()
    if Path("/proc/self/status").exists():
        assert re.search(r"good\.html: \d+ s, \d\.\d\d GiB\b", caplog.text), "as the notebooks' tables say it"
    assert render.main([str(tmp_path / "bad.ipynb"), "--out", str(tmp_path)]) == 1
    assert "ZeroDivisionError" in (tmp_path / "bad.html").read_text()
    assert render.main([str(tmp_path / "good.ipynb"), "--out", str(tmp_path), "--set", "NO=4"]) == 2


def test_kernel_is_reached_without_tcp_and_progress_counts_cells_that_ended_well(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    connection = "from ipykernel.connect import get_connection_info"
    cells = ("RUN = 1", f"{connection}\nget_connection_info(unpack=True)['transport']", "", "1 / 0", "2")
    nbformat.write(book(*cells), tmp_path / "bad.ipynb")
    seen: list[tuple[int, int]] = []
    with pytest.raises(CellExecutionError):
        render.render(tmp_path / "bad.ipynb", tmp_path, progress=lambda done, cells: seen.append((done, cells)))
    assert seen == [(0, 4), (1, 4), (2, 4), (2, 4)]
    assert "ipc" in (tmp_path / "bad.html").read_text()
    assert "without encryption" not in capfd.readouterr().err
    assert render.main([str(tmp_path / "bad.ipynb"), "--out", str(tmp_path)]) == 1
    assert re.search(r"bad\.ipynb .* 2/4 cells 0:00:\d\d", capfd.readouterr().err)


# ---- the real thing


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
