"""Prepares a run to start or resume: builds or reads back everything of a `TrainState` before its next step."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from grpo_nb import optim, rules
from grpo_nb.beta_control import BetaState
from grpo_nb.losses import Moments
from grpo_nb.policy import anatomy
from grpo_nb.policy.model import Policy
from grpo_nb.preflight import dependencies, requirements
from grpo_nb.printable import clean_logger
from grpo_nb.ranks.leader import ALONE, Ranks
from grpo_nb.rollout import ChosenEngine, EagerEngine, Engine, VLLMEngine
from grpo_nb.rollout.selfcheck import check_model
from grpo_nb.rules.finding import Steps, spans
from grpo_nb.run import settings
from grpo_nb.run.checkpoints import Checkpoint, Checkpoints
from grpo_nb.run.dependencies_file import CHANGE, OPTIMIZER
from grpo_nb.run.knob_file import KnobSnapshot
from grpo_nb.run.lock import RunLock
from grpo_nb.run.run import Run, RunError
from grpo_nb.run.sft_result import without_sft
from grpo_nb.storage.documents import State
from grpo_nb.tasks import Task, load_tasks
from grpo_nb.training import ahead, guards, numerics, parts, spread
from grpo_nb.training.numerics import Numerics
from grpo_nb.training.objectives import Rewards, load_objectives
from grpo_nb.training.recovery import Recovery
from grpo_nb.training.state import (
    TrainState,
    draw_prompts,
    environment_info,
    forget_gradients,
    judged_by,
    save,
)

logger = clean_logger(__name__)


@dataclass(frozen=True)
class Given:
    """Parts that a caller passes in place of those that the settings name."""

    policy: Policy | None = None
    tasks: Mapping[str, Task] | None = None
    rewards: Rewards | None = None
    engine: Engine | str | None = None
    accept_changed: Collection[str] = ()
    """Kinds of content that may differ from the run's start."""
    ranks: Ranks = ALONE
    """Ranks that compute the steps."""


def prepare(run: Run, goal: int, given: Given, lock: RunLock) -> TrainState:
    """Load or resume: the policy, its reference, the optimizer, each objective's data and beta.

    Raises:
        ConfigError: a missing solver, too little data, a prompt or completion that does not fit; before any work.
        ModelError: a policy given was left within an update, and there is no checkpoint to restore it from.
        PolicyTaken: a policy given belongs to another training, which is still open.
        RunError: the run's checkpoints do not fit its model or its settings.
        DependencyChanged: data, weights or another dependency differs from the run's start.
    """
    dependencies.accepted_kinds(given.accept_changed)
    config, (newest, warm) = run.config, _saved(run, given.accept_changed)
    requirements.check_combiner(config)
    run.doing("reading the tasks")
    objectives = load_objectives(run, load_tasks(config, run.path, given.tasks), given.rewards or {})
    policy = spread.policy_for(run, given.policy, given.ranks)
    policy.ownership.claim(lock)
    policy.settle()
    policy.set_date(run.started)
    run.doing("comparing data and weights with those that the run was made with")
    by_name = {name: objective.rubric.task for name, objective in objectives.items()}
    examples = {name: objective.examples for name, objective in objectives.items()}
    found = dependencies.of_policy(policy) | dependencies.of_training(config, by_name, examples)
    dependencies.check(run, found, given.accept_changed, "train")
    run.doing("checking the model")
    requirements.check_system_prompts(config, policy)
    chosen, chosen_engine = _choices(run, policy, newest, given.engine)
    check_model(policy, draws=isinstance(chosen_engine.engine, EagerEngine))
    if isinstance(chosen_engine.engine, VLLMEngine):
        caps = config.sampling.max_prompt_length + config.sampling.max_completion_length
        chosen_engine.engine.check(policy, min(caps, policy.context))
    rate, decay = config.algorithm.learning_rate, config.algorithm.weight_decay
    optimizer = optim.adamw(policy.parameters_by_name(), rate, decay, together=chosen.passes == "flat")
    forget_gradients(policy)
    state = TrainState(run, policy, optimizer, chosen_engine, objectives, run.knobs.snapshot(), goal, numerics=chosen)
    state.ranks = given.ranks
    run.doing("checking the prompts")
    requirements.check_examples(config, examples, policy.context, state.encode)
    run.doing("beginning at step 0" if newest is None else f"going back to step {newest.step}")
    if newest is None:
        _start(state, warm)
    else:
        _restore(state, newest)
    state.history.without_sft = without_sft(run)
    _log_unused_settings(state)
    return state


