"""GRPO: each step samples, scores, computes advantages, combines the objectives' gradients, guards and applies them.

`for step in grpo(run): ...` trains; breaking out of the loop saves. Nothing here needs a notebook.
"""

from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace

import torch

from grpo_nb import optim, trackers
from grpo_nb.losses import rounding
from grpo_nb.metrics import keys
from grpo_nb.policy import anatomy
from grpo_nb.policy.full_memory import full_memory
from grpo_nb.policy.model import Policy
from grpo_nb.policy.source import ModelError
from grpo_nb.rewards.context import MOST_METRICS
from grpo_nb.rollout import Engine, opened
from grpo_nb.rollout import engine as engine_of
from grpo_nb.run.checkpoints import Checkpoints
from grpo_nb.run.knob_file import KnobSnapshot
from grpo_nb.run.run import Run
from grpo_nb.storage.vocabulary import Command
from grpo_nb.tasks import Task, told
from grpo_nb.training import (
    commands,
    follower,
    gradient_check,
    guards,
    loop,
    memory_ladder,
    metrics,
    numerics,
    parts,
    quick_eval,
    resume,
    rollback,
    samples,
    sharded,
    texts,
)
from grpo_nb.training.experience import complete, compute_advantages, reward_matrix, sampler_logprobs, tied
from grpo_nb.training.gradient_report import gradient_report
from grpo_nb.training.guards import TrainingError
from grpo_nb.training.objectives import Rewards
from grpo_nb.training.overflow_report import explain_no_scores, overflow_row
from grpo_nb.training.plan import StepPlan, plan_step
from grpo_nb.training.sampling import sampled, score, verdicts
from grpo_nb.training.sharded import measure, objective_gradients
from grpo_nb.training.state import TrainState, save
from grpo_nb.training.switches import deterministic
from grpo_nb.types import Experience, Steps, StepStats

__all__ = ["TrainingError", "grpo", "grpo_step"]


def grpo(
    run: Run,
    *,
    policy: Policy | None = None,
    tasks: Mapping[str, Task] | None = None,
    rewards: Rewards | None = None,
    engine: Engine | str | None = None,
    steps: int | None = None,
    accept_changed: Collection[str] = (),
) -> Steps:
    """Train `run` to `steps` steps in total (default: `run.steps`), yielding each step; resumes automatically.

    `tasks` and `rewards` give an objective, by name, a task of your own or extra reward functions with TRL's
    signature `f(prompts, completions, **columns) -> list[float | None]`; on resuming, pass the same ones.
    `accept_changed` names what may have other content than the run was made with, e.g. `{"data"}` (see `dependencies`).
    `engine` takes the place of `rollout.engine`. A `policy` that is given belongs to this training until the generator
    ends or is closed.
    A checkpoint is saved every `run.checkpoint_every` steps and when the generator ends or is closed.
    In a script under torchrun, each rank calls it alike: rank 0's steps are yielded, the others work for it and yield
    nothing (see `grpo_nb.ranks`).

    Raises:
        ConfigError, RunError, ModelError, DataError: before any work.
        PolicyTaken: `policy` belongs to another training, which is still open; before any work.
        DependencyChanged: what the run depends on changed, and was not accepted; before any work.
        TrainingError: an invariant of the first step fails, three updates in a row were refused or undone, or a judge
            fails on everything or has used up its budget (the run is then saved).
    """
    goal = run.config.run.steps if steps is None else steps
    if engine not in (None, "auto"):
        engine_of(engine, run.config.rollout)
    given = resume.Given(policy, tasks, rewards, engine, accept_changed)
    if follower.follows(given):
        return
    trackers.check(run.config)
    with run.lock() as lock, sharded.leading(run, policy) as ranks:
        run.check_settings()
        run.knobs.request(Command.RUN)  # before the model loads: requests made meanwhile are kept
        state = resume.prepare(run, goal, replace(given, ranks=ranks), lock)
        sharded.begin(state)
        if lock.took_over:
            run.log_event("takeover", step=state.step, dead_owner=lock.took_over)
        with (
            deterministic(run.config, state.policy.device),
            opened(state.engine),
            numerics.computing(state.numerics),
            closing(state.ahead),
            closing(loop.walk(Grpo(state), lock)) as steps_taken,
        ):
            yield from steps_taken


