"""The plan of one step: everything that it takes from settings and knobs, read once before any work."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from grpo_nb import losses, optim, seeding
from grpo_nb.beta_control import KLTarget
from grpo_nb.config import AlgorithmConfig, ObjectiveConfig
from grpo_nb.ranks.leader import ALONE, Ranks
from grpo_nb.run.knob_file import KnobSnapshot
from grpo_nb.training.numerics import Numerics
from grpo_nb.training.state import TrainState
from grpo_nb.types import Experience

UpdateRows = dict[str, list[int]]
"""Rows of one optimizer update by objective."""


@dataclass(frozen=True)
class StepPlan:
    """Plan of one step, decided before it begins."""

    step: int
    """Number of the step, 1-based."""
    seed: int
    temperature: float
    """Temperature of the sampling and of every log-prob of the step."""
    learning_rate: float
    """Learning rate after its warm-up, halved where a guard has halved it."""
    algorithm: AlgorithmConfig
    loss: losses.LossConfig
    betas: Mapping[str, float]
    weights: Mapping[str, float]
    """Weights of the objectives' gradients."""
    kl_targets: Mapping[str, KLTarget]
    """KL targets of the controllers, for objectives with a `kl_band`."""
    needs_reference: bool
    """Whether the step needs the KL, and so the reference policy."""
    old_first: bool
    """Whether a separate pass before the updates computes the old policy's log-probs."""
    reports_gradients: bool
    micro_batch: int
    max_completion_length: int
    numerics: Numerics = field(default_factory=Numerics)
    sampling_stream: int = 0
    """Number of the sampling stream: another number gives other completions; each rollback takes the next one."""
    most_bad_rows: float | None = None
    """Share of the step's completions that may leave the loss because a log-prob is not finite; None: none is
    looked for."""
    epochs: int = 1
    updates_per_epoch: int = 1
    ranks: Ranks = ALONE
    """Ranks that compute the step."""

    def updates(self, batch: Experience) -> list[UpdateRows]:
        """Rows of each optimizer update: every epoch deals each objective's rows evenly."""
        every: list[UpdateRows] = []
        for epoch in range(self.epochs):
            dealt: list[UpdateRows] = [{} for _ in range(self.updates_per_epoch)]
            for name in self.betas:
                rows = self._shuffled(batch.kept_rows(name), f"update/{name}/{epoch}")
                for k, update in enumerate(dealt):
                    if share := rows[k :: self.updates_per_epoch]:
                        update[name] = share
            every += [update for update in dealt if update]
        return every

    def generator(self, stream: str) -> torch.Generator:
        """Random generator of one stream of this step."""
        return seeding.generator(self.seed, self.step, stream)

    def _shuffled(self, rows: list[int], stream: str) -> list[int]:
        if self.updates_per_epoch == 1:
            return rows
        return [rows[i] for i in seeding.permutation(len(rows), self.seed, self.step, stream)]


def plan_step(state: TrainState, knobs: KnobSnapshot) -> StepPlan:
    """The plan of the next step."""
    config, step = state.config, state.step + 1
    algorithm, batch, objectives = config.algorithm, config.batch, config.objectives
    betas = {name: objective.beta.value for name, objective in state.objectives.items()}
    kl_targets = {name: aim for name in state.objectives if (aim := kl_target_of(objectives[name])) is not None}
    every = algorithm.gradient_report_every
    return StepPlan(
        step=step,
        seed=config.run.seed,
        temperature=knobs.values["temperature"],
        learning_rate=knobs.values["learning_rate"]
        * optim.warmup(step, algorithm.warmup_steps)
        * state.recovery.factor,
        sampling_stream=state.recovery.stream,
        most_bad_rows=config.guards.mask_bad_rows,
        algorithm=algorithm,
        loss=loss_config(algorithm),
        betas=betas,
        weights={name: objectives[name].weight for name in state.objectives},
        kl_targets=kl_targets,
        needs_reference=bool(kl_targets) or any(beta > 0 for beta in betas.values()),
        old_first=not batch.on_policy or algorithm.old_first or step == 1,
        reports_gradients=every > 0 and step % every == 0,
        micro_batch=state.numerics.micro_batch_of(batch.micro_batch),
        max_completion_length=config.sampling.max_completion_length,
        numerics=state.numerics,
        epochs=batch.num_iterations,
        updates_per_epoch=batch.updates_per_rollout // batch.num_iterations,
        ranks=state.ranks,
    )


def loss_config(algorithm: AlgorithmConfig) -> losses.LossConfig:
    """The loss that the settings describe."""
    row = algorithm.row
    clip = losses.ClipConfig(
        low=row.clip[0],
        high=row.clip[1],
        dual=algorithm.dual_clip,
        log_ratio_clamp=algorithm.log_ratio_clamp,
        tau_positive=algorithm.sapo_tau_positive,
        tau_negative=algorithm.sapo_tau_negative,
        drift=algorithm.cpgd_drift,
        drift_clip=algorithm.cpgd_drift_clip,
    )
    return losses.LossConfig(row, clip, algorithm.entropy_coef, algorithm.kl_factor)


def kl_target_of(objective: ObjectiveConfig) -> KLTarget | None:
    """KL target of the objective's controller; None without a `kl_band`."""
    if objective.kl_band is None:
        return None
    return KLTarget(
        band=objective.kl_band,
        bounds=objective.beta_bounds,
        target=objective.kl_target or sum(objective.kl_band) / 2,
        gain=objective.controller_gain,
        limit=objective.controller_limit,
        start=objective.start,
    )
