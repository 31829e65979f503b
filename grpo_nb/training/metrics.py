"""A step in numbers: the flat row of metrics.jsonl from what the step saw."""

import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, stdev

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_nb import losses
from grpo_nb.losses.rounding import FAR
from grpo_nb.optim import Update
from grpo_nb.training.gradients import GradientStats
from grpo_nb.types import Experience, Rollouts, Score

Row = dict[str, float | int | str | None]
Updates = list[tuple[GradientStats, Update]]
"""What each optimizer update of a step saw and did."""


class Clock:
    """Seconds by phase: `with clock("rollout"): ...`."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - start

    def row(self) -> Row:
        phases: Row = {f"time/{name}": seconds for name, seconds in self.phases.items()}
        return phases | {"time/step": time.perf_counter() - self.began}


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory in MiB: of the GPU allocator, or of this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def update_row(updates: Updates) -> Row:
    """Loss, ratio, clipping and gradient over the step's optimizer updates; the ratio is the first update's.

    The status is `skipped` where no update was applied, `empty` where none had anything to learn from.
    """
    if not updates:
        return {"status": "skipped", "loss": None, "grad/norm": None, "grad/update": 0.0, "grad/skipped": 0}
    first = updates[0][0]
    statuses = [u.status for _, u in updates]
    cosines = [g.cosine for g, _ in updates if g.cosine is not None]
    return {
        "status": _status_of_all(statuses),
        "grad/skipped": statuses.count("skipped"),
        "loss": fmean(g.loss for g, _ in updates),
        **{f"loss/{term}": fmean(g.terms.get(term, 0.0) for g, _ in updates) for term in first.terms},
        "ratio/max_dev": first.ratio_deviation,
        **gap_row("ratio/gap", torch.cat(first.log_ratios) if first.log_ratios else None),
        **_token_shares([g for g, _ in updates]),
        "grad/norm": max((u.norm for _, u in updates), key=lambda n: (not math.isfinite(n), n)),
        "grad/update": sum(u.moved for _, u in updates),
        "grad/cosine": min(cosines) if cosines else None,
        **{f"grad/norm/{name}": norm for name, norm in first.norms.items()},
    }


def _token_shares(gradients: Sequence[GradientStats]) -> Row:
    tokens = max(sum(g.tokens for g in gradients), 1)
    return {
        "ratio/clamped": sum(g.clamped for g in gradients) / tokens,
        "clip/low": sum(g.clipped_low for g in gradients) / tokens,
        "clip/high": sum(g.clipped_high for g in gradients) / tokens,
    }


def _status_of_all(statuses: Sequence[str]) -> str:
    if len(set(statuses)) == 1:
        return statuses[0]
    return "clipped" if "clipped" in statuses else "ok"


def gap_row(key: str, sizes: Float[Tensor, "token"] | None) -> Row:
    """|Δ log p| over tokens, in nats: mean, 99th percentile, and the share that no rounding gives."""
    if sizes is None or not sizes.numel():
        return {}
    place = min(int(0.99 * sizes.numel()), sizes.numel() - 1)  # torch.quantile ends at 16 million
    return {
        key: float(sizes.mean()),
        f"{key}_p99": float(sizes.sort().values[place]),
        f"{key}_far": float((sizes > FAR).float().mean()),
    }


def reward_row(
    objective: str,
    scores: Sequence[Score],
    rewards: Float[Tensor, "prompt group"],
    learns: Bool[Tensor, "prompt group"],
) -> Row:
    """Rewards of one objective as given: mean, spread inside the groups, unscored groups, labels; each part's too.

    A dead group teaches nothing: it was scored, and none of its answers `learns`, has a trained token with an
    advantage that is not 0.
    """
    scored = [s for s in scores if s.value is not None]
    complete = ~rewards.isnan().any(dim=1)
    whole, dead = rewards[complete], ~learns.any(dim=1)[complete]
    labels = Counter(s.label for s in scores if s.label)
    return {
        f"reward/{objective}": _mean([s.value for s in scored if s.value is not None]),
        f"reward_std/{objective}": float(whole.std(dim=1).mean()) if len(whole) else None,
        f"scored/{objective}": len(scored) / len(scores),
        f"dead_groups/{objective}": float(dead.double().mean()) if len(whole) else None,
        f"unscored_groups/{objective}": len(rewards) - len(whole),
        **{f"reward_part/{objective}/{name}": value for name, value in _part_means(scores).items()},
        **{f"reward_part_std/{objective}/{name}": v for name, v in _part_spreads(scores, rewards.shape[1]).items()},
        **{f"label/{objective}/{name}": count / len(scores) for name, count in sorted(labels.items())},
    }


def condition_row(objective: str, scores: Sequence[Score], told: Sequence[bool | None]) -> Row:
    """Label shares of the answers whose item its text answers (`label_told/`), and of the others (`label_untold/`)."""
    row: Row = {}
    for group, condition in (("label_told", True), ("label_untold", False)):
        own = [s.label for s, answered in zip(scores, told, strict=True) if answered is condition]
        labels = sorted(Counter(label for label in own if label).items())
        row |= {f"{group}/{objective}/{name}": count / len(own) for name, count in labels}
    return row


def length_row(objective: str, rollouts: Rollouts, rows: Sequence[int]) -> Row:
    """Completion lengths in tokens, terminator included, and the share that hit the cap."""
    lengths = torch.tensor([float(len(rollouts.completion_ids[i])) for i in rows])
    truncated = sum(rollouts.stop_reasons[i] == "length" for i in rows)
    return {
        f"length/{objective}/mean": float(lengths.mean()),
        f"length/{objective}/p50": float(lengths.quantile(0.5)),
        f"length/{objective}/p95": float(lengths.quantile(0.95)),
        f"truncation/{objective}": truncated / len(rows),
    }


def clipped_row(objective: str, batch: Experience, bound: float | None) -> Row:
    """Share of one objective's trained answers whose advantage `algorithm.advantage_clip` cut; absent without one."""
    rows = batch.kept_rows(objective)
    learns = batch.learns()[rows]
    if bound is None or not learns.any():
        return {}
    cut = (batch.advantages[rows].abs() >= batch.advantages.new_tensor(bound)).any(dim=1)
    return {f"advantage_clipped/{objective}": float(cut[learns].double().mean())}


