"""The loss of a micro-batch, term by term: policy + KL + entropy, each reduced with the whole update's counts."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_nb.algorithms import Algorithm
from grpo_nb.losses.kl import KLWeight, kl_loss, kl_weight
from grpo_nb.losses.reductions import REDUCTIONS, token_mean
from grpo_nb.losses.surrogates import SURROGATES, Limits
from grpo_nb.losses.tokens import Advantage, Counts, Scalar, TokenFloats, TokenMask, same_shape


@dataclass(frozen=True)
class Recipe:
    """How an update's loss is made: an algorithm, and the numbers it leaves open."""

    algorithm: Algorithm
    limits: Limits
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, in units of the reward per nat."""
    kl_weight: KLWeight = "ratio"

    def terms(self, beta: float) -> list[str]:
        """Names of the terms that the loss has at that beta."""
        penalty = ["kl"] if beta > 0 and not self.algorithm.kl_in_reward else []
        return ["policy", *penalty, *(["entropy"] if self.entropy_coef else [])]


@dataclass(frozen=True)
class Tokens:
    """What a loss knows of some rows. Only `logp` and `entropy` carry a gradient."""

    logp: TokenFloats
    logp_old: TokenFloats
    logp_ref: TokenFloats | None
    """None where nothing looks at the reference."""
    advantage: Advantage
    mask: TokenMask
    weight: TokenFloats | None = None
    """Multiplies the surrogate (see `losses.weights`); None: 1."""
    entropy: TokenFloats | None = None
    """In nats, with its gradient, where there is an entropy bonus."""


def loss_terms(tokens: Tokens, recipe: Recipe, beta: float, counts: Counts) -> dict[str, Scalar]:
    """{policy, kl, entropy}, those that are there. Their sum is the loss; over an update's micro-batches they add up.

    policy = reduce(w · surrogate), kl = reduce(beta · KL), entropy = −coef · Σ H / n_tokens (more entropy, less loss).

    Raises:
        ValueError: tables of different shapes; a term without what it is made of; old or reference log-probs that
            carry a gradient.
    """
    names = recipe.terms(beta)
    _check(tokens, names)
    surrogate = SURROGATES[recipe.algorithm.surrogate]
    per_token = surrogate(tokens.logp, tokens.logp_old, tokens.advantage, recipe.limits, tokens.mask)
    if tokens.weight is not None:
        per_token = per_token * tokens.weight
    reduce = REDUCTIONS[recipe.algorithm.reduction]
    terms = {"policy": reduce(per_token, tokens.mask, counts)}
    if "kl" in names:
        terms["kl"] = beta * reduce(_kl(tokens, recipe), tokens.mask, counts)
    if "entropy" in names:
        assert tokens.entropy is not None
        terms["entropy"] = -recipe.entropy_coef * token_mean(tokens.entropy, tokens.mask, counts.tokens)
    return terms


def _check(tokens: Tokens, names: Sequence[str]) -> None:
    same_shape(
        logp=tokens.logp, logp_old=tokens.logp_old, logp_ref=tokens.logp_ref, mask=tokens.mask,
        weight=tokens.weight, entropy=tokens.entropy,
    )  # fmt: skip
    batch, token = tokens.logp.shape
    if tokens.advantage.shape not in ((batch, 1), (batch, token), (batch, min(token, 1))):  # it would be broadcast
        raise ValueError(
            f"advantage is {list(tokens.advantage.shape)} for logp {list(tokens.logp.shape)}; needs one a completion, "
            f"[{batch}, 1], or one a token"
        )
    for name, table, what in (("kl", tokens.logp_ref, "logp_ref"), ("entropy", tokens.entropy, "entropy")):
        if name in names and table is None:
            raise ValueError(f"the loss has the term '{name}', but {what} is None; give it, or weigh the term with 0")


def _kl(tokens: Tokens, recipe: Recipe) -> TokenFloats:
    assert tokens.logp_ref is not None
    clamp = recipe.limits.log_ratio_clamp
    estimate = kl_loss(recipe.algorithm.kl)(tokens.logp, tokens.logp_ref, clamp, tokens.mask)
    return kl_weight(recipe.kl_weight, tokens.logp, tokens.logp_old, clamp, tokens.mask) * estimate
