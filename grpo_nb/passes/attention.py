"""Attention along a line of tokens, forward and backward: flash attention on CUDA, a dense mask elsewhere.

Completions see their prompt and themselves. The two parts are computed apart and joined by their logsumexps (as ring
attention does, Liu et al. 2023, arXiv:2310.01889); given the joined output and logsumexp, the backward pass of each
part by itself is exact, so no key is ever copied.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_nb.passes import ops
from grpo_nb.passes.flat import Spans, Tree


@dataclass(frozen=True)
class Heads:
    """Attention settings of a layer."""

    scale: float
    window: int | None = None
    """Tokens that a token looks back, itself included; None: all."""


Triple = tuple[Tensor, Tensor, Tensor]
Seen = tuple[Float[Tensor, "token head d"], Float[Tensor, "head token"], Float[Tensor, "head token"]]
"""Output; logsumexp of each token's scores; those of the completions after a shared prompt once more, in one piece."""


def attend(
    q: Float[Tensor, "token head d"],
    k: Float[Tensor, "token kv_head d"],
    v: Float[Tensor, "token kv_head d"],
    tree: Tree,
    heads: Heads,
) -> Seen:
    """Attention output of each token, with its logsumexps."""
    if q.device.type != "cuda":
        out, lse = _dense(q, k, v, allowed(tree, heads.window), heads.scale)
        return out, lse, lse
    out, lse = _flash(q, k, v, (tree.spans, tree.spans), heads)
    if tree.prompts is None or tree.answers is None:
        return out, lse, lse
    n = tree.shared
    prompt, prompt_lse = _flash(q[n:], k[:n], v[:n], (tree.answers, tree.prompts), heads)
    ops.join(out[n:], lse[:, n:], prompt, prompt_lse)
    return out, lse, prompt_lse


def attend_grad(grad: Float[Tensor, "token head d"], qkv: Triple, seen: Seen, tree: Tree, heads: Heads) -> Triple:
    """Gradients of queries, keys and values."""
    (q, k, v), (out, lse, joined) = qkv, seen
    if grad.device.type != "cuda":
        return _dense_grad(grad, qkv, allowed(tree, heads.window), heads.scale)
    dq, dk, dv = _flash_grad(grad, qkv, (out, lse), (tree.spans, tree.spans), heads)
    if tree.prompts is not None and tree.answers is not None:
        n = tree.shared
        part = q[n:], k[:n], v[:n]
        more = _flash_grad(grad[n:], part, (out[n:], joined), (tree.answers, tree.prompts), heads)
        torch._foreach_add_([dq[n:], dk[:n], dv[:n]], list(more))
    return dq, dk, dv


def allowed(tree: Tree, window: int | None) -> Bool[Tensor, "token token"]:
    """Mask of the tokens that each token sees."""
    spans = _numbers(tree.spans)
    place = torch.arange(len(spans), device=spans.device)
    back = place[:, None] - place
    seen = (spans[:, None] == spans) & (back >= 0)
    if window is not None:
        seen &= back < window
    if tree.prompts is not None and tree.answers is not None:
        n = tree.shared
        seen[n:, :n] = _numbers(tree.answers)[:, None] == _numbers(tree.prompts)
    return seen


def _numbers(spans: Spans) -> Tensor:
    """The span of each token."""
    lengths = spans.ends.diff().long()
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)


def _dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k).mul(scale).masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def _dense_grad(grad: Tensor, qkv: Triple, seen: Tensor, scale: float) -> Triple:
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in qkv)
        out, _ = _dense(q, k, v, seen, scale)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
    return dq, dk, dv


def _flash(q: Tensor, k: Tensor, v: Tensor, spans: tuple[Spans, Spans], heads: Heads) -> tuple[Tensor, Tensor]:
    """Causal where queries and keys are of the same spans."""
    of_q, of_k = spans
    causal = of_q is of_k
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, of_q.ends, of_k.ends, of_q.longest, of_k.longest, 0.0, causal, False,
        scale=heads.scale, **_window(heads, causal),
    )  # fmt: skip
    return out, lse


def _flash_grad(
    grad: Tensor, qkv: Triple, done: tuple[Tensor, Tensor], spans: tuple[Spans, Spans], heads: Heads
) -> Triple:
    of_q, of_k = spans
    causal = of_q is of_k
    unread = grad.new_empty(2, dtype=torch.uint64)  # place of the state of dropout, which is not used
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, *qkv, *done, of_q.ends, of_k.ends, of_q.longest, of_k.longest, 0.0, causal, unread, unread,
        scale=heads.scale, **_window(heads, causal),
    )  # fmt: skip
    return dq, dk, dv


def _window(heads: Heads, causal: bool) -> dict[str, int]:
    if heads.window is None or not causal:
        return {}
    return {"window_size_left": heads.window - 1, "window_size_right": 0}
