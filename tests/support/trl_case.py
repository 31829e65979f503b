"""TRL's case as pure tensors: 4 rows, 5 columns, row i from 0, column t from 0; and a loss of it by our own table."""

from typing import Any

import torch
from torch import Tensor

from grpo_nb import losses
from grpo_nb.algorithms import algorithm
from grpo_nb.losses import ClipConfig, LossNormalizer

float64 = torch.float64
ROW, COLUMN = torch.arange(4, dtype=float64)[:, None], torch.arange(5, dtype=float64)[None, :]
LOGP = -0.5 - 0.1 * ROW - 0.07 * COLUMN
OLD = LOGP - 0.3 * torch.cos(5 * ROW + COLUMN)
REF = LOGP + 0.2 * torch.sin(2 * ROW + COLUMN)
ADVANTAGE = torch.tensor([[1], [-1], [0.5], [-0.25]], dtype=float64)
MASK = torch.tensor([[5], [3], [2], [4]]) > COLUMN
ENTROPY = 0.1 * (ROW + 1) + 0.05 * COLUMN
COUNTS = LossNormalizer(sequences=4, tokens=14, max_completion_length=8)


def recipe(
    name: str,
    *,
    entropy_coef: float = 0.0,
    kl_weight: Any = "none",
    limits: dict[str, Any] | None = None,
    **changes: Any,
) -> losses.LossConfig:
    row = algorithm(name, **changes)
    return losses.LossConfig(row, ClipConfig(row.clip[0], row.clip[1], **(limits or {})), entropy_coef, kl_weight)


def loss_and_gradient(
    name: str,
    *,
    logp: Tensor = LOGP,
    old: Tensor = OLD,
    ref: Tensor = REF,
    beta: float = 0.0,
    mask: Tensor = MASK,
    weight: Tensor | None = None,
    counts: LossNormalizer = COUNTS,
    rows: Any = slice(None),
    **settings: Any,
) -> tuple[float, Tensor]:
    """The loss of some rows and d loss / d logp."""
    leaf = logp[rows].clone().requires_grad_()
    tokens = losses.LossInputs(
        logp=leaf,
        logp_old=old[rows],
        logp_ref=ref[rows],
        advantage=ADVANTAGE[rows].to(leaf.dtype),
        mask=mask[rows],
        weight=None if weight is None else weight[rows],
        entropy=ENTROPY[rows].to(leaf.dtype) if settings.get("entropy_coef") else None,
    )
    loss = torch.stack(list(losses.loss_terms(tokens, recipe(name, **settings), beta, counts).values())).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient
