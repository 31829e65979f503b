"""Training in a real JupyterLab: started once, stopped, failed, reloaded; every notebook; without subshells."""

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest

from grpo_nb.dev import render
from grpo_nb.jupyter import copies
from grpo_nb.run.run import Run
from grpo_nb.training.sft import sft
from tests.support.lab import KERNELS, ROOT, Desk, Lab, until
from tests.support.steering import steer
from tests.support.tiny import SMALL, small_world, stable, tiny_run
from tests.support.tokens import names

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LONG = 4000
"""Steps that no test waits for."""
NOTEBOOKS = ("01_load", "02_sft", "03_grpo", "04_diagnostics", "05_mathematics", "06_fault_lab")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny_run(tmp_path, "live", run__steps=LONG)


def begin(run: Run) -> str:
    return f"import grpo_nb as g\nsession = g.start({str(run.path)!r})\nsession"


def going_on(run: Run) -> None:
    step = run.last_step() or 0
    until(lambda: (run.last_step() or 0) > step + 1, "more steps")


@pytest.mark.ux(2, 6, 7, 8, 12, at="browser")
def test_start_returns_answers_refuses_stops_and_goes_on(desk: Desk, run: Run) -> None:
    again = f"g.start({str(run.path)!r})"
    desk.open(desk.lab.write("live.ipynb", begin(run), "6 * 7", again, "await session.wait()", "'never run'"))
    desk.run_cell(0)
    desk.by_label("β fairness").wait_for()
    assert (run.last_step() or 0) < LONG, "the cell has returned while it trains"
    until(lambda: run.last_step(), "the first step")
    desk.says("running")
    bar = desk.page.locator(".grpo-nb [role=progressbar], .grpo-nb .progress-bar").first
    width = bar.evaluate("bar => bar.style.width")
    until(lambda: bar.evaluate("bar => bar.style.width") != width, "the bar to move")
    desk.run_cell(1)
    until(lambda: "42" in desk.output(1), "the answer of another cell")
    going_on(run)
    desk.run_cell(2)
    until(lambda: names(desk.output(2), "live", "wait", "stop", "attach"), "the refusal")
    assert "Traceback" not in desk.output(2)

    desk.menu("Run", "Run Selected Cell and All Below")
    going_on(run)
    desk.menu("Kernel", "Interrupt Kernel")
    until(lambda: names(desk.output(3), "live", "Stop"), "the end of the wait")
    going_on(run)
    assert desk.output(4) == "" and run.status().state == "running"
    desk.run_cell(1)
    until(lambda: "42" in desk.output(1), "a cell behind the wait that was ended")
    desk.menu("Kernel", "Interrupt Kernel")
    until(lambda: names(desk.output(3), "live", "stopped"), "the stop")
    told = [line for line in desk.output(3).splitlines() if line.strip()]
    assert names(told[-2], "stopping", "live") and names(told[-1], "live", run.last_step())
    assert "Traceback" not in desk.output(3)
    assert run.status().state == "stopped" and run.checkpoints.steps()[-1] == run.last_step()
    assert desk.output(4) == ""
    desk.drawn()
    desk.shot("interrupted")

    stopped = run.last_step() or 0
    desk.press("Resume")
    until(lambda: (run.last_step() or 0) > stopped, "to go on")
    desk.press("Stop")
    until(lambda: run.status().state == "stopped", "the stop by the button")
    assert run.checkpoints.steps()[-1] == run.last_step()
    steps = [row["step"] for row in run.rows("metrics")]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.ux(10, 37, at="browser")
def test_reload_before_saving_and_a_second_notebook(desk: Desk, run: Run) -> None:
    attach = f"import grpo_nb as g\nagain = g.attach({str(run.path)!r})\nagain"
    desk.open(desk.lab.write("live.ipynb", begin(run), attach, "again is session, again.live"))
    desk.run_cell(0)
    desk.by_label("β fairness").wait_for()
    until(lambda: run.last_step(), "the first step")
    desk.page.on("dialog", lambda dialog: dialog.accept())  # leave without saving
    desk.page.reload()
    desk.idle()
    assert "live · running" not in desk.output(0)
    desk.run_cell(1)
    desk.by_label("β fairness").first.wait_for()
    desk.run_cell(2)
    until(lambda: "(True, True)" in desk.output(2), "the same session, live")
    step = desk.newest_step()
    until(lambda: desk.newest_step() > step, "curves that go on")

    desk.open(desk.lab.write("second.ipynb", attach))
    desk.run_cell(0)
    desk.says(f"process {run.status().owner.pid}")
    desk.run_cell(0)
    going_on(run)
    desk.shot("second-notebook")


