"""What a run of the demo's settings has on disk: made by hand, without training."""

from pathlib import Path

import torch

from grpo_nb import presets
from grpo_nb.run.run import Run

CONFIG = presets.demo()
STEPS = CONFIG.run.steps


def log(run: Run, *steps: int) -> None:
    for step in steps:
        run.log_samples([{"step": step, "text": "a"}, {"step": step, "text": "b"}])
        run.log_metrics({"step": step, "loss": step / 10})


def save(run: Run, step: int) -> None:
    run.checkpoints.save(step, {"policy": {"w": torch.full((2,), float(step))}}, {"step": step})


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
