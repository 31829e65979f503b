"""One decoder layer of Llama-like models, forward and backward: it keeps expensive results only.

Kept per token: both residual sums, the projections of queries, keys and values, the attention output, and the two
halves of the MLP. Norms, rotations and the gate are computed again in the backward pass; light layers keep the first
sum only (Chen et al. 2016, arXiv:1604.06174).
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from grpo_nb.passes import ops
from grpo_nb.passes.attention import Heads, Seen, attend, attend_grad
from grpo_nb.passes.flat import Tree
from grpo_nb.passes.linear import Joint
from grpo_nb.rollout import layer_ops

Sums = tuple[Float[Tensor, "token width"], Float[Tensor, "token width"]]
"""The residual sum, and the term to be added to it."""


@dataclass(frozen=True)
class Norm:
    """A frozen RMS norm."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Line:
    """Inputs that all layers of a pass share: the attention tree, and the rotation of each token."""

    tree: Tree
    turn: ops.Turn


@dataclass(frozen=True)
class Kept:
    """Tensors that the backward pass of a layer needs."""

    before: Tensor
    """The residual sum that the layer starts from."""
    qkv: Tensor
    seen: Seen
    between: Tensor
    """The residual sum after attention."""
    halves: Tensor
    """Halves of the MLP, before the gate."""
    lows: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    """A x of each joint."""


@dataclass(frozen=True)
class Layer:
    """The frozen parts of one layer, and its linear layers with their adapters."""

    norms: tuple[Norm, Norm]
    head_norms: tuple[Tensor, Tensor] | None
    head_eps: float
    shape: tuple[int, int, int]
    """Heads of queries and of keys, and the width of each."""
    heads: Heads
    joints: tuple[Joint, Joint, Joint, Joint]
    """Joints of queries, keys and values; of the attention's output; of gate and up; of down."""

    def forward(self, x: Tensor, y: Tensor | None, line: Line) -> tuple[Sums, Kept]:
        """The sums after the layer, given those before it, and the tensors of its backward pass."""
        of_qkv, of_out, of_gate, of_down = self.joints
        h, before = layer_ops.add_norm(y, x, self.norms[0].weight, self.norms[0].eps)
        qkv, low_qkv = of_qkv(h)
        seen = attend(*self._heads(qkv, line), line.tree, self.heads)
        y, low_out = of_out(seen[0].flatten(1))
        h, between = layer_ops.add_norm(y, before, self.norms[1].weight, self.norms[1].eps)
        halves, low_gate = of_gate(h)
        y, low_down = of_down(layer_ops.gate(halves))
        kept = Kept(before, qkv, seen, between, halves, (low_qkv, low_out, low_gate, low_down))
        return (between, y), kept

    def backward(self, kept: Kept, grads: Sums, line: Line, first: bool) -> tuple[Tensor | None, list[Tensor]]:
        """The gradient of both sums before the layer (none of the first layer), and those of the masters in turn."""
        of_qkv, of_out, of_gate, of_down = self.joints
        low_qkv, low_out, low_gate, low_down = kept.lows
        grad, d_out = grads
        d_gated, d_low = of_down.grad(d_out, low_down)
        d_halves, gated = ops.gate_grad(_given(d_gated), kept.halves)
        down = of_down.master_grads(gated, low_down, d_out, d_low)
        dh, d_low = of_gate.grad(d_halves, low_gate)
        grad, h = ops.norm_grad(_given(dh), kept.between, self.norms[1].weight, self.norms[1].eps, grad)
        gate = of_gate.master_grads(h, low_gate, d_halves, d_low)
        d_seen, d_low = of_out.grad(grad, low_out)
        seen = kept.seen[0]
        out = of_out.master_grads(seen.flatten(1), low_out, grad, d_low)
        found = attend_grad(_given(d_seen).view_as(seen), self._heads(kept.qkv, line), kept.seen, line.tree, self.heads)
        d_qkv = ops.rotate_grad(found, kept.qkv, self.head_norms, self.head_eps, line.turn)
        dh, d_low = of_qkv.grad(d_qkv, low_qkv, wants_input=not first)
        norm = self.norms[0]
        if dh is None:
            h, _ = layer_ops.add_norm(None, kept.before, norm.weight, norm.eps)
        else:
            grad, h = ops.norm_grad(dh, kept.before, norm.weight, norm.eps, grad)
        return None if first else grad, [*of_qkv.master_grads(h, low_qkv, d_qkv, d_low), *out, *gate, *down]

    def _heads(self, qkv: Tensor, line: Line) -> tuple[Tensor, Tensor, Tensor]:
        """Turned queries and keys, and values: [token, head, d]."""
        queries, keys, d = self.shape
        q, k = ops.rotate(qkv, self.shape, self.head_norms, self.head_eps, line.turn)
        return q, k, qkv[:, (queries + keys) * d :].view(-1, keys, d)


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
