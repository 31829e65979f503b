"""Check-boxes choose which runs share the plots; each keeps its colour."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ipywidgets
import pytest

from grpo_nb.jupyter.compare_view import CHECKED, RunsView
from grpo_nb.plots import canvas
from grpo_nb.run.run import Run
from tests.report.test_run_comparison import made
from tests.support.tokens import names

EVIL = "<img src=x onerror=alert(1)> $x$"


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    return [made(tmp_path / "runs", name, 5 + n, run__seed=n) for n, name in enumerate(("a", "b", "c", EVIL))]


@pytest.fixture(autouse=True)
def quickly_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The curves as one line of words; what they look like is tested with the picture."""

    def drawn(runs: Mapping[str, Any], objectives: Sequence[str], looks: Mapping[str, Any]) -> canvas.Picture:
        figure = canvas.new(4, 1)
        figure.text(0, 0.5, "; ".join(f"{name} {len(rows)} {looks[name][0]}" for name, rows in runs.items()))
        return figure

    monkeypatch.setattr("grpo_nb.report.several_runs.overlay", drawn)


def box(view: RunsView, run: Run) -> ipywidgets.Checkbox:
    return view.boxes[run.path.resolve()]


def test_what_is_checked_is_drawn(runs: list[Run], tmp_path: Path) -> None:
    view = RunsView(tmp_path / "runs")
    assert len(view.boxes) == 4 and len(view.checked) == CHECKED
    for run in runs:
        box(view, run).value = run.name in "ab"
    assert view.checked == [view_path for view_path in view.paths if view_path.name in ("a", "b")]
    before = bytes(view.picture.value)
    assert (
        before.startswith(b"\x89PNG")
        and names(view.tables.value, "run.seed", "a", "b")
        and ">c<" not in view.tables.value
    )
    box(view, runs[2]).value = True
    assert bytes(view.picture.value) != before and ">c<" in view.tables.value
    for run in runs:
        box(view, run).value = False
    assert view.picture.layout.display == "none" and view.tables.value == "" and view.message.value


def test_a_run_keeps_its_colour(runs: list[Run], tmp_path: Path) -> None:
    view = RunsView(tmp_path / "runs")
    for run in runs:
        box(view, run).value = run.name == "c"
    colour = view._looks[str(runs[2].path.resolve())][0]
    assert colour in box(view, runs[2]).layout.border_left
    assert len({view._looks[str(path)] for path in view.paths}) == 4


def test_new_steps_are_read_again(runs: list[Run], tmp_path: Path) -> None:
    view = RunsView(tmp_path / "runs")
    for run in runs:
        box(view, run).value = run.name == "a"
    before = bytes(view.picture.value)
    runs[0].log_metrics({"step": 6, "reward/fairness/mean": 5.0})
    view.again.click()
    assert bytes(view.picture.value) != before


def test_runs_from_elsewhere_and_unreadable_ones(runs: list[Run], tmp_path: Path) -> None:
    (runs[0].path / "config.json").write_text("{")
    other = made(tmp_path / "far", "other", 3)
    view = RunsView(tmp_path / "runs", also=[other])
    assert other.path.resolve() in view.checked and runs[0].path.resolve() not in view.boxes
    assert view.left_out == 1 and names(view.message.value, 1)
    assert RunsView(tmp_path / "none").checked == []


def test_a_name_is_text(runs: list[Run], tmp_path: Path) -> None:
    view = RunsView(tmp_path / "runs")
    shown = box(view, runs[3])
    shown.value = True
    assert "$" not in shown.description and not shown.description_allow_html
    assert "<img" not in view.tables.value and "<img" not in view.message.value
