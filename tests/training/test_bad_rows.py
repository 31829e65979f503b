"""One completion whose log-probs are not finite leaves the loss, and is counted; the step goes on without it."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb import rules
from grpo_nb.policy.model import Policy
from grpo_nb.rollout import EagerEngine, Request
from grpo_nb.run.run import Run
from grpo_nb.training import gradients
from grpo_nb.training.grpo import TrainingError, grpo
from grpo_nb.types import Rollouts, TokenStats
from tests.support import tiny_models
from tests.support.made_experience import gradients_of, kept_rows, made_experience, made_plan, taken
from tests.support.tiny import given, tiny_run, weights

SHORT = {"sft__steps": 0, "batch__group_size": 2, "sampling__max_completion_length": 8, "run__steps": 2}
BAD = 5
"""Of the second objective in `made_experience`."""


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Forward passes give NaN to every row of a pass that holds a row of this list, as one line of tokens may."""
    bad: list[int] = []
    own = gradients.loss_inputs

    def inputs(policy: Policy, batch: Any, rows: Sequence[int], *args: Any, **more: Any) -> Any:
        found = own(policy, batch, rows, *args, **more)
        return dataclasses.replace(found, logp=found.logp * math.nan) if {*bad} & {*rows} else found

    monkeypatch.setattr(gradients, "loss_inputs", inputs)
    return bad


@pytest.mark.parametrize("micro_batch", [1, 8])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant_length"])
def test_the_update_is_that_of_the_other_rows(spoilt: list[int], micro_batch: int, reduction: str) -> None:
    policy = tiny_models.policy()
    experience = made_experience(policy)
    rest = {name: [i for i in rows if i != BAD] for name, rows in kept_rows(experience).items()}
    expected, _ = gradients_of(policy, experience, rows=rest, micro_batch=micro_batch, reduction=reduction)
    spoilt.append(BAD)
    plan = made_plan({"reduction": reduction}, micro_batch=micro_batch, most_bad_rows=0.25)
    stats = gradients.objective_gradients(policy, experience, kept_rows(experience), plan, torch.Generator())
    found = taken(policy)
    assert stats.bad == [BAD] and math.isfinite(stats.loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_more_bad_rows_than_the_share_are_left_to_the_guard_of_the_gradient(spoilt: list[int]) -> None:
    policy = tiny_models.policy()
    experience = made_experience(policy)
    spoilt.extend([0, 1, BAD])
    plan = made_plan(micro_batch=1, most_bad_rows=0.25)
    stats = gradients.objective_gradients(policy, experience, kept_rows(experience), plan, torch.Generator())
    assert stats.bad == [] and math.isnan(stats.loss)


class Spoiling(EagerEngine):
    """Gives NaN as the log-prob of a token of some completions."""

    def __init__(self, *rows: int) -> None:
        super().__init__()
        self.bad = rows

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        made = super().generate(policy, request)
        told = [[math.nan, *own[1:]] if i in self.bad else own for i, own in enumerate(made.logprobs)]
        return dataclasses.replace(made, logprobs=told)


def test_a_row_of_which_the_engine_told_no_number_is_counted(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **SHORT)
    steps = list(grpo(run, engine=Spoiling(1), **given()))
    assert [(step["bad_rows/fairness"], step["bad_rows/hallucination"]) for step in steps] == [(1, 0)] * 2
    assert {step.status for step in steps} <= {"ok", "clipped"}
    found = [one for one in rules.post_mortem(run.metric_rows(), run.config) if one.rule == "bad_rows"]
    assert found[0].evidence["completions"] == {"fairness": 1} and found[0].evidence["steps"] == [1, 2]
    assert [event["step"] for event in run.stored("events").having("kind", {"finding"}) if event["rule"] == "bad_rows"]


@pytest.mark.parametrize(("bad", "share"), [((0, 1, 2), 0.25), ((0,), None)])
def test_too_many_or_switched_off_end_the_run(bad: tuple[int, ...], share: float | None, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **SHORT, guards__mask_bad_rows=share)
    with pytest.raises(TrainingError, match="completion 0"):
        list(grpo(run, engine=Spoiling(*bad), **given()))


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_row_that_is_bad_in_training_alone_is_left_out_of_the_step(
    iterations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = gradients.score

    def spoilt(policy: Policy, batch: Any, *args: Any, **more: Any) -> TokenStats:
        stats = own(policy, batch, *args, **more)
        if not torch.is_grad_enabled():
            return stats
        first = torch.zeros_like(stats.logprobs)
        first[0] = math.nan
        return dataclasses.replace(stats, logprobs=stats.logprobs + first) if len(first) == 4 else stats

    monkeypatch.setattr(gradients, "score", spoilt)
    run = tiny_run(tmp_path, **SHORT | {"run__steps": 1}, batch__num_iterations=iterations)
    (step,) = grpo(run, **given())
    assert step["bad_rows/fairness"] == step["bad_rows/hallucination"] == 1 and step.status in ("ok", "clipped")
    assert all(tensor.isfinite().all() for tensor in weights(Run.open(run.path)).values())
