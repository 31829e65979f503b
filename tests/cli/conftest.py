"""What every test of the command line begins with: a run of four steps, and verbs that train nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_nb.run.run import Run
from tests.support.cli_stage import mine, train_nothing
from tests.support.tiny import small_worlds


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return mine(tmp_path)


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    train_nothing(monkeypatch)
    with small_worlds():
        yield