def _choices(
    run: Run, policy: Policy, newest: Checkpoint | None, given: Engine | str | None
) -> tuple[Numerics, ChosenEngine]:
    """Numerical choices of the run, made now or when it started, and its engine."""
    if newest is None:
        return numerics.begin(run, policy, given)
    return numerics.resume(run, policy, numerics.stored(run, newest.state()), given)


def newest_valid(run: Run, checkpoints: Checkpoints, accept_changed: Collection[str]) -> Checkpoint | None:
    """The newest checkpoint that verifies, made with the run's settings; newer ones that do not verify are logged.

    Where `accept_changed` has `optimizer`, one that lacks the optimizer's moments is taken as well, which is logged.

    Raises:
        RunError: config.json was edited after it was made.
        DependencyChanged: it lacks the moments, and that was not accepted.
    """
    checkpoints.sweep()
    dispensable = {OPTIMIZER} & dependencies.accepted_kinds(accept_changed)
    newest, damaged = checkpoints.latest(finite=True, dispensable=dispensable)
    if newest is None or (OPTIMIZER not in newest.names() and not dispensable):
        _refuse_thinned(run, checkpoints)
    for path, reason in damaged:
        run.log_event("checkpoint_damaged", path=path.name, reason=reason)
        logger.warning("checkpoint %s is damaged (%s): an older one is used", path.name, reason)
    if newest is not None:
        settings.refuse_edited(run.path, run.config, newest)
        if OPTIMIZER not in newest.names():
            _log_new_moments(run, newest)
    return newest


def _refuse_thinned(run: Run, checkpoints: Checkpoints) -> None:
    """Refuse a run whose checkpoints lack the optimizer's moments alone."""
    thinned, _ = checkpoints.latest(finite=True, dispensable={OPTIMIZER})
    if thinned is not None and OPTIMIZER not in thinned.names():
        raise dependencies.DependencyChanged(
            f"{thinned.path} has no {OPTIMIZER}.safetensors, and no other checkpoint can be resumed exactly: without "
            "Adam's moments the next steps differ from those of an uninterrupted run. Restore the file from a copy, or "
            f'begin the moments anew, which is logged: in Python accept_changed={{"{OPTIMIZER}"}}, on the '
            f"command line --accept-changed {OPTIMIZER}",
            [OPTIMIZER],
        )


def _log_new_moments(run: Run, newest: Checkpoint) -> None:
    message = f"{newest.path.name} lacks {OPTIMIZER}.safetensors: Adam's moments begin anew after step {newest.step}"
    run.log_event(
        CHANGE, step=newest.step, dependency=OPTIMIZER, key=f"{OPTIMIZER}/{newest.path.name}", message=message
    )
    logger.warning("accepted: %s", message)


def _saved(run: Run, accept_changed: Collection[str]) -> tuple[Checkpoint | None, Checkpoint | None]:
    """Checkpoint to resume from: (GRPO's newest valid one, None); before GRPO has one, (None, SFT's result or None)."""
    newest = newest_valid(run, run.checkpoints, accept_changed)
    if newest is not None:
        return newest, None
    if (last := run.last_step()) is not None and last > 0:
        raise RunError(
            f"{run.path} has metrics up to step {last} but no valid checkpoint, so it cannot continue; "
            "restore its checkpoints folder or begin a new run"
        )
    warm, damaged = run.sft_checkpoints.latest(finite=True, dispensable={OPTIMIZER})  # GRPO begins its own moments
    if damaged:
        raise RunError(f"the SFT result in {run.path} is damaged ({damaged[0][1]}); run SFT again before GRPO")
    if warm is not None:
        settings.refuse_edited(run.path, run.config, warm)
    return None, warm


