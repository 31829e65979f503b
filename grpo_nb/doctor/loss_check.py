"""Checks a user's own loss function on a toy policy before any training: finite, masked, and with a gradient.

A policy loss takes (logp, logp_old, advantage, clip, mask) and gives one number a token, [batch, token], to be
minimised; `losses.surrogates` has the package's own.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_nb.losses import ClipConfig
from grpo_nb.rules import worst_first
from grpo_nb.rules.finding import Finding

Loss = Callable[[Tensor, Tensor, Tensor, ClipConfig, Tensor | None], Tensor]

ARGUMENTS = 5
PROMPTS, GROUP, TOKENS = 2, 3, 5
FAR = 30.0
"""Nats between policy and old policy that a loss must handle, as after one bad update."""
STEEPEST = 1e9
"""Gradient of one token that a log-ratio clamped at 20 nats cannot reach."""
SAME = 1e-6
"""Differences below that are rounding in float64."""


@dataclass(frozen=True)
class _Toy:
    """Two prompts with three completions each, of different lengths; a table of log-probs is the policy."""

    weights: Tensor
    old: Tensor
    advantage: Tensor
    mask: Tensor

    def logp(self) -> Tensor:
        """[batch, token] with a gradient to the weights; a graph of its own at every call."""
        return -torch.nn.functional.softplus(self.weights)


def check_loss(loss: Loss, clip: ClipConfig | None = None) -> list[Finding]:
    """Errors of a policy loss; empty without any. Two passes over one batch, in milliseconds on the CPU.

    Checks for an exception, a shape other than one number per token, values or gradients that are not finite (far from
    the old policy, or because of masked values), tokens outside the mask that count, no gradient or one of the wrong
    sign at the policy, and a graph that is used twice.

    Args:
        loss: takes log-probs [batch, token] in nats, those of the old policy, advantages [batch, 1], a ClipConfig, and
            a mask [batch, token] or None.
        clip: bounds to try it with; None: the usual ones.
    """
    bounds = clip or ClipConfig()
    if (wrong := _signature(loss)) is not None:
        return [wrong]
    try:
        return worst_first([*_passes(loss, bounds)] or [*_far(loss, bounds), *_masked(loss, bounds)])
    except Exception as error:  # any exception of a user's function is its error
        return [_raised(error)]


DEFINITION = "def loss(logp, logp_old, advantage, clip, mask)"


def _signature(loss: Loss) -> Finding | None:
    """Error of the parameters of a loss; None where five arguments fit, or its signature cannot be read."""
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # e.g. a function of C
        return None
    try:
        signature.bind(*range(ARGUMENTS))
    except TypeError as error:
        return _error(
            "loss_raises",
            f"it takes {signature} and is called with {ARGUMENTS} arguments: {error}.",
            f"write `{DEFINITION}`: log-probs [batch, token], those of the old policy, advantages [batch, 1], a "
            "ClipConfig, and a mask [batch, token] or None",
        )
    return None


def _toy() -> _Toy:
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(PROMPTS * GROUP, TOKENS, generator=draw, dtype=torch.float64).requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 0.5] * PROMPTS, dtype=torch.float64)[:, None]
    lengths = torch.tensor([5, 3, 2, 4, 1, 5])
    mask = torch.arange(TOKENS)[None] < lengths[:, None]
    return _Toy(weights, -torch.nn.functional.softplus(weights.detach().clone()), advantage, mask)


def _reduced(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum() / mask.sum()


def _passes(loss: Loss, clip: ClipConfig) -> Iterator[Finding]:
    """Two passes over one batch, as num_iterations=2 makes them: shape, value, gradient and its sign."""
    toy = _toy()
    for number in (1, 2):
        logp = toy.logp()
        values = loss(logp, toy.old, toy.advantage, clip, toy.mask)
        if not isinstance(values, Tensor) or values.shape != logp.shape:
            found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            yield _error(
                "loss_shape", f"it gives {found} for log-probs of {list(logp.shape)}.", "return a loss a token"
            )
            return
        if not values.requires_grad:
            yield _error(
                "loss_without_gradient",
                "no gradient leads from it to the log-probs, so the policy would never move.",
                "compute it from logp itself; detach, item() and no_grad cut the gradient",
            )
            return
        if not torch.isfinite(values[toy.mask]).all():
            yield _not_finite(f"in pass {number}, with the policy at or near the old one")
            return
        (slope,) = torch.autograd.grad(_reduced(values, toy.mask), logp, retain_graph=True)
        _reduced(values, toy.mask).backward()
        if number == 1:
            yield from _direction(slope, toy)
        with torch.no_grad():
            assert toy.weights.grad is not None  # there is a gradient at the log-probs
            toy.weights.sub_(0.1 * toy.weights.grad)
            toy.weights.grad = None


def _direction(slope: Tensor, toy: _Toy) -> Iterator[Finding]:
    """Check that the gradient at the old policy is that of -A log p."""
    if not slope[toy.mask].any():
        yield _error(
            "loss_without_gradient",
            "its gradient is 0 where the policy still is the old one, which is every step's first update.",
            "give it the gradient of -advantage * logp there",
        )
    elif bool((slope * toy.advantage > 0)[toy.mask].any()):
        yield _error(
            "loss_sign",
            "a step along its gradient makes completions with a positive advantage less likely.",
            "return what is minimised: -advantage times what grows with logp",
        )


def _far(loss: Loss, clip: ClipConfig) -> Iterator[Finding]:
    """The policy far from the old one, on both sides."""
    toy = _toy()
    for shift in (FAR, -FAR):
        logp = toy.logp()
        values = loss(logp, logp.detach() - shift, toy.advantage, clip, toy.mask)
        (slope,) = torch.autograd.grad(_reduced(values, toy.mask), logp)
        if not (torch.isfinite(values[toy.mask]).all() and torch.isfinite(slope).all()):
            yield _not_finite(f"with a log-ratio of {shift:g}")
            return
        if (steepest := float(slope.abs().max())) > STEEPEST:
            yield Finding(
                "loss_unbounded",
                "warning",
                None,
                f"a token's gradient is {steepest:.2g} at a log-ratio of {shift:g}: one bad token decides the update.",
                {"log_ratio": shift, "gradient": steepest},
                "clamp the log-ratio before exp (losses.log_ratio takes a bound)",
            )
            return


def _masked(loss: Loss, clip: ClipConfig) -> Iterator[Finding]:
    """Check that masked values, whatever they are, do not matter."""
    toy = _toy()
    with torch.no_grad():
        plain = loss(toy.logp(), toy.old, toy.advantage, clip, toy.mask)
    for filler in (-7.0, float("nan"), float("-inf")):
        logp = torch.where(toy.mask, toy.logp(), filler).detach().requires_grad_()
        values = loss(logp, torch.where(toy.mask, toy.old, 0.0), toy.advantage, clip, toy.mask)
        (slope,) = torch.autograd.grad(_reduced(values, toy.mask), logp)
        wrong = (values - plain)[toy.mask].abs() > SAME
        if not (torch.isfinite(values[toy.mask]).all() and torch.isfinite(slope).all()):
            yield _not_finite(f"where a token outside the mask holds {filler:g}")
            return
        if wrong.any():
            yield _error(
                "loss_ignores_mask",
                f"the loss of {int(wrong.sum())} trained tokens changes with tokens that the mask leaves out.",
                "leave masked tokens out of every sum and mean over tokens, denominators too",
            )
            return


def _not_finite(where: str) -> Finding:
    return _error(
        "loss_not_finite",
        f"its value or gradient is not finite {where}.",
        "clamp the log-ratio before exp, and put torch.where(mask, ..., 0.0) before it: a nan times 0 is still a nan",
    )


def _raised(error: Exception) -> Finding:
    twice = "backward through the graph a second time" in str(error)
    advice = (
        "build all that carries a gradient from the logp of this call; keep nothing of an earlier one"
        if twice
        else "call it with log-probs [batch, token], those of the old policy, advantages [batch, 1], a ClipConfig, mask"
    )
    what = "it uses the graph of an earlier pass" if twice else f"it raises {type(error).__name__}"
    return _error("loss_graph_reused" if twice else "loss_raises", f"{what}: {error}", advice)


def _error(rule: str, message: str, advice: str) -> Finding:
    return Finding(rule, "error", None, message, {}, advice)
