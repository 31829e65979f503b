"""Seconds and peak memory of a step's phases on random weights: `python -m grpo_nb.dev.passes_bench --size 8b`.

Runs the work of `grpo_nb.dev.peer`, this trainer alone, once with the model's own passes and once with the default
ones. Nothing is downloaded. The first steps are left out of the medians; the first one's seconds are shown by
themselves.
"""

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from grpo_nb.cli.values import setting
from grpo_nb.dev.bench import PHASES, WARM_UP, machine
from grpo_nb.dev.peer import GIB
from grpo_nb.dev.peer_work import SIZES, Work, ours
from grpo_nb.metrics import keys
from grpo_nb.policy.roofline import now
from grpo_nb.training import metrics


@dataclass(frozen=True)
class Figures:
    """Figures of one way to compute."""

    first: float
    """Seconds of the first step."""
    seconds: Mapping[str, float]
    """Median by phase, and of the step."""
    peaks: Mapping[str, float]
    """GiB by phase; 0 on the CPU."""


def measure(work: Work, device: torch.device, steps: int, changes: Mapping[str, Any]) -> Figures:
    """The phases of `steps` steps after the warm-up ones."""
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, _peaks(device, peaks):
        walk, rows = ours(work, device, changes, Path(folder)), []
        began = time.perf_counter()
        for _ in range(WARM_UP + steps):
            rows.append(next(walk).metrics)
            if len(rows) == 1:
                first = now(device) - began
            if len(rows) == WARM_UP:
                peaks.clear()
        walk.close()
    names = {**{phase: keys.TIME.of(phase) for phase in PHASES}, "step": keys.TIME_STEP}
    seconds = {name: statistics.median(float(row[key]) for row in rows[WARM_UP:]) for name, key in names.items()}
    gc.collect()
    return Figures(first, seconds, peaks)


def table(columns: Mapping[str, Figures]) -> Table:
    """Seconds and GiB, a row a phase."""
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("")
    for name in columns:
        drawn.add_column(name, justify="right")
        drawn.add_column("peak", justify="right")
    for phase in (*PHASES, "step"):
        cells = ((f"{f.seconds[phase]:.3f} s", _gib(f.peaks, phase)) for f in columns.values())
        drawn.add_row(phase, *(cell for pair in cells for cell in pair))
    drawn.add_row("first step", *(cell for f in columns.values() for cell in (f"{f.first:.1f} s", "")))
    return drawn


def _gib(peaks: Mapping[str, float], phase: str) -> str:
    found = max(peaks.values(), default=0.0) if phase == "step" else peaks.get(phase, 0.0)
    return f"{found:.1f} GiB" if found else ""


@contextlib.contextmanager
def _peaks(device: torch.device, found: dict[str, float]) -> Iterator[None]:
    """Wait for the device at both ends of every phase, and put the phase's peak memory into `found`."""
    plain = metrics.Clock.__call__

    @contextlib.contextmanager
    def watched(self: metrics.Clock, phase: str) -> Iterator[None]:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        now(device)
        with plain(self, phase):
            yield
            now(device)
        if device.type == "cuda":
            found[phase] = max(found.get(phase, 0.0), torch.cuda.max_memory_allocated() / GIB)

    vars_of: Any = metrics.Clock
    try:
        vars_of.__call__ = watched
        yield
    finally:
        vars_of.__call__ = plain


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo_nb.dev.passes_bench", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--set", dest="changes", type=setting, action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}; needs 1 or more")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work, own = SIZES[arguments.size], dict(arguments.changes)
    ways = {"model's own": own | {"batch.passes": "model"}, "as it comes": own}
    found = {name: measure(work, device, arguments.steps, changes) for name, changes in ways.items()}
    console = Console(soft_wrap=True, highlight=False)
    console.print(table(found))
    changed = "".join(f" --set {key}={value}" for key, value in own.items())
    console.print(
        f"{work.prompts} prompts x {work.group}, {work.prompt_tokens} + {work.completion_tokens} tokens; {machine()}"
    )
    console.print(
        f"made by: python -m grpo_nb.dev.passes_bench --size {arguments.size} --steps {arguments.steps}{changed}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
