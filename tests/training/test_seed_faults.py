"""Faults of real runs that must never come back to the mathematics: each test fails when its fault is put in again.

Others stand where they belong: a NaN norm that passes `if norm > 10` in test_gradients.py, a clip fraction reversed in
test_surrogates.py, an entropy bonus of the wrong sign in test_losses.py, clamp(ref - new) as a KL in test_kl.py.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_nb import losses
from grpo_nb.algorithms import ALGORITHMS
from grpo_nb.policy.model import Policy
from grpo_nb.training.gradients import loss_inputs
from grpo_nb.training.grpo import grpo
from tests.support import tiny_models
from tests.support.made_experience import LENGTHS, OBJECTIVES, gradients_of, made_experience, made_plan
from tests.support.tiny import REWARDS, small_tasks, tiny_run


@pytest.fixture
def policy() -> Policy:
    return tiny_models.policy()


def vector(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in gradient.values()])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Optimizer steps and clearings in the order in which they happen."""
    seen: list[str] = []
    step, clear = torch.optim.AdamW.step, torch.optim.AdamW.zero_grad

    def stepped(self: Any, *args: Any, **options: Any) -> Any:
        seen.append("step")
        return step(self, *args, **options)

    def cleared(self: Any, *args: Any, **options: Any) -> Any:
        seen.append("clear")
        return clear(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", stepped)
    monkeypatch.setattr(torch.optim.AdamW, "zero_grad", cleared)
    yield seen


def test_gradients_are_stepped_and_cleared_once_an_update_not_once_a_micro_batch(
    tmp_path: Path, calls: list[str]
) -> None:
    """Sixteen micro-batches an update, two epochs: zeroing inside the loop leaves the last micro-batch only."""
    run = tiny_run(tmp_path, run__steps=1, batch__num_iterations=2, batch__micro_batch=1)
    list(grpo(run, rewards=REWARDS, tasks=small_tasks()))
    assert calls == ["step", "clear"] * 2


def test_grad_is_added_to_never_overwritten(policy: Policy) -> None:
    """Two objectives in one update: the gradient is the sum of what each gives alone."""
    experience = made_experience(policy)
    both = vector(gradients_of(policy, experience, micro_batch=2)[0])
    alone = [
        vector(gradients_of(policy, experience, rows={name: experience.kept_rows(name)}, micro_batch=2)[0])
        for name in OBJECTIVES
    ]
    torch.testing.assert_close(both, alone[0] + alone[1], rtol=1e-4, atol=1e-6)
    assert alone[1].norm() > 0.1 * both.norm()


def test_what_is_already_in_grad_stays(policy: Policy) -> None:
    experience = made_experience(policy)
    fresh = vector(gradients_of(policy, experience)[0])
    for parameter in policy.parameters_by_name().values():
        parameter.grad = torch.ones_like(parameter)
    torch.testing.assert_close(vector(gradients_of(policy, experience)[0]), fresh + 1, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_second_update_has_its_own_graph_and_its_own_kl(policy: Policy, name: str) -> None:
    """KL built once outside the loop is the first update's graph: "backward through the graph a second time"."""
    experience = made_experience(policy)
    first, second = (kl_after(policy, experience, name, shift) for shift in (0.0, 0.02))
    if ALGORITHMS[name].kl == "k1_in_reward":  # there the KL is in the advantage, and no term of the loss
        assert (first, second) == (None, None)
    else:
        assert first is not None and second is not None
        assert abs(first - second) > 1e-4 * first


def kl_after(policy: Policy, experience: Any, name: str, shift: float) -> float | None:
    """The KL term of one more update, after the weights have moved."""
    tiny_models.nudge(policy, shift)
    _, stats = gradients_of(policy, experience, name=name, betas={"a": 0.5, "b": 0.5})
    return stats.terms.get("kl")


def test_the_ratio_is_taken_against_the_policy_that_sampled_not_the_reference(policy: Policy) -> None:
    """A reference far away moves the KL term only: policy term, ratio and clipping do not see it."""
    near = made_experience(policy)
    assert near.logprobs_reference is not None
    far = dataclasses.replace(near, logprobs_reference=near.logprobs_reference - 3.0)
    of_near, of_far = (gradients_of(policy, experience)[1] for experience in (near, far))
    assert of_far.terms["policy"] == of_near.terms["policy"]
    assert (of_far.clipped_low, of_far.clipped_high) == (of_near.clipped_low, of_near.clipped_high)
    assert of_far.ratio_deviation == of_near.ratio_deviation
    assert of_far.terms["kl"] > of_near.terms["kl"]


def test_the_first_update_of_a_run_sees_a_ratio_of_one_whatever_the_reference(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=3, algorithm__learning_rate=3e-3)
    steps = list(grpo(run, rewards=REWARDS, tasks=small_tasks()))
    assert steps[2]["kl/fairness"] > 1e-5  # type: ignore[operator]
    assert steps[2]["ratio/max_deviation"] < 1e-5  # type: ignore[operator]


@pytest.mark.parametrize("reduction", losses.REDUCTIONS)
def test_a_mean_is_taken_over_the_update_not_over_each_micro_batch(policy: Policy, reduction: Any) -> None:
    """The denominators by hand, with every row in a micro-batch of its own: rows of 5, 2, 7 and 1 tokens."""
    experience = made_experience(policy)
    lengths = LENGTHS[:4]
    share = {
        "sequence_mean": [1 / n / 4 for n in lengths],
        "token_mean": [1 / sum(lengths)] * 4,
        "constant_length": [1 / (4 * 8)] * 4,
    }[reduction]
    expected = 0.0
    for i, weight in enumerate(share):
        tokens = loss_inputs(policy, experience, [i], made_plan({"reduction": reduction}))
        limits = made_plan({"reduction": reduction}).loss.clip
        expected += (
            weight
            * losses.ppo_clip(tokens.logp.detach(), tokens.logp_old, tokens.advantage, limits, tokens.mask).sum().item()
        )
    _, stats = gradients_of(
        policy, experience, rows={"a": [0, 1, 2, 3]}, micro_batch=1, betas={"a": 0.0}, reduction=reduction
    )
    assert stats.loss == pytest.approx(expected, abs=1e-6)


def test_old_and_reference_log_probs_hold_no_graph(policy: Policy) -> None:
    """A constant that carries a gradient is refused by name, and what a step stores is detached."""
    experience = made_experience(policy)
    assert not experience.logprobs_old.requires_grad and experience.logprobs_reference is not None
    tokens = loss_inputs(policy, experience, [0, 1], made_plan())
    assert tokens.logp.requires_grad and not tokens.logp_old.requires_grad
    experience.logprobs_reference.requires_grad_()
    with pytest.raises(ValueError, match=r"torch\.no_grad\(\)"):
        gradients_of(policy, experience)
