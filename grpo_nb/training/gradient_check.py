"""Check of the first update's gradient: step 1 computes it once more, in another way.

The gradient of each micro-batch is computed outside `.grad` and summed here, which reveals code that overwrites, clears
or applies gradients between two micro-batches. An entropy bonus is checked against its own values: along its
gradient the entropy must rise by what the gradient predicts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo_nb import losses
from grpo_nb.metrics import keys
from grpo_nb.optim import global_norm
from grpo_nb.policy.model import Policy
from grpo_nb.rules.finding import FIRST_STEP
from grpo_nb.training.batches import score
from grpo_nb.training.dealing import rows_by_rank
from grpo_nb.training.gradients import chunks, collate, loss_inputs, normalizer_of, normalizers_of
from grpo_nb.training.metrics import Row
from grpo_nb.training.plan import StepPlan, UpdateRows
from grpo_nb.types import Experience

MOST = 1 << 26
"""Numbers of a gradient that are compared, smallest tensors first: all of an adapter, a part of a large model."""
NUDGE = 5e-3
"""Part of the entropy by which a move along its gradient should change it: above rounding, and nearly straight."""

Gradient = dict[str, Tensor]


def expected_gradient(policy: Policy, batch: Experience, plan: StepPlan) -> Gradient:
    """Gradient that `.grad` must hold after the first update's backward passes; empty where nothing is compared.

    Costs one forward and backward pass of step 1. Combined gradients are another sum, and are not compared.
    """
    updates = plan.updates(batch) if plan.step == FIRST_STEP else []
    if policy.parts is not None:
        return {}  # this rank has its rows alone
    if not updates or (plan.algorithm.combine != "sum" and len(updates[0]) > 1):
        return {}
    return _summed(policy, batch, updates[0], plan, None)


def compared(policy: Policy, batch: Experience, plan: StepPlan, expected: Mapping[str, Tensor]) -> Row:
    """The step's metrics: ||accumulated - expected|| and ||accumulated||, over ||expected||; rise of the entropy over
    the expected rise.
    """
    if not expected:
        return {}
    parameters, norm = policy.parameters_by_name(), global_norm(list(expected.values()))
    present = {name: parameters[name].grad for name in expected}
    apart = [gradient if (own := present[name]) is None else own - gradient for name, gradient in expected.items()]
    known = 0 < norm < math.inf  # what is not finite is left out by a guard of its own
    accumulated = [gradient for gradient in present.values() if gradient is not None]
    row: Row = {
        keys.GRAD_CHECK: global_norm(apart) / norm if known else None,
        keys.GRAD_CHECK_RATIO: global_norm(accumulated) / norm if known else None,
    }
    if plan.algorithm.entropy_coef > 0:
        row[keys.GRAD_CHECK_ENTROPY] = _entropy_rise(policy, batch, plan)
    return row


def _summed(policy: Policy, batch: Experience, rows: UpdateRows, plan: StepPlan, term: str | None) -> Gradient:
    """The gradient of an update's loss, or of one of its terms, added up apart from `.grad`."""
    parameters, sums, normalizers = _compared(policy), Gradient(), normalizers_of(batch, rows, plan)
    # a backward pass that ends at the first of few parameters would leave the other ranks of a spread base waiting
    through = parameters if policy.sharding is None else policy.parameters_by_name()
    # in the parts that the ranks compute: else a gradient that is all rounding would be another
    for part in rows_by_rank(batch.rollouts, plan.ranks.size, rows):
        for name, micro in ((name, m) for name, own in part.items() for m in chunks(own, plan.micro_batch)):
            normalizer = normalizers[name]
            terms = losses.loss_terms(loss_inputs(policy, batch, micro, plan), plan.loss, plan.betas[name], normalizer)
            loss = plan.weights[name] * (torch.stack(list(terms.values())).sum() if term is None else terms[term])
            found = torch.autograd.grad(loss, list(through.values()), materialize_grads=True)
            for key, gradient in zip(through, found, strict=True):
                if key not in parameters:
                    continue
                sums[key] = sums[key] + gradient if key in sums else gradient
    return sums


def _compared(policy: Policy) -> dict[str, Parameter]:
    """The parameters that are compared."""
    chosen, room = dict[str, Parameter](), MOST
    for name, parameter in sorted(policy.parameters_by_name().items(), key=lambda item: item[1].numel()):
        if (room := room - parameter.numel()) < 0 and chosen:
            break
        chosen[name] = parameter
    return chosen


def _entropy_rise(policy: Policy, batch: Experience, plan: StepPlan) -> float | None:
    """Ratio of the measured rise of the entropy, by a small step against its term's gradient, to the expected rise."""
    rows, parameters = plan.updates(batch)[0], _compared(policy)
    gradient = _summed(policy, batch, rows, plan, "entropy")
    norm, present = global_norm(list(gradient.values())), _bonus(policy, batch, rows, plan)
    if not (0 < norm < math.inf and 0 < present < math.inf):
        return None
    length, values = NUDGE * present / norm, list[float]()
    for sign in (1.0, -1.0):
        with _moved(parameters, gradient, -sign * length / norm):
            values.append(_bonus(policy, batch, rows, plan))
    return (values[0] - values[1]) / (2 * length * norm)


@contextmanager
def _moved(parameters: Mapping[str, Parameter], direction: Mapping[str, Tensor], factor: float) -> Iterator[None]:
    """The weights are moved inside the block, and have their own bits after it."""
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        try:
            for name, parameter in parameters.items():
                parameter.add_(direction[name], alpha=factor)
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.copy_(before[name])


def _bonus(policy: Policy, batch: Experience, rows: UpdateRows, plan: StepPlan) -> float:
    """The weighted entropy that an update's loss subtracts, from values alone."""
    total = 0.0
    with policy.eval_mode() if plan.numerics.passes == "model" else torch.no_grad():
        for name, indices in rows.items():
            tokens = normalizer_of(batch, indices, plan.max_completion_length).tokens
            share = plan.weights[name] * plan.algorithm.entropy_coef / max(tokens, 1)
            total += share * math.fsum(
                _entropy(policy, batch, micro, plan) for micro in chunks(indices, plan.micro_batch)
            )
    return total


def _entropy(policy: Policy, batch: Experience, rows: Sequence[int], plan: StepPlan) -> float:
    """Sum over the trained tokens of some rows, in nats."""
    entropy = score(policy, collate(policy, batch.rollouts, rows, plan), plan.temperature).entropy
    mask = batch.mask()[list(rows), : entropy.shape[1]].to(entropy.device)
    return float(entropy.double()[mask].sum())
