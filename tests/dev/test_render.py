"""Notebooks as pages."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from grpo_nb.dev import render
from tests.support.tokens import pattern


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


def test_formulas_need_no_script() -> None:
    lesson = Path(__file__).parents[2] / "notebooks" / "05_mathematics.ipynb"
    notebook = nbformat.read(lesson, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []  # their tables are marked for MathJax to leave alone
    written = sum(cell.source.count("$$") for cell in notebook.cells if cell.cell_type == "markdown") // 2
    page = render.page(notebook, "title")
    assert written and len(re.findall(r'<math [^>]*display="block"', page)) == written
    assert re.search(r'<math [^>]*display="inline"', page)
    assert "$$" not in page and "mathjax" not in page.lower() and "\\frac" not in page


@pytest.mark.parametrize("tex", ["a_b_c", "", r"\left( <b>", r"\text{</math><script>x</script>} < 1"])
def test_a_formula_that_is_wrong_breaks_no_page(tex: str) -> None:
    cell = nbformat.v4.new_markdown_cell(f"$${tex}$$ and `$x$`, $5")
    page = render.page(nbformat.v4.new_notebook(cells=[cell]), "title")
    assert "<script>x" not in page and "<b>" not in page
    assert "<code>$x$</code>, $5" in page


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