def grpo_step(state: TrainState, knobs: KnobSnapshot) -> StepStats:
    """One step of GRPO (Shao et al. 2024, section 4.1), for one objective or several."""
    policy, plan, clock = state.policy, plan_step(state, knobs), metrics.Clock()
    with sampled(state, plan, clock) as drawn:  # 1. K completions per prompt, sampled from the policy
        rollouts = drawn.rollouts
        with clock("score"):  # 2. a reward per completion, but for the judges'
            score(state, drawn)
        with clock("reference"):  # 3. log-probs under the old policy, which sampled, and the reference policy
            measured = measure(policy, rollouts, plan)
        with clock("score"):
            scores = verdicts(state, drawn)  # with the judges'; None where there is no score
        state.mid_update = True  # the training state changes from here on: reward moments, weights, β
        batch = compute_advantages(state, plan, rollouts, measured, scores)  # 4. within each group
        updates: metrics.Updates = []
        with clock("train"):
            report = gradient_report(policy, batch, plan)
            expected = gradient_check.expected_gradient(policy, batch, plan)  # in step 1 alone
            for k, rows in enumerate(plan.updates(batch)):  # 5. a gradient per objective and mini-batch, combined
                gradient = objective_gradients(policy, batch, rows, plan, plan.generator(f"combine/{k}"))
                report |= gradient_check.compared(policy, batch, plan, expected) if k == 0 and not gradient.bad else {}
                batch = batch.without(gradient.bad)
                updates.append((gradient, apply(state, plan)))  # 6. clip or skip, optimizer step
    batch = complete(batch, plan, updates[0][0].seen if updates else None)
    row = step_row(state, plan, batch, updates) | report | conditions(state, batch) | drawn.row()
    with clock("guard"):  # 7. rollback of updates that broke the policy
        row |= rollback.settle(state, plan, batch, row) | overflow_row(state, plan, batch, row)
    if quick_eval.due(state.config, plan.step):
        with clock("eval"):  # 8. quick evaluation on held-out prompts
            row |= quick_eval.measure(state, plan.step)
    return finish(state, plan, batch, row | clock.row() | metrics.rank_row(state.ranks))  # 9. β controllers, log


class Grpo(loop.Stage):
    """GRPO as a stage: its complete state is a `TrainState`."""

    prefix = ""

    def __init__(self, state: TrainState) -> None:
        self.progress = self.state = state

    @property
    def checkpoints(self) -> Checkpoints:
        return self.state.run.checkpoints

    @property
    def policy(self) -> Policy:
        return self.state.policy

    @property
    def save_every(self) -> int:
        return self.state.config.run.checkpoint_every

    def begin(self) -> None:
        quick_eval.begin(self.state)

    def check(self) -> None:
        guards.check_ends(self.state)
        guards.watch_sources(self.state)

    def finish(self) -> None:
        if any(row.get(keys.STATUS) == "rolled_back" for row in self.state.history[-1:]):  # else the goal is reached
            guards.check_ends(self.state)

    def serve(self, knobs: KnobSnapshot) -> None:
        super().serve(knobs)
        if Command.EVALUATE in knobs.orders:
            commands.measure(self.state)
            loop.done(self, Command.EVALUATE, knobs)

    def accept(self, knobs: KnobSnapshot) -> None:
        commands.activate(self.state, knobs)

    def advance(self) -> StepStats:
        rollback.remember(self.state)
        while True:
            try:
                with full_memory():
                    return grpo_step(self.state, self.state.knobs)
            except ModelError:
                explain_no_scores(self.state)
                raise
            except (memory_ladder.RolloutMemoryError, torch.OutOfMemoryError) as error:
                less = memory_ladder.halved(self.state, error)
                if self.state.settled or less is None or not rollback.take_back(self.state):
                    raise
                memory_ladder.take_less(self.state, less, error)

    def undo(self) -> bool:
        return rollback.take_back(self.state)

    def store(self) -> None:
        save(self.state)


def apply(state: TrainState, plan: StepPlan) -> optim.Update:
    """One optimizer step on the gradient in `.grad`; weights that are not finite after it are left to `rollback`.

    Raises:
        BrokenUpdate: they are, and `guards.rollback` is off.
    """
    state.weights_moved, state.policy.interrupted_update = True, f"step {plan.step} of {state.run.name}"
    state.ranks.weights_changed()
    try:
        settings = {
            "learning_rate": plan.learning_rate,
            "max_norm": plan.algorithm.max_grad_norm,
            "skip_above": plan.algorithm.skip_grad_norm,
        }
        return parts.update(state.policy, state.optimizer, state.ranks, settings)
    except optim.BrokenUpdate as error:
        if not state.config.guards.rollback:
            raise
        return error.update


