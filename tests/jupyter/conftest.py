"""A run, a stand-in for its trainer, and dashboards that end with their test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipywidgets
import pandas as pd
import pytest

import grpo_nb
import grpo_nb.training.grpo
import grpo_nb.training.sft
from grpo_nb import plots
from grpo_nb.report import report
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
    for thread in workers():
        thread.join(PATIENCE)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny_run(tmp_path, run__steps=6)


@pytest.fixture(autouse=True)
def no_dashboard_is_left() -> Iterator[None]:
    yield
    ipywidgets.Widget.close_all()


@pytest.fixture
def drawings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of metric rows in each picture of this test's runs that was drawn."""
    drawn: list[int] = []

    def picture(run: Run, rows: pd.DataFrame, page: str, events: pd.DataFrame) -> Any:
        if run.path.is_relative_to(tmp_path):  # a view that another test left may draw meanwhile
            drawn.append(len(rows))
        return plots.Picture(figsize=(1, 1))

    monkeypatch.setattr(report, "picture", picture)
    return drawn
