"""Reward functions with TRL's signature, and the rubric that names and weighs them, in addition to the task's own
score.

    def short(completions, **columns) -> list[float | None]: ...
    rubric = Rubric(task, [(short, 0.1)])

A function gets complete lists, one entry a completion, and only the arguments it names: `prompts`, `completions`,
`completion_ids`, `after_thinking`, the columns of the examples and what `reward_notes` has (all of it where it takes
`**kwargs`). Where prompts are chats, each completion is a list of one assistant message, as in TRL. `None` means
"cannot be scored": never 0 instead; `Score(value=None, cause=...)` gives the reason, too.

A completion is the text that TRL gives: decoded without special tokens, thinking included. `after_thinking` has the
part of each that follows the model's thinking, empty where that never ends; tasks and the judge read this part alone.
"""

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_nb.rewards.foreign_code import RewardError as RewardError
from grpo_nb.rewards.foreign_code import kind
from grpo_nb.tasks import Task
from grpo_nb.types import Score

Values = Sequence[float | Score | None]
RewardFunction = Callable[..., Values | Awaitable[Values]]

TASK = "task"
"""Name of the part with the task's own score."""
AFTER_THINKING = "after_thinking"
"""Name of the argument with the text after the thinking of each completion."""
LARGEST = 1e9
"""Size that no reward may exceed: float32 squares it in a group's variance, and would lose the others to rounding."""
FINITE = f"needs a finite number of at most {LARGEST:g} in size"


@dataclass(frozen=True)
class Weighted:
    """A reward function as the rubric uses it."""

    name: str
    function: RewardFunction
    weight: float


class Rubric:
    """reward = task score + sum of weight x function value. A part that is None leaves the completion unscored.

    Args:
        task: its score is the part `task`, with weight 1.
        functions: each alone (weight 1), or with its weight; sync, async, partials and callable objects.

    Raises:
        RewardError: no list, something that cannot be called, a class, a weight that is not finite, a name used twice.
    """

    def __init__(self, task: Task, functions: Sequence[RewardFunction | tuple[RewardFunction, float]] = ()) -> None:
        self.task = task
        if callable(functions) or not isinstance(functions, Sequence):
            raise RewardError(f"rewards are {kind(functions)}; needs a list: [f], or [(f, 0.1)] with its weight")
        self.functions = tuple(_weighted(entry) for entry in functions)
        names = [TASK, *(entry.name for entry in self.functions)]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise RewardError(
                f"reward function name '{min(repeated)}' is used twice ('{TASK}' is the task's own score); "
                "names are keys of the log: rename the function"
            )


def function_name(function: RewardFunction) -> str:
    """Name of a reward function in the log: a partial's inner function, a callable object's class."""
    if isinstance(function, functools.partial):
        return function_name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def _weighted(entry: Any) -> Weighted:
    function, weight = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, 1.0)
    if not callable(function):
        raise RewardError(
            f"{kind(function)} is no reward function; needs f(prompts, completions, **columns) -> list, alone or with "
            "its weight in a list: [f], [(f, 0.1)]"
        )
    name = function_name(function)
    if isinstance(function, type):
        raise RewardError(f"reward function '{name}' is a class; give an object of it: [{name}()]")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) <= LARGEST:
        raise RewardError(f"weight of reward function '{name}' is {kind(weight)}; {FINITE}")
    return Weighted(name, function, float(weight))
