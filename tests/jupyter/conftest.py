"""A run, a stand-in for its trainer, and dashboards that end with their test."""

from collections.abc import Iterator
from pathlib import Path

import ipywidgets
import pytest

import grpo_nb
import grpo_nb.training.grpo
import grpo_nb.training.sft
from grpo_nb.jupyter.live import Curves
from grpo_nb.jupyter.tailing import News
from grpo_nb.run.run import Run
from tests.support.stage import FOREVER, PATIENCE, Stage, workers
from tests.support.tiny import tiny_run


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage()
    monkeypatch.setattr(grpo_nb.training.grpo, "grpo", stage.grpo)
    monkeypatch.setattr(grpo_nb.training.sft, "sft", stage.sft)
    yield stage
    stage.release(FOREVER)
    for worker in workers():
        worker.join(PATIENCE)
        assert not worker.is_alive(), f"{worker.name} has not ended, it waits for {worker.waits_for()}"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny_run(tmp_path, run__steps=6)


@pytest.fixture(autouse=True)
def no_dashboard_is_left() -> Iterator[None]:
    yield
    ipywidgets.Widget.close_all()


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The newest step of each message of rows that a view of this test's runs sent to its browser; 0 without rows."""
    steps: list[int] = []
    tell = Curves._tell

    def noted(curves: Curves, news: News) -> None:
        if curves.run_path.is_relative_to(tmp_path):  # a view that another test left may send meanwhile
            steps.append(max([0, *(int(row["step"]) for row in (*news.kept, *news.tail))]))
        tell(curves, news)

    monkeypatch.setattr(Curves, "_tell", noted)
    return steps
