"""Optimizer steps of SFT and GRPO: build the optimizer, guard, apply and save."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo_nb.printable import Clean

Parameters = Mapping[str, Parameter]


@dataclass(frozen=True)
class Update:
    """Result of one optimizer step."""

    norm: float
    """Global L2 norm of the gradient before clipping."""
    moved: float
    """Relative size of the change, ||new - old|| / ||old||; 0 where the step was skipped."""
    status: Literal["ok", "clipped", "skipped", "empty"]
    """`empty`: the gradient was exactly 0, so there was nothing to learn."""


class BrokenUpdate(Clean, FloatingPointError):
    """Raised when a parameter is not finite after an update; the message names it, `update` has the numbers."""

    def __init__(self, message: str, update: Update) -> None:
        super().__init__(message)
        self.update = update


def adamw(
    parameters: Parameters, learning_rate: float, weight_decay: float, together: bool = False
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters in their stable order (Loshchilov & Hutter 2019).

    `together`: all parameters in a few launches. Other bits on CUDA, so it is for runs that began so.
    """
    every = list(parameters.values())
    return torch.optim.AdamW(every, lr=learning_rate, weight_decay=weight_decay, foreach=together)


def apply(
    parameters: Parameters,
    optimizer: torch.optim.Optimizer,
    *,
    learning_rate: float,
    max_norm: float,
    skip_above: float | None = None,
    total: Callable[[float], float] = float,
) -> Update:
    """Guard, clip and step once on what `.grad` has accumulated, then clear it.

    The first update of an optimizer undoes itself if it is interrupted, since it allocates the moments.

    A gradient that is not finite, or whose norm is above `skip_above`, changes nothing but the status. Nor does one
    of exactly 0 (every answer masked, or all groups alike and no penalty): AdamW's momentum alone would move the
    weights as far as any step before it.

    `total` adds up over processes, where each has a part of every parameter; all of them call this at once.

    Raises:
        BrokenUpdate: a parameter is not finite after the step; nothing must be saved from here on.
    """
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    norm = global_norm(gradients, total)
    if norm == 0 or gradient_refused(norm, skip_above):
        optimizer.zero_grad(set_to_none=True)
        return Update(norm=norm, moved=0.0, status="skipped" if norm else "empty")
    if norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / norm)
    present = [p.detach() for p in parameters.values()]
    before = [torch.empty_like(p) for p in present]
    torch._foreach_copy_(before, present)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    _step(optimizer, present, before)
    optimizer.zero_grad(set_to_none=True)
    change = global_norm(torch._foreach_sub(present, before), total)
    moved = change / max(global_norm(before, total), 1e-12)
    update = Update(norm=norm, moved=moved, status="clipped" if norm > max_norm else "ok")
    _assert_finite(parameters, update)
    return update


def _step(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    first = not optimizer.state
    try:
        optimizer.step()
    except BaseException:
        if first:
            torch._foreach_copy_(list(weights), list(before))
            optimizer.state.clear()
        raise


def gradient_refused(norm: float, skip_above: float | None) -> bool:
    """Whether an update with this gradient norm must be skipped; NaN is refused too."""
    return not math.isfinite(norm) or (skip_above is not None and not norm <= skip_above)


def global_norm(tensors: Sequence[Tensor], total: Callable[[float], float] = float) -> float:
    """L2 norm over all tensors together, accumulated in float64; `total` as in `apply`."""
    if tensors and tensors[0].device.type == "cuda":
        norms = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64))
        return math.sqrt(total(sum(norm * norm for norm in norms.tolist())))
    return math.sqrt(total(sum(float(t.detach().double().pow(2).sum()) for t in tensors)))


def warmup(step: int, steps: int) -> float:
    """Factor of the learning rate at 1-based `step`: a linear rise over `steps`, then 1."""
    return min(1.0, step / steps) if steps else 1.0


def state_tensors(parameters: Parameters, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's moments as flat tensors, `parameter.name/exp_avg` and so on."""
    return {key: value.detach().cpu().contiguous() for key, value in moments(parameters, optimizer).items()}


def moments(parameters: Parameters, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's moment tensors by name, not copied: on their device and in their type."""
    return {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_state_tensors(parameters: Parameters, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Undo `state_tensors`, bit for bit.

    Raises:
        ValueError: a tensor belongs to no trainable parameter.
    """
    unknown = {key.rsplit("/", 1)[0] for key in tensors} - set(parameters)
    if unknown:
        raise ValueError(
            f"optimizer state of unknown parameters {sorted(unknown)[:3]}: the model is not the run's model"
        )
    for key, value in tensors.items():
        name, slot = key.rsplit("/", 1)
        parameter = parameters[name]
        home = "cpu" if slot == "step" else parameter.device
        optimizer.state[parameter][slot] = value.clone().to(home)


def _assert_finite(parameters: Parameters, update: Update) -> None:
    if math.isfinite(update.moved):  # which it is for finite parameters alone
        return
    for name, parameter in parameters.items():
        if not torch.isfinite(parameter).all():
            raise BrokenUpdate(
                f"parameter {name} ({str(parameter.dtype).removeprefix('torch.')}) is not finite after the update; "
                "nothing was saved. Resume from the last checkpoint with a lower learning_rate",
                update,
            )
