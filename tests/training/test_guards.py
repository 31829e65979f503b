"""What an engine returns is checked before anything is learnt from it."""

import dataclasses
import math
from typing import Any

import pytest

from grpo_nb.training.guards import TrainingError, check_rollouts
from grpo_nb.types import Rollouts
from tests.support.tokens import pattern

END = 9
GOOD = Rollouts(
    prompt_ids=[[1, 2]],
    completion_ids=[[3, 4, END], [5, 6]],
    logprobs=[[-0.1, -2.0, 0.0], [-1.0, -3.5]],
    stop_reasons=["stop", "length"],
    texts=["a b", "c d"],
    group_size=2,
)


def test_what_the_engine_should_give_passes() -> None:
    check_rollouts(GOOD, [END])
    check_rollouts(dataclasses.replace(GOOD, logprobs=[[-0.1, -2.0, 1e-6], [-1.0, -3.5]]), [END])  # rounding


@pytest.mark.parametrize(
    "completion_ids", [[[3, 4], [5, 6]], [[3, END, 4, END], [5, 6]], [[3, 4, END], [5, END]], [[], [5, 6]]]
)
def test_a_completion_ends_with_its_first_terminator(completion_ids: list[list[int]]) -> None:
    logprobs = [[-1.0] * len(ids) for ids in completion_ids]
    with pytest.raises(TrainingError, match=pattern("completion", f"[{END}]")):
        check_rollouts(dataclasses.replace(GOOD, completion_ids=completion_ids, logprobs=logprobs), [END])


@pytest.mark.parametrize(
    ("logprobs", "named"),
    [
        ([], [0, 2]),
        ([[-0.1, -2.0, 0.0], []], ["completion 1", 0, 2]),
        ([[-0.1, -2.0, 0.0, 0.0], [-1.0, -3.5]], ["completion 0", 4, 3]),
        ([[-0.1, math.nan, 0.0], [-1.0, -3.5]], ["completion 0", 3, "nan"]),
        ([[-0.1, -math.inf, 0.0], [-1.0, -3.5]], ["completion 0", "-inf"]),
        ([[-0.1, -2.0, 0.0], [1.0, -3.5]], ["completion 1", "1.0"]),
    ],
)
def test_every_token_has_the_log_prob_it_was_drawn_with(logprobs: Any, named: list[object]) -> None:
    """A missing one was once read as 0, as if the engine had been certain of that token."""
    with pytest.raises(TrainingError, match=pattern(*named)):
        check_rollouts(dataclasses.replace(GOOD, logprobs=logprobs), [END])


@pytest.mark.parametrize("returned", [None, []])
def test_an_engine_that_returns_no_rollouts_is_named(returned: object) -> None:
    with pytest.raises(TrainingError, match="Rollouts"):
        check_rollouts(returned, [END])
