"""The loss of a micro-batch, term by term: policy + KL + entropy, each reduced with the whole update's counts."""

from dataclasses import dataclass

from grpo_nb.algorithms import Algorithm
from grpo_nb.losses.kl import KLWeight, kl_loss, kl_weight
from grpo_nb.losses.reductions import REDUCTIONS, token_mean
from grpo_nb.losses.surrogates import SURROGATES, Limits
from grpo_nb.losses.tokens import Advantage, Counts, Scalar, TokenFloats, TokenMask


@dataclass(frozen=True)
class Recipe:
    """How an update's loss is made: an algorithm, and the numbers it leaves open."""

    algorithm: Algorithm
    limits: Limits
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, in units of the reward per nat."""
    kl_weight: KLWeight = "ratio"


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
        ValueError: tables of different shapes; old or reference log-probs that carry a gradient.
    """
    _check(tokens)
    surrogate = SURROGATES[recipe.algorithm.surrogate]
    per_token = surrogate(tokens.logp, tokens.logp_old, tokens.advantage, recipe.limits, tokens.mask)
    if tokens.weight is not None:
        per_token = per_token * tokens.weight
    reduce = REDUCTIONS[recipe.algorithm.reduction]
    terms = {"policy": reduce(per_token, tokens.mask, counts)}
    if beta > 0 and tokens.logp_ref is not None and recipe.algorithm.kl != "k1_in_reward":
        terms["kl"] = beta * reduce(_kl(tokens, recipe), tokens.mask, counts)
    if tokens.entropy is not None and recipe.entropy_coef:
        terms["entropy"] = -recipe.entropy_coef * token_mean(tokens.entropy, tokens.mask, counts.tokens)
    return terms


def _check(tokens: Tokens) -> None:
    """Broadcasting would make a wrong result of shapes that disagree."""
    shape = tokens.logp.shape
    for name in ("logp_old", "logp_ref", "mask", "weight", "entropy"):
        table = getattr(tokens, name)
        if table is not None and table.shape != shape:
            raise ValueError(f"{name} is {list(table.shape)}, logp is {list(shape)}; both must be [batch, token]")
    if tokens.advantage.shape not in (shape, (shape[0], 1), (shape[0], min(shape[1], 1))):
        raise ValueError(
            f"advantage is {list(tokens.advantage.shape)} for logp {list(shape)}; needs one a completion, "
            f"[{shape[0]}, 1], or one a token"
        )


def _kl(tokens: Tokens, recipe: Recipe) -> TokenFloats:
    assert tokens.logp_ref is not None
    clamp = recipe.limits.log_ratio_clamp
    estimate = kl_loss(recipe.algorithm.kl)(tokens.logp, tokens.logp_ref, clamp, tokens.mask)
    return kl_weight(recipe.kl_weight, tokens.logp, tokens.logp_old, clamp, tokens.mask) * estimate
