"""Rows of samples.jsonl: some answers of each step, with what they earned."""

from collections.abc import Sequence

from torch import Tensor

from grpo_nb.losses.tokens import FAR
from grpo_nb.policy.model import Policy
from grpo_nb.training.state import Drawn, Training
from grpo_nb.types import Experience, Rollouts, Score

TOKENS_LOGGED = 128
"""Tokens of a logged completion that samples.jsonl tells one by one: some 25 bytes each."""


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
