"""What every test of the command line begins with: a run of four steps, and verbs that train nothing."""

from pathlib import Path

import pytest

from grpo_nb.run.run import Run
from tests.support.cli_stage import mine, train_nothing


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return mine(tmp_path)


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    train_nothing(monkeypatch)
