"""Tasks: examples and the scoring of completions. One data set a file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from grpo_nb.config import Config, ConfigError, ObjectiveConfig
from grpo_nb.suggest import did_you_mean
from grpo_nb.tasks import demo
from grpo_nb.tasks.bbq import BBQ
from grpo_nb.tasks.halueval import HaluEvalDialogue, HaluEvalQA, HaluEvalSummarization
from grpo_nb.tasks.recognition import EVALUATION_ONLY as EVALUATION_ONLY
from grpo_nb.tasks.recognition import HaluEvalGeneral, HaluEvalRecognition
from grpo_nb.tasks.records import DataError
from grpo_nb.tasks.system_prompt import prompted
from grpo_nb.types import Example, Score

__all__ = [
    "BBQ",
    "DataError",
    "HaluEvalDialogue",
    "HaluEvalGeneral",
    "HaluEvalQA",
    "HaluEvalRecognition",
    "HaluEvalSummarization",
    "Task",
    "check_task",
    "load_task",
    "load_tasks",
    "read_examples",
]

SPLITS: tuple[Literal["train"], Literal["test"]] = ("train", "test")


@runtime_checkable
class Task(Protocol):
    """Interface of a task. It may also have four more methods:

    `selfcheck() -> None`, which raises DataError unless gold answers score top and known bad ones do not;
    `summary(examples, scores) -> dict[str, float]`, the task's own measures for evaluation;
    `support(examples, scores) -> dict[str, list[bool]]`, for measures of a part of the examples: whether each is in it;
    `told(example) -> bool | None`, whether the example's text answers it, for label shares by condition.
    """

    name: str

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        """The prompts of one split, always in the same order."""
        ...

    def score(self, example: Example, completion: str) -> Score:
        """Score of one completion."""
        ...


def check_task(objective: str, task: Task) -> None:
    """Refuse an object that lacks a part of a task.

    Raises:
        ConfigError: it is a class and not an object of it, or lacks `name`, `examples` or `score`.
    """
    if isinstance(task, type):
        raise ConfigError(f"the task of objective '{objective}' is the class {task.__name__}; give {task.__name__}()")
    if lacking := [part for part in ("name", "examples", "score") if not hasattr(task, part)]:
        raise ConfigError(
            f"the task of objective '{objective}' ({type(task).__name__}) lacks {', '.join(lacking)}; needs a `name`, "
            "`examples(split)` and `score(example, completion)`"
        )


def read_examples(task: Task, split: Literal["train", "test"]) -> list[Example]:
    """The task's examples of one split.

    Raises:
        DataError: it returned something other than a list of Example.
    """
    given: object = task.examples(split)
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        raise DataError(f"task '{task.name}' gave {type(given).__name__} for its {split} examples; needs a list")
    examples = list(given)
    if wrong := [type(e).__name__ for e in examples if not isinstance(e, Example)]:
        raise DataError(f"task '{task.name}' gave {wrong[0]} among its {split} examples; needs Example(id=, prompt=)")
    return examples


def summarise(task: Task, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, float]:
    """The task's own measures, or mean reward and share scored for a task that has none.

    Raises:
        DataError: its `summary` returns something other than numbers by name.
    """
    own = getattr(task, "summary", None)
    if own is not None:
        return _numbers(task, own(examples, scores))
    values = [score.value for score in scores if score.value is not None]
    return {
        "reward": sum(values) / len(values) if values else float("nan"),
        "scored": len(values) / len(scores) if scores else float("nan"),
    }


def _numbers(task: Task, given: object) -> dict[str, float]:
    if isinstance(given, Mapping):
        try:
            return {str(name): float(value) for name, value in given.items()}
        except (TypeError, ValueError):
            pass
    raise DataError(f"task '{task.name}': summary() gives {given!r:.80}; needs a dict of numbers by name, nan for none")


def told(task: Task, example: Example) -> bool | None:
    """Whether the example's text answers its question; None where neither the task nor its columns have it.

    A task's own `told` decides, else the column `answerable`, else BBQ's `condition`.
    """
    own = getattr(task, "told", None)
    if own is not None:
        return None if (answer := own(example)) is None else bool(answer)
    if (answerable := example.columns.get("answerable")) is not None:
        return bool(answerable)
    return {"disambig": True, "ambig": False}.get(str(example.columns.get("condition")))


def supported(task: Task, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, list[bool]]:
    """For each measure of `summarise` over a part of the examples, whether each example is in it.

    Raises:
        DataError: the task's own `support` does not cover every example.
    """
    own = getattr(task, "support", None)
    if own is None:
        return {} if hasattr(task, "summary") else {"reward": [score.value is not None for score in scores]}
    result: dict[str, list[bool]] = {name: list(part) for name, part in own(examples, scores).items()}
    if wrong := [name for name, part in result.items() if len(part) != len(examples)]:
        raise DataError(
            f"task '{task.name}': support() gives {len(result[wrong[0]])} values for '{wrong[0]}'; needs one (True or "
            f"False) for each of {len(examples)} examples"
        )
    return result


def selfcheck(task: Task) -> None:
    """The task's own check; for a task that has none, every gold target scores more than an empty completion.

    Raises:
        DataError: an item where that fails, by id.
    """
    own = getattr(task, "selfcheck", None)
    if own is not None:
        own()
        return
    for example in (e for split in SPLITS for e in task.examples(split) if e.target is not None):
        gold, nothing = (task.score(example, text).value for text in (example.target or "", ""))
        if gold is not None and nothing is not None and gold <= nothing:
            raise DataError(
                f"{example.id}: task '{task.name}' gives its gold target {example.target!r} {gold} and an empty "
                f"completion {nothing}; what is right must score more"
            )


def load_tasks(
    config: Config, folder: Path, given: Mapping[str, Task] | None = None, names: Iterable[str] | None = None
) -> dict[str, Task]:
    """The tasks of objectives (all, or those of `names`): the one given by hand, else the configuration's.

    Their prompts begin with the objective's `system_prompt`.

    Raises:
        ConfigError: a task is given for an objective that the configuration does not have, or is no task.
        ConfigError, DataError: as `load_task`.
    """
    given = given or {}
    if strangers := given.keys() - config.objectives.keys():
        raise ConfigError(
            f"tasks given for {sorted(strangers)}, which the configuration does not have; "
            f"its objectives are {sorted(config.objectives)}{did_you_mean(min(strangers), config.objectives)}"
        )
    for name, task in given.items():
        check_task(name, task)
    return {
        name: prompted(given[name], config.objectives[name].system_prompt)
        if name in given
        else _task_of(config, name, folder)
        for name in (config.objectives if names is None else names)
    }


def _task_of(config: Config, name: str, folder: Path) -> Task:
    """The built-in task of an objective; an error of it has the objective's name."""
    try:
        return load_task(config.objectives[name], folder, config.run.seed)
    except (ConfigError, DataError) as error:
        raise (DataError if isinstance(error, DataError) else ConfigError)(f"objectives.{name}: {error}") from error


