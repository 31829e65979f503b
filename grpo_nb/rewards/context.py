"""Arguments that TRL also passes to reward functions: the trainer state, and two calls that log values.

def f(completions, trainer_state, log_metric, log_extra, **columns):
    log_metric("long", 0.25)                  # the step's row: `user/<objective>/long`
    log_extra("words", [3, 7, ...])           # one a completion: samples.jsonl, under `extra`
    return [1.0 if trainer_state.global_step < 10 else 0.5 for _ in completions]
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from grpo_nb.metrics import keys
from grpo_nb.storage import schema

MOST_METRICS = 100
LARGEST = 1e100
"""Size of a noted number: the mean of any number of them is finite."""
"""Names that the reward functions of an objective can note in a step; a row of all objectives stays readable."""

BESIDES = ("trainer_state", "log_metric", "log_extra")
"""Arguments of reward functions that are not lists with an entry for each completion."""


@dataclass(frozen=True)
class TrainerState:
    """The fields of TRL's `trainer_state` that have a meaning here."""

    global_step: int = 0
    """Steps done: 0 in the first."""
    max_steps: int = 0
    """Steps to reach."""
    epoch: float = 0.0
    """Passes over the objective's training prompts so far."""


@dataclass
class Notes:
    """Values that an objective's reward functions logged about the completions of one step."""

    count: int
    """Completions."""
    state: TrainerState = TrainerState()
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)
    dropped: int = 0
    """Numbers that were not logged, since MOST_METRICS other names were."""

    def log_metric(self, name: str, value: Any) -> None:
        """Note a number for the step's row; its mean where it is noted several times.

        Raises:
            ValueError: it is no finite number, or the name cannot be part of a key.
        """
        name = str(name)
        if not schema.is_name(name):
            raise ValueError(f"log_metric({name!r:.60}, ...) needs {schema.NAME_RULE} as name")
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of several numbers
            number = math.nan
        if not abs(number) <= LARGEST:
            raise ValueError(f"log_metric('{name}', {value!r:.60}) needs a number of at most {LARGEST:g} in size")
        if name not in self.metrics and len(self.metrics) >= MOST_METRICS:
            self.dropped += 1
            return
        self.metrics.setdefault(name, []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Note a value for each completion, which its row of samples.jsonl keeps.

        Raises:
            ValueError: not one for each completion, not JSON, or the column exists already.
        """
        found = list(values)
        if len(found) != self.count:
            raise ValueError(
                f"log_extra('{column}', ...) has {len(found)} values; needs {self.count}, one a completion"
            )
        if column in self.extra:
            raise ValueError(f"log_extra('{column}', ...) exists already in this step; choose another name")
        try:
            plain = json.loads(json.dumps(found, allow_nan=False))
            deep = not schema.shallow({"extra": {column: plain}})
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"log_extra('{column}', ...) cannot be written as JSON ({error})") from None
        if deep:
            raise ValueError(f"log_extra('{column}', ...) is nested deeper than the run's files may be; flatten it")
        self.extra[str(column)] = found

    def row(self, objective: str) -> dict[str, float]:
        """The metrics as keys of the step's row."""
        return {keys.USER.of(objective, name): fmean(values) for name, values in self.metrics.items()}

    def sample(self, index: int) -> dict[str, Any]:
        """Columns of a completion for samples.jsonl."""
        return {"extra": {name: values[index] for name, values in self.extra.items()}} if self.extra else {}

    def arguments(self) -> dict[str, Any]:
        """The values by the argument names of reward functions."""
        return dict(zip(BESIDES, (self.state, self.log_metric, self.log_extra), strict=True))
