"""Exact distance of a policy from its reference: KL of complete distributions on some prefixes."""

import torch

from grpo_nb.policy import logprobs
from grpo_nb.policy.grouped import GroupedBatch
from grpo_nb.policy.model import Policy
from grpo_nb.types import Batch


def kl_to_reference(policy: Policy, batch: Batch | GroupedBatch, temperature: float = 1.0) -> float:
    """KL(policy ‖ reference) in nats per token, the mean over a batch's completion tokens.

    Exact on these prefixes, whatever was sampled after them; NaN where scores are not finite.
    """
    grouped = isinstance(batch, GroupedBatch)
    with torch.no_grad() if grouped else policy.eval_mode():
        own = policy.distributions(batch, temperature)
    with policy.as_grouped_reference() if grouped else policy.as_reference():
        found = logprobs.kl(own, policy.distributions(batch, temperature))
    found = batch.pick(found) if isinstance(batch, GroupedBatch) else found
    return float(found[batch.completion_mask].mean())
