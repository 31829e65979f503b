"""Bounds on how far two computations of the same log-probs may differ by rounding: a mean and a high quantile.

The maximum is not bounded: it grows with the number of tokens. A Llama of 135 M random weights in bfloat16, scaled to
an entropy of 1.6 nats, whose rows are cut and padded otherwise, differs on 1024 tokens by 0.009 on average, by 0.25 at
the 99th percentile and by 0.78 at most; scored at a temperature of 0.9 instead of 1.0 by 0.11, 0.66 and 1.25. Other
positions, masks or weights give more.
"""

import math
from dataclasses import dataclass

import torch

MEAN_EPS, HIGH_EPS = 10.0, 64.0
"""Bounds of the mean and of the 99th percentile in steps of the weights' type."""
MEAN_FLOOR, HIGH_FLOOR = 1e-3, 1e-2
"""Nats. Bounds of a type as fine as float32, whose rounding grows from layer to layer."""
HIGH_TOKENS = 100
"""Below so many tokens the 99th percentile is the largest of all."""
FAR, FAR_SHARE = 2.0, 1e-3
"""Difference in nats that rounding does not reach, and the share of tokens that may have it: fewer than one stop token
in each row."""
SLACK = 3.0
"""Relative uncertainty of a mean of n long-tailed numbers, times the root of n."""


@dataclass(frozen=True)
class Gap:
    """|Δ log p| over some tokens, in nats."""

    mean: float
    high: float | None = None
    """99th percentile; None where it was not measured."""
    far: float | None = None
    """Share of tokens beyond `FAR`."""
    tokens: float = math.inf


def step(dtype: torch.dtype, device: torch.device) -> float:
    """Step at 1 of the type that a forward pass computes in: the weights' own, or TF32's where that is allowed."""
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float16).eps if tf32 else 0.0)


def broken(gap: Gap, eps: float, temperature: float = 1.0) -> dict[str, tuple[float, float]]:
    """Statistics of the gap that exceed rounding, by name: (found, bound). Empty where rounding explains all of them.

    `eps` is what `step` returns. A temperature below 1 multiplies rounding.
    """
    room = (1 + SLACK / math.sqrt(max(gap.tokens, 1))) / min(temperature, 1.0)
    limits = {
        "mean": (gap.mean, max(MEAN_FLOOR, MEAN_EPS * eps) * room),
        "p99": (gap.high if gap.tokens >= HIGH_TOKENS else None, max(HIGH_FLOOR, HIGH_EPS * eps) * room),
        "far": (gap.far if gap.tokens >= HIGH_TOKENS else None, FAR_SHARE * room),
    }
    return {name: (found, limit) for name, (found, limit) in limits.items() if found is not None and not found <= limit}


def overflow_advice(dtype: str) -> str:
    """Advice for an overflow of activations of this type."""
    if dtype == "float16":
        return "set model.dtype to bfloat16 or float32 in a new run, whose range is wider"
    return (
        f"a wider type would not help, {dtype} has the range of float32: continue from an earlier checkpoint with a "
        "lower learning rate, and look at the samples of this step"
    )
