"""Replays a logged step up to its loss: the tensors behind a row of metrics.jsonl."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_nb import losses, optim
from grpo_nb.metrics import keys
from grpo_nb.policy.model import Policy
from grpo_nb.rollout import opened
from grpo_nb.rollout.selfcheck import load_alike
from grpo_nb.run.checkpoints import Checkpoint
from grpo_nb.run.dependencies_file import OPTIMIZER
from grpo_nb.run.knob_file import KnobSnapshot
from grpo_nb.run.run import Run, RunError
from grpo_nb.tasks import Task, load_tasks
from grpo_nb.training import gradients, metrics, numerics, resume
from grpo_nb.training.experience import complete, compute_advantages
from grpo_nb.training.objectives import Rewards, load_objectives
from grpo_nb.training.plan import StepPlan, plan_step
from grpo_nb.training.sampling import sampled, score, verdicts
from grpo_nb.training.state import TrainState
from grpo_nb.training.switches import deterministic
from grpo_nb.types import Experience


@dataclass(frozen=True)
class Replay:
    """One step's plan and its completions compared with their groups, with the policy as it was before the step."""

    policy: Policy
    plan: StepPlan
    batch: Experience

    def group(self, objective: str) -> list[int]:
        """Rows of the objective's first prompt whose rewards differ; of its first prompt where none do."""
        rows, size = self.batch.rollouts.rows_of(objective), self.batch.rollouts.group_size
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        return next((group for group in groups if bool(self.batch.learns()[group].any())), groups[0])

    def inputs(self, rows: list[int]) -> losses.LossInputs:
        """Loss inputs of these rows, from a forward pass with a graph."""
        return gradients.loss_inputs(self.policy, self.batch, rows, self.plan)

    def normalizer(self, rows: list[int]) -> losses.LossNormalizer:
        """The denominators of an update over these rows alone."""
        return gradients.normalizer_of(self.batch, rows, self.plan.max_completion_length)


def replay(run: Run, tasks: Mapping[str, Task] | None = None, rewards: Rewards | None = None) -> Replay:
    """Replay the newest logged step that has a checkpoint before it: sample, score and compare, without an update.

    The completions are those of the log, bit for bit, unless they were sampled one step off-policy. Judges get their
    requests again.

    Raises:
        RunError: no checkpoint precedes a logged step, or it is damaged.
    """
    checkpoint, row = _before_a_logged_step(run)
    state = _state(run, checkpoint, tasks, rewards or {})
    knobs = KnobSnapshot(**checkpoint.state("knobs")["knobs"])
    used = {"temperature": row[keys.TEMPERATURE], "learning_rate": row[keys.LR]}
    plan = plan_step(state, replace(knobs, values={**knobs.values, **used}))
    betas = {name: row[keys.BETA.of(name)] for name in state.objectives}
    plan = replace(plan, betas=betas, needs_reference=True, old_first=True)
    with (
        deterministic(run.config, state.policy.device),
        opened(state.engine),
        numerics.computing(state.numerics),
        sampled(state, plan, metrics.Clock()) as drawn,
    ):
        score(state, drawn)
        measured = gradients.measure(state.policy, drawn.rollouts, plan)
        batch = compute_advantages(state, plan, drawn.rollouts, measured, verdicts(state, drawn))
    return Replay(state.policy, plan, complete(batch, plan, None))


def _before_a_logged_step(run: Run) -> tuple[Checkpoint, dict[str, Any]]:
    rows = {row["step"]: row for row in run.metric_rows()}
    start = max((step for step in run.checkpoints.steps() if step + 1 in rows), default=None)
    if start is None:
        raise RunError(f"{run.path} has no checkpoint before a logged step; train a step of GRPO first")
    return run.checkpoints.load(start, dispensable={OPTIMIZER}), rows[start + 1]


def _state(run: Run, checkpoint: Checkpoint, tasks: Mapping[str, Task] | None, rewards: Rewards) -> TrainState:
    """The state of a checkpoint with a policy of its own and without optimizer moments; the run is only read."""
    policy, stored = load_alike(run.config.model, run.config.run.seed), checkpoint.state("step", "betas")
    policy.settle()
    policy.set_date(run.started)
    resume.load_reference(run, policy)
    policy.load_state(checkpoint.tensors("policy"))
    objectives = load_objectives(run, load_tasks(run.config, run.path, tasks), rewards)
    chosen, chosen_engine = numerics.resume(run, policy, numerics.stored(run, stored), None)
    optimizer = optim.adamw(policy.parameters_by_name(), 0.0, 0.0)
    knobs = run.knobs.snapshot()
    state = TrainState(run, policy, optimizer, chosen_engine, objectives, knobs, checkpoint.step, numerics=chosen)
    resume.load_controllers(state, checkpoint, stored)
    return state
