"""The algorithms by name: each a row of four choices, advantage x surrogate x reduction x KL. No tensors here.

The names in a row are keys of `losses.ADVANTAGES`, `losses.SURROGATES`, `losses.REDUCTIONS` and `losses.KL`;
their formulas are written there. The properties that settings, rules and plots need are in the rows here, so a new
surrogate is one function in `losses/surrogates.py` and one row of SURROGATE_ROWS. Any row of ALGORITHMS can be
changed in one of its choices: `algorithm("grpo", kl="k2")`.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Bound(Enum):
    """Meaning of `clip_low` and `clip_high`: the values of the ratio r at which the clip acts."""

    OFFSET = "1 - clip_low, 1 + clip_high"
    LOG_RATIO = "exp(-clip_low), exp(clip_high)"
    CAP = "clip_high itself"


@dataclass(frozen=True)
class SurrogateRow:
    """Properties of a surrogate; its formula is in `losses.surrogates`.

    >>> SURROGATE_ROWS["gmpo"].log_bounds(0.4, 0.4)
    (-0.4, 0.4)
    """

    low: Bound | None = Bound.OFFSET
    high: Bound | None = Bound.OFFSET
    """Upper clip; None: no clip on that side. Raising an upper clip keeps the entropy from falling."""
    clips_completion: bool = False
    """Whether the clip acts on the completion's mean log-ratio instead of each token's own."""
    sequence_level: bool = False
    """One ratio per completion, so its tokens cannot differ in advantage or weight."""
    clips_weight: bool = False
    """Whether the clip bounds a token's weight whatever its advantage's sign; False: it ends the gain."""
    dual: bool = False
    """Whether it takes `dual_clip`, a third bound above 1 + clip_high where the advantage is negative."""
    settings: tuple[str, ...] = ()
    """Settings of `algorithm` that this surrogate alone reads; without effect while the ratio is 1."""

    @property
    def tokenwise(self) -> bool:
        """Whether a token's loss depends on its own ratio only, so that a plot over one ratio shows it."""
        return not (self.clips_completion or self.sequence_level)

    def log_bounds(self, low: float, high: float) -> tuple[float, float]:
        """The log-ratios between which the clip does not act; infinite on a side without one."""
        lowest, highest = -math.inf, math.inf
        if self.low is not None:
            lowest = math.log1p(-low) if self.low is Bound.OFFSET else -low
        if self.high is not None:
            highest = {Bound.OFFSET: math.log1p, Bound.LOG_RATIO: float, Bound.CAP: math.log}[self.high](high)
        return lowest, highest


SURROGATE_ROWS: Mapping[str, SurrogateRow] = {
    "ppo_clip": SurrogateRow(dual=True),
    "gspo": SurrogateRow(clips_completion=True, sequence_level=True, dual=True),
    "gspo_token": SurrogateRow(clips_completion=True, dual=True),
    "cispo": SurrogateRow(clips_weight=True),
    "cispo_cap": SurrogateRow(None, Bound.CAP, clips_weight=True),
    "sapo": SurrogateRow(None, None, settings=("sapo_tau_positive", "sapo_tau_negative")),
    "gmpo": SurrogateRow(Bound.LOG_RATIO, Bound.LOG_RATIO, sequence_level=True),
    "cpgd": SurrogateRow(settings=("cpgd_drift", "cpgd_drift_clip")),
}


@dataclass(frozen=True)
class AdvantageRow:
    """Properties of an advantage estimator; its formula is in `losses.advantages`."""

    scale_free: bool = False
    """Whether advantages are divided by a spread, so multiplying every reward by one number changes nothing but the
    eps; else the advantage is in units of the reward."""
    per_token: bool = False
    """Whether it takes each token's own return, so that a KL in the reward gives tokens different advantages."""


ADVANTAGE_ROWS: Mapping[str, AdvantageRow] = {
    "group_std": AdvantageRow(scale_free=True),
    "mean_only": AdvantageRow(),
    "batch_std": AdvantageRow(scale_free=True),
    "rloo": AdvantageRow(),
    "opo": AdvantageRow(),
    "cpgd": AdvantageRow(),
    "reinforce_pp": AdvantageRow(scale_free=True, per_token=True),
    "reinforce_pp_baseline": AdvantageRow(scale_free=True),
}