def step_row(state: TrainState, plan: StepPlan, batch: Experience, updates: metrics.Updates) -> metrics.Row:
    """The step's row of metrics.jsonl."""
    row: metrics.Row = {keys.STEP: plan.step} | metrics.update_row(updates, batch.scored, plan.epochs)
    for name in state.objectives:
        row |= _objective_row(state, plan, batch, name)
    row |= {
        keys.ENGINE: plan.numerics.engine,
        **metrics.sampler_row(batch, sampler_logprobs(batch.rollouts)),
        keys.LR: plan.learning_rate,
        keys.TEMPERATURE: plan.temperature,
        keys.ROUNDING: rounding.step(state.policy.dtype, state.policy.device),
        keys.TOKENS: sum(len(ids) for ids in batch.rollouts.completion_ids),
        keys.MEMORY_PEAK: metrics.peak_memory_mib(state.policy.device),
        keys.MEMORY_NOW: metrics.memory_mib(state.policy.device),
    }
    if shifted := anatomy.shifts_positions(state.policy.text_config, batch.rollouts.longest):
        row[keys.POSITIONS] = shifted
    return row


def _objective_row(state: TrainState, plan: StepPlan, batch: Experience, name: str) -> metrics.Row:
    objective, rollouts = state.objectives[name], batch.rollouts
    rows = rollouts.rows_of(name)
    own, learns = [batch.scores[i] for i in rows], rollouts.by_prompt(batch.learns()[rows])
    lengths = [len(rollouts.completion_ids[i]) for i in rows]
    row = metrics.reward_row(name, own, reward_matrix(own, rollouts.group_size), learns)
    row |= metrics.part_length_row(name, own, lengths)
    row |= texts.text_row(name, rollouts, rows, own)
    row |= metrics.clipped_row(name, batch, plan.algorithm.advantage_bound)
    if state.config.shaping.active:
        row |= metrics.shaped_row(name, batch.rewards[name])
    row |= metrics.policy_row(name, batch, plan.algorithm.log_ratio_clamp)
    row |= {keys.BETA.of(name): plan.betas[name], keys.BETA_MODE.of(name): objective.beta.mode}
    if plan.most_bad_rows is not None:
        row |= {keys.BAD_ROWS.of(name): len(batch.bad & {*rows})}
    row |= metrics.length_row(name, rollouts, rows) | objective.notes.row(name)
    if objective.tally is not None:
        row |= objective.tally.row(name, own, lengths)
        row |= {keys.JUDGE_TIED.of(name): int(tied(own, rollouts.group_size).sum())}
    return row


def conditions(state: TrainState, batch: Experience) -> metrics.Row:
    """Label shares by whether the item's text answers it."""
    row: metrics.Row = {}
    for name, objective in state.objectives.items():
        rows = batch.rollouts.rows_of(name)
        answered = [told(objective.rubric.task, batch.rollouts.example(i)) for i in rows]
        row |= metrics.condition_row(name, [batch.scores[i] for i in rows], answered)
    return row


def _log_dropped(state: TrainState, step: int) -> None:
    """Log an event the first time that reward functions log more metrics than a row holds."""
    dropped = {name: objective.notes.dropped for name, objective in state.objectives.items() if objective.notes.dropped}
    if dropped and not state.logged_dropped:
        state.logged_dropped = True
        state.run.log_event("metrics_dropped", step=step, dropped=dropped, most=MOST_METRICS)


def finish(state: TrainState, plan: StepPlan, batch: Experience, row: metrics.Row) -> StepStats:
    """Check the step, move the betas, and log it; after this the step counts."""
    if row[keys.STATUS] != "rolled_back":
        commands.move_betas(state, plan, batch.kl)
    drawn = memory_ladder.spared(
        lambda: samples.sample_rows(state, plan.step, batch),
        lambda error: state.run.log_event("samples_not_logged", step=plan.step, error=error),
    )
    state.run.log_samples(drawn or [])
    state.run.log_metrics(row)
    _log_dropped(state, plan.step)
    guards.watch(state, row)
    state.step, state.mid_update, state.weights_moved, state.settled = plan.step, False, False, False
    state.policy.interrupted_update = ""
    return StepStats(step=plan.step, metrics=row, status=str(row[keys.STATUS]))  # type: ignore[arg-type]
