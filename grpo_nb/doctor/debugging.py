"""`debug_mode`: errors name the operation that caused them, at the price of speed."""

import os
import sys
from dataclasses import dataclass

VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "NCCL_DEBUG": "INFO",
}
"""Environment variables that torch and CUDA read when they start."""


@dataclass(frozen=True)
class DebugMode:
    """Debug options that are on, and those that need a new process."""

    on: tuple[str, ...]
    too_late: tuple[str, ...]

    def __str__(self) -> str:
        if not self.too_late:
            return f"debug mode: {', '.join(self.on) or 'nothing'} on"
        return (
            f"debug mode: {', '.join(self.on)} on. CUDA runs already and has read {', '.join(self.too_late)} without "
            "them. Restart the kernel and call debug_mode() first, or set them before Python starts."
        )


def debug_mode(on: bool = True) -> DebugMode:
    """Switch anomaly detection on, and the variables that CUDA reads at its start; several times slower. False switches
    it off.

    Anomaly detection raises in the backward pass and names the operation whose gradient is nan. CUDA_LAUNCH_BLOCKING
    lets a device-side assert show the line that caused it; on a GPU the allocator records who allocated what, for
    `memory_snapshot`.
    """
    import torch

    running = torch.cuda.is_initialized()
    for name, value in VARIABLES.items():
        if on:
            os.environ.setdefault(name, value)
        else:
            os.environ.pop(name, None)
    torch.autograd.set_detect_anomaly(on)
    if torch.cuda.is_available() and sys.platform == "linux":
        torch.cuda.memory._record_memory_history("all" if on else None)
    late = tuple(VARIABLES) if on and running else ()
    set_now = tuple(name for name in VARIABLES if on and not running)
    return DebugMode(("anomaly detection", *set_now) if on else (), late)
