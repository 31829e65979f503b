"""A tracker that could not be written to is refused before any work; a stranger's run sends nothing unconfirmed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_nb import presets
from grpo_nb.config import Config, ConfigError
from grpo_nb.config.trackers import PACKAGES
from grpo_nb.judge import host_trust, trust
from grpo_nb.judge.host_trust import Pair
from grpo_nb.run.run import Run
from grpo_nb.trackers import check, mirroring, ready
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import sft
from tests.support.tokens import pattern
from tests.support.tracking import Store

SERVERS = {
    "wandb": ({"WANDB_API_KEY": "k" * 40}, Pair("WANDB_API_KEY", "https://api.wandb.ai:443")),
    "wandb own": (
        {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "https://wandb.example.org"},
        Pair("WANDB_API_KEY", "https://wandb.example.org:443"),
    ),
    "mlflow": ({"MLFLOW_TRACKING_URI": "http://mlflow.example.org:5000"}, Pair("", "http://mlflow.example.org:5000")),
    "mlflow token": (
        {"MLFLOW_TRACKING_URI": "https://mlflow.example.org", "MLFLOW_TRACKING_TOKEN": "t"},
        Pair("MLFLOW_TRACKING_TOKEN", "https://mlflow.example.org:443"),
    ),
    "trackio space": ({"TRACKIO_SPACE_ID": "somebody/space"}, Pair("HF_TOKEN", "https://huggingface.co:443")),
    "trackio server": (
        {"TRACKIO_SERVER_URL": "https://trackio.example.org"},
        Pair("TRACKIO_WRITE_TOKEN", "https://trackio.example.org:443"),
    ),
}
LOCAL: dict[str, dict[str, str]] = {
    "tensorboard": {},
    "wandb": {"WANDB_MODE": "offline"},
    "trackio": {},
    "mlflow": {},
    "mlflow here": {"MLFLOW_TRACKING_URI": "http://localhost:5000", "MLFLOW_TRACKING_TOKEN": "t"},
    "mlflow file": {"MLFLOW_TRACKING_URI": "file:///tmp/mlruns"},
}


def config(*names: str) -> Config:
    return presets.demo().replace(**{"run.trackers": list(names)})


def copied(folder: Path, settings: Config) -> Run:
    """A run that came from elsewhere, with a row that waits to be mirrored."""
    made = Run.create(folder / "theirs", presets.demo())
    shutil.copytree(made.path, folder / "copied")
    (folder / "copied" / "config.json").write_text(json.dumps(settings.model_dump(mode="json")))
    run = Run.open(folder / "copied")
    run.log_metrics({"step": 1, "loss": 0.5})
    return run


def environment(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("stage", [sft, grpo])
@pytest.mark.parametrize("name", [*PACKAGES])
def test_a_missing_package_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stage: Callable[..., Any]
) -> None:
    monkeypatch.setattr(ready, "_installed", lambda distribution: False)
    run = Run.create(tmp_path / "run", config(name))
    before = {path.name for path in run.path.iterdir()}
    with pytest.raises(ConfigError, match=pattern(f"'{name}'", f'pip install "grpo_nb[{name}]"', "run.trackers")):
        list(stage(run))
    assert {path.name for path in run.path.iterdir()} <= before | {"lock"}


@pytest.mark.parametrize("case", [*SERVERS])
def test_a_strangers_run_sends_nothing_until_it_is_confirmed(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    (variables, pair), name = SERVERS[case], case.partition(" ")[0]
    environment(monkeypatch, variables)
    run = copied(tmp_path, config(name))
    for stage in (sft, grpo):
        with pytest.raises(ConfigError, match=pattern(pair.variable, pair.origin, "--yes", "trust(", "run.trackers")):
            list(stage(run))
    with mirroring(run):  # as an evaluation does, which goes on without
        pass
    assert not store.abouts and not store.points
    trust(pair.variable or None, pair.origin)
    with mirroring(run):
        pass
    assert store.steps(name) == [1]


@pytest.mark.parametrize("case", [*SERVERS])
def test_creating_a_run_here_confirms_its_trackers(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    (variables, pair), name = SERVERS[case], case.partition(" ")[0]
    environment(monkeypatch, variables)
    Run.create(tmp_path / "mine", config(name))
    assert host_trust.confirmed() == {pair}
    check(copied(tmp_path, config(name)).config)


@pytest.mark.parametrize("case", [*LOCAL])
def test_what_stays_on_this_machine_needs_no_word(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    environment(monkeypatch, LOCAL[case])
    check(copied(tmp_path, config(case.partition(" ")[0])).config)


@pytest.mark.parametrize(
    ("name", "variables", "said"),
    [
        ("wandb", {}, "WANDB_API_KEY"),
        ("wandb", {"WANDB_MODE": "onlin"}, "WANDB_MODE"),
        ("wandb", {"WANDB_BASE_URL": "http://wandb.example.org", "WANDB_API_KEY": "k" * 40}, "https://"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "postgresql://user:hunter2@db/x"}, "postgresql"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "databricks"}, "databricks"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://m.example.org", "MLFLOW_TRACKING_PASSWORD": "p"}, "https://"),
    ],
)
def test_an_environment_that_cannot_work_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str, variables: dict[str, str], said: str
) -> None:
    environment(monkeypatch, variables)
    host_trust.confirm(host_trust.pairs_of(config(name)))
    with pytest.raises(ConfigError, match=pattern(said)) as refused:
        check(config(name))
    assert "hunter2" not in str(refused.value)


def test_a_key_that_wandb_finds_itself_is_enough(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {'k' * 40}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    host_trust.confirm(host_trust.pairs_of(config("wandb")))
    check(config("wandb"))


def test_names_are_read_from_one_text_and_each_is_kept_once() -> None:
    assert config("mlflow", "tensorboard", "mlflow").run.trackers == ("mlflow", "tensorboard")
    assert presets.demo().replace(**{"run.trackers": "wandb, mlflow"}).run.trackers == ("wandb", "mlflow")
    for wrong in ("wandb,mlfow", 3, [3], {"wandb": 1}):
        with pytest.raises(ConfigError, match=pattern("run.trackers")):
            presets.demo().replace(**{"run.trackers": wrong})
