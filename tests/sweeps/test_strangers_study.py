"""A study's folder may come from anybody, and two processes may make one at a time."""

import json
import subprocess
from pathlib import Path

import pytest

from grpo_nb.cli import main
from grpo_nb.config import ConfigError
from grpo_nb.judge import host_trust
from grpo_nb.judge.host_trust import Pair
from grpo_nb.run.run import Run, RunError
from grpo_nb.run.settings import plain
from grpo_nb.sweeps import Study, study, sweep
from grpo_nb.sweeps.plan import Arm, Plan
from tests.sweeps.test_sweeps import Pretended, tiny

SECRET = {"model": "m", "base_url": "https://judge.example.org/v1", "api_key_env": "SOME_SECRET"}
JUDGED = {"objectives.fairness.judge": {"providers": [SECRET]}}
SENT = Pair("SOME_SECRET", "https://judge.example.org:443")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_trust.FOLDER, str(tmp_path / "configuration"))
    monkeypatch.setattr(host_trust, "_here", set())
    monkeypatch.setattr(subprocess, "Popen", Pretended)


def strangers(folder: Path) -> Path:
    """A study that no code of this machine made."""
    folder.mkdir()
    plan = Plan(config=plain(tiny()), arms={"a": Arm(), "b": Arm(changes=JUDGED)}, seeds=(0,))
    (folder / study.FILE).write_text(json.dumps(plan.model_dump(mode="json")))
    return folder


@pytest.mark.parametrize("begun", [False, True])
def test_a_strangers_study_chooses_no_server_for_a_key(begun: bool, tmp_path: Path) -> None:
    folder = strangers(tmp_path / "theirs")
    if begun:  # a run without work takes other settings
        Run.create(folder / "b-0", tiny())
    with pytest.raises(ConfigError, match="SOME_SECRET"):
        Study.open(folder).train()
    assert SENT not in host_trust.confirmed()
    assert main(["sweep", str(folder)]) != 0 and SENT not in host_trust.confirmed()
    assert main(["sweep", str(folder), "--yes", "--show"]) == 0 and SENT in host_trust.confirmed()


def test_whoever_makes_a_study_confirms_its_servers(tmp_path: Path) -> None:
    sweep(tmp_path / "kl", tiny(), {"a": JUDGED}, [0])
    assert SENT in host_trust.confirmed()


def test_of_two_that_make_a_study_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Study.__init__

    def meanwhile(self: Study, *given: object) -> None:
        make(self, *given)  # type: ignore[arg-type]
        monkeypatch.setattr(Study, "__init__", make)
        if not (tmp_path / "kl").exists():
            sweep(tmp_path / "kl", tiny(), {"theirs": {}}, [0])

    monkeypatch.setattr(Study, "__init__", meanwhile)
    with pytest.raises(RunError, match="another study"):
        sweep(tmp_path / "kl", tiny(), {"own": {}}, [0])
    assert [*Study.open(tmp_path / "kl").plan.arms] == ["theirs"]
