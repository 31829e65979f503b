"""The engine for any device: a plain decoding loop over a growing key-value cache."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_nb.config import SamplingConfig
from grpo_nb.losses.rounding import overflow_advice
from grpo_nb.policy.logprobs import position_ids
from grpo_nb.policy.model import ModelError, Policy
from grpo_nb.policy.shards import own
from grpo_nb.rollout.request import Ended, Request
from grpo_nb.types import Rollouts, StopReason


class EagerEngine:
    """Prefills each prompt once, expands it to K rows, and drops rows as they finish.

    At most about `max_rows` completions are in flight; more are sampled in turn, which changes memory and no result.
    """

    def __init__(self, max_rows: int = 256) -> None:
        self.max_rows = max_rows

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        """K completions per prompt by inverse-CDF sampling from the uniforms, or of the likeliest tokens.

        The returned log-probs are of the distribution that was sampled, after all of `sampling`; greedy ones
        are of the model's own, at temperature 1.

        Raises:
            ModelError: a prompt is empty, or leaves no room for `max_completion_length` tokens in the context; or the
                model's scores are not finite.
            ValueError: temperature is not positive, or uniforms are not [P * K, max_completion_length or more] float64.
        """
        check(policy, request)
        drawn, at_once = Drawn(policy, request), request.prompts_at_once(self.max_rows)
        with policy.eval_mode():
            for first in range(0, len(request.prompt_ids), at_once):
                _decode(policy, _prefill(policy, request, first, at_once), drawn, request)
        return drawn.rollouts()


def stream(policy: Policy, request: Request) -> Iterator[list[int]]:
    """The completion of one prompt while it grows: all its ids so far, after each token.

    Between two of them no state of the policy is held: the caller may stop there, or pass the policy to another thread.

    Raises:
        ModelError, ValueError: as `EagerEngine.generate`.
    """
    check(policy, request)
    processors, ids = processors_of(request.sampling, request.temperature), list[int]()
    with policy.eval_mode():
        rows = _prefill(policy, request, 0, 1)
    for t in range(request.sampling.max_completion_length):
        with policy.eval_mode():
            if t:
                _advance(policy, rows, torch.tensor(ids[-1:]), [0])
            scores = processors(cast(torch.LongTensor, rows.history), cast(torch.FloatTensor, rows.logits))
            if not scores.amax(-1).isfinite().all():
                raise ModelError(not_finite(policy, t))
            ids = [*ids, *_choose(scores, rows.row_ids, t, request).tolist()]
        yield ids
        if ids[-1] in policy.stop_token_ids:
            return


@dataclass
class ActiveRows:
    """Unfinished rows, in the order of their numbers."""

    row_ids: list[int]
    """Index of each row's completion among the B."""
    cache: Any
    history: Int[Tensor, "row sequence"]
    """All ids so far; padding is overwritten by a token of the row, so that penalties do not see it."""
    attention: Int[Tensor, "row sequence"]
    logits: Float[Tensor, "row vocab"]
    """float32, of the next token."""


class Drawn:
    """Completions as they grow, by number; each is decoded and passed on when it ends."""

    def __init__(self, policy: Policy, request: Request) -> None:
        self._policy, self._request = policy, request
        self.ids: list[list[int]] = [[] for _ in range(request.rows)]
        self.logprobs: list[list[float]] = [[] for _ in range(request.rows)]
        self._texts, self._marked = [""] * request.rows, [""] * request.rows
        self._opened = [policy.left_open(prompt) for prompt in request.prompt_ids]

    def end(self, numbers: Sequence[int]) -> None:
        """Mark these completions as ended."""
        for number in numbers:
            ids, opened = self.ids[number], self._opened[number // self._request.group_size]
            self._texts[number] = self._policy.decode(ids)
            self._marked[number] = opened + self._policy.decode_marked(ids)
        if numbers and self._request.ended is not None:
            self._request.ended([Ended(number, self._marked[number]) for number in numbers])

    def rollouts(self) -> Rollouts:
        """Rollouts of all completions, once the last has ended."""
        stops, request = self._policy.stop_token_ids, self._request
        reasons: list[StopReason] = ["stop" if ids[-1] in stops else "length" for ids in self.ids]
        shown = self._marked if self._marked != self._texts else ()
        return Rollouts(request.prompt_ids, self.ids, self.logprobs, reasons, self._texts, request.group_size, shown)


def sample_inverse_cdf(scores: Float[Tensor, "row vocab"], uniforms: Float[Tensor, "row"]) -> Int[Tensor, "row"]:
    """The first token whose cumulative probability exceeds u (inverse CDF), on the CPU in float64.

    A token of probability 0 is never sampled, at u = 0 and at the largest u below 1 as well: the target stays below
    the total, and only a token of positive probability raises the cumulative sum past it.
    """
    cumulative = torch.softmax(scores.to("cpu", torch.float64), -1).cumsum(-1)
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms[:, None] * total, below)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def _prefill(policy: Policy, request: Request, first: int, count: int) -> ActiveRows:
    """`count` prompts through the model once; its cache and last logits repeated for each of their K rows."""
    prompts, group = request.prompt_ids[first : first + count], request.group_size
    batch = policy.collate(prompts, [[]] * len(prompts))
    logits, cache = forward(policy, batch.input_ids, batch.attention_mask, position_ids(batch.attention_mask), None)
    copies = torch.arange(len(prompts), device=policy.device).repeat_interleave(group)
    cache.reorder_cache(copies)  # a plain index, which caches of every kind of layer have
    own = batch.input_ids[:, -1:].expand_as(batch.input_ids)
    history = torch.where(batch.attention_mask.bool(), batch.input_ids, own)
    row_ids = list(range(first * group, (first + len(prompts)) * group))
    return ActiveRows(row_ids, cache, history[copies], batch.attention_mask[copies], logits[copies])


