"""A resume from a checkpoint that lost the optimizer's moments: refused, or begun anew by choice, logged, explained."""

import logging
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.cli import main
from grpo_nb.doctor import diagnose
from grpo_nb.evaluation.evaluate import evaluate
from grpo_nb.preflight.dependencies import DependencyChanged
from grpo_nb.run.dependencies_file import CHANGE
from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import sft
from tests.support.tiny import REWARDS, small_tasks, tiny_run, weights
from tests.support.tokens import names, pattern


def train(run: Run, steps: int, **options: object) -> list[int]:
    return [step.step for step in grpo(run, tasks=small_tasks(), rewards=REWARDS, steps=steps, **options)]  # type: ignore[arg-type]


def thin(run: Run, folder: str = "checkpoints") -> None:
    """Remove what a resume alone needs, as somebody does who is short of disk."""
    for file in run.path.glob(f"{folder}/*/optimizer.safetensors"):
        file.unlink()


def test_missing_moments_are_refused_then_begun_anew_by_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight, run = tiny_run(tmp_path, "straight", run__steps=3), tiny_run(tmp_path, run__steps=3)
    assert train(straight, 3) == [1, 2, 3] and train(run, 2) == [1, 2]
    thin(run)
    named = ("000002", "optimizer.safetensors", 'accept_changed={"optimizer"}', "--accept-changed optimizer")
    with pytest.raises(DependencyChanged, match=pattern(*named)) as refused:
        train(run, 3)
    assert refused.value.kinds == ("optimizer",) and run.last_step() == 2
    with caplog.at_level(logging.WARNING):
        assert train(run, 3, accept_changed={"optimizer"}) == [3]
    (event,) = run.stored("events").having("kind", {CHANGE})
    assert (event["step"], event["dependency"]) == (2, "optimizer") and event["message"] in caplog.text
    a, b = weights(straight), weights(run)
    assert any((a[name] != b[name]).any() for name in a), "Adam began anew"
    (finding,) = [finding for finding in diagnose(run) if finding.rule == "moments_restarted"]
    assert (finding.severity, finding.step) == ("info", 2) and names(finding.message, "optimizer.safetensors")
    assert train(run, 4) == [4], "its own checkpoints have moments again"


def test_an_older_checkpoint_with_moments_is_taken_before_one_without(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=3, run__checkpoint_every=1)
    train(run, 2)
    (run.path / "checkpoints/000002/optimizer.safetensors").unlink()
    assert train(run, 2) == [2]
    (run.path / "checkpoints/000002/optimizer.safetensors").unlink()
    assert train(run, 3, accept_changed={"optimizer"}) == [3]


def test_moments_that_came_anew_are_no_inexact_resume(tmp_path: Path) -> None:
    """Step 3 is done twice with other results, and the doctor says why instead of looking for randomness."""
    run = tiny_run(tmp_path, run__steps=4, run__checkpoint_every=2)
    train(run, 4)
    (run.path / "checkpoints/000004/manifest.json").unlink()
    thin(run)
    assert train(run, 4, accept_changed={"optimizer"}) == [3, 4]
    found = {finding.rule for finding in diagnose(run)}
    assert "moments_restarted" in found and "resume_inexact" not in found


def test_sft_has_the_same_choice_and_grpo_needs_none_of_its_result(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=1, sft__steps=2, sft__checkpoint_every=1)
    for step in sft(run, tasks=small_tasks()):
        if step.step == 1:
            break
    thin(run, "sft")
    with pytest.raises(DependencyChanged, match="optimizer"):
        next(iter(sft(run, tasks=small_tasks())))
    assert [step.step for step in sft(run, tasks=small_tasks(), accept_changed={"optimizer"})] == [2]
    thin(run, "sft")
    assert train(run, 1) == [1]


def test_an_evaluation_needs_no_moments(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=1, sft__steps=1, run__eval_examples=2)
    list(sft(run, tasks=small_tasks()))
    train(run, 1)
    thin(run, "sft")
    thin(run)
    stages: tuple[Any, ...] = ("sft", "latest", 0, 1)
    assert [evaluate(run, stage=stage, tasks=small_tasks()).step[0] for stage in stages] == [0, 1, 0, 1]


def test_the_command_line_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run(tmp_path, run__steps=1)
    assert main(["train", str(run.path), "--accept-changed", "moments"]) == 2
    assert names(capsys.readouterr().err, "moments", "optimizer")
