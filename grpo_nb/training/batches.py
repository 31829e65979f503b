"""Completions in the form that a run's passes take, and their scores."""

from collections.abc import Sequence

from grpo_nb import passes
from grpo_nb.passes import FlatBatch
from grpo_nb.policy import packing
from grpo_nb.policy.grouped import GroupedBatch
from grpo_nb.policy.model import Policy
from grpo_nb.policy.packing import Ids, PackedBatch
from grpo_nb.training.numerics import Numerics
from grpo_nb.types import Batch, TokenStats

AnyBatch = Batch | PackedBatch | FlatBatch | GroupedBatch


def batch_of(
    policy: Policy, prompts: Sequence[Ids], completions: Sequence[Ids], prompt_of: Sequence[int], numerics: Numerics
) -> AnyBatch:
    """Completions as one packed row or one padded batch, no wider than needed; prompts are shared where it pays.

    Args:
        prompts, completions, prompt_of: as `packing.pack`.
    """
    if numerics.passes == "flat":
        shares = numerics.shares_prompts and passes.shares(policy, prompts, completions, prompt_of)
        return passes.flatten(prompts, completions, prompt_of, shares).to(policy.device)
    shares = numerics.shares_prompts and packing.pays(policy.text_config, prompts, completions, prompt_of)
    alone = [prompts[p] for p in prompt_of]
    if numerics.passes == "grouped":
        given = (prompts, completions, prompt_of) if shares else (alone, completions, range(len(alone)))
        return policy.group(*given)
    return policy.pack(prompts, completions, prompt_of) if shares else policy.collate(alone, completions)


def score(
    policy: Policy,
    batch: AnyBatch,
    temperature: float = 1.0,
    *,
    entropy_learns: bool = False,
    adapter: str | None = None,
) -> TokenStats:
    """Log-probs and entropies, in nats, of a batch's completion tokens, by the batch's own kind of forward pass.

    `adapter` names the adapter of a flat batch; other batches use the active one.
    """
    if isinstance(batch, FlatBatch):
        return passes.token_stats(policy, batch, temperature, entropy_learns, adapter)
    return policy.logprobs(batch, temperature, entropy_learns=entropy_learns)
