"""Log-probs and entropies of completion tokens from one forward pass."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_nb.policy.grouped import GroupedBatch
from grpo_nb.policy.packing import PackedBatch
from grpo_nb.types import Batch, TokenStats


def token_stats(
    model: Any, batch: Batch | PackedBatch | GroupedBatch, temperature: float = 1.0, entropy_learns: bool = False
) -> TokenStats:
    """log softmax(logits / temperature)[token] of each completion token, with the distribution's entropy.

    Computed in float32 as logit - logsumexp, 0 outside the mask. Positions count real tokens only, so padding changes
    nothing. Gradients flow where they are enabled, through the entropy only where `entropy_learns`. The model of a
    grouped batch is a `LlamaLayers`.
    """
    logits = _completion_logits(model, batch)
    logits = logits if temperature == 1.0 else logits / temperature
    normaliser = logits.logsumexp(-1)
    entropy = _entropy(logits, normaliser) if entropy_learns else _entropy(logits.detach(), normaliser.detach())
    if isinstance(batch, PackedBatch | GroupedBatch):
        logprobs = batch.pick_logits(logits) - batch.pick(normaliser)
        entropy = batch.pick(entropy)
    else:
        start = batch.input_ids.shape[1] - batch.completion_mask.shape[1]
        tokens = batch.input_ids[:, start:, None]
        logprobs = logits.gather(-1, tokens).squeeze(-1) - normaliser
    outside = ~batch.completion_mask
    return TokenStats(logprobs.masked_fill(outside, 0.0), entropy.masked_fill(outside, 0.0))


def distributions(
    model: Any, batch: Batch | PackedBatch | GroupedBatch, temperature: float = 1.0
) -> Float[Tensor, "... vocab"]:
    """log softmax(logits / temperature) wherever a batch predicts a completion token, and on its padding."""
    return torch.log_softmax(_completion_logits(model, batch) / temperature, -1)


def kl(policy: Float[Tensor, "... vocab"], reference: Float[Tensor, "... vocab"]) -> Float[Tensor, "..."]:
    """Σ p (log p − log q) over the vocabulary, of log-probs; a token of probability 0 adds 0."""
    probabilities = policy.exp()
    return torch.where(probabilities == 0, 0.0, probabilities * (policy - reference)).sum(-1)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Position of each real token among the real tokens of its row; 0 on the padding before them."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def _completion_logits(model: Any, batch: Batch | PackedBatch | GroupedBatch) -> Float[Tensor, "... vocab"]:
    """float32, of the columns that predict a completion token: of a plain batch all but the last one's own."""
    if isinstance(batch, GroupedBatch):
        return batch.logits(model)
    if isinstance(batch, PackedBatch):
        attention = batch.attention_mask(model.get_input_embeddings().weight.dtype)
        positions, n = batch.position_ids, batch.input_ids.shape[1] - batch.start - 1
    else:
        attention, positions = batch.attention_mask, position_ids(batch.attention_mask)
        n = batch.completion_mask.shape[1]
    logits: Tensor = model(
        input_ids=batch.input_ids,
        attention_mask=attention,
        position_ids=positions,
        logits_to_keep=n + 1,
        use_cache=False,
    ).logits
    return logits[:, logits.shape[1] - n - 1 : -1].float()


def _entropy(logits: Tensor, normaliser: Tensor) -> Tensor:
    """H = logsumexp(z) - sum softmax(z) z, in nats, of the last axis; a forbidden token (z = -inf) adds 0, not NaN."""
    bounded = logits.clamp(min=torch.finfo(logits.dtype).min)
    return normaliser - (torch.softmax(logits, -1) * bounded).sum(-1)
