"""Operations between the matrix products of a decoder layer: in plain torch on the CPU, one kernel each on CUDA."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear, silu

FEW = 256
"""Rows that a kernel of our own multiplies with an adapter's A; more are left to a matrix library."""


def add_norm(
    y: Float[Tensor, "row width"] | None,
    residual: Float[Tensor, "row width"],
    weight: Float[Tensor, "width"],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """RMS norm of residual + y, and that sum; without y the residual's own."""
    if residual.device.type != "cpu":
        return _kernels().add_norm(y, residual, weight, eps)  # type: ignore[no-any-return]
    total = residual if y is None else residual + y
    return _norm(total, weight, eps), total


def rotate(
    qkv: Float[Tensor, "row width"],
    heads: tuple[int, int, int],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Float[Tensor, "row d"],
    sin: Float[Tensor, "row d"],
) -> tuple[Float[Tensor, "row head d"], Float[Tensor, "row kv_head d"]]:
    """Queries and keys, each head normed where there are norms, turned by their row's position.

    `heads`: of queries, of keys, and the width of each.
    """
    if qkv.device.type != "cpu":
        return _kernels().rotate(qkv, heads, norms, eps, cos, sin)  # type: ignore[no-any-return]
    hq, hk, d = heads
    q, k = qkv[:, : hq * d].reshape(-1, hq, d), qkv[:, hq * d : (hq + hk) * d].reshape(-1, hk, d)
    if norms is not None:
        q, k = _norm(q, norms[0], eps), _norm(k, norms[1], eps)
    return _turned(q, cos, sin), _turned(k, cos, sin)


def gate(x: Float[Tensor, "row double"]) -> Float[Tensor, "row width"]:
    """silu(first half) * second half"""
    if x.device.type != "cpu":
        return _kernels().gate(x)  # type: ignore[no-any-return]
    first, second = x.chunk(2, -1)
    return silu(first) * second


def low(x: Float[Tensor, "row width"], down: Float[Tensor, "rank width"]) -> Float[Tensor, "row rank"]:
    """x A^T for a few ranks: too small a product for a matrix library, which cuts it up and adds the parts after."""
    if x.device.type != "cpu" and x.shape[0] <= FEW:
        return _kernels().low(x, down)  # type: ignore[no-any-return]
    return linear(x, down)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def _kernels() -> Any:
    from grpo_nb.rollout import layer_triton

    return layer_triton
