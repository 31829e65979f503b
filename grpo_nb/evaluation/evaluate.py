"""Held-out evaluation of a stage of a run, with intervals.

The pool of examples, the uniforms and the bootstrap's draws are functions of the run's seed alone: every stage
answers the same questions with the same luck, so that differences between stages are paired (see `paired`).
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from grpo_nb import seeding, trackers
from grpo_nb.config import SamplingConfig
from grpo_nb.evaluation.compare import Mode, Split, Stage, count, drawn_from
from grpo_nb.evaluation.intervals import FEWEST, RESAMPLES, bootstrap, with_intervals
from grpo_nb.evaluation.pareto import Metrics, best, knee
from grpo_nb.metrics.phases import timed, watched
from grpo_nb.policy.full_memory import full_memory
from grpo_nb.policy.model import Policy
from grpo_nb.preflight import dependencies, requirements
from grpo_nb.printable import clean_logger
from grpo_nb.rewards.scoring import task_scores
from grpo_nb.rollout import EagerEngine, Ended, Engine, Request, choose, opened
from grpo_nb.rollout.selfcheck import check_model, load_alike
from grpo_nb.run.checkpoints import Checkpoint
from grpo_nb.run.dependencies_file import OPTIMIZER
from grpo_nb.run.run import Run, RunError
from grpo_nb.tasks import DataError, Task, load_tasks, read_examples, summarise, supported
from grpo_nb.types import Example, Rollouts, Score

logger = clean_logger(__name__)

APART = "pools_apart"
"""Field of rows since this version: pools of quick and final evaluation share no cluster where the data allow it."""

COLUMNS = ["stage", "step", "split", "mode", "objective", "metric", "value", "low", "high", "n", "clusters"]


def evaluate(
    run: Run,
    *,
    split: Split = "test",
    mode: Mode = "greedy",
    stage: Stage = "latest",
    policy: Policy | None = None,
    tasks: Mapping[str, Task] | None = None,
    limit: int | None = None,
    engine: Engine | str | None = None,
    accept_changed: Collection[str] = (),
) -> pd.DataFrame:
    """Evaluate one stage on held-out examples, with 95% intervals; the measures are also appended to evaluations.jsonl.

    Intervals are over clusters (all questions of one template, or on one text, count as one draw), as in `intervals`; a
    measure over fewer than 5 clusters has none.

    Args:
        mode: `greedy` takes the likeliest token; `sample` samples at `sampling.temperature`.
        policy: evaluated as it is, and `stage` only names it; None: the stage's weights are restored.
        tasks: own tasks by objective, as in `train.grpo`.
        limit: examples per objective, at most; None: `run.eval_examples`.
        engine: the engine that samples; None: `rollout.engine`.
        accept_changed: kinds of content that may differ from the run's start, e.g. `{"data"}` (see `dependencies`).

    Returns:
        One row for each objective and metric: stage, step, split, mode, objective, metric, value, low, high, and n
        and clusters, the items that the metric is over (those of its condition) and the templates or texts they are
        of.

    Raises:
        RunError: the stage has no checkpoint.
        ModelError: an interrupted update left the policy's weights.
        PolicyTaken: a training in another thread moved them meanwhile; nothing was logged.
        DependencyChanged: content that the run depends on changed, and was not accepted.
        DataError: a split without examples.
        RewardError: a task raised, or returned something other than a score.
        ValueError: an unknown split or mode, or a limit below 1.
    """
    _check_words(split, mode)
    dependencies.accepted_kinds(accept_changed)
    # The step is read off the checkpoint before the weights are, and both from the one checkpoint.
    checkpoint = None if policy is not None else stage_checkpoint(run, stage)
    learner = policy or _loaded(run)
    learner.settle()
    learner.refuse_interrupted()
    learner.set_date(run.started)
    requirements.check_system_prompts(run.config, learner)
    with timed("reading the tasks"):
        asked = load_tasks(run.config, run.path, tasks)
        examples = {name: read_examples(task, split) for name, task in asked.items()}
    with timed("comparing data and weights with those that the run was made with"):
        found = dependencies.of_policy(learner) | dependencies.of_evaluation(asked, tasks or {}, split, examples)
    dependencies.check(run, found, accept_changed, "eval")
    if policy is None:
        _restore(learner, checkpoint)
    sampler = choose(engine, learner, run.config.rollout).engine
    name, step = placed(stage, checkpoint)
    if policy is not None and stage == "latest":
        step = run.last_step() or 0
    pools = {objective: examples_of(run, objective, task, split, limit) for objective, task in asked.items()}
    texts: dict[str, Sequence[str]] = {}
    with learner.ownership.steady(), opened(sampler):
        for objective, pool in pools.items():
            with progress(objective, len(pool)) as bar:
                drawn = _uniforms(run, objective, len(pool)) if mode == "sample" else None
                watch = Watch(bar, fewer_rows(run, step, objective))
                texts[objective] = ask(learner, pool, run.config.sampling, sampler, drawn, watch).scored_texts
    rows = [
        {"stage": name, "step": step, "split": split, "mode": mode, APART: True}
        | measured(run, objective, task, pools[objective], texts[objective])
        for objective, task in asked.items()
    ]
    with trackers.mirroring(run):
        for row in rows:
            run.log_evaluation(row)
    return pd.concat([tidy(row) for row in rows], ignore_index=True)


@dataclass(frozen=True)
class Watch:
    """Callbacks that are called while answers are sampled."""

    ended: Callable[[Sequence[Ended]], None] | None = None
    """Called with each answer once; see `Request.ended`."""
    fewer: Callable[[int, Exception], None] | None = None
    """Called with the new number of answers at a time, and the error, when the memory was full."""


def ask(
    policy: Policy,
    examples: Sequence[Example],
    sampling: SamplingConfig,
    engine: Engine,
    uniforms: Tensor | None = None,
    watch: Watch | None = None,
) -> Rollouts:
    """One answer to each example: sampled by `uniforms` at `sampling.temperature`, or without them the likeliest.

    Where the device's memory is full, half as many are sampled at a time, down to one; `watch` is notified.

    Raises:
        OutOfMemoryError: the memory is too small for one.
    """
    check_model(policy, draws=isinstance(engine, EagerEngine))
    watch, prompts = watch or Watch(), [policy.encode(example.prompt) for example in examples]
    request = Request(prompts, 1, sampling, uniforms, uniforms is None, watch.ended)
    at_once = min(len(prompts), getattr(engine, "max_rows", len(prompts)))
    while True:
        try:
            with full_memory(), policy.eval_mode():
                return engine.generate(policy, replace(request, rows_at_once=at_once))
        except torch.OutOfMemoryError as error:
            if at_once <= 1:
                raise
            at_once //= 2
            if watch.fewer is not None:
                watch.fewer(at_once, error)
            logger.warning("memory was full while answers were drawn: %d at a time now", at_once)
            if release := getattr(engine, "release", None):
                release()


@contextmanager
def progress(objective: str, total: int) -> Iterator[Callable[[Sequence[Ended]], None]]:
    """Progress of an objective's answers, for `Watch.ended`: a line in a notebook, a bar on a terminal."""
    # a worker's bar would turn up under whichever cell ran last; None: shown on a terminal
    disable = True if watched() or threading.current_thread() is not threading.main_thread() else None
    what, done = f"evaluate {objective}", 0
    with timed(what) as say, tqdm(total=total, desc=what, unit="answer", leave=False, disable=disable) as bar:

        def count(ended: Sequence[Ended]) -> None:
            nonlocal done
            done += len(ended)
            bar.update(len(ended))
            say(f"{done} of {total} answers")

        yield count


