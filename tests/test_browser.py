"""Notebook 03 in a real JupyterLab, as a person would: run, drag beta, restart the kernel, and the curve joins."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from grpo_nb import render
from grpo_nb.run import Run
from grpo_nb.sft import sft
from grpo_nb.train import grpo
from grpo_nb.widgets.dashboard import READING
from tests.conftest import ROOT
from tests.tiny import REWARDS, tiny_run

pytestmark = pytest.mark.browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
TOKEN = "for-this-test-only"
ARTIFACTS = ROOT / "build" / "screenshots"
STEPS = 30
PATIENCE = 240.0
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},  # else cells out of sight are not there
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """After SFT, with GRPO steps of about half a second, so that there is time to turn a knob."""
    run = tiny_run(
        tmp_path, "browser", run__steps=STEPS, batch__prompts=24, batch__group_size=8, batch__micro_batch=192
    )
    for _ in sft(run):
        pass
    return run


@pytest.fixture
def lab(tmp_path: Path, run: Run) -> Iterator[str]:
    """Address of a JupyterLab of its own on a copy of the notebooks, whose settings cell names the run."""
    pytest.importorskip("jupyterlab", reason="needs JupyterLab: pip install -e .[dev]")
    copy_notebooks(tmp_path / "notebooks", run)
    write_settings(tmp_path / "settings")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"]
    command += [f"--ServerApp.root_dir={tmp_path / 'notebooks'}"]
    own = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime"}
    own |= {"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "IPYTHONDIR": "ipython"}
    env = os.environ | {name: str(tmp_path / folder) for name, folder in own.items()}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "lab.log", "wb") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        until(lambda: answers(port) or server.poll() is not None, "JupyterLab to answer")
        assert server.poll() is None, (tmp_path / "lab.log").read_text()
        yield f"http://127.0.0.1:{port}/lab"
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e .[dev]")
    if CHROMIUM is None:
        pytest.skip("no chromium or chrome on this machine")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch_persistent_context(
            str(tmp_path / "profile"),
            executable_path=CHROMIUM,
            headless=True,
            args=[*flags, "--disable-background-networking", "--disable-component-update"],
            viewport={"width": 1400, "height": 1500},
        )
        browser.set_default_timeout(PATIENCE * 1000)
        yield browser.pages[0]
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        browser.pages[0].screenshot(path=ARTIFACTS / "0-last-seen.png")
        browser.close()


def copy_notebooks(folder: Path, run: Run) -> None:
    import nbformat

    folder.mkdir()
    for path in (ROOT / "notebooks").glob("0[1-4]_*.ipynb"):
        parameters = {"RUN": str(run.path)}
        nbformat.write(render.with_parameters(nbformat.read(path, 4), parameters), folder / path.name)


def write_settings(folder: Path) -> None:
    for name, values in SETTINGS.items():
        file = folder / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.1)


def answers(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def open_notebook(page: Any, lab: str, name: str) -> None:
    page.goto(f"{lab}/tree/{name}?token={TOKEN}&reset")
    page.wait_for_selector("text=/Python 3.*\\| Idle/")  # what is run before that is silently dropped


def menu(page: Any, name: str, item: str) -> None:
    page.click(f".lm-MenuBar-itemLabel:text-is('{name}')")
    page.click(f".lm-Menu-itemLabel:text-is('{item}')")


def errors(page: Any) -> list[str]:
    return page.locator(
        ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']:has-text('Traceback')"
    ).all_inner_texts()


def picture(page: Any) -> str:
    """Address of the dashboard's newest picture."""
    return str(page.locator("img.widget-image").first.get_attribute("src"))


def slider(page: Any) -> Any:
    return page.locator(".noUi-handle").first


def shot(page: Any, name: str) -> None:
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    page.locator(".widget-image").first.scroll_into_view_if_needed()
    page.screenshot(path=ARTIFACTS / f"{name}.png")


def rows(run: Run) -> list[dict[str, Any]]:
    return run.rows("metrics")


