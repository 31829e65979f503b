"""An experience that no run made: two objectives, ragged rows, an old policy and a reference some nats away."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from grpo_nb.config import AlgorithmConfig
from grpo_nb.policy.model import Policy
from grpo_nb.training.gradients import GradientStats, objective_gradients, token_stats
from grpo_nb.types import Experience
from tests.support.tiny_models import BOS, END, VOCABULARY

OBJECTIVES = ("a", "b")
LENGTHS = (5, 2, 7, 1, 3, 6, 4, 2)
BETAS = {"a": 0.3, "b": 0.1}
WEIGHTS = {"a": 1.0, "b": 0.5}


def made_experience(policy: Policy, *, drift: float = 0.3, seed: int = 0, temperature: float = 0.8) -> Experience:
    """Eight rows; old and reference log-probs `drift` nats (one deviation) from the policy's own."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(n: int) -> list[int]:
        return torch.randint(END + 1, VOCABULARY, (n,), generator=generator).tolist()

    def near(table: Tensor) -> Tensor:
        return table + drift * torch.randn(table.shape, generator=generator)

    rows, width = len(LENGTHS), max(LENGTHS)
    experience = Experience(
        objectives=[OBJECTIVES[i * len(OBJECTIVES) // rows] for i in range(rows)],
        prompt_ids=[[BOS, *drawn(2 + i % 3)] for i in range(rows)],
        completion_ids=[[*drawn(n - 1), END] for n in LENGTHS],
        temperature=temperature,
        advantages=torch.randn(rows, 1, generator=generator),
        kept=torch.ones(rows, dtype=torch.bool),
        logprobs_old=torch.zeros(rows, width),
        old_known=True,
        logprobs_reference=None,
        entropy=torch.zeros(rows, width),
        lengths=torch.tensor(LENGTHS),
    )
    with policy.scoring():
        own, entropy = token_stats(policy, experience, rows)
    return dataclasses.replace(experience, logprobs_old=near(own), logprobs_reference=near(own), entropy=entropy)


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
    stats = objective_gradients(
        policy,
        experience,
        rows or {name: experience.rows_of(name) for name in OBJECTIVES},
        betas,
        weights,
        AlgorithmConfig(**algorithm),
        micro_batch=micro_batch,
        max_completion=8,
        generator=torch.Generator().manual_seed(0),
    )
    taken = {name: p.grad.clone() for name, p in policy.parameters_by_name().items() if p.grad is not None}
    for parameter in policy.parameters_by_name().values():
        parameter.grad = None
    return taken, stats
