"""Triton kernels of the backward passes, and of the output head.

Imported on CUDA only (or under TRITON_INTERPRET=1); `ops` computes the same in plain torch.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_grad_kernel(
    GRAD, X, WEIGHT, RESIDUAL, OUT, NORMED, eps, ADDS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr
):
    """grid (token)"""
    row = tl.program_id(0).to(tl.int64) * H
    i = tl.arange(0, BH)
    ok = i < H
    x = tl.load(X + row + i, mask=ok, other=0.0)
    wide = x.to(tl.float32)
    w = tl.load(WEIGHT + i, mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    unit = wide * scale
    tl.store(NORMED + row + i, (unit.to(x.dtype).to(tl.float32) * w).to(x.dtype), mask=ok)
    towards = tl.load(GRAD + row + i, mask=ok, other=0.0).to(tl.float32) * w
    change = scale * (towards - unit * (tl.sum(towards * unit, 0) / H))
    if ADDS:
        change += tl.load(RESIDUAL + row + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(OUT + row + i, change.to(x.dtype), mask=ok)


@triton.jit
def _rotate_kernel(
    QKV, QW, KW, COS, SIN, Q, K, eps, width,
    NORMS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """RMS norm of a few heads of queries or of keys, then their rotation: grid (token, few heads)."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)[:, None]
    i = tl.arange(0, BD)[None, :]
    ok = i < D
    half = D // 2
    other = tl.where(i < half, i + half, i - half)
    source = QKV + t * width + h * D
    x = tl.load(source + i, mask=ok, other=0.0)
    y = tl.load(source + other, mask=ok, other=0.0)
    queries = tl.program_id(1) * BH < HQ
    if NORMS:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        pointer = KW
        if queries:
            pointer = QW
        w = tl.load(pointer + i, mask=ok, other=0.0).to(tl.float32)
        v = tl.load(pointer + other, mask=ok, other=0.0).to(tl.float32)
        x = ((wide * scale).to(x.dtype).to(tl.float32) * w).to(x.dtype)
        y = ((y.to(tl.float32) * scale).to(y.dtype).to(tl.float32) * v).to(y.dtype)
    cos = tl.load(COS + t * D + i, mask=ok, other=0.0).to(tl.float32)
    sin = tl.load(SIN + t * D + i, mask=ok, other=0.0).to(tl.float32)
    turned = tl.where(i < half, -y.to(tl.float32), y.to(tl.float32))
    straight = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32)
    result = (straight + (turned * sin).to(x.dtype).to(tl.float32)).to(x.dtype)
    if queries:
        tl.store(Q + (t * HQ + h) * D + i, result, mask=ok)
    else:
        tl.store(K + (t * HK + h - HQ) * D + i, result, mask=ok)


