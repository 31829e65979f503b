"""Metrics of a step: the flat row of metrics.jsonl from the step's results."""

import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, stdev

import psutil
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.profiler import record_function

from grpo_nb import losses
from grpo_nb.judge.tally import NAME as JUDGE
from grpo_nb.judge.tally import spearman
from grpo_nb.losses.rounding import FAR
from grpo_nb.metrics import keys
from grpo_nb.optim import Update
from grpo_nb.ranks.leader import Ranks
from grpo_nb.rewards.rubric import TASK
from grpo_nb.training.gradients import GradientStats
from grpo_nb.types import Experience, Rollouts, Score

Row = dict[str, float | int | str | None]
Updates = list[tuple[GradientStats, Update]]
"""Gradient statistics and result of each optimizer update of a step."""


PHASE_RANGE = "grpo_nb/"
"""Prefix of a phase's name in a profiler's trace."""


class Clock:
    """Seconds by phase: `with clock("rollout"): ...`."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with record_function(f"{PHASE_RANGE}{phase}"):
                yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - start

    def row(self) -> Row:
        phases: Row = {keys.TIME.of(name): seconds for name, seconds in self.phases.items()}
        return phases | {keys.TIME_STEP: time.perf_counter() - self.began}


def rank_row(ranks: Ranks) -> Row:
    """Seconds and peak memory of each rank since the row before; empty with one rank."""
    if ranks.size == 1:
        return {}
    seconds: Row = {keys.TIME_RANK.of(str(rank)): value for rank, value in sorted(ranks.seconds().items())}
    memory: Row = {keys.MEMORY_RANK.of(str(rank)): value for rank, value in sorted(ranks.peaks().items())}
    return seconds | {keys.TIME_RANKS_WAITED: ranks.waited()} | memory


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory in MiB: of the GPU allocator, or of this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def memory_mib(device: torch.device) -> float | None:
    """Memory held now in MiB, measured as `peak_memory_mib`; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**20
    try:
        return float(psutil.Process().memory_info().rss) / 2**20
    except psutil.Error:
        return None


def update_row(updates: Updates, scored: bool = False, passes: int = 1) -> Row:
    """Loss, ratio, clipping and gradient over the step's optimizer updates; the ratio is the first update's.

    Of several `passes` over the rollouts, each with as many updates, the clipping of each pass too.

    The status is `skipped` where no update was applied, `empty` where none had anything to learn from: without any
    update too, where groups were `scored` and all of them left out as free of signal.
    """
    if not updates:
        nothing: Row = {keys.STATUS: "empty" if scored else "skipped", keys.LOSS: None}
        return nothing | {keys.GRAD_NORM: None, keys.GRAD_UPDATE: 0.0, keys.GRAD_SKIPPED: 0}
    first = updates[0][0]
    statuses = [u.status for _, u in updates]
    cosines = [g.cosine for g, _ in updates if g.cosine is not None]
    return {
        keys.STATUS: _status_of_all(statuses),
        keys.GRAD_SKIPPED: statuses.count("skipped"),
        keys.LOSS: fmean(g.loss for g, _ in updates),
        **{keys.LOSS_TERM.of(term): fmean(g.terms.get(term, 0.0) for g, _ in updates) for term in first.terms},
        keys.RATIO_MAX_DEVIATION: first.ratio_deviation,
        **difference_row(keys.RATIO_DIFFERENCE, torch.cat(first.log_ratios) if first.log_ratios else None),
        **_token_shares([g for g, _ in updates]),
        **(_shares_by_pass([g for g, _ in updates], passes) if passes > 1 else {}),
        keys.GRAD_NORM: max((u.norm for _, u in updates), key=lambda n: (not math.isfinite(n), n)),
        keys.GRAD_UPDATE: sum(u.moved for _, u in updates),
        keys.GRAD_COSINE: min(cosines) if cosines else None,
        **{keys.GRAD_NORM_OF.of(name): norm for name, norm in first.norms.items()},
    }


def _token_shares(gradients: Sequence[GradientStats]) -> Row:
    tokens = max(sum(g.tokens for g in gradients), 1)
    low, high = _clipped(gradients)
    return {
        keys.RATIO_CLAMPED: sum(g.clamped for g in gradients) / tokens,
        keys.CLIP_RATIO_LOW: low,
        keys.CLIP_RATIO_HIGH: high,
    }


