"""KL(policy ‖ reference) per token, in nats, from the one token that was sampled; d = logp_ref − logp.

Schulman 2020, "Approximating KL divergence". Value and gradient are two different questions: k1 and k3 have the
right mean and, as losses, the wrong gradient; k2 has the right gradient and a biased mean. `k3_k2` takes each from
where it is right, and so does k3 whose weight is the ratio with its gradient. Off the policy that sampled, `kl_weight`
restores the expectation.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch

from grpo_nb.algorithms import KL_ROWS, refuse_k1
from grpo_nb.losses.tokens import TokenFloats, TokenMask, log_ratio


def kl_k1(logp: TokenFloats, logp_ref: TokenFloats, clamp: float, mask: TokenMask | None = None) -> TokenFloats:
    """k1 = −d: unbiased, of either sign. For the reward, or to report; as a loss its expected gradient is zero.

    It has no exponent, so `clamp` does nothing; it is taken so that estimators can be exchanged.
    """
    return log_ratio(logp, logp_ref, mask)


def kl_k2(logp: TokenFloats, logp_ref: TokenFloats, clamp: float, mask: TokenMask | None = None) -> TokenFloats:
    """k2 = d²/2: biased value, but its on-policy expected gradient is that of KL(policy ‖ reference).

    It has no exponent, so `clamp` does nothing: a token that drifted far is still pulled back.
    """
    return log_ratio(logp, logp_ref, mask).square() / 2


def kl_k3(logp: TokenFloats, logp_ref: TokenFloats, clamp: float, mask: TokenMask | None = None) -> TokenFloats:
    """k3 = eᵈ − d − 1 ≥ 0, d at most `clamp`: unbiased value, expected gradient of KL(reference ‖ policy).

    Only large positive d overflows, so only that side is cut, in both terms: cutting the exponent alone would
    turn the gradient's sign there. The side where the policy runs above the reference keeps its pull.
    """
    d = (-log_ratio(logp, logp_ref, mask)).clamp(max=clamp)
    return d.expm1() - d


def kl_k3_k2(logp: TokenFloats, logp_ref: TokenFloats, clamp: float, mask: TokenMask | None = None) -> TokenFloats:
    """sg(k3) + k2 − sg(k2): k3's unbiased value with k2's gradient, that of KL(policy ‖ reference)."""
    k2 = kl_k2(logp, logp_ref, clamp, mask)
    return kl_k3(logp.detach(), logp_ref, clamp, mask) + (k2 - k2.detach())


def kl_clamped_exhibit(logp: TokenFloats, logp_ref: TokenFloats, mask: TokenMask | None = None) -> TokenFloats:
    """clamp(d, 0, 10): an exhibit, not an estimator. It once replaced k3 in a run whose KL then "read 0".

    Every token that the policy likes better than the reference, which is what training makes, reads 0 and has no
    gradient; the mean is far below the KL, and the few tokens that count push the policy away from the truth.
    """
    return (-log_ratio(logp, logp_ref, mask)).clamp(0, 10)


Estimator = Callable[[TokenFloats, TokenFloats, float, TokenMask | None], TokenFloats]

KL: Mapping[str, Estimator] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3, "k3_k2": kl_k3_k2}
"""Estimators by name, as values."""


def kl_loss(name: str) -> Estimator:
    """The estimator as a loss.

    Raises:
        ValueError: `k1`, whose expected gradient is zero, or an unknown name.
    """
    if refuse_k1(name) not in KL:
        raise ValueError(
            f"unknown KL estimator '{name}'; as a loss use one of {', '.join(n for n in KL if n in KL_ROWS)}"
        )
    return KL[name]


KLWeight = Literal["none", "ratio", "ratio_through"]


def kl_weight(
    kind: KLWeight, logp: TokenFloats, logp_old: TokenFloats, clamp: float, mask: TokenMask | None = None
) -> TokenFloats:
    """Weight of a token's KL: r = exp(logp − logp_old), so that the expectation is over the current policy.

    `ratio` is a constant weight, exactly 1 while the policy is the one that sampled, so it acts off-policy only.
    `ratio_through` lets the gradient through r too, which makes the gradient of k3 that of KL(policy ‖ reference),
    on-policy as well (DeepSeek-V3.2, section 3.1; TRL's `use_bias_correction_kl`); for k3 only, as k2 and k3_k2 have
    that gradient by themselves and would count it twice. `none`: 1.
    """
    if kind == "none":
        return torch.ones_like(logp)
    new = logp if kind == "ratio_through" else logp.detach()
    return log_ratio(new, logp_old, mask, clamp).exp()
