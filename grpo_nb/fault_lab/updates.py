"""Faults of the update: how gradients are made, added up and applied."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo_nb import losses, optim
from grpo_nb.fault_lab.patching import around_backward, gradients, replaced, trainer
from grpo_nb.fault_lab.records import Patient
from grpo_nb.policy.model import Policy
from grpo_nb.training import plan

TOO_FAST = 100.0
"""Factor on the learning rate."""


@contextmanager
def overwritten_gradients(patient: Patient) -> Iterator[None]:
    """A backward pass writes over `.grad` in place of adding to it, so the last one of an update is all that counts."""

    def forget(policy: Policy) -> None:
        for parameter in policy.parameters_by_name().values():
            parameter.grad = None

    with around_backward(forget, lambda policy: None):
        yield


@contextmanager
def zeroing_inside_the_loop(patient: Patient) -> Iterator[None]:
    """`zero_grad` is called for every micro-batch, not once for every update."""
    inputs = gradients.loss_inputs
    with _optimizers() as made:

        def cleared(*given: Any, **named: Any) -> losses.LossInputs:
            made[-1].zero_grad()
            right: losses.LossInputs = inputs(*given, **named)
            return right

        with _in_updates("loss_inputs", cleared):
            yield


@contextmanager
def stepping_too_early(patient: Patient) -> Iterator[None]:
    """The optimizer steps after every micro-batch, before the update's gradient is complete."""
    with _optimizers() as made, around_backward(lambda policy: None, lambda policy: made[-1].step()):
        yield


@contextmanager
def nan_gradient(patient: Patient) -> Iterator[None]:
    """From step 2 on, one element of the gradient is NaN: `if norm > 10: skip` lets it through."""

    def poison(policy: Policy) -> None:
        if (patient.run.last_step() or 0) >= 1:
            grad = next(iter(policy.parameters_by_name().values())).grad
            if grad is not None:
                grad.view(-1)[0] = torch.nan

    with around_backward(lambda policy: None, poison):
        yield


@contextmanager
def ratio_against_the_reference(patient: Patient) -> Iterator[None]:
    """The ratio divides by the reference in place of the policy that sampled, so it grows with the training."""
    inputs = gradients.loss_inputs

    def wrong(*given: Any, **named: Any) -> losses.LossInputs:
        right: losses.LossInputs = inputs(*given, **named)
        return right if right.logp_ref is None else replace(right, logp_old=right.logp_ref)

    with replaced(gradients, "loss_inputs", wrong):
        yield


@contextmanager
def clamped_kl(patient: Patient) -> Iterator[None]:
    """clamp(ref - new, 0, 10) is the KL: in the loss, in the log, and in what beta is steered by."""

    def clamped(logp: Tensor, logp_ref: Tensor, clamp: float, mask: Tensor | None = None) -> Tensor:
        return losses.kl_clamped_exhibit(logp, logp_ref, mask)

    before: dict[str, Any] = dict(losses.KL)
    table: Any = losses.KL
    table.update(dict.fromkeys(before, clamped))
    try:
        yield
    finally:
        table.update(before)


@contextmanager
def entropy_sign(patient: Patient) -> Iterator[None]:
    """The entropy bonus is descended: its gradient has the wrong sign, the loss that is shown the right one."""
    compute = losses.loss_terms

    def turned(*given: Any, **named: Any) -> dict[str, Tensor]:
        terms = compute(*given, **named)
        if "entropy" in terms:
            terms["entropy"] = 2 * terms["entropy"].detach() - terms["entropy"]
        return terms

    with replaced(losses, "loss_terms", turned):
        yield


@contextmanager
def learning_rate_times_100(patient: Patient) -> Iterator[None]:
    """A schedule multiplies where it should divide."""
    planned = trainer.plan_step

    def fast(*given: Any, **named: Any) -> plan.StepPlan:
        right: plan.StepPlan = planned(*given, **named)
        return replace(right, learning_rate=TOO_FAST * right.learning_rate)

    with replaced(trainer, "plan_step", fast):
        yield


@contextmanager
def frozen_adapter(patient: Patient) -> Iterator[None]:
    """The optimizer was made before the adapter was attached again: it holds tensors that the model no longer uses."""
    made = optim.adamw

    def stale(parameters: optim.Parameters, *given: Any, **named: Any) -> torch.optim.AdamW:
        copies = {name: Parameter(p.detach().clone()) for name, p in parameters.items()}
        optimizer = made(copies, *given, **named)
        for copy in copies.values():
            copy.grad = torch.zeros_like(copy)
        return optimizer

    with replaced(optim, "adamw", stale):
        yield


@contextmanager
def _optimizers() -> Iterator[list[torch.optim.AdamW]]:
    """The optimizers that are made inside the block, the newest last."""
    make = optim.adamw
    made: list[torch.optim.AdamW] = []

    def remembered(*given: Any, **named: Any) -> torch.optim.AdamW:
        made.append(make(*given, **named))
        return made[-1]

    with replaced(optim, "adamw", remembered):
        yield made


@contextmanager
def _in_updates(name: str, value: Any) -> Iterator[None]:
    """A function of `training.gradients` is another one while an update's gradient is made, and only then."""
    compute = trainer.objective_gradients

    def watched(*given: Any, **named: Any) -> Any:
        with replaced(gradients, name, value):
            return compute(*given, **named)

    with replaced(trainer, "objective_gradients", watched):
        yield