def _shares_by_pass(gradients: Sequence[GradientStats], passes: int) -> Row:
    each = -(-len(gradients) // passes)
    row: Row = {}
    for number, start in enumerate(range(0, len(gradients), each), 1):
        low, high = _clipped(gradients[start : start + each])
        row |= {keys.CLIP_RATIO_LOW_OF.of(str(number)): low, keys.CLIP_RATIO_HIGH_OF.of(str(number)): high}
    return row


def _clipped(gradients: Sequence[GradientStats]) -> tuple[float, float]:
    """Shares of tokens that the clip holds, below and above."""
    tokens = max(sum(g.tokens for g in gradients), 1)
    return sum(g.clipped_low for g in gradients) / tokens, sum(g.clipped_high for g in gradients) / tokens


def _status_of_all(statuses: Sequence[str]) -> str:
    if len(set(statuses)) == 1:
        return statuses[0]
    return "clipped" if "clipped" in statuses else "ok"


def difference_row(of: keys.Difference, sizes: Float[Tensor, "token"] | None) -> Row:
    """|Δ log p| over tokens, in nats: mean, 99th percentile, and the share that no rounding gives."""
    if sizes is None or not sizes.numel():
        return {}
    place = min(int(0.99 * sizes.numel()), sizes.numel() - 1)  # torch.quantile ends at 16 million
    return {
        of.mean: float(sizes.mean()),
        of.p99: float(sizes.sort().values[place]),
        of.far: float((sizes > FAR).float().mean()),
    }


def reward_row(
    objective: str,
    scores: Sequence[Score],
    rewards: Float[Tensor, "prompt group"],
    learns: Bool[Tensor, "prompt group"],
) -> Row:
    """Rewards of one objective as given: mean, spread inside the groups, unscored groups, labels; each part's too.

    A group without signal was scored, but none of its completions `learns`: has a trained token with an advantage other
    than 0.
    """
    scored = [s for s in scores if s.value is not None]
    complete = ~rewards.isnan().any(dim=1)
    whole, dead = rewards[complete], ~learns.any(dim=1)[complete]
    labels = Counter(s.label for s in scores if s.label)
    return {
        keys.REWARD.of(objective): _mean([s.value for s in scored if s.value is not None]),
        keys.REWARD_STD.of(objective): float(whole.std(dim=1).mean()) if len(whole) else None,
        keys.SCORED.of(objective): len(scored) / len(scores),
        keys.FRAC_REWARD_ZERO_STD.of(objective): float(dead.double().mean()) if len(whole) else None,
        **expected_row(objective, scores, rewards.shape[1]),
        keys.UNSCORED_GROUPS.of(objective): len(rewards) - len(whole),
        **{keys.REWARD_PART.of(objective, name): value for name, value in _part_means(scores).items()},
        **{keys.REWARD_PART_STD.of(objective, name): v for name, v in _part_spreads(scores, rewards.shape[1]).items()},
        **{keys.LABEL.of(objective, name): count / len(scores) for name, count in sorted(labels.items())},
    }


def part_length_row(objective: str, scores: Sequence[Score], lengths: Sequence[int]) -> Row:
    """Rank correlation of each extra reward function with length, in tokens; the task and a judge are left out."""
    return {
        keys.REWARD_PART_LENGTH.of(objective, name): spearman(list(zip(values, map(float, lengths), strict=True)))
        for name, values in _parts(scores).items()
        if name not in (TASK, JUDGE)
    }


def expected_row(objective: str, scores: Sequence[Score], group: int) -> Row:
    """Share of groups that are all right or all wrong by chance, from each prompt's own share of right answers."""
    groups = [scores[i : i + group] for i in range(0, len(scores), group)]
    shares = [sum(s.label == "correct" for s in own) / group for own in groups if all(s.label for s in own)]
    if not shares:
        return {}
    return {keys.FRAC_ZERO_STD_EXPECTED.of(objective): fmean(p**group + (1 - p) ** group for p in shares)}


def condition_row(objective: str, scores: Sequence[Score], told: Sequence[bool | None]) -> Row:
    """Label shares of the answers whose item its text answers, and of the others."""
    row: Row = {}
    for group, condition in ((keys.LABEL_ANSWERABLE, True), (keys.LABEL_UNANSWERABLE, False)):
        own = [s.label for s, answered in zip(scores, told, strict=True) if answered is condition]
        labels = sorted(Counter(label for label in own if label).items())
        row |= {group.of(objective, name): count / len(own) for name, count in labels}
    return row


def length_row(objective: str, rollouts: Rollouts, rows: Sequence[int]) -> Row:
    """Completion lengths in tokens, stop token included, and the share that hit the cap."""
    lengths = torch.tensor([float(len(rollouts.completion_ids[i])) for i in rows])
    truncated = sum(rollouts.stop_reasons[i] == "length" for i in rows)
    return {
        keys.LENGTH_MEAN.of(objective): float(lengths.mean()),
        keys.LENGTH_P50.of(objective): float(lengths.quantile(0.5)),
        keys.LENGTH_P95.of(objective): float(lengths.quantile(0.95)),
        keys.TRUNCATION.of(objective): truncated / len(rows),
    }


def clipped_row(objective: str, batch: Experience, bound: float | None) -> Row:
    """Share of one objective's trained answers whose advantage `algorithm.advantage_clip` cut; absent without one."""
    rows = batch.kept_rows(objective)
    learns = batch.learns()[rows]
    if bound is None or not learns.any():
        return {}
    cut = (batch.advantages[rows].abs() >= batch.advantages.new_tensor(bound)).any(dim=1)
    return {keys.ADVANTAGE_CLIPPED.of(objective): float(cut[learns].double().mean())}


def shaped_row(objective: str, rewards: Float[Tensor, "prompt group"]) -> Row:
    """Mean of the rewards as they were compared, after shaping."""
    return {keys.REWARD_SHAPED.of(objective): _mean(rewards[~rewards.isnan()].tolist())}


def policy_row(objective: str, batch: Experience, log_ratio_clamp: float) -> Row:
    """KL to the reference and entropy of one objective, in nats per token, before the step's first update."""
    rows = batch.kept_rows(objective)
    mask = batch.mask()[rows]
    values: dict[keys.Key, Tensor | float | None]
    values = dict.fromkeys((keys.KL, keys.KL_K1, keys.KL_K2, keys.LOG_RATIO_CLAMPED, keys.ENTROPY))
    if not mask.any():  # no group was scored, or every answer is masked as truncated
        return {key.of(objective): None for key in values}
    values[keys.ENTROPY] = losses.masked_mean(batch.entropy[rows], mask)
    values[keys.KL] = batch.kl[objective]
    if batch.logprobs_reference is not None:
        new, reference = batch.logprobs_old[rows], batch.logprobs_reference[rows]
        values[keys.KL_K1] = losses.masked_mean(losses.kl_k1(new, reference, log_ratio_clamp, mask), mask)
        values[keys.KL_K2] = losses.masked_mean(losses.kl_k2(new, reference, log_ratio_clamp, mask), mask)
        values[keys.LOG_RATIO_CLAMPED] = losses.clamped_share(new, reference, mask, log_ratio_clamp)
    return {key.of(objective): None if value is None else float(value) for key, value in values.items()}


def sampler_row(batch: Experience, sampled: Float[Tensor, "batch token"]) -> Row:
    """Sampler/trainer log-prob difference in nats per trained token, and the effect of its correction."""
    mask = batch.mask() & batch.kept[:, None]
    if not mask.any():
        return {keys.SAMPLER_DIFFERENCE.mean: None}
    row = difference_row(keys.SAMPLER_DIFFERENCE, (batch.logprobs_old - sampled).abs()[mask])
    if batch.token_weights is None:
        return row
    silent = (batch.token_weights == 0).to(sampled.dtype)
    return row | {
        keys.IMPORTANCE_WEIGHT_MEAN: float(losses.masked_mean(batch.token_weights, mask)),
        keys.IMPORTANCE_WEIGHT_ZERO: float(losses.masked_mean(silent, mask)),
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _part_means(scores: Sequence[Score]) -> dict[str, float | None]:
    return {name: _mean([v for v in values if v is not None]) for name, values in _parts(scores).items()}


def _part_spreads(scores: Sequence[Score], group: int) -> dict[str, float | None]:
    """Mean standard deviation inside the groups that have the part throughout."""
    spreads: dict[str, float | None] = {}
    for name, values in _parts(scores).items():
        groups = [values[i : i + group] for i in range(0, len(values), group)]
        whole = [[v for v in values if v is not None] for values in groups]
        spreads[name] = _mean([stdev(values) for values in whole if len(values) == group > 1])
    return spreads


def _parts(scores: Sequence[Score]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for s in scores for name in s.parts)
    return {name: [s.parts.get(name) for s in scores] for name in names}
