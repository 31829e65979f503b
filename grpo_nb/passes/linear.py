"""Linear layers of one input with their LoRA adapters, forward and backward, in the type of the base weights.

peft casts a layer's input to the adapter's float32 and keeps the copy for the backward pass. Here each pass casts the
adapters once, all in one launch, and gradients go back to the float32 masters. Base weights are read where they lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from grpo_nb.rollout.projections import base_layer, ends_of, factors


@dataclass(frozen=True)
class Part:
    """One layer of a joint: its frozen weights, and its adapter's factors in the type of these, if it has one."""

    columns: slice
    """Its columns in the outputs of all layers."""
    weight: Float[Tensor, "outputs inputs"]
    weight_t: Float[Tensor, "inputs outputs"]
    bias: Tensor | None
    ranks: slice
    """Its ranks among those of all adapters."""
    up: Float[Tensor, "outputs rank"] | None
    up_t: Float[Tensor, "rank outputs"] | None
    scale: float


@dataclass(frozen=True)
class Joint:
    """[W1; W2; ...] x + [s1 B1 A1; s2 B2 A2; ...] x"""

    parts: tuple[Part, ...]
    width: int
    down: Float[Tensor, "ranks inputs"] | None
    """All of A; None without any adapter."""

    def __call__(self, x: Float[Tensor, "token inputs"]) -> tuple[Float[Tensor, "token outputs"], Tensor | None]:
        """The outputs, and A x for the backward pass."""
        out = x.new_empty(x.shape[0], self.width)
        low = None if self.down is None else x @ self.down.T
        for part in self.parts:
            place = out[:, part.columns] if len(self.parts) > 1 else out
            if part.bias is None:
                torch.mm(x, part.weight_t, out=place)
            else:
                torch.addmm(part.bias, x, part.weight_t, out=place)
            if part.up_t is not None and low is not None:
                own = low[:, part.ranks] if len(self.parts) > 1 else low
                place.addmm_(own, part.up_t, alpha=part.scale)
        return out, low

    def grad(
        self, grad: Float[Tensor, "token outputs"], low: Tensor | None, wants_input: bool = True
    ) -> tuple[Float[Tensor, "token inputs"] | None, Tensor | None]:
        """The gradients of x and of A x; the first where it is wanted."""
        low_grad = None if low is None else torch.empty_like(low)
        x_grad: Tensor | None = None
        for part in self.parts:
            own = grad[:, part.columns] if len(self.parts) > 1 else grad
            if part.up is not None and low_grad is not None:
                place = low_grad[:, part.ranks]
                torch.addmm(place, own, part.up, beta=0, alpha=part.scale, out=place)
            if wants_input:
                x_grad = own @ part.weight if x_grad is None else x_grad.addmm_(own, part.weight)
        if x_grad is not None and low_grad is not None and self.down is not None:
            x_grad.addmm_(low_grad, self.down)
        return x_grad, low_grad

    def master_grads(self, x: Tensor, low: Tensor | None, grad: Tensor, low_grad: Tensor | None) -> list[Tensor]:
        """The gradients of A and of scale x B of each adapter in turn, in float32."""
        if low is None or low_grad is None:
            return []
        found: list[Tensor] = []
        down = _wide_mm(low_grad.T, x)
        for part in self.parts:
            if part.up is not None:
                found += [down[part.ranks], _wide_mm(grad[:, part.columns].T, low[:, part.ranks])]
        return found


class Adapters:
    """One adapter of some layers, with room for its factors in the type of the layers' weights.

    Raises:
        Unserved: an adapted layer has none of this name, or one with a bias.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Module]], name: str) -> None:
        found: list[list[Any]] = [[_adapter(layer, name) for layer in group] for group in groups]
        self.masters: list[Tensor] = [x for group in found for adapter in group if adapter for x in adapter[:2]]
        """A and B of each adapted layer in turn."""
        self._places: list[Tensor] = []
        with torch.no_grad():
            self.joints = [self._joint(group, own) for group, own in zip(groups, found, strict=True)]
        self.scales = [adapter[2] for group in found for adapter in group if adapter]
        self._sources = [adapter[n] for group in found for n in (0, 1) for adapter in group if adapter]

    def scaled(self, grads: list[Tensor]) -> list[Tensor]:
        """The gradients of the masters, given those of A and of scale x B."""
        if grads:
            torch._foreach_mul_(grads[1::2], self.scales)
        return grads

    def cast(self) -> None:
        """Take the present factors."""
        if self._places:
            with torch.no_grad():
                torch._foreach_copy_(self._places, self._sources)

    def _joint(self, group: Sequence[Any], adapters: Sequence[Any]) -> Joint:
        bases = [base_layer(layer) for layer in group]
        ranks = [len(adapter[0]) if adapter else 0 for adapter in adapters]
        ups: list[Tensor | None] = [None] * len(bases)
        down = None
        if sum(ranks):
            like = bases[0].weight
            down = like.new_empty(sum(ranks), like.shape[1])
            ups = [like.new_empty(adapter[1].shape) if adapter else None for adapter in adapters]
            self._places += [down[rows] for rows, n in zip(_slices(ranks), ranks, strict=True) if n]
            self._places += [up for up in ups if up is not None]
        widths = [len(base.weight) for base in bases]
        rows = zip(_slices(widths), bases, _slices(ranks), ups, adapters, strict=True)
        parts = tuple(
            _part(base, columns, rank, up, adapter[2] if adapter else 1.0) for columns, base, rank, up, adapter in rows
        )
        return Joint(parts, sum(widths), down)


def _part(base: Any, columns: slice, ranks: slice, up: Tensor | None, scale: float) -> Part:
    weight = base.weight.detach()
    return Part(columns, weight, weight.T, base.bias, ranks, up, None if up is None else up.T, scale)


def _adapter(layer: Any, name: str) -> tuple[Tensor, Tensor, float] | None:
    return factors(layer, name) if hasattr(layer, "lora_A") else None


def _wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32, as it was summed."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def _slices(sizes: Sequence[int]) -> list[slice]:
    return [slice(end - size, end) for size, end in zip(sizes, ends_of(sizes), strict=True)]
