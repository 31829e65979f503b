"""Advantages of completions from the rewards of their group.

Rewards are [prompt, group]; NaN is unscored: such a completion gets exactly 0 and does not affect the mean and std of
the others. A group with fewer than two scored completions, or whose rewards are equal up to rounding, is without signal
and gets exactly 0 throughout (except in `reinforce_pp`, which compares with the complete batch).
Computed in float64 and returned in the type of the rewards.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Groups = Float[Tensor, "prompt group"]
TokenGroups = Float[Tensor, "prompt group #token"]

LAST_DIGITS = 1e-13
"""Share of the batch's largest reward that float64 can just add to it."""
STD_EPS = 1e-4
"""Added to a group's std before dividing, as TRL does; it matters: rewards .50001, .5, .5, .5 give A = .07, not 1.5."""
ROUNDING, EXACT_ROUNDING = 1e-6, 1e-10
"""Largest std that counts as rounding, relative to the terms that the rewards were summed from. The first is 8 ulp of
float32, in which reward functions compute whatever they return; the second, for groups whose rewards are all integers,
is float64's. Below it a group is without signal, so that noise is not scaled up to advantages."""
WHITEN_EPS = 1e-8
"""Added to the variance of a batch before the square root, as OpenRLHF does."""
CPGD_MAX_WEIGHT = 3.0
"""Cap of CPGD's weight of groups with signal, which stand in for groups without."""


@dataclass(frozen=True)
class GroupRewards:
    """Rewards of one objective's completions by group, with the inputs of the estimators.

    >>> GroupRewards(rewards=torch.tensor([[1.0, 0.0]]), lengths=torch.tensor([[7, 9]])).totals()
    tensor([[1., 0.]])
    """

    rewards: Groups
    """Reward of each completion; NaN where it could not be scored."""
    lengths: Int[Tensor, "prompt group"]
    """Trained tokens of each answer."""
    kl_cost: Float[Tensor, "prompt group token"] | None = None
    """Cost of each token in units of the reward: beta · k1, with KL in the reward; 0 beyond the completion's length."""
    scale: Groups | None = None
    """Size of what each reward was summed from, where parts may cancel; None: the reward's own size."""

    def double(self) -> "GroupRewards":
        """The group rewards in float64."""
        kl_cost = None if self.kl_cost is None else self.kl_cost.double()
        return GroupRewards(self.rewards.double(), self.lengths, kl_cost, self.scale)

    def noise(self) -> Float[Tensor, "prompt 1"]:
        """The std that rounding may give to each group's totals."""
        sizes = [self.rewards.abs()]
        if self.kl_cost is not None:
            sizes.append(self.rewards.abs() + self.kl_cost.abs().sum(-1))
        if self.scale is not None:
            sizes.append(self.scale.to(self.rewards.dtype))
        return rounding_noise(self.totals(), torch.stack(sizes).amax(0))[:, None]

    def totals(self) -> Groups:
        """Rᵢ − Σₜ kl_costᵢₜ: an answer's reward less what its tokens cost."""
        return self.rewards if self.kl_cost is None else self.rewards - self.kl_cost.sum(-1)

    def returns(self) -> TokenGroups:
        """Gᵢₜ = Rᵢ − Σ_{u ≥ t} kl_costᵢᵤ: the return from each token on, [.., 1] without penalty."""
        if self.kl_cost is None:
            return self.rewards[..., None]
        return self.rewards[..., None] - self.kl_cost.flip(-1).cumsum(-1).flip(-1)

    def has_signal(self) -> Bool[Tensor, "prompt 1"]:
        """Whether each group's totals differ by more than rounding, [P, 1]."""
        return group_std(self.totals())[:, None] > self.noise()

    def weights(self) -> TokenGroups:
        """Tokens that each entry of `returns` stands for; 0 for unscored answers."""
        scored = ~self.rewards.isnan()[..., None]
        if self.kl_cost is None:
            return (scored * self.lengths[..., None]).to(self.rewards.dtype)
        within = torch.arange(self.kl_cost.shape[-1], device=self.rewards.device) < self.lengths[..., None]
        return (scored & within).to(self.rewards.dtype)


