"""Combines the gradients of the objectives into one, by means of the Gramian.

The m x m matrix of dot products holds all that a combination needs: norms, cosines and conflicts. So a combiner
is a function of small numbers that is tested without a model, the dashboard's cosine comes from the same matrix,
and the gradients themselves are read twice and never concatenated. A gradient is a dict from parameter name to
tensor; a parameter that an objective does not reach may be left out and counts as 0.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Gradient = Mapping[str, Tensor]
Gram = Float[Tensor, "objective objective"]
Weights = Float[Tensor, "objective"]

CHUNK = 2**22
"""Elements widened to float64 at a time (32 MiB), however large the parameter."""
MGDA_ITERATIONS = 1000
MGDA_STEP = 1e-6
"""Step length of Frank-Wolfe below which it stops."""
CAGRAD_ZERO = 1e-7
"""Length of a combination, against that of all gradients together, that is 0; the solver is exact to about 1e-8."""
UPGRAD_RIDGE = 1e-10
"""Number added to the squared length 1, so that dependent gradients leave one solution."""
NEGLIGIBLE = 1e-6
"""Length of a gradient, relative to the longest, below which it counts as zero."""


def gram(grads: Sequence[Gradient]) -> Gram:
    """Gᵢⱼ = gᵢ · gⱼ over all parameters, accumulated in float64; on the CPU."""
    device = next((grad.device for g in grads for grad in g.values()), torch.device("cpu"))
    total = torch.zeros(len(grads), len(grads), dtype=_wide(device), device=device)
    for i, a in enumerate(grads):
        for j, b in enumerate(grads[: i + 1]):
            for name in a:  # in order: a set's order changes from process to process, and the last bits with it
                if name in b:
                    total[i, j] += _dot(a[name], b[name]).to(device)
    total = total.to("cpu", torch.float64)
    return total + total.tril(-1).T


def combine(grads: Sequence[Gradient], weights: Weights) -> dict[str, Tensor]:
    """g = Σᵢ wᵢ gᵢ, parameter by parameter, each in its gradient's own type."""
    combined: dict[str, Tensor] = {}
    for weight, gradient in zip(weights.tolist(), grads, strict=True):
        for name, grad in gradient.items():
            if name in combined:
                combined[name].add_(grad, alpha=weight)
            else:
                combined[name] = grad * weight
    return combined


# ---- combiners: (Gramian, objectives' weights, generator) -> the weights to combine with
# TorchJD is imported where it is used: with cvxpy installed the import takes a second.


def weighted_sum(gram: Gram, weights: Weights, generator: torch.Generator) -> Weights:
    """w: the objectives' weights as they are."""
    return weights


def pcgrad(gram: Gram, weights: Weights, generator: torch.Generator) -> Weights:
    """gᵢ ← gᵢ − (gᵢ·gⱼ / gⱼ·gⱼ) gⱼ for each j with gᵢ·gⱼ < 0, in random order; then Σᵢ gᵢ.  Yu et al. 2020, Alg. 1.

    The gradients are the weighted ones, wᵢgᵢ. A zero gradient conflicts with nobody, and without a conflict the
    result is `weights`. A Gramian that is not finite changes nothing either: the step's guard sees it.
    """
    # TorchJD's PCGradWeighting is the oracle of the tests, but it samples its order from torch's global generator.
    # Forking that is no cure in a notebook: any other thread that samples meanwhile (a cell, a second run) changes
    # the order, and has its own numbers rewound. Measured: 801 of 2000 forked results differed.
    weights = weights.to(gram.dtype)
    scaled = weights[:, None] * gram * weights
    if not scaled.isfinite().all():
        return weights
    projected = torch.eye(len(weights), dtype=gram.dtype)  # row i: the i-th gradient in terms of the original ones
    alive = _alive(scaled)
    for i, row in enumerate(projected):
        for j in torch.randperm(len(weights), generator=generator).tolist():
            dot = row @ scaled[j]
            if j != i and alive[j] and dot < 0:
                row[j] -= dot / scaled[j, j]
    return projected.sum(0) * weights


def mgda(gram: Gram, weights: Weights, generator: torch.Generator) -> Weights:
    """m · argmin ‖Σᵢ αᵢ gᵢ‖ over α ≥ 0, Σᵢ αᵢ = 1: the shortest gradient of the convex hull.  Désidéri 2012.

    By hand: gᵢ·g ≥ ‖g‖² / m for every i, so no objective gets worse; where g = 0 none can gain without another's loss.
    It favours short gradients: a larger weight, which makes its gradient wᵢgᵢ longer, gets that objective *less*, and
    an objective with hardly any signal slows all the others. Frank-Wolfe finds α: exactly for two objectives, for more
    until ‖g‖² is within about 1e-3 Σᵢ ‖gᵢ‖² of its minimum, so that one may lose that much.
    """
    from torchjd.aggregation import MGDAWeighting

    search = MGDAWeighting(epsilon=MGDA_STEP, max_iters=MGDA_ITERATIONS)
    return _settle(gram, weights, lambda G: len(G) * search(G))


