"""The mathematics on toy numbers: small tables, each computed by the functions that train, for the notebook."""

import math
from collections.abc import Callable, Sequence

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
    """Every algorithm as its four choices and its clip."""
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


def advantages(rewards: Float[Tensor, "prompt group"], lengths: Tensor | None = None) -> Table:
    """What each estimator makes of the same rewards (NaN: unscored), one line a prompt."""
    lengths = torch.ones(rewards.shape, dtype=torch.long) if lengths is None else lengths
    outcomes = losses.GroupRewards(rewards, lengths)
    made = {name: losses.advantages(outcomes, name)[..., 0] for name in losses.ADVANTAGES}
    lines = [
        {"rewards": _numbers(rewards[p])} | {name: _numbers(values[p]) for name, values in made.items()}
        for p in range(len(rewards))
    ]
    return Table(pd.DataFrame(lines).set_index("rewards").T.rename_axis("advantage").reset_index())


def kl_estimators(policy: Float[Tensor, "token"], reference: Float[Tensor, "token"]) -> Table:
    """Each estimator over all tokens of two small distributions (logits), enumerated, so without sampling noise.

    `gradient` is the expected gradient as a loss beside that of KL(policy ‖ reference): its size, and its cosine.
    """
    logp, ref = policy.log_softmax(-1), reference.log_softmax(-1)
    truth = (logp.exp() * (logp - ref)).sum()
    target = _gradient(policy, lambda new: (new.exp() * (new - ref)).sum())
    lines = []
    for name, estimate in ESTIMATORS.items():
        values = estimate(logp[None], ref[None], CLAMP, None)[0]
        mean = (logp.exp() * values).sum()
        pull = _gradient(policy, _expectation(estimate, logp, ref))
        size = pull.norm() / target.norm()
        lines.append(
            {
                "estimator": name,
                "mean": round(mean.item(), 4),
                "truth": round(truth.item(), 4),
                "std of one token": round((logp.exp() * (values - mean).square()).sum().sqrt().item(), 4),
                "gradient: size": f"{size.item():.0%}",
                "gradient: cosine": f"{torch.cosine_similarity(pull, target, dim=0).item():.2f}"
                if size > 1e-9
                else "none",
            }
        )
    return Table(pd.DataFrame(lines), "nats per token")


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


def per_token(names: Sequence[str], log_ratios: Sequence[float], clip: float) -> Table:
    """What the tokens of one good answer (A = 1) gain under each surrogate: their ratio, where nothing holds it."""
    logp = torch.tensor([log_ratios], dtype=torch.float64)
    A, bounds = torch.ones(1, 1, dtype=torch.float64), losses.ClipConfig(low=clip, high=clip)
    lines = []
    for name in names:
        gains = (-losses.SURROGATES[name](logp, torch.zeros_like(logp), A, bounds, None)).expand_as(logp)[0]
        lines.append({"surrogate": name} | {f"token {i + 1}": round(x, 4) for i, x in enumerate(gains.tolist())})
    return Table(pd.DataFrame(lines), f"gain of each token; log-ratios {', '.join(f'{x:+g}' for x in log_ratios)}")


def long_answers(lengths: Sequence[int], max_completion_length: int) -> Table:
    """What an answer of each length weighs in the loss, all with the same advantage: by token, and as a whole."""
    mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    counts = losses.LossNormalizer(len(lengths), sum(lengths), max_completion_length)
    lines = []
    for name, reduce in losses.REDUCTIONS.items():
        per_token = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
        (weight,) = torch.autograd.grad(reduce(per_token, mask, counts), per_token)
        lines += [
            {
                "reduction": name,
                "length": length,
                "weight of a token": f"{weight[i, 0].item():.2g}",
                "weight of the answer": f"{weight[i].sum().item():.1%}",
            }
            for i, length in enumerate(lengths)
        ]
    return Table(pd.DataFrame(lines), f"answers of {', '.join(map(str, lengths))} tokens; cap {max_completion_length}")


def conflict(gradients: Sequence[Float[Tensor, "parameter"]], weights: Sequence[float]) -> pd.DataFrame:
    """Each combiner's answer to the gradients of several objectives, and what a step along it does to each of them.

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


def _expectation(estimate: Estimator, logp: Tensor, ref: Tensor) -> Callable[[Tensor], Tensor]:
    """E over the policy's own tokens of the estimator, as a loss of new log-probs: the sampling does not learn."""
    return lambda new: (logp.exp() * estimate(new[None], ref[None], CLAMP, None)[0]).sum()


def _gradient(logits: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    theta = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(theta.log_softmax(-1)), theta)[0]


def _numbers(values: Tensor) -> str:
    return "  ".join("-" if math.isnan(v) else f"{v:.3g}" for v in values.tolist())