def group_std(rewards: Groups) -> Float[Tensor, "prompt"]:
    """s = √(Σ(Rᵢ − R̄)² / (n − 1)) over the n scored answers of each prompt; NaN where n < 2."""
    n = (~rewards.isnan()).sum(-1)
    centred = rewards - rewards.nanmean(-1, keepdim=True)
    variance = centred.square().nansum(-1) / (n - 1).clamp(min=1)
    return torch.where(n >= 2, variance.sqrt(), torch.nan)


def has_signal(rewards: Groups) -> Bool[Tensor, "prompt"]:
    """Whether each group has a signal, [P]: two or more scored completions that differ by more than rounding."""
    wide = rewards.double()
    return group_std(wide) > rounding_noise(wide, wide.abs())


def rounding_noise(rewards: Groups, scale: Groups) -> Float[Tensor, "prompt"]:
    """Std that rounding alone may give to each group, [P]: a share of the largest `scale` of its scored completions.

    A group that is too small to have digits in float64 next to the batch's largest counts as rounding too.
    """
    scored = ~rewards.isnan()
    whole = (rewards == rewards.round()) | ~scored
    share = torch.where(whole.all(-1), EXACT_ROUNDING, ROUNDING)
    largest = torch.where(scored, scale, 0.0).amax(-1)
    return (share * largest).clamp(min=LAST_DIGITS * float(largest.max()))


def advantages(groups: GroupRewards, name: str, clip: float | None = None) -> TokenGroups:
    """The estimator of that name over one objective's answers, 0 where there is nothing to compare, cut at ± `clip`.

    Raises:
        ValueError: shapes that disagree, groups of one, no reward scored, or an infinite one.
    """
    _check(groups, name)
    values = ADVANTAGES[name](groups.double())
    values = torch.where(values.isnan(), 0.0, values).to(groups.rewards.dtype)
    return values if clip is None else values.clamp(-clip, clip)


def _check(groups: GroupRewards, name: str) -> None:
    rewards, lengths = groups.rewards, groups.lengths
    if name not in ADVANTAGES:
        raise ValueError(f"unknown advantage '{name}'; use one of {', '.join(ADVANTAGES)}")
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards are {list(rewards.shape)}; needs [prompt, group] with two answers a prompt or more, because an "
            "answer is compared with the others of its group: raise group_size"
        )
    if lengths.shape != rewards.shape or (groups.kl_cost is not None and groups.kl_cost.shape[:2] != rewards.shape):
        raise ValueError(
            f"rewards are {list(rewards.shape)}, lengths {list(lengths.shape)}; needs one length and one row of "
            "penalties for each reward"
        )
    if rewards.isnan().all():
        raise ValueError(
            "no reward of this batch could be scored, so there is nothing to learn from; leave the update out, and "
            "look at why the reward functions returned None"
        )
    if rewards.isinf().any():
        raise ValueError(
            "rewards hold inf; needs finite numbers, or NaN where an answer could not be scored: "
            "correct the reward function, or let it return None there"
        )


# ---- estimators: GroupRewards -> advantages, NaN where a group has none


def grpo(groups: GroupRewards) -> TokenGroups:
    """Aᵢ = (Rᵢ − R̄) / (s + 1e-4) with mean and std of the answer's own group. Shao et al. 2024, section 4.1.2."""
    centred, std = _centred(groups)
    return (centred / (std + STD_EPS))[..., None]


def mean_only(groups: GroupRewards) -> TokenGroups:
    """Aᵢ = Rᵢ − R̄: a group's spread does not reweigh it. Liu et al. 2025 (Dr. GRPO)."""
    return _centred(groups)[0][..., None]


