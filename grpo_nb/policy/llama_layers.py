"""Forward pass of small Llama-like models with few and large operations, for training and decoding on the CPU.

A model of a million parameters spends most of its time between the matrix products: peft's four operations a linear
layer, norms of six, rotary positions of ten, and their backward passes. Here the adapters are added to copies of the
weights, once a pass and with their gradient, a norm's weight is multiplied into the matrix after it, the projections
of one input are one product, and the rest are a few functions with a backward pass of their own. The model's weights
are read only. Of the last layer, only tokens that something is predicted from are computed beyond keys and values.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

KIN = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Models of transformers whose layers are: norm, attention with rotary positions, norm, gated silu MLP."""
ROTARY = {"default", "linear", "llama3", "yarn"}
"""Rotary positions whose frequencies do not depend on the length of a text."""
SMALL = 20_000_000
"""Parameters below which matrix products are so short that the operations between them dominate. Here an adapter's
gradient goes through that of the full weight, half as much work again in the products, which would slow a larger model.
"""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys, values), each [token, head, d] -> [token, heads * d]"""


@dataclass(frozen=True)
class LayerWeights:
    """One layer's matrices as they multiply, the weight of the norm before each included."""

    qkv: Float[Tensor, "out width"]
    bias: Float[Tensor, "out"] | None
    """Bias of queries, keys and values."""
    norms: tuple[Tensor, Tensor] | None
    """Norm weights of each head's queries and keys."""
    out: Float[Tensor, "width heads_d"]
    gate_up: Float[Tensor, "double width"]
    down: Float[Tensor, "width inner"]


