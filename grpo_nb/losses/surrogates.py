"""Per-token policy losses: surrogates of the policy gradient for completions of an older policy.

All are minimised and have the gradient of −A log π while the policy is the one that sampled; they differ in how they
limit a token whose probability has moved. r = exp(δ), δ = logp − logp_old; A > 0 wants r up, A < 0 down.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_nb.losses.tokens import FAR, Advantage, TokenFloats, TokenMask, log_ratio, log_ratio_mean


@dataclass(frozen=True)
class ClipConfig:
    """Bounds of the ratio, and the other settings of surrogates.

    >>> ClipConfig(low=0.2, high=0.28).log_ratio_clamp
    20.0
    """

    low: float = 0.2
    high: float = 0.2
    """(low, high) is the algorithm's clip; `algorithms.SURROGATE_ROWS` has its meaning for each surrogate."""
    dual: float | None = None
    """PPO: where A < 0, a ratio above this no longer pulls. Ye et al. 2020, eq. 5; TRL's `delta`."""
    log_ratio_clamp: float = 20.0
    """|δ| is kept within this before exp; beyond it a token has no gradient (`clamped_share` counts them)."""
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    """SAPO's temperatures where A > 0 and elsewhere."""
    drift: float = 0.01
    drift_clip: float = 0.2
    """CPGD's pull back to the policy that sampled, and the clip of its weight."""


Surrogate = Callable[[TokenFloats, TokenFloats, Advantage, ClipConfig, TokenMask | None], TokenFloats]

SURROGATES: dict[str, Surrogate] = {}
"""The losses below by name."""


def surrogate(loss: Surrogate) -> Surrogate:
    """Register a loss under its own name, that of its row in `algorithms.SURROGATE_ROWS`."""
    SURROGATES[loss.__name__] = loss
    return loss


@surrogate
def ppo_clip(
    logp: TokenFloats, logp_old: TokenFloats, advantage: Advantage, clip: ClipConfig, mask: TokenMask | None = None
) -> TokenFloats:
    """L = −min(rA, clip(r, 1−low, 1+high) A); with `dual`, at most dual · |A| where A < 0.

    The gain stops at 1+high where A > 0 and at 1−low where A < 0; the other two sides pull without end, but for
    `dual`. Schulman et al. 2017, eq. 7; low ≠ high is DAPO's clip-higher (Yu et al. 2025, eq. 10).
    """
    ratio = log_ratio(logp, logp_old, mask, clip.log_ratio_clamp).exp()
    gain = torch.min(ratio * advantage, ratio.clamp(1 - clip.low, 1 + clip.high) * advantage)
    return -_dual(gain, advantage, clip)


@surrogate
def gspo(
    logp: TokenFloats, logp_old: TokenFloats, advantage: Advantage, clip: ClipConfig, mask: TokenMask | None = None
) -> TokenFloats:
    """L = −min(sA, clip(s, 1−low, 1+high) A) at every token,  s = exp(mean_t δ): one ratio for the completion.

    s moves far less than a token's r, hence its clip of a few 1e-4. Zheng et al. 2025 (GSPO), eqs. 5 and 7.
    """
    ratio = _exp(log_ratio_mean(log_ratio(logp, logp_old, mask), mask), clip)
    gain = torch.min(ratio * advantage, ratio.clamp(1 - clip.low, 1 + clip.high) * advantage)
    return -_dual(gain, advantage, clip).expand_as(logp)


@surrogate
def gspo_token(
    logp: TokenFloats, logp_old: TokenFloats, advantage: Advantage, clip: ClipConfig, mask: TokenMask | None = None
) -> TokenFloats:
    """PPO's clip on s_t = sg(s) · exp(logp − sg(logp)): the value of GSPO, and a token's own gradient.

    With one advantage a completion its gradient is GSPO's; it also takes one a token. Zheng et al. 2025, eqs. 13, 14.
    """
    delta = log_ratio_mean(log_ratio(logp.detach(), logp_old, mask), mask)
    held = _within(logp, mask)
    ratio = _exp(delta, clip) * (held - held.detach()).exp()
    gain = torch.min(ratio * advantage, ratio.clamp(1 - clip.low, 1 + clip.high) * advantage)
    return -_dual(gain, advantage, clip)


