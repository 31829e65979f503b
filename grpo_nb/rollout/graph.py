"""The engine for CUDA: a static cache, one captured graph per number of rows, and finished rows leave the batch."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from torch import Tensor

from grpo_nb.policy.full_memory import full_memory
from grpo_nb.policy.logprobs import position_ids
from grpo_nb.policy.memory_terms import ROOM
from grpo_nb.policy.model import ModelError, Policy
from grpo_nb.printable import clean_logger
from grpo_nb.rollout.compiled_layers import CompiledLayers
from grpo_nb.rollout.decode_attention import NAME
from grpo_nb.rollout.decode_loop import Chunk, DecodeLoop, Forward, Settings
from grpo_nb.rollout.decode_step import LayerStep, ModelStep, groups
from grpo_nb.rollout.eager import Drawn, EagerEngine, check, forward, not_finite
from grpo_nb.rollout.projections import How, Projections
from grpo_nb.rollout.request import Request
from grpo_nb.rollout.selfcheck import check_model, sampler_fault
from grpo_nb.rollout.static_cache import Size, StaticCache, Unserved, bytes_per_token, check_layers
from grpo_nb.types import Rollouts

logger = clean_logger(__name__)

CHECK_EVERY = 16
"""Tokens between two checks for finished rows; each costs a wait for the device."""
SMALLEST = 8
"""Rows below which a smaller batch saves nothing."""
CACHE_SHARE = 0.25
"""Share of the device's memory for the rows' own keys and values; more rows are sampled in turn."""


class GraphEngine:
    """Samples as `EagerEngine` does, on CUDA, without launching each operation of each token from Python.

    It first samples a few tokens from each policy and compares them with the policy's own log-probs. For a policy that
    it cannot serve, or that differs by more than rounding, `EagerEngine` samples, and the log gives the reason, once.
    Memory of the cache and of the graphs is kept for the next rollout; `release` frees it.
    """

    def __init__(
        self, max_rows: int = 256, adapters: How = "auto", compiled: bool = False, devices: Sequence[str] = ("cuda",)
    ) -> None:
        self.max_rows, self.adapters, self.compiled, self.devices = max_rows, adapters, compiled, devices
        self.eager = EagerEngine(max_rows)
        self._verdicts: WeakKeyDictionary[Policy, str | None] = WeakKeyDictionary()
        """Reason why the eager engine samples from a policy; None where this engine does."""
        self._held: _Held | None = None

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        """K completions per prompt; see `EagerEngine.generate`, whose errors these are.

        Raises:
            ModelError: as there.
            ValueError: as there.
        """
        check(policy, request)
        if self.refused(policy):
            return self.eager.generate(policy, request)
        try:
            with full_memory():
                return self._generate(policy, request)
        except torch.cuda.OutOfMemoryError:
            self.release()  # a retry with fewer rows needs this memory too
            raise

    def unserved(self, policy: Policy) -> str | None:
        """Reason why this policy's device or architecture is not supported; None without one."""
        base, text = base_of(policy), policy.text_config
        if policy.device.type not in self.devices:
            return f"the model is on {policy.device.type}"
        if getattr(base, "is_quantized", False):
            return "its weights are quantised"
        if not base._supports_attention_backend:
            return f"{type(base).__name__} has an attention of its own"
        if getattr(text, "attn_logit_softcapping", None):
            return "its attention scores are soft-capped"
        return None

    def refused(self, policy: Policy) -> str | None:
        """Reason why the eager engine samples from this policy; None where this engine does.

        Samples a few tokens to find out, once.

        Raises:
            ModelError: its scores are not finite, or the eager engine cannot serve it either.
        """
        if policy not in self._verdicts:
            self._verdicts[policy] = self.unserved(policy) or self._fault(policy)
            if reason := self._verdicts[policy]:
                logger.info("rollout engine: eager instead of graph: %s", reason)
                self.release()
                check_model(policy)
        return self._verdicts[policy]

    def release(self) -> None:
        """Free the cache and the graphs."""
        self._held = None

    def _fault(self, policy: Policy) -> str | None:
        """Error of this engine on a few tokens of this policy; None without one."""
        try:
            with full_memory():
                return sampler_fault(policy, self._generate)
        except (ModelError, torch.cuda.OutOfMemoryError):
            raise
        except Unserved as error:
            return str(error)
        except Exception as error:  # any operation of a model that cannot be captured, or another call convention
            return f"{type(error).__name__}: {error}"

    def _generate(self, policy: Policy, request: Request) -> Rollouts:
        drawn, prompts = Drawn(policy, request), len(request.prompt_ids)
        if self._held is None or self._held.weights != weights_of(policy):
            self._held = None
            self._held = _Held(policy, self.adapters, self.compiled)
        held, first, at_once = self._held, 0, request.prompts_at_once(self.max_rows)
        with policy.eval_mode(), held.projections.active():
            while first < prompts:
                count = min(at_once, prompts - first)
                logits, cache = _prefill(policy, held.forward, request.prompt_ids[first : first + count])
                check_layers(cache)
                at_once = min(at_once, self._fitting(policy, request, cache))
                count = min(count, at_once)
                with decoding(policy), held.layers.active():
                    self._decode(policy, request, Chunk(first, count, logits[:count], _front(cache, count)), drawn)
                first += count
        return drawn.rollouts()

    def _fitting(self, policy: Policy, request: Request, like: Any) -> int:
        """Prompts at once whose rows' own keys and values fit the share of the device's memory."""
        if policy.device.type != "cuda":
            return len(request.prompt_ids)
        memory = torch.cuda.get_device_properties(policy.device).total_memory
        own = bytes_per_token(like) * request.sampling.max_completion_length * request.group_size
        return max(1, int(CACHE_SHARE * memory // own))

    def _decode(self, policy: Policy, request: Request, chunk: Chunk, drawn: Drawn) -> None:
        assert self._held is not None
        loop = self._held.loop(policy, request, chunk)
        rows, cap = chunk.count * request.group_size, request.sampling.max_completion_length
        group = [p for p in range(chunk.count) for _ in range(request.group_size)]
        numbers = list(range(chunk.first * request.group_size, chunk.first * request.group_size + rows))
        loop.begin(chunk, group, numbers, request)
        taken = 1
        while True:
            going = _harvest(policy, loop, drawn, request, numbers, taken)
            if not going:
                return
            if (size := bucket(len(going), loop.rows)) < loop.rows:
                places = going + going[-1:] * (size - len(going))
                numbers = [numbers[place] for place in going] + [-1] * (size - len(going))
                group = [group[place] for place in places]
                loop.keep(places, group, taken)
            steps = min(CHECK_EVERY, cap - taken)
            for _ in range(steps):
                loop.advance()
            taken += steps


class _Held:
    """Memory and graphs kept from one rollout to the next, while the weights stay at their addresses."""

    def __init__(self, policy: Policy, adapters: How, compiled: bool) -> None:
        base = base_of(policy)
        together = [] if compiled else groups(base)
        self.weights, self.projections = weights_of(policy), Projections(policy, together, adapters)
        self.forward: Forward = LayerStep(base, self.projections) if together else ModelStep(base)
        self.layers = CompiledLayers(base if compiled else None)
        self._loop: DecodeLoop | None = None

    def loop(self, policy: Policy, request: Request, chunk: Chunk) -> DecodeLoop:
        """Decoding loop with room for these rows: the present one where it fits, else a new one."""
        longest = max(len(ids) for ids in request.prompt_ids)
        room = -(-longest // ROOM) * ROOM
        size = Size(chunk.count, chunk.count * request.group_size, room, request.sampling.max_completion_length)
        if self._loop is None or not self._loop.cache.size.holds(size):
            self._loop = None
            self._loop = DecodeLoop(policy.device, self.forward, StaticCache(size, chunk.cache, request.group_size))
        self._loop.set(Settings.of(request), policy.stop_token_ids)
        return self._loop


def base_of(policy: Policy) -> Any:
    """The transformers model, with the adapters in its layers."""
    return policy.model.get_base_model() if isinstance(policy.model, PeftModel) else policy.model


def weights_of(policy: Policy) -> tuple[int, ...]:
    """Addresses of the weights, from which a captured graph reads them."""
    return (id(policy), *(parameter.data_ptr() for parameter in policy.model.parameters()))


def bucket(alive: int, rows: int) -> int:
    """Number of rows to continue with: `rows` while more than half are alive, else the next power of two."""
    smaller = max(SMALLEST, 1 << (alive - 1).bit_length())
    return smaller if smaller <= rows // 2 else rows


@contextlib.contextmanager
def decoding(policy: Policy) -> Iterator[None]:
    """The model attends with our function inside the block, with its own after it."""
    config = base_of(policy).config.get_text_config()
    before = config._attn_implementation
    try:
        config._attn_implementation = NAME
        yield
    finally:
        config._attn_implementation = before


def _prefill(policy: Policy, step: Forward, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Any]:
    """Scores of each prompt's next token, and a cache of the prompts padded on the left."""
    if isinstance(step, LayerStep) and all(map(len, prompts)) and (done := step.prefill(prompts)):
        return done
    batch = policy.collate(prompts, [[]] * len(prompts))
    return forward(policy, batch.input_ids, batch.attention_mask, position_ids(batch.attention_mask), None)


def _front(cache: Any, count: int) -> Any:
    """The cache cut to its first prompts."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:count], layer.values[:count]
    return cache


def _harvest(
    policy: Policy, loop: DecodeLoop, drawn: Drawn, request: Request, numbers: list[int], taken: int
) -> list[int]:
    """End the rows that have finished, whose number becomes -1; returns the places of the others."""
    cap, stops = request.sampling.max_completion_length, set(policy.stop_token_ids)
    done = loop.finished() if taken < cap else [True] * len(numbers)
    ended = [place for place, number in enumerate(numbers) if number >= 0 and done[place]]
    going = [place for place, number in enumerate(numbers) if number >= 0 and not done[place]]
    if (bad := loop.not_finite(taken, [*ended, *going])) is not None:
        raise ModelError(not_finite(policy, bad))
    for place, ids, logprobs in loop.read(ended, taken):
        length = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
        drawn.ids[numbers[place]], drawn.logprobs[numbers[place]] = ids[:length], logprobs[:length]
    drawn.end([numbers[place] for place in ended])
    for place in ended:
        numbers[place] = -1
    return going
