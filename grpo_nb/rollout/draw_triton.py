"""Triton kernels that sample a token: two passes over the scores, and no copy of them.

Imported on CUDA only (or under TRITON_INTERPRET=1); `sampling.reference` computes the same in plain torch.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _blocks_kernel(Z, TOP, SUM, BEST, TEMPERATURE, szb, V, NB, BV: tl.constexpr):
    """Maximum, its place, and sum of exp(z - maximum) of one block of a row's scores: grid (row, block)."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1)
    i = n * BV + tl.arange(0, BV)
    z = tl.load(Z + b * szb + i, mask=i < V, other=-float("inf")).to(tl.float32)
    z = tl.div_rn(z, tl.load(TEMPERATURE))
    top = tl.max(z, 0)
    held = tl.where(top == -float("inf"), 0.0, top)
    tl.store(TOP + b * NB + n, top)
    tl.store(SUM + b * NB + n, tl.sum(tl.exp(z - held), 0))
    tl.store(BEST + b * NB + n, n * BV + tl.argmax(z, 0))


@triton.jit(do_not_specialize=["suc"])
def _pick_kernel(
    Z, TOP, SUM, BEST, TEMPERATURE, U, TOKEN, LOGPROB, STEP, szb, suc, V, NB,
    GREEDY: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The token of a row by inverse CDF, and its log-prob: the block first, then the token in it. Sums are float64."""
    b = tl.program_id(0).to(tl.int64)
    t = tl.load(STEP).to(tl.int64)
    n = tl.arange(0, BN)
    tops = tl.load(TOP + b * NB + n, mask=n < NB, other=-float("inf"))
    sums = tl.load(SUM + b * NB + n, mask=n < NB, other=0.0)
    top = tl.max(tops, 0)
    temperature = tl.load(TEMPERATURE)
    weights = sums.to(tl.float64) * tl.exp(tops - top).to(tl.float64)
    total = tl.sum(weights, 0)
    if GREEDY:
        place = tl.min(tl.where(tops == top, n, BN), 0)
        token = tl.load(BEST + b * NB + tl.minimum(place, NB - 1))
    else:
        up_to = tl.cumsum(weights, 0)
        whole = tl.max(up_to, 0)
        target = tl.load(U + b * suc + t) * whole
        # The first of positive weight whose cumulative weight exceeds the target; else, by rounding, the last such.
        last = tl.max(tl.where(weights > 0, n, 0), 0)
        block = tl.minimum(tl.min(tl.where((up_to > target) & (weights > 0), n, BN), 0), last)
        before = tl.sum(tl.where(n == block - 1, up_to, 0.0), 0)
        i = block * BV + tl.arange(0, BV)
        z = tl.load(Z + b * szb + i, mask=i < V, other=-float("inf")).to(tl.float32)
        z = tl.div_rn(z, temperature)
        inside = tl.exp(z - top).to(tl.float64)
        count = tl.arange(0, BV)
        final = tl.max(tl.where(inside > 0, count, 0), 0)
        beyond = (before + tl.cumsum(inside, 0) > target) & (inside > 0)
        token = block * BV + tl.minimum(tl.min(tl.where(beyond, count, BV), 0), final)
    token = tl.minimum(token, V - 1)  # where scores are nan, which the log-prob then shows
    chosen = tl.div_rn(tl.load(Z + b * szb + token).to(tl.float32), temperature)
    tl.store(TOKEN + b, token.to(tl.int64))
    tl.store(LOGPROB + b, (chosen.to(tl.float64) - top.to(tl.float64) - tl.log(total)).to(tl.float32))


def draw(
    scores: Tensor, temperature: Tensor, uniforms: Tensor | None, step: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """Sample a token of each row; see `sampling.draw`. `block`: tokens that are summed together."""
    rows, vocabulary = scores.shape
    blocks = triton.cdiv(vocabulary, block)
    top, total = (torch.empty(rows, blocks, dtype=torch.float32, device=scores.device) for _ in range(2))
    best = torch.empty(rows, blocks, dtype=torch.int32, device=scores.device)
    tokens = torch.empty(rows, dtype=torch.long, device=scores.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=scores.device)
    _blocks_kernel[(rows, blocks)](
        scores, top, total, best, temperature, scores.stride(0), vocabulary, blocks, BV=block
    )
    table = top if uniforms is None else uniforms
    _pick_kernel[(rows,)](
        scores, top, total, best, temperature, table, tokens, logprobs, step, scores.stride(0), table.stride(0),
        vocabulary, blocks, GREEDY=uniforms is None, BN=triton.next_power_of_2(blocks), BV=block,
    )  # fmt: skip
    return tokens, logprobs
