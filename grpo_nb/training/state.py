"""State of a GRPO run while it trains, and the part of it that a checkpoint keeps."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from grpo_nb import fingerprint, seeding
from grpo_nb.config import Config
from grpo_nb.evaluation import pareto
from grpo_nb.evaluation.compare import Growing
from grpo_nb.policy.model import Policy
from grpo_nb.printable import clean_logger
from grpo_nb.ranks.leader import ALONE, Ranks
from grpo_nb.rollout import ChosenEngine, Engine
from grpo_nb.rules.finding import Finding
from grpo_nb.rules.history import History
from grpo_nb.run import settings
from grpo_nb.run.knob_file import KnobSnapshot
from grpo_nb.run.run import Run
from grpo_nb.training import ahead, parts
from grpo_nb.training.ahead import Ahead
from grpo_nb.training.numerics import Numerics
from grpo_nb.training.objectives import Objective
from grpo_nb.training.recovery import Recovery
from grpo_nb.training.snapshot import Snapshot
from grpo_nb.types import Example, SampledPrompt

logger = clean_logger(__name__)


@dataclass
class TrainState:
    """Everything of a run that changes while it trains; the rest is a function of the configuration."""

    run: Run
    policy: Policy
    optimizer: torch.optim.AdamW
    chosen_engine: ChosenEngine
    """Engine that samples completions, with its name."""
    objectives: dict[str, Objective]
    knobs: KnobSnapshot
    """The knobs as the newest step used them; later changes are logged as changes."""
    goal: int
    """Steps to reach."""
    step: int = 0
    """Steps done."""
    saved: int = -1
    """The step of the newest checkpoint; -1 before the first."""
    mid_update: bool = False
    """The weights are between two step boundaries, so they must not be saved."""
    weights_moved: bool = False
    """An optimizer step of the unfinished step was taken."""
    settled: bool = False
    """The updates of the unfinished step are kept or undone, and counted in `recovery`: it is not repeated."""
    numerics: Numerics = field(default_factory=Numerics)
    """Numerical choices: made when the run starts, since they change bits, and kept from then on."""
    ranks: Ranks = ALONE
    """Ranks that compute the steps."""
    recovery: Recovery = field(default_factory=Recovery)
    """State after rollbacks: factor of the learning rate, sampling stream, count."""
    snapshot: Snapshot = field(init=False)
    """The last good state, for the next rollback."""
    edited: list[str] = field(default_factory=list)
    """Files of the package edited since they were loaded, as last seen."""
    replaced: set[str] = field(default_factory=set)
    """Files that the run was loaded from and that others have replaced since, once logged."""
    logged_dropped: bool = False
    """Whether it was logged that metrics of reward functions were left out."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """The JSON state of checkpoint 0."""
    prompt_cache: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Token ids of a prompt by (objective, example id)."""
    quick_pools: dict[str, list[Example]] = field(default_factory=dict)
    """Prompts of quick evaluation, by objective; built at the first one."""
    quick: Growing = field(init=False)
    """The results of quick evaluation."""
    history: History = field(init=False)
    """Rows and state that the guards compare with."""
    ahead: Ahead = field(default_factory=Ahead)
    """Completions that were sampled for the next step, one step off-policy."""
    ends: list[Finding] = field(default_factory=list)
    """Findings of the guards in the newest row that end the run at this step boundary, saved."""

    def __post_init__(self) -> None:
        self.history = History(self.config)
        self.quick = Growing(self.run, "test", "quick")
        self.snapshot = Snapshot(self.config.guards.snapshot == "host")

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def engine(self) -> Engine:
        return self.chosen_engine.engine

    def encode(self, objective: str, example: Example) -> list[int]:
        key = (objective, example.id)
        if key not in self.prompt_cache:
            self.prompt_cache[key] = self.policy.encode(example.prompt)
        return self.prompt_cache[key]


def save(state: TrainState) -> Path:
    """Write a checkpoint of this step boundary and retire the oldest ones, but for those that are worth keeping."""
    checkpoints = state.run.checkpoints
    stored = {
        "step": state.step,
        "betas": {name: o.beta.to_dict() for name, o in state.objectives.items()},
        "reward_moments": {name: o.moments.to_dict() for name, o in state.objectives.items()},
        "config": settings.plain(state.config),
        "knobs": state.knobs.to_dict(),
        "judged_by": judged_by(state),
        "numerics": state.numerics.model_dump(),
        "recovery": state.recovery.to_dict(),
        "fingerprint": fingerprint.fingerprint(),
    }
    if state.step == 0:
        state.origin = stored
    elif not checkpoints.holds(0):
        _save_origin(state)
    tensors = parts.state_dict(state.policy, state.optimizer, state.ranks)
    if (pending := state.ahead.stored(state.step + 1)) is not None:
        stored["rollouts"], tensors[ahead.FILE] = pending
    path = checkpoints.save(state.step, tensors, stored)
    always = (0, *pareto.steps_to_keep(state.run, state.quick.rows()))
    checkpoints.prune(state.config.run.keep_checkpoints, always, state.config.run.checkpoints_gib)
    state.quick.slim(checkpoints.steps())
    state.run.log_event("checkpoint", step=state.step, path=path.name)
    state.saved = state.step
    return path


def _save_origin(state: TrainState) -> None:
    """Write checkpoint 0 anew, bit for bit: somebody removed it, and without it the run could not be resumed."""
    weights = {"policy": parts.stored_reference(state.policy, state.ranks), "optimizer": {}}
    path = state.run.checkpoints.save(0, weights, state.origin)
    state.run.log_event("checkpoint_rewritten", step=state.step, path=path.name)
    logger.warning("%s was removed while the run trained; it is written again from memory", path)


def forget_gradients(policy: Policy) -> None:
    """Drop the gradients that an interrupted step left in a policy that is passed in."""
    policy.drop_gradients()


def environment_info(policy: Policy) -> dict[str, object]:
    """Versions, device and threads, which the bits depend on too; logged at every start."""
    packages = {name: version(name) for name in ("torch", "transformers", "peft")}
    return {
        "fingerprint": fingerprint.fingerprint(),
        "python": platform.python_version(),
        **packages,
        "device": str(policy.device),
        "threads": torch.get_num_threads(),
    }


def draw_prompts(state: TrainState, step: int) -> list[SampledPrompt]:
    """The prompts of 1-based `step`: the same number of every objective, objective by objective."""
    count, seed = state.config.prompts_per_objective, state.config.run.seed
    return [
        SampledPrompt(name, objective.examples[i])
        for name, objective in state.objectives.items()
        for i in draw(len(objective.examples), count, step, seed, f"prompts/{name}")
    ]


def draw(n: int, count: int, step: int, seed: int, stream: str) -> list[int]:
    """`count` of `n` indices for 1-based `step`: consecutive in an endless row of seeded permutations."""
    positions = range((step - 1) * count, step * count)
    orders = {epoch: seeding.permutation(n, seed, epoch, stream) for epoch in {p // n for p in positions}}
    return [orders[p // n][p % n] for p in positions]


def judged_by(state: TrainState) -> dict[str, list[str]]:
    """Task and reward functions of each objective, by name: they live in the caller's code, not in the run."""
    return {
        name: [o.rubric.task.name, *(f"{f.weight:g} x {f.name}" for f in o.rubric.functions)]
        for name, o in state.objectives.items()
    }
