"""A step replayed from its checkpoint is the step of the log."""

from pathlib import Path

import pytest
import torch

from grpo_nb import losses
from grpo_nb.run.run import Run, RunError
from grpo_nb.training.grpo import grpo
from grpo_nb.training.replay import Replay, replay
from tests.support.tiny import REWARDS, tiny_run


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Replay]:
    run = tiny_run(tmp_path_factory.mktemp("replay"), run__samples_per_step=8)
    for _ in grpo(run, rewards=REWARDS, steps=3):
        pass
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    found = replay(run, rewards=REWARDS)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    return run, found


def test_it_has_the_completions_rewards_and_log_probs_of_the_log(replayed: tuple[Run, Replay]) -> None:
    run, step = replayed
    assert step.plan.step == 3, "after checkpoint 2"
    logged = [row for row in run.rows("samples") if row["step"] == 3]
    rows = [i for name in run.config.objectives for i in step.batch.rollouts.rows_of(name)[:4]]
    assert [step.batch.rollouts.texts[i] for i in rows] == [row["completion"] for row in logged]
    assert [step.batch.scores[i].value for i in rows] == [row["reward"] for row in logged]
    for i, row in zip(rows, logged, strict=True):
        assert step.batch.advantage_of(i) == row["advantage"]
        assert step.batch.logprobs_old[i, : row["tokens"]].tolist() == pytest.approx(row["logprobs_old"], abs=1e-4)
    (metrics,) = [row for row in run.metric_rows() if row["step"] == 3]
    for name in run.config.objectives:
        assert step.batch.kl[name] == pytest.approx(metrics[f"kl/{name}"], rel=1e-3)
        assert step.plan.betas[name] == metrics[f"beta/{name}"]


def test_the_loss_by_hand_is_the_library_s(replayed: tuple[Run, Replay]) -> None:
    run, step = replayed
    name = next(iter(run.config.objectives))
    rows, beta = step.group(name), 0.5
    assert step.batch.learns()[rows].any()
    inputs = step.inputs(rows)
    assert inputs.logp_ref is not None
    ratio, d = (inputs.logp - inputs.logp_old).exp(), inputs.logp_ref - inputs.logp
    gain = torch.min(ratio * inputs.advantage, ratio.clamp(0.8, 1.2) * inputs.advantage)
    per_token = (-gain + beta * (d.exp() - d - 1)) * inputs.mask
    by_hand = (per_token.sum(1) / inputs.mask.sum(1)).mean()
    terms = losses.loss_terms(inputs, step.plan.loss, beta, step.normalizer(rows))
    torch.testing.assert_close(by_hand, terms["policy"] + terms["kl"])


def test_a_run_without_a_step_has_nothing_to_replay(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="checkpoint"):
        replay(tiny_run(tmp_path))
