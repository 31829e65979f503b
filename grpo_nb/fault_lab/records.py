"""Records of the lab: a fault, and the outcome of its trial."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from grpo_nb.rewards.rubric import RewardFunction
from grpo_nb.run.run import Run
from grpo_nb.tasks import Task

Claim = Literal["rule", "guard", "refusal"]
"""Way in which a fault is caught: a finding of the rules; an update that is left out; an error that ends the training.
"""


@runtime_checkable
class Patient(Protocol):
    """Parts that a fault may change before the training starts; all of them belong to one trial."""

    run: Run
    tasks: Mapping[str, Task]
    rewards: Mapping[str, Sequence[RewardFunction]]

    def train(self, steps: int | None = None) -> None:
        """Train up to `steps` in total, by default to the run's own number."""

    def change(self, **settings: Any) -> None:
        """Make the run anew with other settings, by names with `__` for the dot, before it has begun."""


Inject = Callable[[Patient], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """A bug with a history."""

    id: str
    what: str
    """The fault in one line."""
    claim: Claim
    caught_by: tuple[str, ...]
    """Names of rules, or of an exception's class; one of them is enough."""
    within: int
    """Steps after which it is caught at the latest; a refusal before any step counts as 0."""
    inject: Inject
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its run, by dotted names; `run.steps` is `within` unless it is set."""
    stage: Literal["grpo", "sft"] = "grpo"

    @property
    def steps(self) -> int:
        """Steps of its run."""
        return int(self.settings.get("run.steps", max(self.within, 1)))


@dataclass(frozen=True)
class Outcome:
    """Outcome of a trial."""

    fault: str
    seed: int
    found: Mapping[str, int]
    """Rule or exception -> steps done when it first occurred."""
    severities: Mapping[str, str]
    """Rule or exception -> info, warning or error."""
    steps: int
    """Steps done."""
    error: str = ""
    """Error that ended the training, if any."""

    def caught(self, fault: Fault) -> int | None:
        """Steps to the first of the fault's own findings; None without one."""
        return min((self.found[name] for name in fault.caught_by if name in self.found), default=None)

    @property
    def alarms(self) -> list[str]:
        """Names of the findings without notes."""
        return [name for name, severity in self.severities.items() if severity != "info"]


CLEAN = Fault(
    id="clean",
    what="no fault",
    claim="rule",
    caught_by=(),
    within=20,
    inject=lambda patient: nullcontext(),
)
"""The run without a fault: nothing but notes may be found in it."""
