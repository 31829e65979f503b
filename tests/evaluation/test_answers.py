"""A run's answers as a file that `score` reads: the numbers are those of an evaluation."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.cli import main
from grpo_nb.config import ConfigError, RolloutConfig
from grpo_nb.evaluation import answers as module
from grpo_nb.evaluation.answers import answers
from grpo_nb.evaluation.evaluate import judged
from grpo_nb.evaluation.predictions import score_bbq, score_halueval
from grpo_nb.policy.model import Policy
from grpo_nb.rollout import ChosenEngine
from grpo_nb.run.run import Run, RunError
from grpo_nb.tasks import demo, load_tasks
from grpo_nb.tasks.records import DataError
from grpo_nb.types import Example
from tests.support.quiz import Scripted
from tests.support.tiny import small_worlds, tiny_run
from tests.support.tokens import names, pattern

pytestmark = pytest.mark.usefixtures("narrow_model")
F, H = "fairness", "hallucination"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with small_worlds():
        yield tiny_run(tmp_path)


def says(i: int) -> str:
    return ["Answer: unknown", "Answer: the tullic", "hm", "Answer: not stated"][i % 4]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(wanted: object, policy: Policy, rollout: RolloutConfig) -> ChosenEngine:
        return ChosenEngine(Scripted(says), "scripted")

    monkeypatch.setattr(module, "choose", chosen)
    monkeypatch.setattr(module, "opened", contextlib.nullcontext)


def written(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("objective", [F, H])
def test_what_is_held_out_scores_as_an_evaluation_of_it(
    objective: str, tmp_path: Path, run: Run, scripted: None
) -> None:
    task = load_tasks(run.config, run.path)[objective]
    examples: list[Example] = task.examples("test")
    rows = answers(run, objective, stage="base")
    assert len(rows) == len(examples) > run.config.run.eval_examples
    file = written(tmp_path / "said.jsonl", rows)
    paths = demo.ensure(run.path / "data", 0)
    score, data = (score_bbq, str(paths.bbq)) if objective == F else (score_halueval, str(paths.halueval))
    (found,) = (m for group, m in score(data, file, "answer", part=True).groups.items() if group in ("all", "qa"))
    scores = [task.score(example, says(i)) for i, example in enumerate(examples)]
    expected = judged(task, examples, scores, seed=0)["metrics"]
    for name in expected.keys() & found.metrics.keys():
        assert found.metrics[name]["value"] == pytest.approx(expected[name]["value"], nan_ok=True), name
    with pytest.raises(DataError, match=pattern("--part")):
        score(data, file, "answer")


def test_other_data_is_asked_whole_and_nothing_is_logged(tmp_path: Path, run: Run, scripted: None) -> None:
    file = next(demo.ensure(run.path / "data", 0).bbq.glob("*.jsonl"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    other = written(tmp_path / "other.jsonl", rows[:40])
    found = answers(run, F, other, stage="base")
    asked = {(row["category"], row["example_id"]) for row in rows[:40]}
    assert {(row["category"], row["example_id"]) for row in found} == asked
    assert not run.rows("evaluations")
    assert score_bbq(other, written(tmp_path / "said.jsonl", found), "answer").groups


def test_the_command_writes_what_score_reads(
    tmp_path: Path, run: Run, scripted: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "said.jsonl"
    assert main(["answer", str(run.path), H, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert names(said, "base", len(out.read_text().splitlines()))
    assert main(said.splitlines()[-1].partition("grpo-nb ")[2].split()) == 0, "as it says"
    assert {*json.loads(out.read_text().splitlines()[0])} == {"example_id", "answer"}


@pytest.mark.parametrize(
    ("asked", "error", "named"),
    [
        ({"objective": "fairnes"}, ConfigError, ["fairnes", F, H]),
        ({"objective": F, "stage": "sft"}, RunError, ["SFT"]),
        ({"objective": F, "data": "nowhere.jsonl"}, DataError, ["nowhere.jsonl"]),
    ],
)
def test_what_cannot_be_answered(asked: dict[str, Any], error: type[Exception], named: list[str], run: Run) -> None:
    with pytest.raises(error, match=pattern(*named)):
        answers(run, **asked)
