"""The control room in a real JupyterLab, as a person has it: run all, steer by keyboard, reload, restart, and it joins.

The core that `make test` runs; the rest is in test_browser_panel.py and test_browser_runs.py (`make test-browser`).
"""

from pathlib import Path
from typing import Any

import pytest

from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import sft
from tests.support.lab import Desk, until
from tests.support.steering import steer
from tests.support.tiny import REWARDS, tiny_run

pytestmark = pytest.mark.browser

STEPS = 36
STEER = 4
ALL = STEPS + STEER
"""With those that the notebook's last section trains, to be steered."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """After SFT, with GRPO steps long enough to press a button within the first dozen."""
    run = tiny_run(tmp_path, "browser", run__steps=STEPS, batch__prompts=8, batch__group_size=8, batch__micro_batch=64)
    for _ in sft(run):
        pass
    return run


def rows(run: Run) -> list[dict[str, Any]]:
    return run.rows("metrics")


@pytest.mark.ux(1, 3, 4, 5, 9, 20, 22, at="browser")
def test_run_all_steer_reload_restart_and_the_curve_joins(desk: Desk, run: Run) -> None:
    desk.open(desk.lab.copy("03_grpo.ipynb", RUN=str(run.path), STEER_STEPS=STEER))
    desk.run_all()
    until(lambda: rows(run) or desk.errors(), "the first step")
    assert not desk.errors()
    steer(desk, run)
    desk.show_panel()
    desk.shot("1-steered")

    desk.press("Pause")
    until(lambda: run.status().state == "paused", "the pause")
    desk.save()
    desk.reload("β fairness")
    before = run.last_step() or 0
    assert before < STEPS
    desk.press("Step")
    desk.says(f"step {before + 1} of {STEPS // 3} ({STEPS} in all)")

    desk.restart_and_run_all()
    until(lambda: "resume" in set(run.events()["kind"]) or desk.errors(), "the resume")
    until(lambda: (run.status().state == "done" and run.last_step() == ALL) or desk.errors(), "the end")
    assert not desk.errors()
    desk.idle()
    desk.says(f"step {ALL} of {ALL}")
    desk.show_panel()
    desk.shot("2-after-restart")
    assert [row["step"] for row in rows(run)] == list(range(1, ALL + 1))
    resumed = int(run.events().query("kind == 'resume'")["step"].iloc[0])
    assert 0 < resumed < STEPS


@pytest.fixture
def trained(tmp_path: Path) -> Run:
    run = tiny_run(tmp_path, "panel", run__steps=12)
    for step in grpo(run, rewards=REWARDS):
        if step.step == 10:
            break
    return run


@pytest.mark.ux(21, 22, 23, 24, at="browser")
def test_panel_is_exact_refuses_and_is_reached_by_keyboard(desk: Desk, trained: Run) -> None:
    desk.open(desk.lab.write("panel.ipynb", f"import grpo_nb as g\ng.attach({str(trained.path)!r})"))
    desk.run_all()
    beta, knob = desk.by_label("β fairness"), trained.knobs["beta/fairness"]
    beta.wait_for()
    assert knob.mode == "auto" and trained.config.objectives["fairness"].beta == 0.04

    desk.type_into("β fairness", "0.05")
    until(lambda: (knob.mode, knob.value) == ("manual", 0.05), "the typed beta")
    desk.says("requested 0.05")
    assert beta.input_value() == "0.05"

    desk.type_into("β fairness", "99")
    desk.says("99.0")
    until(lambda: beta.input_value() == "0.05", "the refused number to go")
    assert knob.value == 0.05

    desk.type_into("β fairness", "abc")
    desk.says("found 'abc'")
    until(lambda: beta.input_value() == "0.05", "the text that is no number to go")

    slider = desk.by_label("β fairness, slider")
    assert slider.get_attribute("aria-valuetext") == "0.05", "the number, and not its exponent"
    box = slider.bounding_box()
    desk.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2)
    desk.page.mouse.down()
    desk.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2)
    dragged = desk.page.locator(".gnb-shown").first.inner_text()
    assert float(dragged) != 0.05 and knob.value == 0.05, "a number while it is dragged, a knob when it is let go"
    desk.page.mouse.up()
    until(lambda: knob.value == float(dragged), "the knob where it was let go")
    until(lambda: float(beta.input_value()) == float(dragged), "the box with the slider's number")
    desk.type_into("β fairness", "0.05")
    until(lambda: knob.value == 0.05, "the typed beta again")

    reached = desk.tab_through(8, start="β fairness")
    assert reached[:3] == ["spinbutton β fairness", "slider β fairness, slider", "button auto"]
    assert reached[3:6] == ["spinbutton β hallucination", "slider β hallucination, slider", "button auto"]
    assert reached[6:8] == ["spinbutton temperature", "slider temperature, slider"]
    assert not desk.unseen_focus, "each of them shows that it has the focus"
    beta.press("Tab")
    desk.page.keyboard.press("ArrowRight")
    until(lambda: knob.value > 0.05, "one step of the slider, of a twentieth of a decade")
    desk.page.keyboard.press("Tab")
    desk.page.keyboard.press("Enter")
    until(lambda: knob.mode == "auto", "auto, by the keyboard")
