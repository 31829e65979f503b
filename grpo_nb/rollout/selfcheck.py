"""Check, once per policy, that a token's log-prob does not depend on what else is computed with it.

Three prompts of unequal length are sampled from together, left-padded, and their tokens scored three ways: as the
engine sampled them, together in one pass, and each row alone without padding. A model whose positions, masks or states
break with padding, or whose decoding loop is another function than its full pass, would be trained on wrong ratios.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_nb.config import ModelConfig, SamplingConfig
from grpo_nb.losses.rounding import Gap, broken, step
from grpo_nb.policy import llama_layers
from grpo_nb.policy.full_memory import full_memory
from grpo_nb.policy.grouped import GroupedBatch
from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.policy.packing import PackedBatch
from grpo_nb.policy.shards import Sharding
from grpo_nb.policy.source import ModelError
from grpo_nb.printable import clean_logger
from grpo_nb.rollout.eager import EagerEngine
from grpo_nb.rollout.request import Request
from grpo_nb.types import Rollouts

logger = clean_logger(__name__)

LENGTHS, TOKENS = (9, 4, 1), 4
"""Tokens of the prompts and of each completion; padding longer than the kernels of the usual short convolutions."""


def load_alike(model: ModelConfig, seed: int, sharding: Sharding | None = None) -> Policy:
    """`load_policy`; policies of the same files and settings share the results of `check_model` in this process.

    For callers that use it as loaded: SFT, GRPO and each evaluation of a run load the model anew.
    """
    policy = load_policy(model, seed, sharding)
    if sharding is not None:
        return policy  # all ranks make the same passes, whatever each of them loaded before
    stamps = tuple((key, *reads) for key, reads in policy.origin.files.items())
    loaded = (policy.origin.source, policy.origin.revision, stamps, model.model_dump_json(), str(policy.device))
    policy.agrees = _agree.setdefault(loaded, set())
    return policy


_agree: dict[Hashable, set[str]] = {}


def check_model(policy: Policy, draws: bool = True) -> None:
    """Refuse a model whose log-probs depend on padding, on training mode, or (`draws`: by our engine) on the cache.

    Costs nine short forward passes, once for each policy, or for those of `load_alike`.

    Raises:
        ModelError: names the difference, its size in nats, and the usual cause.
    """
    wanted = {"scores", "draws"} if draws else {"scores"}
    if wanted <= policy.agrees:
        return
    name, prompts = policy.describe()["architecture"], _prompts(policy)
    try:
        with full_memory():
            found = _measured(policy, prompts, draws)
    except (ModelError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(
            f"{name} cannot be {'drawn from' if draws else 'scored'} here: {type(error).__name__}: {error}. Needs a "
            "causal language model with a key-value cache, or a state that rows can be taken from. Choose another model"
        ) from error
    for what, differences in found.items():
        _refuse(policy, f"{name}: {what}", differences, _CAUSES[what])
    policy.agrees |= wanted


def sampler_fault(policy: Policy, generate: Callable[[Policy, Request], Rollouts]) -> str | None:
    """Error text if log-probs of `generate` are not the policy's own; None where rounding explains the difference."""
    (gap,) = sampler_gaps(policy, generate, 1.0, (1.0,))
    if wrong := _beyond_rounding(policy, gap):
        return (
            f"its log-probs differ by {wrong['mean'][0]:.3g} nats on average, rounding explains {wrong['mean'][1]:.2g}"
        )
    return None


def sampler_gaps(
    policy: Policy, generate: Callable[[Policy, Request], Rollouts], temperature: float, scored_at: Sequence[float]
) -> list[Tensor]:
    """Differences, in nats, of sampled tokens' log-probs from `generate` and from the policy at other temperatures."""
    prompts, sampling = _prompts(policy), SamplingConfig(max_completion_length=TOKENS, temperature=temperature)
    with policy.eval_mode():
        drawn = generate(policy, Request(prompts, 2, sampling, _uniforms(2 * len(prompts))))
        given = torch.tensor([value for row in drawn.logprobs for value in row])
        rows = [row for row in prompts for _ in range(2)], drawn.completion_ids
        return [given - _scores(policy, *rows, temperature=t) for t in scored_at]


def shares_prompts(policy: Policy) -> bool:
    """Whether completions after one shared prompt have the log-probs that they have alone, to rounding.

    Costs two short forward passes, once for each policy.
    """
    return _scores_alike(policy, "shared prompts", policy.pack)


def groups(policy: Policy) -> bool:
    """Whether `policy.llama_layers` serve this policy and give its own log-probs, to rounding; at the same cost."""
    return llama_layers.unserved(policy.model) is None and _scores_alike(policy, "grouped passes", policy.group)


