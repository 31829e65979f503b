"""Pairs of a prompt and the completion to learn, and SFT's computations on them."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from grpo_nb.policy.model import Policy
from grpo_nb.training.batches import batch_of, score
from grpo_nb.training.gradients import chunks
from grpo_nb.training.numerics import Numerics


@dataclass(frozen=True)
class Pair:
    """A prompt and the completion to learn, as token ids; the completion ends with a stop token."""

    prompt_ids: list[int]
    completion_ids: list[int]


@dataclass(frozen=True)
class Share:
    """Part or all of an update's pairs."""

    pairs: Sequence[Pair]
    tokens: int
    """Completion tokens of the complete update: the denominator."""
    micro_batch: int
    numerics: Numerics


def accumulate(policy: Policy, share: Share) -> float:
    """The pairs' part of the token-mean loss, in nats; its gradient is added to `.grad`, micro-batch by micro-batch."""
    total = 0.0
    for micro in chunks(share.pairs, share.micro_batch):
        loss = -logprobs(policy, micro, share.numerics).sum() / share.tokens
        loss.backward()
        total += loss.item()
    return total


def logprobs(policy: Policy, pairs: Sequence[Pair], numerics: Numerics) -> Float[Tensor, "pair token"]:
    """Log-probs of completion tokens, in nats; 0 after the end."""
    prompts, completions = [pair.prompt_ids for pair in pairs], [pair.completion_ids for pair in pairs]
    return score(policy, batch_of(policy, prompts, completions, range(len(pairs)), numerics)).logprobs
