"""The notebooks as files: pairs in step, outputs that need no kernel, stable ids, short cells, one settings cell."""

import ast
import importlib
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jupytext
import nbformat
import pandas as pd
import pytest
from jupytext.cli import jupytext as jupytext_cli

from grpo_nb.dev import committed
from tests.conftest import ROOT
from tests.support.tiny import tiny_run

FOLDER = ROOT / "notebooks"
NAMES = ["01_load", "02_sft", "03_grpo", "04_diagnostics", "05_mathematics", "06_fault_lab", "07_result"]
MAX_CODE_LINES = 12
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}

each = pytest.mark.parametrize("name", NAMES)


def notebook(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


def code_cells(name: str) -> list[Any]:
    return [cell for cell in notebook(name).cells if cell.cell_type == "code"]


def parsed(source: str) -> ast.Module:
    """The syntax tree of a cell, where `await` may stand alone."""
    tree = compile(source, "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    return tree


def test_every_notebook_is_a_pair_and_listed_here() -> None:
    found = {kind: sorted(path.stem for path in FOLDER.glob(f"*.{kind}")) for kind in ("py", "ipynb")}
    assert found == {"py": NAMES, "ipynb": NAMES}


@each
def test_pair_is_in_step(name: str) -> None:
    script = jupytext.read(FOLDER / f"{name}.py")
    shown = [(c.cell_type, c.source, c.metadata.get("tags", [])) for c in notebook(name).cells]
    assert shown == [(c.cell_type, c.source, c.metadata.get("tags", [])) for c in script.cells], (
        f"edit {name}.py and run: jupytext --sync notebooks/{name}.ipynb"
    )


@each
@pytest.mark.ux(30, 39, at="unit")
def test_file_is_clean(name: str) -> None:
    book = notebook(name)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) >= (4, 5)
    assert book.metadata.kernelspec == KERNEL
    assert set(book.metadata) <= {"kernelspec", "jupytext"}, "personal or version metadata"
    assert all(set(cell.metadata) <= {"tags"} for cell in book.cells)


@each
def test_outputs_are_those_of_make_notebooks(name: str) -> None:
    """All cells ran, in order and without an error, and what they show needs no kernel and names no machine."""
    path = FOLDER / f"{name}.ipynb"
    cells = code_cells(name)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)], "run: make notebooks"
    outputs = [output for cell in cells for output in cell.outputs]
    assert len(outputs) > 3 and not [output for output in outputs if output.output_type == "error"]
    assert {kind for output in outputs for kind in output.get("data", {})} <= set(committed.SHOWN)
    assert path.stat().st_size <= committed.LARGEST
    assert not re.search(r"(?<![\w.])/(tmp|root|home|work|Users)/", path.read_text(encoding="utf-8"))


@each
@pytest.mark.ux(30, at="unit")
def test_every_cell_has_an_id_of_its_own(name: str) -> None:
    ids = [cell.get("id", "") for cell in notebook(name).cells]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", cell_id) for cell_id in ids)


@each
@pytest.mark.ux(39, at="unit")
def test_pairing_keeps_the_ids(name: str, tmp_path: Path) -> None:
    """The documented command on an edited script leaves every id as it was, so that diffs show the edit only."""
    for kind in ("py", "ipynb"):
        shutil.copy(FOLDER / f"{name}.{kind}", tmp_path)
    script = tmp_path / f"{name}.py"
    script.write_text(script.read_text().replace("# %% [markdown]\n# ## ", "# %% [markdown]\n# ## On ", 1))
    os.utime(script, (time.time() + 10,) * 2)
    assert jupytext_cli(["--sync", str(tmp_path / f"{name}.ipynb"), "--quiet"]) == 0
    after = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4).cells
    assert [cell.id for cell in after] == [cell.id for cell in notebook(name).cells]
    assert any("## On " in cell.source for cell in after)


@each
def test_cells_are_short(name: str) -> None:
    for cell in code_cells(name):
        assert 0 < len(cell.source.splitlines()) <= MAX_CODE_LINES, cell.source


@each
def test_code_parses_and_defines_nothing(name: str) -> None:
    for cell in code_cells(name):
        defined = [n for n in ast.walk(parsed(cell.source)) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        assert not defined, f"what a notebook defines belongs into the package: {cell.source}"


def taken(module: str, name: str) -> Any:
    """What `from module import name` gives: an attribute of the module, or the module below it."""
    home = importlib.import_module(module)
    return getattr(home, name) if hasattr(home, name) else importlib.import_module(f"{module}.{name}")


@each
def test_names_taken_from_the_package_exist(name: str) -> None:
    """`report.samples` in a cell is a function of grpo_nb.report.report: a renamed one is noticed without a run."""
    trees = [parsed(cell.source) for cell in code_cells(name)]
    modules: dict[str, Any] = {"g": importlib.import_module("grpo_nb")}
    for node in (n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)):
        modules |= {alias.asname or alias.name: taken(str(node.module), alias.name) for alias in node.names}
    used = {
        (n.value.id, n.attr)
        for tree in trees
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in modules
    }
    assert used
    assert [f"{module}.{attribute}" for module, attribute in used if not hasattr(modules[module], attribute)] == []


@each
def test_one_settings_cell(name: str) -> None:
    tagged = [cell for cell in code_cells(name) if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert all(isinstance(node, ast.Assign) for node in parsed(tagged[0].source).body)
    run = "RUN = None" if name in ("02_sft", "03_grpo", "04_diagnostics") else 'RUN = "demo"'
    assert name in ("05_mathematics", "07_result") or run in tagged[0].source  # which looks at no run


@each
@pytest.mark.ux(35, at="unit")
def test_opens_with_goal_and_cost_and_closes_with_the_next(name: str) -> None:
    cells = notebook(name).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith(f"# {int(name[:2])}. ")
    rows = re.findall(r"^\| (hardware|time|memory|needs) \| (.+) \|$", cells[0].source, re.MULTILINE)
    assert [row for row, _ in rows] == ["hardware", "time", "memory", "needs"]
    assert re.fullmatch(r"\d+ s \(`make run`, .*\)", dict(rows)["time"]), "measured, and how"
    assert re.fullmatch(r"\d\.\d\d? GiB .*\(`make run`\)", dict(rows)["memory"])
    assert "**The goal" in cells[0].source
    assert cells[-1].cell_type == "markdown" and ".ipynb)" in cells[-1].source
    assert cells[-2].source.endswith("print(kernel.memory_held())")


def test_links_lead_somewhere() -> None:
    for name in NAMES:
        text = "\n".join(cell.source for cell in notebook(name).cells)
        assert all((FOLDER / link).is_file() for link in re.findall(r"\]\(([\w./]+\.ipynb)\)", text))


@pytest.mark.parametrize("last", [0.03, 0.0, 5.0, 7.0, float("nan")])
def test_the_knob_that_notebook_03_turns_is_seen_to_move(tmp_path: Path, last: float) -> None:
    """Twice 0 would be 0 again, and twice 7 beyond what the knob takes."""
    (cell,) = [cell.source for cell in code_cells("03_grpo") if ".set(" in cell.source]
    run = tiny_run(tmp_path)
    rows = pd.DataFrame({f"beta/{name}": [0.04, last] for name in run.config.objectives})
    shown = SimpleNamespace(metrics=lambda: rows, knobs=run.knobs)
    exec(cell.partition("training =")[0], {"run": shown, "config": run.config})
    knob = run.knobs[f"beta/{next(iter(run.config.objectives))}"]
    assert knob.mode == "manual" and knob.value > 0 and knob.value != last
