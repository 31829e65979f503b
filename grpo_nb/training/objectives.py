"""An objective ready to train: its settings, its prompts, and everything that scores its answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grpo_nb.beta_control import BetaState
from grpo_nb.config import ConfigError, ObjectiveConfig
from grpo_nb.judge import FILE as JUDGE_FILE
from grpo_nb.judge import Judge, Tally
from grpo_nb.losses import Moments
from grpo_nb.preflight.requirements import check_ids
from grpo_nb.rewards.context import Notes
from grpo_nb.rewards.rubric import RewardFunction, Rubric
from grpo_nb.rewards.scoring import check_arguments
from grpo_nb.run.run import Run
from grpo_nb.storage.journal import Journal
from grpo_nb.suggest import did_you_mean
from grpo_nb.tasks import Task, read_examples
from grpo_nb.types import Example

Functions = Sequence[RewardFunction | tuple[RewardFunction, float]]
Rewards = Mapping[str, Functions]


@dataclass
class Objective:
    """One objective ready to train: its settings, its rubric, its prompts, its beta."""

    name: str
    config: ObjectiveConfig
    rubric: Rubric
    examples: list[Example]
    beta: BetaState
    moments: Moments = field(default_factory=Moments)
    """Moments of the rewards seen, where they are normalised."""
    judge: Judge | None = None
    """The judge; also a function of the rubric, kept by itself for its tally of a step."""
    tally: Tally | None = None
    """Tally of the judge in the newest step."""
    notes: Notes = field(default_factory=lambda: Notes(0))
    """Notes that reward functions logged in the newest step."""


def load_objectives(run: Run, tasks: Mapping[str, Task], rewards: Rewards) -> dict[str, Objective]:
    """Every objective of the run, in the order of its settings.

    Raises:
        ConfigError: rewards for an objective that does not exist, or a judge without the means to send requests.
        DataError: an example id that is used twice, or an example without the evidence that the judge needs.
        RewardError: a reward function that could not be called.
    """
    config = run.config
    if not isinstance(rewards, Mapping):
        raise ConfigError(
            f"rewards are a {type(rewards).__name__}; needs functions by objective, e.g. "
            f"{{{next(iter(config.objectives))!r}: [f]}}"
        )
    if strangers := rewards.keys() - config.objectives.keys():
        raise ConfigError(
            f"rewards given for {sorted(strangers)}; the objectives are {sorted(config.objectives)}"
            + did_you_mean(min(strangers), config.objectives)
        )
    objectives = {
        name: _objective(run, name, objective, tasks[name], rewards.get(name, ()))
        for name, objective in config.objectives.items()
    }
    check_ids({name: objective.examples for name, objective in objectives.items()})
    return objectives


def _objective(
    run: Run,
    name: str,
    config: ObjectiveConfig,
    task: Task,
    functions: Functions,
) -> Objective:
    examples, judge = read_examples(task, "train"), None
    if config.judge is not None:
        judge = Judge(name, config.task, config.judge, Journal(run.path / JUDGE_FILE, trains=run.trains_here))
        judge.check(examples)
        functions = [*functions, (judge, config.judge.weight)]
    rubric = Rubric(task, functions)
    check_arguments(rubric, examples)
    return Objective(
        name=name,
        config=config,
        rubric=rubric,
        examples=examples,
        beta=BetaState(value=config.beta, mode="auto" if config.controlled else "manual"),
        judge=judge,
    )
