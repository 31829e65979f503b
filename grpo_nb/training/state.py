"""What a GRPO run holds in memory while it trains: prepared from its directory, saved back into it."""

import os
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from grpo_nb import fingerprint, optim, rules, seeding
from grpo_nb.config import Config
from grpo_nb.control import BetaState
from grpo_nb.evaluation import pareto
from grpo_nb.losses import Moments
from grpo_nb.losses.tokens import FAR
from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.preflight import dependencies, refusals
from grpo_nb.rollout import EagerEngine, Engine
from grpo_nb.rollout.selfcheck import check_model
from grpo_nb.rules.finding import Finding, Steps, spans
from grpo_nb.rules.history import History
from grpo_nb.run import settings
from grpo_nb.run.checkpoints import Checkpoint, Checkpoints
from grpo_nb.run.knobs import KnobSnapshot
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage.documents import State
from grpo_nb.tasks import Task, load_tasks
from grpo_nb.terminal import clean_logger
from grpo_nb.training.objectives import Objective, load_objectives
from grpo_nb.training.objectives import Rewards as Rewards
from grpo_nb.types import Example, Experience, Rollouts, Score

log = clean_logger(__name__)

TOKENS_LOGGED = 128
"""Tokens of a logged completion that samples.jsonl tells one by one: some 25 bytes each."""


@dataclass(frozen=True)
class Drawn:
    """A training prompt of this step and the objective it belongs to."""

    objective: str
    example: Example


@dataclass
class Training:
    """The whole changing state of a run; everything else is a function of the configuration."""

    run: Run
    policy: Policy
    optimizer: torch.optim.AdamW
    engine: Engine
    objectives: dict[str, Objective]
    knobs: KnobSnapshot
    """The knobs as the newest step used them; what is turned later is logged as a turn."""
    goal: int
    """Steps to reach."""
    step: int = 0
    """Steps done."""
    saved: int = -1
    """The step of the newest checkpoint; -1 before the first."""
    torn: bool = False
    """The weights are between two step boundaries, so they must not be saved."""
    edited: list[str] = field(default_factory=list)
    """Files of the package edited since they were loaded, as last seen."""
    replaced: set[str] = field(default_factory=set)
    """Files that the run was loaded from and that others have replaced since, once logged."""
    prompt_cache: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Token ids of a prompt by (objective, example id)."""
    quick_pools: dict[str, list[Example]] = field(default_factory=dict)
    """What quick evaluation asks, by objective; made at the first one."""
    history: History = field(init=False)
    """What the guards look back on."""
    ends: list[Finding] = field(default_factory=list)
    """Why the run ends at this step boundary, saved: what the guards found in the newest row."""

    def __post_init__(self) -> None:
        self.history = History(self.config)

    @property
    def config(self) -> Config:
        return self.run.config

    def encode(self, objective: str, example: Example) -> list[int]:
        key = (objective, example.id)
        if key not in self.prompt_cache:
            self.prompt_cache[key] = self.policy.encode(example.prompt)
        return self.prompt_cache[key]


def prepare(
    run: Run,
    engine: Engine,
    *,
    policy: Policy | None = None,
    tasks: Mapping[str, Task] | None = None,
    rewards: Rewards | None = None,
    goal: int | None = None,
    accept_changed: Collection[str] = (),
) -> Training:
    """Load or resume: the policy, its reference, the optimizer, each objective's data and beta.

    Raises:
        ConfigError: a missing solver, too little data, a prompt or completion that does not fit; before any work.
        RunError: the run's checkpoints do not fit its model or its settings.
        DependencyChanged: data, weights or another thing it depends on is not what it was made with.
    """
    dependencies.accepted_kinds(accept_changed)
    config, (newest, warm) = run.config, _saved(run)
    refusals.check_combiner(config)
    objectives = load_objectives(run, load_tasks(config, run.path, tasks), rewards or {})
    policy = policy or load_policy(config.model, config.run.seed)
    policy.set_date(run.started)
    check_model(policy, draws=isinstance(engine, EagerEngine))
    optimizer = optim.adamw(policy.parameters_by_name(), config.algorithm.learning_rate, config.algorithm.weight_decay)
    forget_gradients(policy)
    goal = config.run.steps if goal is None else goal
    training = Training(run, policy, optimizer, engine, objectives, run.knobs.snapshot(), goal)
    examples = {name: objective.examples for name, objective in objectives.items()}
    refusals.check_examples(config, examples, policy.context, training.encode)
    by_name = {name: objective.rubric.task for name, objective in objectives.items()}
    found = dependencies.of_policy(policy) | dependencies.of_training(config, by_name, examples)
    dependencies.check(run, found, accept_changed, "train")
    if newest is None:
        _start(training, warm)
    else:
        _restore(training, newest)
    _note_idle_settings(training)
    return training


def save(training: Training) -> Path:
    """Write a checkpoint of this step boundary and retire the oldest ones, but for those that are worth keeping."""
    state = {
        "step": training.step,
        "betas": {name: o.beta.to_dict() for name, o in training.objectives.items()},
        "reward_moments": {name: o.moments.to_dict() for name, o in training.objectives.items()},
        "config": settings.plain(training.config),
        "knobs": asdict(training.knobs),
        "judged_by": _judged_by(training),
        "fingerprint": fingerprint.fingerprint(),
    }
    path = training.run.checkpoints.save(training.step, learned(training.policy, training.optimizer), state)
    always = (0, *pareto.worth_keeping(training.run))
    training.run.checkpoints.prune(training.config.run.keep_checkpoints, always)
    training.run.log_event("checkpoint", step=training.step, path=path.name)
    training.saved = training.step
    return path


def learned(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint: what the policy has learnt, and the optimizer's memory of it."""
    return {"policy": policy.state(), "optimizer": optim.state_tensors(policy.parameters_by_name(), optimizer)}


