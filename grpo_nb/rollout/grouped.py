"""The engine for small Llama-like models on the CPU: a prompt's keys and values are stored once for its K rows.

The cache has room for every token from the start. Slot by slot it holds a prompt, then the next token of each of the
group's rows, then the token after that of each unfinished row; a mask marks each row's slots.
"""

from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from grpo_nb.policy.grouped import padded
from grpo_nb.policy.llama_layers import LlamaLayers, unserved
from grpo_nb.policy.model import ModelError, Policy
from grpo_nb.printable import clean_logger
from grpo_nb.rollout import eager
from grpo_nb.rollout.request import Request
from grpo_nb.rollout.selfcheck import sampler_fault
from grpo_nb.types import Rollouts

logger = clean_logger(__name__)

SPARSE = 0.75
"""Share of unfinished groups below which the finished ones leave the cache, which copies it."""


class GroupedEngine:
    """Samples as `EagerEngine` does, with a fraction of its operations; for other policies `EagerEngine` samples.

    At most about `max_rows` completions are in flight; more are sampled in turn, which changes memory and no result.
    """

    def __init__(self, max_rows: int = 256) -> None:
        self.max_rows, self.eager = max_rows, eager.EagerEngine(max_rows)
        self._verdicts: WeakKeyDictionary[Policy, str | None] = WeakKeyDictionary()

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        """K completions per prompt; see `EagerEngine.generate`, whose errors these are.

        Raises:
            ModelError: as there.
            ValueError: as there.
        """
        if request.sampling.repetition_penalty != 1 or self.refused(policy):
            return self.eager.generate(policy, request)
        return self._generate(policy, request)

    def refused(self, policy: Policy) -> str | None:
        """Reason why the eager engine samples from this policy; None where this engine does.

        Samples a few tokens to find out, once.

        Raises:
            ModelError: its scores are not finite.
        """
        if policy not in self._verdicts:
            reason = unserved(policy.model) or sampler_fault(policy, self._generate)
            self._verdicts[policy] = reason
            if reason:
                logger.info("rollout engine: eager instead of grouped: %s", reason)
        return self._verdicts[policy]

    def _generate(self, policy: Policy, request: Request) -> Rollouts:
        eager.check(policy, request)
        drawn, at_once = eager.Drawn(policy, request), request.prompts_at_once(self.max_rows)
        with torch.no_grad():
            decoding = _Decoding(policy, request)
            for first in range(0, len(request.prompt_ids), at_once):
                decoding.draw(first, min(at_once, len(request.prompt_ids) - first), drawn)
        return drawn.rollouts()


@dataclass
class Groups:
    """Prompts with unfinished rows, M rows each."""

    rows: Int[Tensor, "prompt member"]
    """Index of each member's completion among the B; a prompt with fewer rows left repeats finished ones."""
    alive: Bool[Tensor, "prompt member"]
    tokens: Int[Tensor, "prompt member"]
    """The newest of each row."""
    lengths: Int[Tensor, "prompt"]
    """Tokens of the prompts."""


class GroupCache:
    """Keys and values by layer, [prompt, head, slot, d], and the content of each slot."""

    def __init__(self, layers: LlamaLayers, lengths: Int[Tensor, "prompt"], slots: int) -> None:
        shape = len(lengths), layers.kv_heads, slots, layers.d
        self.keys = [torch.empty(shape) for _ in layers.layers]
        self.values = [torch.empty(shape) for _ in layers.layers]
        self.filled = int(lengths.max())
        place = torch.arange(self.filled)
        self.owner = torch.full((len(lengths), slots), NOTHING)
        """The row whose token a slot holds."""
        self.owner[:, : self.filled].masked_fill_(place < lengths[:, None], PROMPT)

    def add(self, layer: int, keys: Float[Tensor, "prompt head new d"], values: Tensor) -> None:
        """Append the newest tokens' keys and values to the filled slots."""
        end = self.filled
        self.keys[layer][:, :, end - keys.shape[2] : end] = keys
        self.values[layer][:, :, end - keys.shape[2] : end] = values

    def take(self, rows: Int[Tensor, "prompt member"]) -> None:
        """Reserve a slot for one more token of each row."""
        self.owner[:, self.filled : self.filled + rows.shape[1]] = rows
        self.filled += rows.shape[1]

    def seen(self, rows: Int[Tensor, "prompt member"]) -> Float[Tensor, "prompt 1 member slot"]:
        """0 at the slots that a row sees, -inf elsewhere."""
        owner = self.owner[:, None, : self.filled]
        hidden = (owner != rows[:, :, None]) & (owner != PROMPT)
        return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]

    def keep(self, prompts: Int[Tensor, "some"]) -> None:
        """Continue with these prompts only."""
        self.keys = [keys[prompts] for keys in self.keys]
        self.values = [values[prompts] for values in self.values]
        self.owner = self.owner[prompts]


NOTHING, PROMPT = -2, -1


