"""Answers of one run at its end: `python -m grpo_nb.dev.result_answers RUN STAGE UNSEEN QA`; see `result`."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_nb.evaluation.answers import answers
from grpo_nb.evaluation.compare import Stage, is_of, logged
from grpo_nb.evaluation.evaluate import measured, ordered
from grpo_nb.evaluation.forgetting import MODE, probe
from grpo_nb.evaluation.predictions import score_bbq, score_halueval
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage import safe_open
from grpo_nb.storage.files import to_json, write_atomically
from grpo_nb.sweeps import Study
from grpo_nb.sweeps.plan import Trial
from grpo_nb.sweeps.results import Value
from grpo_nb.tasks import HaluEvalRecognition, load_tasks

FIELD = "answer"
LARGEST = 1 << 30
"""Bytes of a file of answers."""
KINDS = ("bbq", "qa", "unseen", "recognition")
OBJECTIVES = {"fairness": "bbq", "hallucination": "qa"}
"""Objectives of the preset, and the kind of answers to their held-out data."""


class Sources(NamedTuple):
    """Files of the items."""

    qa: str
    unseen: str


def answer_file(run: Path, stage: str, kind: str) -> Path:
    """File of one end's answers, next to the runs, so that a study's folder can be taken without weights."""
    return run.parent / "predictions" / f"{run.name}.{stage}.{kind}.jsonl"


def answered(run: Path, stage: Stage) -> bool:
    """Whether all answers of one end exist."""
    return all(answer_file(run, str(stage), kind).exists() for kind in KINDS)


def answer(path: Path, stage: Stage, unseen: str, qa: str) -> None:
    """Write the answers of one end to all questions, and log the probe."""
    run = Run.open(path)
    asked = {
        "bbq": ("fairness", None, None),
        "qa": ("hallucination", None, None),
        "unseen": ("fairness", unseen, None),
        "recognition": ("hallucination", None, {"hallucination": HaluEvalRecognition(qa)}),
    }
    for kind, (objective, data, tasks) in asked.items():
        file = answer_file(path, str(stage), kind)
        if file.exists():
            continue
        safe_open.refuse_linked(file.parent)
        file.parent.mkdir(exist_ok=True)
        rows = answers(run, objective, data, stage=stage, tasks=tasks)
        write_atomically(file, [to_json(row) + b"\n" for row in (_pairs(rows) if tasks else rows)])
    probe(run, stage)


def _pairs(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Answers about both texts of an item in one row, as recognition is measured."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        item, member = str(row["example_id"]).rsplit("/", 1)
        found.setdefault(item, {})[member] = row[FIELD]
    return [{"example_id": item, FIELD: found[item]} for item in sorted(found)]


def measures(trial: Trial, stage: Stage, sources: Sources) -> Iterator[tuple[str, str, Value]]:
    """Objective or data, metric and value of all that an end answered; those held out with their paired resamples."""
    run = Run.open(trial.path)
    for objective, kind in OBJECTIVES.items():
        row = _evaluated(run, objective, _texts(trial.path, stage, kind))
        yield from ((objective, metric, _value(numbers, row)) for metric, numbers in row["metrics"].items())
    for kind, score, data in (("unseen", score_bbq, sources.unseen), ("recognition", score_halueval, sources.qa)):
        groups = score(data, str(answer_file(trial.path, str(stage), kind)), FIELD).groups
        for metric, numbers in next(iter(groups.values())).metrics.items():
            yield kind, metric, _value(numbers)
    for probed in logged(run, "test", MODE):
        if is_of(probed, stage):
            yield from ((MODE, metric, _value(numbers)) for metric, numbers in probed["metrics"].items())


def examples(study: Study, count: int) -> Iterator[dict[str, str]]:
    """The first held-out items of each objective, in the seeded order of evaluations, with the first seed's answers.

    Raises:
        RunError: one of the runs has not answered yet.
    """
    seed = study.plan.seeds[0]
    own = {trial.arm: trial for trial in study.trials if trial.seed == seed}
    columns = {"before": (own["sft"], "base"), "after SFT": (own["sft"], "sft"), "after GRPO": (own["grpo"], "latest")}
    for trial, stage in columns.values():
        if not answered(trial.path, stage):  # type: ignore[arg-type]
            raise RunError(f"{trial.name} has not answered as {stage} yet; its answers are shown: let it end first")
    run = Run.open(own["grpo"].path)
    tasks = load_tasks(run.config, run.path)
    for objective, kind in OBJECTIVES.items():
        texts = {name: _texts(trial.path, stage, kind) for name, (trial, stage) in columns.items()}  # type: ignore[arg-type]
        for example in ordered(run, objective, tasks[objective], "test")[:count]:
            asked = str(example.prompt[-1]["content"])  # type: ignore[index]
            yield {"objective": objective, "id": example.id, "prompt": asked, "gold": str(example.target)} | {
                name: answered[example.id] for name, answered in texts.items()
            }


def _texts(path: Path, stage: Stage, kind: str) -> dict[str, str]:
    """The answers by id.

    Raises:
        RunError: the file is damaged.
    """
    file = answer_file(path, str(stage), kind)
    try:
        rows = [json.loads(line) for line in safe_open.read(file, LARGEST).decode().split("\n") if line]
        return {
            f"{row['category']}/{row['example_id']}" if "category" in row else row["example_id"]: row[FIELD]
            for row in rows
        }
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{file} is damaged ({type(error).__name__}: {error}); remove it, and ask again") from None


def _evaluated(run: Run, objective: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Row of an evaluation of all held-out items, whatever pool the run's own is."""
    task = load_tasks(run.config, run.path, None, [objective])[objective]
    asked = ordered(run, objective, task, "test")
    if lacking := [example.id for example in asked if example.id not in texts]:
        raise RunError(
            f"the answers of {run.name} to {objective} lack {len(lacking)} of {len(asked)} items, e.g. {lacking[0]}; "
            "remove their file in predictions/, and ask again"
        )
    return measured(run, objective, task, asked, [texts[example.id] for example in asked])


def _value(numbers: Mapping[str, Any], row: Mapping[str, Any] | None = None) -> Value:
    return Value(float(numbers["value"]), (float(numbers["high"]) - float(numbers["low"])) / 2, row)


if __name__ == "__main__":
    answer(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4])  # type: ignore[arg-type]
