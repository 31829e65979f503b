"""Weights of a token's surrogate: the correction for another sampler, and the mask of tokens that learn.

Both are constants of the step, [batch, token], made once from log-probs and entropies that no longer change. They weigh
the surrogate alone; the KL penalty and the denominators do not change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_nb.losses.tokens import TokenFloats, TokenMask, log_ratio, log_ratio_mean

CorrectionKind = Literal["none", "tis", "mis"]
CorrectionLevel = Literal["token", "sequence", "sequence_mean"]

_LEVELS: Mapping[CorrectionLevel, Callable[[TokenFloats, TokenMask], Float[Tensor, "batch #token"]]] = {
    "token": lambda delta, mask: delta,
    "sequence": lambda delta, mask: delta.sum(-1, keepdim=True),
    "sequence_mean": log_ratio_mean,
}


@dataclass(frozen=True)
class Correction:
    """Importance-sampling correction: its kind, its level and its bounds."""

    kind: CorrectionKind
    level: CorrectionLevel
    bounds: tuple[float, float]
    """(lower, upper) of the weight."""
    log_ratio_clamp: float = 20.0
    """The log of the weight is kept within ± this before exp."""


def correction(how: Correction, logp_old: TokenFloats, logp_sampler: TokenFloats, mask: TokenMask) -> TokenFloats:
    """w = π_old / π_sampler for an engine whose log-probs are not the trainer's; 1 everywhere for `none`.

    `tis` truncates: min(w, upper) (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"). `mis` masks: w where lower ≤ w ≤ upper, else 0 (IcePop, Ling Team 2025). The ratio is a token's, a
    completion's (the product over its tokens, which collapses on long ones), or that product's geometric mean.
    """
    if how.kind == "none":
        return torch.ones_like(logp_old)
    delta = _LEVELS[how.level](log_ratio(logp_old, logp_sampler, mask), mask)
    weight = delta.clamp(-how.log_ratio_clamp, how.log_ratio_clamp).exp()
    lower, upper = how.bounds
    held = (
        weight.clamp(max=upper)
        if how.kind == "tis"
        else torch.where((weight >= lower) & (weight <= upper), weight, 0.0)
    )
    return torch.where(mask, held.expand_as(logp_old), 1.0)


def top_entropy(entropy: TokenFloats, mask: TokenMask, share: float) -> TokenMask:
    """Mask of the tokens whose entropy is in the top `share` of the masked tokens.

    Wang et al. 2025, "Beyond the 80/20 rule". The threshold is the (1 − share) quantile, itself included. Give it all
    tokens of the step: a quantile of a micro-batch would make the gradient depend on the split.
    """
    if share >= 1 or not mask.any():
        return mask
    threshold = torch.quantile(entropy[mask].double(), 1 - share)
    return mask & (entropy.double() >= threshold)
