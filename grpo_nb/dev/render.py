"""Execute the notebooks in order and write pages that need neither kernel nor network.

    python -m grpo_nb.dev.render [--out build] [--set RUN='"demo"'] [notebooks ...]

A widget has no kernel on a page: each is replaced by the texts and the picture that it showed last.
"""

import argparse
import ast
import copy
import html as entities
import logging
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbformat
from jinja2 import pass_context
from jinja2.runtime import Context
from latex2mathml.converter import convert_to_element
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from traitlets.config import Config

from grpo_nb.jupyter import without_kernel
from grpo_nb.printable import clean_logger
from grpo_nb.report import aloud
from grpo_nb.report.markup import Markup, html

logger = clean_logger(__name__)

WIDGET = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
CELL_SECONDS = 3600
WITHOUT_MATHJAX = "{% extends 'index.html.j2' %}{% block html_head_js_mathjax %}{% endblock %}"
"""Template of a page: nbconvert's own without its script for formulas, which would come from the network."""


@dataclass
class Cost:
    """Time and memory of executing a notebook."""

    seconds: float = 0.0
    peak: int | None = None
    """Bytes that its kernel held at most, as the system counts them; None where it does not say (only Linux does)."""

    def __str__(self) -> str:
        memory = f", {self.peak / 2**30:.2f} GiB at its peak" if self.peak else ""
        return f"{self.seconds:.0f} s{memory}"


def render(
    path: Path,
    out: Path,
    parameters: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Cost:
    """Execute one notebook in its own folder, write `out/<name>.html`, return its time and memory.

    The page is written also when a cell fails, so that the failure can be read in its place.

    Args:
        parameters: values for names of its settings cell.
        progress: called as `progress(done, cells)`: code cells that have ended well, of so many that will run.

    Raises:
        CellExecutionError, DeadKernelError: a cell failed, or the kernel died (mostly: out of memory).
        ValueError: parameters for a notebook without a cell tagged `parameters`, or that it does not set.
    """
    notebook = with_parameters(nbformat.read(path, as_version=4), parameters or {})  # type: ignore[no-untyped-call]
    began, cost = time.monotonic(), Cost()
    try:
        execute(notebook, path.parent, progress, cost)
    finally:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{path.stem}.html").write_text(page(notebook, path.stem), encoding="utf-8")
    cost.seconds = time.monotonic() - began
    return cost


@contextmanager
def scratch_copies(notebooks: Sequence[Path]) -> Iterator[list[Path]]:
    """Copies of the notebooks in a project of their own, which is gone after the block."""
    with tempfile.TemporaryDirectory(prefix="grpo_nb-") as scratch:
        (Path(scratch) / "pyproject.toml").touch()  # which marks a project
        folder = Path(scratch) / "notebooks"
        folder.mkdir()
        yield [Path(shutil.copy(path, folder)) for path in notebooks]


def execute(
    notebook: Any, folder: Path, progress: Callable[[int, int], None] | None = None, cost: Cost | None = None
) -> None:
    """Run the cells in a kernel on sockets in a private folder, without TCP.

    Raises:
        CellExecutionError, DeadKernelError: as `render`.
    """
    cost, progress = cost or Cost(), progress or (lambda done, cells: None)
    cells, done = sum(c.cell_type == "code" and bool(c.source.strip()) for c in notebook.cells), 0

    def count(cell: Any, cell_index: int, execute_reply: Any) -> None:
        nonlocal done
        done += execute_reply["content"]["status"] == "ok"
        assert client.km is not None
        cost.peak = _peak(getattr(client.km.provisioner, "pid", None))
        progress(done, cells)

    progress(done, cells)
    with tempfile.TemporaryDirectory(prefix="nb-") as private:  # short: a socket's path has about 100 characters
        sockets = Config({"KernelManager": {"transport": "ipc", "connection_file": f"{private}/kernel.json"}})
        client = NotebookClient(
            notebook,
            config=sockets,
            timeout=CELL_SECONDS,
            resources={"metadata": {"path": str(folder)}},
            on_cell_executed=count,
        )
        client.execute()


def _peak(pid: int | None) -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def with_parameters(notebook: Any, parameters: Mapping[str, Any]) -> Any:
    """A copy whose cell tagged `parameters` sets the given names; names that the cell does not set are refused."""
    changed = copy.deepcopy(notebook)
    if not parameters:
        return changed
    cell = next((c for c in changed.cells if "parameters" in c.metadata.get("tags", [])), None)
    if cell is None:
        raise ValueError("this notebook has no cell tagged 'parameters'")
    known = {t.id for node in ast.parse(cell.source).body if isinstance(node, ast.Assign) for t in node.targets}  # type: ignore[attr-defined]
    if strangers := parameters.keys() - known:
        raise ValueError(f"this notebook has no parameter {sorted(strangers)}; it has {sorted(known)}")
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    return changed


def page(notebook: Any, title: str) -> str:
    """The notebook as one HTML page, pictures inside, no script from elsewhere."""
    still = without_widgets(notebook)
    for cell in still.cells:
        if cell.cell_type == "markdown":  # links to the other notebooks become links to their pages
            cell.source = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.html)", cell.source)
    exporter = HTMLExporter(template_name="lab", raw_template=WITHOUT_MATHJAX, embed_images=True)  # type: ignore[no-untyped-call]
    exporter.register_filter("markdown2html", _markdown)  # type: ignore[no-untyped-call]
    for url in ("require_js_url", "jquery_url", "widget_renderer_url", "mermaid_js_url"):
        setattr(exporter, url, "")
    body, _ = exporter.from_notebook_node(still, resources={"metadata": {"name": title}})
    return str(body)


