"""Per-token diagnostics of a step for the log; no gradient."""

import torch

from grpo_nb.algorithms import SURROGATE_ROWS
from grpo_nb.losses.surrogates import ClipConfig
from grpo_nb.losses.tokens import (
    Advantage,
    Scalar,
    TokenFloats,
    TokenMask,
    log_ratio,
    log_ratio_mean,
    same_shape,
)


@torch.no_grad()
def masked_mean(values: TokenFloats, mask: TokenMask) -> Scalar:
    """Σ m v / Σ m; NaN without tokens, which is not a mean of 0."""
    same_shape(values=values, mask=mask)
    return torch.where(mask, values, 0.0).sum() / mask.sum()


@torch.no_grad()
def clamped_share(logp: TokenFloats, logp_base: TokenFloats, mask: TokenMask, clamp: float) -> Scalar:
    """Share of tokens with |logp − logp_base| > clamp: those that the clamp before exp changed."""
    beyond = log_ratio(logp.detach(), logp_base.detach(), mask).abs() > clamp
    return masked_mean(beyond.to(logp.dtype), mask)


@torch.no_grad()
def clip_fractions(
    surrogate: str,
    logp: TokenFloats,
    logp_old: TokenFloats,
    advantage: Advantage,
    clip: ClipConfig,
    mask: TokenMask,
) -> tuple[Scalar, Scalar]:
    """Shares of tokens clipped by the surrogate, (low, high); 0 on a side without a clip.

    A clip that depends on the sign of A acts on (below and A < 0, above and A > 0); the clip of a weight acts whatever
    A is. The ratio is the one that the surrogate clips: the token's, or the completion's.
    """
    delta = log_ratio(logp.detach(), logp_old.detach(), mask)
    row = SURROGATE_ROWS[surrogate]
    if row.clips_completion:
        delta = log_ratio_mean(delta, mask).expand_as(logp)
    lowest, highest = row.log_bounds(clip.low, clip.high)
    below, above = delta < lowest, delta > highest
    if not row.clips_weight:
        below, above = below & (advantage < 0), above & (advantage > 0)
    return masked_mean(below.to(logp.dtype), mask), masked_mean(above.to(logp.dtype), mask)


@torch.no_grad()
def ratio_deviation(logp: TokenFloats, logp_old: TokenFloats, mask: TokenMask) -> Scalar:
    """max |r − 1| over the masked tokens, 0 without any: exactly 0 before a step's first update."""
    deviation = log_ratio(logp.detach(), logp_old.detach(), mask).expm1().abs()
    return deviation.max() if deviation.numel() else deviation.sum()
