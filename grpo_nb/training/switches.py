"""Switches of torch that a training needs and that are one for the process: each is on while any training needs it."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from grpo_nb.config import Config

_fills: Any = torch.utils.deterministic
_products: Any = torch.backends.cuda.matmul


class Switch:
    """`with switch.on():` sets a value of the process; the last of several blocks that overlap restores the first."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> None:
        self._lock, self._blocks = threading.Lock(), 0
        self._read, self._write, self._value = read, write, value
        self._before: Any = None

    @contextmanager
    def on(self) -> Iterator[None]:
        with self._lock:
            if self._blocks == 0:
                self._before = self._read()
                self._write(self._value)
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if self._blocks == 0:
                    self._write(self._before)


def _exactness() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), _fills.fill_uninitialized_memory


def _set_exactness(values: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(values[0])
    _fills.fill_uninitialized_memory = values[1]


EXACT = Switch(_exactness, _set_exactness, (True, False))
"""Algorithms that give the same bits each time. With them torch fills each tensor that it makes empty with NaN, for
programs that read what nobody wrote. That took half of a step's CPU time, so it is off meanwhile; a test checks that
nothing here reads such memory."""


def _rounds() -> bool:
    return bool(_products.fp32_precision == "tf32")


def _set_rounding(value: bool) -> None:
    if value != _rounds():  # by the older of torch's two names: it raises where it is read after the newer was set
        _products.allow_tf32 = value


TF32 = Switch(_rounds, _set_rounding, True)
"""float32 matrix products on NVIDIA GPUs round their inputs to TF32's 10 bits."""


@contextmanager
def deterministic(config: Config, device: torch.device) -> Iterator[None]:
    """Allow only deterministic algorithms inside the block, where requested (`auto`: on the CPU)."""
    wanted = config.run.deterministic
    if not (device.type == "cpu" if wanted == "auto" else wanted):
        yield
        return
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with EXACT.on():
        yield
