"""One gradient per objective in, one out, by way of the Gramian.

The m x m matrix of dot products holds all that a combination needs: norms, cosines and conflicts. So a combiner
is a function of small numbers that is tested without a model, the dashboard's cosine comes from the same matrix,
and the gradients themselves are read twice and never concatenated. A gradient is a dict from parameter name to
tensor; a parameter that an objective does not reach may be left out and counts as 0.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

Gradient = Mapping[str, Tensor]
Gram = Float[Tensor, "objective objective"]
Weights = Float[Tensor, "objective"]

CHUNK = 2**22
"""Elements widened to float64 at a time (32 MiB), however large the parameter."""


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


def weighted_sum(gram: Gram, weights: Weights, generator: torch.Generator) -> Weights:
    """w: the objectives' weights as they are."""
    return weights


def pcgrad(gram: Gram, weights: Weights, generator: torch.Generator) -> Weights:
    """gᵢ ← gᵢ − (gᵢ·gⱼ / gⱼ·gⱼ) gⱼ for each j with gᵢ·gⱼ < 0, in random order; then Σᵢ gᵢ.  Yu et al. 2020, Alg. 1.

    The gradients are the weighted ones, wᵢgᵢ. A zero gradient conflicts with nobody, and without a conflict the
    result is `weights`. A Gramian that is not finite changes nothing either: the step's guard sees it.
    """
    # TorchJD's PCGradWeighting is the oracle of the tests, but it draws its order from torch's global generator.
    # Forking that is no cure in a notebook: any other thread that draws meanwhile (a cell, a second run) changes
    # the order, and has its own draws rewound. Measured: 801 of 2000 forked results differed.
    weights = weights.to(gram.dtype)
    scaled = weights[:, None] * gram * weights
    projected = torch.eye(len(weights), dtype=gram.dtype)  # row i: the i-th gradient in terms of the original ones
    for i, row in enumerate(projected):
        for j in torch.randperm(len(weights), generator=generator).tolist():
            dot = row @ scaled[j]
            if j != i and dot < 0:
                row[j] -= dot / scaled[j, j]
    return projected.sum(0) * weights


Combiner = Callable[[Gram, Weights, torch.Generator], Weights]

COMBINERS: Mapping[str, Combiner] = {"sum": weighted_sum, "pcgrad": pcgrad}


# ---- what the Gramian says of the gradients


def norms(gram: Gram) -> Weights:
    """‖gᵢ‖ = √Gᵢᵢ"""
    return gram.diagonal().sqrt()


def combined_norm(gram: Gram, weights: Weights) -> Float[Tensor, ""]:
    """‖Σᵢ wᵢ gᵢ‖ = √(wᵀ G w)"""
    weights = weights.to(gram.dtype)
    return (weights @ gram @ weights).clamp(min=0).sqrt()


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
