"""Backward passes of what lies between the matrix products of a layer, and the scores of the output head.

`rollout.layer_ops` has the forward passes. In plain torch on the CPU, one kernel each on CUDA.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_nb.rollout import layer_ops

Turn = tuple[Float[Tensor, "token d"], Float[Tensor, "token d"]]
"""Cosines and sines of the tokens' positions."""


def norm_grad(
    grad: Float[Tensor, "token width"],
    x: Float[Tensor, "token width"],
    weight: Float[Tensor, "width"],
    eps: float,
    residual: Float[Tensor, "token width"] | None,
) -> tuple[Float[Tensor, "token width"], Float[Tensor, "token width"]]:
    """The gradient of RMS norm's input plus `residual`, what x gets elsewhere; and the norm of x once more."""
    if grad.device.type != "cpu":
        return _kernels().norm_grad(grad, x, weight, eps, residual)  # type: ignore[no-any-return]
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    unit, towards = wide * scale, grad.float() * weight.float()
    change = scale * (towards - unit * (towards * unit).mean(-1, keepdim=True))
    total = change if residual is None else change + residual.float()
    return total.to(x.dtype), weight * unit.to(x.dtype)


def rotate(
    qkv: Float[Tensor, "token width"],
    shape: tuple[int, int, int],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    turn: Turn,
) -> tuple[Float[Tensor, "token head d"], Float[Tensor, "token kv_head d"]]:
    """Rotate as `layer_ops.rotate` does, for many tokens."""
    if qkv.device.type != "cpu":
        return _kernels().rotate(qkv, shape, norms, eps, turn)  # type: ignore[no-any-return]
    return layer_ops.rotate(qkv, shape, norms, eps, *turn)


def rotate_grad(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Float[Tensor, "token width"],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    turn: Turn,
) -> Float[Tensor, "token width"]:
    """The gradient of qkv, given those of the turned queries, the turned keys and the values, [token, head, d]."""
    if qkv.device.type != "cpu":
        return _kernels().rotate_grad(grads, qkv, norms, eps, turn)  # type: ignore[no-any-return]
    dq, dk, dv = grads
    heads = dq.shape[1], dk.shape[1], dq.shape[2]
    with torch.enable_grad():
        source = qkv.detach().requires_grad_()
        (grad,) = torch.autograd.grad(rotate(source, heads, norms, eps, turn), source, (dq, dk))
    grad[:, (heads[0] + heads[1]) * heads[2] :] = dv.flatten(1)
    return grad


def gate_grad(
    grad: Float[Tensor, "token width"], x: Float[Tensor, "token double"]
) -> tuple[Float[Tensor, "token double"], Float[Tensor, "token width"]]:
    """The gradient of x, and gate(x) once more."""
    if x.device.type != "cpu":
        return _kernels().gate_grad(grad, x)  # type: ignore[no-any-return]
    with torch.enable_grad():
        source = x.detach().requires_grad_()
        out = layer_ops.gate(source)
        (found,) = torch.autograd.grad(out, source, grad)
    return found, out.detach()


def join(
    out: Float[Tensor, "token head d"],
    lse: Float[Tensor, "head token"],
    other: Float[Tensor, "token head d"],
    other_lse: Float[Tensor, "head token"],
) -> None:
    """Combine the attention over two sets of keys, each with its logsumexp, into the attention over both.

    The output in `out`, the logsumexp in `lse` and in `other_lse`.
    """
    if out.device.type != "cpu":
        _kernels().join(out, lse, other, other_lse)
        return
    both = torch.logaddexp(lse, other_lse)
    shares = [(part - both).exp().T[..., None] for part in (lse, other_lse)]
    out.copy_(out * shares[0] + other * shares[1])
    lse.copy_(both)
    other_lse.copy_(both)


def head_scores(
    logits: Float[Tensor, "target vocab"], targets: Int[Tensor, "target"], temperature: float, pulls: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Log-prob of each target and entropy of each distribution, in float32, of softmax(logits / temperature).

    `pulls`: 0 for no more than that, 1 for the gradient of the log-prob by the logits too, 2 for the entropy's as
    well; the first takes the place of the logits.
    """
    if logits.device.type != "cpu":
        return _kernels().head_scores(logits, targets, temperature, pulls)  # type: ignore[no-any-return]
    scores = logits.float() / temperature
    normaliser = scores.logsumexp(-1, keepdim=True)
    shares = (scores - normaliser).exp()
    entropy = normaliser - (shares * scores.clamp(min=torch.finfo(scores.dtype).min)).sum(-1, keepdim=True)
    logprob = scores.gather(-1, targets[:, None]) - normaliser
    found = []
    if pulls > 0:
        hit = torch.zeros_like(scores).scatter_(-1, targets[:, None], 1.0)
        found.append(((hit - shares) / temperature).to(logits.dtype))
    if pulls > 1:
        found.append((-shares * torch.nan_to_num(scores - normaliser + entropy) / temperature).to(logits.dtype))
    return logprob[:, 0], entropy[:, 0], found


def _kernels() -> Any:
    from grpo_nb.passes import kernels_triton

    return kernels_triton
