"""A run folder with any numbers opens everywhere: report, dashboard, findings, terminal."""

import logging
import random
import re
from pathlib import Path

import pytest

from grpo_nb import cli
from grpo_nb.doctor import diagnose
from grpo_nb.jupyter.live import Curves
from grpo_nb.jupyter.start import attach
from grpo_nb.report import report
from grpo_nb.run.run import Run
from tests.run.test_samples import sample
from tests.support.hostile import FINITE, NOT_FINITE, all_keys
from tests.support.made_rows import Row, healthy
from tests.support.run_folder import CONFIG
from tests.support.strangers_run import write


def hostile_rows(seed: int) -> list[Row]:
    draw, names, values = random.Random(seed), all_keys(), (*FINITE, *NOT_FINITE)
    return [row | {name: draw.choice(values) for name in names} for row in healthy(14)]


def evaluations(value: float) -> list[Row]:
    metrics = {"accuracy": {"value": value, "low": value, "high": -value, "n": 8}}
    rest = {"split": "test", "pool": "p", "n": 8, "clusters": 8, "metrics": metrics, "resamples": {"accuracy": [value]}}
    stages = [("base", 0, "greedy"), ("sft", 0, "greedy"), ("latest", 6, "greedy"), ("step 6", 6, "quick")]
    return [
        {"stage": stage, "step": step, "mode": mode, "objective": name} | rest
        for stage, step, mode in stages
        for name in CONFIG.objectives
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = Run.create(tmp_path_factory.mktemp("hostile") / "run", CONFIG)
    write(made.path / "metrics.jsonl", hostile_rows(0))
    write(made.path / "evaluations.jsonl", [row for value in (1e308, -1.7e308, 5e-324) for row in evaluations(value)])
    write(made.path / "samples.jsonl", [sample(7, value, objective="fairness") for value in (1e308, -1e308, 5e-324)])
    now = 1e9
    write(made.path / "events.jsonl", [{"time": now, "kind": "sft_eval", "step": 0, "loss": 1e308, "n": 3}])
    return Run.open(made.path)


def test_no_part_of_the_page_is_left_out(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        page = report.page(run)
    assert not [record.getMessage() for record in caplog.records if record.exc_info]
    assert not re.search(r"\b[A-Z]\w+Error\b", page)


def test_the_dashboard_opens_on_every_page(run: Run) -> None:
    board = attach(run).dashboard()
    try:
        for page in board.pages.options:
            board.pages.value = page
            board.refresh()
        assert board.message.value == ""
    finally:
        board.close()


def test_curves_that_fail_keep_no_dashboard_from_opening(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise ValueError("no-picture-4711")

    monkeypatch.setattr(Curves, "update", failing)
    board = attach(run).dashboard()
    try:
        assert "no-picture-4711" in board.message.value
    finally:
        board.close()


@pytest.mark.parametrize("seed", range(3))
def test_the_run_is_diagnosed(run: Run, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    write(run.path / "metrics.jsonl", hostile_rows(seed))
    assert {finding.rule for finding in diagnose(run)}
    assert cli.main(["diagnose", str(run.path)]) == 1
    assert cli.main(["runs", str(Path(run.path).parent)]) == 0
    assert "non_finite" in capsys.readouterr().out