def test_run_all_turn_beta_restart_and_the_curve_joins(run: Run, lab: str, page: Any) -> None:
    open_notebook(page, lab, "03_grpo.ipynb")
    menu(page, "Run", "Run All Cells")
    until(lambda: len(rows(run)) >= 2 or errors(page), "two steps")
    assert not errors(page)
    before = picture(page)

    slider(page).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    until(lambda: run.knobs["beta/fairness"].mode == "manual", "the knob file")
    last = run.last_step() or 0
    asked = run.knobs["beta/fairness"].value
    assert asked > run.config.objectives["fairness"].beta
    until(lambda: (run.last_step() or 0) >= last + 2, "the next step")
    after = {row["step"]: (row["beta/fairness"], row["beta_mode/fairness"]) for row in rows(run)}
    assert after[last + 2] == (asked, "manual") and after[1][1] == "auto"
    page.wait_for_selector(f"text=/in use {asked:.4g}/")
    until(lambda: picture(page) != before, "a new picture")
    shot(page, "1-beta-turned")

    assert (run.last_step() or 0) < STEPS
    menu(page, "Kernel", "Restart Kernel and Run All Cells…")
    page.click(".jp-Dialog button.jp-mod-accept")
    until(lambda: "resume" in set(run.events()["kind"]) or errors(page), "the resume")
    until(lambda: (run.status().state == "done" and run.rows("evaluations")) or errors(page), "the end")
    assert not errors(page)
    page.wait_for_selector("text=/Python 3.*\\| Idle/")
    shot(page, "2-after-restart")

    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    events = run.events()
    resumed = int(events[events["kind"] == "resume"]["step"].iloc[0])
    assert 0 < resumed < STEPS
    page.wait_for_selector(f"text=/step {STEPS} of {STEPS}/")


def panel_notebook(folder: Path, run: Run) -> str:
    """A notebook that shows the panel of a run which nobody trains."""
    import nbformat

    source = f"import grpo_nb as g\nsession = g.attach({str(run.path)!r})\nsession"
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)], metadata={"kernelspec": kernel})
    nbformat.write(notebook, folder / "panel.ipynb")
    return "panel.ipynb"


@pytest.fixture
def trained(tmp_path: Path) -> Run:
    run = tiny_run(tmp_path, "panel", run__steps=12, algorithm__gradient_report_every=2)
    for step in grpo(run, rewards=REWARDS):
        if step.step == 10:
            break
    for severity in ("warning", "error"):
        run.log_event("finding", step=10, severity=severity, message=f"an {severity} made up", advice="look at it")
    return run


def use_theme(tmp_path: Path, name: str) -> None:
    file = tmp_path / "settings" / "@jupyterlab" / "apputils-extension" / "themes.jupyterlab-settings"
    file.write_text(json.dumps({"theme": name}))


def test_panel_is_exact_and_reached_by_keyboard(tmp_path: Path, trained: Run, lab: str, page: Any) -> None:
    """req 21, 22, 23, 24, 34"""
    open_notebook(page, lab, panel_notebook(tmp_path / "notebooks", trained))
    menu(page, "Run", "Run All Cells")
    beta = page.get_by_label("β fairness", exact=True)
    beta.wait_for()
    knob = trained.knobs["beta/fairness"]
    assert knob.mode == "auto"

    beta.fill("0.05")
    page.keyboard.press("Enter")
    until(lambda: (knob.mode, knob.value) == ("manual", 0.05), "the typed beta")
    assert beta.input_value() == "0.05"
    knob.set(0.04, by="elsewhere")
    page.get_by_role("button", name="auto").first.press("Enter")  # and the keyboard reaches it
    until(lambda: knob.mode == "auto", "auto")

    beta.fill("99")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=/99.* cannot be set; needs a number from 0 to 10/")
    until(lambda: beta.input_value() != "99", "the refused number to go")
    assert knob.value == 0.04

    beta.focus()
    reached = []
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.className"))
    assert any("noUi-handle" in name for name in reached) and any("widget-toggle-button" in name for name in reached)
    before = knob.value
    slider(page).focus()
    page.keyboard.press("ArrowRight")
    until(lambda: knob.mode == "manual" and knob.value != before, "the arrow key")

    for theme in ("light", "dark"):
        if theme == "dark":
            use_theme(tmp_path, "JupyterLab Dark")
            open_notebook(page, lab, "panel.ipynb")
            menu(page, "Run", "Run All Cells")
            page.get_by_label("β fairness", exact=True).wait_for()
        for name in ("overview", "rewards", "machinery", "samples"):
            page.get_by_role("button", name=name).click()
            page.wait_for_selector(f"text={READING[name][:30]}")
            time.sleep(2.5)
            page.screenshot(path=ARTIFACTS / f"panel-{theme}-{name}.png")
            drawn = page.locator("img.widget-image").evaluate_all("all => all.map(one => one.naturalWidth)")
            assert drawn == [1260], "the picture is there, and no error in its place"
    assert page.locator(".gnb i").count() > 5 and not errors(page)
