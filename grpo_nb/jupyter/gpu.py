"""Use of the GPU that this kernel trains on: a bar of its memory, and its utilisation."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_nb.printable import clean_logger
from grpo_nb.report.markup import html

logger = clean_logger(__name__)

SECONDS = 1.0
"""Between two readings, at least."""


@dataclass(frozen=True)
class Reading:
    """Use of one GPU by all processes."""

    used: float
    """GiB."""
    total: float
    """GiB."""
    utilisation: int | None = None
    """Percent of the driver's last sample period in which a kernel ran; None where it cannot be read."""

    @property
    def share(self) -> int:
        """Memory used, percent."""
        return min(max(round(100 * self.used / self.total), 0), 100) if self.total > 0 else 0

    @property
    def words(self) -> str:
        """
        >>> Reading(12, 16, 97).words
        'GPU 12.0 of 16.0 GiB, 97% busy'
        """
        busy = "" if self.utilisation is None else f", {self.utilisation}% busy"
        return f"GPU {self.used:.1f} of {self.total:.1f} GiB{busy}"


Reader = Callable[[str | None], Reading | None]
"""Reads the GPU of this name, or the current one."""


class Gauge:
    """The bar of a session that trains on a GPU of this kernel; empty for any other."""

    def __init__(self, session: Any, reader: Reader | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._session, self._reader, self._clock = session, reader or read, clock
        self._at: float | None = None
        self._newest: Reading | None = None

    def html(self) -> str:
        """The bar as HTML, of a reading that is at most a second old."""
        session, device = self._session, self._session.run.config.model.device
        if not session.live or session.where == "process" or not device.startswith(("auto", "cuda")):
            return ""
        now = self._clock()
        if self._at is None or now - self._at >= SECONDS:
            self._at, self._newest = now, self._read(device if device.startswith("cuda:") else None)
        return html("gpu", reading=self._newest) if self._newest is not None else ""

    def _read(self, device: str | None) -> Reading | None:
        try:
            return self._reader(device)
        except Exception:  # without weight for training
            logger.debug("the GPU could not be read", exc_info=True)
            return None


def read(device: str | None) -> Reading | None:
    """Memory and utilisation of a GPU; None while this process uses none, as a reading would set one up."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info(device)
    return Reading((total - free) / 2**30, total / 2**30, _utilisation(torch, device))


def _utilisation(torch: Any, device: str | None) -> int | None:
    try:
        return int(torch.cuda.utilization(device))
    except Exception:  # the package pynvml is not installed, or the driver does not answer
        return None
