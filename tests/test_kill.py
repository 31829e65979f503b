"""kill -9 at random moments, resume, and nothing is lost: rows and weights equal the uninterrupted run's."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb.run import Run
from tests.tiny import stable, tiny_config, weights

STEPS = 12


def config_flags() -> list[str]:
    config = tiny_config(run__steps=STEPS, run__checkpoint_every=3, sft__steps=6, sft__checkpoint_every=2)
    from grpo_nb import presets

    changes = config.differences(presets.demo())
    return ["--preset", "demo", *(part for k, (v, _) in changes.items() for part in ("--set", f"{k}={json.dumps(v)}"))]


def command(run: Path) -> list[str]:
    return [sys.executable, "-m", "grpo_nb", "train", str(run), *config_flags()]


def finish(run: Path) -> None:
    done = subprocess.run(command(run), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def outcome(path: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [stable(json.loads(line)) for line in lines], weights(Run.open(path))


def kill_after(run: Path, seconds: float) -> bool:
    """Whether the trainer was still there to be killed."""
    child = subprocess.Popen(command(run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        child.wait(timeout=seconds)
        return False
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return True


def check(folder: Path, moments: int) -> int:
    start = time.monotonic()
    finish(folder / "straight")
    duration = time.monotonic() - start
    rows, state = outcome(folder / "straight")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    draw, killed = random.Random(0), 0
    for moment in range(moments):
        run = folder / f"killed-{moment}"
        killed += kill_after(run, draw.uniform(0.3, 1.0) * duration)
        finish(run)
        resumed_rows, resumed_state = outcome(run)
        assert resumed_rows == rows
        assert resumed_state.keys() == state.keys()
        assert all(torch.equal(resumed_state[key], state[key]) for key in state)
    return killed


def test_two_kills_lose_nothing(tmp_path: Path) -> None:
    assert check(tmp_path, 2) >= 1


@pytest.mark.slow
def test_twenty_kills_lose_nothing(tmp_path: Path) -> None:
    assert check(tmp_path, 20) >= 12
