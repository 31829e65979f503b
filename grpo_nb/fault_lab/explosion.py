"""The explosion experiment: the settings of a field report in which gradients reached 10^8, and the defaults, side by
side on the same data, model and seed.

    both = compare(lab, seed=0)
    plots.exhibits.explosion(table(both))
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd

from grpo_nb import optim
from grpo_nb.config.guards import OFF
from grpo_nb.fault_lab.lab import Lab, Trial
from grpo_nb.fault_lab.patching import around_backward, replaced
from grpo_nb.fault_lab.records import CLEAN, Fault, Patient
from grpo_nb.fault_lab.updates import ratio_against_the_reference
from grpo_nb.metrics import keys
from grpo_nb.policy.model import Policy
from grpo_nb.rules.finding import number

ROUNDS = 10
RATE = 1e-2
"""Learning rate of both runs. The report's, 1e-5, belongs to a model of 124 M parameters; one of a million blows up
from 1e-3 on."""
REPORTED: Mapping[str, Any] = {
    "algorithm.name": "grpo",
    "algorithm.clip_low": 0.2,
    "algorithm.clip_high": 0.2,
    "algorithm.max_grad_norm": 0.5,
    "algorithm.skip_grad_norm": None,
    "algorithm.advantage_clip": None,
    "algorithm.log_ratio_clamp": 80.0,
    **{f"guards.{name}": value for name, value in OFF.items()},
}
"""Gradients clipped at 0.5, ratios at 0.2, and nothing else: 80 nats is what float32 holds after exp."""


@dataclass(frozen=True)
class Course:
    """Course of a run, round by round."""

    norms: list[float]
    """Gradient norm before clipping; inf where it was not finite."""
    kls: list[float]
    """KL to the reference, mean over the objectives, before the round's update, by the run's estimator."""
    rolled_back: list[int]
    """Rounds that were rolled back."""
    finite: bool
    """Whether every weight is finite at the end."""
    rounds: int
    """Rounds with a row in the log: a weight that is not finite ends a run without guards."""


@contextmanager
def as_reported(patient: Patient) -> Iterator[None]:
    """Ratio against the reference, gradients in half precision, and a check of the norm that lets NaN through."""

    def halved(policy: Policy) -> None:
        for parameter in policy.parameters_by_name().values():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.half().float()

    with (
        ratio_against_the_reference(patient),
        around_backward(lambda policy: None, halved),
        replaced(optim, "gradient_refused", lambda norm, skip_above: False),
    ):
        yield


def compare(lab: Lab, seed: int = 0, rounds: int = ROUNDS, rate: float = RATE) -> dict[str, Course]:
    """Both runs, one after the other: `as reported`, and `defaults` at the same learning rate."""
    same = {"algorithm.learning_rate": rate, "run.steps": rounds}
    runs = {"as reported": (as_reported, REPORTED), "defaults": (CLEAN.inject, {})}
    return {name: _course(lab, name, seed, inject, {**settings, **same}) for name, (inject, settings) in runs.items()}


def table(courses: Mapping[str, Course]) -> pd.DataFrame:
    """Gradient norms by round, one column a run."""
    norms = {name: pd.Series(course.norms, range(1, len(course.norms) + 1)) for name, course in courses.items()}
    return pd.DataFrame(norms).rename_axis("round")


def _course(lab: Lab, name: str, seed: int, inject: Any, settings: Mapping[str, Any]) -> Course:
    fault = Fault(f"explosion-{name.replace(' ', '-')}", name, "guard", (), ROUNDS, inject, settings)
    trial = lab.trial(fault, seed)
    trial.execute()
    rows = trial.run.metric_rows()
    kls = [[number(row, keys.KL.of(name)) or 0.0 for name in trial.run.config.objectives] for row in rows]
    return Course(
        norms=[_norm(row) for row in rows],
        kls=[sum(own) / len(own) for own in kls],
        rolled_back=[row["step"] for row in rows if row[keys.STATUS] == "rolled_back"],
        finite=_finite(trial),
        rounds=len(rows),
    )


def _norm(row: Mapping[str, Any]) -> float:
    norm = number(row, keys.GRAD_NORM)
    return 0.0 if norm is None else norm if norm < float("inf") else float("inf")


def _finite(trial: Trial) -> bool:
    """Whether the last state is finite: a run that a broken weight has ended saved none of it."""
    newest, _ = trial.run.checkpoints.latest(finite=True)
    broken = isinstance(trial.error, optim.BrokenUpdate)
    return not broken and newest is not None and newest.step == trial.run.last_step()
