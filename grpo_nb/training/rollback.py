"""Rollback guard: after a step's updates it checks the state, and undoes the step where the state is not healthy.

The decision is the rule `rules.health.exploded`, which the doctor applies to the log, too.
"""

import math

import torch

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.policy import distance
from grpo_nb.policy.full_memory import full_memory
from grpo_nb.policy.model import Policy
from grpo_nb.printable import clean_logger
from grpo_nb.rules import health
from grpo_nb.rules.finding import Finding, Rows, number, series
from grpo_nb.training import memory_ladder, parts
from grpo_nb.training.metrics import Row
from grpo_nb.training.plan import StepPlan
from grpo_nb.training.recovery import Recovery
from grpo_nb.training.snapshot import Snapshot
from grpo_nb.training.state import TrainState, forget_gradients
from grpo_nb.types import Experience

logger = clean_logger(__name__)

PROBED, LONGEST = 64, 64
"""After the updates, one in so many completions of an objective is measured, at least one; and at most so many of its
first tokens."""
RECENT, SLACK, NEAR = 16, 1.1, 0.25
"""An update needs no KL of its own where one of the last RECENT steps moved the weights at least 1 / SLACK as far and
was found healthy, and no KL of the step, all of its tokens, is above NEAR of the limit."""


def remember(state: TrainState) -> None:
    """Keep the state of this step boundary, which is healthy; its weights where `guards.rollback` is on."""
    if state.config.guards.rollback:
        _copy_weights(state)
    state.snapshot.controllers = {name: (o.beta, o.moments) for name, o in state.objectives.items()}
    state.snapshot.recovery = state.recovery


def _copy_weights(state: TrainState) -> None:
    """Copy the weights into the snapshot; on the host where the device has no room."""
    try:
        with full_memory():
            state.snapshot.take(state.policy.parameters_by_name(), state.optimizer)
    except torch.OutOfMemoryError as error:
        if state.snapshot.on_host:
            raise
        state.snapshot = Snapshot(on_host=True)
        memory_ladder.freed_for_less(state.run, state.step + 1, "guards.snapshot=host", error)
        state.snapshot.take(state.policy.parameters_by_name(), state.optimizer)
    parts.remember(state.policy, state.ranks)


def settle(state: TrainState, plan: StepPlan, batch: Experience, row: Row) -> Row:
    """Keep the step's updates where `health.exploded` finds nothing, else undo them; returns the columns to log."""
    guards, before = state.config.guards, state.recovery
    looks = guards.rollback and due(state.history, row, state.config)
    measured = _probed(state, plan, batch) if looks else {}
    if finding := health.exploded([row | measured], state.config):
        _restore_weights(state)
        _take_controllers_back(state)
        state.recovery = before.rolled_back()
        state.ahead.forget_after(plan.step)
        _log_rollback(state, plan, before, finding)
    elif row[keys.STATUS] in ("ok", "clipped"):
        state.recovery = before.went_well(guards.recovery_steps)
        _log_return(state, plan, before)
    now, state.settled = state.recovery, True
    return {
        **measured,
        keys.LR_REQUESTED: plan.learning_rate / before.factor,
        keys.ROLLBACKS: now.in_a_row,
        keys.STREAM: before.stream,
        keys.STATUS: "rolled_back" if finding else row[keys.STATUS],
    }


def due(past: Rows, row: Row, config: Config) -> bool:
    """Whether to measure the KL after the updates: not where it must be close to measured ones (see RECENT)."""
    moved, limit = number(row, keys.GRAD_UPDATE), config.guards.rollback_kl
    if not moved or not math.isfinite(moved) or limit is None:
        return False
    kls = [kl for name in config.objectives for kl in series([row], keys.KL.of(name))]
    if any(kl > NEAR * limit for kl in kls):
        return True
    known = [
        one
        for one in past[-RECENT:]
        if one.get(keys.STATUS) != "rolled_back" and number(one, keys.HEALTH_KL) is not None
    ]
    return moved > SLACK * max(series(known, keys.GRAD_UPDATE), default=0.0)


def take_back(state: TrainState) -> bool:
    """Restore the state of the newest step boundary, wherever the step was interrupted; returns whether it could.

    Weights that have moved take `guards.rollback`, which keeps a copy of them.
    """
    if state.weights_moved:
        if not state.config.guards.rollback:
            return False
        _restore_weights(state)
    _take_controllers_back(state)
    forget_gradients(state.policy)
    state.recovery, state.policy.interrupted_update = state.snapshot.recovery, ""
    state.mid_update = state.weights_moved = state.settled = False  # last: an interrupt before it finds all to do again
    return True


def _probed(state: TrainState, plan: StepPlan, batch: Experience) -> Row:
    """Row of `probe`; empty where memory is full, since a measurement must not end a run."""

    def failed(reason: str) -> None:
        state.run.log_event("health_not_measured", step=plan.step, reason=reason)
        logger.warning("step %d: memory was full while the KL after its updates was measured", plan.step)

    return memory_ladder.spared(lambda: probe(state.policy, plan, batch), failed) or {}


def probe(policy: Policy, plan: StepPlan, batch: Experience) -> Row:
    """KL to the reference after the updates, on a few completions."""
    if not (rows := probed(batch)):
        return {}
    prompts = [batch.rollouts.prompt_ids[batch.rollouts.prompt_of(i)] for i in rows]
    completions = [batch.rollouts.completion_ids[i][:LONGEST] for i in rows]
    grouped = plan.numerics.passes == "grouped"
    few = policy.group(prompts, completions, range(len(rows))) if grouped else policy.collate(prompts, completions)
    return {keys.HEALTH_KL: distance.kl_to_reference(policy, few, plan.temperature)}


def probed(batch: Experience) -> list[int]:
    """Some of each objective's completions, spread over its prompts."""
    chosen = []
    for name in dict.fromkeys(drawn.objective for drawn in batch.rollouts.prompts):
        rows = batch.kept_rows(name)
        chosen += rows[:: min(PROBED, max(len(rows), 1))]
    return chosen


def _restore_weights(state: TrainState) -> None:
    state.snapshot.restore(state.policy.parameters_by_name(), state.optimizer)
    parts.put_back(state.policy, state.ranks)
    state.ranks.weights_changed()


def _take_controllers_back(state: TrainState) -> None:
    for name, (beta, moments) in state.snapshot.controllers.items():
        state.objectives[name].beta, state.objectives[name].moments = beta, moments


def _log_rollback(state: TrainState, plan: StepPlan, before: Recovery, finding: Finding) -> None:
    now, guards = state.recovery, state.config.guards
    requested = plan.learning_rate / before.factor
    data = {
        "undone": [plan.step],
        "restored": plan.step - 1,
        "learning_rate": plan.learning_rate / 2,
        "requested": requested,
        "returns_after": guards.recovery_steps,
        "sampling_stream": now.stream,
        "in_a_row": now.in_a_row,
        "values": finding.evidence["values"],
    }
    state.run.log_event("rollback", step=plan.step, **data)
    logger.warning(
        "step %d is undone (%s); learning rate %.3g in place of %.3g for at least %d healthy steps",
        plan.step,
        ", ".join(f"{key} {value}" for key, value in finding.evidence["values"].items()),
        plan.learning_rate / 2,
        requested,
        guards.recovery_steps,
    )


def _log_return(state: TrainState, plan: StepPlan, before: Recovery) -> None:
    if state.recovery.factor > before.factor:
        rate = plan.learning_rate * state.recovery.factor / before.factor
        requested = plan.learning_rate / before.factor
        state.run.log_event("rate_returns", step=plan.step, learning_rate=rate, requested=requested)