def fewer_rows(run: Run, step: int, objective: str) -> Callable[[int, Exception], None]:
    """Function that logs, as `evaluation_out_of_memory`, that an evaluation samples fewer answers at a time."""

    def log(rows: int, error: Exception) -> None:
        found = str(error).partition("\n")[0]
        now = f"rows_at_once={rows}"
        run.log_event("evaluation_out_of_memory", step=step, objective=objective, now=now, error=found)

    return log


def measured(run: Run, objective: str, task: Task, examples: Sequence[Example], texts: Sequence[str]) -> dict[str, Any]:
    """The part of a row of evaluations.jsonl with the measures of the answers to a pool."""
    return measured_by(run, objective, task, examples, scored(objective, task, examples, texts))


def scored(objective: str, task: Task, examples: Sequence[Example], texts: Sequence[str]) -> list[Score]:
    """The task's verdict on each answer."""
    with timed(f"scoring the answers of {objective}"):
        return list(task_scores(task, examples, texts))


def measured_by(
    run: Run, objective: str, task: Task, examples: Sequence[Example], scores: Sequence[Score]
) -> dict[str, Any]:
    """`measured`, of answers that were scored already."""
    seed = seeding.derived_seed(run.config.run.seed, 0, f"bootstrap/{objective}")
    return {"objective": objective} | judged(task, examples, scores, seed)


