"""Gradients of one optimizer update: micro-batches in, the objectives' combined gradient in `.grad`."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_nb import combine_gradients, losses
from grpo_nb.policy.adapters import REFERENCE
from grpo_nb.policy.model import Policy
from grpo_nb.printable import Clean
from grpo_nb.training.batches import AnyBatch, batch_of, score
from grpo_nb.training.plan import StepPlan
from grpo_nb.types import Experience, Rollouts, TokenStats

T = TypeVar("T")


@dataclass
class GradientStats:
    """Statistics of the backward passes of one update; `loss` is in reward units, the rest without unit."""

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
    seen: TokenStats | None = None
    """[batch, token] of the policy before the update, from its own forward passes; None where computed before."""
    bad: list[int] = field(default_factory=list)
    """Rows that the update left out: a log-prob is not finite."""


class BadRows(Clean, ArithmeticError):
    """Raised when completions of an update have log-probs that are not finite."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"log-probs of completions {list(rows)} are not finite")
        self.rows = list(rows)


@dataclass(frozen=True)
class Measured:
    """Log-probs of the sampled tokens, in nats, under the policies that a step compares."""

    old: TokenStats | None
    """Statistics of the old policy; None: the step's only update computes them before it moves the weights."""
    reference: Float[Tensor, "batch token"] | None
    """Log-probs of the reference policy, in nats; None where nothing needs the KL."""


def measure(policy: Policy, rollouts: Rollouts, plan: StepPlan) -> Measured:
    """Log-probs of the sampled tokens under the old policy and the reference, as far as the plan needs them."""
    by = plan.numerics.passes
    with policy.eval_mode() if by == "model" else torch.no_grad():  # the others have no modes
        with policy.within():
            old = token_stats(policy, rollouts, plan) if plan.old_first else None
        if not plan.needs_reference:
            return Measured(old, None)
        if by == "flat":
            return Measured(old, token_stats(policy, rollouts, plan, REFERENCE).logprobs)
        with policy.as_grouped_reference() if by == "grouped" else policy.as_reference(), policy.within():
            return Measured(old, token_stats(policy, rollouts, plan).logprobs)


Accumulate = Callable[[Policy, Experience, Mapping[str, Sequence[int]], StepPlan], "Accumulated"]


def objective_gradients(
    policy: Policy,
    batch: Experience,
    rows: Mapping[str, Sequence[int]],
    plan: StepPlan,
    generator: torch.Generator,
    accumulate: Accumulate | None = None,
) -> GradientStats:
    """Accumulate the gradient of each objective over its `rows` and leave their combination in `.grad`.

    Every forward pass has a graph of its own, denominators count the complete update, and `.grad` is only ever
    added to: any micro_batch gives the same gradient to rounding. With `sum` nothing else is stored; another
    combiner keeps one gradient per objective and weighs them through their Gram matrix.

    With `plan.most_bad_rows`, rows whose log-probs are not finite leave the update, denominators included: it restarts
    without them, unless they exceed that share of the step.

    `accumulate` replaces the accumulation by this process alone, e.g. with one by several ranks.
    """
    accumulate = accumulate or accumulated
    rows = {name: own for name, given in rows.items() if (own := [i for i in given if batch.kept[i]])}
    try:
        return combined(policy, accumulate(policy, batch, rows, plan), plan, generator)
    except BadRows as found:
        policy.drop_gradients()
        bad = _alone(policy, batch, [i for own in rows.values() for i in own], plan) or found.rows
        fewer, most = batch.without(bad), plan.most_bad_rows or 0.0
        too_many = len(fewer.bad) > most * len(batch.kept)
        stats = objective_gradients(
            policy,
            batch if too_many else fewer,
            rows,
            replace(plan, most_bad_rows=None) if too_many else plan,
            generator,
            accumulate,
        )
        stats.bad += [] if too_many else bad
        return stats


@dataclass(frozen=True)
class Accumulated:
    """The gradients of an update before the objectives' are combined: in `.grad`, or apart."""

    stats: GradientStats
    apart: Mapping[str, Mapping[str, Tensor]]
    """Gradients by objective and parameter name, where a combiner needs them; else empty."""


