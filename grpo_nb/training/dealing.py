"""Assignment of a step's rows to the ranks that score and train them."""

from collections.abc import Mapping, Sequence

from grpo_nb.ranks.deal import deal
from grpo_nb.training.wire import rows_of
from grpo_nb.types import Rollouts

Rows = Mapping[str, Sequence[int]]
"""Rows by objective."""


def prompts_of(rollouts: Rollouts, ranks: int, rows: Sequence[int]) -> list[list[int]]:
    """Prompts by rank, so that each has about as many tokens of these rows; a prompt without rows goes to no rank."""
    tokens: dict[int, int] = {}
    for i in rows:
        prompt = rollouts.prompt_of(i)
        tokens[prompt] = tokens.get(prompt, len(rollouts.prompt_ids[prompt])) + len(rollouts.completion_ids[i])
    prompts = sorted(tokens)
    return [[prompts[n] for n in part] for part in deal([tokens[p] for p in prompts], ranks)]


def rows_by_rank(rollouts: Rollouts, ranks: int, rows: Rows) -> list[dict[str, list[int]]]:
    """Rows of an update by rank: those that a rank computes together, even where another rank repeats them."""
    if ranks == 1:
        return [{name: list(own) for name, own in rows.items()}]
    parts = prompts_of(rollouts, ranks, [i for own in rows.values() for i in own])
    return [within(rows, part, rollouts.group_size) for part in parts]


def within(rows: Rows, prompts: Sequence[int], group: int) -> dict[str, list[int]]:
    """The rows that belong to these prompts."""
    own = {*rows_of(prompts, group)}
    return {name: [i for i in given if i in own] for name, given in rows.items()}
