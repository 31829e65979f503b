"""Every surrogate with every advantage and every KL that the settings allow together trains a first step.

The cases come from the tables of `algorithms`, so a new row is covered without a change here.
"""

import functools
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_nb import losses, optim
from grpo_nb.algorithms import ADVANTAGE_ROWS, KL_ROWS, SURROGATE_ROWS
from grpo_nb.config import AlgorithmConfig, Config, ConfigError
from grpo_nb.policy.model import Policy
from grpo_nb.training.experience import compute_advantages
from grpo_nb.training.gradients import Measured, objective_gradients, token_stats
from grpo_nb.training.state import TrainState
from grpo_nb.types import Example, Rollouts, SampledPrompt, Score
from tests.support import tiny_models
from tests.support.made_experience import made_plan
from tests.support.tiny import tiny_config
from tests.support.tiny_models import BOS, END, VOCABULARY

Choice = dict[str, str]
PROMPTS, GROUP, EPOCHS = 2, 5, 2
KINDS = {"surrogate": SURROGATE_ROWS, "advantage": ADVANTAGE_ROWS, "kl": KL_ROWS}


def allowed() -> list[Choice]:
    """Every choice of one row a table that the settings accept."""
    accepted: list[Choice] = []
    for names in itertools.product(*KINDS.values()):
        choice = dict(zip(KINDS, names, strict=True))
        try:
            AlgorithmConfig(**choice)  # type: ignore[arg-type]
        except (ConfigError, ValueError):
            continue
        accepted.append(choice)
    return accepted


ALLOWED = allowed()


@functools.cache
def begun() -> tuple[Policy, dict[str, torch.Tensor], Rollouts, Measured]:
    """A policy, its weights, ten completions and what a first step measures of them: it is its own reference."""
    policy, generator = tiny_models.policy(num_hidden_layers=1), torch.Generator().manual_seed(0)

    def drawn(n: int) -> list[int]:
        return torch.randint(END + 1, VOCABULARY, (n,), generator=generator).tolist()

    answers = [[*drawn(1 + i % 4), END] for i in range(PROMPTS * GROUP)]
    rollouts = Rollouts(
        prompt_ids=[[BOS, *drawn(3)] for _ in range(PROMPTS)],
        completion_ids=answers,
        logprobs=[[0.0] * len(ids) for ids in answers],
        stop_reasons=["stop"] * len(answers),
        texts=[""] * len(answers),
        group_size=GROUP,
        prompts=[SampledPrompt("a", Example(str(i), "")) for i in range(PROMPTS)],
    )
    with policy.eval_mode():
        old = token_stats(policy, rollouts, plan({}))
    weights = {name: p.detach().clone() for name, p in policy.parameters_by_name().items()}
    return policy, weights, rollouts, Measured(old, old.logprobs)


def plan(choice: Choice) -> Any:
    return made_plan(dict(choice), micro_batch=PROMPTS * GROUP, betas={"a": 0.3}, weights={"a": 1.0}, epochs=EPOCHS)


@functools.cache
def shaping_of() -> Config:
    """Settings that shape no reward."""
    return tiny_config()


def state() -> Any:
    """What advantages are computed from in addition to the rollouts."""
    made: Any = object.__new__(TrainState)
    made.run = SimpleNamespace(config=shaping_of())
    made.objectives = {"a": SimpleNamespace(moments=losses.Moments(), config=SimpleNamespace(judge=None))}
    return made


def test_every_row_of_the_tables_is_in_some_case() -> None:
    for kind, rows in KINDS.items():
        assert {choice[kind] for choice in ALLOWED} == {*rows}


@pytest.mark.parametrize("choice", ALLOWED, ids=lambda choice: "-".join(choice.values()))
def test_a_first_step_trains(choice: Choice) -> None:
    """Two passes over one batch, a graph of its own each: in the first the ratio is 1 and the KL 0, later neither."""
    policy, weights, rollouts, measured = begun()
    settings = AlgorithmConfig(**choice)  # type: ignore[arg-type]
    scores = [Score(value=float(i * i % 7)) for i in range(PROMPTS * GROUP)]
    step = plan(choice)
    batch = compute_advantages(state(), step, rollouts, measured, scores)
    assert (batch.advantages.shape[1] > 1) == (
        ADVANTAGE_ROWS[settings.row.advantage].per_token and settings.row.kl_in_reward
    )
    policy.load_state(weights)
    parameters = policy.parameters_by_name()
    optimizer = optim.adamw(parameters, 1e-3, 0.0)
    for epoch, rows in enumerate(step.updates(batch)):
        stats = objective_gradients(policy, batch, rows, step, step.generator("combine"))
        assert math.isfinite(stats.loss) and all(map(math.isfinite, stats.terms.values()))
        assert (stats.ratio_deviation < 1e-5) == (epoch == 0)
        assert ("kl" in stats.terms) != settings.row.kl_in_reward
        assert (abs(stats.terms.get("kl", epoch)) < 1e-9) == (epoch == 0)
        update = optim.apply(parameters, optimizer, learning_rate=1e-3, max_norm=1.0)
        assert math.isfinite(update.norm) and math.isfinite(update.moved)
        assert epoch > 0 or update.norm > 0, "by the surrogate alone; later, a narrow clip may have reached every token"