def accumulated(
    policy: Policy,
    batch: Experience,
    rows: Mapping[str, Sequence[int]],
    plan: StepPlan,
    normalizers: Mapping[str, losses.LossNormalizer] | None = None,
) -> Accumulated:
    """The gradients over `rows`, all or part of an update; `normalizers` are the complete update's.

    Raises:
        BadRows: as far as `plan.most_bad_rows` has them looked for.
    """
    if normalizers is None:
        normalizers = normalizers_of(batch, rows, plan)
    parameters, separate = policy.parameters_by_name(), is_separate(plan, normalizers)
    stats = GradientStats(seen=None if plan.old_first else blank(batch.rollouts))
    apart: dict[str, dict[str, Tensor]] = {}
    for name, normalizer in normalizers.items():
        scale = 1.0 if separate else plan.weights[name]
        for micro in chunks(rows.get(name, ()), plan.micro_batch):
            inputs = loss_inputs(policy, batch, micro, plan, stats.seen)
            _refuse_bad(inputs, micro, plan)
            terms = losses.loss_terms(inputs, plan.loss, plan.betas[name], normalizer)
            (scale * torch.stack(list(terms.values())).sum()).backward()
            _observe(stats, inputs, plan.loss, {term: plan.weights[name] * loss.item() for term, loss in terms.items()})
        if separate:
            apart[name] = {key: p.grad for key, p in parameters.items() if p.grad is not None}
            for parameter in parameters.values():
                parameter.grad = None
    return Accumulated(stats, apart)


def is_separate(plan: StepPlan, objectives: Sized) -> bool:
    """Whether an update with these objectives keeps their gradients apart, for a combiner."""
    return plan.algorithm.combine != "sum" and len(objectives) > 1


def normalizers_of(
    batch: Experience, rows: Mapping[str, Sequence[int]], plan: StepPlan
) -> dict[str, losses.LossNormalizer]:
    """The denominators of an update, by objective."""
    return {name: normalizer_of(batch, own, plan.max_completion_length) for name, own in rows.items()}


def combined(policy: Policy, found: Accumulated, plan: StepPlan, generator: torch.Generator) -> GradientStats:
    """Leave the combination of separate gradients in `.grad`, with its norms and cosine among the statistics."""
    stats, apart, algorithm = found.stats, found.apart, plan.algorithm
    if not apart:
        return stats
    parameters, gram = policy.parameters_by_name(), combine_gradients.gram(list(apart.values()))
    shares = torch.tensor([plan.weights[name] for name in apart], dtype=gram.dtype)
    shares = combine_gradients.combiner(algorithm.combine, algorithm.cagrad_c)(gram, shares, generator)
    for key, gradient in combine_gradients.combine(list(apart.values()), shares).items():
        parameters[key].grad = gradient
    stats.norms = dict(zip(apart, combine_gradients.norms(gram).tolist(), strict=True))
    stats.cosine = combine_gradients.min_cosine(gram)
    return stats


def loss_inputs(
    policy: Policy, batch: Experience, rows: Sequence[int], plan: StepPlan, seen: TokenStats | None = None
) -> losses.LossInputs:
    """Loss inputs of some rows: one forward pass, and the values that the step has already measured.

    Before the step's only update this pass is also the old policy's, and its numbers go into `seen`.
    """
    learns = plan.algorithm.entropy_coef > 0
    stats = score(policy, collate(policy, batch.rollouts, rows, plan), plan.temperature, entropy_learns=learns)
    logp = stats.logprobs.float()
    index, width, device = list(rows), logp.shape[1], logp.device
    if seen is not None:
        store(seen, rows, stats)

    def of_rows(table: Tensor | None) -> Tensor | None:
        return None if table is None else table[index, :width].to(device)

    return losses.LossInputs(
        logp=logp,
        logp_old=batch.logprobs_old[index, :width].to(device) if plan.old_first else logp.detach(),
        logp_ref=of_rows(batch.logprobs_reference),
        advantage=batch.advantages[index, :width].to(device),
        mask=batch.mask()[index, :width].to(device),
        weight=of_rows(batch.token_weights),
        entropy=stats.entropy if learns else None,
    )


