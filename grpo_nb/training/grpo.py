"""GRPO, one step a screen: sample, score, compare, refer, differentiate, combine, guard, apply.

`for step in grpo(run): ...` trains; breaking out of the loop saves. Nothing here knows of a notebook.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_nb import control, optim, seeding
from grpo_nb.config import Config
from grpo_nb.losses import rounding
from grpo_nb.policy.model import Policy
from grpo_nb.rewards.context import Notes, TrainerState
from grpo_nb.rewards.rubric import Completions, Scoring
from grpo_nb.rollout import Engine
from grpo_nb.rollout import engine as engine_named
from grpo_nb.run.knobs import KnobSnapshot
from grpo_nb.run.run import Run
from grpo_nb.tasks import Task, told
from grpo_nb.terminal import clean_logger
from grpo_nb.training import guards, loop, metrics, quick_eval, resume, samples, steering
from grpo_nb.training import state as training
from grpo_nb.training.experience import compare, gather, reward_matrix, sampler_logprobs, tied
from grpo_nb.training.gradient_report import gradient_report
from grpo_nb.training.gradients import GradientStats, objective_gradients, token_stats
from grpo_nb.training.guards import TrainingError
from grpo_nb.training.objectives import Objective, Rewards
from grpo_nb.training.state import Drawn, Training
from grpo_nb.types import Experience, Rollouts, Score, Steps, StepStats

__all__ = ["TrainingError", "grpo", "grpo_step"]

log = clean_logger(__name__)


def grpo(
    run: Run,
    *,
    policy: Policy | None = None,
    tasks: Mapping[str, Task] | None = None,
    rewards: Rewards | None = None,
    engine: Engine | str = "eager",
    steps: int | None = None,
    accept_changed: Collection[str] = (),
) -> Steps:
    """Train `run` to `steps` in total (its own number by default), yielding each step; resumes by itself.

    `tasks` and `rewards` give an objective, by name, a task of your own or extra reward functions with TRL's
    signature `f(prompts, completions, **columns) -> list[float | None]`; on resuming, give the same again.
    `accept_changed` names what may have other content than the run was made with, e.g. `{"data"}` (see `dependencies`).
    A checkpoint is saved every `run.checkpoint_every` steps and when the generator ends or is closed.

    Raises:
        ConfigError, RunError, ModelError, DataError: before any work.
        DependencyChanged: what the run depends on changed, and was not accepted; before any work.
        TrainingError: an invariant of the first step fails, three updates in a row were refused, or a judge fails
            on everything or has used up its budget (the run is then saved).
    """
    goal = run.config.run.steps if steps is None else steps
    built = engine_named(engine) if isinstance(engine, str) else engine
    with run.lock() as lock:
        run.check_settings()
        run.knobs.request("run")  # before the model loads: what is asked meanwhile is not forgotten
        state = resume.prepare(
            run, built, policy=policy, tasks=tasks, rewards=rewards, goal=goal, accept_changed=accept_changed
        )
        if lock.took_over:
            run.log_event("takeover", step=state.step, dead_owner=lock.took_over)
        with (
            training.deterministic(run.config, state.policy.device),
            closing(loop.walk(Grpo(state), lock)) as steps_taken,
        ):
            yield from steps_taken


def grpo_step(state: Training, knobs: KnobSnapshot) -> StepStats:
    """One step of GRPO (Shao et al. 2024, section 4.1), for one objective or several."""
    config, policy, clock = state.config, state.policy, metrics.Clock()
    step, settings = state.step + 1, _settings(state, knobs)
    with clock("rollout"):  # 1. K answers per prompt, drawn from the policy that learns
        drawn_P = training.draw_prompts(state, step)
        rollouts = _rollouts(state, drawn_P, step, settings.temperature)
    with Scoring() as scoring:  # 2. a reward for each, None where there is no verdict; judges are asked from here on
        with clock("score"):
            _score(state, drawn_P, rollouts, scoring)
        experience = gather(state, drawn_P, rollouts, settings.temperature)
        with clock("reference"), policy.scoring():  # 3. the same tokens under the old and the starting policy
            if experience.old_known:
                experience.logprobs_old, experience.entropy = token_stats(policy, experience, config.batch.micro_batch)
            if settings.needs_reference:
                with policy.as_reference():
                    experience.logprobs_reference, _ = token_stats(policy, experience, config.batch.micro_batch)
        with clock("score"):
            scores = scoring.scores()
    _log_judges(state)
    state.torn = True  # from here on the state changes: reward moments, weights, betas
    rewards = compare(state, experience, rollouts, scores, settings.betas)  # 4. each against its group
    updates: list[tuple[GradientStats, optim.Update]] = []
    report: metrics.Row = {}
    with clock("train"):
        for rows in _updates(state, experience, step):
            if not updates and _reports(config, step):
                report = _report(state, experience, rows, settings)
            gradient = _gradient(
                state, experience, rows, settings, f"combine/{len(updates)}"
            )  # 5. per objective, conflicts settled
            updates.append((gradient, _apply(state, settings)))  # 6. guard, clip, step, measure
    row = _row(state, step, settings, rollouts, scores, experience, updates, rewards) | report
    row |= _conditions(state, drawn_P, scores)
    if quick_eval.due(config, step):
        with clock("eval"):  # 7. now and then, a few held-out prompts
            row |= quick_eval.measure(state, step)
    return _finish(state, row | clock.row(), drawn_P, rollouts, scores, experience)


@dataclass(frozen=True)
class Settings:
    """The knobs as one step uses them: a single snapshot, taken before any work."""

    temperature: float
    learning_rate: float
    """After its warm-up."""
    betas: dict[str, float]
    needs_reference: bool


class Grpo(loop.Stage):
    """GRPO as a stage: its whole state is a `Training`."""

    prefix = ""

    def __init__(self, state: Training) -> None:
        self.progress = self.state = state

    @property
    def save_every(self) -> int:
        return self.state.config.run.checkpoint_every

    def begin(self) -> None:
        quick_eval.begin(self.state)

    def check(self) -> None:
        guards.check_ends(self.state)
        guards.watch_sources(self.state)

    def serve(self, knobs: KnobSnapshot) -> None:
        super().serve(knobs)
        if "evaluate" in knobs.orders:
            steering.measure(self.state)
            loop.done(self, "evaluate", knobs)

    def accept(self, knobs: KnobSnapshot) -> None:
        _turn_knobs(self.state, knobs)

    def advance(self) -> StepStats:
        return grpo_step(self.state, self.state.knobs)

    def store(self) -> None:
        training.save(self.state)


def _turn_knobs(state: Training, now: KnobSnapshot) -> None:
    """Make the knobs those of the next step; every turn goes into the log."""
    run, before = state.run, state.knobs
    for turn in now.changes_since(before):
        run.log_event("knob", step=state.step + 1, **turn)
    if now.values["temperature"] != before.values["temperature"]:
        _measured_anew(state)
    state.knobs = now
    for name, objective in state.objectives.items():
        key = f"beta/{name}"
        if now.modes[key] == "manual":
            objective.beta = control.set_manual(objective.beta, now.values[key])
        elif objective.beta.mode == "manual":
            held, objective.beta = objective.beta, control.set_auto(objective.beta, objective.config.start)
            message = f"{name}: automatic again, beta from {objective.beta.value:.3g} (by hand: {held.value:.3g})"
            run.log_event("beta", step=state.step + 1, objective=name, message=message)


def _measured_anew(state: Training) -> None:
    """KL is that of the distribution which is sampled, so that a turn of the temperature changes what is measured."""
    for objective in state.objectives.values():
        objective.beta = control.forget(objective.beta)
    if any(objective.config.controlled for objective in state.objectives.values()):
        message = "KL is measured at the sampling temperature: its level changes here, and what its band means"
        state.run.log_event("beta", step=state.step + 1, message=message)


def _settings(state: Training, knobs: KnobSnapshot) -> Settings:
    betas = {name: o.beta.value for name, o in state.objectives.items()}
    watched = any(o.config.kl_band for o in state.objectives.values())
    return Settings(
        temperature=knobs.values["temperature"],
        learning_rate=knobs.values["learning_rate"] * optim.warmup(state.step + 1, state.config.algorithm.warmup_steps),
        betas=betas,
        needs_reference=watched or any(beta > 0 for beta in betas.values()),
    )


def _rollouts(state: Training, drawn_P: Sequence[Drawn], step: int, temperature: float) -> Rollouts:
    config = state.config
    rows = len(drawn_P) * config.batch.group_size
    generator = seeding.generator(config.run.seed, step, "rollout")
    uniforms = torch.rand(rows, config.sampling.max_completion, dtype=torch.float64, generator=generator)
    prompt_ids_P = [state.encode(d.objective, d.example) for d in drawn_P]
    rollouts = state.engine.generate(
        state.policy, prompt_ids_P, config.batch.group_size, config.sampling, temperature, uniforms
    )
    guards.check_rollouts(rollouts, state.policy.terminators)
    return rollouts


def _score(state: Training, drawn_P: Sequence[Drawn], rollouts: Rollouts, scoring: Scoring) -> None:
    """Score the completions but for what judges say of them; each objective's own rubric scores its own rows."""
    group = rollouts.group_size
    for name, objective in state.objectives.items():
        rows = [i for i in range(len(drawn_P) * group) if drawn_P[i // group].objective == name]
        epoch = state.step * state.config.prompts_per_objective / len(objective.examples)
        objective.notes = Notes(len(rows), TrainerState(state.step, state.goal, epoch))
        completions = Completions(
            [drawn_P[i // group].example for i in rows],
            [rollouts.texts[i] for i in rows],
            [rollouts.completion_ids[i] for i in rows],
            [rollouts.scored_texts[i] for i in rows],
            objective.notes,
        )
        scoring.add(objective.rubric, completions)
    scoring.settle()


def _log_judges(state: Training) -> None:
    """What the judges did in this step, and what became known about their servers."""
    for name, objective in state.objectives.items():
        if objective.judge is not None:
            log.info(objective.judge.tally.line(state.step + 1, name))
            for notice in objective.judge.tally.notices:
                state.run.log_event(step=state.step + 1, objective=name, **notice)


def _updates(state: Training, experience: Experience, step: int) -> Iterator[dict[str, list[int]]]:
    """Rows of each optimizer update, by objective: every epoch deals each objective's rows evenly."""
    batch, seed = state.config.batch, state.config.run.seed
    per_epoch = batch.updates_per_rollout // batch.inner_epochs
    for epoch in range(batch.inner_epochs):
        dealt: list[dict[str, list[int]]] = [{} for _ in range(per_epoch)]
        for name in state.objectives:
            rows = experience.rows_of(name)
            if per_epoch > 1:
                order = seeding.permutation(len(rows), seed, step, f"update/{name}/{epoch}")
                rows = [rows[i] for i in order]
            for k, update in enumerate(dealt):
                if share := rows[k::per_epoch]:
                    update[name] = share
        yield from (update for update in dealt if update)


def _gradient(
    state: Training, experience: Experience, rows: Mapping[str, list[int]], settings: Settings, stream: str
) -> GradientStats:
    config = state.config
    return objective_gradients(
        state.policy,
        experience,
        rows,
        settings.betas,
        {name: o.config.weight for name, o in state.objectives.items()},
        config.algorithm,
        micro_batch=config.batch.micro_batch,
        max_completion=config.sampling.max_completion,
        generator=seeding.generator(config.run.seed, state.step + 1, stream),
    )


def _reports(config: Config, step: int) -> bool:
    every = config.algorithm.gradient_report_every
    return every > 0 and step % every == 0


def _report(state: Training, experience: Experience, rows: Mapping[str, list[int]], settings: Settings) -> metrics.Row:
    config = state.config
    return gradient_report(
        state.policy,
        experience,
        rows,
        settings.betas,
        config.algorithm,
        micro_batch=config.batch.micro_batch,
        max_completion=config.sampling.max_completion,
    )


def _apply(state: Training, settings: Settings) -> optim.Update:
    algorithm = state.config.algorithm
    return optim.apply(
        state.policy.parameters_by_name(),
        state.optimizer,
        learning_rate=settings.learning_rate,
        max_norm=algorithm.max_grad_norm,
        skip_above=algorithm.skip_grad_norm,
    )


def _row(
    state: Training,
    step: int,
    settings: Settings,
    rollouts: Rollouts,
    scores: Sequence[Score],
    experience: Experience,
    updates: Sequence[tuple[GradientStats, optim.Update]],
    rewards: Mapping[str, Float[Tensor, "prompt group"]],
) -> metrics.Row:
    algorithm = state.config.algorithm
    row: metrics.Row = {"step": step} | metrics.update_row(updates)
    for name, objective in state.objectives.items():
        rows, group = experience.drawn_for(name), rollouts.group_size
        own, learns = [scores[i] for i in rows], experience.learns()[rows].view(-1, group)
        row |= metrics.reward_row(name, own, reward_matrix(own, group), learns)
        row |= metrics.clipped_row(name, experience, algorithm.advantage_bound)
        if state.config.shaping.active:
            row |= metrics.shaped_row(name, rewards[name])
        row |= metrics.policy_row(name, experience, algorithm.row.kl_reported, algorithm.log_ratio_clamp)
        row |= {f"beta/{name}": settings.betas[name], f"beta_mode/{name}": objective.beta.mode}
        row |= metrics.length_row(name, rollouts, rows) | objective.notes.row(name)
        if objective.judge is not None:
            row |= objective.judge.tally.row(name, own, [len(rollouts.completion_ids[i]) for i in rows])
            row |= {f"judge/{name}/tied_groups": int(tied(own, group).sum())}
    return row | {
        **metrics.sampler_row(experience, sampler_logprobs(experience, rollouts)),
        "lr": settings.learning_rate,
        "temperature": settings.temperature,
        "rounding": rounding.step(state.policy.dtype, state.policy.device),
        "tokens": sum(len(ids) for ids in rollouts.completion_ids),
        "memory/peak_mib": metrics.peak_memory_mib(state.policy.device),
    }


def _conditions(state: Training, drawn_P: Sequence[Drawn], scores: Sequence[Score]) -> metrics.Row:
    row: metrics.Row = {}
    group = len(scores) // len(drawn_P)
    for name, objective in state.objectives.items():
        own = [i for i in range(len(scores)) if drawn_P[i // group].objective == name]
        answered = [told(objective.rubric.task, drawn_P[i // group].example) for i in own]
        row |= metrics.condition_row(name, [scores[i] for i in own], answered)
    return row


def _finish(
    state: Training,
    row: metrics.Row,
    drawn_P: Sequence[Drawn],
    rollouts: Rollouts,
    scores: Sequence[Score],
    experience: Experience,
) -> StepStats:
    """Check, move the betas, log: after this the step exists."""
    run, step = state.run, state.step + 1
    for name, objective in state.objectives.items():
        kl = row[f"kl/{name}"]
        objective.beta, moved = _steer(objective, kl if isinstance(kl, float) else None)
        if moved:
            run.log_event("beta", step=step, objective=name, message=f"{name}: {moved}")
    run.log_samples(samples.sample_rows(state, step, drawn_P, rollouts, scores, experience))
    run.log_metrics(row)
    guards.watch(state, row)
    state.step, state.torn = step, False
    status = str(row["status"])
    return StepStats(step=step, metrics=row, status=status)  # type: ignore[arg-type]


def _steer(objective: Objective, kl: float | None) -> tuple[control.BetaState, str | None]:
    """The objective's beta after this step's KL, and what to say of it."""
    config = objective.config
    if config.kl_band is None:
        return objective.beta, None
    aim = control.Aim(
        band=config.kl_band,
        bounds=config.beta_bounds,
        target=config.kl_target or sum(config.kl_band) / 2,
        gain=config.controller_gain,
        limit=config.controller_limit,
        start=config.start,
    )
    return control.CONTROLLERS[config.controller](objective.beta, kl, aim)
