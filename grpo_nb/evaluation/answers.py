"""Answers of a run's model to a task's items, as predictions that `predictions` or any other scorer reads."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from grpo_nb.config import ConfigError
from grpo_nb.evaluation.compare import Stage
from grpo_nb.evaluation.evaluate import Watch, ask, progress, restore_policy
from grpo_nb.rollout import choose, opened
from grpo_nb.run.run import Run
from grpo_nb.suggest import did_you_mean
from grpo_nb.tasks import Task, load_task, load_tasks, read_examples
from grpo_nb.types import Example


def answers(
    run: Run,
    objective: str,
    data: str | Path | None = None,
    *,
    stage: Stage = "latest",
    tasks: Mapping[str, Task] | None = None,
    accept_changed: Collection[str] = (),
) -> list[dict[str, Any]]:
    """The likeliest answer of one stage to each item, one row each; nothing is logged.

    Args:
        data: other data of the objective's built-in task, used in full; None: the run's own held-out items, all of
    them, whatever `run.eval_examples` is.
        tasks: own tasks by objective, as in `train.grpo`.

    Returns:
        Rows of `example_id`, `category` where items have one, and `answer`, in the order of the data.

    Raises:
        ConfigError: the run has no such objective, or its task is not built in and `data` is given.
        DataError: the data cannot be used.
        RunError: the stage has no checkpoint.
        DependencyChanged: as `restore_policy`.
    """
    examples = _asked(run, objective, data, tasks)
    policy = restore_policy(run, stage, accept_changed=accept_changed)
    with progress(objective, len(examples)) as bar, opened(choose(None, policy, run.config.rollout).engine) as engine:
        drawn = ask(policy, examples, run.config.sampling, engine, watch=Watch(bar))
    return [_named(example) | {"answer": text} for example, text in zip(examples, drawn.scored_texts, strict=True)]


def _asked(run: Run, objective: str, data: str | Path | None, tasks: Mapping[str, Task] | None) -> list[Example]:
    objectives = run.config.objectives
    if objective not in objectives:
        raise ConfigError(
            f"the run has no objective '{objective}'{did_you_mean(objective, objectives)}; it has "
            f"{', '.join(objectives)}"
        )
    if data is None:
        return read_examples(load_tasks(run.config, run.path, tasks, [objective])[objective], "test")
    other = objectives[objective].model_copy(update={"data": str(data)})
    task = load_task(other, run.path, run.config.run.seed)
    return [*read_examples(task, "train"), *read_examples(task, "test")]


def _named(example: Example) -> dict[str, Any]:
    """Identifier of an item in its data; BBQ numbers items within each category."""
    if (category := example.columns.get("category")) is None:
        return {"example_id": example.id}
    number = example.id.removeprefix(f"{category}/")
    return {"example_id": int(number) if number.isdecimal() else number, "category": category}
