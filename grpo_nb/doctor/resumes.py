"""Resumes that were not exact: a step repeated after a resume with different results."""

import json
import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from grpo_nb.metrics import keys
from grpo_nb.rules.finding import Finding, Row
from grpo_nb.run.dependencies_file import CHANGE, OPTIMIZER
from grpo_nb.run.run import Run
from grpo_nb.storage.journal import Journal

MAY_DIFFER = frozenset({"time", "memory", "cost", "user", "judge"})
"""First parts of keys whose values depend on the clock, the machine, or a user's code."""
COMPUTES = ("engine", "random_stream", "shares_prompts", "passes", "micro_batch", "rows_at_once")
"""Fields of a start's event that choose the bits."""
MACHINE = ("python", "torch", "transformers", "peft", "device", "threads")
MOST_KEYS = 5
"""Keys that a finding shows."""


def new_moments(run: Run) -> Iterator[Finding]:
    """Resumes that began the optimizer's moments anew, since their checkpoint had none."""
    for event in _accepted(run):
        step = int(event.get("step") or 0)
        yield Finding(
            "moments_restarted",
            "info",
            step,
            f"the checkpoint of step {step} had no {OPTIMIZER}.safetensors, which was accepted: Adam's moments began "
            "anew, so the steps after it differ from those of an uninterrupted run. For about ten steps each update "
            "follows its own gradient alone, and may be larger than usual.",
            {"dependency": OPTIMIZER},
            f"nothing, if reward and {keys.KL.below()}* continue as before; else resume from there with a lower "
            "learning_rate for the first ten steps. Keep a copy of the file: with it a resume is exact",
        )


def _accepted(run: Run) -> Iterator[Mapping[str, Any]]:
    accepted = run.stored("events").having("kind", {CHANGE})
    return (event for event in accepted if event.get("dependency") == OPTIMIZER)


def inexact(run: Run) -> Iterator[Finding]:
    """Compare the first step after each resume with its earlier result in metrics.discarded.jsonl."""
    if not (run.path / "metrics.discarded.jsonl").is_file():
        return
    before = {int(row["step"]): row for row in Journal(run.path / "metrics.discarded.jsonl").forwards()}
    starts = [*run.stored("events").having("kind", {"start", "resume"})]
    resumed = {int(e.get("step") or 0): (was, e) for was, e in pairwise(starts)}
    for event in _accepted(run):  # `new_moments` explains those
        resumed.pop(int(event.get("step") or 0), None)
    for row in run.oldest_first("metrics"):
        step = int(row["step"])
        if step - 1 not in resumed or step not in before:
            continue
        was, now = resumed[step - 1]
        differences = _differences(before[step], row)
        if differences and not _changed(was, now, COMPUTES) and _same_knobs(before[step], row):
            yield _finding(step, differences, was, now)


def _finding(
    step: int, differences: Mapping[str, tuple[Any, Any]], was: Mapping[str, Any], now: Mapping[str, Any]
) -> Finding:
    moved = [name for name in ("fingerprint", *MACHINE) if was.get(name) != now.get(name)]
    shown = "; ".join(f"{key} was {a!r}, is {b!r}" for key, (a, b) in [*differences.items()][:MOST_KEYS])
    others = f" Changed with it: {', '.join(moved)}." if moved else ""
    exact = not moved and str(now.get("device", "")).startswith("cpu") and "server" not in now
    return Finding(
        "resume_inexact",
        "warning" if exact else "info",
        step,
        f"step {step} was done twice, before and after a resume, and {len(differences)} of its metrics differ: {shown}."
        + others,
        {"differences": {key: list(pair) for key, pair in differences.items()}, "changed": moved},
        "look for randomness or state outside the run: a reward function or an engine of your own that draws numbers, "
        "counts calls or keeps a cache; with (seed, step) alone they repeat themselves"
        if exact
        else "nothing, if the results agree to rounding: other code, versions or GPU operations give other bits, and "
        "so does other load on a server; run.deterministic=true makes a GPU repeat its bits",
        "warn" if exact else "none",
    )


def _differences(before: Row, now: Row) -> dict[str, tuple[Any, Any]]:
    shared = [key for key in before if key in now and key.partition("/")[0] not in MAY_DIFFER]
    return {key: (before[key], now[key]) for key in shared if not _equal(before[key], now[key])}


def _equal(a: Any, b: Any) -> bool:
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or bool(a == b) or json.dumps(a) == json.dumps(b)


def _changed(was: Mapping[str, Any], now: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return any(was.get(name) != now.get(name) for name in names)


def _same_knobs(before: Row, now: Row) -> bool:
    """Whether no knob changed in between: rates and betas of the first step equal those before."""
    return all(before.get(key) == now.get(key) for key in before if key in (keys.LR, keys.TEMPERATURE) or _beta(key))


def _beta(key: str) -> bool:
    return keys.BETA.has(key) or keys.BETA_MODE.has(key)