def _restore(state: TrainState, newest: Checkpoint) -> None:
    """Restore the reference from checkpoint 0, where GRPO started, and the rest from the newest valid checkpoint."""
    run, policy = state.run, state.policy
    start = load_reference(run, policy)
    state.origin = start.state()
    parts.load_state_dict(policy, state.optimizer, newest)
    parts.others_take_up(policy, state.optimizer, state.ranks, run, parts.Places(newest, start))
    stored = newest.state("step", "betas", "knobs", "judged_by")
    state.knobs = _knobs_of(newest, stored, state.knobs)
    load_controllers(state, newest, stored)
    state.saved = state.step
    _note_other_judges(state, stored["judged_by"])
    numerics.log_changes(run, state.step, numerics.stored(run, stored), state.numerics, state.chosen_engine.reason)
    run.rewind(state.step)
    _restore_rollouts(state, newest, stored)
    _look_back(state)
    run.log_event("resume", step=state.step, goal=state.goal, **environment_info(policy) | _computes(state))


def load_reference(run: Run, policy: Policy) -> Checkpoint:
    """Give the policy the weights of checkpoint 0, which is returned, and freeze them as its reference.

    Raises:
        RunError: the checkpoint is missing or damaged.
    """
    start = _reference(run)
    policy.load_state(parts.saved(policy, start, "policy"))
    policy.freeze_reference()
    return start


def load_controllers(state: TrainState, checkpoint: Checkpoint, stored: State) -> None:
    """Step, beta and reward moments of each objective, and recovery from rollbacks, from the checkpoint's JSON state.

    Raises:
        RunError: an objective has no beta there.
    """
    state.step = stored["step"]
    state.recovery = Recovery.from_dict(stored.get("recovery", {}))
    for name, objective in state.objectives.items():
        if name not in stored["betas"]:
            raise RunError(f"{checkpoint.path} has no beta of '{name}'; restore the checkpoint from a copy")
        objective.beta = BetaState.from_dict(stored["betas"][name])
        objective.moments = Moments.from_dict(stored.get("reward_moments", {}).get(name, {}))


def _restore_rollouts(state: TrainState, newest: Checkpoint, stored: State) -> None:
    """Restore the completions that wait for the next step; skip them where its prompts have changed.

    Raises:
        RunError: they are damaged.
    """
    if not state.config.rollout.steps_off_policy or "rollouts" not in stored:
        return
    group, words = state.config.batch.group_size, len(anatomy.embedding(state.policy.model))
    try:
        found = ahead.restored(stored["rollouts"], newest.tensors(ahead.FILE), group, words)
        guards.check_rollouts(found.rollouts, state.policy.stop_token_ids, state.config.guards.mask_bad_rows)
    except (ValueError, guards.TrainingError) as error:
        raise RunError(f"{newest.path} is broken: {ahead.FILE}.safetensors: {error}; restore it from a copy") from None
    prompts = draw_prompts(state, state.step + 1)
    asked = [state.encode(drawn.objective, drawn.example) for drawn in prompts]
    if found.plan.step != state.step + 1 or asked != found.rollouts.prompt_ids:
        state.run.log_event("rollouts_given_up", step=state.step, reason="other prompts")
        return
    state.ahead.keep(replace(found, rollouts=replace(found.rollouts, prompts=prompts)))


def _knobs_of(newest: Checkpoint, stored: State, now: KnobSnapshot) -> KnobSnapshot:
    """The knobs of a checkpoint.

    Raises:
        RunError: it lacks some that the run has now.
    """
    knobs = KnobSnapshot(**stored["knobs"])
    for has in (knobs.values, knobs.modes, knobs.by, knobs.at):
        if missing := sorted(now.values.keys() - has.keys()):
            raise RunError(f"{newest.path} has no knob '{missing[0]}'; restore the checkpoint from a copy")
    return knobs


