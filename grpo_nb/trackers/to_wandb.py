"""W&B: a run of the project `grpo_nb` (or WANDB_PROJECT), online or in the mode of WANDB_MODE."""

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from grpo_nb.config.trackers import PACKAGES, wandb_mode
from grpo_nb.trackers.tracker import AXES, About, Point, Tracker

INIT_SECONDS, FINISH_SECONDS = 15.0, 30.0
"""Seconds for the server's first answer; and at the end, for uploads: the rest stays on this disk, for `wandb sync`."""


class WandB:
    """A run of W&B. Its own count of steps continues from SFT to GRPO, so that it drops repeated rows."""

    newest, fresh = None, False

    def __init__(self, about: About) -> None:
        wandb: Any = import_module("wandb")
        self._sft_steps, self._defined = about.sft_steps, set[str]()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "grpo_nb",
            id=about.id,
            name=about.name,
            resume="allow",
            reinit="create_new",  # leaves a run that the notebook has opened itself alone
            config=dict(about.settings),
            settings=wandb.Settings(**_settings()),
        )

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.log == "evaluations":
                self._run.summary.update(dict(point.numbers))
                continue
            axis = AXES[point.log]
            for key in point.numbers.keys() - self._defined:
                self._run.define_metric(key, step_metric=axis)
                self._defined.add(key)
            step = point.step + (self._sft_steps if point.log == "metrics" else 0)
            self._run.log({**point.numbers, axis: point.step}, step=step, commit=True)

    def close(self) -> None:
        self._run.finish()


def _settings() -> dict[str, Any]:
    """Settings that send mirrored rows only: no console, no code, no names of machine, user or repository."""
    server = PACKAGES["wandb"].server()
    return {
        "mode": wandb_mode(),
        **({"base_url": server.url} if server is not None else {}),  # the confirmed one, whatever a file contains
        "silent": True,
        "console": "off",
        "disable_git": True,
        "disable_code": True,
        "save_code": False,
        "disable_job_creation": True,
        "program": "grpo_nb",
        "host": "",
        "x_disable_stats": True,
        "x_disable_meta": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        "init_timeout": INIT_SECONDS,
        "finish_timeout": FINISH_SECONDS,
    }


def opened(about: About) -> Tracker:
    """W&B for a run."""
    return WandB(about)
