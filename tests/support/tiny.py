"""A run small enough for tests: the demo world and model, a handful of short steps."""

import functools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
import torch

from grpo_nb import presets
from grpo_nb.config import Config
from grpo_nb.policy.tokenization import TokenizerAdapter
from grpo_nb.run.run import Run
from grpo_nb.tasks import Task, demo, demo_world, load_task
from grpo_nb.types import Example, StepStats

Row = dict[str, Any]

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
NARROW = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "initializer_range": 0.12,
}
"""What makes the demo's model a tenth of its size, its log-probs as peaked at the start."""
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


def _fewer(rows: list[Row], count: int) -> list[Row]:
    """The first `count` rows of each BBQ template."""
    by_template = groupby(rows, key=lambda row: row["question_index"])
    return [row for _, template in by_template for row in islice(template, count)]


def _fewer_bbq_rows(random: Random) -> dict[str, list[Row]]:
    rows = BBQ_ROWS(random)
    first = min(rows)  # of the files in their order
    return {category: _fewer(rows[category], 24 if category == first else 4) for category in rows}


BBQ_ROWS, HALUEVAL_ROWS, SFT_ROWS = demo_world.bbq_rows, demo_world.halueval_rows, demo._sft_rows


@contextmanager
def small_worlds() -> Iterator[None]:
    """A part of the demo world is all that is written meanwhile.

    For seed 0 each split begins with the 24 examples with which the complete world's begins. Parsing the others, and
    encoding them to see whether they fit, is most of a tiny run's time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_world, "bbq_rows", _fewer_bbq_rows)
        patch.setattr(demo_world, "halueval_rows", lambda random: HALUEVAL_ROWS(random)[: 4 * 300])
        patch.setattr(demo, "_sft_rows", lambda *given: SFT_ROWS(*given)[:160])
        yield


@contextmanager
def narrow_models() -> Iterator[None]:
    """The demo's model is a small one meanwhile, in this process: most of a step's time hangs on its width."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "SIZES", demo.SIZES | NARROW)
        yield


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@contextmanager
def prompts_encoded_once() -> Iterator[None]:
    """A policy finds the ids of a prompt that one with the same tokenizer has encoded before.

    Each training encodes all of the world's prompts to see whether they fit: without it, that is a third of a tiny SFT.
    """
    write, numbers, encoded = TokenizerAdapter._write, dict[Any, int](), dict[Any, Any]()

    def find(self: TokenizerAdapter, prompt: Any, date: Any, template: Any) -> Any:
        if template != demo._TEMPLATE or not _hashable(prompt):
            return write(self, prompt, date, template)
        if "number" not in vars(self):
            tokens = self.tokenizer.backend_tokenizer.to_str(), str(self.tokenizer.special_tokens_map)
            vars(self)["number"] = numbers.setdefault((*tokens, str(self.switches)), len(numbers))
        key = vars(self)["number"], prompt, date
        if key not in encoded:
            encoded[key] = write(self, prompt, date, template)
        return encoded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenizerAdapter, "_write", find)
        yield


@functools.cache
def demo_tasks() -> tuple[Path, dict[str, Task]]:
    """Such a world of seed 0, written once; while its tasks are in use, no run of a test parses that data again."""
    folder = Path(tempfile.mkdtemp())
    objectives = presets.demo().objectives
    with small_worlds():
        return folder / "data", {name: load_task(objective, folder, 0) for name, objective in objectives.items()}


@functools.cache
def small_tasks() -> dict[str, Task]:
    return {name: FirstOf(task, 24) for name, task in demo_tasks()[1].items()}


def given() -> dict[str, Any]:
    """What a tiny GRPO is handed over: made when a test asks, since a process that collects may train nothing."""
    return {"tasks": small_tasks(), "rewards": REWARDS}


def tiny_config(**changes: Any) -> Config:
    """The demo with 4 prompts x 4 completions, 4 steps, 3 SFT steps; dotted names with `__` for the dot."""
    return presets.demo().replace(**SMALL | {key.replace("__", "."): value for key, value in changes.items()})


def tiny_run(folder: Path, name: str = "tiny", **changes: Any) -> Run:
    run = Run.create(folder / name, tiny_config(**changes))
    if run.config.run.seed == 0:
        small_world(run.path)
    return run


def small_world(folder: Path) -> None:
    """Give a run of seed 0 its data before it begins, made or not yet: it then writes no demo world of its own."""
    shutil.copytree(demo_tasks()[0], folder / "data")


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
