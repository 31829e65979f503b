"""A run small enough for tests: the demo world and model, a handful of short steps."""

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch

from grpo_nb import presets
from grpo_nb.config import Config
from grpo_nb.run.run import Run
from grpo_nb.tasks import Task, load_task
from grpo_nb.types import Example, StepStats

SMALL = {
    "run.steps": 4,
    "run.checkpoint_every": 2,
    "run.eval_examples": 16,
    "run.quick_eval_every": 0,
    "batch.prompts": 4,
    "batch.group_size": 4,
    "batch.micro_batch": 16,
    "sft.steps": 3,
    "sft.batch": 16,
    "sft.micro_batch": 16,
}
"""What makes the demo tiny, by dotted names."""
VOLATILE = ("time/", "memory/", "cost/")


def varied(completion_ids: list[list[int]]) -> list[float]:
    """A reward function that tells any two answers apart, so that an untrained model has something to learn."""
    return [sum(ids) % 11 / 11 for ids in completion_ids]


REWARDS = {"fairness": [varied], "hallucination": [varied]}


class FirstOf:
    """A demo task cut to its first examples: encoding them all is most of a tiny run's time."""

    def __init__(self, task: Task, count: int) -> None:
        self.name, self.score, self._task, self._count = task.name, task.score, task, count

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        return self._task.examples(split)[: self._count]


@functools.cache
def demo_tasks() -> tuple[Path, dict[str, Task]]:
    """The demo world of seed 0, written once; while its tasks are in use, no run of a test parses that data again."""
    folder = Path(tempfile.mkdtemp())
    objectives = presets.demo().objectives
    return folder / "data", {name: load_task(objective, folder, 0) for name, objective in objectives.items()}


@functools.cache
def small_tasks() -> dict[str, Task]:
    return {name: FirstOf(task, 24) for name, task in demo_tasks()[1].items()}


@functools.cache
def small_pairs() -> str:
    """A file of the first 400 pairs of the demo's SFT data."""
    data = demo_tasks()[0]
    path = data.parent / "pairs.jsonl"
    path.write_text("".join((data / "sft.jsonl").read_text().splitlines(keepends=True)[:400]))
    return str(path)


def tiny_config(**changes: Any) -> Config:
    """The demo with 4 prompts x 4 completions, 4 steps, 3 SFT steps; dotted names with `__` for the dot."""
    return presets.demo().replace(**SMALL | {key.replace("__", "."): value for key, value in changes.items()})


def tiny_run(folder: Path, name: str = "tiny", **changes: Any) -> Run:
    run = Run.create(folder / name, tiny_config(**changes))
    if run.config.run.seed == 0:
        shutil.copytree(demo_tasks()[0], run.path / "data")
    return run


def edited(run: Run, **changes: Any) -> Run:
    """The run as it is opened after somebody changed its config.json with an editor."""
    config = run.config.replace(**{key.replace("__", "."): value for key, value in changes.items()})
    (run.path / "config.json").write_text(config.model_dump_json())
    return Run.open(run.path)


def stable(row: dict[str, Any]) -> dict[str, Any]:
    """A metrics row without the keys that hang on the clock and the machine."""
    return {key: value for key, value in row.items() if not key.startswith(VOLATILE)}


def rows(steps: list[StepStats]) -> list[dict[str, Any]]:
    return [stable(dict(step.metrics)) for step in steps]


def weights(run: Run) -> dict[str, torch.Tensor]:
    """The policy's trained weights in the run's newest checkpoint."""
    newest, _ = run.checkpoints.latest()
    assert newest is not None
    return newest.tensors("policy")