def load_task(objective: ObjectiveConfig, workdir: Path, seed: int) -> Task:
    """The built-in task of an objective, with its data read, checked and split, and the objective's `system_prompt`.

    `data="demo"` writes the demo world under `workdir/data` where it is missing or incomplete, then reads it the
    way real files are read.

    Raises:
        ConfigError: a task that is not built in or is for evaluation only, or no data.
        DataError: the data cannot be used; with the place.
    """
    if objective.task in EVALUATION_ONLY:
        raise ConfigError(f"task {EVALUATION_ONLY[objective.task]}")
    if objective.task not in BUILT_IN:
        raise ConfigError(
            f"task '{objective.task}' is not built in (known: {', '.join(BUILT_IN)}); use one of these, "
            "or give your own, each time: tasks={'<objective>': your_task}"
        )
    if not objective.data:
        raise ConfigError(f"task '{objective.task}' has no data; set `data` to a file or folder, or to 'demo'")
    if objective.data == "demo":
        task = _demo_task(objective.task, workdir / "data", seed)
    else:
        task = BUILT_IN[objective.task](objective.data, seed)
    return prompted(task, objective.system_prompt)


def _demo_task(name: str, folder: Path, seed: int) -> Task:
    if name not in ("bbq", "halueval_qa"):
        raise ConfigError(f"the demo world has bbq and halueval_qa only, not '{name}'; set `data` to a file or folder")
    paths = demo.ensure(folder, seed)
    if name == "bbq":
        return BBQ(paths.bbq, seed, instruction=demo.INSTRUCTION)
    return HaluEvalQA(paths.halueval, seed, instruction=demo.INSTRUCTION, evidence=False)


BUILT_IN: dict[str, Callable[..., Task]] = {
    "bbq": BBQ,
    "halueval_qa": HaluEvalQA,
    "halueval_dialogue": HaluEvalDialogue,
    "halueval_summarization": HaluEvalSummarization,
}
