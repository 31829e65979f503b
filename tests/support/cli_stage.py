"""The command line as tests call it, and stand-ins that train nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grpo_nb.cli import main, verbs
from grpo_nb.run.run import Run
from grpo_nb.types import StepStats
from tests.support.tiny import tiny_run

STEPS = 4


def mine(folder: Path) -> Run:
    """A run of four steps without SFT."""
    return tiny_run(folder / "runs", "mine", run__steps=STEPS, sft__steps=0)


def stats(step: int) -> StepStats:
    return StepStats(
        step, {"step": step, "loss": 0.5, "reward/fairness/mean": 0.25, "kl/fairness": 0.01, "status": "ok"}
    )


def save(run: Run, step: int, sft: bool = False) -> None:
    folder = run.sft_checkpoints if sft else run.checkpoints
    folder.save(step, {"policy": {"w": torch.zeros(1)}}, {"step": step})


def fake_grpo(run: Run, *, steps: int) -> Iterator[StepStats]:
    """Trains nothing; resumes, yields and saves as the real one does."""
    newest, _ = run.checkpoints.latest()
    step = newest.step if newest else 0
    try:
        while step < steps:
            step += 1
            yield stats(step)
    finally:
        save(run, step)


def fake_sft(run: Run) -> Iterator[StepStats]:
    try:
        for step in range(1, run.config.sft.steps + 1):
            yield stats(step)
    finally:
        save(run, step, sft=True)


def train_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "grpo", fake_grpo)
    monkeypatch.setattr(verbs, "sft", fake_sft)


def says(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    capsys.readouterr()
    status = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return status, out, err
