"""Builds the training data of a step: completions compared with their groups, as tensors that no longer change."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_nb import losses
from grpo_nb.config import AlgorithmConfig, Config, JudgeConfig
from grpo_nb.judge.tally import NAME as JUDGE
from grpo_nb.rewards.rubric import TASK
from grpo_nb.training import guards
from grpo_nb.training.gradients import Measured, blank
from grpo_nb.training.plan import StepPlan
from grpo_nb.training.state import TrainState
from grpo_nb.types import Experience, Rollouts, Score, TokenStats, by_prompt, token_mask


def compute_advantages(
    state: TrainState, plan: StepPlan, rollouts: Rollouts, measured: Measured, scores: Sequence[Score]
) -> Experience:
    """The step's rows, each compared with its group: which are kept, their advantages and token weights.

    An incomplete group is NaN throughout, so it moves no statistic of the others. Moves each objective's running
    reward moments where rewards are normalised.

    Raises:
        TrainingError: a mask does not fit what was sampled.
    """
    whole = ~reward_matrix(scores, rollouts.group_size).isnan().any(dim=1)
    kept = whole.repeat_interleave(rollouts.group_size)
    groups = {name: _group_rewards(state, plan, name, rollouts, measured, scores) for name in state.objectives}
    compared = [_advantages(own, plan.algorithm).flatten(0, 1).float() for own in groups.values()]
    widest = max(values.shape[1] for values in compared)  # one a token where a KL cost makes them differ
    advantages = torch.cat([values.expand(-1, widest) for values in compared])
    if plan.algorithm.skip_signal_free_groups:
        kept &= _with_signal(advantages, _mask(rollouts, plan.algorithm), rollouts.group_size)
    old = measured.old or blank(rollouts)
    batch = Experience(
        rollouts=rollouts,
        scores=scores,
        rewards={name: own.rewards for name, own in groups.items()},
        advantages=advantages,
        kept=kept,
        lengths=_lengths(rollouts, plan.algorithm),
        logprobs_old=old.logprobs,
        entropy=old.entropy,
        measured=torch.full((len(scores),), measured.old is not None),
        logprobs_reference=measured.reference,
        token_weights=_token_weights(rollouts, old, kept, plan.algorithm),
    )
    guards.check_masks(batch, plan.algorithm.mask_truncated)
    return batch.without(_bad_rows(rollouts, measured, plan.most_bad_rows))


def _bad_rows(rollouts: Rollouts, measured: Measured, most: float | None) -> list[int]:
    """Completions with a log-prob that is not finite, of engine, old policy or reference; none where they are more than
    `most` of all."""
    if most is None:
        return []
    fine = torch.ones(len(rollouts.completion_ids), dtype=torch.bool)
    fine[rollouts.not_finite()] = False
    inside = token_mask(torch.tensor([len(ids) for ids in rollouts.completion_ids]), blank(rollouts).logprobs.shape[1])
    for table in (None if measured.old is None else measured.old.logprobs, measured.reference):
        if table is not None:
            fine &= ~(~table.isfinite() & inside).any(dim=1)
    bad: list[int] = (~fine).nonzero().flatten().tolist()
    return bad if len(bad) <= most * len(fine) else []


def complete(batch: Experience, plan: StepPlan, seen: TokenStats | None) -> Experience:
    """The batch with the old policy's statistics `seen` in its own update, and with the KL that follows."""
    if seen is not None:
        batch = replace(batch, logprobs_old=seen.logprobs, entropy=seen.entropy, measured=batch.kept)
    return replace(batch, kl={name: _kl(batch, name, plan) for name in plan.betas})


