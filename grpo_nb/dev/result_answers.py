"""What the end of one run answers: `python -m grpo_nb.dev.result_answers RUN STAGE UNSEEN QA`; see `result`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_nb.evaluation.answers import answers
from grpo_nb.evaluation.compare import Stage, is_of, logged
from grpo_nb.evaluation.forgetting import MODE, probe
from grpo_nb.evaluation.predictions import score_bbq, score_halueval
from grpo_nb.run.run import Run
from grpo_nb.storage.files import to_json, write_atomically
from grpo_nb.tasks import HaluEvalRecognition

FIELD = "answer"
KINDS = ("bbq", "qa", "unseen", "recognition")


class Sources(NamedTuple):
    """Files of the items."""

    bbq: str
    qa: str
    unseen: str


def answer_file(run: Path, stage: str, kind: str) -> Path:
    """Where the answers of one end lie: beside the runs, so that a study's folder can be taken without weights."""
    return run.parent / "predictions" / f"{run.name}.{stage}.{kind}.jsonl"


def answer(path: Path, stage: Stage, unseen: str, qa: str) -> None:
    """Write the answers of one end to all that is asked, and log the probe."""
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


def measures(path: Path, stage: Stage, sources: Sources) -> Iterator[dict[str, Any]]:
    """A row for each measure that evaluations leave out: data, metric, value, low, high and n."""
    for kind, score, data in (("unseen", score_bbq, sources.unseen), ("recognition", score_halueval, sources.qa)):
        file = answer_file(path, str(stage), kind)
        for group in score(data, str(file), FIELD).groups.values() if file.exists() else ():
            yield from (_row(kind, metric, numbers) for metric, numbers in group.metrics.items())
    for row in logged(Run.open(path), "test", MODE):
        if is_of(row, stage):
            yield from (_row("probe", metric, numbers) for metric, numbers in row["metrics"].items())


def _row(data: str, metric: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {"data": data, "metric": metric} | {name: numbers[name] for name in ("value", "low", "high", "n")}


if __name__ == "__main__":
    answer(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4])  # type: ignore[arg-type]