def load_best(run: Run, objective: str, metric: str | None = None, *, accept_changed: Collection[str] = ()) -> Policy:
    """The run's model with the weights of its best stage, as `pareto.best` finds it.

    Raises:
        RunError: no stage that can still be loaded was evaluated.
        DependencyChanged: as `restore_policy`.
    """
    return restore_policy(run, best(run, objective, metric), accept_changed=accept_changed)


def load_knee(run: Run, by: Metrics | None = None, *, accept_changed: Collection[str] = ()) -> Policy:
    """The run's model with the weights of the stage between its objectives, as `pareto.knee` finds it.

    Raises:
        RunError: no stage that can still be loaded was evaluated.
        DependencyChanged: as `restore_policy`.
    """
    return restore_policy(run, knee(run, by), accept_changed=accept_changed)


def restore_policy(run: Run, stage: Stage, *, accept_changed: Collection[str] = ()) -> Policy:
    """The run's model with the weights of one stage.

    Raises:
        RunError: the stage has no checkpoint; the message names what makes one.
        DependencyChanged: the base weights, tokenizer, template or generation settings are not those of the run.
        ConfigError: as `requirements.check_system_prompts`.
    """
    checkpoint = stage_checkpoint(run, stage)
    policy = _loaded(run)
    dependencies.check(run, dependencies.of_policy(policy), accept_changed, "eval")
    requirements.check_system_prompts(run.config, policy)
    _restore(policy, checkpoint)
    return policy


def stage_checkpoint(run: Run, stage: Stage) -> Checkpoint | None:
    """The checkpoint that holds a stage's weights; None for the model as loaded.

    Raises:
        RunError: it does not exist yet.
    """
    if stage == "base" or (stage == "sft" and run.config.sft.steps == 0):
        return None
    if isinstance(stage, int):
        return run.checkpoints.load(stage, dispensable={OPTIMIZER})
    if stage not in ("sft", "latest"):
        raise ValueError(f"stage={stage!r}; needs 'base', 'sft', 'latest' or the step of a checkpoint")
    folder, verb = (run.sft_checkpoints, "SFT") if stage == "sft" else (run.checkpoints, "GRPO")
    newest, damaged = folder.latest(dispensable={OPTIMIZER})
    for path, reason in damaged:
        logger.warning("%s checkpoint %s is damaged (%s) and was passed over", verb, path.name, reason)
    if newest is None:
        raise RunError(f"{run.name} has no {verb} checkpoint: train {verb} first, or evaluate stage='base'")
    return newest


def placed(stage: Stage, checkpoint: Checkpoint | None) -> tuple[str, int]:
    """A stage's name and its GRPO step in the log."""
    step = 0 if checkpoint is None or stage == "sft" else checkpoint.step
    return f"step {stage}" if isinstance(stage, int) else stage, step


