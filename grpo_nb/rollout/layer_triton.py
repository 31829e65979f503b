"""Triton kernels of the operations between the matrix products of a decoder layer.

Imported on CUDA only (or under TRITON_INTERPRET=1); `layer_ops` computes the same in plain torch. They round to
the model's type where transformers' modules do.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm_kernel(
    Y, RESIDUAL, WEIGHT, OUT, SUM, eps, ADDS: tl.constexpr, OFFSET: tl.constexpr, H: tl.constexpr, BH: tl.constexpr
):
    """Residual plus y, and its RMS norm: grid (row)."""
    row = tl.program_id(0).to(tl.int64) * H
    i = tl.arange(0, BH)
    ok = i < H
    x = tl.load(RESIDUAL + row + i, mask=ok, other=0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(Y + row + i, mask=ok, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(SUM + row + i, x, mask=ok)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)).to(x.dtype)
    w = tl.load(WEIGHT + i, mask=ok, other=0.0).to(tl.float32) + OFFSET
    tl.store(OUT + row + i, (normed.to(tl.float32) * w).to(x.dtype), mask=ok)


@triton.jit
def _rotate_kernel(
    QKV, QW, KW, COS, SIN, Q, K, eps, width,
    NORMS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """RMS norm of a query's or key's head, then its rotation: grid (row, query heads and key heads)."""
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    i = tl.arange(0, BD)
    ok = i < D
    half = D // 2
    other = tl.where(i < half, i + half, i - half)
    source = QKV + b * width + h * D
    x = tl.load(source + i, mask=ok, other=0.0)
    y = tl.load(source + other, mask=ok, other=0.0)
    if NORMS:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
        pointer = KW
        if h < HQ:
            pointer = QW
        w = tl.load(pointer + i, mask=ok, other=0.0).to(tl.float32)
        v = tl.load(pointer + other, mask=ok, other=0.0).to(tl.float32)
        x = ((wide * scale).to(x.dtype).to(tl.float32) * w).to(x.dtype)
        y = ((y.to(tl.float32) * scale).to(y.dtype).to(tl.float32) * v).to(y.dtype)
    cos = tl.load(COS + b * D + i, mask=ok, other=0.0).to(tl.float32)
    sin = tl.load(SIN + b * D + i, mask=ok, other=0.0).to(tl.float32)
    turned = tl.where(i < half, -y.to(tl.float32), y.to(tl.float32))
    straight = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32)
    result = (straight + (turned * sin).to(x.dtype).to(tl.float32)).to(x.dtype)
    if h < HQ:
        tl.store(Q + (b * HQ + h) * D + i, result, mask=ok)
    else:
        tl.store(K + (b * HK + h - HQ) * D + i, result, mask=ok)


@triton.jit
def _gate_kernel(X, OUT, width, BI: tl.constexpr):
    """silu(gate) * up: grid (row, block)."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    gate = tl.load(X + b * 2 * width + i, mask=i < width, other=0.0)
    up = tl.load(X + b * 2 * width + width + i, mask=i < width, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(OUT + b * width + i, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=i < width)


@triton.jit(do_not_specialize=["R"])
def _low_kernel(X, DOWN, OUT, R, K, BR: tl.constexpr, BK: tl.constexpr):
    """x A^T: grid (row, block of ranks)."""
    b = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    total = tl.zeros([BR, BK], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(X + b * K + k, mask=k < K, other=0.0).to(tl.float32)
        a = tl.load(DOWN + r[:, None] * K + k[None, :], mask=(r < R)[:, None] & (k < K)[None, :], other=0.0)
        total += x[None, :] * a.to(tl.float32)
    tl.store(OUT + b * R + r, tl.sum(total, 1).to(OUT.dtype.element_ty), mask=r < R)


def add_norm(y: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `layer_ops.add_norm`."""
    rows, width = residual.shape
    out, total = torch.empty_like(residual), residual if y is None else torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(rows,)](
        residual if y is None else y, residual, weight, out, total, eps,
        ADDS=y is not None, OFFSET=0.0, H=width, BH=block, num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return out, total


def rotate(
    qkv: Tensor, heads: tuple, norms: tuple | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """See `layer_ops.rotate`."""
    rows, (hq, hk, d) = qkv.shape[0], heads
    q, k = qkv.new_empty(rows, hq, d), qkv.new_empty(rows, hk, d)
    qw, kw = norms or (qkv, qkv)
    _rotate_kernel[(rows, hq + hk)](
        qkv, qw, kw, cos, sin, q, k, eps, qkv.stride(0),
        NORMS=norms is not None, HQ=hq, HK=hk, D=d, BD=triton.next_power_of_2(d), num_warps=1,
    )  # fmt: skip
    return q, k


def gate(x: Tensor) -> Tensor:
    """See `layer_ops.gate`."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    _gate_kernel[(rows, triton.cdiv(width, 1024))](x, out, width, BI=1024)
    return out


def low(x: Tensor, down: Tensor) -> Tensor:
    """See `layer_ops.low`."""
    rows, ranks = x.shape[0], down.shape[0]
    out = x.new_empty(rows, ranks)
    _low_kernel[(rows, triton.cdiv(ranks, 2))](x, down, out, ranks, x.shape[1], BR=2, BK=2048, num_warps=8)
    return out
