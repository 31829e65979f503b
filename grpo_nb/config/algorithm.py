"""The settings of the mathematics: the algorithm, its numbers, and the shaping of rewards before they are compared."""

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from grpo_nb.algorithms import (
    CHOICES,
    SURROGATE_ROWS,
    Algorithm,
    algorithm,
    refuse_k1,
    tokens_may_differ,
    widest_log_ratio,
)
from grpo_nb.config.base import Positive, Settings, one_of
from grpo_nb.storage import former_names

ADVANTAGE_BOUND = 10.0
"""Standard deviations: no group of fewer than 100 answers reaches it."""


class AlgorithmConfig(Settings):
    """The loss, its clipping, the KL estimator, and how objectives are combined."""

    former = former_names.SETTINGS["algorithm"]

    name: Annotated[str, one_of(CHOICES["algorithm"])] = "dapo"
    """A row of `algorithms.ALGORITHMS`: `dapo` averages over tokens, `grpo` over answers, `dr_grpo` by a constant."""
    learning_rate: Positive = 1e-6
    """Peak learning rate of AdamW; a knob while training."""
    combine: Literal["sum", "pcgrad", "mgda", "cagrad", "upgrad"] = "sum"
    """Objectives' gradients: `sum` weighs and adds, the others settle conflicts; the last two need `[combine]`."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this global norm."""

    # advanced
    cagrad_c: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """`cagrad` only: how far it may deviate from the sum for the worst-off objective; 0 is `sum`."""
    advantage: Annotated[str, one_of(CHOICES["advantage"], "auto")] = "auto"
    """How rewards become advantages; `auto`: the algorithm's own. `group_std`, `mean_only`, `rloo`, ..."""
    surrogate: Annotated[str, one_of(CHOICES["surrogate"], "auto")] = "auto"
    """The per-token policy loss; `auto`: the algorithm's own."""
    reduction: Annotated[str, one_of(CHOICES["reduction"], "auto")] = "auto"
    """Normaliser of the per-token losses; `auto`: the algorithm's own."""
    kl: Annotated[str, AfterValidator(refuse_k1), one_of(CHOICES["kl"], "auto")] = "auto"
    """KL per token: k2 has the gradient of KL(policy || reference), k3 the unbiased value, `k3_k2` both;
    `k1_in_reward` subtracts it from the reward; `auto`: the algorithm's own."""
    kl_weight: Literal["auto", "none", "ratio", "ratio_through"] = "auto"
    """A token's KL is weighed by the ratio with its gradient (`ratio_through`), by it as a constant, or by 1 (`none`).
    `auto`: `ratio_through` for k3, `ratio` for k2 and k3_k2, so that the penalty's expected gradient is that of
    KL(policy || reference), which is measured and which beta is steered by; k3 alone has KL(reference || policy)'s."""
    clip_low: Positive | None = None
    """Lower clip: the ratio's gain stops at 1 - clip_low, or as the surrogate counts it (a log-ratio); null: the
    algorithm's own."""
    clip_high: Positive | None = None
    """Upper clip, 1 + clip_high, or as the surrogate counts it (a log-ratio, the cap itself); null: the algorithm's
    own."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """A third bound, for PPO's clip: where the advantage is negative, a ratio above this has no gradient; 3 is usual.
    """
    sapo_tau_positive: Positive = 1.0
    """SAPO's temperature where the advantage is positive: larger falls off faster."""
    sapo_tau_negative: Positive = 1.05
    """SAPO's temperature elsewhere."""
    cpgd_drift: Annotated[float, Field(ge=0)] = 0.01
    """CPGD's pull back to the policy that sampled."""
    cpgd_drift_clip: Positive = 0.2
    """The weight of that pull, r - 1, is cut at +- this."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Bonus for entropy, in reward per nat: higher keeps answers more varied."""
    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Only this share of an objective's tokens, those of highest entropy, learn from the reward; 0.2 is usual."""
    importance_correction: Literal["none", "tis", "mis"] = "none"
    """Weigh the loss by the ratio of trainer to engine probabilities, truncated (`tis`) or masked (`mis`)."""
    importance_correction_level: Literal["token", "sequence", "sequence_mean"] = "token"
    """Level of that ratio: the token's, the completion's, or the completion's geometric mean."""
    importance_correction_bounds: tuple[Annotated[float, Field(ge=0)], Positive] = (0.5, 2.0)
    """`mis` drops ratios outside, `tis` cuts at the upper one."""
    gradient_report_every: Annotated[int, Field(ge=0)] = 0
    """Steps between reports of each objective's and each term's gradient (norm, cosine), a pass a term; 0: never."""
    skip_grad_norm: Positive | None = 100.0
    """An update whose gradient norm is above this, or not finite, is skipped and logged; null: only not finite."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear rise of the learning rate at the start; constant afterwards."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    advantage_clip: Positive | Literal["auto"] | None = "auto"
    """Advantages are cut at +- this; null never cuts. `auto`: 10 where they are divided by a spread; never where they
    are in units of the reward, which a fixed bound would flatten."""
    log_ratio_clamp: Annotated[float, Field(gt=0, le=80)] = 20.0
    """Log-ratios are clamped to +- this before exp; the clamped share is logged."""
    mask_truncated: bool = False
    """Leave completions that hit the cap out of the loss (numerator and denominator)."""
    skip_signal_free_groups: bool = False
    """Leave groups in which no completion has an advantage out of the update: policy, KL and entropy terms, numerators
    and denominators (tokens, or sequences). False, as in the paper and TRL: the KL penalty holds the policy on every
    prompt, and moves the weights in a step without any signal too."""

    @property
    def row(self) -> Algorithm:
        """Row of the algorithm: the named one with the settings made here in place of its own."""
        return algorithm(
            self.name,
            advantage=self.advantage,
            surrogate=self.surrogate,
            reduction=self.reduction,
            kl=self.kl,
            clip=(self.clip_low, self.clip_high),
        )

    @property
    def kl_factor(self) -> Literal["none", "ratio", "ratio_through"]:
        """Resolved value of `kl_weight`, with `auto` replaced."""
        if self.kl_weight == "auto":
            return "ratio_through" if self.row.kl_needs_ratio else "ratio"
        return self.kl_weight

    @property
    def advantage_bound(self) -> float | None:
        """Resolved value of `advantage_clip`, with `auto` replaced; None: no bound."""
        if self.advantage_clip == "auto":
            return ADVANTAGE_BOUND if self.row.scale_free else None
        return self.advantage_clip

    @property
    def old_first(self) -> bool:
        """Whether the old log-probs must be computed before the update, on-policy steps included."""
        return self.row.kl_in_reward or self.top_entropy_quantile < 1 or self.importance_correction != "none"

    def unused_settings(self, on_policy: bool) -> list[str]:
        """Changed settings that have no effect with the other settings, each with the setting it needs.

        With one update per rollout every ratio is 1, so a setting that limits the ratio has no effect.
        """
        row = self.row
        moves = ("two updates a rollout (batch.mini_batch or batch.num_iterations)", not on_policy)
        corrects = ("importance_correction 'tis' or 'mis'", self.importance_correction != "none")
        notes = self._unused(
            "algorithm",
            {
                "clip_low": [("a surrogate with a lower clip", row.surrogate_row.low is not None), moves],
                "clip_high": [("a surrogate with a clip", row.surrogate_row.high is not None), moves],
                "dual_clip": [moves],
                **{
                    name: [_taken_by(name, row.surrogate), moves]
                    for own in SURROGATE_ROWS.values()
                    for name in own.settings
                },
                "kl_weight": [
                    ("a KL in the loss", not row.kl_in_reward or self.kl_weight == "ratio"),
                    *([moves] if self.kl_weight == "none" and not row.kl_needs_ratio else []),
                ],
                "cagrad_c": [("combine 'cagrad'", self.combine == "cagrad")],
                "importance_correction_level": [corrects],
                "importance_correction_bounds": [corrects],
            },
        )
        if self.skip_grad_norm is not None and self.skip_grad_norm < self.max_grad_norm:
            notes.append(
                f"algorithm.max_grad_norm={self.max_grad_norm:g} does nothing here: skip_grad_norm="
                f"{self.skip_grad_norm:g} leaves out what it would scale down"
            )
        return notes

    def _weighs_tokens(self) -> tuple[str, str] | None:
        """The setting that gives the tokens of one completion different weights, and the value at which it does not."""
        if self.top_entropy_quantile < 1:
            return f"top_entropy_quantile={self.top_entropy_quantile:g}", "top_entropy_quantile=1"
        if self.importance_correction != "none" and self.importance_correction_level == "token":
            return (
                f"importance_correction='{self.importance_correction}' of level 'token'",
                "importance_correction_level='sequence'",
            )
        return None

    @model_validator(mode="after")
    def _choices_go_together(self) -> Self:
        if not self.importance_correction_bounds[0] < 1 < self.importance_correction_bounds[1]:
            raise ValueError(
                f"importance_correction_bounds={self.importance_correction_bounds}: an engine that agrees with the "
                "trainer has a ratio of 1, and must be let through; needs lower < 1 < upper, e.g. (0.5, 2.0)"
            )
        row = self.row  # raises where the choices contradict each other
        if self.kl_weight == "ratio_through" and not (row.kl_in_reward or row.kl_needs_ratio):
            raise ValueError(
                f"kl_weight='ratio_through' with kl='{row.kl}' counts the gradient twice: its own already is that of "
                "KL(policy || reference); use kl_weight='ratio', or 'auto', which goes with every kl"
            )
        if row.surrogate_row.sequence_level and (weigher := self._weighs_tokens()):
            setting, instead = weigher
            raise ValueError(
                f"surrogate '{row.surrogate}' has one ratio a completion, so {setting} cannot weigh single tokens of "
                f"it; use {instead}, or one of the surrogates {tokens_may_differ()}"
            )
        if self.dual_clip is not None and not row.surrogate_row.dual:
            raise ValueError(
                f"dual_clip={self.dual_clip:g} does nothing to surrogate '{row.surrogate}'; set it to null"
            )
        if (needed := math.log(max(self.dual_clip or 1, 1))) > self.log_ratio_clamp or (
            needed := widest_log_ratio(row)
        ) > self.log_ratio_clamp:
            raise ValueError(
                f"log_ratio_clamp={self.log_ratio_clamp:g} would act before the clip, and silence tokens that the clip "
                f"lets learn; needs more than {needed:.3g} (log-ratio at the clip), 20 is usual"
            )
        if self.dual_clip is not None and self.dual_clip <= 1 + row.clip[1]:
            raise ValueError(
                f"dual_clip={self.dual_clip:g} lies inside the upper clip, 1 + {row.clip[1]:g}; needs more, 3 is usual"
            )
        return self


def _taken_by(setting: str, surrogate: str) -> tuple[str, bool]:
    """Requirement of a surrogate's own setting as a sentence, and whether `surrogate` meets it."""
    takers = [name for name, row in SURROGATE_ROWS.items() if setting in row.settings]
    return "surrogate " + " or ".join(f"'{name}'" for name in takers), surrogate in takers


