"""The check of the first update's gradient: what it measures, that it is asked once, and that it changes no bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_nb import losses
from grpo_nb.policy.model import Policy
from grpo_nb.training import gradient_check, gradients
from grpo_nb.training import grpo as trainer
from grpo_nb.training.grpo import grpo
from grpo_nb.training.plan import StepPlan
from grpo_nb.types import Experience
from tests.support import tiny_models
from tests.support.made_experience import made_experience, made_plan
from tests.support.tiny import REWARDS, rows, small_tasks, tiny_run, weights

APART, RATIO, RISE = "grad/check", "grad/check_ratio", "grad/check_entropy"


@pytest.fixture
def policy() -> Policy:
    return tiny_models.policy()


def checked(policy: Policy, plan: StepPlan, batch: Experience | None = None) -> dict[str, Any]:
    batch = batch or made_experience(policy, drift=0.0)
    expected = gradient_check.expected_gradient(policy, batch, plan)
    for update in plan.updates(batch)[:1]:
        gradients.objective_gradients(policy, batch, update, plan, torch.Generator())
    return gradient_check.compared(policy, batch, plan, expected)


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
@pytest.mark.parametrize("name", ["dapo", "grpo", "gspo", "cispo", "reinforce_pp"])
def test_a_right_gradient_is_apart_by_rounding(policy: Policy, name: str, micro_batch: int) -> None:
    row = checked(policy, made_plan({"name": name}, step=1, micro_batch=micro_batch))
    assert row[APART] < 1e-5 and row[RATIO] == pytest.approx(1, abs=1e-5) and RISE not in row


def test_a_gradient_that_is_overwritten_is_apart_by_what_is_lost(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward: Any = Tensor.backward

    def alone(loss: Tensor, *given: Any, **named: Any) -> None:
        for parameter in policy.parameters_by_name().values():
            parameter.grad = None
        backward(loss, *given, **named)

    monkeypatch.setattr(Tensor, "backward", alone)
    row = checked(policy, made_plan(step=1, micro_batch=2))
    assert row[APART] > 0.1 and 0 < row[RATIO] < 0.9


def test_a_gradient_that_is_counted_twice_is_twice_as_large(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    backward: Any = Tensor.backward
    monkeypatch.setattr(Tensor, "backward", lambda loss, *given, **named: backward(2 * loss, *given, **named))
    row = checked(policy, made_plan(step=1, micro_batch=2))
    assert row[RATIO] == pytest.approx(2, abs=1e-4) and row[APART] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_entropy_rises_by_what_its_gradient_says(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, sign: float
) -> None:
    compute = losses.loss_terms

    def turned(*given: Any, **named: Any) -> dict[str, Tensor]:
        terms = compute(*given, **named)
        return terms | {"entropy": sign * terms["entropy"]}

    monkeypatch.setattr(losses, "loss_terms", turned)
    row = checked(policy, made_plan({"entropy_coef": 0.05}, step=1, micro_batch=3))
    assert row[RISE] == pytest.approx(sign, abs=0.05) and row[APART] < 1e-5


def test_only_the_first_step_is_checked_and_no_gradients_that_are_combined(policy: Policy) -> None:
    assert checked(policy, made_plan(step=2)) == {}
    assert checked(policy, made_plan({"combine": "pcgrad"}, step=1)) == {}


def test_the_check_changes_no_bit_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"run__steps": 2, "algorithm__entropy_coef": 0.01, "batch__micro_batch": 4}
    with_it = tiny_run(tmp_path, "with", **settings)
    first, second = rows(list(grpo(with_it, rewards=REWARDS, tasks=small_tasks())))
    assert first[APART] < 1e-4 and first[RISE] == pytest.approx(1, abs=0.1)
    assert APART not in second and RISE not in second
    monkeypatch.setattr(trainer.gradient_check, "expected_gradient", lambda *given: {})  # type: ignore[attr-defined]
    without = tiny_run(tmp_path, "without", **settings)
    expected = rows(list(grpo(without, rewards=REWARDS, tasks=small_tasks())))
    same = {APART: 0, RATIO: 0, RISE: 0}
    assert [row | same for row in expected] == [row | same for row in (first, second)]
    a, b = weights(with_it), weights(without)
    assert all(torch.equal(a[name], b[name]) for name in a)
