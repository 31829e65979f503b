"""Triton kernels of decoding attention: a prompt is read once for all of its rows, then each row's own tokens.

The keys are cut into spans; one launch gives each query its softmax over each span, a second joins them. Imported on
CUDA only (or under TRITON_INTERPRET=1); `decode_attention.reference` computes the same in plain torch.
"""
# mypy: ignore-errors

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_nb.rollout.static_cache import LayerCache, StaticCache

SPANS, SHORTEST = 16, 64
"""A prompt, and a row's room for tokens, are cut into at most so many spans of at least so many tokens."""
TOKENS, WARPS, STAGES = 64, 4, 1
"""Tokens of one load; warps and pipeline stages of one program."""


@triton.jit
def _over_keys(
    q, K, V, offset, stride, m, s, acc, lo, hi, scale, D: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr
):  # fmt: skip
    """The online softmax (m, s, acc) of queries, continued over the keys lo <= j < hi."""
    d = tl.arange(0, BD)
    for j0 in range(lo, hi, BL):
        j = (j0 + tl.arange(0, BL)).to(tl.int64)
        ok = j < hi
        place = offset + j * stride
        k = tl.load(K + place[None, :] + d[:, None], mask=ok[None, :] & (d < D)[:, None], other=0.0)
        z = tl.where(ok[None, :], tl.dot(q, k, input_precision="ieee") * scale, -float("inf"))
        m_new = tl.maximum(m, tl.max(z, 1))
        p = tl.exp(z - m_new[:, None])
        old = tl.exp(m - m_new)
        v = tl.load(V + place[:, None] + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)
        acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        s = s * old + tl.sum(p, 1)
        m = m_new
    return m, s, acc


