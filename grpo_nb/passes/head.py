"""Log-probs and entropies from the last layer's sums, without scores of all tokens and words at once.

A log-prob's gradient by the last layer's output is known as soon as the log-prob is; what comes later only scales it.
So a piece of the scores lives from its product with the output matrix to the product with its gradient, both in the
forward pass, and nothing is computed twice.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_nb.passes import ops
from grpo_nb.passes.flat import FlatBatch
from grpo_nb.passes.layer import Norm, Sums
from grpo_nb.rollout import layer_ops

PIECE = 2**28
"""Bytes of scores at a time."""
LEAST = 128
"""Targets at a time, at least; more come in multiples of it."""


@dataclass(frozen=True)
class Scored:
    """Numbers of each target, in float32, and their gradients by the sums that they come from."""

    logprobs: Float[Tensor, "target"]
    entropies: Float[Tensor, "target"]
    pulls: list[Float[Tensor, "target width"]]
    """The gradients of the log-prob and of the entropy, as far as requested."""


@dataclass(frozen=True)
class Head:
    """The last norm and the output matrix, both frozen."""

    norm: Norm
    weight: Float[Tensor, "vocab width"]
    bias: Float[Tensor, "vocab"] | None

    def forward(self, sums: Sums, batch: FlatBatch, temperature: float, pulls: int) -> Scored:
        """The targets' numbers, with `pulls` of the gradients."""
        size = max(LEAST, PIECE // (self.weight.shape[0] * self.weight.element_size()) // LEAST * LEAST)
        parts = [self._piece(sums, batch, part, temperature, pulls) for part in pieces(len(batch.places), size)]
        logprobs, entropies, *found = (torch.cat(column) for column in zip(*parts, strict=True))
        return Scored(logprobs, entropies, found)

    def backward(
        self, pulls: list[Tensor], grads: tuple[Tensor, ...], batch: FlatBatch
    ) -> Float[Tensor, "token width"]:
        """The gradient of both sums."""
        first, *_ = pulls
        total = sum(grad[:, None] * pull for grad, pull in zip(grads, pulls, strict=False))
        assert isinstance(total, Tensor)
        # the completions of a shared prompt begin at one place: index_put adds in a fixed order
        empty = first.new_zeros(len(batch.input_ids), first.shape[1])
        return empty.index_put_((batch.places,), total.to(first.dtype), accumulate=True)

    def _piece(self, sums: Sums, batch: FlatBatch, part: slice, temperature: float, pulls: int) -> tuple[Tensor, ...]:
        places, norm = batch.places[part], self.norm
        h, total = layer_ops.add_norm(sums[1][places], sums[0][places], norm.weight, norm.eps)
        scores = h @ self.weight.T if self.bias is None else torch.addmm(self.bias, h, self.weight.T)
        logprob, entropy, by_scores = ops.head_scores(scores, batch.targets[part], temperature, pulls)
        found = [ops.norm_grad(by @ self.weight, total, norm.weight, norm.eps, None)[0] for by in by_scores]
        return logprob, entropy, *found


def pieces(count: int, size: int) -> list[slice]:
    """Consecutive pieces of at most `size`, as equal as can be."""
    each = -(-count // -(-count // size))
    return [slice(i, min(i + each, count)) for i in range(0, count, each)]
