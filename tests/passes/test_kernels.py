"""The kernels compute what plain torch says: on a GPU, or with TRITON_INTERPRET=1."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_nb.passes import ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(scope="module")
def kernels() -> Any:
    pytest.importorskip("triton", reason="Triton is not installed")
    if not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("needs a CUDA GPU, or TRITON_INTERPRET=1")
    from grpo_nb.passes import kernels_triton

    return kernels_triton


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def there(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(there, value))
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def same(kernels: Any, name: str, *arguments: Any) -> None:
    expected = getattr(ops, name)(*arguments)
    found = getattr(kernels, name)(*there(arguments))
    flat = [part for one in (found, expected) for part in (one if isinstance(one, tuple) else (one,))]
    flat = [part for one in flat for part in (one if isinstance(one, list) else (one,))]
    for a, b in zip(flat[: len(flat) // 2], flat[len(flat) // 2 :], strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("adds", [True, False])
def test_the_norm(kernels: Any, adds: bool) -> None:
    x, residual = normal(3, 40, seed=1), normal(3, 40, seed=2) if adds else None
    same(kernels, "norm_grad", normal(3, 40), x, normal(40), 1e-6, residual)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("d", [8, 24])
def test_the_rotation(kernels: Any, d: int, normed: bool) -> None:
    grads = normal(3, 4, d), normal(3, 2, d, seed=1), normal(3, 2, d, seed=2)
    norms = (normal(d, seed=3), normal(d, seed=4)) if normed else None
    turn = normal(3, d, seed=5), normal(3, d, seed=6)
    same(kernels, "rotate_grad", grads, normal(3, 8 * d), norms, 1e-6, turn)
    same(kernels, "rotate", normal(3, 8 * d), (4, 2, d), norms, 1e-6, turn)


def test_what_is_seen_in_two_parts_is_joined(kernels: Any) -> None:
    parts = normal(5, 6, 24), normal(6, 5), normal(5, 6, 24, seed=1), normal(6, 5, seed=1)
    found = there(tuple(part.clone() for part in parts))
    kernels.join(*found)
    ops.join(*parts)
    for n in (0, 1, 3):
        torch.testing.assert_close(found[n].cpu(), parts[n], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(parts[1], parts[3], atol=0, rtol=0)


def test_the_gate(kernels: Any) -> None:
    same(kernels, "gate_grad", normal(3, 1100), normal(3, 2200))


@pytest.mark.parametrize("pulls", [0, 1, 2])
@pytest.mark.parametrize("vocabulary", [25, 5000])
def test_the_head(kernels: Any, vocabulary: int, pulls: int) -> None:
    scores = 3 * normal(4, vocabulary)
    scores[:, 1::3] = -torch.inf
    targets = torch.tensor([0, 2, vocabulary - 1 - (vocabulary - 2) % 3 % 2, 3])
    same(kernels, "head_scores", scores, targets, 0.7, pulls)