REDUCTION_NAMES = ("sequence_mean", "token_mean", "constant_length")


@dataclass(frozen=True)
class KLRow:
    """Properties of a KL estimator; its formula is in `losses.kl`."""

    reported: str
    """The estimator that the log, the controllers and the plots read: the loss's own, or k3's unbiased value."""
    in_reward: bool = False
    """Whether it is a cost in the reward and no term of the loss; old log-probs then come before advantages."""
    needs_ratio: bool = False
    """The gradient is that of KL(policy || reference) only if it flows through the ratio as well (`ratio_through`)."""


KL_ROWS: Mapping[str, KLRow] = {
    "k1_in_reward": KLRow("k3", in_reward=True),
    "k2": KLRow("k2"),
    "k3": KLRow("k3", needs_ratio=True),
    "k3_k2": KLRow("k3"),
}


@dataclass(frozen=True)
class Algorithm:
    """Four choices and the clip that belongs to them.

    >>> ALGORITHMS["grpo"].reduction
    'sequence_mean'
    """

    advantage: str
    surrogate: str
    reduction: str
    kl: str
    clip: tuple[float, float]
    """(low, high) in the units of the surrogate's row."""
    paper: str
    """arXiv number of the paper; `bnpo` is TRL's name of GRPO with a token mean."""

    @property
    def kl_reported(self) -> str:
        """The KL estimator that the log, the controllers and the plots read."""
        return KL_ROWS[self.kl].reported

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is a cost in the reward instead of a term of the loss."""
        return KL_ROWS[self.kl].in_reward

    @property
    def kl_needs_ratio(self) -> bool:
        """Whether the gradient of the KL is right only if it flows through the ratio as well."""
        return KL_ROWS[self.kl].needs_ratio

    @property
    def surrogate_row(self) -> SurrogateRow:
        """Row of its surrogate."""
        return SURROGATE_ROWS[self.surrogate]

    @property
    def scale_free(self) -> bool:
        """Whether the advantages are divided by a spread."""
        return ADVANTAGE_ROWS[self.advantage].scale_free

    @property
    def log_bounds(self) -> tuple[float, float]:
        """Log-ratios between which its clip does not act."""
        return self.surrogate_row.log_bounds(*self.clip)


# fmt: off
ALGORITHMS: Mapping[str, Algorithm] = {
    # name                             advantage                surrogate     reduction          KL              clip          arXiv
    "grpo":                  Algorithm("group_std",             "ppo_clip",   "sequence_mean",   "k3",           (0.2, 0.2),   "2402.03300"),
    "dr_grpo":               Algorithm("mean_only",             "ppo_clip",   "constant_length", "k3",           (0.2, 0.2),   "2503.20783"),
    "dapo":                  Algorithm("group_std",             "ppo_clip",   "token_mean",      "k3",           (0.2, 0.28),  "2503.14476"),
    "bnpo":                  Algorithm("group_std",             "ppo_clip",   "token_mean",      "k3",           (0.2, 0.2),   "TRL"),
    "rloo":                  Algorithm("rloo",                  "ppo_clip",   "constant_length", "k1_in_reward", (0.2, 0.2),   "2402.14740"),
    "reinforce_pp":          Algorithm("reinforce_pp",          "ppo_clip",   "token_mean",      "k1_in_reward", (0.2, 0.2),   "2501.03262"),
    "reinforce_pp_baseline": Algorithm("reinforce_pp_baseline", "ppo_clip",   "token_mean",      "k2",           (0.2, 0.2),   "2501.03262"),
    "opo":                   Algorithm("opo",                   "ppo_clip",   "constant_length", "k3",           (0.2, 0.2),   "2505.23585"),
    "gspo":                  Algorithm("group_std",             "gspo",       "sequence_mean",   "k3",           (3e-4, 4e-4), "2507.18071"),
    "gspo_token":            Algorithm("group_std",             "gspo_token", "sequence_mean",   "k3",           (3e-4, 4e-4), "2507.18071"),
    "cispo":                 Algorithm("group_std",             "cispo",      "token_mean",      "k3",           (0.2, 0.28),  "2506.13585"),
    "cispo_cap":             Algorithm("group_std",             "cispo_cap",  "token_mean",      "k3",           (0.2, 5.0),   "2510.13786"),
    "sapo":                  Algorithm("group_std",             "sapo",       "sequence_mean",   "k3",           (0.2, 0.2),   "2511.20347"),
    "gmpo":                  Algorithm("group_std",             "gmpo",       "sequence_mean",   "k3",           (0.4, 0.4),   "2507.20673"),
    "cpgd":                  Algorithm("cpgd",                  "cpgd",       "sequence_mean",   "k3",           (0.2, 0.2),   "2505.12504"),
}
# fmt: on

CHOICES: Mapping[str, Collection[str]] = {
    "algorithm": ALGORITHMS,
    "advantage": ADVANTAGE_ROWS,
    "surrogate": SURROGATE_ROWS,
    "reduction": REDUCTION_NAMES,
    "kl": KL_ROWS,
}
"""Names of each kind of choice."""


def algorithm(
    name: str,
    *,
    advantage: str = "auto",
    surrogate: str = "auto",
    reduction: str = "auto",
    kl: str = "auto",
    clip: tuple[float | None, float | None] = (None, None),
) -> Algorithm:
    """The row of that name, with the choices that are not `auto` (clip, low and high: not None) in place of its own.

    Another surrogate brings its own usual clip: what one calls high may be no bound around 1.

    Raises:
        ValueError: an unknown name (the message lists those that exist), or choices that do not go together.
    """
    refuse_k1(kl)
    chosen = {"advantage": advantage, "surrogate": surrogate, "reduction": reduction, "kl": kl}
    own: dict[str, Any] = {part: choice for part, choice in chosen.items() if choice != "auto"}
    for part, choice in {"algorithm": name, **own}.items():
        if choice not in CHOICES[part]:
            raise ValueError(f"unknown {part} '{choice}'; use one of {', '.join(CHOICES[part])}")
    named = ALGORITHMS[name]
    row = replace(named, **own)
    low, high = named.clip if row.surrogate == named.surrogate else usual_clip(row.surrogate)
    row = replace(row, clip=(low if clip[0] is None else clip[0], high if clip[1] is None else clip[1]))
    _check(row)
    return row


def refuse_k1(kl: str) -> str:
    """Return the name unless it is `k1`.

    Raises:
        ValueError: it is `k1`, which is no loss.
    """
    if kl == "k1":
        raise ValueError(
            "kl='k1': as a loss its expected gradient is zero (it would penalise nothing); use 'k2', 'k3' or 'k3_k2', "
            "or 'k1_in_reward', which subtracts it from the reward"
        )
    return kl


def usual_clip(surrogate: str) -> tuple[float, float]:
    """(low, high) of the first row with that surrogate."""
    return next(row.clip for row in ALGORITHMS.values() if row.surrogate == surrogate)


def widest_log_ratio(row: Algorithm) -> float:
    """|log ratio| at which the row's clip acts, the farther of its sides; 0 where it has none."""
    return max((abs(bound) for bound in row.log_bounds if math.isfinite(bound)), default=0.0)


