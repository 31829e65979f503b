"""Every test here has an environment without trackers of its own, and a narrow model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_nb.judge import host_trust
from grpo_nb.trackers import mirror, ready
from tests.support.tracking import Store

VARIABLES = (
    *("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT", "NETRC", "MLFLOW_TRACKING_URI", "HF_TOKEN"),
    *("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"),
)


@pytest.fixture(scope="module", autouse=True)
def small_trainings(narrow_model: None) -> None:
    pass


@pytest.fixture(autouse=True)
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tracker is configured, no server is confirmed, and what a package writes is below `tmp_path`."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(host_trust.FOLDER, str(tmp_path / "configuration"))
    monkeypatch.setattr(host_trust, "_here", set())
    monkeypatch.setattr(mirror, "POLL_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """What stand-ins of all trackers were given."""
    store = Store()
    monkeypatch.setattr(ready, "_installed", lambda distribution: True)
    monkeypatch.setattr(mirror, "open_tracker", store.opened)
    yield store
    store.released.set()