def _refuse_bad(inputs: losses.LossInputs, rows: Sequence[int], plan: StepPlan) -> None:
    """Raise where a trained token's log-prob is not finite, to interrupt the update."""
    if plan.most_bad_rows is not None:
        wrong = (~inputs.logp.detach().isfinite() & inputs.mask).any(dim=1).tolist()
        if any(wrong):
            raise BadRows([row for row, found in zip(rows, wrong, strict=True) if found])


def _alone(policy: Policy, batch: Experience, rows: Sequence[int], plan: StepPlan) -> list[int]:
    """Rows that are bad by themselves; a bad row can spoil the others in its pass."""
    bad: list[int] = []
    for row in rows:
        try:
            with torch.no_grad():
                _refuse_bad(loss_inputs(policy, batch, [row], plan), [row], plan)
        except BadRows:
            bad.append(row)
    return bad


def token_stats(policy: Policy, rollouts: Rollouts, plan: StepPlan, adapter: str | None = None) -> TokenStats:
    """Log-probs and entropies, in nats, of every sampled token under the policy's present weights.

    `adapter`: for flat passes, another adapter than the active one.
    """
    table = blank(rollouts)
    # what is computed together is what an update computes together, so that equal weights give equal bits and a KL of 0
    together = plan.numerics.shares_prompts or plan.numerics.passes != "model"
    parts = map(rollouts.rows_of, plan.betas) if together else [range(len(rollouts.completion_ids))]
    for rows in itertools.chain.from_iterable(chunks(part, plan.micro_batch) for part in parts):
        store(table, rows, score(policy, collate(policy, rollouts, rows, plan), plan.temperature, adapter=adapter))
    return table


def blank(rollouts: Rollouts) -> TokenStats:
    """Zeros for every sampled token of the step."""
    shape = len(rollouts.completion_ids), max(map(len, rollouts.completion_ids))
    return TokenStats(torch.zeros(shape), torch.zeros(shape))


def collate(policy: Policy, rollouts: Rollouts, rows: Sequence[int], plan: StepPlan) -> AnyBatch:
    """Some rows of the step's completions, ready for `score`."""
    place = {prompt: n for n, prompt in enumerate(dict.fromkeys(map(rollouts.prompt_of, rows)))}
    prompts, prompt_of = [rollouts.prompt_ids[p] for p in place], [place[rollouts.prompt_of(i)] for i in rows]
    return batch_of(policy, prompts, [rollouts.completion_ids[i] for i in rows], prompt_of, plan.numerics)


def store(table: TokenStats, rows: Sequence[int], stats: TokenStats) -> None:
    """Write one micro-batch's numbers into a table of the complete step."""
    index, width = list(rows), stats.logprobs.shape[1]
    table.logprobs[index, :width] = stats.logprobs.detach().float().cpu()
    table.entropy[index, :width] = stats.entropy.detach().float().cpu()


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Consecutive pieces of at most `size`."""
    return (items[i : i + size] for i in range(0, len(items), size))


def normalizer_of(batch: Experience, rows: Sequence[int], max_completion_length: int) -> losses.LossNormalizer:
    """The denominators of an update over these rows."""
    lengths = batch.lengths[list(rows)]
    sequences, tokens = int((lengths > 0).sum()), int(lengths.sum())  # a masked answer counts nowhere
    return losses.LossNormalizer(sequences=sequences, tokens=tokens, max_completion_length=max_completion_length)


def _observe(
    stats: GradientStats, inputs: losses.LossInputs, loss: losses.LossConfig, terms: Mapping[str, float]
) -> None:
    for term, value in terms.items():
        stats.loss += value
        stats.terms[term] = stats.terms.get(term, 0.0) + value
    if not (n := int(inputs.mask.sum())):
        return
    logp, old, mask, clip = inputs.logp.detach(), inputs.logp_old, inputs.mask, loss.clip
    low, high = losses.clip_fractions(loss.algorithm.surrogate, logp, old, inputs.advantage, clip, mask)
    stats.ratio_deviation = max(stats.ratio_deviation, float(losses.ratio_deviation(logp, old, mask)))
    stats.log_ratios.append(losses.log_ratio(logp, old, mask)[mask].abs().float().cpu())
    stats.tokens += n
    stats.clipped_low += float(low) * n
    stats.clipped_high += float(high) * n
    stats.clamped += float(losses.clamped_share(logp, old, mask, clip.log_ratio_clamp)) * n