def examples_of(run: Run, objective: str, task: Task, split: Split = "test", limit: int | None = None) -> list[Example]:
    """The fixed pool of an objective: the head of a seeded permutation of the split, the same for every stage.

    Examples that share a `pair` column stay together, so that both members are in the pool. Clusters that quick
    evaluation has for itself (`quick_clusters`) are left out.

    Raises:
        DataError: the split is empty, or an example id is used twice.
        ValueError: a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}; needs 1 or more, or None for run.eval_examples")
    order = ordered(run, objective, task, split)
    apart = quick_clusters(run, objective, order) if split == "test" else set()
    pool = [example for example in order if cluster_of(example) not in apart]
    return pool[: run.config.run.eval_examples if limit is None else limit]


def quick_clusters(run: Run, objective: str, examples: Sequence[Example]) -> set[str]:
    """The test clusters (templates or texts) reserved for quick evaluation: a third of them, 5 at least.

    None where it is off, where 5 would not be left for the final pool too, and in a run that an earlier version
    measured on shared clusters, whose pools stay as they were.
    """
    clusters = sorted({cluster_of(example) for example in examples})
    if run.config.run.quick_eval_every == 0 or len(clusters) < 2 * FEWEST or _measured_on_shared(run, objective):
        return set()
    order = seeding.permutation(len(clusters), run.config.run.seed, 0, f"quick clusters/{objective}")
    return {clusters[i] for i in order[: max(FEWEST, len(clusters) // 3)]}


def cluster_of(example: Example) -> str:
    """The template or text of an example; its id where it has none."""
    return str(example.columns.get("cluster", example.id))


def _measured_on_shared(run: Run, objective: str) -> bool:
    rows = run.oldest_first("evaluations")
    own = (row for row in rows if row.get("objective") == objective and row.get("split") == "test")
    return any(row.get("mode") != "probe" and APART not in row for row in own)


def ordered(run: Run, objective: str, task: Task, split: Split) -> list[Example]:
    """All examples of a split in the seeded order of its pools; those that share a `pair` column stay together.

    Raises:
        DataError: the split is empty, or an example id is used twice.
    """
    examples = read_examples(task, split)
    if repeated := [name for name, times in Counter(example.id for example in examples).items() if times > 1]:
        raise DataError(
            f"task '{task.name}' of objective '{objective}' has {len(repeated)} ids of {split} examples more than "
            f"once, the first is '{repeated[0]}'; give each example its own id: an evaluation is kept by them"
        )
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
    return [example for members in pairs.values() for example in members]


def judged(task: Task, examples: Sequence[Example], scores: Sequence[Score], seed: int) -> dict[str, Any]:
    """Fields of evaluations.jsonl for one objective: metrics with intervals, the resamples, and each item's verdict.

    `asked` is a digest of the pool's questions, whatever their ids: rows with the same questions in one mode and split
    can be compared item by item, and their resamples (of one seed) subtracted from each other are the paired bootstrap
    of the difference. `items` has the digest of each question; `pool`, a digest of the ids, is all that earlier
    versions kept.
    """
    questions = {example.id: dependencies.question(example) for example in examples}
    clusters = [cluster_of(example) for example in examples]
    values = summarise(task, examples, scores)
    drawn = bootstrap(lambda rows: summarise(task, *_pick(rows, examples, scores)), clusters, seed, RESAMPLES)
    return {
        "n": len(examples),
        "clusters": len(set(clusters)),
        "pool": hashlib.blake2b("\n".join(e.id for e in examples).encode(), digest_size=8).hexdigest(),
        "asked": hashlib.blake2b("\n".join(questions.values()).encode(), digest_size=8).hexdigest(),
        "items": questions,
        "metrics": with_intervals(values, drawn, clusters, supported(task, examples, scores)),
        "labels": {e.id: s.label for e, s in zip(examples, scores, strict=True)},
        "values": {e.id: s.value for e, s in zip(examples, scores, strict=True)},
        "resamples": {name: [float(f"{x:.5g}") for x in draws] for name, draws in drawn.items()},
    }


def tidy(row: Mapping[str, Any]) -> pd.DataFrame:
    """A row of evaluations.jsonl as a table, one line a metric."""
    shared = {key: row[key] for key in ("stage", "step", "split", "mode", "objective")}
    lines = [
        {**shared, "metric": m, **numbers, "n": count(row, m), "clusters": drawn_from(row, m)[0]}
        for m, numbers in row["metrics"].items()
    ]
    return pd.DataFrame(lines, columns=COLUMNS)


def _check_words(split: str, mode: str) -> None:
    if split not in ("train", "test") or mode not in ("greedy", "sample"):
        raise ValueError(f"split={split!r}, mode={mode!r}; needs 'train' or 'test', and 'greedy' or 'sample'")


def _loaded(run: Run) -> Policy:
    policy = load_alike(run.config.model, run.config.run.seed)
    policy.set_date(run.started)
    return policy


def _restore(policy: Policy, checkpoint: Checkpoint | None) -> None:
    if checkpoint is not None:
        policy.load_state(checkpoint.tensors("policy"))


def _uniforms(run: Run, objective: str, count: int) -> Tensor:
    # One stream for all stages: equal luck. Its name keeps it apart from every stream of training.
    generator = seeding.generator(run.config.run.seed, 0, f"evaluate/{objective}")
    return torch.rand(count, run.config.sampling.max_completion_length, dtype=torch.float64, generator=generator)


def _pick(
    rows: Sequence[int], examples: Sequence[Example], scores: Sequence[Score]
) -> tuple[list[Example], list[Score]]:
    return [examples[i] for i in rows], [scores[i] for i in rows]
