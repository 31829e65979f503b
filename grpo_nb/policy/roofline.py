"""Floors: seconds that the bytes and the products of a phase alone take, at rates measured on the device.

Drawing reads the weights once a token, and the keys and values of every row; training multiplies. What a phase takes
beyond its floor goes to launches, small matrices, waiting, and work that the floor leaves out (attention, the loss).
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from grpo_nb.policy.memory_terms import GIB, kv_bytes_per_token
from grpo_nb.policy.shapes import ModelShape

REPEATS, WARM_UP = 10, 2
OPERATIONS = 2
"""A weight and a token cost a multiplication and an addition."""


@dataclass(frozen=True)
class Rates:
    """Highest rates of a device on a single operation."""

    bandwidth: float
    """Bytes a second that a copy reads and writes."""
    products: float
    """Operations a second of a large matrix product."""


@dataclass(frozen=True)
class StepTokens:
    """Tokens of a step, means over several."""

    rows: int
    """Completions."""
    prompts: float
    """Tokens of the prompts together, each prompt once."""
    completions: float
    """Tokens of the completions together."""
    group: int
    """Completions of a prompt."""

    @property
    def length(self) -> float:
        """Mean tokens of a completion: at least so many decoding steps are needed."""
        return self.completions / self.rows

    @property
    def prompt_length(self) -> float:
        """Mean tokens of a prompt."""
        return self.prompts * self.group / self.rows


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The device's copy bandwidth, and its matrix rate at this type; about a second on a CPU."""
    return Rates(copy_bandwidth(device), matrix_rate(device, dtype))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy on the device reads and writes: the median of ten copies of 1 GiB (CPU: 64 MiB)."""
    source = torch.empty(GIB if device.type == "cuda" else GIB // 16, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_seconds(device, lambda: target.copy_(source))


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a square matrix product of side 8,192 (CPU: 1,024) at this type, the median of ten."""
    size = 8192 if device.type == "cuda" else 1024
    factor = torch.randn(size, size, dtype=torch.float32, device=device).to(dtype)  # zeros would be faster
    product = torch.empty_like(factor)
    return OPERATIONS * size**3 / _median_seconds(device, lambda: torch.mm(factor, factor, out=product))


def decode_bytes(weights: int, kv_per_token: int, rows: int, prompt: float, steps: float) -> float:
    """Bytes read to sample `steps` tokens a row: the weights once a token, and each row's keys and values.

    Args:
        weights: bytes of the matrices that a token reads.
        kv_per_token: bytes of one token's keys and values.
        prompt: tokens of a row before the first sampled one.
    """
    return steps * (weights + kv_per_token * rows * (prompt + steps / 2))


def rollout_floor(shape: ModelShape, tokens: StepTokens, rates: Rates, item: int) -> float:
    """Seconds of prefill by products, and of decoding by bytes or products, whichever take longer.

    Args:
        item: bytes of a weight, and of a key or value.
    """
    read = decode_bytes(
        item * _matrices(shape),
        kv_bytes_per_token(shape, item),
        tokens.rows,
        tokens.prompt_length,
        tokens.length,
    )
    multiplied = OPERATIONS * tokens.completions * _matrices(shape) / rates.products
    return OPERATIONS * tokens.prompts * shape.linear_weights / rates.products + max(read / rates.bandwidth, multiplied)


def train_floor(shape: ModelShape, tokens: StepTokens, rates: Rates, *, full: bool, passes: int = 1) -> float:
    """Seconds of the products of `passes` over the step's tokens, forward and backward; each prompt once.

    Backward costs a forward pass for the activations' gradient, and where all weights learn one more for theirs.
    """
    weighed = (tokens.prompts + tokens.completions) * shape.linear_weights
    weighed += tokens.completions * shape.vocabulary * shape.hidden
    return passes * (3 if full else 2) * OPERATIONS * weighed / rates.products


def _matrices(shape: ModelShape) -> int:
    """Weights that a sampled token is multiplied with: the linear layers and the head."""
    return shape.linear_weights + shape.vocabulary * shape.hidden


def _median_seconds(device: torch.device, do: Callable[[], object]) -> float:
    taken = []
    for _ in range(WARM_UP + REPEATS):
        began = now(device)
        do()
        taken.append(now(device) - began)
    return max(statistics.median(taken[WARM_UP:]), 1e-9)


def now(device: torch.device) -> float:
    """Time in seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
