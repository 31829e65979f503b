"""Gradients of one optimizer update: micro-batches in, the objectives' combined gradient in `.grad`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_nb import combine, losses
from grpo_nb.config import AlgorithmConfig
from grpo_nb.model import Policy
from grpo_nb.types import Batch, Experience


@dataclass
class GradientStats:
    """What the backward passes of one update reported; `loss` is in reward units, the rest without unit."""

    loss: float = 0.0
    ratio_deviation: float = 0.0
    """max |pi_new / pi_old - 1| over the trained tokens."""
    tokens: int = 0
    clipped_low: float = 0.0
    """Tokens whose gradient the lower clip removed."""
    clipped_high: float = 0.0
    norms: dict[str, float] = field(default_factory=dict)
    """Norm of each objective's own gradient, where they are kept apart."""
    cosine: float | None = None
    """Smallest cosine between two objectives' gradients, zero gradients left out."""


def objective_gradients(
    policy: Policy,
    experience: Experience,
    rows: Mapping[str, Sequence[int]],
    betas: Mapping[str, float],
    weights: Mapping[str, float],
    algorithm: AlgorithmConfig,
    *,
    micro_batch: int,
    max_completion: int,
    generator: torch.Generator,
) -> GradientStats:
    """Accumulate the gradient of each objective over its `rows` and leave their combination in `.grad`.

    Every forward pass has a graph of its own, denominators count the whole update, and `.grad` is only ever
    added to: any micro_batch gives the same gradient to rounding. With `sum` nothing else is stored; another
    combiner keeps one gradient per objective and weighs them through their Gram matrix.
    """
    stats, parameters = GradientStats(), policy.parameters_by_name()
    apart: dict[str, dict[str, Tensor]] = {}
    separate = algorithm.combine != "sum" and len(rows) > 1
    for name, indices in rows.items():
        scale = 1.0 if separate else weights[name]
        counts = _counts(experience, indices, max_completion)
        for micro in chunks(indices, micro_batch):
            loss = micro_loss(policy, experience, micro, betas[name], algorithm, counts, stats)
            (scale * loss).backward()
            stats.loss += weights[name] * loss.item()
        if separate:
            apart[name] = {key: p.grad for key, p in parameters.items() if p.grad is not None}
            for parameter in parameters.values():
                parameter.grad = None
    if separate:
        gram = combine.gram(list(apart.values()))
        shares = torch.tensor([weights[name] for name in apart], dtype=gram.dtype)
        shares = combine.COMBINERS[algorithm.combine](gram, shares, generator)
        for key, gradient in combine.combine(list(apart.values()), shares).items():
            parameters[key].grad = gradient
        stats.norms = dict(zip(apart, combine.norms(gram).tolist(), strict=True))
        stats.cosine = combine.min_cosine(gram)
    return stats


def micro_loss(
    policy: Policy,
    experience: Experience,
    rows: Sequence[int],
    beta: float,
    algorithm: AlgorithmConfig,
    counts: losses.Counts,
    stats: GradientStats,
) -> Float[Tensor, ""]:
    """Surrogate + beta * KL over some rows of one objective, divided by the whole update's counts."""
    batch = collate(policy, experience, rows)
    tokens = policy.logprobs(batch, experience.temperature)
    logp = tokens.logprobs.float()
    if not experience.old_known:
        store(experience.logprobs_old, rows, logp)
        store(experience.entropy, rows, tokens.entropy)
    index, width, device = list(rows), logp.shape[1], logp.device
    old = experience.logprobs_old[index, :width].to(device)
    mask = experience.mask()[index, :width].to(device)
    advantage = experience.advantages[index].to(device)
    clamp = algorithm.log_ratio_clamp
    surrogate = losses.SURROGATES[losses.ALGORITHMS[algorithm.loss].surrogate]
    per_token = surrogate(logp, old, advantage, algorithm.clip_low, algorithm.clip_high, clamp, mask)
    if beta > 0 and experience.logprobs_reference is not None:
        reference = experience.logprobs_reference[index, :width].to(device)
        per_token = per_token + beta * losses.KL[algorithm.kl](logp, reference, clamp, mask)
    _observe(stats, logp.detach(), old, advantage, mask, algorithm)
    return losses.reduce(algorithm.loss, per_token, mask, counts)


def token_stats(
    policy: Policy, experience: Experience, micro_batch: int
) -> tuple[Float[Tensor, "batch token"], Float[Tensor, "batch token"]]:
    """Log-probs and entropies, in nats, of every sampled token under the policy's present weights."""
    logprobs, entropy = torch.zeros_like(experience.logprobs_old), torch.zeros_like(experience.entropy)
    for rows in chunks(range(len(experience.objectives)), micro_batch):
        stats = policy.logprobs(collate(policy, experience, rows), experience.temperature)
        store(logprobs, rows, stats.logprobs)
        store(entropy, rows, stats.entropy)
    return logprobs, entropy


def collate(policy: Policy, experience: Experience, rows: Sequence[int]) -> Batch:
    """The rows as one padded batch, no wider than they need."""
    return policy.collate([experience.prompt_ids[i] for i in rows], [experience.completion_ids[i] for i in rows])


def store(table: Float[Tensor, "batch token"], rows: Sequence[int], values: Tensor) -> None:
    """Write one micro-batch's values into the step's table."""
    table[list(rows), : values.shape[1]] = values.detach().float().cpu()


def chunks(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Consecutive pieces of at most `size`."""
    return (items[i : i + size] for i in range(0, len(items), size))


def _counts(experience: Experience, rows: Sequence[int], max_completion: int) -> losses.Counts:
    lengths = experience.lengths[list(rows)]
    sequences, tokens = int((lengths > 0).sum()), int(lengths.sum())  # a masked answer counts nowhere
    return losses.Counts(sequences=sequences, tokens=tokens, max_completion=max_completion)


def _observe(
    stats: GradientStats, logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, algorithm: AlgorithmConfig
) -> None:
    if not (tokens := int(mask.sum())):
        return
    low, high = losses.clip_fractions(logp, old, advantage, mask, algorithm.clip_low, algorithm.clip_high)
    stats.ratio_deviation = max(stats.ratio_deviation, float(losses.ratio_deviation(logp, old, mask)))
    stats.tokens += tokens
    stats.clipped_low += float(low) * tokens
    stats.clipped_high += float(high) * tokens
