"""The algorithms by name: each a row of four choices, advantage x surrogate x reduction x KL. No tensors here.

The names in a row are keys of `losses.ADVANTAGES`, `losses.SURROGATES`, `losses.REDUCTIONS` and `losses.KL`;
what they compute is written there. Any row can be changed in one of its choices: `algorithm("grpo", kl="k2")`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

AlgorithmName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "bnpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "opo",
    "gspo",
    "gspo_token",
    "cispo",
    "cispo_cap",
    "sapo",
    "gmpo",
    "cpgd",
]
AdvantageName = Literal[
    "group_std", "mean_only", "batch_std", "rloo", "opo", "cpgd", "reinforce_pp", "reinforce_pp_baseline"
]
SurrogateName = Literal["ppo_clip", "gspo", "gspo_token", "cispo", "cispo_cap", "sapo", "gmpo", "cpgd"]
ReductionName = Literal["sequence_mean", "token_mean", "constant_length"]
KLName = Literal["k1_in_reward", "k2", "k3", "k3_k2"]

K1_IS_NO_LOSS = (
    "kl='k1': as a loss its expected gradient is zero (it would penalise nothing); use 'k2', 'k3' or 'k3_k2', or "
    "'k1_in_reward', which subtracts it from the reward"
)


@dataclass(frozen=True)
class Algorithm:
    """Four choices and the clip that belongs to them.

    >>> ALGORITHMS["grpo"].reduction
    'sequence_mean'
    """

    advantage: AdvantageName
    surrogate: SurrogateName
    reduction: ReductionName
    kl: KLName
    clip: tuple[float, float]
    """(low, high) as the surrogate understands them; each surrogate's docstring says how."""
    paper: str
    """Its arXiv number; `bnpo` is the name TRL gives to GRPO with a token mean."""

    @property
    def kl_reported(self) -> Literal["k2", "k3"]:
        """The estimator that the log, the controllers and the plots read: the loss's own, or k3's unbiased value."""
        return "k2" if self.kl == "k2" else "k3"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is a cost in the reward and no term of the loss; old log-probs then come before advantages."""
        return self.kl == "k1_in_reward"


# fmt: off
ALGORITHMS: Mapping[AlgorithmName, Algorithm] = {
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

SEQUENCE_LEVEL: frozenset[SurrogateName] = frozenset({"gspo", "gmpo"})
"""Surrogates with one ratio a completion: nothing can be said to single tokens of it, by advantage or weight."""


SCALE_FREE: frozenset[AdvantageName] = frozenset({"group_std", "batch_std", "reinforce_pp", "reinforce_pp_baseline"})
"""Estimators that divide by a spread: multiplying every reward by one number changes nothing but the eps."""


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

    Another surrogate brings its own usual clip: what `cispo_cap` calls high is no bound around 1.

    Raises:
        ValueError: no such row (the message lists those that exist), or choices that do not go together.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm '{name}'; use one of {', '.join(ALGORITHMS)}")
    if kl == "k1":
        raise ValueError(K1_IS_NO_LOSS)
    named = ALGORITHMS[name]  # type: ignore[index]
    chosen = {"advantage": advantage, "surrogate": surrogate, "reduction": reduction, "kl": kl}
    row = replace(named, **{part: choice for part, choice in chosen.items() if choice != "auto"})  # type: ignore[arg-type]
    low, high = named.clip if row.surrogate == named.surrogate else usual_clip(row.surrogate)
    row = replace(row, clip=(low if clip[0] is None else clip[0], high if clip[1] is None else clip[1]))
    _check(row)
    return row


def usual_clip(surrogate: SurrogateName) -> tuple[float, float]:
    """(low, high) of the first row with that surrogate."""
    return next(row.clip for row in ALGORITHMS.values() if row.surrogate == surrogate)


def widest_log_ratio(row: Algorithm) -> float:
    """|log ratio| at which the row's clip acts, the farther of its sides; 0 for SAPO, which has none."""
    low, high = row.clip
    if row.surrogate == "sapo":
        return 0.0
    if row.surrogate == "gmpo":
        return max(low, high)
    return math.log(high) if row.surrogate == "cispo_cap" else max(-math.log1p(-low), math.log1p(high))


def _check(row: Algorithm) -> None:
    if row.surrogate == "cispo_cap" and row.clip[1] < 1:
        raise ValueError(
            f"clip_high={row.clip[1]:g}: for 'cispo_cap' it is the cap of the weight itself, and would cut every "
            f"gradient to {row.clip[1]:.0%}; needs 1 or more, {usual_clip('cispo_cap')[1]:g} is usual; for a bound around "
            "1 use 'cispo'"
        )
    if row.surrogate in SEQUENCE_LEVEL and row.advantage == "reinforce_pp" and row.kl_in_reward:
        raise ValueError(
            f"surrogate '{row.surrogate}' has one ratio a completion, but advantage 'reinforce_pp' with "
            "kl='k1_in_reward' differs from token to token; use surrogate 'gspo_token' or 'ppo_clip', or kl='k2'"
        )
    if row.surrogate in ("ppo_clip", "gspo", "gspo_token", "cispo", "cpgd") and not row.clip[0] < 1:
        raise ValueError(
            f"clip_low={row.clip[0]:g}: the ratio would be bounded by 1 - clip_low <= 0; needs 0 < clip_low < 1, "
            f"'{row.surrogate}' usually has {usual_clip(row.surrogate)[0]:g}"
        )