# The number of a prompt's spans is no constant: it changes from step to step, and each kernel takes seconds to compile.
@triton.jit(do_not_specialize=["prompts", "S"])
def _spans_kernel(
    Q, KN, VN, PK, PV, OK, OV, PART, PM, PS, FIRST, START, STEP,
    sqb, sqh, skb, skh, svb, svh, spp, sph, spl, sob, soh, sol, scale, window, length, prompts, S,
    HQ: tl.constexpr, GR: tl.constexpr, HK: tl.constexpr, S2: tl.constexpr, SPAN: tl.constexpr, OWN: tl.constexpr,
    BM: tl.constexpr, BG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Each query over one span: grid (prompt, key head, span of it), then (row, key head, span of its own tokens)."""
    pid = tl.program_id(0)
    t = tl.load(STEP).to(tl.int32)
    d = tl.arange(0, BD)
    shared = prompts * HK * S
    if pid < shared:
        span = pid % S
        h = (pid // S) % HK
        p = pid // (S * HK)
        lo = tl.maximum(tl.load(START + p).to(tl.int32), span * SPAN)
        if window > 0:
            lo = tl.maximum(lo, length + t - window + 1)
        hi = tl.minimum(length, (span + 1) * SPAN)
        mm = tl.arange(0, BM)
        head = h * GR + mm % GR
        offset = p.to(tl.int64) * spp + h.to(tl.int64) * sph
        last = tl.load(FIRST + p + 1)
        for base in range(tl.load(FIRST + p), last, BM // GR):
            row = (base + mm // GR).to(tl.int64)
            ok = (row < last) & (mm // GR < BM // GR)
            inside = ok[:, None] & (d < D)[None, :]
            q = tl.load(Q + row[:, None] * sqb + head[:, None] * sqh + d[None, :], mask=inside, other=0.0)
            m = tl.full([BM], -1e30, tl.float32)
            s = tl.zeros([BM], tl.float32)
            acc = tl.zeros([BM, BD], tl.float32)
            m, s, acc = _over_keys(q, PK, PV, offset, spl, m, s, acc, lo, hi, scale, D, BD, BL)
            place = (row * HQ + head) * (S + S2) + span
            tl.store(PM + place, m, mask=ok)
            tl.store(PS + place, s, mask=ok)
            tl.store(PART + place[:, None] * BD + d[None, :], acc, mask=ok[:, None])
    else:
        pid -= shared
        span = pid % S2
        h = (pid // S2) % HK
        b = (pid // (S2 * HK)).to(tl.int64)
        if span * OWN <= t:
            g = tl.arange(0, BG)
            head = h * GR + g
            inside = (g < GR)[:, None] & (d < D)[None, :]
            q = tl.load(Q + b * sqb + head[:, None] * sqh + d[None, :], mask=inside, other=0.0)
            own = b * sob + h.to(tl.int64) * soh
            m = tl.full([BG], -1e30, tl.float32)
            s = tl.zeros([BG], tl.float32)
            acc = tl.zeros([BG, BD], tl.float32)
            if t < (span + 1) * OWN:  # the new token, which is stored too
                kn = tl.load(KN + b * skb + h * skh + d, mask=d < D, other=0.0)
                vn = tl.load(VN + b * svb + h * svh + d, mask=d < D, other=0.0)
                tl.store(OK + own + t.to(tl.int64) * sol + d, kn, mask=d < D)
                tl.store(OV + own + t.to(tl.int64) * sol + d, vn, mask=d < D)
                m = tl.sum(q.to(tl.float32) * kn.to(tl.float32)[None, :], 1) * scale
                s += 1.0
                acc += vn.to(tl.float32)[None, :]
            lo = span * OWN
            if window > 0:
                lo = tl.maximum(lo, t - window + 1)
            hi = tl.minimum(t, (span + 1) * OWN)
            m, s, acc = _over_keys(q, OK, OV, own, sol, m, s, acc, lo, hi, scale, D, BD, BL)
            place = (b * HQ + head) * (S + S2) + S + span
            tl.store(PM + place, m, mask=g < GR)
            tl.store(PS + place, s, mask=g < GR)
            tl.store(PART + place[:, None] * BD + d[None, :], acc, mask=(g < GR)[:, None])


@triton.jit(do_not_specialize=["S"])
def _join_kernel(
    PART, PM, PS, OUT, STEP, S,
    HQ: tl.constexpr, S2: tl.constexpr, OWN: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The spans' softmaxes joined: grid (row, query head)."""
    place = tl.program_id(0).to(tl.int64) * HQ + tl.program_id(1)
    spans = S + tl.load(STEP).to(tl.int32) // OWN + 1
    i = tl.arange(0, BS)
    d = tl.arange(0, BD)
    tops = tl.load(PM + place * (S + S2) + i, mask=i < spans, other=-1e30)
    sums = tl.load(PS + place * (S + S2) + i, mask=i < spans, other=0.0)
    top = tl.max(tops, 0)
    total = tl.sum(sums * tl.exp(tops - top), 0)
    acc = tl.zeros([BD], tl.float32)
    for n in range(0, spans):
        weight = tl.exp(tl.load(PM + place * (S + S2) + n) - top)
        acc += weight * tl.load(PART + (place * (S + S2) + n) * BD + d)
    tl.store(OUT + place * D + d, (acc / total).to(OUT.dtype.element_ty), mask=d < D)


def attention(query: Tensor, key: Tensor, value: Tensor, layer: LayerCache, state: StaticCache, options: Any) -> Tensor:
    """Attention output, [row, 1, head, d]; see `decode_attention.reference`."""
    rows, heads, _, d = query.shape
    prompt, own, kv_heads = layer.prompt_keys, layer.own_keys, key.shape[1]
    group, block = heads // kv_heads, max(16, triton.next_power_of_2(d))
    span, spans = _cut(prompt.shape[2])
    own_span, own_spans = _cut(own.shape[2])
    part, top, total = state.scratch(heads, spans + own_spans, block)
    out = torch.empty(rows, 1, heads, d, dtype=query.dtype, device=query.device)
    least = max(16, triton.next_power_of_2(group))
    most = max(least, min(64, triton.next_power_of_2(state.group_rows * group)))
    shape = {"HQ": heads, "S2": own_spans, "OWN": own_span, "D": d, "BD": block}
    _spans_kernel[(kv_heads * (prompt.shape[0] * spans + rows * own_spans),)](
        query, key, value, prompt, layer.prompt_values, own, layer.own_values, part, top, total,
        state.first, state.start, state.step, query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), prompt.stride(0), prompt.stride(1), prompt.stride(2),
        own.stride(0), own.stride(1), own.stride(2), options.scale, options.window or 0, prompt.shape[2],
        prompt.shape[0], spans, GR=group, HK=kv_heads, SPAN=span, BM=most, BG=least, BL=TOKENS,
        num_warps=WARPS, num_stages=STAGES, **shape,
    )  # fmt: skip
    _join_kernel[(rows, heads)](
        part,
        top,
        total,
        out,
        state.step,
        spans,
        num_warps=1,
        **shape,
        BS=triton.next_power_of_2(SPANS + own_spans),
    )
    return out


def _cut(tokens: int) -> tuple[int, int]:
    """Length and number of spans."""
    length = max(SHORTEST, triton.next_power_of_2(triton.cdiv(tokens, SPANS)))
    return length, triton.cdiv(tokens, length)
