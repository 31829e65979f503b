"""Benchmark of the phases of a training step on this machine: `python -m grpo_nb.dev.bench --steps 20`.

Steps of a fresh run, without SFT, in a temporary folder. An untrained model seldom ends its answers, so completions
run to their cap: the figures are of the longest steps that the settings allow. The first steps are left out.

With `--random-weights` the model has the shape of the preset's and random weights, and prompts are random words: a
preset can be timed without its model and data.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from grpo_nb import presets
from grpo_nb.cli.values import setting
from grpo_nb.config import Config
from grpo_nb.dev.peer_work import BETA, OBJECTIVE, SIZES, Words, taste, words_tokenizer
from grpo_nb.metrics import keys
from grpo_nb.policy.adapters import attach
from grpo_nb.policy.loading import checkpoint_activations, pick_device, pick_dtype
from grpo_nb.policy.model import Policy
from grpo_nb.policy.shapes import config_of
from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo

WARM_UP = 2
"""Steps left out at the start: caches fill, kernels are chosen."""
PHASES = ("rollout", "score", "reference", "train")


@dataclass(frozen=True)
class Timing:
    """Seconds of one phase over the measured steps."""

    phase: str
    median: float
    fastest: float
    slowest: float
    share: float
    """Share of the median step."""


def measure(config: Config, steps: int, **given: Any) -> list[dict[str, Any]]:
    """Metrics rows of `steps` steps, after the warm-up ones; `given`: parts that `grpo` takes."""
    total = steps + WARM_UP
    bare = config.replace(**{"sft.steps": 0, "run.steps": total, "run.checkpoint_every": total})
    with tempfile.TemporaryDirectory() as folder:
        return [dict(step.metrics) for step in grpo(Run.create(Path(folder) / "bench", bare), **given)][WARM_UP:]


def random_parts(config: Config, tokens: int) -> tuple[Config, dict[str, Any]]:
    """Settings with one objective on random words, and a policy, task and reward to go with them.

    Args:
        tokens: of each prompt.
    """
    shape = config_of(config.model.name, config.run.seed)
    words = replace(SIZES["tiny"], shape={"vocab_size": shape.vocab_size}, prompt_tokens=tokens)
    shape.update({"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None})
    device = pick_device(config.model.device)
    full = config.model.train == "full"
    torch.manual_seed(config.run.seed)
    with device:
        kind = pick_dtype(config.model.dtype, device, full)
        model = AutoModelForCausalLM.from_config(shape, dtype=kind, attn_implementation="sdpa")
    if config.model.gradient_checkpointing:
        checkpoint_activations(model)
    learner = model if full else attach(model, config.model, config.model.name, config.run.seed)
    parts = {"policy": Policy(learner, words_tokenizer(words)), "tasks": {OBJECTIVE: Words(words)}}
    objective = {OBJECTIVE: {"task": OBJECTIVE, "beta": BETA}}
    return config.replace(objectives=objective), {**parts, "rewards": {OBJECTIVE: [taste]}}


def timings(rows: Sequence[Mapping[str, Any]]) -> list[Timing]:
    """Timings of the phases, the rest of the step, and the step."""
    seconds = {phase: [row[keys.TIME.of(phase)] for row in rows] for phase in PHASES}
    step = [row[keys.TIME_STEP] for row in rows]
    seconds["other"] = [whole - sum(parts) for whole, *parts in zip(step, *seconds.values(), strict=True)]
    seconds["step"] = step
    whole = statistics.median(step)
    return [
        Timing(phase, statistics.median(s), min(s), max(s), statistics.median(s) / whole)
        for phase, s in seconds.items()
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The timings as a table."""
    drawn = Table(box=None, pad_edge=False)
    for name in ("phase", "median", "fastest", "slowest", "share"):
        drawn.add_column(name, justify="left" if name == "phase" else "right")
    for t in timings(rows):
        drawn.add_row(t.phase, *(f"{s * 1e3:.1f} ms" for s in (t.median, t.fastest, t.slowest)), f"{t.share:.0%}")
    return drawn


def notes(rows: Sequence[Mapping[str, Any]], config: Config, command: str) -> list[str]:
    """Notes on the way the timings were made, and figures that follow from them."""
    tokens = statistics.median(row[keys.TOKENS] for row in rows)
    rate = statistics.median(row[keys.TOKENS] / row[keys.TIME.of("rollout")] for row in rows)
    return [
        config.geometry,
        f"{tokens:.0f} completion tokens a step, {rate:.0f} a second while they are drawn",
        f"peak memory {max(row[keys.MEMORY_PEAK] for row in rows):.0f} MiB; {machine()}",
        f"made by: {command}",
    ]


def machine() -> str:
    """Machine and versions that the figures depend on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    return f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo_nb.dev.bench", description=__doc__)
    parser.add_argument("--preset", choices=sorted(presets.PRESETS), default="demo")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--random-weights", type=int, metavar="TOKENS", help="no model, no data: prompts of TOKENS tokens"
    )
    parser.add_argument("--set", dest="changes", type=setting, action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}; needs 1 or more")
    config = presets.PRESETS[arguments.preset]().replace(**dict(arguments.changes))
    changed = "".join(f" --set {key}={value}" for key, value in arguments.changes)
    command = f"python -m grpo_nb.dev.bench --preset {arguments.preset} --steps {arguments.steps}{changed}"
    given: dict[str, Any] = {}
    if arguments.random_weights is not None:
        command += f" --random-weights {arguments.random_weights}"
        config, given = random_parts(config, arguments.random_weights)
    rows = measure(config, arguments.steps, **given)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table(rows))
    for line in notes(rows, config, command):
        console.print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