class _Decoding:
    """Samples completions with the policy's present weights."""

    def __init__(self, policy: Policy, request: Request) -> None:
        self.policy, self.request = policy, request
        self.layers = LlamaLayers(policy.model)
        self.cap = request.sampling.max_completion_length
        self.turns = self.layers.turns(torch.arange(max(map(len, request.prompt_ids)) + self.cap))
        self.stops = torch.tensor(policy.stop_token_ids)
        self.processors = eager.processors_of(request.sampling, request.temperature)
        shape = request.rows, self.cap
        self.ids, self.logprobs = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)

    def draw(self, first: int, count: int, drawn: eager.Drawn) -> None:
        """Sample all completions of `count` prompts."""
        prompts, k = self.request.prompt_ids[first : first + count], self.request.group_size
        lengths = torch.tensor([len(ids) for ids in prompts])
        width = int(lengths.max())
        cache = GroupCache(self.layers, lengths, width + k * (self.cap - 1))
        logits = self._prefill(padded(prompts, width, self.policy.pad_id), lengths, cache)
        rows = torch.arange(first * k, (first + count) * k).view(count, k)
        groups = Groups(rows, torch.ones_like(rows, dtype=torch.bool), torch.zeros_like(rows), lengths)
        self._choose(logits.repeat_interleave(k, 0), groups, 0, drawn)
        for t in range(1, self.cap):
            if not groups.alive.any():
                return
            groups = _compact(groups, cache)
            cache.take(groups.rows)
            self._choose(self._advance(groups, cache, t), groups, t, drawn)

    def _prefill(
        self, ids: Int[Tensor, "prompt width"], lengths: Int[Tensor, "prompt"], cache: GroupCache
    ) -> Float[Tensor, "prompt vocab"]:
        """Scores of each prompt's next token; prompts are padded on the right, where a causal mask hides it."""
        count, width = ids.shape
        last, scale = len(self.layers.layers) - 1, self.layers.scale
        seen = cache.seen(torch.full((count, 1), PROMPT))

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
            cache.add(i, k, v)
            how: dict[str, Any] = {"attn_mask": seen} if i == last else {"is_causal": True}
            return _joined(sdpa(q, k, v, **how, scale=scale, enable_gqa=q.shape[1] != k.shape[1]))

        ends = torch.arange(count) * width + lengths - 1
        return self.layers(ids, self.turns[:width].repeat(count, 1, 1), attend, ends)

    def _advance(self, groups: Groups, cache: GroupCache, t: int) -> Float[Tensor, "row vocab"]:
        """Scores of token `t`, from the token before it."""
        count, members = groups.rows.shape
        seen, scale = cache.seen(groups.rows), self.layers.scale

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(count, members, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
            cache.add(i, k, v)
            keys, values = cache.keys[i][:, :, : cache.filled], cache.values[i][:, :, : cache.filled]
            return _joined(sdpa(q, keys, values, seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1]))

        turns = self.turns[groups.lengths + t - 1].repeat_interleave(members, 0)
        return self.layers(groups.tokens, turns, attend)

    def _choose(self, logits: Float[Tensor, "row vocab"], groups: Groups, t: int, drawn: eager.Drawn) -> None:
        """Sample token `t` of each row and end the rows of which it is the last."""
        rows = groups.rows.flatten()
        scores = self.processors(cast(torch.LongTensor, groups.tokens), cast(torch.FloatTensor, logits))
        spread = torch.log_softmax(scores, -1)
        if not spread.amax(-1).isfinite().all():
            raise ModelError(eager.not_finite(self.policy, t))
        tokens = self._tokens(scores, rows, t)
        alive = groups.alive.flatten()
        going = rows[alive]
        self.ids[going, t] = tokens[alive]
        self.logprobs[going, t] = spread.gather(-1, tokens[:, None]).squeeze(-1)[alive]
        ends = alive if t + 1 == self.cap else alive & torch.isin(tokens, self.stops)
        groups.tokens = tokens.view_as(groups.rows)
        groups.alive = (alive & ~ends).view_as(groups.rows)
        ended = rows[ends].tolist()
        for row, ids, logprobs in zip(
            ended, self.ids[ended, : t + 1].tolist(), self.logprobs[ended, : t + 1].tolist(), strict=True
        ):
            drawn.ids[row], drawn.logprobs[row] = ids, logprobs
        drawn.end(ended)

    def _tokens(self, scores: Float[Tensor, "row vocab"], rows: Int[Tensor, "row"], t: int) -> Int[Tensor, "row"]:
        if self.request.greedy or self.request.uniforms is None:
            return scores.argmax(-1)
        return eager.sample_inverse_cdf(scores, self.request.uniforms[rows, t])


def _compact(groups: Groups, cache: GroupCache) -> Groups:
    """Drop places that no prompt needs, and finished prompts once they are many."""
    counts = groups.alive.sum(1)
    prompts = counts.nonzero().flatten()
    if len(prompts) > SPARSE * len(counts):
        prompts = torch.arange(len(counts))
    else:
        cache.keep(prompts)
    members = int(counts.max())
    if len(prompts) == len(counts) and members == groups.rows.shape[1]:
        return groups
    order = groups.alive[prompts].int().argsort(dim=1, descending=True, stable=True)[:, :members]
    rows, alive, tokens = (x[prompts].gather(1, order) for x in (groups.rows, groups.alive, groups.tokens))
    return Groups(rows, alive, tokens, groups.lengths[prompts])


def _joined(x: Float[Tensor, "prompt head token d"]) -> Float[Tensor, "row width"]:
    return x.transpose(1, 2).flatten(2).flatten(0, 1)