def tokens_may_differ() -> str:
    """The surrogates whose tokens may differ in advantage or weight, as a list to read."""
    return ", ".join(f"'{name}'" for name, row in SURROGATE_ROWS.items() if not row.sequence_level)


def _check(row: Algorithm) -> None:
    (low, high), surrogate = row.clip, row.surrogate_row
    if surrogate.high is Bound.CAP and high < 1:
        raise ValueError(
            f"clip_high={high:g}: for '{row.surrogate}' it is the cap of the weight itself, and would cut every "
            f"gradient to {high:.0%}; needs 1 or more, {usual_clip(row.surrogate)[1]:g} is usual"
        )
    if surrogate.sequence_level and ADVANTAGE_ROWS[row.advantage].per_token and row.kl_in_reward:
        raise ValueError(
            f"surrogate '{row.surrogate}' has one ratio a completion, but advantage '{row.advantage}' with "
            f"kl='{row.kl}' differs from token to token; use a KL in the loss, e.g. kl='k2', or one of the surrogates "
            f"{tokens_may_differ()}"
        )
    if surrogate.low is Bound.OFFSET and not low < 1:
        raise ValueError(
            f"clip_low={low:g}: the ratio would be bounded by 1 - clip_low <= 0; needs 0 < clip_low < 1, "
            f"'{row.surrogate}' usually has {usual_clip(row.surrogate)[0]:g}"
        )
