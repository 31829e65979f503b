"""Counting for the reductions, and the optimizer step that SFT and GRPO share."""

import math

import pytest
import torch
from torch.nn import Parameter

from grpo_nb import losses, optim
from grpo_nb.training import gradients
from grpo_nb.types import Experience
from tests.support.made_experience import blank_experience, made_rollouts


def experience(lengths: list[int]) -> Experience:
    rollouts = made_rollouts([[1]] * len(lengths), [[2] * max(lengths)] * len(lengths), ["a"] * len(lengths))
    return blank_experience(rollouts, lengths=torch.tensor(lengths))


def test_a_masked_answer_is_in_no_denominator() -> None:
    assert gradients.normalizer_of(experience([3, 0, 2]), [0, 1, 2], 8) == losses.LossNormalizer(2, 5, 8)


def test_the_mask_is_the_length_of_each_row() -> None:
    assert experience([3, 0, 2]).mask().sum(1).tolist() == [3, 0, 2]


def learner(gradient: float) -> tuple[dict[str, Parameter], torch.optim.AdamW]:
    parameters = {"w": Parameter(torch.ones(4))}
    parameters["w"].grad = torch.full((4,), gradient)
    return parameters, optim.adamw(parameters, 0.1, 0.0)


@pytest.mark.ux(15, at="unit")
@pytest.mark.parametrize("gradient", [math.nan, math.inf, 60.0])
def test_a_refused_gradient_changes_nothing_and_is_cleared(gradient: float) -> None:
    parameters, optimizer = learner(gradient)
    update = optim.apply(parameters, optimizer, learning_rate=0.1, max_norm=1.0, skip_above=100.0)
    assert update.status == "skipped" and update.moved == 0
    assert torch.equal(parameters["w"], torch.ones(4)) and parameters["w"].grad is None
    assert not optimizer.state


def test_a_large_gradient_is_scaled_to_the_limit_and_reported_before_it() -> None:
    parameters, optimizer = learner(5.0)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(float(parameters["w"].grad.norm())))  # type: ignore[union-attr]
    update = optim.apply(parameters, optimizer, learning_rate=0.1, max_norm=1.0)
    assert update.norm == pytest.approx(10.0) and update.status == "clipped"
    assert seen == [pytest.approx(1.0)]
    assert update.moved == pytest.approx(0.1, rel=1e-3)


def test_parameters_that_turn_infinite_are_an_error() -> None:
    parameters, optimizer = learner(0.5)
    with pytest.raises(FloatingPointError, match="parameter w"):
        optim.apply(parameters, optimizer, learning_rate=math.inf, max_norm=1.0)


def test_the_optimizers_memory_survives_bit_for_bit() -> None:
    parameters, optimizer = learner(0.3)
    optim.apply(parameters, optimizer, learning_rate=0.1, max_norm=1.0)
    saved = {k: v.clone() for k, v in optim.state_tensors(parameters, optimizer).items()}
    fresh = {"w": Parameter(parameters["w"].detach().clone())}
    other = optim.adamw(fresh, 0.1, 0.0)
    optim.load_state_tensors(fresh, other, saved)
    for learning in ((parameters, optimizer), (fresh, other)):
        learning[0]["w"].grad = torch.full((4,), 0.2)
        optim.apply(*learning, learning_rate=0.1, max_norm=1.0)
    assert torch.equal(parameters["w"], fresh["w"])


def test_warm_up_rises_linearly_to_one() -> None:
    assert [optim.warmup(s, 4) for s in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert optim.warmup(1, 0) == 1.0