def shaped_row(objective: str, rewards: Float[Tensor, "prompt group"]) -> Row:
    """Mean of the rewards as they were compared, after shaping; `reward/` is before it."""
    return {f"shaped_reward/{objective}": _mean(rewards[~rewards.isnan()].tolist())}


def policy_row(objective: str, batch: Experience, log_ratio_clamp: float) -> Row:
    """KL to the reference and entropy of one objective, in nats per token, before the step's first update."""
    rows, keys = batch.kept_rows(objective), ("kl", "kl_k1", "kl_clamped", "entropy")
    mask = batch.mask()[rows]
    if not mask.any():  # no group was scored, or every answer is masked as truncated
        return {f"{key}/{objective}": None for key in keys}
    values: dict[str, Tensor | float | None] = {key: None for key in keys}
    values["entropy"] = losses.masked_mean(batch.entropy[rows], mask)
    values["kl"] = batch.kl[objective]
    if batch.logprobs_reference is not None:
        new, reference = batch.logprobs_old[rows], batch.logprobs_reference[rows]
        values["kl_k1"] = losses.masked_mean(losses.kl_k1(new, reference, log_ratio_clamp, mask), mask)
        values["kl_clamped"] = losses.clamped_share(new, reference, mask, log_ratio_clamp)
    return {f"{key}/{objective}": None if value is None else float(value) for key, value in values.items()}


def sampler_row(batch: Experience, sampled: Float[Tensor, "batch token"]) -> Row:
    """How far the sampler's log-probs are from the trainer's, in nats per trained token, and what was done about it."""
    mask = batch.mask() & batch.kept[:, None]
    if not mask.any():
        return {"sampler_gap": None}
    row = gap_row("sampler_gap", (batch.logprobs_old - sampled).abs()[mask])
    if batch.weights is None:
        return row
    silent = (batch.weights == 0).to(sampled.dtype)
    return row | {
        "weight/mean": float(losses.masked_mean(batch.weights, mask)),
        "weight/zero": float(losses.masked_mean(silent, mask)),
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
