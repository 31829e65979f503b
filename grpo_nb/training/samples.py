"""Rows of samples.jsonl: some answers of each step, with their rewards; and a few of each quick evaluation."""

from collections.abc import Sequence

from torch import Tensor

from grpo_nb.losses.tokens import FAR
from grpo_nb.policy.model import Policy
from grpo_nb.training.state import TrainState
from grpo_nb.types import Example, Experience, Rollouts, Score

TOKENS_LOGGED = 128
"""Tokens of a logged completion that samples.jsonl lists one by one: some 25 bytes each."""


def sample_rows(state: TrainState, step: int, batch: Experience) -> list[dict[str, object]]:
    """Rows for samples.jsonl: the first completions of each objective's first prompt."""
    each = state.config.run.samples_per_step // len(state.objectives)
    rows = [batch.rollouts.rows_of(name)[: min(each, batch.rollouts.group_size)] for name in state.objectives]
    return [_row(state, step, batch, i, place) for own in rows for place, i in enumerate(own)]


def answer_rows(
    policy: Policy, examples: Sequence[Example], drawn: Rollouts, scores: Sequence[Score]
) -> list[dict[str, object]]:
    """The first answers of an evaluation, one a prompt, as rows like those of samples.jsonl without a step."""
    return [_answer(policy, example, drawn, i, scores[i]) for i, example in enumerate(examples)]


def _answer(policy: Policy, example: Example, drawn: Rollouts, i: int, score: Score) -> dict[str, object]:
    ids = drawn.completion_ids[i][:TOKENS_LOGGED]
    return {
        "example": example.id,
        "prompt": policy.decode(list(drawn.prompt_ids[i])),
        "completion": drawn.texts[i],
        "target": example.target,
        "reward": score.value,
        "label": score.label,
        "parts": dict(score.parts),
        "cause": score.cause,
        "stop_reason": drawn.stop_reasons[i],
        "tokens": len(drawn.completion_ids[i]),
        "token_texts": policy.token_texts(ids),
        "logprobs_old": [round(max(value, -FAR), 4) for value in drawn.logprobs[i][: len(ids)]],
    }


def _row(state: TrainState, step: int, batch: Experience, i: int, place: int) -> dict[str, object]:
    rollouts, score, example = batch.rollouts, batch.scores[i], batch.rollouts.example(i)
    return {
        "step": step,
        "objective": rollouts.objective(i),
        "example": example.id,
        "completion_index": place,
        "prompt": state.policy.decode(list(rollouts.prompt_ids[rollouts.prompt_of(i)])),
        "completion": rollouts.texts[i],
        "target": example.target,
        "reward": score.value,
        "label": score.label,
        "parts": dict(score.parts),
        "cause": score.cause,
        "advantage": batch.advantage_of(i),
        "stop_reason": rollouts.stop_reasons[i],
        "tokens": len(rollouts.completion_ids[i]),
        "group_size": rollouts.group_size,
        **state.objectives[rollouts.objective(i)].notes.sample(place),
        **_token_columns(state.policy, batch, i),
    }


def _token_columns(policy: Policy, batch: Experience, row: int) -> dict[str, object]:
    """Text and log-probs, in nats, of a completion's first tokens; None where the step had no need of them."""
    ids = batch.rollouts.completion_ids[row][:TOKENS_LOGGED]

    def numbers(table: Tensor | None) -> list[float] | None:
        return None if table is None else [round(v, 4) for v in table[row, : len(ids)].clamp(min=-FAR).tolist()]

    return {
        "token_texts": policy.token_texts(ids),
        "logprobs_old": numbers(batch.logprobs_old) if batch.measured[row] else None,
        "logprobs_reference": numbers(batch.logprobs_reference),
    }