RAISES = """
import grpo_nb as g
from grpo_nb import Run
run = Run.open({path!r})
def boom(completions, **columns):
    if (run.last_step() or 0) >= 2:
        raise ZeroDivisionError("of my reward")
    return [0.0] * len(completions)
session = g.start(run, rewards={{"fairness": [boom]}})
session
"""


@pytest.mark.ux(13, at="browser")
def test_failing_worker_is_red_and_ends_run_all(desk: Desk, run: Run) -> None:
    cells = (RAISES.format(path=str(run.path)), "await session.wait()", "'never run'")
    desk.open(desk.lab.write("fails.ipynb", *cells))
    desk.run_all()
    until(lambda: "ZeroDivisionError" in desk.output(1), "the error in the cell that waits")
    until(lambda: names(desk.output(0), "failed", 2), "the cause in the panel")
    desk.drawn()
    assert "of my reward" in desk.output(0) and desk.output(2) == ""
    badge = desk.cell(0).locator("span:text-is('failed')").evaluate("badge => getComputedStyle(badge).backgroundColor")
    assert badge == "rgb(179, 38, 30)", "red"
    logged = next(event for event in run.rows("events") if event["kind"] == "traceback")
    assert "in boom" in logged["traceback"]
    desk.shot("failed", desk.cell(0))


WATCH = """() => {
    window.drawn = new Set(); window.sizes = new Set();
    const view = document.querySelector('.gnb-live');
    new MutationObserver(() => window.drawn.add(view.dataset.step)).observe(view, {attributes: true});
    window.watching = setInterval(() => window.sizes.add(view.clientWidth + 'x' + view.clientHeight), 50);
}"""


@pytest.mark.ux(16, at="browser")
def test_two_hundred_steps_do_not_flicker(desk: Desk, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "long", run__steps=200, run__checkpoint_every=100)
    desk.open(desk.lab.write("long.ipynb", begin(run)))
    desk.run_cell(0)
    desk.page.locator(".gnb-live[data-step]").wait_for()
    desk.page.evaluate(WATCH)
    until(lambda: run.status().state == "done", "200 steps", patience=900)
    desk.says("step 200 of 200")
    until(lambda: desk.newest_step() == 200, "the last step in the curves")
    assert desk.page.evaluate("window.drawn.size") >= 10, "again and again while it trains"
    assert desk.page.evaluate("window.sizes.size") == 1, "always of one size"
    desk.drawn()
    desk.show_panel()
    desk.shot("two-hundred-steps")


def reopened(desk: Desk, name: str) -> str:
    """What a saved notebook shows whose kernel is gone."""
    desk.save()
    desk.lab.end_kernels()
    desk.open(name)
    words = desk.page.locator(".grpo-nb-words").first
    words.wait_for()
    time.sleep(2)  # for what the widgets' manager has to say
    text: str = desk.page.locator(".jp-Notebook").inner_text()  # without what a style hides
    return text


@pytest.mark.ux(30, at="browser")
def test_a_notebook_opened_without_its_kernel_says_where_the_run_stands(desk: Desk, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "seen", run__steps=3)
    desk.open(name := desk.lab.write("seen.ipynb", begin(run), "await session.wait()"))
    desk.run_all()
    until(lambda: run.status().state == "done" and "temperature" in desk.output(1), "the end")
    words = desk.page.locator(".grpo-nb-words")
    until(lambda: names(words.first.text_content(), "seen", "done", 3), "the words of the end")
    assert desk.page.locator(".grpo-nb").first.is_visible() and not words.first.is_visible()
    shown = reopened(desk, name)
    assert "Error" not in shown and names(shown, "seen", "done", 3, "reward")
    desk.shot("reopened-without-kernel")


@pytest.mark.ux(30, at="browser")
def test_so_does_one_that_was_saved_while_it_trained(desk: Desk, run: Run) -> None:
    desk.open(name := desk.lab.write("seen.ipynb", begin(run), "await session.wait()"))
    desk.run_all()
    until(lambda: run.last_step(), "the first step")
    shown = reopened(desk, name)
    assert "Error" not in shown and names(shown, "live", LONG)
    desk.shot("reopened-midway")


