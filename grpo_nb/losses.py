"""The mathematics of GRPO as pure functions: advantages, surrogates, KL estimators, reductions.

Tensors and plain numbers in, tensors out. A per-token term and its reduction are separate functions, and an
algorithm is a row of `ALGORITHMS` that names one of each. Everything computes in the type it is given.

Log-probs are in nats. `logp` carries the gradient; `logp_old` (the policy that sampled, before this step's
updates) and `logp_ref` (the reference) never do. What a mask leaves out may hold anything, NaN and inf too:
it is replaced before any exp, because a NaN that is multiplied by 0 afterwards is still a NaN in the gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

TokenFloats = Float[Tensor, "batch token"]
TokenMask = Bool[Tensor, "batch token"]
Scalar = Float[Tensor, ""]

STD_EPS = 1e-4
"""Added to a group's std before dividing, as TRL does; it matters: rewards .50001, .5, .5, .5 give A = .07, not 1.5."""
DEGENERATE_STD = 1e-6
"""A group whose rewards differ by less than this has nothing to compare; its noise is not blown up to advantages."""


@dataclass(frozen=True)
class Counts:
    """What a reduction divides by, counted once over the whole update, so that its micro-batches add up exactly.

    >>> Counts(sequences=64, tokens=1310, max_completion=32).tokens
    1310
    """

    sequences: int
    """Completions in the loss."""
    tokens: int
    """Completion tokens in the loss: the sum of the mask."""
    max_completion: int
    """The cap on completion length (Dr. GRPO's constant)."""


# ---- advantages


def group_std(rewards: Float[Tensor, "prompt group"]) -> Float[Tensor, "prompt"]:
    """s = √(Σ(Rᵢ − R̄)² / (n − 1)) over the n scored answers of each prompt; NaN where n < 2."""
    n = (~rewards.isnan()).sum(-1)
    centred = rewards - rewards.nanmean(-1, keepdim=True)
    variance = centred.square().nansum(-1) / (n - 1).clamp(min=1)
    return torch.where(n >= 2, variance.sqrt(), torch.nan)


SCALES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "group": lambda std: std + STD_EPS,
    "none": torch.ones_like,
}
"""What a centred reward is divided by, from its group's std."""


def group_advantages(
    rewards: Float[Tensor, "prompt group"], *, scale: Literal["group", "none"], clip: float | None = None
) -> Float[Tensor, "prompt group"]:
    """Aᵢ = (Rᵢ − R̄) / (s + 1e-4) within a prompt's group; scale "none": Aᵢ = Rᵢ − R̄.

    Rewards that are NaN are unscored: they get exactly 0 and leave mean and std of the others alone. A group
    with fewer than two scored answers, or whose std is below 1e-6, is dead: exactly 0 throughout.
    `clip` cuts at ± itself; None never cuts. Shao et al. 2024 (GRPO), Liu et al. 2025 (Dr. GRPO: "none").

    Raises:
        ValueError: an infinite reward, which would silently erase its whole group.
    """
    if rewards.isinf().any():
        raise ValueError(
            "rewards hold inf; needs finite numbers, or NaN where an answer could not be scored: "
            "correct the reward function, or let it return None there"
        )
    std = group_std(rewards)[:, None]
    centred = rewards - rewards.nanmean(-1, keepdim=True)
    counts = (std >= DEGENERATE_STD) & ~rewards.isnan()
    advantages = torch.where(counts, centred / SCALES[scale](std), 0.0)
    return advantages if clip is None else advantages.clamp(-clip, clip)


# ---- surrogates


def log_ratio(logp: TokenFloats, logp_base: TokenFloats, mask: TokenMask | None = None) -> TokenFloats:
    """δₜ = logp − logp_base where the mask is true (everywhere if None), exactly 0 elsewhere.

    Raises:
        ValueError: `logp_base` carries a gradient, so old or reference log-probs would be trained too.
    """
    if logp_base.requires_grad:
        raise ValueError(
            "old or reference log-probs carry a gradient; they are constants of the step: "
            "compute them under torch.no_grad(), or .detach() them"
        )
    delta = logp - logp_base
    return delta if mask is None else torch.where(mask, delta, 0.0)


def ppo_clip(
    logp: TokenFloats,
    logp_old: TokenFloats,
    advantage: Float[Tensor, "batch"],
    low: float,
    high: float,
    log_ratio_clamp: float,
    mask: TokenMask | None = None,
) -> TokenFloats:
    """Lₜ = −min(rₜA, clip(rₜ, 1−low, 1+high)A),  rₜ = exp(logp − logp_old).

    The gain stops at 1+high where A > 0 and at 1−low where A < 0; the other two sides are never clipped.
    log r is kept within ± `log_ratio_clamp`, beyond which a token has no gradient (`clamped_share` counts them).
    Schulman et al. 2017; low ≠ high is DAPO's clip-higher (Yu et al. 2025).
    """
    ratio = log_ratio(logp, logp_old, mask).clamp(-log_ratio_clamp, log_ratio_clamp).exp()
    A = advantage[:, None]
    return -torch.min(ratio * A, ratio.clamp(1 - low, 1 + high) * A)


class Surrogate(Protocol):
    """The per-token policy loss: a row of `SURROGATES`."""

    def __call__(
        self,
        logp: TokenFloats,
        logp_old: TokenFloats,
        advantage: Float[Tensor, "batch"],
        low: float,
        high: float,
        log_ratio_clamp: float,
        mask: TokenMask | None = None,
    ) -> TokenFloats: ...


