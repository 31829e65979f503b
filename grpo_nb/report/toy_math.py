"""Tables and curves of the mathematics notebook, each computed by the functions that train."""

import math
from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_nb import combine_gradients, losses
from grpo_nb.algorithms import ALGORITHMS, SURROGATE_ROWS, Algorithm, usual_clip
from grpo_nb.losses.kl import Estimator
from grpo_nb.report.tables import Table

CLAMP = 20.0
ESTIMATORS: dict[str, Estimator] = {
    **losses.KL,
    "clamp(ref − new, 0, 10)": lambda logp, logp_ref, clamp, mask: losses.kl_clamped_exhibit(logp, logp_ref, mask),
}
RATIOS = torch.logspace(math.log10(0.25), math.log10(8), 161, dtype=torch.float64)


def algorithms() -> Table:
    """Table of every algorithm: its four choices and its clip."""
    rows = [
        {
            "name": name,
            "advantage": row.advantage,
            "surrogate": row.surrogate,
            "reduction": row.reduction,
            "KL": row.kl,
            "clip": _clip(row),
            "paper": row.paper if row.paper == "TRL" else f"arXiv:{row.paper}",
        }
        for name, row in ALGORITHMS.items()
    ]
    return Table(pd.DataFrame(rows), "set algorithm.name to a name; a single choice by its own setting")


def kl_curves() -> pd.DataFrame:
    """Each estimator of one token over d = log-prob of the reference minus the policy's; one of two equal curves."""
    d = torch.linspace(-4, 4, 161, dtype=torch.float64)[None]
    curves = {name: f(-d, 0 * d, CLAMP, None)[0].tolist() for name, f in ESTIMATORS.items()}
    frame = pd.DataFrame(curves, index=pd.Index(d[0].tolist(), name="ref − new, nats"))
    return frame.loc[:, ~frame.T.duplicated()]


def pulls(advantage: float, names: Sequence[str] | None = None, **limits: float) -> pd.DataFrame:
    """−dL/dlogp of one token over its ratio to the policy that sampled: how hard each surrogate still pulls.

    None: every surrogate whose tokens depend on their own ratio only.
    """
    curves = {}
    for name in names or [name for name, row in SURROGATE_ROWS.items() if row.tokenwise]:
        bounds = losses.ClipConfig(*usual_clip(name), **limits)
        logp = RATIOS.log()[:, None].requires_grad_()
        A = torch.full_like(logp, advantage).detach()
        loss = losses.SURROGATES[name](logp, torch.zeros_like(logp).detach(), A, bounds, None)
        curves[name] = (-torch.autograd.grad(loss.sum(), logp)[0][:, 0]).tolist()
    return pd.DataFrame(curves, index=pd.Index(RATIOS.tolist(), name="ratio"))


def conflict(gradients: Sequence[Float[Tensor, "parameter"]], weights: Sequence[float]) -> pd.DataFrame:
    """Each combiner's answer to the gradients of several objectives, and the progress of each along it.

    `progress` is gᵢ · g: below 0, the step makes objective i worse. A combiner whose solver is not installed
    (`pip install "grpo_nb[combine]"`) is left out.
    """
    named = [{"w": g.double()} for g in gradients]
    gram = combine_gradients.gram(named)
    lines = []
    for name, combiner in combine_gradients.COMBINERS.items():
        try:
            share = combiner(gram, torch.tensor(weights, dtype=torch.float64), torch.Generator().manual_seed(0))
        except ImportError:
            continue
        g = combine_gradients.combine(named, share)["w"]
        progress = {f"progress of {i + 1}": round(float(one["w"] @ g), 4) for i, one in enumerate(named)}
        lines.append({"combine": name, "step": tuple(round(x, 4) for x in g.tolist())} | progress)
    return pd.DataFrame(lines)


def _clip(row: Algorithm) -> str:
    """Lower and upper, as far as the surrogate has them."""
    sides = (row.surrogate_row.low, row.surrogate_row.high)
    shown = ["-" if side is None else f"{bound:g}" for side, bound in zip(sides, row.clip, strict=True)]
    return ", ".join(shown) if any(sides) else "-"
