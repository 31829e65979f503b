"""Gradients of one optimizer update: micro-batches in, the objectives' combined gradient in `.grad`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_nb import combine, losses
from grpo_nb.config import AlgorithmConfig
from grpo_nb.policy.model import Policy
from grpo_nb.types import Batch, Experience


@dataclass
class GradientStats:
    """What the backward passes of one update reported; `loss` is in reward units, the rest without unit."""

    loss: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    """The loss by term: policy, kl, entropy."""
    ratio_deviation: float = 0.0
    """max |pi_new / pi_old - 1| over the trained tokens."""
    log_ratios: list[Tensor] = field(default_factory=list)
    """|log pi_new / pi_old| of the trained tokens, a tensor a micro-batch."""
    tokens: int = 0
    clipped_low: float = 0.0
    """Tokens whose gradient the lower clip removed."""
    clipped_high: float = 0.0
    clamped: float = 0.0
    """Tokens whose log-ratio is beyond the clamp before exp."""
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
    stats, parameters, settings = GradientStats(), policy.parameters_by_name(), recipe(algorithm)
    apart: dict[str, dict[str, Tensor]] = {}
    separate = algorithm.combine != "sum" and len(rows) > 1
    for name, indices in rows.items():
        scale = 1.0 if separate else weights[name]
        counts = count(experience, indices, max_completion)
        for micro in chunks(indices, micro_batch):
            tokens = micro_tokens(policy, experience, micro, algorithm)
            terms = losses.loss_terms(tokens, settings, betas[name], counts)
            (scale * torch.stack(list(terms.values())).sum()).backward()
            _observe(stats, tokens, settings, {term: weights[name] * value.item() for term, value in terms.items()})
        if separate:
            apart[name] = {key: p.grad for key, p in parameters.items() if p.grad is not None}
            for parameter in parameters.values():
                parameter.grad = None
    if separate:
        gram = combine.gram(list(apart.values()))
        shares = torch.tensor([weights[name] for name in apart], dtype=gram.dtype)
        shares = combine.combiner(algorithm.combine, algorithm.cagrad_c)(gram, shares, generator)
        for key, gradient in combine.combine(list(apart.values()), shares).items():
            parameters[key].grad = gradient
        stats.norms = dict(zip(apart, combine.norms(gram).tolist(), strict=True))
        stats.cosine = combine.min_cosine(gram)
    return stats


def recipe(algorithm: AlgorithmConfig) -> losses.Recipe:
    """The loss that the settings describe."""
    row = algorithm.row
    limits = losses.Limits(
        low=row.clip[0],
        high=row.clip[1],
        dual=algorithm.dual_clip,
        log_ratio_clamp=algorithm.log_ratio_clamp,
        tau_positive=algorithm.sapo_tau_positive,
        tau_negative=algorithm.sapo_tau_negative,
        drift=algorithm.cpgd_drift,
        drift_clip=algorithm.cpgd_drift_clip,
    )
    return losses.Recipe(row, limits, algorithm.entropy_coef, algorithm.kl_factor)


def micro_tokens(
    policy: Policy, experience: Experience, rows: Sequence[int], algorithm: AlgorithmConfig
) -> losses.Tokens:
    """One forward pass of some rows, beside what the step knows of them.

    Where the old log-probs are not known yet, this pass, before the step's only update, is the one that gives them.
    """
    batch = collate(policy, experience, rows)
    stats = policy.logprobs(batch, experience.temperature, entropy_learns=algorithm.entropy_coef > 0)
    logp = stats.logprobs.float()
    if not experience.old_known:
        store(experience.logprobs_old, rows, logp)
        store(experience.entropy, rows, stats.entropy)
    index, width, device = list(rows), logp.shape[1], logp.device

    def of_rows(table: Tensor | None) -> Tensor | None:
        return None if table is None else table[index, :width].to(device)

    return losses.Tokens(
        logp=logp,
        logp_old=experience.logprobs_old[index, :width].to(device),
        logp_ref=of_rows(experience.logprobs_reference),
        advantage=experience.advantages[index, :width].to(device),
        mask=experience.mask()[index, :width].to(device),
        weight=of_rows(experience.weights),
        entropy=stats.entropy if algorithm.entropy_coef > 0 else None,
    )


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


def count(experience: Experience, rows: Sequence[int], max_completion: int) -> losses.Counts:
    """What the reductions of an update over these rows divide by."""
    lengths = experience.lengths[list(rows)]
    sequences, tokens = int((lengths > 0).sum()), int(lengths.sum())  # a masked answer counts nowhere
    return losses.Counts(sequences=sequences, tokens=tokens, max_completion=max_completion)


def _observe(stats: GradientStats, tokens: losses.Tokens, settings: losses.Recipe, terms: Mapping[str, float]) -> None:
    for term, value in terms.items():
        stats.loss += value
        stats.terms[term] = stats.terms.get(term, 0.0) + value
    if not (n := int(tokens.mask.sum())):
        return
    logp, old, mask, limits = tokens.logp.detach(), tokens.logp_old, tokens.mask, settings.limits
    low, high = losses.clip_fractions(settings.algorithm.surrogate, logp, old, tokens.advantage, limits, mask)
    stats.ratio_deviation = max(stats.ratio_deviation, float(losses.ratio_deviation(logp, old, mask)))
    stats.log_ratios.append(losses.log_ratio(logp, old, mask)[mask].abs().float().cpu())
    stats.tokens += n
    stats.clipped_low += float(low) * n
    stats.clipped_high += float(high) * n
    stats.clamped += float(losses.clamped_share(logp, old, mask, limits.log_ratio_clamp)) * n