def batch_std(groups: GroupRewards) -> TokenGroups:
    """Aᵢ = (Rᵢ − R̄) / (S + 1e-4): the group's mean, the std S over all scored answers. Liu et al., arXiv:2508.08221."""
    centred, _ = _centred(groups)
    return (centred / (group_std(groups.totals().reshape(1, -1)) + STD_EPS))[..., None]


def rloo(groups: GroupRewards) -> TokenGroups:
    """Aᵢ = Rᵢ − mean_{j≠i} Rⱼ = n/(n−1) · (Rᵢ − R̄) over the n scored answers. Ahmadian et al. 2024, eq. 9."""
    totals = groups.totals()
    n = (~totals.isnan()).sum(-1, keepdim=True)
    return (_centred(groups)[0] * n / (n - 1).clamp(min=1))[..., None]


def opo(groups: GroupRewards) -> TokenGroups:
    """Aᵢ = Rᵢ − Σⱼ TⱼRⱼ / Σⱼ Tⱼ: the length-weighted mean, the baseline of least variance. Hao et al. 2025, eq. 7."""
    totals = groups.totals()
    lengths = torch.where(totals.isnan(), 0.0, groups.lengths.to(totals.dtype))
    baseline = (lengths * totals).nansum(-1, keepdim=True) / lengths.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(groups.has_signal(), totals - baseline, torch.nan)[..., None]


def cpgd(groups: GroupRewards) -> TokenGroups:
    """Aᵢ = ω (Rᵢ − R̄), ω = min(P / P_alive, 3): the P_alive groups that can be compared stand in for all P.

    Liu et al. 2025 (CPGD), section 3.3, the weight like a clip-filter's.
    """
    alive = groups.has_signal()
    return (_centred(groups)[0] * (len(alive) / alive.sum().clamp(min=1)).clamp(max=CPGD_MAX_WEIGHT))[..., None]


def reinforce_pp(groups: GroupRewards) -> TokenGroups:
    """Aᵢₜ = (Gᵢₜ − mean G) / √(var G + 1e-8) over all tokens of the batch, G the returns. Hu et al. 2025.

    It uses no groups: a completion is compared with the complete batch, so a group of equal rewards still learns.
    """
    return _whitened(groups.returns(), groups.weights(), groups.noise())


def reinforce_pp_baseline(groups: GroupRewards) -> TokenGroups:
    """Aᵢ = (Rᵢ − R̄, whitened over the tokens of all groups that can be compared). Hu et al. 2025."""
    centred = _centred(groups)[0][..., None]
    weights = torch.where(centred.isnan(), 0.0, groups.lengths[..., None].to(centred.dtype))
    return _whitened(centred, weights, groups.noise())


ADVANTAGES: Mapping[str, Callable[[GroupRewards], TokenGroups]] = {
    "group_std": grpo,
    "mean_only": mean_only,
    "batch_std": batch_std,
    "rloo": rloo,
    "opo": opo,
    "cpgd": cpgd,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def _centred(groups: GroupRewards) -> tuple[Groups, Float[Tensor, "prompt 1"]]:
    """(Rᵢ − R̄, s) of each group; NaN throughout a group without signal."""
    totals = groups.totals()
    centred = totals - totals.nanmean(-1, keepdim=True)
    return torch.where(groups.has_signal(), centred, torch.nan), group_std(totals)[:, None]


def _whitened(values: TokenGroups, weights: TokenGroups, noise: Float[Tensor, "prompt 1"]) -> TokenGroups:
    """(x − mean) / √(var + 1e-8) under the weights; NaN where the weight is 0 or nothing differs by more than noise."""
    held = torch.where(weights > 0, values, 0.0)
    total = weights.sum()
    mean = (weights * held).sum() / total
    variance = (weights * (held - mean).square()).sum() / total
    known = (weights > 0) & (variance.sqrt() > noise.max())
    return torch.where(known, (held - mean) / (variance + WHITEN_EPS).sqrt(), torch.nan)
