"""The forward pass of one new token per row: a model's own, or for Llama-like models one with fewer and larger
operations.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import Cache, DynamicCache

from grpo_nb.policy.shapes import KIN
from grpo_nb.rollout import layer_ops
from grpo_nb.rollout.decode_attention import Options, run
from grpo_nb.rollout.projections import Projections
from grpo_nb.rollout.static_cache import Passing, StaticCache

ROTARY = {"default", "linear", "llama3", "yarn"}
"""Rotary positions whose frequencies do not depend on the length of a text."""


class ModelStep:
    """Transformers' own forward pass, with our attention in it."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def __call__(
        self, tokens: Int[Tensor, "row one"], positions: Int[Tensor, "row one"], cache: StaticCache
    ) -> Float[Tensor, "row vocab"]:
        # Some models warn without a mask, after a look at the ids that no graph can hold.
        output = self.base(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            position_ids=positions,
            cache=Passing(),
            use_cache=True,
            logits_to_keep=1,
            grpo_cache=cache,
        )
        logits: Tensor = output.logits[:, -1]
        return logits


class LayerStep:
    """Decoding step of Llama-like models: joint projections of one input, and one kernel between two of them."""

    def __init__(self, base: Any, projections: Projections) -> None:
        self.base, self.of = base, projections.of

    def __call__(
        self, tokens: Int[Tensor, "row one"], positions: Int[Tensor, "row one"], cache: StaticCache
    ) -> Float[Tensor, "row vocab"]:
        def attend(attention: Any, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options = Options(attention.scaling, window_of(attention))
            layer = cache.layers[i].first(len(tokens))
            return run(q[:, :, None], k[:, :, None], v[:, :, None], layer, cache, options)

        return self.base.lm_head(self._layers(tokens, positions, attend))  # type: ignore[no-any-return]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Float[Tensor, "prompt vocab"], Cache] | None:
        """Scores of each prompt's next token, and a cache of the prompts padded on the left; None if it cannot.

        Padding follows the prompts, where a causal mask alone hides it.
        """
        lengths, device = [len(ids) for ids in prompts], self.base.lm_head.weight.device
        count, width = len(prompts), max(lengths)
        windows = [window_of(layer.self_attn) for layer in self.base.model.layers]
        if any(window is not None and window < width for window in windows):
            return None
        tokens = torch.tensor([[*ids, *[ids[-1]] * (width - len(ids))] for ids in prompts], device=device)
        place = torch.arange(width, device=device)
        ends = torch.tensor(lengths, device=device)
        shifted = (place - (width - ends)[:, None]).clamp(min=0)[:, None, :, None]
        cache = DynamicCache()

        def attend(attention: Any, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(count, width, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
            cache.update(k.take_along_dim(shifted, 2), v.take_along_dim(shifted, 2), i)
            grouped = q.shape[1] != k.shape[1]
            seen = sdpa(q, k, v, is_causal=True, scale=attention.scaling, enable_gqa=grouped)
            return seen.transpose(1, 2).reshape(count * width, -1)

        last = self._layers(tokens, place.expand(count, -1), attend).view(count, width, -1)[range(count), ends - 1]
        return self.base.lm_head(last), cache

    def _layers(
        self, tokens: Int[Tensor, "row token"], positions: Int[Tensor, "row token"], attend: Callable[..., Tensor]
    ) -> Float[Tensor, "row_token width"]:
        """The normed outputs of the last layer, token after token."""
        model = self.base.model
        residual: Tensor = model.embed_tokens(tokens)
        cos, sin = (x.expand(len(tokens), -1, -1).flatten(0, 1) for x in model.rotary_emb(residual, positions))
        residual, y = residual.flatten(0, 1), None
        for i, layer in enumerate(model.layers):
            norm = layer.input_layernorm
            x, residual = layer_ops.add_norm(y, residual, norm.weight, norm.variance_epsilon)
            q, k, v = self._heads(layer.self_attn, x, (cos, sin))
            y = self.of[id(layer.self_attn.o_proj)](attend(layer.self_attn, i, q, k, v).flatten(1))
            norm = layer.post_attention_layernorm
            x, residual = layer_ops.add_norm(y, residual, norm.weight, norm.variance_epsilon)
            y = self.of[id(layer.mlp.down_proj)](layer_ops.gate(self.of[id(layer.mlp.gate_proj)](x)))
        return layer_ops.add_norm(y, residual, model.norm.weight, model.norm.variance_epsilon)[0]

    def _heads(self, attention: Any, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [row, head, d]."""
        projection, d = self.of[id(attention.q_proj)], attention.head_dim
        qkv = projection(x)
        queries, keys = projection.ends[0] // d, (projection.ends[1] - projection.ends[0]) // d
        norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
        eps = attention.q_norm.variance_epsilon if norms else 0.0
        q, k = layer_ops.rotate(qkv, (queries, keys, d), norms, eps, *turn)
        return q, k, qkv[:, (queries + keys) * d :].view(len(x), keys, d)


def window_of(attention: Any) -> int | None:
    own: int | None = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return own


def groups(base: Any) -> Sequence[Sequence[nn.Module]]:
    """The projections of each layer by their input; none where the model is not Llama-like."""
    if type(base).__name__ not in KIN or not type(base).__module__.startswith("transformers.models."):
        return []
    rotary = base.model.rotary_emb
    if base.config.hidden_act != "silu" or getattr(rotary, "rope_type", None) not in ROTARY:
        return []
    found: list[Sequence[nn.Module]] = []
    for layer in base.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found += [(attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,)]
        found += [(mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)]
    return found
