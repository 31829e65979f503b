"""The loss of a micro-batch, term by term: policy + KL + entropy, reduced with the complete update's denominators."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_nb.algorithms import Algorithm
from grpo_nb.losses.kl import KLWeight, kl_loss, kl_weight
from grpo_nb.losses.reductions import REDUCTIONS, token_mean
from grpo_nb.losses.surrogates import SURROGATES, ClipConfig
from grpo_nb.losses.tokens import Advantage, LossNormalizer, Scalar, TokenFloats, TokenMask, same_shape


@dataclass(frozen=True)
class LossConfig:
    """Settings of an update's loss: an algorithm and its numbers."""

    algorithm: Algorithm
    clip: ClipConfig
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, in units of the reward per nat."""
    kl_weight: KLWeight = "ratio"

    def terms(self, beta: float) -> list[str]:
        """Names of the terms that the loss has at that beta."""
        penalty = ["kl"] if beta > 0 and not self.algorithm.kl_in_reward else []
        return ["policy", *penalty, *(["entropy"] if self.entropy_coef else [])]


@dataclass(frozen=True)
class LossInputs:
    """The per-token tensors of some rows. Only `logp` and `entropy` carry a gradient."""

    logp: TokenFloats
    logp_old: TokenFloats
    logp_ref: TokenFloats | None
    """Log-probs of the reference policy, in nats; None where no term uses them."""
    advantage: Advantage
    mask: TokenMask
    weight: TokenFloats | None = None
    """Weight of the surrogate (see `losses.weights`); None: 1."""
    entropy: TokenFloats | None = None
    """Entropy in nats, with its gradient; only with an entropy bonus."""


def loss_terms(inputs: LossInputs, config: LossConfig, beta: float, normalizer: LossNormalizer) -> dict[str, Scalar]:
    """Terms of the loss by name: policy, kl, entropy, those that are active. Their sum is the loss; summed over an
    update's micro-batches they give the update's loss.

    policy = reduce(w · surrogate), kl = reduce(beta · KL), entropy = −coef · Σ H / n_tokens (more entropy, less loss).

    Raises:
        ValueError: tables of different shapes; a term whose inputs are missing; old or reference log-probs that
            carry a gradient.
    """
    names = config.terms(beta)
    _check(inputs, names)
    surrogate = SURROGATES[config.algorithm.surrogate]
    per_token = surrogate(inputs.logp, inputs.logp_old, inputs.advantage, config.clip, inputs.mask)
    if inputs.weight is not None:
        per_token = per_token * inputs.weight
    reduce = REDUCTIONS[config.algorithm.reduction]
    terms = {"policy": reduce(per_token, inputs.mask, normalizer)}
    if "kl" in names:
        terms["kl"] = beta * reduce(_kl(inputs, config), inputs.mask, normalizer)
    if "entropy" in names:
        assert inputs.entropy is not None
        terms["entropy"] = -config.entropy_coef * token_mean(inputs.entropy, inputs.mask, normalizer.tokens)
    return terms


def _check(inputs: LossInputs, names: Sequence[str]) -> None:
    same_shape(
        logp=inputs.logp, logp_old=inputs.logp_old, logp_ref=inputs.logp_ref, mask=inputs.mask,
        weight=inputs.weight, entropy=inputs.entropy,
    )  # fmt: skip
    batch, token = inputs.logp.shape
    if inputs.advantage.shape not in ((batch, 1), (batch, token), (batch, min(token, 1))):  # it would be broadcast
        raise ValueError(
            f"advantage is {list(inputs.advantage.shape)} for logp {list(inputs.logp.shape)}; needs one a completion, "
            f"[{batch}, 1], or one a token"
        )
    for name, table, what in (("kl", inputs.logp_ref, "logp_ref"), ("entropy", inputs.entropy, "entropy")):
        if name in names and table is None:
            raise ValueError(f"the loss has the term '{name}', but {what} is None; give it, or weigh the term with 0")


def _kl(inputs: LossInputs, config: LossConfig) -> TokenFloats:
    assert inputs.logp_ref is not None
    clamp = config.clip.log_ratio_clamp
    estimate = kl_loss(config.algorithm.kl)(inputs.logp, inputs.logp_ref, clamp, inputs.mask)
    return kl_weight(config.kl_weight, inputs.logp, inputs.logp_old, clamp, inputs.mask) * estimate
