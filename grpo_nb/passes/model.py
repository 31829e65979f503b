"""The pass of a policy along one line of tokens, forward and backward, and which policies it serves."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from grpo_nb.passes.attention import Heads
from grpo_nb.passes.flat import FlatBatch, Ids, flatten
from grpo_nb.passes.head import Head, Scored
from grpo_nb.passes.layer import Kept, Layer, Line, Norm, Sums
from grpo_nb.passes.linear import Adapters
from grpo_nb.policy.full_memory import full_memory
from grpo_nb.policy.model import Policy
from grpo_nb.policy.packing import window
from grpo_nb.printable import clean_logger
from grpo_nb.rollout.decode_step import groups, window_of
from grpo_nb.rollout.selfcheck import agrees
from grpo_nb.types import TokenStats

logger = clean_logger(__name__)

HALVES = (torch.bfloat16, torch.float16)


def unserved(policy: Policy, devices: tuple[str, ...] = ("cuda",)) -> str | None:
    """Reason why flat passes cannot serve this policy; None where they can."""
    if not isinstance(policy.model, PeftModel):
        return "all of its weights train"
    if policy.device.type not in devices:
        return f"the model is on {policy.device.type}"
    if policy.device.type == "cuda" and policy.dtype not in HALVES:
        return f"its weights are {policy.dtype}"
    base: Any = policy.model.get_base_model()
    grouped = {id(layer) for group in groups(base) for layer in group}
    if not grouped:
        return f"{type(base).__name__} has layers of another form than Llama's"
    adapted: list[Any] = [module for module in base.modules() if isinstance(module, LoraLayer)]
    if any(id(layer) not in grouped for layer in adapted):
        return "adapters are on other layers than those of attention and MLP"
    if any(type(layer) is not LoraLinear or layer.lora_variant or layer.merged for layer in adapted):
        return "its adapters have more than plain factors A and B"
    if any(type(layer.base_layer) is not nn.Linear for layer in adapted):
        return "its weights are quantised"
    within = {id(parameter) for layer in adapted for parameter in layer.parameters()}
    if any(id(parameter) not in within for parameter in policy.parameters_by_name().values()):
        return "more than its adapters trains"
    return None


def serves(policy: Policy) -> bool:
    """Whether flat passes can serve this policy, and give its own log-probs to rounding; the log has the reason if not.

    Costs two short forward passes, once for each policy.
    """
    if policy not in _SERVED:
        _SERVED[policy] = unserved(policy) or _fault(policy)
        if reason := _SERVED[policy]:
            logger.info("passes: the model's own instead of flat ones: %s", reason)
    return _SERVED[policy] is None


_SERVED: WeakKeyDictionary[Policy, str | None] = WeakKeyDictionary()


def _fault(policy: Policy) -> str | None:
    def flat(prompts: list[list[int]], completions: list[list[int]], prompt_of: list[int]) -> Tensor:
        batch = flatten(prompts, completions, prompt_of, shares(policy, prompts, completions, prompt_of))
        return token_stats(policy, batch.to(policy.device)).logprobs[batch.completion_mask]

    try:
        with full_memory():
            return None if agrees(policy, flat) else "its log-probs differ by more than rounding"
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever these layers have that those of Llama have not
        return f"{type(error).__name__}: {error}"


def shares(policy: Policy, prompts: Sequence[Ids], completions: Sequence[Ids], prompt_of: Sequence[int]) -> bool:
    """Whether a prompt stands once in a line: several completions have it, and no layer's window is shorter than a row.

    No cost has to be weighed: attention is computed for visible tokens only.
    """
    longest = max(len(prompts[p]) + len(ids) for p, ids in zip(prompt_of, completions, strict=True))
    return len(set(prompt_of)) < len(prompt_of) and longest <= (window(policy.text_config) or longest)


def token_stats(
    policy: Policy,
    batch: FlatBatch,
    temperature: float = 1.0,
    entropy_learns: bool = False,
    adapter: str | None = None,
) -> TokenStats:
    """Token statistics of a flat batch, equal to those of `policy.logprobs.token_stats` to rounding.

    With the adapter of this name, or the active one. Gradients flow where they are enabled, once, into its
    factors; through the entropy only where `entropy_learns`.
    """
    known = _PASSES.get(policy)
    if known is None or known.moved():
        known = _PASSES[policy] = FlatPass(policy)
    values = known(batch, temperature, entropy_learns, adapter)
    mask = batch.completion_mask
    tables = (v.new_zeros(mask.numel()).index_copy(0, batch.cells, v).view(mask.shape) for v in values)
    return TokenStats(*tables)


class FlatPass:
    """A policy's layers, found once; `FlatPass(policy)(batch, ...)` -> log-prob and entropy of each target."""

    def __init__(self, policy: Policy) -> None:
        wrapped: Any = policy.model
        base: Any = wrapped.get_base_model()
        self.wrapped, self.base, norm, out = wrapped, base, base.model.norm, base.lm_head
        self.head = Head(Norm(norm.weight, norm.variance_epsilon), out.weight, out.bias)
        self._place = out.weight.data_ptr()
        self._acting: dict[str, tuple[Adapters, list[Layer]]] = {}
        """Cast adapters and their layers, by adapter."""

    def moved(self) -> bool:
        """Whether the model's weights have moved to another device or type."""
        return bool(self.base.lm_head.weight.data_ptr() != self._place)

    def __call__(
        self, batch: FlatBatch, temperature: float, entropy_learns: bool, adapter: str | None = None
    ) -> tuple[Tensor, Tensor]:
        adapters, layers = self._of(adapter or self.wrapped.active_adapters[0])
        adapters.cast()
        with torch.no_grad():
            x = self.base.model.embed_tokens(batch.input_ids)
            turn = self.base.model.rotary_emb(x[None], batch.position_ids[None])
            line = Line(batch.tree, (turn[0][0].contiguous(), turn[1][0].contiguous()))
        if torch.is_grad_enabled() and any(master.requires_grad for master in adapters.masters):
            light = bool(getattr(self.base.model.layers[0], "gradient_checkpointing", False))
            run = Run(layers, self.head, line, batch, light)
            logprobs, entropies = PassFunction.apply(  # type: ignore[no-untyped-call]
                run, adapters, (x, temperature, 1 + entropy_learns), *adapters.masters
            )
            return logprobs, entropies if entropy_learns else entropies.detach()
        with torch.no_grad():
            sums: Sums = (x, None)  # type: ignore[assignment]
            for layer in layers:
                sums, _ = layer.forward(*sums, line)
            scored = self.head.forward(sums, batch, temperature, 0)
        return scored.logprobs, scored.entropies

    def _of(self, name: str) -> tuple[Adapters, list[Layer]]:
        if name not in self._acting:
            adapters = Adapters(groups(self.base), name)
            parts = zip(self.base.model.layers, range(0, len(adapters.joints), 4), strict=True)
            self._acting[name] = adapters, [_layer(part, adapters.joints[i : i + 4]) for part, i in parts]
        return self._acting[name]


