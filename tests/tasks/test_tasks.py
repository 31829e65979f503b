"""Every task is checked: its own selfcheck, or that gold beats nothing; the notebook's table says so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from grpo_nb.report import report
from grpo_nb.tasks import HaluEvalQA, parsed, selfcheck
from grpo_nb.tasks.records import DataError
from grpo_nb.types import Example, Score
from tests.support.tiny import demo_tasks
from tests.support.tokens import pattern


class Capitals:
    name = "capitals"

    def __init__(self, value: Callable[[str], float | None]) -> None:
        self.value = value

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        return [Example(id=f"{split}/Peru", prompt="Peru?", target="Lima"), Example(id=f"{split}/x", prompt="?")]

    def score(self, example: Example, completion: str) -> Score:
        return Score(value=self.value(completion), cause="no judge")


class Checked(Capitals):
    def selfcheck(self) -> None:
        raise DataError("own-check")


def test_gold_must_beat_nothing_in_a_task_without_a_check() -> None:
    selfcheck(Capitals(lambda text: float("Lima" in text)))
    selfcheck(Capitals(lambda text: None))
    with pytest.raises(DataError, match=pattern("train/Peru", "'capitals'", "'Lima'", 0.5)):
        selfcheck(Capitals(lambda text: 0.5))


def test_a_tasks_own_check_is_the_one() -> None:
    with pytest.raises(DataError, match="own-check"):
        selfcheck(Checked(lambda text: float("Lima" in text)))


def test_the_table_of_checks() -> None:
    table = report.selfchecks({**demo_tasks()[1], "own": Capitals(lambda text: float("Lima" in text))})
    text = repr(table)
    assert table.frame["task"].tolist() == ["bbq", "halueval_qa", "capitals"] and "capitals" in text
    with pytest.raises(DataError, match="own-check"):
        report.selfchecks({"own": Checked(lambda text: 1.0)})


def qa_file(folder: Path, right: str = "Lima") -> Path:
    rows = [{"knowledge": f"Lima is in Peru {n}.", "question": "Where?", "right_answer": right} for n in range(4)]
    folder.mkdir()
    path = folder / "qa_data.json"
    path.write_text("".join(json.dumps(row | {"hallucinated_answer": "Quito"}) + "\n" for row in rows))
    return path


def test_the_same_content_in_use_is_parsed_once(tmp_path: Path) -> None:
    first, copy, other = qa_file(tmp_path / "a"), qa_file(tmp_path / "b"), qa_file(tmp_path / "c", "Peru")
    task, again = HaluEvalQA(first), HaluEvalQA(copy)
    assert again.examples("train")[0] is task.examples("train")[0]
    assert [[read.path for read in t.reads] for t in (task, again)] == [[first], [copy]]  # type: ignore[union-attr]
    assert not any(read.replaced() for read in again.reads)  # type: ignore[union-attr]
    different = [HaluEvalQA(other), HaluEvalQA(copy, 1), HaluEvalQA(copy, evidence=False), HaluEvalQA(copy.parent)]
    shared = [made.examples("train")[0] is task.examples("train")[0] for made in different]
    assert shared == [False, False, False, True]
    copy.write_text(other.read_text())
    assert HaluEvalQA(copy).examples("train")[0].columns["right_answer"] == "Peru"
    qa_file(tmp_path / "d").rename(copy.parent / "qa_data.json.2")
    assert len(HaluEvalQA(copy.parent).examples("train")) > len(task.examples("train"))


def test_a_change_while_data_is_parsed_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, honest = qa_file(tmp_path / "a"), parsed._digest

    def late(file: Path) -> bytes:
        digest = honest(file)
        file.write_text(file.read_text().replace("Lima", "Cusco"))
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(parsed, "_digest", late)
        changed = HaluEvalQA(path)
    assert changed.examples("train")[0].columns["right_answer"] == "Cusco"
    assert HaluEvalQA(qa_file(tmp_path / "b")).examples("train")[0].columns["right_answer"] == "Lima"