@triton.jit
def _rotate_grad_kernel(
    DQ, DK, DV, QKV, QW, KW, COS, SIN, OUT, eps, width,
    NORMS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Back through the rotation and the RMS norm: grid (token, few heads of queries, keys or values)."""
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BH
    h = first + tl.arange(0, BH)[:, None]
    i = tl.arange(0, BD)[None, :]
    ok = i < D
    place = t * width + h * D
    if first >= HQ + HK:
        v = tl.load(DV + (t * HK + h - HQ - HK) * D + i, mask=ok, other=0.0)
        tl.store(OUT + place + i, v, mask=ok)
    else:
        half = D // 2
        other = tl.where(i < half, i + half, i - half)
        source = DK + (t * HK + h - HQ) * D
        weight = KW
        if first < HQ:
            source = DQ + (t * HQ + h) * D
            weight = QW
        raw = tl.load(source + i, mask=ok, other=0.0)
        straight = raw.to(tl.float32) * tl.load(COS + t * D + i, mask=ok, other=0.0).to(tl.float32)
        turned = tl.load(source + other, mask=ok, other=0.0).to(tl.float32)
        turned *= tl.load(SIN + t * D + other, mask=ok, other=0.0).to(tl.float32)
        grad = straight + tl.where(i < half, turned, -turned)
        if NORMS:
            x = tl.load(QKV + place + i, mask=ok, other=0.0).to(tl.float32)
            w = tl.load(weight + i, mask=ok, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
            unit, towards = x * scale, grad * w
            grad = scale * (towards - unit * (tl.sum(towards * unit, 1) / D)[:, None])
        tl.store(OUT + place + i, grad.to(raw.dtype), mask=ok)


@triton.jit(do_not_specialize=["stride", "other_stride"], do_not_specialize_on_alignment=["LSE", "OTHER_LSE"])
def _join_kernel(
    OUT, LSE, OTHER, OTHER_LSE, stride, other_stride,
    H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """grid (token)"""
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BH)
    one = tl.load(LSE + h * stride + t, mask=h < H, other=0.0)
    two = tl.load(OTHER_LSE + h * other_stride + t, mask=h < H, other=0.0)
    top = tl.maximum(one, two)
    both = top + tl.log(tl.exp(one - top) + tl.exp(two - top))
    i = h[:, None] * D + tl.arange(0, BD)[None, :]
    ok = (h[:, None] < H) & (tl.arange(0, BD)[None, :] < D)
    x = tl.load(OUT + t * H * D + i, mask=ok, other=0.0)
    y = tl.load(OTHER + t * H * D + i, mask=ok, other=0.0)
    tl.debug_barrier()  # several threads hold the same number: none may store before all have loaded
    tl.store(LSE + h * stride + t, both, mask=h < H)
    tl.store(OTHER_LSE + h * other_stride + t, both, mask=h < H)
    mixed = x.to(tl.float32) * tl.exp(one - both)[:, None] + y.to(tl.float32) * tl.exp(two - both)[:, None]
    tl.store(OUT + t * H * D + i, mixed.to(x.dtype), mask=ok)


@triton.jit
def _gate_grad_kernel(GRAD, X, OUT, GATED, width, BI: tl.constexpr):
    """grid (token, block)"""
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    ok = i < width
    first = tl.load(X + t * 2 * width + i, mask=ok, other=0.0)
    second = tl.load(X + t * 2 * width + width + i, mask=ok, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + t * width + i, mask=ok, other=0.0).to(tl.float32)
    wide = first.to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-wide))
    silu = wide * share
    tl.store(GATED + t * width + i, (silu.to(first.dtype).to(tl.float32) * second).to(first.dtype), mask=ok)
    slope = share * (1.0 + wide * (1.0 - share))
    tl.store(OUT + t * 2 * width + i, (grad * second * slope).to(first.dtype), mask=ok)
    tl.store(OUT + t * 2 * width + width + i, (grad * silu).to(first.dtype), mask=ok)


@triton.jit(do_not_specialize_on_alignment=["TARGETS"])
def _head_kernel(
    LOGITS, TARGETS, LOGPROB, ENTROPY, PULL, temperature, V: tl.constexpr, PULLS: tl.constexpr, BV: tl.constexpr
):
    """grid (target)"""
    t = tl.program_id(0).to(tl.int64)
    row = LOGITS + t * V
    target = tl.load(TARGETS + t)
    hit = tl.load(row + target).to(tl.float32) / temperature
    i = tl.arange(0, BV)
    most = tl.full([BV], -1e30, tl.float32)
    mass = tl.zeros([BV], tl.float32)
    first = tl.zeros([BV], tl.float32)
    for v0 in range(0, V, BV):
        z = tl.load(row + v0 + i, mask=v0 + i < V, other=float("-inf")).to(tl.float32) / temperature
        z = tl.where(z < -1e30, -1e30, z)  # not a maximum, which would lose NaN
        higher = tl.maximum(most, z)
        down, share = tl.exp(most - higher), tl.exp(z - higher)
        mass = mass * down + share
        first = first * down + share * z
        most = higher
    top = tl.max(most, 0)
    down = tl.exp(most - top)
    total = tl.sum(mass * down, 0)
    normaliser = top + tl.log(total)
    entropy = normaliser - tl.sum(first * down, 0) / total
    tl.store(LOGPROB + t, hit - normaliser)
    tl.store(ENTROPY + t, entropy)
    if PULLS > 0:
        tl.debug_barrier()  # every thread has read the target's score before one overwrites it
        for v0 in range(0, V, BV):
            ok = v0 + i < V
            raw = tl.load(row + v0 + i, mask=ok, other=float("-inf"))
            z = raw.to(tl.float32) / temperature
            z = tl.where(z < -1e30, -1e30, z) - normaliser
            share = tl.exp(z)
            pull = (tl.where(v0 + i == target, 1.0, 0.0) - share) / temperature
            if PULLS > 1:
                spread = -share * (z + entropy) / temperature
                tl.store(PULL + t * V + v0 + i, spread.to(raw.dtype), mask=ok)
            tl.store(row + v0 + i, pull.to(raw.dtype), mask=ok)


def norm_grad(grad: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `ops.norm_grad`."""
    rows, width = x.shape
    out, normed = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _norm_grad_kernel[(rows,)](
        grad, x, weight, x if residual is None else residual, out, normed, eps,
        ADDS=residual is not None, H=width, BH=block, num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return out, normed


def rotate(qkv: Tensor, shape: tuple, norms: tuple | None, eps: float, turn: tuple) -> tuple[Tensor, Tensor]:
    """See `ops.rotate`."""
    rows, (hq, hk, d) = qkv.shape[0], shape
    q, k = qkv.new_empty(rows, hq, d), qkv.new_empty(rows, hk, d)
    few = _few(hq, hk)
    _rotate_kernel[(rows, (hq + hk) // few)](
        qkv, *(norms or (qkv, qkv)), *turn, q, k, eps, qkv.shape[1],
        NORMS=norms is not None, HQ=hq, HK=hk, D=d, BH=few, BD=triton.next_power_of_2(d), num_warps=min(4, few),
    )  # fmt: skip
    return q, k


def rotate_grad(grads: tuple, qkv: Tensor, norms: tuple | None, eps: float, turn: tuple) -> Tensor:
    """See `ops.rotate_grad`."""
    dq, dk, dv = (grad.contiguous() for grad in grads)
    (rows, hq, d), hk = dq.shape, dk.shape[1]
    out, few = torch.empty_like(qkv), _few(hq, hk)
    _rotate_grad_kernel[(rows, (hq + 2 * hk) // few)](
        dq, dk, dv, qkv, *(norms or (qkv, qkv)), *turn, out, eps, qkv.shape[1],
        NORMS=norms is not None, HQ=hq, HK=hk, D=d, BH=few, BD=triton.next_power_of_2(d), num_warps=min(4, few),
    )  # fmt: skip
    return out


def _few(queries: int, keys: int) -> int:
    """Heads at a time: the most of 8, 4, 2 and 1 that divides both numbers."""
    return next(n for n in (8, 4, 2, 1) if queries % n == 0 and keys % n == 0)


def join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """See `ops.join`."""
    rows, heads, d = out.shape
    _join_kernel[(rows,)](
        out, lse, other, other_lse, lse.stride(0), other_lse.stride(0),
        H=heads, D=d, BH=triton.next_power_of_2(heads), BD=triton.next_power_of_2(d), num_warps=4,
    )  # fmt: skip


def gate_grad(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """See `ops.gate_grad`."""
    rows, width = grad.shape
    out, gated = torch.empty_like(x), torch.empty_like(grad)
    _gate_grad_kernel[(rows, triton.cdiv(width, 1024))](grad, x, out, gated, width, BI=1024)
    return out, gated


def head_scores(logits: Tensor, targets: Tensor, temperature: float, pulls: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """See `ops.head_scores`."""
    rows, vocabulary = logits.shape
    logprob, entropy = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    spread = torch.empty_like(logits) if pulls > 1 else logits
    _head_kernel[(rows,)](
        logits, targets, logprob, entropy, spread, temperature,
        V=vocabulary, PULLS=pulls, BV=4096, num_warps=8,
    )  # fmt: skip
    return logprob, entropy, [logits, spread][:pulls]
