"""Metric rows made by hand: a healthy run, and changes that make it ill."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Row = dict[str, Any]
OBJECTIVES = ("fairness", "hallucination")


def healthy(steps: int = 60, seed: int = 0) -> list[Row]:
    """A run as it should be: reward rises, KL enters its band, answers stay whole, the weights move a little."""
    noise = np.random.default_rng(seed)
    return [_row(step, steps, noise) for step in range(1, steps + 1)]


def ill(change: Callable[[Row], dict[str, Any]], steps: int = 60, since: int = 1) -> list[Row]:
    """The healthy run with `change(row)` merged into every row from step `since` on."""
    return [row | change(row) if row["step"] >= since else row for row in healthy(steps)]


def _row(step: int, steps: int, noise: np.random.Generator) -> Row:
    done = 1 - math.exp(-3 * (step - 1) / steps)
    row: Row = {
        "step": step,
        "status": "clipped" if step % 17 == 0 else "ok",
        "loss": 0.04 * 0.05 * done,
        "ratio/max_deviation": 0.0,
        "clip_ratio/low": 0.0,
        "clip_ratio/high": 0.0,
        "sampler_logp_difference": 1e-7,
        "grad/norm": 1.3 if step % 17 == 0 else float(noise.uniform(0.2, 0.6)),
        "grad/update": float(noise.uniform(1e-4, 2e-4)),
        "grad/cosine": float(noise.normal(0.1, 0.2)),
        "lr": 3e-4,
        "temperature": 1.0,
        "tokens": 900,
        "time/rollout": 0.5,
        "time/step": 1.0,
        "memory/peak_mib": 800.0 if step < 4 else 850.0,
    }
    for i, name in enumerate(OBJECTIVES):
        row |= _objective(name, step, 0.5 + 0.3 * done + 0.05 * i, done, noise)
    return row


def _objective(name: str, step: int, correct: float, done: float, noise: np.random.Generator) -> Row:
    correct += float(noise.normal(0, 0.02))
    return {
        f"reward/{name}/mean": correct + 0.2 * (1 - correct),
        f"reward/{name}/std": 0.3 - 0.1 * done,
        f"reward/{name}/part/task": correct,
        f"scored/{name}": 1.0,
        f"frac_reward_zero_std/{name}": 0.15 + 0.3 * done,
        f"unscored_groups/{name}": 0,
        f"label/{name}/correct": correct,
        f"label/{name}/wrong": 0.98 - correct,
        f"label/{name}/unparsed": 0.02,
        f"kl/{name}": 0.0 if step == 1 else 0.05 * done + float(noise.uniform(0, 0.005)),
        f"kl_k1/{name}": 0.0 if step == 1 else 0.05 * done,
        f"beta/{name}": 0.04 * 0.85 ** (step // 20),
        f"beta_mode/{name}": "auto",
        f"length/{name}/mean": 6.0,
        f"length/{name}/p50": 6.0,
        f"length/{name}/p95": 9.0,
        f"truncation/{name}": 0.02,
        f"entropy/{name}": 0.5 - 0.3 * done,
        f"grad/norm/{name}": 0.3,
    }
