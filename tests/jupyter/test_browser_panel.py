"""What the panel shows in a real browser: each state clearly, hostile text as text, any theme, a narrow window."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.jupyter.dashboard import READING
from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo
from tests.support import made_rows
from tests.support.lab import ROOT, THEMES, VIEWPORT, Desk, until
from tests.support.tiny import REWARDS, tiny_run
from tests.support.tokens import names

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGES = ("overview", "rewards", "machinery", "samples")
TITLES = {"overview": "Reward", "rewards": "Reward functions, fairness", "machinery": "Time of a step"}
"""Of the first panel of each page."""
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> $x^2$ \\(y\\) **b** "
FULL = """
import shutil
real = shutil.disk_usage
shutil.disk_usage = lambda path: type(real('.'))(9, 9, 0) if 'full' in str(path) else real(path)
"""


def panel_of(desk: Desk, *runs: Run, before: str = "") -> None:
    """A notebook with the panel of each run, in cells 1 and on."""
    sources = [f"g.attach({str(run.path)!r})" for run in runs]
    desk.open(desk.lab.write("panel.ipynb", f"import grpo_nb as g\n{before}", *sources))
    desk.run_all()
    desk.page.locator(".grpo-nb .gnb-live[data-drawn]").nth(len(runs) - 1).wait_for()


def notices(panel: Any) -> list[str]:
    """The badges with which a panel says what is to be known of its run; findings, below the picture, aside."""
    found: list[str] = panel.locator(".grpo-nb > .widget-html:has(+ .widget-vbox) span").all_inner_texts()
    return found


@pytest.mark.ux(13, 37, at="browser")
def test_each_state_is_one_clear_sentence(desk: Desk, tmp_path: Path) -> None:
    new, failed, full = (tiny_run(tmp_path, name) for name in ("new", "failed", "full"))
    failed.log_event("start", step=0)
    failed.log_metrics(made_rows.healthy(1)[0])
    failed.log_event("failed", step=1, error="TrainingError: nan-KL")
    full.log_event("start", step=0)
    full.log_event("failed", step=0, error="OSError: [Errno 28] No space left on device")
    panel_of(desk, new, failed, full, before=FULL)
    for cell, (name, badge, named) in enumerate(
        (
            ("new", "info", ["grpo_nb.start("]),
            ("failed", "error", ["failed", 1, "TrainingError: nan-KL"]),
            ("full", "error", ["full", 0, "Resume"]),
        ),
        start=1,
    ):
        panel = desk.cell(cell)
        assert names(desk.output(cell), *named)
        assert notices(panel) == [badge]
        desk.shot(f"state-{name}", panel)
    assert not desk.errors()


@pytest.mark.ux(13, 37, at="browser")
def test_trainer_of_another_process_is_named_and_its_death_is_seen(desk: Desk, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "elsewhere", run__steps=4000)
    command = [sys.executable, "-m", "grpo_nb", "train", "--no-sft", str(run.path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as trainer:
        try:
            until(lambda: run.last_step() or trainer.poll() is not None, "the first step")
            panel_of(desk, run)
            desk.says(f"process {trainer.pid}")
            desk.shot("state-elsewhere", desk.cell(1))
            desk.type_into("temperature", "0.7")
            desk.says("0.7, set by dashboard")
            os.kill(trainer.pid, signal.SIGKILL)
        finally:
            trainer.kill()
    desk.says("dead")
    until(lambda: notices(desk.cell(1)) == ["error"], "the notice of its death")
    desk.shot("state-dead", desk.cell(1))
    desk.press("Resume")
    desk.says("in this kernel")
    step = run.last_step() or 0
    until(lambda: (run.last_step() or 0) > step, "it goes on here")


@pytest.mark.ux(17, 18, 19, at="browser")
def test_warnings_and_the_word_about_the_loss_are_there(desk: Desk, tmp_path: Path) -> None:
    from grpo_nb import rules
    from grpo_nb.training import guards

    run = tiny_run(tmp_path, "ill")
    rows: list[dict[str, Any]] = []
    for row in made_rows.ill(lambda row: {"truncation/fairness": 0.6, "frac_reward_zero_std/hallucination": 0.97}, 40):
        rows.append(row)
        run.log_metrics(row)
        guards.log_and_raise(run, [f for f in rules.after_step(rows, run.config) if f.action != "stop"])
    panel_of(desk, run)
    shown = desk.output(1)
    assert names(shown, "max_completion_length", "97%", "hallucination")
    assert names(shown, "Reward", "loss")
    desk.shot("warnings", desk.cell(1))


@pytest.mark.ux(34, at="browser")
def test_hostile_text_is_text(desk: Desk, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "hostile")
    run.log_metrics({"step": 1})
    texts = {key: EVIL for key in ("example", "prompt", "completion", "target", "label")}
    whole = {"step": 1, "objective": "fairness", "group_size": 9, "parts": {EVIL: 1.0}, "stop_reason": "length"}
    seen = {"logprobs_old": [-1.0, -2.0], "logprobs_reference": [-1.5, -0.5], "token_texts": [EVIL, EVIL], "tokens": 2}
    for n in range(9):
        long = {"completion": EVIL * 30, "token_texts": None} if n == 8 else {}
        run.log_samples([texts | whole | seen | {"completion_index": n, "reward": n / 8, "advantage": n - 4.0} | long])
    run.log_event("finding", step=1, severity="warning", message=EVIL, advice=EVIL)
    desk.open(
        desk.lab.write(
            "panel.ipynb",
            f"import grpo_nb as g\nfrom grpo_nb.report import report\nrun = g.Run.open({str(run.path)!r})",
            "g.attach(run)",
            "report.samples(run)",
        )
    )
    desk.run_all()
    desk.page.get_by_role("button", name="samples").click()
    desk.says("4 between")
    desk.says("hostile: the newest answers")
    for colouring in ("log-ratio", "log-prob", "plain"):
        desk.by_label("colour by").select_option(colouring)
        shown = desk.output(1)
        assert shown.count("<img src=x onerror=") >= 12 and "$x^2$ \\(y\\) **b**" in shown
    assert [text for text in shown.split() if text.startswith("#")] == ["#1", "#2", "#3", "#8", "#9"]
    assert desk.page.locator(".grpo-nb details").count() >= 1, "what is long is folded"
    desk.shot("hostile", desk.cell(1))
    desk.shot("hostile-table", desk.cell(2))
    assert "$x^2$ \\(y\\) **b**" in desk.output(2), "no dollar is typeset in a table either"
    inside = desk.page.locator(".jp-OutputArea-output")
    assert inside.locator("img, script, mjx-container").count() == 0
    assert "owned" not in desk.page.title()


@pytest.fixture
def trained(tmp_path: Path) -> Run:
    run = tiny_run(tmp_path, "panel", run__steps=12, algorithm__gradient_report_every=2)
    for step in grpo(run, rewards=REWARDS):
        if step.step == 5:
            run.knobs["beta/fairness"].set(0.1)
        if step.step == 10:
            break
    return run


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_pages_are_turned_in_both_themes(desk: Desk, trained: Run, theme: str) -> None:
    desk.lab.set(THEMES, theme=theme)
    panel_of(desk, trained)
    places = []
    for name in PAGES:
        desk.page.get_by_role("button", name=name).click()
        desk.says(READING[name][:30])
        _settle(desk, name)
        places.append(desk.by_label("β fairness").bounding_box())
        desk.shot(f"panel-{theme.split()[1].lower()}-{name}", desk.cell(1))
    assert all(place == places[0] for place in places), "turning a page moves no control"
    assert desk.page.locator(".gnb i").count() > 5 and not desk.errors()
    if theme.endswith("Dark"):
        inks = desk.page.locator(".gnb-title").first.evaluate("title => getComputedStyle(title).color")
        assert inks == "rgb(230, 237, 243)", "light words on a dark page"


def test_narrow_window_hides_nothing(desk: Desk, trained: Run) -> None:
    desk.page.set_viewport_size({"width": 700, "height": VIEWPORT["height"]})
    panel_of(desk, trained)
    desk.page.keyboard.press("Control+b")  # the list of files
    time.sleep(1)  # until the window is laid out
    right = desk.cell(1).bounding_box()["x"] + desk.cell(1).bounding_box()["width"]
    parts = desk.page.locator(".grpo-nb :is(input, button, select, .widget-html-content)")
    boxes = [box for box in (part.bounding_box() for part in parts.all()) if box]
    assert len(boxes) > 20 and all(box["x"] + box["width"] <= right + 1 for box in boxes)
    widths = [canvas.bounding_box()["width"] for canvas in desk.page.locator(".gnb-canvas").all()]
    assert len(widths) == 6 and min(widths) >= 250, "its numbers can be read"
    desk.shot("panel-narrow", desk.cell(1))


def _settle(desk: Desk, page: str) -> None:
    """Until what the page shows is there, and not that of the page before."""
    if page == "samples":
        desk.page.locator(".gnb i").first.wait_for()
        return
    canvas = desk.page.locator(".gnb-canvas").first
    until(lambda: TITLES[page] in (canvas.get_attribute("aria-label") or ""), f"the curves of {page}")


def test_curves_answer_hover_zoom_and_clicks(desk: Desk, trained: Run) -> None:
    """On the panel of beta, whose values are known."""
    panel_of(desk, trained)
    view, beta = desk.page.locator(".gnb-live"), desk.page.locator(".gnb-canvas").nth(2)
    until(lambda: desk.newest_step() == 10, "all steps")
    box = beta.bounding_box()
    across = box["width"] - 60  # what stands around the axis: grpo_nb/jupyter/live/plot.js
    beta.hover(position={"x": 50 + across * 7 / 10, "y": 60})
    tip = view.locator(".gnb-tip").inner_text()
    assert "step 7" in tip and "beta/fairness 0.1" in tip

    for share, act in ((0.2, desk.page.mouse.down), (0.5, desk.page.mouse.up)):
        desk.page.mouse.move(box["x"] + 50 + across * share, box["y"] + 60)
        act()
    until(lambda: "steps 2 to 5" in view.inner_text(), "the zoom")
    beta.dblclick(position={"x": 100, "y": 60})
    until(lambda: "double-click" not in view.inner_text(), "all steps again")

    beta.hover(position={"x": 50 + across * 7 / 10, "y": 60})
    beta.focus()
    desk.page.keyboard.press("ArrowRight")
    until(lambda: "step 8" in view.locator(".gnb-tip").inner_text(), "the cursor moved by a key")
    name = view.get_by_role("button", name="fairness reward")
    name.click()
    assert name.get_attribute("aria-pressed") == "false"
    until(lambda: "beta/fairness" not in beta.get_attribute("aria-label"), "the objective's curves to go")
    assert "beta/hallucination" in beta.get_attribute("aria-label")
    desk.page.set_viewport_size({"width": 900, "height": 1200})
    until(lambda: beta.evaluate("c => c.width === Math.round(c.clientWidth * devicePixelRatio)"), "the new size")
    assert not desk.errors()


NOTIFIED = """window.notified = [];
window.Notification = class {
    constructor(text) { window.notified.push(text); }
    static requestPermission() { return Promise.resolve('granted'); }
};"""


def test_table_report_and_the_word_at_the_end(desk: Desk, trained: Run) -> None:
    desk.page.add_init_script(NOTIFIED)
    panel_of(desk, trained)
    view = desk.page.locator(".gnb-live")
    until(lambda: desk.newest_step() == 10, "all steps")
    view.locator("summary").click()
    cells = view.locator(".gnb-cells")
    until(lambda: cells.locator("tr").count() == 11, "a row a step")
    assert "reward/fairness/mean" in cells.locator("tr").first.inner_text()
    assert cells.locator("tr").nth(1).locator("td").first.inner_text() == "10", "the newest first"
    with desk.page.expect_download() as waited:
        view.get_by_role("button", name="Download report").click()
    assert waited.value.suggested_filename == "panel-report.html"
    assert "Before and after" in Path(waited.value.path()).read_text()

    view.get_by_role("button", name="Notify me at the end").click()
    desk.press("Resume")
    until(lambda: cells.locator("tr").count() == 13, "the last rows")
    until(lambda: desk.page.evaluate("window.notified.length"), "the word at the end")
    (notified,) = desk.page.evaluate("window.notified")
    assert names(notified, "panel", "done", 12)
    desk.shot("panel-table", desk.cell(1))
    desk.press("Train 50 more")
    until(lambda: (trained.last_step() or 0) > 13, "more steps")
    desk.press("Stop")
    until(lambda: trained.status().state == "stopped", "the stop")
    assert not desk.errors()
