"""From a notebook and from a terminal: torchrun is started, followed, stopped by rank 0, and its failure is told."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_nb import cli
from grpo_nb.config import ConfigError
from grpo_nb.jupyter.start import start
from grpo_nb.jupyter.workers import Job, TorchrunWorker, WorkerFailed
from grpo_nb.run.run import Run, RunError
from tests.conftest import ROOT
from tests.support.tiny import REWARDS, tiny_run
from tests.support.tokens import names, pattern

PATIENCE = 240.0


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = tiny_run(tmp_path, sft__steps=2, run__steps=40)
    yield run
    if (owner := run.status().owner) is not None and run.status().state.is_live:
        os.kill(owner.pid, signal.SIGKILL)


def event(run: Run, kind: str) -> dict[str, Any]:
    return list(run.stored("events").having("kind", {kind}))[-1]


def test_a_job_on_several_gpus_is_a_line_of_torchrun(run: Run) -> None:
    command = Job(run, where="torchrun", gpus=3, steps=7).command()
    assert command[1:3] == ["-m", "torch.distributed.run"] and command[command.index("--nproc-per-node") + 1] == "3"
    assert command[command.index("grpo_nb") + 1 :] == ["train", str(run.path), "--no-sft", "--steps", "7"]
    with pytest.raises(RunError, match=pattern("rewards", "process")):
        Job(run, where="torchrun", rewards=REWARDS)


@pytest.mark.parametrize("given", [{"where": "torchrun"}, {"where": "thread", "gpus": 2}, {"gpus": 0}, {"gpus": 10**6}])
def test_gpus_and_torchrun_go_together(run: Run, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="gpus"):
        start(run, **given)


def test_several_machines_get_a_line_and_start_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(run.path), "--gpus", "8", "--nodes", "2", "--steps", "7"]) == 0
    line = capsys.readouterr().out
    assert names(line, "srun", "--nnodes=2", "--nproc-per-node=8", "-m grpo_nb train", str(run.path), "--steps 7")
    assert run.status().state == "new"
    assert cli.main(["train", str(run.path), "--nodes", "2"]) == 2


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started import the package from here."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.slow
def test_the_command_trains_on_two_ranks_and_goes_on_alone(run: Run, source: None) -> None:
    command = [sys.executable, "-m", "grpo_nb", "train", str(run.path)]
    subprocess.run([*command, "--gpus", "2", "--steps", "3"], check=True, timeout=PATIENCE)
    assert run.last_step() == 3 and run.last_step("sft") == 2 and event(run, "start")["ranks"] == 2
    subprocess.run([*command, "--steps", "4"], check=True, timeout=PATIENCE)
    assert run.last_step() == 4 and "ranks" not in event(run, "resume")


@pytest.mark.slow
def test_an_interrupt_of_the_command_saves(run: Run, source: None) -> None:
    command = [sys.executable, "-m", "grpo_nb", "train", str(run.path), "--gpus", "2"]
    process = subprocess.Popen(command, start_new_session=True)
    until(lambda: (run.last_step() or 0) >= 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert run.checkpoints.steps()[-1] == run.last_step() and run.status().state == "stopped"


@pytest.mark.slow
def test_a_session_steers_two_ranks(run: Run, source: None) -> None:
    session = start(run, gpus=2)
    assert session.where == "torchrun" and session.live
    session.wait_blocking(step=2)
    session.pause()
    until(lambda: session.state == "paused")
    session.knobs["temperature"].set(0.9)
    session.resume()
    session.wait_blocking(step=session.step + 2)
    session.stop()
    session.wait_blocking()
    assert session.error is None and session.state == "stopped"
    assert run.checkpoints.steps()[-1] == session.step
    assert run.rows("metrics")[-1]["temperature"] == 0.9


@pytest.mark.slow
def test_a_session_tells_which_rank_was_killed(run: Run, source: None) -> None:
    session = start(run, gpus=2)
    session.wait_blocking(step=2)
    worker, owner = session._worker, run.status().owner
    assert isinstance(worker, TorchrunWorker) and owner is not None
    (other,) = [child for child in psutil.Process(worker.process.pid).children() if child.pid != owner.pid]
    other.kill()
    with pytest.raises(WorkerFailed, match=pattern("rank 1")):
        session.wait_blocking()
    assert event(run, "rank_failed")["rank"] == 1
    assert run.checkpoints.steps()[-1] == run.last_step()