def shape(
    rewards: Float[Tensor, "prompt group"],
    lengths: Int[Tensor, "prompt group"],
    truncated: Tensor,
    config: Config,
    moments: losses.Moments,
    scale: Float[Tensor, "prompt group"] | None = None,
) -> tuple[Float[Tensor, "prompt group"], losses.Moments]:
    """Shaped rewards, [prompt, group], and the new moments. Order: truncated, overlong, normalised, clipped.

    `scale`: size of the terms of each reward, where it is larger than the reward's own.
    """
    shaping = config.shaping
    if shaping.truncated_factor is not None:
        rewards = losses.stop_properly(rewards, truncated, shaping.truncated_factor)
    if shaping.overlong_buffer:
        rewards = rewards + losses.overlong_penalty(
            lengths, config.sampling.max_completion_length, shaping.overlong_buffer, shaping.overlong_penalty
        )
    if shaping.normalise:
        known = ~rewards.isnan()
        largest = 0.0 if scale is None or not known.any() else float(scale[known].max())
        moments = moments.update(rewards[known].tolist(), largest)
        rewards = moments.normalise(rewards)
    return rewards if shaping.clip is None else rewards.clamp(-shaping.clip, shaping.clip), moments


def reward_matrix(scores: Sequence[Score], group: int) -> Float[Tensor, "prompt group"]:
    """Rewards by prompt and completion, in float64; NaN where a completion has none."""
    values = [float("nan") if s.value is None else s.value for s in scores]
    return by_prompt(torch.tensor(values, dtype=torch.float64), group)


def part_matrix(scores: Sequence[Score], part: str, group: int) -> Float[Tensor, "prompt group"]:
    """One part of the rewards by prompt and completion, in float64; NaN where a completion has none."""
    return reward_matrix([replace(score, value=score.parts.get(part)) for score in scores], group)


def tied(scores: Sequence[Score], group: int) -> Bool[Tensor, "prompt"]:
    """Groups in which all task scores are equal, but for rounding."""
    return ~losses.has_signal(part_matrix(scores, TASK, group))


def without_lone_judge(
    rewards: Float[Tensor, "prompt group"], scores: Sequence[Score], judge: JudgeConfig | None
) -> Float[Tensor, "prompt group"]:
    """Rewards in which the judge does not decide alone: in a tied group each answer has the mean of its verdicts."""
    if judge is None or judge.decides_ties:
        return rewards
    given = part_matrix(scores, JUDGE, rewards.shape[1])
    levelled = rewards - judge.weight * (given - given.mean(dim=1, keepdim=True))
    return torch.where(tied(scores, rewards.shape[1])[:, None], levelled, rewards)


def reward_scale(scores: Sequence[Score], group: int) -> Float[Tensor, "prompt group"]:
    """Size of the terms that each reward was summed from, by prompt and completion; 0 without a reward."""
    values = [max(s.scale, abs(s.value or 0.0)) for s in scores]
    return by_prompt(torch.tensor(values, dtype=torch.float64), group)


def sampler_logprobs(rollouts: Rollouts) -> Float[Tensor, "batch token"]:
    """The log-prob that the engine reported for each token when it sampled it; 0 beyond a completion."""
    table = blank(rollouts).logprobs
    for i, values in enumerate(rollouts.logprobs):
        table[i, : len(values)] = torch.tensor(values, dtype=table.dtype)
    return table


def _group_rewards(
    state: TrainState, plan: StepPlan, name: str, rollouts: Rollouts, measured: Measured, scores: Sequence[Score]
) -> losses.GroupRewards:
    """Shaped rewards of one objective with the other inputs of its estimator; updates its reward moments."""
    objective, config, group = state.objectives[name], state.config, rollouts.group_size
    rows = rollouts.rows_of(name)
    own, drawn = [scores[i] for i in rows], torch.tensor([len(rollouts.completion_ids[i]) for i in rows])
    rewards = reward_matrix(own, group)
    rewards = torch.where(rewards.isnan().any(dim=1, keepdim=True), torch.nan, rewards)
    rewards = without_lone_judge(rewards, own, objective.config.judge)
    scale, cut = reward_scale(own, group), rollouts.by_prompt(_truncated(rollouts)[rows])
    rewards, objective.moments = shape(rewards, rollouts.by_prompt(drawn), cut, config, objective.moments, scale)
    return losses.GroupRewards(
        rewards,
        rollouts.by_prompt(_lengths(rollouts, plan.algorithm)[rows]),
        _kl_cost(plan, name, rollouts, measured),
        objective.moments.rescale(scale) if config.shaping.normalise else scale,
    )


