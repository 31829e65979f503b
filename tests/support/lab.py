"""A real JupyterLab, and what a person does in it; Chromium is driven by playwright."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support import forked

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = ROOT / "build" / "screenshots"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
TOKEN = "for-this-test-only"
PATIENCE = 240.0
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},  # else cells out of sight are not there
}
THEMES = "@jupyterlab/apputils-extension/themes"
KERNELS = "@jupyterlab/apputils-extension/kernels-settings"
VIEWPORT = {"width": 1400, "height": 1500}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.1)


class Lab:
    """A server of its own under `folder`: settings, workspaces and notebooks are nobody else's."""

    def __init__(self, folder: Path) -> None:
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir()
        self._settings = folder / "settings"
        self.reset()
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
        command += [f"--port={self.port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"]
        command += [f"--ServerApp.root_dir={self.notebooks}"]
        own = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime"}
        own |= {"JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces"}
        own |= {"IPYTHONDIR": "ipython"}
        log = folder / "lab.log"
        with open(log, "wb") as file, forked.kernels():
            env = os.environ | {name: str(folder / place) for name, place in own.items()}
            env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            self._server = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        try:
            until(lambda: self._answers() or self._server.poll() is not None, "JupyterLab to answer")
            assert self._server.poll() is None, log.read_text()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(30)

    def set(self, plugin: str, **values: Any) -> None:
        """Settings that the next page opened will have."""
        file = self._settings / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))

    def reset(self) -> None:
        """The settings that every test starts from, and no notebook: jupytext minds the pair of an earlier one."""
        shutil.rmtree(self._settings, ignore_errors=True)
        for left in self.notebooks.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        for plugin, values in SETTINGS.items():
            self.set(plugin, **values)

    def write(self, name: str, *sources: str) -> str:
        """A notebook of code cells; its name."""
        import nbformat

        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), self.notebooks / name)
        return name

    def copy(self, name: str, **parameters: Any) -> str:
        """One of the project's notebooks, with these settings; its name."""
        import nbformat

        from grpo_nb.dev import render

        book = nbformat.read(ROOT / "notebooks" / name, 4)
        nbformat.write(render.with_parameters(book, parameters), self.notebooks / name)
        return name

    def kernels(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self._rest("kernels"))
        return found

    def end_kernels(self) -> None:
        for kernel in self.kernels():
            self._rest(f"kernels/{kernel['id']}", "DELETE")

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/lab/tree/{name}?token={TOKEN}&reset"

    def _rest(self, path: str, method: str = "GET") -> bytes:
        address = f"http://127.0.0.1:{self.port}/api/{path}"
        asked = urllib.request.Request(address, method=method, headers={"Authorization": f"token {TOKEN}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return bytes(answer.read())

    def _answers(self) -> bool:
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield browser
        browser.close()


def playwright_timeout() -> type[Exception]:
    from playwright.sync_api import TimeoutError

    return TimeoutError


FOCUSED = """() => {
    const at = document.activeElement, tag = at.tagName.toLowerCase();
    const plain = {range: 'slider', text: 'textbox'}[at.type] || {select: 'combobox'}[tag] || tag;
    const role = at.getAttribute('role') || plain;
    const name = at.labels && at.labels.length ? at.labels[0].textContent : at.ariaLabel || at.textContent;
    return (role + ' ' + name.trim()).trim();
}"""
FOCUS_IS_SEEN = "() => getComputedStyle(document.activeElement).outlineStyle !== 'none'"


class Desk:
    """One browser window on one notebook, and what a person does there."""

    def __init__(self, lab: Lab, page: Any) -> None:
        self.lab, self.page = lab, page
        self.unseen_focus: list[str] = []
        """Controls that `tab_through` reached and that did not show it."""
        page.set_default_timeout(PATIENCE * 1000)

    def open(self, name: str) -> None:
        self.page.goto(self.lab.address(name))
        self.idle()  # what is run before that is silently dropped

    def reload(self, label: str) -> None:
        """Reload the page until the widget of this label is back.

        ipywidgets' manager gives a kernel four seconds to send its models; after that, some views stay "Loading
        widget..." until the page is loaded once more. On a loaded machine that is what a person does, too.
        """
        for patience in (60, 60, PATIENCE):
            self.page.reload()
            with suppress(playwright_timeout()):
                self.by_label(label).first.wait_for(timeout=patience * 1000)
                return
        raise AssertionError(f"no {label} after three reloads: {self.page.locator('.jp-OutputArea').all_inner_texts()}")

    def idle(self) -> None:
        self.page.wait_for_selector("text=/Python 3.*\\| Idle/")

    def menu(self, name: str, item: str) -> None:
        self.page.click(f".lm-MenuBar-itemLabel:text-is('{name}')")
        self.page.click(f".lm-Menu-itemLabel:text-is('{item}')")

    def run_all(self) -> None:
        self.menu("Run", "Run All Cells")

    def run_cell(self, number: int) -> None:
        """Click into the cell and press Shift-Enter."""
        self.cell(number).locator(".jp-InputArea-editor").click()
        self.page.keyboard.press("Shift+Enter")

    def restart_and_run_all(self) -> None:
        self.menu("Kernel", "Restart Kernel and Run All Cells…")
        self.page.click(".jp-Dialog button.jp-mod-accept")

    def save(self) -> None:
        self.menu("File", "Save Notebook")
        self.page.wait_for_selector(".lm-TabBar-tab.lm-mod-current:not(.jp-mod-dirty)")

    def cell(self, number: int) -> Any:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    def output(self, number: int) -> str:
        """What stands under a cell, as text."""
        return "\n".join(self.cell(number).locator(".jp-OutputArea-output").all_inner_texts())

    def errors(self) -> list[str]:
        shown = ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']:has-text('Traceback')"
        found: list[str] = self.page.locator(shown).all_inner_texts()
        return found

    def by_label(self, name: str) -> Any:
        return self.page.get_by_label(name, exact=True)

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True)

    def press(self, name: str) -> None:
        """A button, reached by the keyboard; waits until it may be pressed."""
        button = self.page.locator(f"button.jupyter-button:has-text('{name}'):enabled").first
        button.focus()
        self.page.keyboard.press("Enter")

    def type_into(self, name: str, text: str) -> None:
        self.by_label(name).first.focus()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")

    def tab_to(self, name: str, start: str) -> None:
        """From one entry on with Tab, until the other has the focus."""
        self.by_label(start).first.focus()
        passed = [self._focused()]
        while passed[-1] != f"spinbutton {name}":
            assert len(passed) < 12, f"Tab does not lead to {name} but to {passed}"
            self.page.keyboard.press("Tab")
            passed.append(self._focused())

    def tab_through(self, count: int, start: str) -> list[str]:
        """Role and name of what has the focus, from the entry `start` on."""
        self.by_label(start).first.focus()
        self.page.keyboard.press("Shift+Tab")
        reached = []
        for _ in range(count):
            self.page.keyboard.press("Tab")
            reached.append(self._focused())
            if not self.page.evaluate(FOCUS_IS_SEEN):
                self.unseen_focus.append(reached[-1])
        return reached

    def _focused(self) -> str:
        return str(self.page.evaluate(FOCUSED))

    def says(self, text: str) -> None:
        """Wait until the page has this text somewhere."""
        self.page.get_by_text(text).first.wait_for()

    def newest_step(self) -> int:
        """The newest step that the curves of the first panel show."""
        shown = self.page.locator(".gnb-live[data-step]").first
        return int(shown.get_attribute("data-step"))

    def drawn(self) -> None:
        """Wait until the curves of the first panel are the last ones: none have come for two seconds."""
        seen = -1
        while seen != (seen := self.newest_step()):
            time.sleep(2)

    def show_panel(self) -> None:
        """Scroll to the top of the first panel."""
        self.page.locator(".grpo-nb").first.evaluate("panel => panel.scrollIntoView()")

    def shot(self, name: str, part: Any = None) -> Path:
        """A screenshot to look at, of the page or of a part of it."""
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        path = ARTIFACTS / f"{name}.png"
        (part or self.page).screenshot(path=path)
        return path