@surrogate
def cispo(
    logp: TokenFloats, logp_old: TokenFloats, advantage: Advantage, clip: ClipConfig, mask: TokenMask | None = None
) -> TokenFloats:
    """L = −sg(clip(r, 1−low, 1+high)) A logp: a clipped token is weighed less, never silenced.

    MiniMax 2025, eqs. 4 and 5, with both bounds around 1 (as verl reads it).
    """
    ratio = log_ratio(logp.detach(), logp_old, mask, clip.log_ratio_clamp).exp()
    weight = ratio.clamp(1 - clip.low, 1 + clip.high)
    return -weight * advantage * _within(logp, mask)


@surrogate
def cispo_cap(
    logp: TokenFloats, logp_old: TokenFloats, advantage: Advantage, clip: ClipConfig, mask: TokenMask | None = None
) -> TokenFloats:
    """L = −sg(min(r, high)) A logp: no lower bound, and `high` is the cap itself, not 1 + high.

    TRL's `cispo` and ScaleRL's (Khatri et al. 2025); a high of 0.2 would cut every gradient to a fifth.
    """
    ratio = log_ratio(logp.detach(), logp_old, mask, clip.log_ratio_clamp).exp()
    weight = ratio.clamp(max=clip.high)
    return -weight * advantage * _within(logp, mask)


@surrogate
def sapo(
    logp: TokenFloats, logp_old: TokenFloats, advantage: Advantage, clip: ClipConfig, mask: TokenMask | None = None
) -> TokenFloats:
    """L = −(4/τ) σ(τ(r − 1)) A: a soft gate in place of the clip; τ by the sign of A. Gao et al. 2025, eqs. 5, 6."""
    ratio = log_ratio(logp, logp_old, mask, clip.log_ratio_clamp).exp()
    tau = torch.full_like(advantage, clip.tau_negative).masked_fill(advantage > 0, clip.tau_positive)
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage


@surrogate
def gmpo(
    logp: TokenFloats, logp_old: TokenFloats, advantage: Advantage, clip: ClipConfig, mask: TokenMask | None = None
) -> TokenFloats:
    """L = −A exp(mean_t δ′) at every token,  δ′ = min(δ, clip(δ, −low, high)) where A > 0, max(…) where A < 0.

    The geometric mean of clipped ratios; the clip is on log r. Zhao et al. 2025 (GMPO), eq. 4.
    """
    delta = log_ratio(logp, logp_old, mask, clip.log_ratio_clamp)
    clipped = delta.clamp(-clip.low, clip.high)
    held = torch.where(advantage > 0, torch.min(delta, clipped), torch.max(delta, clipped))
    return (-advantage * log_ratio_mean(held, mask).exp()).expand_as(logp)


@surrogate
def cpgd(
    logp: TokenFloats, logp_old: TokenFloats, advantage: Advantage, clip: ClipConfig, mask: TokenMask | None = None
) -> TokenFloats:
    """L = −A min(δ, ln(1+high)) where A > 0, −A max(δ, ln(1−low)) where A < 0; plus the drift term.

    The log of the ratio in place of the ratio: a token's gradient is −A or 0, and cannot explode. The drift term
    drift · sg(clip(r − 1, ±drift_clip)) · δ has the gradient of KL(policy that sampled ‖ policy), clipped.
    Liu et al. 2025 (CPGD), eqs. 5 to 8.
    """
    delta = log_ratio(logp, logp_old, mask)
    held = torch.where(advantage > 0, delta.clamp(max=math.log1p(clip.high)), delta.clamp(min=math.log1p(-clip.low)))
    pull = (_exp(delta.detach(), clip) - 1).clamp(-clip.drift_clip, clip.drift_clip)
    return -advantage * held + clip.drift * pull * delta


def _exp(delta: Float[Tensor, "batch #token"], clip: ClipConfig) -> Float[Tensor, "batch #token"]:
    return delta.clamp(-clip.log_ratio_clamp, clip.log_ratio_clamp).exp()


def _dual(gain: Float[Tensor, "batch #token"], advantage: Advantage, clip: ClipConfig) -> Float[Tensor, "batch #token"]:
    if clip.dual is None:
        return gain
    return torch.where(advantage < 0, torch.max(gain, clip.dual * advantage), gain)


def _within(logp: TokenFloats, mask: TokenMask | None) -> TokenFloats:
    return (logp if mask is None else torch.where(mask, logp, 0.0)).clamp(min=-FAR)
