"""Held-out evaluation of a stage of a run, with intervals, and what changed between stages.

The pool of examples, the uniforms and the bootstrap's draws are functions of the run's seed alone: every stage
answers the same questions with the same luck, so that differences between stages are paired.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from grpo_nb import seeding, training
from grpo_nb.checkpoints import Checkpoint
from grpo_nb.intervals import RESAMPLES, bootstrap, interval, percentiles
from grpo_nb.model import Policy, load_policy
from grpo_nb.rewards import task_scores
from grpo_nb.rollout import Engine
from grpo_nb.rollout import engine as engine_named
from grpo_nb.run import Run, RunError
from grpo_nb.tasks import DataError, Task, read_examples, summarise
from grpo_nb.types import Example, Rollouts, Score

log = logging.getLogger(__name__)

Split = Literal["train", "test"]
Mode = Literal["greedy", "sample"]
Stage = Literal["base", "sft", "latest"] | int
"""The model as loaded, the newest SFT result, the newest GRPO checkpoint, or the checkpoint of a step."""

COLUMNS = ["stage", "step", "split", "mode", "objective", "metric", "value", "low", "high", "n"]

Row = dict[str, Any]


def evaluate(
    run: Run,
    *,
    split: Split = "test",
    mode: Mode = "greedy",
    stage: Stage = "latest",
    policy: Policy | None = None,
    tasks: Mapping[str, Task] | None = None,
    limit: int | None = None,
    engine: Engine | str = "eager",
) -> pd.DataFrame:
    """Task measures of one stage on held-out examples, with 95% intervals; also appended to evaluations.jsonl.

    Intervals are percentiles of a bootstrap over clusters (all questions of one template, or on one text, count as
    one draw), which is what makes them honest where questions resemble each other.

    Args:
        mode: `greedy` takes the likeliest token; `sample` draws at `sampling.temperature`.
        policy: evaluated as it is, and `stage` only names it; None: the stage's weights are restored.
        tasks: own tasks by objective, as in `train.grpo`.
        limit: examples per objective, at most; None: `run.eval_examples`.

    Returns:
        One row for each objective and metric: stage, step, split, mode, objective, metric, value, low, high, n.

    Raises:
        RunError: the stage has no checkpoint.
        DataError: a split without examples.
        RewardError: a task raised, or gave something that is no score.
        ValueError: an unknown split or mode.
    """
    _check_words(split, mode)
    built = engine_named(engine) if isinstance(engine, str) else engine
    # The step is read off the checkpoint before the weights are, and both from the one checkpoint.
    checkpoint = None if policy is not None else stage_checkpoint(run, stage)
    learner = policy or _restored(run, checkpoint)
    step = run.last_step() or 0 if policy is not None and stage == "latest" else _grpo_step(stage, checkpoint)
    tables = []
    for name, task in training.load_tasks(run.config, run.path, tasks).items():
        pool = examples_of(run, name, task, split, limit)
        rollouts = _answers(run, name, learner, pool, mode, built)
        scores = task_scores(task, pool, rollouts.texts)
        row = {"stage": _stage_name(stage), "step": step, "split": split, "mode": mode, "objective": name}
        row |= judged(task, pool, scores, seeding.derived_seed(run.config.run.seed, 0, f"bootstrap/{name}"))
        run.log_evaluation(row)
        tables.append(tidy(row))
    return pd.concat(tables, ignore_index=True)


def restore_policy(run: Run, stage: Stage) -> Policy:
    """The run's model with the weights of one stage.

    Raises:
        RunError: the stage has no checkpoint; the message says what makes one.
    """
    return _restored(run, stage_checkpoint(run, stage))


def stage_checkpoint(run: Run, stage: Stage) -> Checkpoint | None:
    """The checkpoint that holds a stage's weights; None for the model as loaded.

    Raises:
        RunError: there is none yet.
    """
    if stage == "base" or (stage == "sft" and run.config.sft.steps == 0):
        return None
    if isinstance(stage, int):
        return run.checkpoints.load(stage)
    if stage not in ("sft", "latest"):
        raise ValueError(f"stage={stage!r}; needs 'base', 'sft', 'latest' or the step of a checkpoint")
    folder, verb = (run.sft_checkpoints, "SFT") if stage == "sft" else (run.checkpoints, "GRPO")
    newest, damaged = folder.latest()
    for path, reason in damaged:
        log.warning("%s checkpoint %s is damaged (%s) and was passed over", verb, path.name, reason)
    if newest is None:
        raise RunError(f"{run.name} has no {verb} checkpoint: train {verb} first, or evaluate stage='base'")
    return newest


def examples_of(run: Run, objective: str, task: Task, split: Split = "test", limit: int | None = None) -> list[Example]:
    """The fixed pool of an objective: the head of a seeded permutation of the split, the same for every stage.

    Examples that share a `pair` column stay together, so that both members are in the pool.

    Raises:
        DataError: the split is empty.
    """
    examples = read_examples(task, split)
    if not examples:
        other = "train" if split == "test" else "test"
        raise DataError(
            f"task '{task.name}' of objective '{objective}' has no {split} examples; let examples('{split}') give "
            f"some (built-in tasks need data of two templates or texts), or evaluate split='{other}'"
        )
    order = seeding.permutation(len(examples), run.config.run.seed, 0, f"evaluate/{split}/{objective}")
    pairs: dict[str, list[Example]] = {}
    for example in (examples[i] for i in order):
        pairs.setdefault(str(example.columns.get("pair", example.id)), []).append(example)
    pool = [example for members in pairs.values() for example in members]
    return pool[: run.config.run.eval_examples if limit is None else max(1, limit)]


def judged(task: Task, examples: Sequence[Example], scores: Sequence[Score], seed: int) -> Row:
    """What evaluations.jsonl keeps of one objective: metrics with intervals, the resamples, and each item's verdict.

    `pool` is a digest of the example ids: rows of one pool, mode and split can be compared item by item, and their
    resamples (drawn with one seed) subtracted from each other are the paired bootstrap of the difference.
    """
    clusters = [str(example.columns.get("cluster", example.id)) for example in examples]
    values = _measures(task, examples, scores)
    drawn = bootstrap(lambda rows: _measures(task, *_pick(rows, examples, scores)), clusters, seed, RESAMPLES)
    count = len(set(clusters))
    return {
        "n": len(examples),
        "clusters": count,
        "pool": hashlib.blake2b("\n".join(e.id for e in examples).encode(), digest_size=8).hexdigest(),
        "metrics": {
            name: dict(zip(("value", "low", "high"), (value, *interval(name, value, drawn[name], count)), strict=True))
            for name, value in values.items()
        },
        "labels": {e.id: s.label for e, s in zip(examples, scores, strict=True)},
        "values": {e.id: s.value for e, s in zip(examples, scores, strict=True)},
        "resamples": {name: [float(f"{x:.5g}") for x in draws] for name, draws in drawn.items()},
    }


def tidy(row: Mapping[str, Any]) -> pd.DataFrame:
    """A row of evaluations.jsonl as a table, one line a metric."""
    shared = {key: row[key] for key in ("stage", "step", "split", "mode", "objective", "n")}
    lines = [{**shared, "metric": metric, **numbers} for metric, numbers in row["metrics"].items()]
    return pd.DataFrame(lines, columns=COLUMNS)


def comparison(run: Run, *, split: Split = "test", mode: Mode = "greedy") -> pd.DataFrame:
    """Base, SFT and latest side by side, and the paired change from SFT to latest, read from the log alone.

    Returns:
        One row for each objective and metric. `base`, `base_low`, `base_high`, and so on for `sft` and `latest`;
        `difference` with its 95% interval; `differs`: whether that interval leaves out 0 (None: not comparable).
    """
    rows = [r for r in run.rows("evaluations") if r["split"] == split and r["mode"] == mode]
    newest = {(row["objective"], row["stage"]): row for row in rows}
    lines = [
        _compared(objective, metric, {stage: newest.get((objective, stage)) for stage in STAGES})
        for objective in run.config.objectives
        for metric in _metric_names(newest, objective)
    ]
    return pd.DataFrame(lines, columns=_COMPARED)


STAGES = ("base", "sft", "latest")
_PARTS = ("", "_low", "_high")
_COMPARED = ["objective", "metric", *(s + p for s in (*STAGES, "difference") for p in _PARTS), "differs", "n"]


def _compared(objective: str, metric: str, stages: Mapping[str, Row | None]) -> Row:
    line: Row = {"objective": objective, "metric": metric, "differs": None}
    for stage, row in stages.items():
        numbers = row["metrics"].get(metric, {}) if row else {}
        line |= {f"{stage}{part}": numbers.get(key, math.nan) for part, key in zip(_PARTS, _NUMBERS, strict=True)}
        line["n"] = row["n"] if row else line.get("n")
    before, after = stages["sft"], stages["latest"]
    if before is None or after is None or metric not in before["metrics"] or metric not in after["metrics"]:
        return line
    if before["pool"] != after["pool"]:
        log.warning("%s: SFT and latest were evaluated on different examples; evaluate both with one limit", objective)
        return line
    change = np.array(after["resamples"][metric], float) - np.array(before["resamples"][metric], float)
    low, high = percentiles(change)
    line |= {"difference": line["latest"] - line["sft"], "difference_low": low, "difference_high": high}
    return line | {"differs": None if math.isnan(low) else low > 0 or high < 0}


_NUMBERS = ("value", "low", "high")


def _metric_names(newest: Mapping[tuple[str, str], Row], objective: str) -> list[str]:
    rows = [newest[key] for stage in STAGES if (key := (objective, stage)) in newest]
    return list(dict.fromkeys(name for row in rows for name in row["metrics"]))


def _check_words(split: str, mode: str) -> None:
    if split not in ("train", "test") or mode not in ("greedy", "sample"):
        raise ValueError(f"split={split!r}, mode={mode!r}; needs 'train' or 'test', and 'greedy' or 'sample'")


def _restored(run: Run, checkpoint: Checkpoint | None) -> Policy:
    policy = load_policy(run.config.model, run.config.run.seed)
    if checkpoint is not None:
        policy.load_state(checkpoint.tensors("policy"))
    return policy


def _grpo_step(stage: Stage, checkpoint: Checkpoint | None) -> int:
    return 0 if checkpoint is None or stage == "sft" else checkpoint.step


def _stage_name(stage: Stage) -> str:
    return f"step {stage}" if isinstance(stage, int) else stage


def _answers(
    run: Run, objective: str, policy: Policy, examples: Sequence[Example], mode: Mode, engine: Engine
) -> Rollouts:
    sampling, seed = run.config.sampling, run.config.run.seed
    # One stream for all stages: equal luck. Its name keeps it apart from every stream of training.
    generator = seeding.generator(seed, 0, f"evaluate/{objective}")
    uniforms = torch.rand(len(examples), sampling.max_completion, dtype=torch.float64, generator=generator)
    prompts = [policy.encode(example.prompt) for example in examples]
    with policy.scoring(), _progress(objective, len(examples)) as progress:
        return engine.generate(
            policy, prompts, 1, sampling, sampling.temperature, uniforms, greedy=mode == "greedy", progress=progress
        )


@contextmanager
def _progress(objective: str, total: int) -> Iterator[Callable[[int, int], None]]:
    with tqdm(total=total, desc=f"evaluate {objective}", unit="answer", leave=False, disable=None) as bar:
        yield lambda finished, rows: bar.update(finished - bar.n) and None


def _measures(task: Task, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, float]:
    return {name: float(value) for name, value in summarise(task, examples, scores).items()}


def _pick(
    rows: Sequence[int], examples: Sequence[Example], scores: Sequence[Score]
) -> tuple[list[Example], list[Score]]:
    return [examples[i] for i in rows], [scores[i] for i in rows]