def _advantages(groups: losses.GroupRewards, algorithm: AlgorithmConfig) -> Float[Tensor, "prompt group #token"]:
    """The settings' estimator; zeros where nothing of the objective was scored, which then trains nothing."""
    if groups.rewards.isnan().all():
        return torch.zeros(*groups.rewards.shape, 1)
    return losses.advantages(groups, algorithm.row.advantage, algorithm.advantage_bound)


def _with_signal(
    advantages: Float[Tensor, "batch #token"], mask: Bool[Tensor, "batch token"], group: int
) -> Bool[Tensor, "batch"]:
    """Rows of the groups in which some completion has a trained token with an advantage."""
    learns = ((advantages != 0) & mask).any(dim=1)
    return by_prompt(learns, group).any(dim=1).repeat_interleave(group)


def _truncated(rollouts: Rollouts) -> Tensor:
    return torch.tensor([reason == "length" for reason in rollouts.stop_reasons])


def _lengths(rollouts: Rollouts, algorithm: AlgorithmConfig) -> Int[Tensor, "batch"]:
    """Tokens of each completion that train."""
    lengths = torch.tensor([len(ids) for ids in rollouts.completion_ids])
    return lengths * ~_truncated(rollouts) if algorithm.mask_truncated else lengths


def _mask(rollouts: Rollouts, algorithm: AlgorithmConfig) -> Bool[Tensor, "batch token"]:
    return token_mask(_lengths(rollouts, algorithm), max(map(len, rollouts.completion_ids)))


def _kl_cost(
    plan: StepPlan, name: str, rollouts: Rollouts, measured: Measured
) -> Float[Tensor, "prompt group token"] | None:
    """beta * k1 of every token, where the KL is in the reward."""
    beta, old, reference = plan.betas[name], measured.old, measured.reference
    if not plan.loss.algorithm.kl_in_reward or old is None or reference is None or beta == 0:
        return None
    rows, clamp = rollouts.rows_of(name), plan.algorithm.log_ratio_clamp
    k1 = losses.kl_k1(old.logprobs[rows], reference[rows], clamp, _mask(rollouts, plan.algorithm)[rows])
    return rollouts.by_prompt(beta * torch.where(k1.isfinite(), k1, 0.0))  # a bad row spoils no other of its group


def _token_weights(
    rollouts: Rollouts, old: TokenStats, kept: Bool[Tensor, "batch"], algorithm: AlgorithmConfig
) -> Float[Tensor, "batch token"] | None:
    if algorithm.importance_correction == "none" and algorithm.top_entropy_quantile == 1:
        return None
    mask = _mask(rollouts, algorithm)
    how = losses.Correction(
        algorithm.importance_correction,
        algorithm.importance_correction_level,
        algorithm.importance_correction_bounds,
        algorithm.log_ratio_clamp,
    )
    weights = losses.correction(how, old.logprobs, sampler_logprobs(rollouts), mask)
    for name in dict.fromkeys(drawn.objective for drawn in rollouts.prompts):
        rows = [i for i in rollouts.rows_of(name) if kept[i]]
        learns = losses.top_entropy(old.entropy[rows], mask[rows], algorithm.top_entropy_quantile)
        weights[rows] = torch.where(learns, weights[rows], 0.0)
    return weights


def _kl(batch: Experience, name: str, plan: StepPlan) -> float | None:
    """Mean over the objective's trained tokens, by the estimator that its loss has or k3; None without a token."""
    rows = batch.kept_rows(name)
    mask = batch.mask()[rows]
    if batch.logprobs_reference is None or not mask.any():
        return None
    estimate = losses.KL[plan.loss.algorithm.kl_reported]
    per_token = estimate(batch.logprobs_old[rows], batch.logprobs_reference[rows], plan.algorithm.log_ratio_clamp, mask)
    return float(losses.masked_mean(per_token, mask))
