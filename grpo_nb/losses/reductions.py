"""Reductions of per-token losses to one number; the sum over the micro-batches is the value of the complete batch."""

from collections.abc import Callable, Mapping

import torch

from grpo_nb.losses.tokens import LossNormalizer, Scalar, TokenFloats, TokenMask, same_shape


def sequence_mean(per_token: TokenFloats, mask: TokenMask, n_sequences: int) -> Scalar:
    """Σᵢ (Σₜ m l / Σₜ m) / n_sequences: each answer counts the same, however long. An empty one adds 0."""
    sums = _left_in(per_token, mask).sum(-1)
    return (sums / mask.sum(-1).clamp(min=1)).sum() / max(n_sequences, 1)


def token_mean(per_token: TokenFloats, mask: TokenMask, n_tokens: int) -> Scalar:
    """Σ m l / n_tokens: each token counts the same."""
    return _left_in(per_token, mask).sum() / max(n_tokens, 1)


def constant_length(per_token: TokenFloats, mask: TokenMask, n_sequences: int, max_completion_length: int) -> Scalar:
    """Σ m l / (n_sequences · max_completion_length): no length in the denominator, hence no length bias."""
    return _left_in(per_token, mask).sum() / max(n_sequences * max_completion_length, 1)


def _left_in(per_token: TokenFloats, mask: TokenMask) -> TokenFloats:
    same_shape(per_token=per_token, mask=mask)
    return torch.where(mask, per_token, 0.0)


Reduction = Callable[[TokenFloats, TokenMask, LossNormalizer], Scalar]

REDUCTIONS: Mapping[str, Reduction] = {
    "sequence_mean": lambda per_token, mask, n: sequence_mean(per_token, mask, n.sequences),
    "token_mean": lambda per_token, mask, n: token_mean(per_token, mask, n.tokens),
    "constant_length": lambda per_token, mask, n: constant_length(
        per_token, mask, n.sequences, n.max_completion_length
    ),
}
