"""An experience that no run made: two objectives, ragged rows, an old policy and a reference some nats away."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from grpo_nb.config import AlgorithmConfig
from grpo_nb.policy.model import Policy
from grpo_nb.training.gradients import GradientStats, blank, objective_gradients, token_stats
from grpo_nb.training.plan import StepPlan, loss_config
from grpo_nb.types import Example, Experience, Rollouts, SampledPrompt, Score
from tests.support.tiny_models import BOS, END, VOCABULARY

OBJECTIVES = ("a", "b")
LENGTHS = (5, 2, 7, 1, 3, 6, 4, 2)
BETAS = {"a": 0.3, "b": 0.1}
WEIGHTS = {"a": 1.0, "b": 0.5}


def made_plan(algorithm: dict[str, Any] | None = None, **changes: Any) -> StepPlan:
    """A step of these settings over the rows of `made_experience`, in one update."""
    settings = AlgorithmConfig(**algorithm or {})
    made = StepPlan(
        step=2,
        seed=0,
        temperature=0.8,
        learning_rate=1e-3,
        algorithm=settings,
        loss=loss_config(settings),
        betas=BETAS,
        weights=WEIGHTS,
        kl_targets={},
        needs_reference=True,
        old_first=True,
        reports_gradients=False,
        micro_batch=8,
        max_completion_length=8,
    )
    return dataclasses.replace(made, **changes)


def made_rollouts(prompt_ids: list[list[int]], completion_ids: list[list[int]], objectives: list[str]) -> Rollouts:
    """One completion a prompt, which ends by itself."""
    return Rollouts(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=[[0.0] * len(ids) for ids in completion_ids],
        stop_reasons=["stop"] * len(completion_ids),
        texts=[""] * len(completion_ids),
        group_size=1,
        prompts=[SampledPrompt(name, Example(str(i), "")) for i, name in enumerate(objectives)],
    )


def blank_experience(rollouts: Rollouts, **changes: Any) -> Experience:
    """Nothing measured, nothing to learn."""
    count = len(rollouts.completion_ids)
    made = Experience(
        rollouts=rollouts,
        scores=[Score(0.0)] * count,
        rewards={},
        advantages=torch.zeros(count, 1),
        kept=torch.ones(count, dtype=torch.bool),
        lengths=torch.tensor([len(ids) for ids in rollouts.completion_ids]),
        logprobs_old=blank(rollouts).logprobs,
        entropy=blank(rollouts).entropy,
        measured=torch.zeros(count, dtype=torch.bool),
        logprobs_reference=None,
    )
    return dataclasses.replace(made, **changes)


def made_experience(policy: Policy, *, drift: float = 0.3, seed: int = 0) -> Experience:
    """Eight rows; old and reference log-probs `drift` nats (one deviation) from the policy's own."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(n: int) -> list[int]:
        return torch.randint(END + 1, VOCABULARY, (n,), generator=generator).tolist()

    def near(table: Tensor) -> Tensor:
        return table + drift * torch.randn(table.shape, generator=generator)

    rows = len(LENGTHS)
    prompt_ids = [[BOS, *drawn(2 + i % 3)] for i in range(rows)]
    completion_ids = [[*drawn(n - 1), END] for n in LENGTHS]
    objectives = [OBJECTIVES[i * len(OBJECTIVES) // rows] for i in range(rows)]
    rollouts = made_rollouts(prompt_ids, completion_ids, objectives)
    advantages = torch.randn(rows, 1, generator=generator)
    with policy.eval_mode():
        own = token_stats(policy, rollouts, made_plan())
    return blank_experience(
        rollouts,
        advantages=advantages,
        logprobs_old=near(own.logprobs),
        logprobs_reference=near(own.logprobs),
        entropy=own.entropy,
        measured=torch.ones(rows, dtype=torch.bool),
    )


def kept_rows(experience: Experience) -> dict[str, list[int]]:
    return {name: experience.kept_rows(name) for name in OBJECTIVES}


def gradients_of(
    policy: Policy,
    experience: Experience,
    *,
    rows: dict[str, list[int]] | None = None,
    micro_batch: int = 8,
    betas: dict[str, float] = BETAS,
    weights: dict[str, float] = WEIGHTS,
    **algorithm: Any,
) -> tuple[dict[str, Tensor], GradientStats]:
    """What one update leaves in `.grad`, taken out of it, and its statistics."""
    plan = made_plan(algorithm, micro_batch=micro_batch, betas=betas, weights=weights)
    stats = objective_gradients(
        policy, experience, rows or kept_rows(experience), plan, torch.Generator().manual_seed(0)
    )
    return taken(policy), stats


def taken(policy: Policy) -> dict[str, Tensor]:
    """The gradient in `.grad`, which is empty afterwards."""
    found = {name: p.grad.clone() for name, p in policy.parameters_by_name().items() if p.grad is not None}
    for parameter in policy.parameters_by_name().values():
        parameter.grad = None
    return found
