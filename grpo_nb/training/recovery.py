"""State after the rollbacks of a run: a halved learning rate that returns, and the number of the sampling stream.

Pure functions from record to record; the record belongs to a checkpoint, so that a resumed run continues alike.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from grpo_nb.rules.health import LOWEST_FACTOR


@dataclass(frozen=True)
class Recovery:
    """Learning-rate factor, sampling stream and counters after the rollbacks of a run.

    >>> Recovery().rolled_back().rolled_back()
    Recovery(factor=0.25, stream=2, in_a_row=2, healthy=0)
    """

    factor: float = 1.0
    """Factor of the requested learning rate: a power of 1/2."""
    stream: int = 0
    """Number of the sampling stream; each rollback takes the next one."""
    in_a_row: int = 0
    """Rollbacks since the last healthy step."""
    healthy: int = 0
    """Healthy steps since the factor last changed."""

    def rolled_back(self) -> "Recovery":
        """The record after one more rollback: half the rate, another sampling stream."""
        return Recovery(max(self.factor, LOWEST_FACTOR) / 2, self.stream + 1, self.in_a_row + 1)

    def slowed(self) -> "Recovery":
        """Half the rate, without a rollback; never below LOWEST_FACTOR of the requested one."""
        return replace(self, factor=max(self.factor / 2, min(self.factor, LOWEST_FACTOR)), healthy=0)

    def went_well(self, steps: int) -> "Recovery":
        """The record after one more healthy step: after `steps` of them a halved rate doubles."""
        if self.factor == 1:
            return replace(self, in_a_row=0)
        if self.healthy + 1 < steps:
            return replace(self, in_a_row=0, healthy=self.healthy + 1)
        return replace(self, factor=2 * self.factor, in_a_row=0, healthy=0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "Recovery":
        return cls(**state)