SURROGATES: Mapping[str, Surrogate] = {"ppo_clip": ppo_clip}


# ---- KL(policy ‖ reference) per token, from one sample; d = logp_ref − logp. Schulman 2020, "Approximating KL".


def kl_k1(logp: TokenFloats, logp_ref: TokenFloats, clamp: float, mask: TokenMask | None = None) -> TokenFloats:
    """k1 = −d: unbiased, of either sign. A number to report; as a loss its expected gradient is zero.

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


class KLEstimator(Protocol):
    """A per-token estimate of KL(policy ‖ reference) in nats: a row of `KL`."""

    def __call__(
        self, logp: TokenFloats, logp_ref: TokenFloats, clamp: float, mask: TokenMask | None = None
    ) -> TokenFloats: ...


KL: Mapping[str, KLEstimator] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


# ---- reductions: Σ over micro-batches = the value of the whole


def sequence_mean(per_token: TokenFloats, mask: TokenMask, n_sequences: int) -> Scalar:
    """Σᵢ (Σₜ m l / Σₜ m) / n_sequences: each answer counts the same, however long. An empty one adds 0."""
    sums = torch.where(mask, per_token, 0.0).sum(-1)
    return (sums / mask.sum(-1).clamp(min=1)).sum() / max(n_sequences, 1)


def token_mean(per_token: TokenFloats, mask: TokenMask, n_tokens: int) -> Scalar:
    """Σ m l / n_tokens: each token counts the same."""
    return torch.where(mask, per_token, 0.0).sum() / max(n_tokens, 1)


def constant_length(per_token: TokenFloats, mask: TokenMask, n_sequences: int, max_completion: int) -> Scalar:
    """Σ m l / (n_sequences · max_completion): no length in the denominator, hence no length bias."""
    return torch.where(mask, per_token, 0.0).sum() / max(n_sequences * max_completion, 1)


Reduction = Callable[[TokenFloats, TokenMask, Counts], Scalar]

REDUCTIONS: Mapping[str, Reduction] = {
    "sequence_mean": lambda per_token, mask, n: sequence_mean(per_token, mask, n.sequences),
    "token_mean": lambda per_token, mask, n: token_mean(per_token, mask, n.tokens),
    "constant_length": lambda per_token, mask, n: constant_length(per_token, mask, n.sequences, n.max_completion),
}


# ---- algorithms


@dataclass(frozen=True)
class Algorithm:
    """An algorithm is a choice of three: what divides the advantage, the per-token term, and its reduction."""

    scale: Literal["group", "none"]
    """Key of `SCALES`."""
    surrogate: Literal["ppo_clip"]
    """Key of `SURROGATES`."""
    reduction: Literal["sequence_mean", "token_mean", "constant_length"]
    """Key of `REDUCTIONS`."""
    paper: str


ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm("group", "ppo_clip", "sequence_mean", "Shao et al. 2024, arXiv:2402.03300"),
    "dr_grpo": Algorithm("none", "ppo_clip", "constant_length", "Liu et al. 2025, arXiv:2503.20783"),
    "dapo": Algorithm("group", "ppo_clip", "token_mean", "Yu et al. 2025, arXiv:2503.14476"),
}


def algorithm(name: str) -> Algorithm:
    """The row of that name.

    Raises:
        ValueError: no such row; the message lists those that exist.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm '{name}'; use one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def reduce(algorithm_name: str, per_token: TokenFloats, mask: TokenMask, counts: Counts) -> Scalar:
    """The algorithm's reduction of a per-token loss, with the denominator counted over the whole update."""
    return REDUCTIONS[algorithm(algorithm_name).reduction](per_token, mask, counts)


# ---- what the log reports; no gradient


@torch.no_grad()
def masked_mean(values: TokenFloats, mask: TokenMask) -> Scalar:
    """Σ m v / Σ m; NaN when nothing is left in: no tokens is not a mean of 0."""
    return torch.where(mask, values, 0.0).sum() / mask.sum()


@torch.no_grad()
def clamped_share(logp: TokenFloats, logp_base: TokenFloats, mask: TokenMask, clamp: float) -> Scalar:
    """Share of tokens with |logp − logp_base| > clamp: those that the clamp before exp has touched."""
    beyond = log_ratio(logp.detach(), logp_base.detach(), mask).abs() > clamp
    return masked_mean(beyond.to(logp.dtype), mask)


@torch.no_grad()
def clip_fractions(
    logp: TokenFloats,
    logp_old: TokenFloats,
    advantage: Float[Tensor, "batch"],
    mask: TokenMask,
    low: float,
    high: float,
) -> tuple[Scalar, Scalar]:
    """Shares of tokens that clipping holds: (r < 1−low and A < 0, r > 1+high and A > 0)."""
    ratio = log_ratio(logp.detach(), logp_old.detach(), mask).exp()
    A = advantage[:, None]
    held_low, held_high = (ratio < 1 - low) & (A < 0), (ratio > 1 + high) & (A > 0)
    return masked_mean(held_low.to(logp.dtype), mask), masked_mean(held_high.to(logp.dtype), mask)


@torch.no_grad()
def ratio_deviation(logp: TokenFloats, logp_old: TokenFloats, mask: TokenMask) -> Scalar:
    """max |r − 1| over the masked tokens, 0 if there are none: exactly 0 before a step's first update."""
    deviation = log_ratio(logp.detach(), logp_old.detach(), mask).expm1().abs()
    return deviation.max() if deviation.numel() else deviation.sum()
