"""Types and functions that all losses share: shapes, counts, and the one log-ratio."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

TokenFloats = Float[Tensor, "batch token"]
TokenMask = Bool[Tensor, "batch token"]
Scalar = Float[Tensor, ""]

Advantage = Float[Tensor, "batch #token"]
"""One number per completion, [batch, 1], or per token, [batch, token]."""

FAR = 1e4
"""Bound of a log-ratio in nats, so that a token which one policy forbids (log-prob -inf) stays a number."""


@dataclass(frozen=True)
class LossNormalizer:
    """Denominators of the loss reductions, counted once over the update, so that its micro-batches add up exactly.

    >>> LossNormalizer(sequences=64, tokens=1310, max_completion_length=32).tokens
    1310
    """

    sequences: int
    """Completions in the loss."""
    tokens: int
    """Completion tokens in the loss: the sum of the mask."""
    max_completion_length: int
    """The cap on completion length (Dr. GRPO's constant)."""


def same_shape(**tables: Tensor | None) -> None:
    """Check that all shapes agree, since broadcasting would hide a difference.

    Raises:
        ValueError: they do; the message names all of them.
    """
    shapes = {name: list(table.shape) for name, table in tables.items() if table is not None}
    if any(shape != next(iter(shapes.values())) for shape in shapes.values()):
        found = ", ".join(f"{name} is {shape}" for name, shape in shapes.items())
        raise ValueError(f"{found}; all must have one shape, a row for each completion")


def log_ratio(
    logp: TokenFloats, logp_base: TokenFloats, mask: TokenMask | None = None, clamp: float = FAR
) -> TokenFloats:
    """δₜ = logp − logp_base within ± `clamp` nats where the mask is true (everywhere if None), exactly 0 elsewhere.

    Raises:
        ValueError: `logp_base` carries a gradient, so old or reference log-probs would be trained too; or shapes
            that disagree.
    """
    same_shape(logp=logp, logp_base=logp_base, mask=mask)
    if logp_base.requires_grad:
        raise ValueError(
            "old or reference log-probs carry a gradient; they are constants of the step: "
            "compute them under torch.no_grad(), or .detach() them"
        )
    forbidden = logp.isneginf() & logp_base.isneginf()  # by both alike: inf - inf would be no number
    delta = torch.where(forbidden, 0.0, logp - logp_base).clamp(-clamp, clamp)
    return delta if mask is None else torch.where(mask, delta, 0.0)


def log_ratio_mean(delta: TokenFloats, mask: TokenMask | None) -> Float[Tensor, "batch 1"]:
    """Σₜ m δ / Σₜ m of each row: the log of a completion's ratio, per token. A row without tokens has 0."""
    if mask is None:
        return delta.mean(-1, keepdim=True)
    return torch.where(mask, delta, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
