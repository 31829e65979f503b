"""Sliders, boxes and buttons: what is requested, what is active, what is refused."""

from pathlib import Path
from typing import Any

import pytest

from grpo_nb.jupyter import session
from grpo_nb.jupyter.controls import MORE, Controls, Notify
from grpo_nb.jupyter.dashboard import Dashboard
from grpo_nb.jupyter.start import attach, start
from grpo_nb.run.knobs import Knobs
from grpo_nb.run.run import Run
from grpo_nb.storage.vocabulary import RunState
from tests.support.stage import FOREVER, Stage, row, until
from tests.support.tiny import tiny_run
from tests.support.tokens import names


@pytest.fixture
def said() -> list[str]:
    return []


def note_in(said: list[str]) -> Notify:
    return lambda text, severity="warning", /: said.append(text)


@pytest.fixture
def controls(run: Run, said: list[str]) -> Controls:
    return Controls(attach(run), note_in(said))


@pytest.mark.ux(21, at="unit")
def test_beta_is_shown_exactly(controls: Controls) -> None:
    controls.follow(RunState.NEW, {})
    control = controls.knobs["beta/fairness"]
    assert control.entry.value == 0.04 and control.slider.value == pytest.approx(0.04)


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
    controls.follow(RunState.RUNNING, {"beta/fairness": 0.04})
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
def test_requested_and_active_are_told_apart(controls: Controls) -> None:
    for name, value, old in (("beta/fairness", 0.1, 0.04), ("temperature", 0.7, 1.0)):
        control = controls.knobs[name]
        control.entry.value = value
        controls.follow(RunState.RUNNING, {name: old})
        assert names(control.label.value, "requested", f"<b>{value:g}</b>", f"{old:g}")
        controls.follow(RunState.RUNNING, {name: value})
        assert names(control.label.value, f"<b>{value:g}</b>", "dashboard")


@pytest.mark.ux(23, at="unit")
def test_beta_of_the_controller_is_in_use_until_the_step_that_took_it_over(controls: Controls, run: Run) -> None:
    control = controls.knobs["beta/fairness"]
    row = {"step": 3, "beta/fairness": 0.0523, "beta_mode/fairness": "auto"}
    control.entry.value = 0.0523
    controls.follow(RunState.RUNNING, row)
    assert names(control.label.value, "requested", "<b>0.0523</b>", "(auto)")
    controls.follow(RunState.RUNNING, row | {"beta_mode/fairness": "manual"})
    assert names(control.label.value, "<b>0.0523</b>", "dashboard") and "auto" not in control.label.value
    run.knobs["beta/fairness"].set_auto()
    controls.follow(RunState.RUNNING, row | {"beta_mode/fairness": "manual"})
    assert names(control.label.value, "requested", "<b>auto</b>", 0.0523)


def test_learning_rate_in_use_is_told_without_its_warm_up(tmp_path: Path, said: list[str]) -> None:
    run = tiny_run(tmp_path, algorithm__learning_rate=3e-4, algorithm__warmup_steps=10)
    controls = Controls(attach(run), note_in(said))
    control = controls.knobs["learning_rate"]
    assert control.entry.value == control.slider.value == 3e-4
    controls.follow(RunState.RUNNING, {"step": 2, "lr": 6e-5})
    assert names(control.label.value, "<b>0.0003</b>", "20%")
    control.entry.value = 1e-5
    controls.follow(RunState.RUNNING, {"step": 10, "lr": 3e-4})
    assert names(control.label.value, "requested", "<b>1e-05</b>", 0.0003)
    assert run.knobs["learning_rate"].value == 1e-5


def test_learning_rate_that_a_guard_halved_is_shown_beside_the_requested_one(controls: Controls) -> None:
    control, row = controls.knobs["learning_rate"], {"step": 9, "lr": 7.5e-5, "lr/requested": 3e-4}
    control.entry.value = 3e-4
    controls.follow(RunState.RUNNING, row)
    assert names(control.label.value, "<b>0.0003</b>", "0.25") and not names(control.label.value, "requested")
    controls.follow(RunState.RUNNING, row | {"lr": 3e-4})
    assert names(control.label.value, "<b>0.0003</b>") and not names(control.label.value, "0.25")
    control.entry.value = 1e-4
    controls.follow(RunState.RUNNING, row)
    assert names(control.label.value, "requested", "<b>0.0001</b>", 0.0003, 0.25)