def _scores_alike(policy: Policy, what: str, batched: Callable[..., PackedBatch | GroupedBatch]) -> bool:
    """Whether batches of this kind give the policy's own log-probs, to rounding; measured once for each policy."""

    def scores(*rows: Sequence[Any]) -> Tensor:
        batch = batched(*rows)
        return policy.logprobs(batch).logprobs[batch.completion_mask]

    if not policy.checked & {what, f"no {what}"}:
        try:
            with full_memory():
                found = agrees(policy, scores)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # a model may raise anything for a mask it does not support: it gets none
            logger.info("%s takes no %s: %s", type(policy.model).__name__, what, error)
            found = False
        policy.checked.add(what if found else f"no {what}")
    return what in policy.checked


def agrees(policy: Policy, scores: Callable[[list[list[int]], list[list[int]], list[int]], Tensor]) -> bool:
    """Whether another way to score gives the log-probs that completions have alone, to rounding.

    Args:
        scores: of prompts, completions and the prompt of each, to the log-probs of all tokens, row after row.
    """
    prompts, prompt_of = _prompts(policy), [0, 0, 1, 1, 2, 2]
    completions = [prompts[0][:TOKENS], *([row[0]] * TOKENS for row in prompts), prompts[0][:1], prompts[1][:2]]
    room = policy.context - max(map(len, prompts))
    completions = [row[:room] for row in completions]
    with policy.eval_mode():
        alone = _scores(policy, [prompts[p] for p in prompt_of], completions)
        other = scores(prompts, completions, prompt_of).float().cpu()
    return not _beyond_rounding(policy, other - alone)


def _measured(policy: Policy, prompts: Sequence[Sequence[int]], draws: bool) -> dict[str, Tensor]:
    """Differences of log-probs, by the pair of computations that they are between."""
    completions: Sequence[Sequence[int]] = [[row[0]] * TOKENS for row in prompts]
    with policy.eval_mode():
        if draws:
            sampling = SamplingConfig(max_completion_length=TOKENS, temperature=1.0)
            drawn = EagerEngine().generate(policy, Request(prompts, 1, sampling, _uniforms(len(prompts))))
            completions = drawn.completion_ids
        together = _scores(policy, prompts, completions)
        alone = torch.cat([_scores(policy, [p], [c]) for p, c in zip(prompts, completions, strict=True)])
    with torch.no_grad():
        training = _scores(policy, prompts, completions)
    found = {_PADDING: together - alone, _RANDOM: training - together}
    if draws:
        found[_DECODING] = torch.tensor([value for row in drawn.logprobs for value in row]) - together
    return found


_PADDING = "scores change with a row's padding"
_RANDOM = "scores in training mode are not those in eval mode"
_DECODING = "tokens are sampled from one distribution and scored under another"
_CAUSES = {
    _PADDING: "its positions or states do not leave padding out, so rows of unequal length cannot be trained together",
    _RANDOM: "something random is active, dropout or router noise under a name that is not known here",
    _DECODING: "its decoding step with a cache is another function than its full pass, mostly by its mask or state",
}


def _refuse(policy: Policy, what: str, differences: Tensor, cause: str) -> None:
    if not differences.isfinite().all():
        return  # damaged weights are no fault of the architecture: training and sampling report them
    if wrong := _beyond_rounding(policy, differences):
        raise ModelError(
            f"{what}: log-probs differ by {wrong['mean'][0]:.3g} nats on average, rounding explains "
            f"{wrong['mean'][1]:.2g}. The cause: {cause}. Choose another model"
        )


def _beyond_rounding(policy: Policy, differences: Tensor) -> dict[str, tuple[float, float]]:
    """Statistics of log-prob differences that exceed rounding; see `rounding.broken`."""
    sizes = differences.abs()
    return broken(Gap(mean=float(sizes.mean()), tokens=sizes.numel()), step(policy.dtype, policy.device))


def _prompts(policy: Policy) -> list[list[int]]:
    """Ordinary tokens, spread over the vocabulary; shorter where the model's context is."""
    ids = [i for i in range(policy.tokenization.rows) if i not in (*policy.stop_token_ids, policy.pad_id)]
    room = max(1, policy.context - TOKENS)
    count = sum(LENGTHS)
    spread = [ids[(k * len(ids)) // count] for k in range(count)]
    ends = [sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS))]
    return [spread[end - length : end][:room] for end, length in zip(ends, LENGTHS, strict=True)]


def _uniforms(rows: int) -> Tensor:
    return torch.rand(rows, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _scores(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float = 1.0,
) -> Tensor:
    """Log-probs of all completion tokens in one pass, row after row."""
    batch = policy.collate(prompts, completions)
    return policy.logprobs(batch, temperature).logprobs[batch.completion_mask].float().cpu()
