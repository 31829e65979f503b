"""What a step learns from: its rows gathered, then compared, as tensors that no longer change."""

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
from grpo_nb.training.state import Drawn, Training
from grpo_nb.types import Experience, Rollouts, Score


def gather(state: Training, drawn_P: Sequence[Drawn], rollouts: Rollouts, temperature: float) -> Experience:
    """The step's B rows, before anything is measured, scored or compared.

    Raises:
        TrainingError: a mask does not fit what was sampled.
    """
    algorithm, group, count = state.config.algorithm, rollouts.group_size, len(rollouts.completion_ids)
    lengths = torch.tensor([len(ids) for ids in rollouts.completion_ids])
    if algorithm.mask_truncated:
        lengths *= ~_truncated(rollouts)
    blank = torch.zeros(count, max(len(ids) for ids in rollouts.completion_ids))
    experience = Experience(
        objectives=[drawn_P[i // group].objective for i in range(count)],
        prompt_ids=[rollouts.prompt_ids[i // group] for i in range(count)],
        completion_ids=rollouts.completion_ids,
        temperature=temperature,
        advantages=torch.zeros(count, 1),
        kept=torch.ones(count, dtype=torch.bool),
        logprobs_old=blank,
        old_known=not state.config.batch.on_policy or algorithm.old_first or state.step == 0,
        logprobs_reference=None,
        entropy=blank.clone(),
        lengths=lengths,
    )
    guards.check_masks(rollouts, experience, algorithm.mask_truncated)
    return experience


def compare(
    state: Training, experience: Experience, rollouts: Rollouts, scores: Sequence[Score], betas: dict[str, float]
) -> dict[str, Float[Tensor, "prompt group"]]:
    """Fill in which groups are kept, the advantages and the token weights; give back the rewards by objective.

    An incomplete group is NaN throughout, so it moves no statistic of the others. Moves each objective's running
    reward moments where rewards are normalised.
    """
    config, group = state.config, rollouts.group_size
    experience.kept = (~reward_matrix(scores, group).isnan().any(dim=1)).repeat_interleave(group)
    compared, shaped = [], {}
    for name, objective in state.objectives.items():
        rows = experience.drawn_for(name)
        rewards = reward_matrix([scores[i] for i in rows], group)
        rewards = torch.where(rewards.isnan().any(dim=1, keepdim=True), torch.nan, rewards)
        rewards = without_lone_judge(rewards, [scores[i] for i in rows], objective.config.judge)
        lengths = torch.tensor([len(rollouts.completion_ids[i]) for i in rows]).view(-1, group)
        scale = reward_scale([scores[i] for i in rows], group)
        shaped[name], objective.moments = shape(
            rewards, lengths, _truncated(rollouts)[rows].view(-1, group), config, objective.moments, scale
        )
        outcomes = losses.Outcomes(
            shaped[name],
            experience.lengths[rows].view(-1, group),
            _penalty(experience, rows, betas[name], config, group),
            objective.moments.rescale(scale) if config.shaping.normalise else scale,
        )
        compared.append(_advantages(outcomes, config.algorithm).flatten(0, 1).float())
    widest = max(values.shape[1] for values in compared)  # one a token where a penalty makes them differ
    experience.advantages = torch.cat([values.expand(-1, widest) for values in compared])
    experience.weights = _weights(experience, rollouts, config)
    return shaped


def shape(
    rewards: Float[Tensor, "prompt group"],
    lengths: Int[Tensor, "prompt group"],
    truncated: Tensor,
    config: Config,
    moments: losses.Moments,
    scale: Float[Tensor, "prompt group"] | None = None,
) -> tuple[Float[Tensor, "prompt group"], losses.Moments]:
    """Rewards as the settings shape them, in this order: truncated, overlong, normalised, clipped; and the moments.

    `scale`: size of what each reward was summed from, where that is known to be more than its own.
    """
    shaping = config.shaping
    if shaping.truncated_factor is not None:
        rewards = losses.stop_properly(rewards, truncated, shaping.truncated_factor)
    if shaping.overlong_buffer:
        rewards = rewards + losses.overlong_penalty(
            lengths, config.sampling.max_completion, shaping.overlong_buffer, shaping.overlong_penalty
        )
    if shaping.normalise:
        known = ~rewards.isnan()
        largest = 0.0 if scale is None or not known.any() else float(scale[known].max())
        moments = moments.update(rewards[known].tolist(), largest)
        rewards = moments.normalise(rewards)
    return rewards if shaping.clip is None else rewards.clamp(-shaping.clip, shaping.clip), moments


def reward_matrix(scores: Sequence[Score], group: int) -> Float[Tensor, "prompt group"]:
    """Rewards by prompt and completion, in float64; NaN where there is none."""
    values = [float("nan") if s.value is None else s.value for s in scores]
    return torch.tensor(values, dtype=torch.float64).view(-1, group)


def part_matrix(scores: Sequence[Score], part: str, group: int) -> Float[Tensor, "prompt group"]:
    """One part of the rewards by prompt and completion, in float64; NaN where there is none."""
    return reward_matrix([replace(score, value=score.parts.get(part)) for score in scores], group)


def tied(scores: Sequence[Score], group: int) -> Bool[Tensor, "prompt"]:
    """Groups in which all task scores are equal, but for rounding."""
    return ~losses.comparable(part_matrix(scores, TASK, group))


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
    """Size of what each reward was summed from, by prompt and completion; 0 where there is none."""
    values = [max(s.scale, abs(s.value or 0.0)) for s in scores]
    return torch.tensor(values, dtype=torch.float64).view(-1, group)


def sampler_logprobs(experience: Experience, rollouts: Rollouts) -> Float[Tensor, "batch token"]:
    """What the engine said each token's log-prob was when it drew it; 0 beyond a completion."""
    table = torch.zeros_like(experience.logprobs_old)
    for i, values in enumerate(rollouts.logprobs):
        table[i, : len(values)] = torch.tensor(values, dtype=table.dtype)
    return table


def _advantages(outcomes: losses.Outcomes, algorithm: AlgorithmConfig) -> Float[Tensor, "prompt group #token"]:
    """The settings' estimator; zeros where nothing of the objective was scored, which then trains nothing."""
    if outcomes.rewards.isnan().all():
        return torch.zeros(*outcomes.rewards.shape, 1)
    return losses.advantages(outcomes, algorithm.row.advantage, algorithm.advantage_bound)


def _truncated(rollouts: Rollouts) -> Tensor:
    return torch.tensor([reason == "length" for reason in rollouts.stop_reasons])


def _penalty(
    experience: Experience, rows: Sequence[int], beta: float, config: Config, group: int
) -> Float[Tensor, "prompt group token"] | None:
    """beta * k1 of every token, where the KL is in the reward."""
    if not config.algorithm.row.kl_in_reward or experience.logprobs_reference is None or beta == 0:
        return None
    index = list(rows)
    clamp, mask = config.algorithm.log_ratio_clamp, experience.mask()[index]
    k1 = losses.kl_k1(experience.logprobs_old[index], experience.logprobs_reference[index], clamp, mask)
    return (beta * k1).view(-1, group, k1.shape[1])


def _weights(experience: Experience, rollouts: Rollouts, config: Config) -> Float[Tensor, "batch token"] | None:
    algorithm, mask = config.algorithm, experience.mask()
    if algorithm.correction == "none" and algorithm.entropy_top_share == 1:
        return None
    weights = losses.correction(
        algorithm.correction,
        algorithm.correction_level,
        experience.logprobs_old,
        sampler_logprobs(experience, rollouts),
        mask,
        algorithm.correction_bounds,
        algorithm.log_ratio_clamp,
    )
    for name in dict.fromkeys(experience.objectives):
        rows = experience.rows_of(name)
        learns = losses.top_entropy(experience.entropy[rows], mask[rows], algorithm.entropy_top_share)
        weights[rows] = torch.where(learns, weights[rows], 0.0)
    return weights