def _note_other_judges(state: TrainState, before: dict[str, list[str]]) -> None:
    now = judged_by(state)
    if now != before:
        state.run.log_event("rewards_changed", step=state.step, before=before, now=now)
        logger.warning("this run was judged by %s until step %d, from here on by %s", before, state.step, now)


def _log_unused_settings(state: TrainState) -> None:
    for message in state.config.unused_settings():
        state.run.log_event("idle_setting", step=state.step, message=message)
        logger.warning(message)


def _reference(run: Run) -> Checkpoint:
    """Checkpoint 0: the weights with which GRPO started.

    Raises:
        RunError: it is missing or damaged.
    """
    try:
        return run.checkpoints.load(0, dispensable={OPTIMIZER})  # before the first update it has no moments
    except RunError as error:
        raise RunError(
            f"{str(error).partition(';')[0]}; it holds the weights GRPO started from, which KL is measured against, so "
            "no other can stand in for it: restore checkpoints/000000 from a copy, or begin a new run folder"
        ) from error


def _look_back(state: TrainState) -> None:
    """Read the log once, a row at a time, for the guards.

    Steps that were trained but are no longer in it are no reason to stop, but curves and rules lack them.
    """
    steps = Steps()
    for row in state.run.oldest_first("metrics"):
        steps.add(row)
        state.history.append(row)
    rules.check(state.history, state.config)
    if missing := steps.missing(state.step):
        state.run.log_event("log_hole", step=state.step, file="metrics.jsonl", missing=missing)
        logger.warning("metrics.jsonl of %s lacks step %s of %d", state.run.path, spans(missing), state.step)


def _start(state: TrainState, warm: Checkpoint | None) -> None:
    """Reference and policy from the result of SFT, or from the model as loaded."""
    run, policy = state.run, state.policy
    if warm is None:
        policy.refuse_interrupted()
    else:
        policy.load_state(parts.saved(policy, warm, "policy"))
    policy.freeze_reference()
    parts.others_take_up(policy, state.optimizer, state.ranks, run, parts.Places(None, warm))
    origin = {"goal": state.goal, "from_sft": warm is not None, "geometry": run.config.geometry}
    run.log_event("start", step=0, **origin, **environment_info(policy) | _computes(state))
    _log_missing_sft(run, 0 if warm is None else warm.step)
    if state.chosen_engine.reason and run.config.rollout.engine != "auto":
        asked, now = run.config.rollout.engine, state.chosen_engine
        logger.warning("rollout.engine='%s' cannot serve this model: '%s' draws (%s)", asked, now.name, now.reason)
    save(state)


def _log_missing_sft(run: Run, done: int) -> None:
    wanted = run.config.sft.steps
    if done >= wanted:
        return
    kind, origin, answers = "sft_not_run", "the model as loaded, without SFT", "may be cut, unreadable or all alike"
    if done:
        kind, origin, answers = "sft_unfinished", f"step {done} of its SFT", "may not have the asked form yet"
    message = (
        f"{run.name} trains from {origin}, although sft.steps is {wanted}: its answers {answers}. In a new run, call "
        "sft(run) before grpo(run), or set sft.steps=0 if no SFT is wanted"
    )
    run.log_event(kind, step=0, sft_steps=wanted, message=message)
    logger.warning(message)


def _computes(state: TrainState) -> dict[str, object]:
    """The choices that bits depend on, for the log."""
    reason = {"engine_reason": state.chosen_engine.reason} if state.chosen_engine.reason else {}
    ranks = {"ranks": state.ranks.size} if state.ranks.size > 1 else {}
    server = {"server": state.engine.about} if isinstance(state.engine, VLLMEngine) else {}
    chosen = state.numerics.model_dump(exclude={"threads"} if state.numerics.threads is None else None)
    return chosen | reason | ranks | server