def test_name_of_who_turned_a_knob_is_data(controls: Controls, run: Run) -> None:
    run.knobs["temperature"].set(0.8, by="<img>")
    controls.follow(RunState.RUNNING, {"temperature": 0.8})
    assert names(controls.knobs["temperature"].label.value, "&lt;img&gt;")


def test_undo_takes_the_last_turn_back_wherever_it_was_made(controls: Controls, run: Run, said: list[str]) -> None:
    controls.follow(RunState.NEW, {})
    assert controls.undo.disabled
    run.knobs["temperature"].set(0.7, by="somebody")
    controls.knobs["beta/fairness"].slider.value = 0.2
    controls.follow(RunState.RUNNING, {})
    assert not controls.undo.disabled and names(controls.undo.tooltip, "beta/fairness = auto")
    controls.undo.click()
    assert run.knobs["beta/fairness"].mode == "auto" and run.knobs.snapshot().by["beta/fairness"] == "dashboard"
    assert names(said[-1], "beta/fairness = auto") and names(controls.undo.tooltip, "temperature = 1")
    controls.undo.click()
    controls.follow(RunState.RUNNING, {"temperature": 0.7})
    assert controls.knobs["temperature"].entry.value == 1.0 and controls.undo.disabled
    controls.undo.click()  # as a page does that has not heard of it yet
    assert names(said[-1], "Undo") and run.knobs["temperature"].value == 1.0
    run.knobs["temperature"].set(0.9, by="somebody")
    controls.undo.click()
    assert run.knobs["temperature"].value == 0.9, "the button did not show it"


def test_undo_is_refused_for_a_change_that_its_tooltip_did_not_show(
    controls: Controls, run: Run, said: list[str]
) -> None:
    controls.knobs["temperature"].entry.value = 0.7
    run.knobs["beta/fairness"].set(0.2, by="somebody")
    controls.undo.click()
    assert run.knobs["beta/fairness"].value == 0.2 and run.knobs["temperature"].value == 0.7
    assert names(said[-1], "Undo", "beta/fairness = auto") and names(controls.undo.tooltip, "beta/fairness = auto")
    controls.undo.click()
    assert run.knobs["beta/fairness"].mode == "auto" and run.knobs["temperature"].value == 0.7
    controls.knobs["temperature"].entry.value = 0.8
    controls.undo.click()
    assert run.knobs["temperature"].value == 0.7, "one made here is undone without a refresh"


