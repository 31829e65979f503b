"""Compiles the kernels of a first step, several at a time, before it.

Triton compiles a kernel where it is first launched, one after the other, and a C compiler builds the launcher of each:
12 of the 20 seconds of a first step on a fresh machine. Most of that is the work of compilers that hold no lock.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from grpo_nb.config import Config
from grpo_nb.passes import ops
from grpo_nb.passes.model import unserved
from grpo_nb.policy.model import Policy
from grpo_nb.printable import clean_logger
from grpo_nb.rollout import decode_attention, layer_ops, sampling
from grpo_nb.rollout.decode_step import groups, window_of
from grpo_nb.rollout.graph import base_of
from grpo_nb.rollout.static_cache import Size, StaticCache

logger = clean_logger(__name__)

AT_ONCE = 8
"""Kernels that are compiled at a time, at most."""
ROOM = 64
"""Tokens of a prompt that the launches are for; longer ones take the same kernels."""


def compile_kernels(policy: Policy, config: Config, devices: tuple[str, ...] = ("cuda",)) -> int:
    """Launch each kernel of rollouts and passes once, on a few zeros of the policy's widths; returns the launches.

    It is 0 where no kernel of ours serves the policy. The error of a kernel that fails here is left to its first use.
    """
    if policy.sharding is not None:
        return 0
    base: Any = base_of(policy)
    if policy.device.type not in devices or policy.dtype not in (torch.bfloat16, torch.float16) or not groups(base):
        return 0
    shapes = Shapes(base, config)
    launches = shapes.of_rollouts() + (shapes.of_passes() if unserved(policy, devices) is None else [])

    def launch(kernel: Callable[[], Any]) -> None:
        if policy.device.type == "cuda":
            torch.cuda.set_device(policy.device)
        try:
            kernel()
        except Exception as error:
            logger.info("a kernel could not be compiled ahead: %s: %s", type(error).__name__, error)

    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        list(pool.map(launch, launches))
    return len(launches)


class Shapes:
    """Arguments of every launch: the policy's own widths, and two rows."""

    def __init__(self, base: Any, config: Config) -> None:
        layer = base.model.layers[0]
        self.attention, self.group_size = layer.self_attn, config.batch.group_size
        self.tokens = config.sampling.max_completion_length
        self.like: Tensor = layer.input_layernorm.weight
        self.width, self.vocabulary = base.config.hidden_size, base.config.vocab_size
        self.between, self.d = int(base.config.intermediate_size), int(self.attention.head_dim)
        self.heads = int(base.config.num_attention_heads), int(base.config.num_key_value_heads), self.d
        normed = hasattr(self.attention, "q_norm")
        self.norms = (self.attention.q_norm.weight, self.attention.k_norm.weight) if normed else None
        self.eps = layer.input_layernorm.variance_epsilon
        self.head_eps = self.attention.q_norm.variance_epsilon if normed else 0.0

    def of_rollouts(self) -> list[Callable[[], Any]]:
        """Kernels that sample; the slowest to compile come first."""
        x, qkv, turn = self.zeros(2, self.width), self.zeros(2, self._qkv), self._turn()
        scores, step = self.zeros(2, self.vocabulary), self.like.new_zeros(1, dtype=torch.long)
        warmth = self.like.new_ones(1, dtype=torch.float32)
        uniforms = self.like.new_zeros(2, self.tokens, dtype=torch.float64)
        return [
            self._attend,
            lambda: sampling.draw(scores, warmth, uniforms, step),
            lambda: sampling.draw(scores, warmth, None, step),
            lambda: layer_ops.rotate(qkv, self.heads, self.norms, self.head_eps, *turn),
            lambda: layer_ops.low(x, self.zeros(8, self.width)),
            lambda: layer_ops.add_norm(x, x, self.like, self.eps),
            lambda: layer_ops.add_norm(None, x, self.like, self.eps),
            lambda: layer_ops.gate(self.zeros(2, 2 * self.between)),
        ]

    def of_passes(self) -> list[Callable[[], Any]]:
        """Kernels that score and train."""
        x, qkv, turn = self.zeros(2, self.width), self.zeros(2, self._qkv), self._turn()
        queries, keys, d = self.heads
        q, k = self.zeros(2, queries, d), self.zeros(2, keys, d)
        targets = self.like.new_zeros(2, dtype=torch.long)
        masses = [self.like.new_zeros(queries, 2, dtype=torch.float32) for _ in range(2)]

        def head(pulls: int) -> Callable[[], Any]:
            return lambda: ops.head_scores(self.zeros(2, self.vocabulary), targets, 1.0, pulls)

        return [
            lambda: ops.rotate_grad((q, k, k), qkv, self.norms, self.head_eps, turn),
            head(1),
            head(0),
            lambda: ops.rotate(qkv, self.heads, self.norms, self.head_eps, turn),
            lambda: ops.join(q, masses[0], self.zeros(2, queries, d), masses[1]),
            lambda: ops.norm_grad(x, x, self.like, self.eps, x),
            lambda: ops.norm_grad(x, x, self.like, self.eps, None),
            lambda: ops.gate_grad(self.zeros(2, self.between), self.zeros(2, 2 * self.between)),
        ]

    def zeros(self, *shape: int) -> Tensor:
        """Zeros of the weights' type and device."""
        return self.like.new_zeros(shape)

    @property
    def _qkv(self) -> int:
        return (self.heads[0] + 2 * self.heads[1]) * self.d

    def _turn(self) -> tuple[Tensor, Tensor]:
        return self.zeros(2, self.d), self.zeros(2, self.d)

    def _attend(self) -> Tensor:
        queries, keys, d = self.heads
        prompt = DynamicCache()
        prompt.update(self.zeros(1, keys, 1, d), self.zeros(1, keys, 1, d), 0)
        cache = StaticCache(Size(1, self.group_size, ROOM, self.tokens), prompt, self.group_size)
        cache.load(prompt, [1], [0] * self.group_size)
        q, k = self.zeros(self.group_size, queries, 1, d), self.zeros(self.group_size, keys, 1, d)
        v = self.zeros(self.group_size, self._qkv)[:, (queries + keys) * d :].view(self.group_size, keys, 1, d)
        options = decode_attention.Options(self.attention.scaling, window_of(self.attention))
        return decode_attention.run(q, k, v, cache.layers[0], cache, options)
