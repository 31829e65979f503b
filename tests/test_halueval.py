"""HaluEval QA: reading, splitting, matching, labels and rewards."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.tasks.answers import abstains
from grpo_nb.tasks.halueval import VALUES, HaluEvalQA, matches, token_f1
from grpo_nb.tasks.records import DataError
from grpo_nb.types import Example

RIGHT = {
    "knowledge": "Ablo keeps goats and plays drums.",
    "question": "Ablo keeps what animals?",
    "right_answer": "goats",
    "hallucinated_answer": "Ablo keeps bees.",
}
UNTOLD = RIGHT | {"question": "Ablo lives in what town?", "right_answer": "Not stated", "hallucinated_answer": "Lunt"}


def load(folder: Path, *rows: dict[str, Any], **arguments: Any) -> HaluEvalQA:
    path = folder / "qa_data.json"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return HaluEvalQA(path, **arguments)


def every(task: HaluEvalQA) -> list[Example]:
    return [*task.examples("train"), *task.examples("test")]


@pytest.mark.parametrize(
    ("row", "completion", "label"),
    [
        (RIGHT, "Answer: goats", "correct"),
        (RIGHT, "answer: **The Goats.**", "correct"),
        (RIGHT, "Answer: Ablo keeps goats", "correct"),
        (RIGHT, "Answer: bees\nAnswer: goats", "correct"),
        (RIGHT, "Answer: bees", "wrong"),
        (RIGHT, "Answer: Ablo keeps bees.", "wrong"),
        (RIGHT, "Answer: The text does not say", "abstained"),
        (RIGHT, "goats", "unparsed"),
        (RIGHT, "Answer: ...", "unparsed"),
        (UNTOLD, "Answer: Not stated", "correct"),
        (UNTOLD, "Answer: It cannot be determined from the text.", "correct"),
        (UNTOLD, "Answer: Lunt", "invented"),
        (UNTOLD, "Lunt", "unparsed"),
    ],
)
def test_labels_and_rewards(tmp_path: Path, row: dict[str, Any], completion: str, label: str) -> None:
    task = load(tmp_path, row)
    score = task.score(every(task)[0], completion)
    assert (score.label, score.value) == (label, VALUES[label])


def test_rewards_are_ordered_with_room_below_right() -> None:
    assert VALUES["unparsed"] < VALUES["wrong"] < VALUES["abstained"] < VALUES["correct"] == 1.0
    assert VALUES["unparsed"] < VALUES["invented"] < VALUES["correct"]
    assert VALUES["abstained"] <= 0.5, "hedging must stay far from being right"


@pytest.mark.parametrize(
    ("answer", "right", "hallucinated", "same"),
    [
        ("Delhi", "Delhi", "Mumbai", True),
        ("it is in Delhi", "Delhi", "Mumbai", True),
        ("Delhi or Mumbai", "Delhi", "Mumbai", False),
        ("Delhi, Pune, Agra, Goa", "Delhi", "Mumbai", False),
        ("President Richard Nixon of the USA", "President Richard Nixon", "Marge", True),
        ("New Delhis", "Delhi", "Mumbai", False),
        ("Arthur's Magazine was started first", "Arthur's Magazine", "First for Women was started first.", True),
        ("First for Women was started before Arthur's Magazine", "Arthur's Magazine", "First for Women was", False),
        ("No, they are not.", "no", "Yes, both are.", True),
        ("yes", "no", "Yes, both are.", False),
        ("Nobody, yes", "yes", "no", False),
    ],
)
def test_matching(answer: str, right: str, hallucinated: str, same: bool) -> None:
    question = "Which city, or was Arthur's Magazine started before First for Women?"
    assert matches(answer, right, hallucinated, question) is same


def test_token_f1_by_hand() -> None:
    assert token_f1("b c c", "c d") == pytest.approx(2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2))
    assert token_f1("a", "b") == 0


@pytest.mark.parametrize("text", ["Unknown", "Not stated.", "I don't know", "The text does not say", "can't say"])
def test_abstentions(text: str) -> None:
    assert abstains(text)


@pytest.mark.parametrize("text", ["The Unknown Soldier", "It is not known for beetles", "no", "none of them", ""])
def test_what_is_no_abstention(text: str) -> None:
    assert not abstains(text)


def test_prompt_target_and_columns(tmp_path: Path) -> None:
    told, untold = every(load(tmp_path, RIGHT, UNTOLD))
    (turn,) = told.prompt
    assert turn["content"].split("\n")[:2] == [RIGHT["knowledge"], RIGHT["question"]]
    assert told.target == "Answer: goats"
    assert told.columns["answerable"] and not untold.columns["answerable"]
    assert told.id != untold.id
    json.dumps([dict(told.columns), dict(untold.columns)])


def test_a_passage_is_on_one_side_of_the_split(tmp_path: Path) -> None:
    rows = [RIGHT | {"knowledge": f"Passage {i % 20}.", "question": f"{i}?"} for i in range(60)]
    task = load(tmp_path, *rows)
    sides = [{e.columns["knowledge"] for e in task.examples(split)} for split in ("train", "test")]
    assert not sides[0] & sides[1]
    assert [len(side) for side in sides] == [16, 4]
    assert len(every(task)) == 60
    assert {e.id for e in load(tmp_path, *rows).examples("test")} == {e.id for e in task.examples("test")}


def test_summary(tmp_path: Path) -> None:
    task = load(tmp_path, RIGHT, RIGHT, RIGHT, RIGHT, UNTOLD, UNTOLD)
    examples = sorted(every(task), key=lambda e: e.id)
    texts = ["Answer: goats", "Answer: bees", "Answer: unknown", "?", "Answer: unknown", "Answer: Lunt"]
    summary = task.summary(examples, [task.score(e, t) for e, t in zip(examples, texts, strict=True)])
    assert summary == {
        "accuracy": pytest.approx(2 / 6),
        "accuracy_answerable": pytest.approx(1 / 4),
        "accuracy_unanswerable": pytest.approx(1 / 2),
        "hallucinated_rate": pytest.approx(2 / 6),
        "abstention_rate": pytest.approx(2 / 6),
        "unparsed_rate": pytest.approx(1 / 6),
    }
    answerable_only = task.summary(examples[:1], [task.score(examples[0], "Answer: goats")])
    assert math.isnan(answerable_only["accuracy_unanswerable"])


def test_selfcheck(tmp_path: Path) -> None:
    load(tmp_path, RIGHT, UNTOLD).selfcheck()
    with pytest.raises(DataError, match=r"qa/0: right answer 'goats' scores 1\.0, hallucinated 'goats' scores 1\.0"):
        load(tmp_path, RIGHT | {"hallucinated_answer": "goats"}).selfcheck()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({k: v for k, v in RIGHT.items() if k != "knowledge"}, r"line 1: field 'knowledge' is missing"),
        (RIGHT | {"question": 5}, r"field 'question' is int 5, needs str"),
        (RIGHT | {"right_answer": "  "}, r"field 'right_answer' is blank"),
    ],
)
def test_a_wrong_row_is_one_clear_error(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(tmp_path, row)


def test_a_folder_takes_its_qa_file(tmp_path: Path) -> None:
    load(tmp_path, RIGHT)
    (tmp_path / "general_data.json").write_text('{"ID": "1"}\n')
    assert len(every(HaluEvalQA(tmp_path))) == 1


def test_real_file_reads_checks_and_splits(shared_data: Path) -> None:
    task = HaluEvalQA(shared_data / "halueval")
    assert (len(task.examples("train")), len(task.examples("test"))) == (320, 80)
    assert all(e.columns["answerable"] for e in every(task)), "the published rows are all answerable"
    task.selfcheck()
