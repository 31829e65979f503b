"""Samples a token from scores, on the device that holds them.

The weights exp(score - maximum) are float32 and are added in float64, within blocks of the vocabulary and over blocks.
A token is the first whose cumulative weight exceeds u times the total. `eager.sample_inverse_cdf` does the same with
float64 weights: its boundaries between tokens lie within about 1e-7 of these, so that of ten million samples from equal
scores about one gives another token.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 1024
"""Tokens of the vocabulary whose weights are added first."""


def draw(
    scores: Float[Tensor, "row vocab"],
    temperature: Float[Tensor, "one"],
    uniforms: Float[Tensor, "row token"] | None,
    step: Int[Tensor, "one"],
) -> tuple[Int[Tensor, "row"], Float[Tensor, "row"]]:
    """Sample a token of each row from softmax(scores / temperature) by its uniform of column `step`; and its log-prob.

    Without uniforms it takes the likeliest. A token of probability 0 is never sampled; a log-prob is not finite where a
    row's scores hold nan or +inf, or nothing else than -inf. The temperature is a tensor, so that a captured graph
    reads it.
    """
    if scores.device.type == "cpu":
        return reference(scores, temperature, uniforms, step)
    from grpo_nb.rollout import draw_triton

    return draw_triton.draw(scores, temperature, uniforms, step, BLOCK)


def reference(
    scores: Float[Tensor, "row vocab"],
    temperature: Float[Tensor, "one"],
    uniforms: Float[Tensor, "row token"] | None,
    step: Int[Tensor, "one"],
) -> tuple[Int[Tensor, "row"], Float[Tensor, "row"]]:
    """`draw` in plain torch."""
    scaled = scores.float() / temperature
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp().double()
    total = weights.sum(-1, keepdim=True)
    if uniforms is None:
        tokens = scaled.argmax(-1, keepdim=True)
    else:
        tokens = _by_blocks(weights, uniforms.index_select(1, step))
    logprobs = scaled.gather(-1, tokens).double() - top.double() - total.log()
    return tokens.squeeze(-1), logprobs.squeeze(-1).float()


def _by_blocks(weights: Float[Tensor, "row vocab"], u: Float[Tensor, "row one"]) -> Int[Tensor, "row one"]:
    """Choose the block first, then the token in it."""
    rows, vocabulary = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocabulary % BLOCK)).view(rows, -1, BLOCK)
    sums = padded.sum(-1)
    up_to = sums.cumsum(-1)
    target = u * up_to[:, -1:]
    block = _first(up_to > target, sums)
    before = torch.where(block > 0, up_to.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = padded.take_along_dim(block[:, :, None], 1).squeeze(1)
    return block * BLOCK + _first(before + inside.cumsum(-1) > target, inside)


def _first(beyond: Tensor, weights: Tensor) -> Int[Tensor, "row one"]:
    """The first of positive weight that is beyond; where rounding left none, the last of positive weight."""
    place = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, place, 0).amax(-1, keepdim=True)
    found = torch.where(beyond & (weights > 0), place, weights.shape[1]).amin(-1, keepdim=True)
    return torch.minimum(found, last)