_PASSES: WeakKeyDictionary[Policy, FlatPass] = WeakKeyDictionary()


class Run:
    """One pass with gradients: the tensors kept from the forward to the backward pass, which frees them."""

    def __init__(self, layers: list[Layer], head: Head, line: Line, batch: FlatBatch, light: bool) -> None:
        self.layers, self.head, self.line, self.batch, self.light = layers, head, line, batch, light
        self.kept: list[Kept | Tensor] = []
        self.pulls: list[Tensor] | None = None

    def forward(self, x: Tensor, temperature: float, pulls: int) -> Scored:
        """Log-probs and entropies."""
        y: Tensor | None = None
        for layer in self.layers:
            sums, kept = layer.forward(x, y, self.line)
            self.kept.append(kept.before if self.light else kept)
            del kept
            x, y = sums
        scored = self.head.forward(sums, self.batch, temperature, pulls)
        self.pulls = scored.pulls
        return scored

    def backward(self, grads: tuple[Tensor, ...]) -> list[Tensor]:
        """The gradients of the masters in turn; a layer's memory is free as soon as it is done."""
        if self.pulls is None:
            raise RuntimeError("a second backward pass through one forward pass; make another forward pass")
        grad: Tensor | None = self.head.backward(self.pulls, grads, self.batch)
        self.pulls = None
        found: list[list[Tensor]] = []
        for i in reversed(range(len(self.layers))):
            layer, kept = self.layers[i], self.kept.pop()
            if isinstance(kept, Tensor):
                _, kept = layer.forward(kept, None, self.line)
            assert grad is not None
            grad, own = layer.backward(kept, (grad, grad), self.line, first=i == 0)
            found.append(own)
        return [gradient for own in reversed(found) for gradient in own]


class PassFunction(torch.autograd.Function):
    """A `Run` as one node of autograd's graph, whose inputs are the adapter's factors."""

    @staticmethod
    def forward(ctx: Any, run: Run, adapters: Adapters, forward: tuple[Any, ...], *masters: Tensor) -> Any:
        ctx.run, ctx.adapters, ctx.types = run, adapters, [master.dtype for master in masters]
        scored = run.forward(*forward)
        return scored.logprobs, scored.entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.adapters.scaled(ctx.run.backward(grads))
        wanted = zip(found, ctx.types, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(grad.to(dtype) if wants else None for grad, dtype, wants in wanted)


def _layer(part: Any, joints: list[Any]) -> Layer:
    attention, of_qkv = part.self_attn, joints[0]
    before, after = part.input_layernorm, part.post_attention_layernorm
    normed, d = hasattr(attention, "q_norm"), attention.head_dim
    return Layer(
        norms=(Norm(before.weight, before.variance_epsilon), Norm(after.weight, after.variance_epsilon)),
        head_norms=(attention.q_norm.weight, attention.k_norm.weight) if normed else None,
        head_eps=attention.q_norm.variance_epsilon if normed else 0.0,
        shape=(len(of_qkv.parts[0].weight) // d, len(of_qkv.parts[1].weight) // d, d),
        heads=Heads(attention.scaling, window_of(attention)),
        joints=(joints[0], joints[1], joints[2], joints[3]),
    )