def test_a_refresh_reads_the_knobs_once(controls: Controls, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.knobs["temperature"].set(0.7)
    reads: list[None] = []
    read = Knobs._read
    monkeypatch.setattr(Knobs, "_read", lambda knobs: (reads.append(None), read(knobs))[1])
    controls.follow(RunState.RUNNING, {})
    assert len(reads) == 1 and not controls.undo.disabled


def test_tooltips_have_the_sentences_of_the_settings(controls: Controls, run: Run) -> None:
    for name, control in controls.knobs.items():
        sentence = run.knobs[name].meaning
        assert sentence and control.entry.tooltip.endswith(sentence) and control.slider.tooltip.endswith(sentence)


@pytest.mark.ux(22, at="unit")
def test_every_control_has_a_name_and_the_keys_move_it(controls: Controls) -> None:
    for control in controls.knobs.values():
        assert control.entry.description == control.name and control.name in control.slider.tooltip
        assert control.auto is None or control.auto.tooltip.startswith(control.name)
        assert control.slider.step > 0 and control.entry.step > 0
        assert all(part.tabbable is not False for part in (control.entry, control.slider))
    for button in controls.buttons.values():
        assert button.tooltip.startswith(button.description)


@pytest.mark.ux(23, at="unit")
def test_automatic_slider_follows_the_controller_and_writes_nothing(controls: Controls, run: Run) -> None:
    before = run.knobs.snapshot()
    controls.follow(RunState.RUNNING, {"beta/fairness": 0.0523})
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
    controls.follow(RunState.RUNNING, {"temperature": 1.0})
    control = controls.knobs["temperature"]
    assert control.slider.value == 0.73 and control.entry.value == 0.73
    assert run.knobs.snapshot().by["temperature"] == "the command line"


@pytest.mark.parametrize("setting", [{"kl_band": None}, {"controller": "fixed"}])
def test_beta_without_a_band_or_a_controller_has_no_auto(
    tmp_path: Path, said: list[str], setting: dict[str, Any]
) -> None:
    run = tiny_run(tmp_path, **{f"objectives__fairness__{key}": value for key, value in setting.items()})
    assert Controls(attach(run), note_in(said)).knobs["beta/fairness"].auto is None


def test_knob_that_cannot_be_written_is_said(controls: Controls, run: Run, said: list[str]) -> None:
    (run.path / "knobs.json").write_text("{")
    controls.knobs["temperature"].slider.value = 0.5
    assert "knobs.json" in said[-1]


@pytest.mark.parametrize(
    ("state", "allowed"),
    [
        ("running", "pause step stop save evaluate"),
        ("paused", "step run stop save evaluate"),
        ("stopped", "run"),
        ("dead", "run"),
        ("failed", "run"),
        ("stopping", ""),
        ("continued", ""),
        ("done", ""),
    ],
)
def test_buttons_allow_what_makes_sense(controls: Controls, state: str, allowed: str) -> None:
    controls.follow(RunState(state), {})
    assert " ".join(name for name, button in controls.buttons.items() if not button.disabled) == allowed


def test_every_command_reaches_the_session(
    controls: Controls, run: Run, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for method in ("pause", "step_once", "resume", "stop", "save_now"):
        monkeypatch.setattr(session.Session, method, lambda self, method=method: asked.append(method))
    for button in controls.buttons.values():
        button.click()
    assert list(controls.buttons) == ["pause", "step", "run", "stop", "save", "evaluate"]
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
    until(lambda: control.label.value == "requested <b>0.2</b>, active 0.04 (auto)")
    until(board.resting.is_set)


def test_text_that_is_no_number_is_refused_with_what_is_needed(controls: Controls, run: Run, said: list[str]) -> None:
    before, control = run.knobs.snapshot(), controls.knobs["beta/fairness"]
    control.entry._told(control.entry, {"kind": "refused", "text": "<abc>" * 99}, [])
    assert run.knobs.snapshot() == before and control.entry.value == 0.04
    assert names(said[-1], "β fairness", "<abc>", 0, 10) and len(said[-1]) < 200


def test_sliders_of_decades_keep_numbers_not_exponents(controls: Controls, run: Run) -> None:
    low, high = run.config.objectives["fairness"].beta_bounds
    slider = controls.knobs["beta/fairness"].slider
    assert (slider.low, slider.high, slider.log, slider.value) == (low, high, True, 0.04)
    assert not controls.knobs["temperature"].slider.log


@pytest.mark.parametrize(("command", "kind", "told"), [("save", "checkpoint", 3), ("evaluate", "evaluated", 3)])
def test_a_button_says_that_it_was_pressed_and_what_came_of_it(
    run: Run, command: Any, kind: str, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run.lock():
        run.log_event(kind, step=2)
        board = Dashboard(attach(Run.open(run.path)))
        assert board.controls is not None
        board.controls.buttons[command].click()
        requested = board.message.value
        assert "requested" in requested
        board.refresh()
        assert board.message.value == requested, "an earlier one is no answer"
        run.log_event(kind, step=told)
        board.refresh()
        assert names(board.message.value, told) and "requested" not in board.message.value


def test_a_run_that_ended_offers_more_steps(stage: Stage, run: Run) -> None:
    stage.release(FOREVER)
    session = start(run)
    session.wait_blocking()
    controls = Controls(session, note_in([]))
    controls.follow(session.state, {})
    assert controls.more.layout.display is None
    controls.more.click()
    session.wait_blocking()
    assert run.last_step() == session.steps == 6 + MORE
    controls.follow(RunState.RUNNING, {})
    assert controls.more.layout.display == "none"
