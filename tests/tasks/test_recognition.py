"""Recognition: both members of each pair, a strict yes or no, and the length-only baseline beside every accuracy."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.config import ConfigError, ObjectiveConfig
from grpo_nb.evaluation.evaluate import examples_of
from grpo_nb.evaluation.intervals import bootstrap
from grpo_nb.tasks import HaluEvalGeneral, HaluEvalRecognition, load_task
from grpo_nb.tasks.reading import yes_or_no
from grpo_nb.tasks.recognition import length_accuracy, measures, selfcheck
from grpo_nb.tasks.records import DataError
from grpo_nb.types import Example
from tests.support.tiny import tiny_run
from tests.support.tokens import pattern
from tests.tasks.test_halueval import ROWS, each_kind

MARKS = [
    {"ID": "7", "user_query": "Name a bird.", "chatgpt_response": "A robin.", "hallucination": "no"},
    {"ID": "9", "user_query": "Name a fish.", "chatgpt_response": "A whale is a fish.", "hallucination": "yes"},
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs(folder: Path, *lengths: tuple[int, int], seed: int = 0) -> HaluEvalRecognition:
    """QA pairs whose right and hallucinated answers are so long."""
    rows = [
        ROWS["qa"] | {"question": f"{i}?", "right_answer": "r" * right, "hallucinated_answer": "h" * bad}
        for i, (right, bad) in enumerate(lengths)
    ]
    return HaluEvalRecognition(written(folder / "qa_data.json", rows), seed)


def answered(task: HaluEvalRecognition | HaluEvalGeneral, said: dict[str, str], default: str) -> dict[str, float]:
    examples = task.examples("test")
    return task.summary(examples, [task.score(e, said.get(e.id, default)) for e in examples])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Yes", True),
        ("no.", False),
        ("**Answer:** No", False),
        ("It is fine.\nAnswer: yes, the date is made up", True),
        ("I would say no", False),
        ("No, yes", None),
        ("Answer: yes or no", None),
        ("None of it is nonsense, I know", None),
        ("Yesterday, nobody", None),
        ("Answer:", None),
        ("No.\nAnswer: Yes", True),
        ("", None),
    ],
)
def test_yes_and_no_are_whole_words(text: str, said: bool | None) -> None:
    assert yes_or_no(text) is said


@each_kind
def test_both_members_are_asked_in_a_seeded_order(kind: str, tmp_path: Path) -> None:
    rows = [ROWS[kind] for _ in range(8)]
    path = written(tmp_path / f"{kind}_data.json", rows)
    first, again, other = (
        [e.id for e in HaluEvalRecognition(tmp_path, s, kind=kind).examples("test")] for s in (0, 0, 1)
    )
    assert first == again != other
    assert (
        sorted(first) == sorted(other) == sorted(f"{kind}/{i}/{m}" for i in range(8) for m in ("right", "hallucinated"))
    )
    with_source = HaluEvalRecognition(path, kind=kind).examples("test")[0]
    without = HaluEvalRecognition(path, kind=kind, knowledge=False).examples("test")[0]
    source = ROWS[kind]["document" if kind == "summarization" else "knowledge"]
    assert source in content(with_source)
    assert (source in content(without)) is (kind == "summarization"), "a summary cannot be judged without its text"
    HaluEvalRecognition(path, kind=kind).selfcheck()


def content(example: Example) -> str:
    return str(example.prompt[0]["content"])  # type: ignore[index]


def test_the_prompt_shows_one_member_and_not_which(tmp_path: Path) -> None:
    examples = {e.id: e for e in pairs(tmp_path, (3, 5)).examples("test")}
    right, bad = examples["qa/0/right"], examples["qa/0/hallucinated"]
    assert content(right).replace("rrr", "x") == content(bad).replace("hhhhh", "x")
    assert (right.target, bad.target) == ("Answer: No", "Answer: Yes")
    assert right.columns["cluster"] == bad.columns["cluster"]


def test_measures_by_hand(tmp_path: Path) -> None:
    task = pairs(tmp_path, (3, 9), (4, 4), (8, 5))
    said = {"qa/0/right": "No", "qa/0/hallucinated": "Yes", "qa/1/right": "Yes", "qa/1/hallucinated": "Yes"}
    assert answered(task, said, "both yes and no") == {
        "accuracy": pytest.approx(3 / 6),
        "failed_rate": pytest.approx(2 / 6),
        "precision_yes": pytest.approx(2 / 3),
        "recall_yes": pytest.approx(2 / 3),
        "length_accuracy": pytest.approx(4 / 6),
        "pair_accuracy": pytest.approx(1 / 3),
        "length_pair_accuracy": pytest.approx((1 + 0.5 + 0) / 3),
        "accuracy_equal_length": pytest.approx(1 / 2),
    }


def test_each_measure_is_over_its_part(tmp_path: Path) -> None:
    task = pairs(tmp_path, (3, 9), (4, 4), (8, 5))
    examples = [e for e in task.examples("test") if e.id != "qa/2/hallucinated"]
    scores = [task.score(e, "Yes" if e.id.startswith("qa/1") else "hm") for e in examples]
    assert {name: sum(part) for name, part in task.support(examples, scores).items()} == {
        "precision_yes": 2,
        "recall_yes": 2,
        "pair_accuracy": 2,
        "length_pair_accuracy": 2,
        "accuracy_equal_length": 2,
    }


def test_always_yes_is_half_right_and_never_on_a_pair(tmp_path: Path) -> None:
    found = answered(pairs(tmp_path, (3, 9), (4, 7)), {}, "Yes")
    assert (found["accuracy"], found["pair_accuracy"], found["length_accuracy"]) == (0.5, 0.0, 1.0)


def test_length_accuracy_by_hand() -> None:
    assert length_accuracy([(1, False), (2, True)]) == 1.0
    assert length_accuracy([(2, True), (2, False)]) == 0.5
    assert length_accuracy([(9, False), (2, True)]) == 0.5, "longer is hallucinated, never the other way round"
    assert length_accuracy([(1, True), (1, True)]) == 1.0
    assert math.isnan(length_accuracy([]))


def test_a_pair_that_was_drawn_twice_counts_twice(tmp_path: Path) -> None:
    task = pairs(tmp_path, (3, 9), (4, 7))
    examples = sorted(task.examples("test"), key=lambda e: e.id)
    columns = [e.columns for e in examples]
    scores = [task.score(e, "Yes" if e.id.endswith("0/hallucinated") else "No") for e in examples]
    twice = [0, 1, 0, 1, 2, 3]
    assert measures([columns[i] for i in twice], [scores[i] for i in twice])["pair_accuracy"] == pytest.approx(2 / 3)
    lone = measures(columns[:1], scores[:1])
    assert math.isnan(lone["pair_accuracy"]), "one member alone is no pair"
    draws = bootstrap(lambda rows: measures([columns[i] for i in rows], [scores[i] for i in rows]), list("aabb"), 0, 50)
    assert set(draws["pair_accuracy"]) == {0.0, 0.5, 1.0}


def test_an_evaluation_keeps_pairs_together(tmp_path: Path) -> None:
    task = pairs(tmp_path, *[(3, 9)] * 20)
    pool = examples_of(tiny_run(tmp_path), "hallucination", task, limit=10)
    assert len({e.columns["pair"] for e in pool}) == 5 and len(pool) == 10


def test_general_is_read_and_refused_for_training(tmp_path: Path) -> None:
    path = written(tmp_path / "general_data.json", MARKS)
    task = HaluEvalGeneral(tmp_path)
    task.selfcheck()
    assert {e.id: e.target for e in task.examples("test")} == {"general/7": "Answer: No", "general/9": "Answer: Yes"}
    found = answered(task, {"general/7": "No"}, "No")
    assert (found["accuracy"], found["recall_yes"], found["length_accuracy"]) == (0.5, 0.0, 1.0)
    assert "pair_accuracy" not in found
    with pytest.raises(DataError, match=pattern("'halueval_general'")):
        task.examples("train")
    with pytest.raises(ConfigError, match=pattern("'halueval_general'", "halueval_qa")):
        load_task(ObjectiveConfig(task="halueval_general", data=str(path)), tmp_path, 0)
    with pytest.raises(DataError, match=pattern("line 1", "hallucination", "'maybe'", "yes", "no")):
        HaluEvalGeneral(written(path, [MARKS[0] | {"hallucination": "maybe"}]))


def test_rows_of_general_without_an_id_of_their_own_are_told_apart_by_their_place(tmp_path: Path) -> None:
    other = MARKS[0] | {"chatgpt_response": "Quite another answer."}
    rows = [*MARKS, other, other | {"ID": " "}]
    task = HaluEvalGeneral(written(tmp_path / "general_data.json", rows))
    names = {example.id for example in task.examples("test")}
    assert len(names) == len(rows)
    assert {
        f"general/{MARKS[0]['ID']}#0",
        f"general/{MARKS[0]['ID']}#{len(MARKS)}",
        f"general/#{len(MARKS) + 1}",
    } < names


def test_a_copy_of_a_row_of_general_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"line {len(MARKS) + 1}.*line 1"):
        HaluEvalGeneral(written(tmp_path / "general_data.json", [*MARKS, MARKS[0]]))


def test_recognition_is_refused_for_training(tmp_path: Path) -> None:
    task = pairs(tmp_path, (3, 9))
    with pytest.raises(DataError, match=pattern("'halueval_recognition'")):
        task.examples("train")
    with pytest.raises(ConfigError, match=pattern("'halueval_recognition'")):
        load_task(ObjectiveConfig(task="halueval_recognition", data=str(tmp_path)), tmp_path, 0)
    with pytest.raises(DataError, match=pattern("kind='general'", "qa", "dialogue", "summarization")):
        HaluEvalRecognition(tmp_path, kind="general")


def test_selfcheck_can_fail() -> None:
    wrong = Example(id="x", prompt="p", target="Answer: Yes", columns={"hallucinated": False})
    with pytest.raises(DataError, match=pattern("x", "['wrong', 'wrong'")):
        selfcheck([wrong])


def test_real_files(shared_data: Path) -> None:
    task = HaluEvalRecognition(shared_data / "halueval" / "qa_data.json")
    task.selfcheck()
    found = answered(task, {}, "No")
    assert (found["accuracy"], found["pair_accuracy"]) == (0.5, 0.0)
    assert found["length_accuracy"] > 0.85, "length alone tells most of the published pairs apart"
    general = HaluEvalGeneral(shared_data / "halueval")
    general.selfcheck()
    assert len(general.examples("test")) == 1000
