"""Guard that finds an overflow: only where numbers are not finite and all weights are."""

import math
from collections.abc import Callable

from grpo_nb.metrics import keys
from grpo_nb.policy import overflow
from grpo_nb.policy.overflow import Overflow
from grpo_nb.policy.shards import own
from grpo_nb.rules import health
from grpo_nb.training import memory_ladder
from grpo_nb.training.metrics import Row
from grpo_nb.training.plan import StepPlan
from grpo_nb.training.state import TrainState, draw_prompts
from grpo_nb.types import Experience

MOST_ROWS = 8
"""Completions of the hooked pass, at most."""


def overflow_row(state: TrainState, plan: StepPlan, batch: Experience, row: Row) -> Row:
    """The first layer with an output that is not finite, where loss, gradient or a completion's log-probs are not.

    Nothing where the memory is full, which is logged.
    """
    return memory_ladder.spared(lambda: _overflow_row(state, plan, batch, row), _failed(state)) or {}


def _overflow_row(state: TrainState, plan: StepPlan, batch: Experience, row: Row) -> Row:
    suspicious = batch.bad or not all(_finite(row.get(key)) for key in (keys.LOSS, keys.GRAD_NORM))
    if not state.config.guards.find_overflow or not suspicious or not _weights_finite(state):
        return {}
    rows = sorted(batch.bad) or [i for name in plan.betas for i in batch.kept_rows(name)]
    asked, found = rows[:MOST_ROWS], None
    if asked:
        prompts = [batch.rollouts.prompt_ids[batch.rollouts.prompt_of(i)] for i in asked]
        found = overflow.first_layer(state.policy, prompts, [batch.rollouts.completion_ids[i] for i in asked])
    return told(state, found)


def explain_no_scores(state: TrainState) -> None:
    """Log the first layer that overflows on the next step's prompts, from which an engine could not sample."""
    memory_ladder.spared(lambda: _explain_no_scores(state), _failed(state))


def _explain_no_scores(state: TrainState) -> None:
    if not state.config.guards.find_overflow or not _weights_finite(state):
        return
    prompts = [state.encode(drawn.objective, drawn.example) for drawn in draw_prompts(state, state.step + 1)]
    ends = [[state.policy.stop_token_ids[0]]] * len(prompts)
    found = overflow.first_layer(state.policy, prompts[:MOST_ROWS], ends[:MOST_ROWS])
    row = {keys.STEP: state.step + 1} | told(state, found)
    if finding := health.overflow([row], state.config):
        state.run.log_event("finding", **finding.to_dict())


def told(state: TrainState, found: Overflow | None) -> Row:
    """Metrics of an overflow."""
    dtype = str(state.policy.dtype).removeprefix("torch.")
    if found is None:
        return {keys.OVERFLOW_LAYER: "", keys.OVERFLOW_DTYPE: dtype}
    return {
        keys.OVERFLOW_LAYER: found.layer,
        keys.OVERFLOW_DTYPE: found.dtype,
        keys.OVERFLOW_LARGEST: found.largest if math.isfinite(found.largest) else None,
    }


def _failed(state: TrainState) -> Callable[[str], None]:
    return lambda error: state.run.log_event("overflow_not_measured", step=state.step + 1, error=error)


def _weights_finite(state: TrainState) -> bool:
    return all(bool(own(parameter).isfinite().all()) for parameter in state.policy.model.parameters())


def _finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