def _left_to_normalise(row: Algorithm) -> str:
    if row.kl_in_reward:
        return "the weight of the reward against the KL penalty, and little else"
    return "nothing but what shaping.clip cuts" if row.scale_free else ("the size of the step only, as a shift cancels")


class ShapingConfig(Settings):
    """Shaping of rewards before they are compared; all off by default."""

    truncated_factor: Annotated[float, Field(le=1)] | None = None
    """Reward of a completion that hit the cap: multiplied by this (0 to 1), or set to this (below 0); null: unchanged.
    """
    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    """Number of tokens before the cap over which the penalty rises (DAPO); 0: no penalty."""
    overlong_penalty: Positive = 1.0
    """Penalty, in reward, of a completion at the cap; shorter ones inside `overlong_buffer` pay less."""
    normalise: bool = False
    """Running mean and std of all rewards seen; most algorithms cancel it inside a group, and the log warns of it."""
    clip: Positive | None = None
    """Rewards are cut at +- this, after all else; null never cuts."""

    @property
    def active(self) -> bool:
        return self != ShapingConfig()

    def unused_settings(self, row: Algorithm) -> list[str]:
        """Changed settings with little or no effect: a group's mean cancels shifts of the rewards, its std scales."""
        notes = []
        if self.overlong_penalty != 1.0 and not self.overlong_buffer:
            notes.append(f"shaping.overlong_penalty={self.overlong_penalty:g} does nothing; it needs overlong_buffer")
        if self.normalise:
            notes.append(
                f"shaping.normalise with advantage '{row.advantage}' changes {_left_to_normalise(row)}: answers meet "
                "their own group"
            )
        return notes
