"""A real IPython kernel for tests: asked cell by cell, or given a whole notebook by nbclient."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from traitlets.config import Config

from tests.conftest import ROOT
from tests.support import forked

PATIENCE = 240.0


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


def environment(folder: Path, source: Path = ROOT) -> dict[str, str]:
    """A kernel's: the package from `source`, no settings of the person who tests, one thread."""
    own = {"PYTHONPATH": str(source), "IPYTHONDIR": str(folder / "ipython"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own}


def shown(cell: Any) -> str:
    """All that a cell of an executed notebook shows, as text; its error as the notebook would print it."""
    texts = []
    for output in cell.outputs:
        if output.output_type == "error":
            texts.append("\n".join(output.traceback))
        else:
            texts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(texts).strip()


def notebook(*sources: str) -> Any:
    """A notebook of these code cells."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    spec = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": spec})


def execute(folder: Path, *sources: str) -> tuple[list[str], Any]:
    """What each cell showed, in a kernel whose working directory is `folder`; and the executed notebook.

    Cells that fail show their error. A kernel that dies raises nbclient's DeadKernelError.
    """
    book = notebook(*sources)
    with tempfile.TemporaryDirectory(prefix="nb-") as private:  # short: a socket's path has about 100 characters
        sockets = Config({"KernelManager": {"transport": "ipc", "connection_file": f"{private}/kernel.json"}})
        where = {"metadata": {"path": str(folder)}}
        client = NotebookClient(book, config=sockets, timeout=int(PATIENCE), allow_errors=True, resources=where)
        with forked.kernels():
            client.execute(env=environment(folder))
    return [shown(cell) for cell in book.cells], book


class Shared:
    """One kernel for several notebooks, each in its own folder: a kernel's imports take longer than most of them."""

    def __init__(self, folder: Path) -> None:
        asynchronous = "jupyter_client.asynchronous.client.AsyncKernelClient"
        self.manager = KernelManager(kernel_name="python3", client_class=asynchronous)
        with forked.kernels():
            self.manager.start_kernel(cwd=str(folder), env=environment(folder))

    def execute(self, folder: Path, *sources: str) -> tuple[list[str], Any]:
        """As the function of this name."""
        book = notebook(f"import os; os.chdir({str(folder)!r})", *sources)
        client = NotebookClient(book, km=self.manager, timeout=int(PATIENCE), allow_errors=True)
        client.execute()
        client.kc.stop_channels()
        del book.cells[0]
        return [shown(cell) for cell in book.cells], book

    def close(self) -> None:
        self.manager.shutdown_kernel(now=True)


class Kernel:
    """A kernel that imports a copy of the package from `folder`, which is its working directory too."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "grpo_nb"
        shutil.copytree(ROOT / "grpo_nb", self.package)  # compiled files too, which times of their sources keep valid
        self.manager = KernelManager(kernel_name="python3")
        with forked.kernels():
            self.manager.start_kernel(cwd=str(folder), env=environment(folder, folder))
        self.client: Any = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def ask(self, code: str, meanwhile: Callable[[], object] = lambda: None) -> tuple[str, str | None]:
        """What a cell shows, and its error; `meanwhile` is called once it is under way."""
        message = self.client.execute(code)
        shown, error, begun = [], None, False
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                got = self.client.get_iopub_msg(timeout=1)
            except Empty:
                continue
            if got["parent_header"].get("msg_id") != message:
                continue
            kind, content = got["msg_type"], got["content"]
            if kind == "execute_input" and not begun:
                begun = True
                meanwhile()
            if kind in ("execute_result", "display_data", "update_display_data"):
                shown.append(content["data"].get("text/plain", ""))
            elif kind == "stream":
                shown.append(content["text"])
            elif kind == "error":
                error = "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                return "\n".join(shown), error
        raise AssertionError(f"no answer to {code!r}")

    def run(self, code: str) -> str:
        """What a cell shows; it must not fail."""
        shown, error = self.ask(code)
        assert error is None, error
        return shown

    def send(self, kind: str, content: Mapping[str, Any], subshell: str | None = None) -> None:
        """A message as a front end sends it for a widget: over the main shell, or over a subshell."""
        message = self.client.session.msg(kind, dict(content))
        message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)

    def subshell(self) -> str:
        """A new subshell's id, made over the control channel as JupyterLab does."""
        self.client.control_channel.send(self.client.session.msg("create_subshell_request", {}))
        reply = self.client.get_control_msg(timeout=PATIENCE)
        return str(reply["content"]["subshell_id"])

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.package / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
