"""Requests to an engine, and completions that it reports as ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from grpo_nb.config import SamplingConfig


@dataclass(frozen=True)
class Ended:
    """A completion that has just ended, while others are still being sampled."""

    row: int
    """Index of the completion among the B."""
    text: str
    """Text that tasks and the judge read; see `Rollouts.scored_texts`."""


@dataclass(frozen=True)
class Request:
    """K completions for each of P prompts, at one setting of the sampler."""

    prompt_ids: Sequence[Sequence[int]]
    """[P] token ids, no padding."""
    group_size: int
    """K"""
    sampling: SamplingConfig
    """Sampling settings with the current temperature, a knob, which may differ from the run's own."""
    uniforms: Tensor | None = None
    """float64 in [0, 1), [P * K, at least max_completion_length]: entry (row, t) alone decides token t of that row
    given the tokens before it, so a result does not depend on the other rows. `greedy` needs none."""
    greedy: bool = False
    """Whether to take the likeliest token."""
    ended: Callable[[Sequence[Ended]], None] | None = None
    """Called with each completion once, a few at a time, soon after it ended and before the last one has."""

    rows_at_once: int | None = None
    """Completions in flight, at most; None: as many as the engine takes. Changes memory, and bits in half precision."""

    @property
    def rows(self) -> int:
        """B = P * K"""
        return len(self.prompt_ids) * self.group_size

    def prompts_at_once(self, most: int) -> int:
        """Prompts whose completions are in flight together, where an engine takes `most` rows."""
        return max(1, min(most, self.rows_at_once or most) // self.group_size)

    @property
    def temperature(self) -> float | None:
        """Temperature of the sampling; None: greedy."""
        return None if self.greedy else self.sampling.temperature
