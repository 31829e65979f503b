"""HaluEval's three kinds: reading, splitting, matching, grounding, labels and rewards."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.config import ConfigError, ObjectiveConfig
from grpo_nb.storage import digests
from grpo_nb.tasks import SPLITS, load_task
from grpo_nb.tasks.halueval import (
    BARE,
    FORMS,
    GROUNDED,
    UNDECIDED,
    UNTOLD,
    HaluEval,
    HaluEvalDialogue,
    HaluEvalQA,
    HaluEvalSummarization,
    judge,
    known_bad,
)
from grpo_nb.tasks.reading import abstains, read
from grpo_nb.tasks.records import DataError
from grpo_nb.types import Example, Score
from tests import answers
from tests.support.tokens import names, pattern

RIGHT = {
    "knowledge": "Ablo keeps goats and plays drums.",
    "question": "Ablo keeps what animals?",
    "right_answer": "goats",
    "hallucinated_answer": "Ablo keeps bees.",
}
UNTOLD_ROW = RIGHT | {
    "question": "Ablo lives in what town?",
    "right_answer": "Not stated",
    "hallucinated_answer": "Lunt",
}


TALK = {
    "knowledge": "The Lantern Keeper is a film by Orsa Lind, who also made The Salt Road in 2004.",
    "dialogue_history": "[Human]: I liked The Lantern Keeper. Who made it? [Assistant]: Orsa Lind did. "
    "[Human]: Has she made anything else? ",
    "right_response": "Yes, she also made The Salt Road, which came out in 2004.",
    "hallucinated_response": "Yes, she also made The Glass Harbor, which came out in 2011.",
}
NEWS = {
    "document": "The council of Tarnby voted on Monday to close the old ferry. Repairs would have cost two million "
    "crowns, the mayor said. Islanders will use a new bridge from May, and the ferry's crew of nine moves to the "
    "harbor office. A group of islanders had asked the council to keep the boat as a museum.",
    "right_summary": "Tarnby's council voted to close the old ferry. Islanders will use a new bridge from May.",
    "hallucinated_summary": "Tarnby's council voted to rebuild the old ferry. Islanders must wait for it until winter.",
}
ROWS = {"qa": RIGHT, "dialogue": TALK, "summarization": NEWS}
TASKS: dict[str, type[HaluEval]] = {
    "qa": HaluEvalQA,
    "dialogue": HaluEvalDialogue,
    "summarization": HaluEvalSummarization,
}
each_kind = pytest.mark.parametrize("kind", ROWS)


def load(folder: Path, *rows: dict[str, Any], kind: str = "qa", **arguments: Any) -> HaluEval:
    path = folder / f"{kind}_data.json"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return TASKS[kind](path, **arguments)


def every(task: HaluEval) -> list[Example]:
    return [*task.examples("train"), *task.examples("test")]


def columns(kind: str, **changes: Any) -> dict[str, Any]:
    return {**ROWS[kind], "kind": kind, "answerable": True, "evidence": True, **changes}


def says(kind: str, completion: str, **changes: Any) -> Score:
    return judge(columns(kind, **changes), completion)


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
        (RIGHT, "goats", "correct"),
        (RIGHT, "", "unparsed"),
        (RIGHT, "<think>Answer: goats", "unparsed"),
        (RIGHT, "<think>Answer: goats</think>bees", "wrong"),
        (RIGHT, "Answer: ...", "unparsed"),
        (UNTOLD_ROW, "Answer: Not stated", "correct"),
        (UNTOLD_ROW, "Answer: It cannot be determined from the text.", "correct"),
        (UNTOLD_ROW, "Answer: Lunt", "invented"),
        (UNTOLD_ROW, "Answer: Not stated, but Lunt", "invented"),
        (UNTOLD_ROW, "Answer: The text does not say; I think Tarnby", "invented"),
        (UNTOLD_ROW, "Answer: The text does not say where Ablo lives.", "correct"),
        (RIGHT, "Answer: goats, unknown", "wrong"),
        (RIGHT, "Answer: Not stated, goats", "abstained"),
        (UNTOLD_ROW, "Lunt", "invented"),
    ],
)
def test_labels_and_rewards(tmp_path: Path, row: dict[str, Any], completion: str, label: str) -> None:
    task = load(tmp_path, row)
    assert task.score(every(task)[0], completion).label == label


def test_the_order_of_the_classes() -> None:
    right = ["misquoted", "correct", "correct and grounded"]
    assert list(GROUNDED.classes) == ["unparsed", "wrong", "abstained", *right]
    assert list(BARE.classes) == ["unparsed", "wrong", "abstained", "copied", "correct"]
    assert list(UNTOLD.classes) == ["unparsed", "invented", "correct"]
    assert GROUNDED.best == BARE.best == UNTOLD.best == 1.0
    for bands in (GROUNDED, BARE, UNTOLD):
        assert all(low == high for low, high in bands.classes.values()), "no style moves a reward inside its class"
    assert GROUNDED.value("abstained") <= 0.5, "hedging must stay far from being right"


QUOTE = '\nEvidence: "Ablo keeps goats and plays drums."'


def test_each_class_scores_above_the_one_before() -> None:
    worst_to_best = [
        "Answer:",
        "Answer: bees",
        "Answer: unknown",
        "Answer: Ablo keeps goats",
        "Answer: goats" + QUOTE,
    ]
    values = [says("qa", text).value or 0 for text in worst_to_best]
    assert values == sorted(values) and len(set(values)) == len(values)
    untold = [says("qa", text, **UNTOLD_COLUMNS).value for text in ("Answer:", "Answer: Lunt", "Answer: not stated")]
    assert untold == [0.0, 0.1, 1.0]


UNTOLD_COLUMNS = {**UNTOLD_ROW, "answerable": False}


def test_style_moves_no_reward() -> None:
    for same in (
        ("Answer: goats", "Answer: Ablo keeps goats", "Answer: It is goats.", "Answer: According to the text, goats."),
        ("Answer: brown bees", "Answer: Ablo keeps bees", "Answer: forty goats"),
    ):
        assert len({says("qa", text).value for text in same}) == 1


def test_evidence_counts_where_it_is_in_the_source_and_speaks_of_the_answer() -> None:
    good = says("qa", "Answer: goats" + QUOTE)
    assert (good.value, good.parts) == (1.0, {"grounded": 1.0})
    bare = says("qa", "Answer: goats")
    assert (bare.label, bare.parts) == ("correct", {"grounded": 0.0})
    made_up = says("qa", 'Answer: goats\nEvidence: "Ablo has always loved his goats."')
    assert made_up.parts == {"grounded": 0.0}
    assert 0.8 <= made_up.value < bare.value, "an invented quotation is worse than none"  # type: ignore[operator]
    assert says("qa", "Answer: bees" + QUOTE).label == "wrong", "evidence makes nothing right"
    assert says("qa", "Answer: goats" + QUOTE, evidence=False).value == 1.0
    assert says("qa", "Answer: goats", evidence=False) == Score(value=1.0, label="correct")


def test_answer_and_evidence() -> None:
    text = "Thinking.\nAnswer: Two towns\nwere flooded.\n\nEvidence: the answer: \u201cTwo towns drowned.\u201d"
    found = read(text)
    assert (found.answer, found.block) == ("Two towns", "Two towns were flooded.")
    assert found.evidence == "Two towns drowned."
    assert read('Answer: goats Evidence: "it keeps goats"').answer == "goats"
    assert read("Answer:\nEvidence: goats").answer == ""
    assert read("Evidence: as it stands").evidence == "as it stands"
    assert read("Answer: goats").evidence is None


@pytest.mark.parametrize(
    ("kind", "answer", "same"),
    [
        ("dialogue", TALK["right_response"], True),
        ("dialogue", "She made The Salt Road as well, in 2004.", True),
        ("dialogue", TALK["hallucinated_response"], False),
        ("dialogue", "She made The Salt Road and The Glass Harbor in 2011.", False),
        ("dialogue", "She made The Salt Road, and then she moved to Paris.", False),  # a name from nowhere
        ("dialogue", "yes, the salt road in 2004, the glass harbor too", False),  # two of the bad one's three words
        ("dialogue", "Yes, she has made many good films.", False),
        ("summarization", NEWS["right_summary"], True),
        ("summarization", "The council will close the ferry; a bridge opens in May.", True),
        ("summarization", NEWS["hallucinated_summary"], False),
        ("summarization", "The council will close the ferry in 2031; a bridge opens in May.", False),
        ("summarization", f"{NEWS['right_summary']} {NEWS['hallucinated_summary']}", False),
        ("summarization", NEWS["document"], False),
        ("summarization", f"In short: {NEWS['document']} So it is.", False),
    ],
)
def test_agreement_of_free_answers(kind: str, answer: str, same: bool) -> None:
    assert (says(kind, f"Answer: {answer}").label == "correct") is same


def test_a_copied_reply_is_at_the_bottom_of_its_class() -> None:
    for text in (TALK["knowledge"], f"Sure: {TALK['knowledge']}", TALK["knowledge"].removeprefix("The Lantern ")):
        score = says("dialogue", f"Answer: {text}")
        assert (score.label, score.value) == ("correct", GROUNDED.value("misquoted"))


@pytest.mark.parametrize("text", ["Unknown", "Not stated.", "I don't know", "The text does not say", "can't say"])
def test_abstentions(text: str) -> None:
    assert abstains(text)


@pytest.mark.parametrize("text", ["The Unknown Soldier", "It is not known for beetles", "no", "none of them", ""])
def test_what_is_no_abstention(text: str) -> None:
    assert not abstains(text)


def test_prompt_target_and_columns(tmp_path: Path) -> None:
    told, untold = every(load(tmp_path, RIGHT, UNTOLD_ROW))
    (turn,) = told.prompt
    assert turn["content"].split("\n")[:2] == [RIGHT["knowledge"], RIGHT["question"]]
    assert told.target == f"Answer: goats{QUOTE}" and untold.target == "Answer: Not stated"
    assert "Evidence: " in turn["content"].split("\n")[2]
    (plain,) = every(load(tmp_path, RIGHT, evidence=False, instruction="Say."))
    assert plain.target == "Answer: goats" and plain.prompt[0]["content"].endswith("\nSay.")  # type: ignore[index]
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
    task = load(tmp_path, RIGHT, RIGHT, RIGHT, RIGHT, UNTOLD_ROW, UNTOLD_ROW)
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
        "undecided_rate": 0.0,
        "grounded_rate": 0.0,
    }
    over = {name: sum(part) for name, part in task.support(examples, []).items()}
    assert over == {"accuracy_answerable": 4, "accuracy_unanswerable": 2, "grounded_rate": 4}
    quoting = [task.score(e, e.target) for e in examples[:2]]
    assert task.summary(examples[:2], [quoting[0], task.score(examples[1], "Answer: goats")])["grounded_rate"] == 0.5
    answerable_only = task.summary(examples[:1], [task.score(examples[0], "Answer: goats")])
    assert math.isnan(answerable_only["accuracy_unanswerable"])


@each_kind
def test_selfcheck(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = load(tmp_path, ROWS[kind], *([UNTOLD_ROW] if kind == "qa" else []), kind=kind)
    task.selfcheck()
    assert [task.score(e, e.target).value for e in every(task)] == [1.0] * len(every(task)), "gold scores top"
    monkeypatch.setattr("grpo_nb.tasks.halueval.known_bad", lambda columns: [every(task)[0].target])
    with pytest.raises(DataError, match=pattern(f"{kind}/0", "(1.0)")):
        task.selfcheck()


@each_kind
def test_known_bad_answers_score_less_than_gold(kind: str) -> None:
    values = [says(kind, text).value for text in known_bad(columns(kind))]
    assert len(values) == 5 and all(value is not None and value < 0.8 for value in values)


@each_kind
def test_rows_that_cannot_be_told_apart_are_set_aside(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form = FORMS[kind]
    same = ROWS[kind] | {form.hallucinated: ROWS[kind][form.right]}
    with caplog.at_level(logging.WARNING):
        task = load(tmp_path, ROWS[kind], same, kind=kind)
    assert [e.id for e in every(task)] == [f"{kind}/0"]
    assert len(task.set_aside) == 1 and task.set_aside[0].endswith("line 2")
    assert names(caplog.text, "1 of 2", "line 2")
    with pytest.raises(DataError, match="1 of 1"):
        load(tmp_path, same, kind=kind)


@each_kind
def test_prompts_hold_the_source_and_what_is_asked(kind: str, tmp_path: Path) -> None:
    (example,) = every(load(tmp_path, ROWS[kind], kind=kind))
    content, form = example.prompt[0]["content"], FORMS[kind]  # type: ignore[index]
    assert content.startswith(ROWS[kind][form.source])
    assert form.asked is None or ROWS[kind][form.asked].strip() in content
    assert kind == "qa" or ROWS[kind][form.right] not in content
    assert ROWS[kind][form.hallucinated] not in content
    json.dumps(dict(example.columns))


PIECES = st.sampled_from([
    *("Answer:", "Evidence:", "goats", "bees", "Not stated", "yes", "no", "or", ".", '"', "\n", "**", "the", "2011"),
    *(text for row in ROWS.values() for text in row.values()),
])  # fmt: skip
TEXTS = st.lists(PIECES, max_size=12).map(" ".join) | st.text(max_size=200)


@each_kind
@given(text=TEXTS, told=st.booleans())
def test_every_text_scores_inside_the_band_of_its_class(kind: str, text: str, told: bool) -> None:
    score = says(kind, text, answerable=told)
    if score.value is None:
        assert score.label == UNDECIDED and told and score.cause
        return
    bands = GROUNDED if told else UNTOLD
    classes = ("misquoted", "correct", "correct and grounded") if told and score.label == "correct" else (score.label,)
    assert score.value in [bands.value(name) for name in classes]


@each_kind
@given(before=st.text(alphabet="abcxyz ,.!\n", max_size=300), marks=st.sampled_from(["", "*", "**", "`", "> "]))
def test_style_and_length_around_an_answer_leave_its_class(kind: str, before: str, marks: str) -> None:
    form = FORMS[kind]
    for text in (ROWS[kind][form.right], ROWS[kind][form.hallucinated], "Not stated"):
        plain, styled = says(kind, f"Answer: {text}"), says(kind, f"{before}\n{marks}Answer:{marks} {text}\n")
        assert styled.label == plain.label


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({k: v for k, v in RIGHT.items() if k != "knowledge"}, ["line 1", "'knowledge'"]),
        (RIGHT | {"question": 5}, ["line 1", "'question'", "int 5", "str"]),
        (RIGHT | {"right_answer": "  "}, ["line 1", "'right_answer'"]),
        (RIGHT | {"question": "Who \ud800?"}, ["line 1", "'question'", r"'Who \ud800?'"]),
    ],
)
def test_a_wrong_row_is_one_clear_error(tmp_path: Path, row: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(DataError, match=pattern(*named)):
        load(tmp_path, row)


def test_a_reply_that_begins_with_not_knowing_is_an_answer(tmp_path: Path) -> None:
    modest = TALK | {"right_response": "I don't know all of it, but she made The Salt Road in 2004."}
    (example,) = every(load(tmp_path, modest, kind="dialogue"))
    assert example.columns["answerable"]


@each_kind
def test_each_kind_names_its_missing_field(kind: str, tmp_path: Path) -> None:
    right = FORMS[kind].right
    with pytest.raises(DataError, match=pattern("line 1", f"'{right}'")):
        load(tmp_path, {k: v for k, v in ROWS[kind].items() if k != right}, kind=kind)


@each_kind
def test_objectives_name_the_kinds(kind: str, tmp_path: Path) -> None:
    load(tmp_path, ROWS[kind], kind=kind)
    task = load_task(ObjectiveConfig(task=f"halueval_{kind}", data=str(tmp_path)), tmp_path, 0)
    assert type(task) is TASKS[kind] and task.name == f"halueval_{kind}"
    if kind != "qa":
        with pytest.raises(ConfigError, match=pattern("demo", "bbq", "halueval_qa")):
            load_task(ObjectiveConfig(task=f"halueval_{kind}", data="demo"), tmp_path, 0)


def test_a_folder_takes_its_qa_file(tmp_path: Path) -> None:
    load(tmp_path, RIGHT)
    (tmp_path / "general_data.json").write_text('{"ID": "1"}\n')
    assert len(every(HaluEvalQA(tmp_path))) == 1


def test_real_file_reads_checks_and_splits(shared_data: Path) -> None:
    task = HaluEvalQA(shared_data / "halueval")
    assert task.set_aside == []
    gold = [task.score(e, e.target or "") for e in every(task)]
    assert {score.label for score in gold} == {"correct"}
    assert sum(score.value == 1 for score in gold) >= 0.995 * len(gold), "gold quotes its source"
    assert (len(task.examples("train")), len(task.examples("test"))) == (320, 80)
    assert all(e.columns["answerable"] for e in every(task)), "the published rows are all answerable"
    targets = sorted(str(example.target) for example in every(task))
    assert digests.of_json("", targets).digest[:12] == "e0606113f6b7", "runs made before learn from these"
    task.selfcheck()


def test_targets_stay_as_runs_made_before_have_them(tmp_path: Path) -> None:
    rows = [row["item"] for name in ("qa", "qa_held") for row in answers.rows(name)]
    items = list({item["knowledge"] + item["question"]: item for item in rows}.values())
    path = tmp_path / "qa_data.json"
    path.write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
    task = HaluEvalQA(path)
    targets = sorted(str(example.target) for split in SPLITS for example in task.examples(split))
    assert (len(targets), digests.of_json("", targets).digest[:12]) == (57, "14b3349132ca")