def cagrad(gram: Gram, weights: Weights, generator: torch.Generator, c: float = 0.5) -> Weights:
    """m · argmax minᵢ gᵢ·d over ‖d − g₀‖ ≤ c ‖g₀‖, with g₀ the mean.  Liu et al. 2021, Alg. 1.

    c = 0 is `weighted_sum`; towards 1 the worst-off objective counts more. Some conflict may remain. Where the
    bound of Alg. 1 is met by a combination of length 0, nothing is gained by moving and the result is 0.

    Raises:
        ImportError: cvxpy is not installed.
    """
    from torchjd.aggregation import CAGradWeighting

    solve = CAGradWeighting(c=c, norm_eps=CAGRAD_ZERO)
    return _settle(gram, weights, lambda G: len(G) * solve(G))


def upgrad(gram: Gram, weights: Weights, generator: torch.Generator) -> Weights:
    """Σᵢ π(gᵢ), with π the projection onto {d : gⱼ·d ≥ 0 for every j}.  Quinton & Rey 2024, eq. 3.

    Like `pcgrad`, but without a random order, and for any number of objectives gᵢ·g ≥ 0. Without a conflict
    the result is `weights`.

    Raises:
        ImportError: qpsolvers or quadprog is not installed.
    """
    from torchjd.aggregation import UPGradWeighting
    from torchjd.linalg import QuadprogProjector

    projector = QuadprogProjector(norm_eps=0.0, reg_eps=UPGRAD_RIDGE)

    def shares(G: Gram) -> Weights:
        # the cone depends on directions only, so unit gradients serve, and a ridge is as small for the short ones
        lengths = norms(G)
        return UPGradWeighting(lengths, projector)(_semidefinite(cosine(G))) / lengths

    return _settle(gram, weights, shares)


def _settle(gram: Gram, weights: Weights, shares: Callable[[Gram], Weights]) -> Weights:
    """`weights` times the `shares` of the weighted gradients that are not zero.

    Shares are at the scale of a sum: m times the published rules, which speak of means, so that `max_grad_norm` and
    the learning rate mean the same under any combiner. A zero gradient keeps its weight and has no say: with it in
    the hull, `mgda` would answer 0 whatever the others want. A Gramian that is not finite changes nothing.
    """
    weights = weights.to(gram.dtype)
    scaled = weights[:, None] * gram * weights
    scaled = scaled / scaled.diagonal().max()  # TorchJD takes a trace below 1e-4, an everyday one here, for zero
    alive = _alive(scaled)  # none, where the longest is 0 or not finite
    if alive.sum() < 2:
        return weights
    settled = weights.clone()
    settled[alive] *= shares(scaled[alive][:, alive])
    return settled


def _alive(gram: Gram) -> Bool[Tensor, "objective"]:
    """Mask of the gradients that are more than rounding compared with the longest."""
    squares = gram.diagonal()
    return squares > NEGLIGIBLE**2 * squares.max()


def _semidefinite(gram: Gram) -> Gram:
    """The nearest Gramian: rounding may leave an eigenvalue just below 0, which a solver refuses."""
    values, vectors = torch.linalg.eigh(gram)
    return gram if values[0] >= 0 else (vectors * values.clamp(min=0)) @ vectors.T


Combiner = Callable[[Gram, Weights, torch.Generator], Weights]

COMBINERS: Mapping[str, Combiner] = {
    "sum": weighted_sum,
    "pcgrad": pcgrad,
    "mgda": mgda,
    "cagrad": cagrad,
    "upgrad": upgrad,
}


def combiner(name: str, cagrad_c: float) -> Combiner:
    """The combiner of that name, with its constant if it has one."""
    return partial(cagrad, c=cagrad_c) if name == "cagrad" else COMBINERS[name]


def rehearse(name: str) -> None:
    """Combine two small conflicting gradients, so that a missing solver shows now and not in the first step.

    Raises:
        ImportError: a package that the combiner needs is not installed.
    """
    conflict = torch.tensor([[1.0, -0.5], [-0.5, 1.0]], dtype=torch.float64)
    COMBINERS[name](conflict, torch.ones(2, dtype=torch.float64), torch.Generator())


# ---- diagnostics of the gradients from the Gramian


def norms(gram: Gram) -> Weights:
    """‖gᵢ‖ = √Gᵢᵢ"""
    return gram.diagonal().sqrt()


def cosine(gram: Gram) -> Gram:
    """cos(gᵢ, gⱼ) = Gᵢⱼ / (‖gᵢ‖ ‖gⱼ‖); 0 throughout the row and column of a zero gradient, which has no direction."""
    lengths = norms(gram)
    scale = lengths[:, None] * lengths
    return torch.where(scale > 0, gram / scale, 0.0).clamp(-1, 1)


def min_cosine(gram: Gram) -> float | None:
    """The smallest cosine between two different objectives, zero gradients left out; None if no pair remains."""
    alive = norms(gram) > 0
    pairs = (alive[:, None] & alive).triu(1)
    return cosine(gram)[pairs].min().item() if pairs.any() else None


def _wide(device: torch.device) -> torch.dtype:
    """float64, but for Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def _flat(grad: Tensor) -> Sequence[Tensor]:
    """Views of consecutive elements, never more than CHUNK of them."""
    flat = grad.detach().reshape(-1)
    return [flat[i : i + CHUNK] for i in range(0, len(flat), CHUNK)] or [flat]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    wide = _wide(a.device)
    pieces = zip(_flat(a), _flat(b), strict=True)
    return torch.stack([torch.dot(x.to(wide), y.to(wide)) for x, y in pieces]).sum()
