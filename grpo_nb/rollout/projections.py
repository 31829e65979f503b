"""Linear layers while decoding, their LoRA adapters included.

peft computes an adapter's product in the adapter's own float32, in five operations of each layer and token. Here the
factors are cast to the weights' type once a rollout and the product is added in two; or it is added to copies of the
weights, which then cost nothing. Layers of one input are computed together. The model's weights are read only.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import linear

from grpo_nb.policy.memory_terms import COPIED_AT_MOST
from grpo_nb.policy.model import Policy
from grpo_nb.rollout import layer_ops
from grpo_nb.rollout.static_cache import Unserved

How = Literal["auto", "merged", "fused"]


class Projection:
    """[W1; W2; ...] x for linear layers of one input, with copies of the weights (merged) or without (fused)."""

    def __init__(self, layers: Sequence[Any], merged: bool) -> None:
        self.layers, self.merged = list(layers), merged
        self.bases: list[Any] = [base_layer(layer) for layer in layers]
        self.ends = ends_of([_width(base) for base in self.bases])
        like, width = self.bases[0].weight, self.ends[-1]
        biased = any(base.bias is not None for base in self.bases)
        self.bias = torch.zeros(width, dtype=like.dtype, device=like.device) if biased and len(layers) > 1 else None
        ranks = [_rank(layer) for layer in layers]
        self.ranks, self.rank_ends = ranks, ends_of(ranks)
        if merged:
            self.weight = like.new_empty(width, like.shape[1])
        elif sum(ranks):
            inputs = next(layer for layer in layers if isinstance(layer, LoraLayer)).in_features
            self.down = like.new_empty(sum(ranks), inputs)
            self.up = like.new_zeros(sum(ranks), width)

    def refresh(self) -> None:
        """Take the layers' present weights."""
        for i, (layer, base) in enumerate(zip(self.layers, self.bases, strict=True)):
            columns, rank = self._columns(i), self._rank(i)
            if self.bias is not None and base.bias is not None:
                self.bias[columns] = base.bias
            if self.merged:
                self.weight[columns] = base.weight if not self.ranks[i] else _sum(layer, base)
            elif self.ranks[i]:
                down, up, scale = factors(layer)
                self.down[rank] = down
                self.up[rank, columns] = up.T * scale

    def __call__(self, x: Tensor) -> Tensor:
        """[row, in] -> [row, all outputs]"""
        if self.merged:
            return linear(x, self.weight, self._bias())
        if len(self.bases) == 1:
            out: Tensor = self.bases[0](x)
        else:
            out = x.new_empty(x.shape[0], self.ends[-1])
            for i, base in enumerate(self.bases):
                torch.mm(x, base.weight.T, out=out[:, self._columns(i)])
            if self.bias is not None:
                out += self.bias
        return out.addmm_(layer_ops.low(x, self.down), self.up) if sum(self.ranks) else out

    def alone(self, i: int, x: Tensor) -> Tensor:
        """[..., in] -> [..., out] of one of the layers."""
        base, columns = self.bases[i], self._columns(i)
        if self.merged:
            return linear(x, self.weight[columns], base.bias)
        plain: Tensor = base(x)
        if not self.ranks[i]:
            return plain
        low = linear(x, self.down[self._rank(i)]).reshape(-1, self.ranks[i])
        return torch.addmm(plain.reshape(-1, plain.shape[-1]), low, self.up[self._rank(i), columns]).view(plain.shape)

    def _bias(self) -> Tensor | None:
        own: Tensor | None = self.bases[0].bias if len(self.bases) == 1 else self.bias
        return own

    def _columns(self, i: int) -> slice:
        return slice(self.ends[i] - _width(self.bases[i]), self.ends[i])

    def _rank(self, i: int) -> slice:
        return slice(self.rank_ends[i] - self.ranks[i], self.rank_ends[i])


class Projections:
    """Projections in place of a policy's linear layers: of `groups` together, of other adapted layers alone."""

    def __init__(self, policy: Policy, groups: Sequence[Sequence[nn.Module]], how: How) -> None:
        grouped = {id(layer) for group in groups for layer in group}
        adapted = _adapted(policy)
        every = [*groups, *([layer] for layer in adapted if id(layer) not in grouped)]
        bases = [base_layer(layer) for group in every for layer in group]
        plain = all(type(base) is nn.Linear for base in bases)
        size = sum(base.weight.nbytes for base in bases)
        self.merged = plain and (how == "merged" or (how == "auto" and size <= COPIED_AT_MOST))
        self.all = [Projection(group, self.merged) for group in every]
        self.of = {id(group[0]): projection for group, projection in zip(every, self.all, strict=True)}
        self._adapted = {id(layer) for layer in adapted}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The adapted layers compute with the present weights inside the block, as peft has them after it."""
        swapped = []
        try:
            for projection in self.all:
                projection.refresh()
                for i, layer in enumerate(projection.layers):
                    if id(layer) in self._adapted:
                        swapped.append(layer)
                        vars(layer)["forward"] = _Alone(projection, i)
            yield
        finally:
            for layer in swapped:
                vars(layer).pop("forward", None)


class _Alone:
    def __init__(self, projection: Projection, i: int) -> None:
        self.projection, self.i = projection, i

    def __call__(self, x: Tensor) -> Tensor:
        return self.projection.alone(self.i, x)


def _adapted(policy: Policy) -> list[Any]:
    if not isinstance(policy.model, PeftModel):
        return []
    layers: list[Any] = [module for module in policy.model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        if type(layer) is not LoraLinear or layer.merged or layer.disable_adapters or layer.lora_variant:
            raise Unserved(f"an adapter of type {type(layer).__name__} has more than plain factors A and B")
    return layers


def base_layer(layer: Any) -> Any:
    """The layer without its adapters."""
    return layer.base_layer if isinstance(layer, LoraLayer) else layer


def factors(layer: Any, name: str | None = None) -> tuple[Tensor, Tensor, float]:
    """A, B and the scale of the active adapter, or of the adapter of this name.

    Raises:
        Unserved: not exactly one adapter is active, or it adds a bias.
    """
    names = [one for one in ([name] if name else layer.active_adapters) if one in layer.lora_A]
    if len(names) != 1 or layer.lora_B[names[0]].bias is not None:
        raise Unserved(f"adapters {names} are active on one layer, or one has a bias")
    return layer.lora_A[names[0]].weight, layer.lora_B[names[0]].weight, layer.scaling[names[0]]


def _sum(layer: Any, base: Any) -> Tensor:
    down, up, scale = factors(layer)
    return torch.add(base.weight.float(), (up @ down).float(), alpha=scale)


def _rank(layer: Any) -> int:
    return factors(layer)[0].shape[0] if isinstance(layer, LoraLayer) else 0


def _width(base: Any) -> int:
    return int(base.weight.shape[0 if isinstance(base, nn.Linear) else 1])


def ends_of(sizes: Sequence[int]) -> list[int]:
    """End positions of neighbours with these sizes."""
    return [sum(sizes[: i + 1]) for i in range(len(sizes))]