class _WithFormulas(IPythonRenderer):
    """Markdown as HTML, its formulas as MathML."""

    def block_math(self, body: str) -> str:
        return mathml(body, "block")

    def inline_math(self, body: str) -> str:
        return mathml(body, "inline")

    def latex_environment(self, name: str, body: str) -> str:
        return mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", "block")


@pass_context
def _markdown(context: Context, source: str) -> str:
    attachments = context.get("cell", {}).get("attachments", {})
    return MarkdownWithMath(_WithFormulas(escape=False, embed_images=True, attachments=attachments)).render(source)


def mathml(tex: str, display: str) -> str:
    """A formula as MathML, `inline` or as a `block`; as its TeX, escaped, where the library cannot read it.

    >>> mathml("k^2", "inline").partition("<mrow>")[0]
    '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">'
    """
    try:
        formula = convert_to_element(tex, display=display)
    except Exception:  # the library's errors have no common class
        logger.warning("a formula stays TeX, it cannot be converted: %s", tex)
        formula = ElementTree.Element("code")
        formula.text = tex
        return ElementTree.tostring(formula, encoding="unicode")
    for part in formula.iter():  # the library writes symbols as entities, in text that it does not escape
        part.text = entities.unescape(part.text or "")
    return ElementTree.tostring(formula, encoding="unicode")


def without_widgets(notebook: Any) -> Any:
    """A copy where every widget is replaced by its last output: its texts, then its picture."""
    still = copy.deepcopy(notebook)
    models = still.metadata.pop("widgets", {}).get(STATE, {}).get("state", {})
    for cell in still.cells:
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if not _has_words(output)]
        for output in cell.get("outputs", []):
            view = output.get("data", {}).pop(WIDGET, None)
            if view is not None:
                output["data"]["text/html"] = str(_still(view["model_id"], models) or html("still", text="", inside=[]))
            if "image/png" in output.get("data", {}):  # nbconvert would leave out what it shows
                words = str(output["data"].get("text/plain", ""))
                shown = html("picture", words=words, png=output["data"].pop("image/png"))
                output["data"].setdefault("text/html", str(shown))
    return still


def _has_words(output: Any) -> bool:
    """Whether an output is the words of a widget, or of a picture: a page has both in another way."""
    shown = output.get("data", {}).get("text/html", "")
    return any(f'class="{own}"' in shown for own in (without_kernel.OWN, aloud.OWN))


def _still(model_id: str, models: Mapping[str, Any]) -> Markup:
    model = models.get(model_id, {})
    state, name = model.get("state", {}), model.get("model_name", "")
    layout = models.get(str(state.get("layout", "")).removeprefix("IPY_MODEL_"), {}).get("state", {})
    if layout.get("display") == "none" or layout.get("visibility") == "hidden":  # a progress bar that was cleared
        return Markup()
    if name.endswith(("SliderModel", "FloatTextModel")):
        return html("still", text=str(state.get("description", "")), inside=[])
    if name == "HTMLModel":  # what it shows is markup, made by the package's own templates
        return html("still", text=Markup(state.get("value", "")), inside=[])
    if name == "LabelModel":
        return html("still", text=str(state.get("value", "")), inside=[])
    if name == "ImageModel":
        data = next((b["data"] for b in model.get("buffers", []) if b["path"] == ["value"]), None)
        shown = [html("picture", words="the last picture of the run", png=data)] if data else []
        return html("still", text=None, inside=shown)
    children = (child.removeprefix("IPY_MODEL_") for child in state.get("children", []))
    return html("still", text=None, inside=[part for part in (_still(child, models) for child in children) if part])


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: all rendered; 1: a cell failed; 2: usage."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    notebooks = options.notebooks or sorted(Path("notebooks").glob("[0-9]*.ipynb"))
    if not notebooks:
        logger.error("no notebooks given and none in notebooks/; run this in the project's folder")
        return 2
    for path in notebooks:
        try:
            with _line(path.name) as progress:
                cost = render(path, options.out, dict(options.set), progress)
        except (CellExecutionError, DeadKernelError) as error:
            logger.error("%s failed; read %s\n%s", path, options.out / f"{path.stem}.html", error)
            return 1
        except (ValueError, OSError) as error:
            logger.error("%s: %s", path, error)
            return 2
        logger.info("%s: %s", options.out / f"{path.stem}.html", cost)
    return 0


@contextmanager
def _line(name: str) -> Iterator[Callable[[int, int], None]]:
    """One line on standard error: cells done and time passed; without a terminal, only at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TextColumn("cells"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, cells: bar.update(task, completed=done, total=cells)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m grpo_nb.dev.render", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "notebooks", nargs="*", type=Path, help="notebooks to execute (default: notebooks/[0-9]*.ipynb)"
    )
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the pages (default: build)")
    parser.add_argument(
        "--set", action="append", default=[], type=_assignment, metavar="NAME=VALUE", help="a name of the settings cell"
    )
    return parser


def _assignment(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    sys.exit(main())
