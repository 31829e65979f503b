"""kill -9 in training, resume, and nothing is lost or there twice: rows and weights equal the straight run's."""

import json
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb import presets
from grpo_nb.run.run import Run
from grpo_nb.tasks import demo
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import sft
from tests.support import forked
from tests.support.kill_points import survives
from tests.support.tiny import NARROW, REWARDS, small_tasks, stable, tiny_config, tiny_run, weights

STEPS, SFT_STEPS = 12, 6


def config_flags() -> list[str]:
    quick = {"run__quick_eval_every": 2, "run__quick_eval_examples": 4}
    sft = {"sft__steps": SFT_STEPS, "sft__checkpoint_every": 2}
    config = tiny_config(run__steps=STEPS, run__checkpoint_every=3, **sft, **quick)
    changes = config.differences(presets.demo())
    return ["--preset", "demo", *(part for k, (v, _) in changes.items() for part in ("--set", f"{k}={json.dumps(v)}"))]


def command(run: Path) -> list[str]:
    return forked.command("-m", "grpo_nb", "train", str(run), *config_flags())


def finish(run: Path) -> None:
    ended = subprocess.run(command(run), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def outcome(
    path: Path, *, logs: Sequence[str] = ("metrics", "evaluations")
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    lines = [line for log in logs for line in (path / f"{log}.jsonl").read_text().splitlines()]
    return [stable(json.loads(line)) for line in lines], weights(Run.open(path))


def done(run: Path) -> int:
    """Steps in the logs so far, SFT's and GRPO's."""
    logs = [run / "sft.jsonl", run / "metrics.jsonl"]
    return sum(log.read_bytes().count(b"\n") for log in logs if log.exists())


def kill_at(run: Path, steps: int, later: float) -> bool:
    """Kill the trainer `later` seconds after so many steps; whether it was still there to be killed."""
    child = subprocess.Popen(command(run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while done(run) < steps and child.poll() is None:
        time.sleep(0.002)
    time.sleep(later)
    child.kill()
    return child.wait() == -signal.SIGKILL


def check(folder: Path, moments: int) -> int:
    """Kill at random steps and random moments within them, finish each run, compare; how many kills struck."""
    finish(folder / "straight")
    rows, state = outcome(folder / "straight")
    quick = [step for step in range(0, STEPS + 1, 2) for _ in range(2)]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1), *quick]
    draw, killed = random.Random(0), 0
    for moment in range(moments):
        run = folder / f"killed-{moment}"
        killed += kill_at(run, draw.randint(0, SFT_STEPS + STEPS - 4), draw.uniform(0.0, 0.2))
        finish(run)
        resumed_rows, resumed_state = outcome(run)
        assert resumed_rows == rows
        assert resumed_state.keys() == state.keys()
        assert all(torch.equal(resumed_state[key], state[key]) for key in state)
    return killed


@pytest.mark.slow
def test_twenty_kills_lose_nothing(tmp_path: Path) -> None:
    """Of the command, at random moments: between two calls, and inside one."""
    assert check(tmp_path, 20) >= 12


# ---- before each call, in forks of a process that has torch loaded

BOTH_STAGES = {
    **{"sft__steps": 2, "sft__checkpoint_every": 1, "sft__data": None, "sft__batch": 4},
    **{"run__steps": 2, "run__checkpoint_every": 1, "run__quick_eval_every": 2, "run__quick_eval_examples": 2},
    **{"batch__group_size": 2, "sampling__max_completion_length": 8},
}


def prepare() -> None:
    torch.set_num_threads(1)
    demo.SIZES |= NARROW
    small_tasks()


def train_both(folder: Path) -> None:
    run = Run.open(folder / "run") if (folder / "run" / "config.json").exists() else fresh(folder, "run")
    if not run.checkpoints.steps():
        list(sft(run, tasks=small_tasks()))
    list(grpo(run, tasks=small_tasks(), rewards=REWARDS))


def fresh(folder: Path, name: str) -> Run:
    return tiny_run(folder, name, **BOTH_STAGES)


def check_bits(folder: Path) -> None:
    """Trained to its end, the run has the rows and weights of the one beside it that nothing happened to."""
    train_both(folder)
    logs = ("sft", "metrics", "samples", "evaluations")
    (rows, state), (expected_rows, expected_state) = (outcome(folder / name, logs=logs) for name in ("run", "straight"))
    assert rows == expected_rows
    assert state.keys() == expected_state.keys()
    assert all(torch.equal(state[key], expected_state[key]) for key in state)
    assert not [*(folder / "run").glob("checkpoints/.*"), *(folder / "run").glob("sft/.*")], "leftovers"


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 97])
def test_a_kill_before_any_call_of_both_stages_loses_nothing(tmp_path: Path, every: int) -> None:
    folder = tmp_path / "runs"
    straight = fresh(folder, "straight")
    list(sft(straight, tasks=small_tasks()))
    list(grpo(straight, tasks=small_tasks(), rewards=REWARDS))
    assert survives(train_both, check_bits, folder, every) >= 200 // every
