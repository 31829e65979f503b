"""Rewards before they are compared: what an answer's length costs, cutting, and running normalisation."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_nb.losses.advantages import ROUNDING
from grpo_nb.losses.tokens import same_shape

Groups = Float[Tensor, "prompt group"]


def overlong_penalty(
    lengths: Int[Tensor, "prompt group"], max_completion_length: int, buffer: int, size: float
) -> Groups:
    """−size · clip((T − (max − buffer)) / buffer, 0, 1): rises over the last `buffer` tokens before the cap.

    Yu et al. 2025 (DAPO), eq. 13. A buffer of 0 penalises nothing.
    """
    if buffer == 0:
        return torch.zeros(lengths.shape)
    return -size * ((lengths - (max_completion_length - buffer)) / buffer).clamp(0, 1)


def stop_properly(rewards: Groups, truncated: Bool[Tensor, "prompt group"], factor: float) -> Groups:
    """min(R, factor · R) of an answer that hit the cap where 0 ≤ factor ≤ 1, min(R, factor) where it is negative.

    Hitting the cap never makes an answer better: a negative reward would rise by a factor, and one below the negative
    factor by that; such a reward stays as it is.
    """
    same_shape(rewards=rewards, truncated=truncated)
    limit = torch.full_like(rewards, factor) if factor < 0 else factor * rewards
    return torch.where(truncated, torch.minimum(rewards, limit), rewards)


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of all rewards seen, kept in checkpoints. Welford 1962.

    >>> Moments().update([1.0, 3.0]).std
    1.4142135623730951
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    largest: float = 0.0
    """Size of the largest number that a reward seen was summed from: rounding is relative to it."""

    @property
    def std(self) -> float:
        """√(squares / (count − 1)); 0 below two rewards."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    @property
    def spread(self) -> float:
        """Divisor of the rewards: the std, or 1 while the rewards differ by no more than rounding."""
        return self.std if self.std > ROUNDING * max(self.largest, abs(self.mean)) else 1.0

    def update(self, values: list[float], scale: float = 0.0) -> "Moments":
        """The moments after more rewards; unscored ones are not among `values`. `scale`: largest term of a reward."""
        count, mean, squares = self.count, self.mean, self.squares
        for value in values:
            count += 1
            before = value - mean
            mean += before / count
            squares += before * (value - mean)
        return Moments(count, mean, squares, max([self.largest, scale, *map(abs, values)]))

    def normalise(self, rewards: Groups) -> Groups:
        """(R − mean) / std, in what has been seen so far; only centred while nothing differs yet."""
        return (rewards - self.mean) / self.spread

    def rescale(self, scale: Groups) -> Groups:
        """Size of the terms of normalised rewards: (scale + |mean|) / std."""
        return (scale + abs(self.mean)) / self.spread

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "Moments":
        return cls(**state)
