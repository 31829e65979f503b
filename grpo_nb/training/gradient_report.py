"""Gradients of each objective and each loss term alone: norms and cosines for the log, never for the update."""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_nb import combine_gradients, losses
from grpo_nb.metrics import keys
from grpo_nb.policy.model import Policy
from grpo_nb.training.gradients import chunks, loss_inputs, normalizer_of
from grpo_nb.training.metrics import Row
from grpo_nb.training.plan import StepPlan
from grpo_nb.types import Experience

Gradients = dict[str, dict[str, Tensor]]
"""Objective or loss term -> parameter name -> gradient."""


def gradient_report(policy: Policy, batch: Experience, plan: StepPlan) -> Row:
    """Flat metrics of the first update's gradients before weights and combination, where the plan wants them:
    norms by objective and by term (policy, kl, entropy), and for two objectives or more the cosine of each pair and
    the smallest of these.

    Takes one forward and backward pass a term, holds one gradient a term and objective, and leaves `.grad` alone.
    A cosine with a zero gradient, which has no direction, is None.
    """
    if not plan.reports_gradients or not (updates := plan.updates(batch)):
        return {}
    of_objective: Gradients = {}
    report: Row = {}
    for name, rows in updates[0].items():
        terms = _by_term(policy, batch, name, rows, plan)
        of_objective[name] = combine_gradients.combine(list(terms.values()), torch.ones(len(terms)))
        own = [of_objective[name], *terms.values()]
        names = [keys.GRAD_NORM_OF.of(name), *(keys.GRAD_NORM_TERM.of(name, term) for term in terms)]
        report |= dict(zip(names, combine_gradients.norms(combine_gradients.gram(own)).tolist(), strict=True))
    return report | _cosines(of_objective)


def _by_term(policy: Policy, batch: Experience, objective: str, rows: Sequence[int], plan: StepPlan) -> Gradients:
    parameters, beta = policy.parameters_by_name(), plan.betas[objective]
    normalizer = normalizer_of(batch, rows, plan.max_completion_length)
    sums: Gradients = {}
    for micro in chunks(rows, plan.micro_batch):
        for term in plan.loss.terms(beta):
            inputs = loss_inputs(policy, batch, micro, plan)  # a graph of its own for each backward pass
            loss = losses.loss_terms(inputs, plan.loss, beta, normalizer)[term]
            found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
            held = sums.setdefault(term, {})
            for key, gradient in zip(parameters, found, strict=True):
                held[key] = held[key] + gradient if key in held else gradient
    return sums


def _cosines(gradients: Gradients) -> Row:
    names, gram = list(gradients), combine_gradients.gram(list(gradients.values()))
    cosine, alive = combine_gradients.cosine(gram), combine_gradients.norms(gram) > 0
    pairs: Row = {
        keys.GRAD_COSINE_OF.of(a, b): float(cosine[i, j]) if alive[i] and alive[j] else None
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i < j
    }
    return pairs | {keys.GRAD_COSINE: combine_gradients.min_cosine(gram)} if pairs else pairs
