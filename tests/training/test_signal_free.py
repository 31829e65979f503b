"""`algorithm.skip_signal_free_groups`: a group of equal rewards leaves the update, with its KL and entropy terms."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb.training import grpo as train
from grpo_nb.training.gradients import normalizer_of
from grpo_nb.training.grpo import grpo
from grpo_nb.types import Experience, Score
from tests.support.tiny import small_tasks, tiny_run, varied, weights

SHORT: dict[str, Any] = {"sft__steps": 0, "run__checkpoint_every": 1, "batch__group_size": 2, "run__steps": 2}
SHORT |= {"sampling__max_completion_length": 8, "algorithm__learning_rate": 2e-4}


def same(completion_ids: list[list[int]]) -> list[float]:
    return [1.0] * len(completion_ids)


def tasks() -> dict[str, Any]:
    """Tasks that give every answer the same."""
    found = {name: copy.copy(task) for name, task in small_tasks().items()}
    for task in found.values():
        task.score = lambda example, text: Score(0.0)  # type: ignore[method-assign]
    return found


def later(completion_ids: list[list[int]], trainer_state: Any) -> list[float]:
    """Tells answers apart in the first step only."""
    return varied(completion_ids) if trainer_state.global_step == 0 else same(completion_ids)


@pytest.mark.parametrize("skip", [True, False])
def test_a_step_without_any_signal_moves_no_weight(skip: bool, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **SHORT, algorithm__skip_signal_free_groups=skip, algorithm__entropy_coef=0.01)
    rewards = {"fairness": [later], "hallucination": [later]}
    first, second = grpo(run, tasks=tasks(), rewards=rewards)
    assert first.status == "clipped" and second["frac_reward_zero_std/fairness"] == 1
    before, after = (run.checkpoints.load(step).tensors("policy") for step in (1, 2))
    unmoved = all(torch.equal(before[name], after[name]) for name in before)
    assert unmoved == skip
    if skip:
        assert second.status == "empty" and second["grad/norm"] is None and second["kl/fairness"] is None
    else:
        assert second["grad/norm"] > 0 and second["kl/fairness"] > 0  # type: ignore[operator]


@pytest.mark.parametrize("skip", [True, False])
def test_denominators_count_the_groups_with_signal(skip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Experience, dict[str, list[int]]]] = []
    own = train.objective_gradients

    def watched(policy: Any, batch: Any, rows: Any, *rest: Any) -> Any:
        seen.append((batch, rows))
        return own(policy, batch, rows, *rest)

    monkeypatch.setattr(train, "objective_gradients", watched)
    run = tiny_run(tmp_path, **SHORT | {"run__steps": 1}, algorithm__skip_signal_free_groups=skip)
    (step,) = grpo(run, tasks=tasks(), rewards={"fairness": [varied], "hallucination": [same]})
    ((batch, rows),) = seen
    assert step["frac_reward_zero_std/hallucination"] == 1
    learning = [i for i in batch.rollouts.rows_of("fairness") if batch.learns()[i]]
    groups = {batch.rollouts.prompt_of(i) for i in learning}
    wanted = [i for i in range(len(batch.kept)) if batch.rollouts.prompt_of(i) in groups]
    trained = [i for own_rows in rows.values() for i in own_rows]
    assert trained == (wanted if skip else list(range(8)))
    assert ("hallucination" in rows) != skip
    counts = normalizer_of(batch, trained, 8)
    assert counts.sequences == len(trained)
    assert counts.tokens == sum(len(batch.rollouts.completion_ids[i]) for i in trained)
    assert weights(run)