def _decode(policy: Policy, rows: ActiveRows, drawn: Drawn, request: Request) -> None:
    """Sample token after token for all rows of `rows`, until each has a stop token or the cap's number of tokens."""
    processors, cap = processors_of(request.sampling, request.temperature), request.sampling.max_completion_length
    stops = set(policy.stop_token_ids)
    for t in range(cap):
        scores = processors(cast(torch.LongTensor, rows.history), cast(torch.FloatTensor, rows.logits))
        spread = torch.log_softmax(scores, -1)
        if not spread.amax(-1).isfinite().all():
            raise ModelError(not_finite(policy, t))
        tokens = _choose(scores, rows.row_ids, t, request)
        logprobs = spread.gather(-1, tokens[:, None].to(scores.device)).squeeze(-1)
        chosen = tokens.tolist()
        active = _record(drawn, rows.row_ids, chosen, logprobs.tolist(), set(chosen) if t + 1 == cap else stops)
        if not active:
            return
        _advance(policy, rows, tokens, active)


def _choose(scores: Float[Tensor, "row vocab"], row_ids: list[int], t: int, request: Request) -> Int[Tensor, "row"]:
    """Sample token t of each row, on the CPU."""
    if request.greedy or request.uniforms is None:
        return scores.argmax(-1).cpu()
    return sample_inverse_cdf(scores, request.uniforms[row_ids, t].cpu())


def not_finite(policy: Policy, t: int) -> str:
    """Error text for scores that are nan or infinite: the likely cause and the change to make."""
    found = f"the model's scores for token {t + 1} of an answer are nan or infinite, so there is nothing to draw from"
    dtype = str(policy.dtype).removeprefix("torch.")
    broken = [name for name, weight in policy.model.named_parameters() if not own(weight).isfinite().all()]
    if broken:
        return (
            f"{found}: {len(broken)} of its weights hold nan or infinity, {broken[0]} first; an update damaged them "
            "(continue from an earlier checkpoint with half the learning rate), or the model's file did (load another)"
        )
    return (
        f"{found}; its weights are finite, so numbers overflow on the way: {overflow_advice(dtype)}, or set a "
        "temperature nearer to 1"
    )


def _record(
    drawn: Drawn, row_ids: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float], last: Collection[int]
) -> list[int]:
    """Record one token of each row and end the rows that sampled one of `last`; returns the places of the others."""
    for number, token, logprob in zip(row_ids, tokens, logprobs, strict=True):
        drawn.ids[number].append(token)
        drawn.logprobs[number].append(logprob)
    drawn.end([number for number, token in zip(row_ids, tokens, strict=True) if token in last])
    return [place for place, token in enumerate(tokens) if token not in last]


def _advance(policy: Policy, rows: ActiveRows, tokens: Tensor, active: list[int]) -> None:
    """Drop the rows that have finished and run the others one token further."""
    tokens = tokens.to(rows.history.device)
    if len(active) < len(rows.row_ids):
        places = torch.tensor(active, device=rows.history.device)
        rows.cache.reorder_cache(places)
        rows.row_ids = [rows.row_ids[place] for place in active]
        rows.history, rows.attention, tokens = rows.history[places], rows.attention[places], tokens[places]
    rows.history = torch.cat([rows.history, tokens[:, None]], 1)
    rows.attention = torch.cat([rows.attention, torch.ones_like(tokens[:, None])], 1)
    positions = rows.attention.sum(1, keepdim=True) - 1
    attention = rows.attention if _attends(rows.cache) else None
    rows.logits, rows.cache = forward(policy, tokens[:, None], attention, positions, rows.cache)


def _attends(cache: Any) -> bool:
    """Whether a layer of the cache attends to the past; a state-space model keeps its past in a state, and would
    multiply the new token by the mask of all that came before.
    """
    return any(hasattr(layer, "get_seq_length") for layer in cache.layers)


def forward(
    policy: Policy, ids: Tensor, attention: Tensor | None, positions: Tensor, cache: Any
) -> tuple[Float[Tensor, "row vocab"], Any]:
    """float32 logits of the token after the last one, and the cache that now holds these ids too."""
    output = policy.model(
        input_ids=ids,
        attention_mask=attention,
        position_ids=positions,
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1].float(), output.cache


def processors_of(sampling: SamplingConfig, temperature: float | None) -> LogitsProcessorList:
    """Transformers' processors in the order of its own `generate`; no temperature means greedy: penalties only."""
    chain = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if temperature is None:
        return chain
    if temperature != 1:
        chain.append(TemperatureLogitsWarper(float(temperature)))
    if sampling.top_k > 0:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain


def check(policy: Policy, request: Request) -> None:
    longest, cap = max(map(len, request.prompt_ids), default=0), request.sampling.max_completion_length
    temperature, uniforms, rows = request.temperature, request.uniforms, request.rows
    if longest + cap > policy.context:
        raise ModelError(
            f"a prompt of {longest} tokens and max_completion_length={cap} need {longest + cap} positions, the model's "
            f"context has {policy.context}; lower sampling.max_completion_length or shorten the prompt"
        )
    if temperature is None:
        return
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}; needs a positive number, or greedy=True for the likeliest token")
    if uniforms is None or uniforms.dtype != torch.float64 or uniforms.shape[0] != rows or uniforms.shape[1] < cap:
        found = "none" if uniforms is None else f"{uniforms.dtype} {list(uniforms.shape)}"
        raise ValueError(f"uniforms: found {found}; needs float64 [{rows}, {cap}] in [0, 1)")
