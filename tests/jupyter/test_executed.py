"""The notebooks executed in real kernels without a browser, and their pages."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from grpo_nb.dev import render
from grpo_nb.metrics import keys
from grpo_nb.report import report
from grpo_nb.run.run import Run
from tests.conftest import ROOT
from tests.support import made_rows
from tests.support.tiny import SMALL, small_world, stable, tiny_run
from tests.support.tokens import names

pytestmark = pytest.mark.usefixtures("this_checkout")

NOTEBOOKS = ROOT / "notebooks"
NAMES = ("01_load", "02_sft", "03_grpo", "04_diagnostics", "05_mathematics", "06_fault_lab", "07_result")
CHANGES = SMALL | {"run.steps": 6}
STEER = 2
STEPS = CHANGES["run.steps"] + STEER
"""That 03 trains: those of the settings, and those to steer."""


def execute(name: str, out: Path, **settings: Any) -> str:
    """Run one notebook; its page."""
    steered = {"STEER_STEPS": STEER} if name == "03_grpo" else {}
    render.render(NOTEBOOKS / f"{name}.ipynb", out, settings | steered)
    return (out / f"{name}.html").read_text(encoding="utf-8")


def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in NOTEBOOKS.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def executed(this_checkout: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, str]]:
    """A tiny run that the five notebooks made, one after the other, and their pages."""
    folder, before = tmp_path_factory.mktemp("executed"), files()
    small_world(folder / "tiny")
    pages = {}
    for name in NAMES:
        settings = {"CHANGES": CHANGES} if name == "01_load" else {}
        settings |= {} if name in ("05_mathematics", "07_result") else {"RUN": str(folder / "tiny")}
        pages[name] = execute(name, folder, **settings)
    assert files() == before, "nothing is written beside a notebook, and none is changed"
    return Run.open(folder / "tiny"), pages


@pytest.mark.ux(1, 28, 31, 39, at="nbclient")
def test_every_notebook_runs_and_its_page_needs_no_network(executed: tuple[Run, dict[str, str]]) -> None:
    run, pages = executed
    assert run.status().state == "done" and run.last_step() == STEPS
    for name, page in pages.items():
        assert not re.search(r"<(?:script|img|link)[^>]+(?:src|href)=[\"']?(?:https?:)?//", page), name
        assert "Traceback (most recent call last)" not in page
    assert "device" in pages["01_load"] and "cpu, float32" in pages["01_load"], "what is used in place of a GPU"
    assert names(pages["03_grpo"], "tiny", "done", 6)
    for name in ("03_grpo", "04_diagnostics"):
        assert "data:image/png;base64," in pages[name] and "<table" in pages[name]


def test_no_notebook_holds_a_model_at_its_end(executed: tuple[Run, dict[str, str]]) -> None:
    """The demo's has 4 MB of weights, and an optimizer has twice that."""
    _, pages = executed
    held = {
        name: re.search(r"holds ([\d.]+) GiB of memory \((\d+) MiB in tensors\)", page) for name, page in pages.items()
    }
    assert all(found and 0 < float(found[1]) < 8 and int(found[2]) <= 2 for found in held.values()), held


def test_the_glossary_explains_every_key_that_the_trainer_logs(executed: tuple[Run, dict[str, str]]) -> None:
    run, pages = executed
    rows = [*run.metric_rows(), *run.rows("sft")]
    assert all(keys.row_of(key) for row in rows for key in row)
    measured = {key for row in rows for key, value in row.items() if value is not None}
    frame = report.glossary(run).frame
    assert {row.name if (row := keys.row_of(key)) else key for key in measured} == {*frame["metric"]}
    assert len(frame) > 40 and (frame["healthy, or what a change means"] != "").all()
    assert all(name in pages["04_diagnostics"] for name in ("kl/{objective}", "grad/norm", "batch.group_size"))


@pytest.mark.slow
@pytest.mark.ux(27, 32, 33, at="nbclient")
def test_executed_again_it_is_reused_and_another_run_gives_the_same_numbers(
    executed: tuple[Run, dict[str, str]], tmp_path: Path
) -> None:
    run, _ = executed
    page = execute("03_grpo", tmp_path, RUN=str(run.path))
    assert names(page, "tiny", STEPS, "fresh=True")
    assert run.last_step() == STEPS
    again = tiny_run(tmp_path, "again", **{key.replace(".", "__"): value for key, value in CHANGES.items()})
    for name in ("02_sft", "03_grpo"):
        execute(name, tmp_path, RUN=str(again.path))
    assert [stable(row) for row in again.metric_rows()] == [stable(row) for row in run.metric_rows()]


@pytest.mark.ux(29, 38, at="nbclient")
def test_diagnostics_need_no_model_and_a_notebook_before_its_predecessor_says_which_it_needs(tmp_path: Path) -> None:
    """Both in one kernel, whose start takes longer than they do."""
    log, new = tiny_run(tmp_path, "log"), tiny_run(tmp_path, "new")
    for row in made_rows.ill(lambda row: {"truncation/fairness": 0.6}, 40):
        log.log_metrics(row)
    parts = [("04_diagnostics", log), ("03_grpo", new)]
    books = [nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4) for name, _ in parts]
    first, second = (
        render.with_parameters(b, {"RUN": str(run.path)} | ({"OTHER": str(log.path)} if run is log else {}))
        for b, (_, run) in zip(books, parts, strict=True)
    )
    first.cells += second.cells
    nbformat.write(first, tmp_path / "both.ipynb")
    with pytest.raises(CellExecutionError) as caught:
        render.render(tmp_path / "both.ipynb", tmp_path)
    assert names(str(caught.value), "new", "02_sft")
    assert "KeyError" not in str(caught.value)
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert not log.checkpoints.steps()
    assert "(2): last" in page, "beside another run"
    assert page.count("data:image/png;base64,") >= 3 and "max_completion_length" in page, "plots, and a finding"