def forget_gradients(policy: Policy) -> None:
    """Drop what a step that was broken off left in a policy that is handed over."""
    for parameter in policy.parameters_by_name().values():
        parameter.grad = None


def relearn(policy: Policy, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Undo `learned`, bit for bit."""
    policy.load_state(checkpoint.tensors("policy"))
    memory = policy.trained_of(checkpoint.tensors("optimizer"))
    optim.load_state_tensors(policy.parameters_by_name(), optimizer, memory)


def newest_whole(run: Run, checkpoints: Checkpoints) -> Checkpoint | None:
    """The newest checkpoint that verifies, made with the run's settings; newer ones that do not verify are logged.

    Raises:
        RunError: config.json was edited after it was made.
    """
    checkpoints.sweep()
    newest, damaged = checkpoints.latest(finite=True)
    for path, reason in damaged:
        run.log_event("checkpoint_damaged", path=path.name, reason=reason)
        log.warning("checkpoint %s is damaged (%s): an older one is used", path.name, reason)
    if newest is not None:
        settings.refuse_edited(run.path, run.config, newest)
    return newest


@contextmanager
def deterministic(config: Config, device: torch.device) -> Iterator[None]:
    """Only algorithms that give the same bits each time, where asked for (`auto`: on CPU)."""
    wanted = config.run.deterministic
    on = device.type == "cpu" if wanted == "auto" else wanted
    before = torch.are_deterministic_algorithms_enabled()
    if on and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def surroundings(policy: Policy) -> dict[str, object]:
    """What else the bits depend on: versions, device, threads; goes into the log at every start."""
    packages = {name: version(name) for name in ("torch", "transformers", "peft")}
    return {
        "fingerprint": fingerprint.fingerprint(),
        "python": platform.python_version(),
        **packages,
        "device": str(policy.device),
        "threads": torch.get_num_threads(),
    }


def draw_prompts(training: Training, step: int) -> list[Drawn]:
    """The prompts of 1-based `step`: the same number of every objective, objective by objective."""
    count, seed = training.config.prompts_per_objective, training.config.run.seed
    return [
        Drawn(name, objective.examples[i])
        for name, objective in training.objectives.items()
        for i in draw(len(objective.examples), count, step, seed, f"prompts/{name}")
    ]


def draw(n: int, count: int, step: int, seed: int, stream: str) -> list[int]:
    """`count` of `n` indices for 1-based `step`: consecutive in an endless row of seeded permutations."""
    positions = range((step - 1) * count, step * count)
    orders = {epoch: seeding.permutation(n, seed, epoch, stream) for epoch in {p // n for p in positions}}
    return [orders[p // n][p % n] for p in positions]


def sample_rows(
    training: Training,
    step: int,
    drawn_P: Sequence[Drawn],
    rollouts: Rollouts,
    scores: Sequence[Score],
    experience: Experience,
) -> list[dict[str, object]]:
    """Rows for samples.jsonl: the first completions of each objective's first prompt."""
    each = training.config.run.samples_per_step // len(training.objectives)
    count, group = training.config.prompts_per_objective, rollouts.group_size
    first_rows = [p * count * group for p in range(len(training.objectives))]
    return [
        {
            "step": step,
            "objective": experience.objectives[i],
            "example": drawn_P[i // group].example.id,
            "completion_index": i % group,
            "prompt": training.policy.decode(list(experience.prompt_ids[i])),
            "completion": rollouts.texts[i],
            "target": drawn_P[i // group].example.target,
            "reward": scores[i].value,
            "label": scores[i].label,
            "parts": dict(scores[i].parts),
            "cause": scores[i].cause,
            "advantage": experience.advantage_of(i),
            "stop_reason": rollouts.stop_reasons[i],
            "tokens": len(rollouts.completion_ids[i]),
            "group_size": group,
            **training.objectives[experience.objectives[i]].notes.sample(i - first),
            **_token_columns(training.policy, experience, i),
        }
        for first in first_rows
        for i in range(first, first + min(each, group))
    ]


def _token_columns(policy: Policy, experience: Experience, row: int) -> dict[str, object]:
    """Text and log-probs, in nats, of a completion's first tokens; None where the step had no need of them."""
    ids = experience.completion_ids[row][:TOKENS_LOGGED]

    def numbers(table: Tensor | None) -> list[float] | None:
        return None if table is None else [round(v, 4) for v in table[row, : len(ids)].clamp(min=-FAR).tolist()]

    known = experience.old_known or bool(experience.kept[row])  # else no forward pass has seen this row
    return {
        "token_texts": policy.pieces(ids),
        "logprobs_old": numbers(experience.logprobs_old) if known else None,
        "logprobs_reference": numbers(experience.logprobs_reference),
    }


def _saved(run: Run) -> tuple[Checkpoint | None, Checkpoint | None]:
    """Where to go on from: GRPO's newest whole checkpoint; before there is one, the result of SFT."""
    newest = newest_whole(run, run.checkpoints)
    if newest is not None:
        return newest, None
    if (last := run.last_step()) is not None and last > 0:
        raise RunError(
            f"{run.path} has metrics up to step {last} but no checkpoint that verifies, so it cannot go on; "
            "restore its checkpoints folder or begin a new run"
        )
    warm, damaged = run.sft_checkpoints.latest(finite=True)
    if damaged:
        raise RunError(f"the SFT result in {run.path} is damaged ({damaged[0][1]}); run SFT again before GRPO")
    if warm is not None:
        settings.refuse_edited(run.path, run.config, warm)
    return None, warm


def _restore(training: Training, newest: Checkpoint) -> None:
    """Reference from where GRPO started (checkpoint 0), everything else from the newest whole checkpoint."""
    run, policy = training.run, training.policy
    policy.load_state(_reference(run).tensors("policy"))
    policy.freeze_reference()
    relearn(policy, training.optimizer, newest)
    state = newest.state("step", "betas", "knobs", "judged_by")
    training.step = training.saved = state["step"]
    training.knobs = _knobs_of(newest, state, training.knobs)
    for name, objective in training.objectives.items():
        if name not in state["betas"]:
            raise RunError(f"{newest.path} has no beta of '{name}'; restore the checkpoint from a copy")
        objective.beta = BetaState.from_dict(state["betas"][name])
        objective.moments = Moments.from_dict(state.get("reward_moments", {}).get(name, {}))
    _note_other_judges(training, state["judged_by"])
    run.rewind(training.step)
    _look_back(training)
    run.log_event("resume", step=training.step, goal=training.goal, **surroundings(policy))


def _knobs_of(newest: Checkpoint, state: State, now: KnobSnapshot) -> KnobSnapshot:
    """The knobs of a checkpoint.

    Raises:
        RunError: it lacks some that the run has now.
    """
    knobs = KnobSnapshot(**state["knobs"])  # type: ignore[arg-type]
    for has in (knobs.values, knobs.modes, knobs.by, knobs.at):
        if missing := sorted(now.values.keys() - has.keys()):
            raise RunError(f"{newest.path} has no knob '{missing[0]}'; restore the checkpoint from a copy")
    return knobs


def _judged_by(training: Training) -> dict[str, list[str]]:
    """Task and reward functions of each objective, by name: they live in the caller's code, not in the run."""
    return {
        name: [o.rubric.task.name, *(f"{f.weight:g} x {f.name}" for f in o.rubric.functions)]
        for name, o in training.objectives.items()
    }


def _note_other_judges(training: Training, before: dict[str, list[str]]) -> None:
    now = _judged_by(training)
    if now != before:
        training.run.log_event("rewards_changed", step=training.step, before=before, now=now)
        log.warning("this run was judged by %s until step %d, from here on by %s", before, training.step, now)


def _note_idle_settings(training: Training) -> None:
    for message in training.config.idle():
        training.run.log_event("idle_setting", step=training.step, message=message)
        log.warning(message)


def _reference(run: Run) -> Checkpoint:
    """Checkpoint 0: the weights GRPO started from.

    Raises:
        RunError: it is missing or damaged.
    """
    try:
        return run.checkpoints.load(0)
    except RunError as error:
        raise RunError(
            f"{str(error).partition(';')[0]}; it holds the weights GRPO started from, which KL is measured against, so "
            "no other can stand in for it: restore checkpoints/000000 from a copy, or begin a new run folder"
        ) from error


def _look_back(training: Training) -> None:
    """Read the log once, a row at a time, for the guards.

    Steps that were trained but are no longer in it are no reason to stop, but curves and rules lack them.
    """
    steps = Steps()
    for row in training.run.oldest_first("metrics"):
        steps.add(row)
        training.history.append(row)
    rules.check(training.history, training.config)
    if missing := steps.missing(training.step):
        training.run.log_event("log_hole", step=training.step, file="metrics.jsonl", missing=missing)
        log.warning("metrics.jsonl of %s lacks step %s of %d", training.run.path, spans(missing), training.step)


def _start(training: Training, warm: Checkpoint | None) -> None:
    """Reference and policy from the result of SFT, or from the model as loaded."""
    run, policy = training.run, training.policy
    if warm is not None:
        policy.load_state(warm.tensors("policy"))
    policy.freeze_reference()
    origin = {"goal": training.goal, "from_sft": warm is not None, "geometry": run.config.geometry}
    run.log_event("start", step=0, **origin, **surroundings(policy))
    save(training)