@pytest.mark.usefixtures("this_checkout")
@pytest.mark.ux(1, 27, 32, at="browser")
def test_every_notebook_runs_and_gives_the_numbers_of_a_headless_run(desk: Desk, tmp_path: Path) -> None:
    small_world(tmp_path / "seen")  # the data that `tiny_run` gives the other one
    for name in NOTEBOOKS:
        settings = {"CHANGES": SMALL | {"run.steps": 6}} if name == "01_load" else {}
        settings |= {} if name == "05_mathematics" else {"RUN": str(tmp_path / "seen")}
        _run_notebook(desk, name, settings | ({"STEER_STEPS": 0} if name == "03_grpo" else {}))
    headless = tiny_run(tmp_path, "headless", run__steps=6)
    for name in ("02_sft", "03_grpo"):
        steered = {"STEER_STEPS": 0} if name == "03_grpo" else {}
        render.render(ROOT / "notebooks" / f"{name}.ipynb", tmp_path, {"RUN": str(headless.path)} | steered)
    seen = Run.open(tmp_path / "seen")
    rows = [[stable(row) for row in run.metric_rows()] for run in (seen, headless)]
    assert len(rows[0]) == 6 and rows[0] == rows[1]

    desk.open("03_grpo.ipynb")
    desk.restart_and_run_all()
    desk.says("fresh=True")
    desk.idle()
    assert seen.last_step() == 6 and not desk.errors()


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def clone(lab: Lab) -> Path:
    """A repository with what decides about the notebooks, and copies of them, where JupyterLab finds them."""
    folder = lab.notebooks / "clone"
    folder.mkdir()
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    for name in (".gitignore", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "x")
    assert len([*copies.make(folder / copies.FOLDER)]) == len(NOTEBOOKS)
    return folder


@pytest.mark.usefixtures("this_checkout")
@pytest.mark.ux(39, at="browser")
def test_run_all_in_the_copies_leaves_the_repository_as_it_was(desk: Desk, clone: Path) -> None:
    first = clone / copies.FOLDER / "01_load.ipynb"
    book = render.with_parameters(nbformat.read(first, 4), {"CHANGES": SMALL})
    nbformat.write(book, first)
    for name in ("01_load", "02_sft", "05_mathematics"):
        _execute(desk, f"clone/{copies.FOLDER}/{name}.ipynb")
    assert (clone / "runs" / "demo" / "sft.jsonl").is_file(), "in the project, not beside the notebook"
    assert '"image/png"' in (clone / copies.FOLDER / "02_sft.ipynb").read_text(), "saved with its outputs"
    assert git(clone, "status", "--porcelain") == ""


@pytest.mark.ux(39, at="browser")
def test_a_copy_that_was_edited_elsewhere_opens(desk: Desk, clone: Path) -> None:
    path = clone / copies.FOLDER / "05_mathematics.ipynb"
    desk.open(f"clone/{copies.FOLDER}/{path.name}")
    desk.run_cell(1)
    until(lambda: "grpo_nb" in desk.output(1), "the cell")
    desk.save()
    until(lambda: '"output_type"' in path.read_text(), "the file")
    path.write_text(path.read_text().replace("# 5. ", "# 5. Edited elsewhere: ", 1))
    desk.open(f"clone/{copies.FOLDER}/{path.name}")
    until(lambda: "Edited elsewhere" in desk.cell(0).inner_text(), "the edit")
    assert desk.page.locator(".jp-Dialog").count() == 0


def _run_notebook(desk: Desk, name: str, settings: dict[str, Any]) -> None:
    _execute(desk, desk.lab.copy(f"{name}.ipynb", **settings))


def _execute(desk: Desk, path: str) -> None:
    name = Path(path).stem
    desk.open(path)
    desk.run_all()
    last = desk.page.locator(".jp-CodeCell").last
    done = "cell => /\\[\\d+\\]/.test(cell.querySelector('.jp-InputPrompt').textContent)"
    until(lambda: last.evaluate(done) or _failed(desk), f"{name} to end")
    assert not _failed(desk), f"{name}: {_failed(desk)}"
    desk.shot(f"notebook-{name}")
    desk.save()


def _failed(desk: Desk) -> list[str]:
    errors = desk.page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']")
    return [*desk.errors(), *errors.all_inner_texts()]


@pytest.mark.ux(40, 3, 4, at="browser")
def test_knobs_are_turned_without_subshells(desk: Desk, tmp_path: Path) -> None:
    desk.lab.set(KERNELS, commsOverSubshells="disabled")
    run = tiny_run(tmp_path, "shells", run__steps=LONG)
    for _ in sft(run):
        pass
    desk.open(desk.lab.write("live.ipynb", begin(run), "await session.wait()"))
    desk.run_all()
    until(lambda: run.last_step(), "the first step")
    steer(desk, run)
    desk.press("Stop")
    until(lambda: run.status().state == "stopped", "the stop")