class LlamaLayers:
    """The model's present weights, ready to multiply; with gradients to what trains where they are enabled.

    `adapter` is added to them in place of the active one.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, adapter: str | None = None) -> None:
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        config = base.config
        attention = base.model.layers[0].self_attn
        self.base, self.adapter = base, adapter
        self.d, self.scale = int(attention.head_dim), float(attention.scaling)
        self.heads, self.kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.eps = float(base.model.norm.variance_epsilon)
        self.layers = [self._layer(layer) for layer in base.model.layers]
        self.head = self._weight(base.lm_head) * base.model.norm.weight

    def embed(self, ids: Int[Tensor, "..."]) -> Tensor:
        """[token, width]"""
        embedded: Tensor = self.base.model.embed_tokens(ids.flatten())
        return embedded

    def turns(self, positions: Int[Tensor, "..."]) -> Tensor:
        """Rotary factors of queries and keys at these positions: complex, [token, 1, d / 2]."""
        cos, sin = self.base.model.rotary_emb(self.head, positions.reshape(1, -1))
        half = self.d // 2
        return torch.complex(cos[0, :, :half], sin[0, :, :half])[:, None]

    def __call__(
        self,
        ids: Int[Tensor, "..."],
        turns: Tensor,
        attend: Attend,
        predicts: Int[Tensor, "some"] | None = None,
    ) -> Float[Tensor, "some vocab"]:
        """Logits after the tokens `predicts`, by their place in `ids`; None: after all."""
        h = self.embed(ids)
        last = len(self.layers) - 1
        for i, weights in enumerate(self.layers):
            x = norm(h, self.eps)
            if i == last and predicts is not None:
                h = h.index_select(0, predicts)
                q, k, v = self._apart(weights, x, x.index_select(0, predicts), turns, predicts)
            else:
                q, k, v = self._together(weights, x, turns)
            h = torch.addmm(h, attend(i, q, k, v), weights.out.T)
            h = torch.addmm(h, gate(linear(norm(h, self.eps), weights.gate_up)), weights.down.T)
        return linear(norm(h, self.eps), self.head)

    def _together(self, w: LayerWeights, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv = self.heads, self.kv_heads
        qk, v = linear(x, w.qkv, w.bias).view(len(x), -1, self.d).split((heads + kv, kv), 1)
        if w.norms is None:
            q, k = turned(qk, turns).split((heads, kv), 1)
        else:
            q, k = qk.split((heads, kv), 1)
            q, k = (turned(norm(t, self.eps) * n, turns) for t, n in zip((q, k), w.norms, strict=True))
        return q, k, v

    def _apart(
        self, w: LayerWeights, x: Tensor, some: Tensor, turns: Tensor, predicts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of some tokens, keys and values of all."""
        wide = self.heads * self.d
        qb, kvb = (None, None) if w.bias is None else (w.bias[:wide], w.bias[wide:])
        q = linear(some, w.qkv[:wide], qb).view(len(some), -1, self.d)
        k, v = linear(x, w.qkv[wide:], kvb).view(len(x), -1, self.d).chunk(2, 1)
        if w.norms is not None:
            q, k = (norm(t, self.eps) * n for t, n in zip((q, k), w.norms, strict=True))
        return turned(q, turns.index_select(0, predicts)), turned(k, turns), v

    def _layer(self, layer: Any) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = map(self._weight, projections)
        biases = [_base(p).bias for p in projections]
        bias = None
        if biases[0] is not None:
            bias = torch.cat([self._paired(biases[0]), self._paired(biases[1]), biases[2]])
        norms = None
        if hasattr(attention, "q_norm"):
            norms = self._paired(attention.q_norm.weight), self._paired(attention.k_norm.weight)
        first, second = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        return LayerWeights(
            qkv=torch.cat([self._paired(q), self._paired(k), v]) * first,
            bias=bias,
            norms=norms,
            out=self._weight(attention.o_proj),
            gate_up=torch.cat([self._weight(mlp.gate_proj), self._weight(mlp.up_proj)]) * second,
            down=self._weight(mlp.down_proj),
        )

    def _weight(self, layer: Any) -> Tensor:
        return weight_of(layer, self.adapter)

    def _paired(self, weight: Tensor) -> Tensor:
        """Rows of each head reordered, so that what a position turns together lies together.

        Scores do not change, as queries and keys are reordered alike.
        """
        split = weight.view(-1, 2, self.d // 2, *weight.shape[1:])
        return split.transpose(1, 2).reshape(weight.shape)


def weight_of(layer: Any, adapter: str | None = None) -> Tensor:
    """A linear layer's weight with the product of an adapter added, by default of the active one."""
    if not isinstance(layer, LoraLinear):
        weight: Tensor = layer.weight
        return weight
    (name,) = (name for name in ([adapter] if adapter else layer.active_adapters) if name in layer.lora_A)
    up, down, base = layer.lora_B[name].weight, layer.lora_A[name].weight, layer.base_layer.weight
    assert isinstance(up, Tensor) and isinstance(down, Tensor) and isinstance(base, Tensor)
    return torch.addmm(base, up, down, alpha=layer.scaling[name])


def unserved(model: PreTrainedModel | PeftModel) -> str | None:
    """Reason why this pass cannot replace the model's own; None where it can."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if base.device.type != "cpu" or base.dtype != torch.float32:
        return f"it is in {base.dtype} on {base.device.type}"
    if type(base).__name__ not in KIN or not type(base).__module__.startswith("transformers.models."):
        return f"{type(base).__name__} is no kin of Llama"
    rotary, config = base.model.rotary_emb, base.config
    if config.hidden_act != "silu" or getattr(rotary, "rope_type", None) not in ROTARY:
        return "its activation or its rotary positions are others"
    if sum(p.numel() for p in base.parameters()) >= SMALL:
        return f"it has {SMALL:,} parameters or more"
    if getattr(config, "sliding_window", None) or base.is_activation_checkpointing:
        return "it has a sliding window, or recomputes activations"
    if type(base.model.embed_tokens) is not nn.Embedding or not all(map(_served, _linears(base))):
        return "its linear layers are others, have a bias, or have other adapters than plain LoRA"
    return None


def _linears(base: Any) -> Iterator[tuple[Any, ...]]:
    """Linear layers: queries, keys and values together, each other layer by itself."""
    yield (base.lm_head,)
    for layer in base.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield attention.q_proj, attention.k_proj, attention.v_proj
        yield from ((attention.o_proj,), (mlp.gate_proj,), (mlp.up_proj,), (mlp.down_proj,))


def _served(layers: tuple[Any, ...]) -> bool:
    biases = {_base(layer).bias is not None for layer in layers} if all(map(_plain, layers)) else set()
    return biases == {False} or (len(layers) > 1 and biases == {True})


def _plain(module: Any) -> bool:
    if isinstance(module, LoraLinear):
        active = [name for name in module.active_adapters if name in module.lora_A]
        lora = type(module) is LoraLinear and len(active) == 1 and not module.merged and not module.lora_variant
        lora = lora and not module.disable_adapters and module.lora_B[active[0]].bias is None
        return lora and type(module.base_layer) is nn.Linear
    return type(module) is nn.Linear


def _base(layer: Any) -> Any:
    return layer.base_layer if isinstance(layer, LoraLinear) else layer


def norm(x: Float[Tensor, "... width"], eps: float) -> Float[Tensor, "... width"]:
    """x / sqrt(mean(x^2) + eps)"""
    if not torch.is_grad_enabled():
        return torch.mul(x, _inverse(x, eps))
    return cast(Tensor, _Norm.apply(x, eps))  # type: ignore[no-untyped-call]


def _inverse(x: Tensor, eps: float) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def turned(x: Float[Tensor, "token head d"], turns: Tensor) -> Float[Tensor, "token head d"]:
    """Neighbouring numbers as a complex one, times exp(i position frequency)."""
    if not torch.is_grad_enabled():
        return _times(x, turns)
    return cast(Tensor, _Turn.apply(x, turns))  # type: ignore[no-untyped-call]


def gate(x: Float[Tensor, "token double"]) -> Float[Tensor, "token inner"]:
    """silu(first half) * second half"""
    if not torch.is_grad_enabled():
        first, second = x.chunk(2, -1)
        return silu(first).mul_(second)
    return cast(Tensor, _Gate.apply(x))  # type: ignore[no-untyped-call]


class _Norm(torch.autograd.Function):
    """dx = (g - y mean(g y)) / rms"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        inverse = _inverse(x, eps)
        y = x * inverse
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        y, inverse = ctx.saved_tensors
        along = torch.linalg.vecdot(gradient, y).div_(-y.shape[-1]).unsqueeze(-1)
        return torch.addcmul(gradient, y, along).mul_(inverse), None


class _Turn(torch.autograd.Function):
    """The gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: Tensor) -> Tensor:
        ctx.save_for_backward(turns)
        return _times(x, turns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (turns,) = ctx.saved_tensors
        return _times(gradient, turns.conj().resolve_conj()), None


def _times(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)


class _Gate(torch.autograd.Function):
    """Both halves of the gradient in one piece."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        lit = silu(first)
        ctx.save_for_backward(x, lit)
        return lit * second

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, lit = ctx.saved_tensors
        (first, second), whole = x.chunk(2, -1), torch.empty_like(x)
        of_first, of_second = whole.chunk(2, -1)
        torch.mul(gradient, lit, out=of_second)
        torch.ops.aten.silu_backward.grad_input(gradient * second, first, grad_input=of_first)
        return whole
