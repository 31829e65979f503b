"""Every task is checked: its own selfcheck, or that gold beats nothing; the notebook's table says so."""

from collections.abc import Callable
from typing import Any, Literal

import pytest

from grpo_nb import report
from grpo_nb.config import ObjectiveConfig
from grpo_nb.tasks import load_task, selfcheck
from grpo_nb.tasks.records import DataError
from grpo_nb.types import Example, Score


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
        raise DataError("Lima is not top")


def test_gold_must_beat_nothing_in_a_task_without_a_check() -> None:
    selfcheck(Capitals(lambda text: float("Lima" in text)))
    selfcheck(Capitals(lambda text: None))
    with pytest.raises(DataError, match=r"train/Peru: task 'capitals' gives its gold target 'Lima' 0.5 and an empty"):
        selfcheck(Capitals(lambda text: 0.5))


def test_a_tasks_own_check_is_the_one() -> None:
    with pytest.raises(DataError, match="Lima is not top"):
        selfcheck(Checked(lambda text: float("Lima" in text)))


def test_the_table_of_checks(tmp_path: Any) -> None:
    tasks = {name: load_task(ObjectiveConfig(task=name, data="demo"), tmp_path, 0) for name in ("bbq", "halueval_qa")}
    table = report.selfchecks({**tasks, "own": Capitals(lambda text: float("Lima" in text))})
    text = repr(table)
    assert text.count("gold on top") == 3 and "capitals" in text
    with pytest.raises(DataError, match="Lima is not top"):
        report.selfchecks({"own": Checked(lambda text: 1.0)})
