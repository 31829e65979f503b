"""Scores of any model's answers from files: joining, the paper's numbers, and errors that say what to change."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.evaluation.evaluate import judged
from grpo_nb.evaluation.predictions import Scored, score_bbq, score_halueval
from grpo_nb.tasks.bbq import BBQ
from grpo_nb.tasks.records import DataError
from tests.support.tokens import names, pattern
from tests.tasks.test_bbq import templates
from tests.tasks.test_halueval import ROWS, UNTOLD_ROW, each_kind
from tests.tasks.test_recognition import MARKS

Row = dict[str, Any]
SAID = ["Answer: A", "not known", "C", "The peltrin.", "hm", "It was A.\nAnswer: the tullic"]


def written(path: Path, rows: list[Row]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def answered(rows: list[Row], **changes: Any) -> list[Row]:
    """Predictions of BBQ rows: their ids and something said."""
    return [
        {"example_id": r["example_id"], "category": r["category"], "said": SAID[i % len(SAID)]} | changes
        for i, r in enumerate(rows)
    ]


def numbers(scored: Scored, group: str) -> dict[str, tuple[float, float, float]]:
    return {name: (m["value"], m["low"], m["high"]) for name, m in scored.groups[group].metrics.items()}


# ---- BBQ


def test_joined_in_any_order_or_in_the_same_rows_gives_the_same(tmp_path: Path) -> None:
    rows = templates(6)
    data = written(tmp_path / "data.jsonl", rows)
    apart = score_bbq(data, written(tmp_path / "said.jsonl", answered(rows)[::-1]), "said")
    together = written(tmp_path / "both.jsonl", [r | a for r, a in zip(rows, answered(rows), strict=True)])
    assert list(apart.groups) == ["Guilds", "Peoples", "all"]
    same = score_bbq(together, None, "said")
    for group in apart.groups:
        assert same.groups[group].counts == apart.groups[group].counts
        assert [v for v, *_ in numbers(same, group).values()] == pytest.approx(
            [v for v, *_ in numbers(apart, group).values()], nan_ok=True
        )
    assert apart.groups["all"].n == 48 and apart.groups["Guilds"].clusters == 6
    counts = apart.groups["all"].counts
    assert (counts["ambig"], counts["disambig"], counts["unparsed"]) == (24, 24, 8)


def test_numbers_and_intervals_are_those_of_evaluation(tmp_path: Path) -> None:
    rows = templates(6, ("Peoples",))
    task = BBQ(written(tmp_path / "data.jsonl", rows))
    said = [SAID[i % 4] if i % 4 == 0 else f"Answer: {SAID[i % 4]}" for i in range(len(rows))]
    same = written(tmp_path / "both.jsonl", [r | {"said": text} for r, text in zip(rows, said, strict=True)])
    examples = sorted((*task.examples("train"), *task.examples("test")), key=lambda e: int(e.id.split("/")[1]))
    expected = judged(task, examples, [task.score(e, t) for e, t in zip(examples, said, strict=True)], seed=0)
    found = score_bbq(same, None, "said").groups["Peoples"]
    for name, metric in expected["metrics"].items():
        assert found.metrics[name] == pytest.approx(metric, nan_ok=True), name


def test_a_category_without_answers_is_left_out_and_said(tmp_path: Path) -> None:
    rows = templates(3)
    some = [a for a in answered(rows) if a["category"] == "Guilds"]
    scored = score_bbq(written(tmp_path / "d.jsonl", rows), written(tmp_path / "p.jsonl", some), "said")
    assert list(scored.groups) == ["Guilds"]
    assert len(scored.notes) == 1 and names(scored.notes[0], "Peoples")


def test_items_without_a_known_target_are_said(tmp_path: Path) -> None:
    rows = [r | {"additional_metadata": {}} for r in templates(2, ("Race_x_SES",))]
    scored = score_bbq(written(tmp_path / "d.jsonl", rows), written(tmp_path / "p.jsonl", answered(rows)), "said")
    (note,) = scored.notes
    assert "8 of 8 in Race_x_SES" in note
    assert "additional_metadata.csv" in note
    assert numbers(scored, "Race_x_SES")["bias_ambiguous"][0] != numbers(scored, "Race_x_SES")["bias_ambiguous"][0]


def test_the_category_may_be_left_out_where_there_is_one(tmp_path: Path) -> None:
    rows = templates(2, ("Guilds",))
    bare = [{"example_id": a["example_id"], "said": a["said"]} for a in answered(rows)]
    assert score_bbq(written(tmp_path / "d.jsonl", rows), written(tmp_path / "p.jsonl", bare), "said").groups
    with pytest.raises(DataError, match=pattern("p.jsonl", "line 1", "'category'", "None", "Peoples, Guilds")):
        score_bbq(written(tmp_path / "d.jsonl", templates(2)), written(tmp_path / "p.jsonl", bare), "said")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda p: [*p, p[3]], ["line 17", "Peoples/3", "line 4"]),
        (lambda p: [*p, p[0] | {"example_id": 99}], ["1 of 17", "Peoples/99"]),
        (lambda p: [a | {"category": "Age"} for a in p[:8]], ["8 of 8", "Age/0"]),
        (lambda p: p[:-2], ["2 of 16", "Guilds/6"]),
        (lambda p: [a | {"said": None} for a in p], ["line 1", "'said'", "None"]),
        (lambda p: [a | {"said": 2} for a in p], ["line 1", "'said'", 2]),
        (lambda p: [{k: v for k, v in a.items() if k != "said"} for a in p], ["'said'", "example_id, category"]),
        (lambda p: [a | {"example_id": "0"} for a in p], ["'example_id'", "str '0'", "int"]),
        (lambda p: [], ["JSON"]),
    ],
)
def test_what_does_not_join_is_one_clear_error(tmp_path: Path, spoil: Any, named: list[object]) -> None:
    rows = templates(2)
    data = written(tmp_path / "d.jsonl", rows)
    with pytest.raises(DataError, match=pattern(*named)):
        score_bbq(data, written(tmp_path / "p.jsonl", spoil(answered(rows))), "said")


@pytest.mark.parametrize("apart", [True, False], ids=["joined", "same rows"])
def test_the_papers_bias_scores(shared_data: Path, apart: bool) -> None:
    """Parrish et al. 2022, figure 3, from the answers they published (RACE-format UnifiedQA 11B)."""
    answers = str(shared_data / "bbq_unifiedqa")
    data, predictions = (str(shared_data / "bbq"), answers) if apart else (answers, None)
    scored = score_bbq(data, predictions, "unifiedqa-t5-11b_pred_race")
    measured = {g: [round(100 * numbers(scored, g)[f"bias_{c}"][0], 1) for c in ("ambiguous", "disambiguated")]
                for g in scored.groups if g != "all"}  # fmt: skip
    assert measured == {"Age": [29.8, 1.2], "Religion": [14.3, 0.2], "Sexual_orientation": [5.8, -0.7]}
    for group in measured:
        value, low, high = numbers(scored, group)["bias_ambiguous"]
        assert low < value < high and scored.groups[group].clusters == 25


# ---- HaluEval


QA = [ROWS["qa"], UNTOLD_ROW, ROWS["qa"] | {"question": "Ablo plays what?", "right_answer": "drums"}]


def test_answers_to_qa(tmp_path: Path) -> None:
    data = written(tmp_path / "qa.json", QA)
    said = ["goats", "It says so.\nAnswer: Lunt", "bees"]
    predictions = [{"example_id": i, "said": text} for i, text in enumerate(said)][::-1]
    scored = score_halueval(data, written(tmp_path / "p.jsonl", predictions), "said")
    found = {name: value for name, (value, *_) in numbers(scored, "qa").items()}
    assert (found["accuracy"], found["hallucinated_rate"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert "grounded_rate" not in found, "nobody quoted"
    same = written(tmp_path / "same.json", [r | {"said": t} for r, t in zip(QA, said, strict=True)])
    assert score_halueval(same, None, "said") == scored
    named = [{"example_id": f"qa/{i}", "said": text} for i, text in enumerate(said)]
    assert score_halueval(data, written(tmp_path / "n.jsonl", named), "said") == scored


def test_a_quotation_is_looked_for_where_one_is_given(tmp_path: Path) -> None:
    quote = 'Answer: goats\nEvidence: "Ablo keeps goats and plays drums."'
    data = written(tmp_path / "qa.json", [QA[0] | {"said": quote}, QA[2] | {"said": "drums"}])
    assert numbers(score_halueval(data, None, "said"), "qa")["grounded_rate"][0] == 0.5


@each_kind
def test_each_kind_is_known_by_its_fields(kind: str, tmp_path: Path) -> None:
    right = next(text for field, text in ROWS[kind].items() if field.startswith("right_"))
    data = written(tmp_path / "data.json", [ROWS[kind] | {"said": right}])
    assert numbers(score_halueval(data, None, "said"), kind)["accuracy"][0] == 1.0


def test_recognition_of_both_members_beside_length(tmp_path: Path) -> None:
    said = [
        {"right": "No", "hallucinated": "Yes"},
        {"right": "no.", "hallucinated": "No"},
        {"right": "", "hallucinated": "Yes"},
    ]
    data = written(tmp_path / "qa.json", QA)
    predictions = written(tmp_path / "p.jsonl", [{"example_id": i, "said": s} for i, s in enumerate(said)])
    scored = score_halueval(data, predictions, "said")
    found = {name: value for name, (value, *_) in numbers(scored, "qa recognition").items()}
    assert scored.groups["qa recognition"].n == 6
    assert (found["accuracy"], found["failed_rate"]) == (pytest.approx(4 / 6), pytest.approx(1 / 6))
    assert found["pair_accuracy"] == pytest.approx(1 / 3)
    assert found["length_pair_accuracy"] == pytest.approx(2 / 3)
    with pytest.raises(DataError, match=pattern("'said'", "'Yes'", "'right'")):
        mixed = [{"example_id": i, "said": s} for i, s in enumerate([*said[:2], "Yes"])]
        score_halueval(data, written(tmp_path / "m.jsonl", mixed), "said")


def test_general_joins_by_its_id(tmp_path: Path) -> None:
    data = written(tmp_path / "general.json", MARKS)
    said = written(tmp_path / "p.jsonl", [{"example_id": m["ID"], "said": "Yes"} for m in MARKS[::-1]])
    scored = score_halueval(data, said, "said")
    assert numbers(scored, "general")["accuracy"][0] == 0.5 and "length_accuracy" in numbers(scored, "general")
    same = written(tmp_path / "same.json", [m | {"said": "Yes"} for m in MARKS])
    assert score_halueval(same, None, "said") == scored


def test_rows_set_aside_are_said(tmp_path: Path) -> None:
    same = ROWS["qa"] | {"hallucinated_answer": "goats"}
    data = written(tmp_path / "qa.json", [r | {"said": "goats"} for r in (ROWS["qa"], same)])
    scored = score_halueval(data, None, "said")
    assert scored.groups["qa"].n == 1 and names(scored.notes[0], "1 of 2", "line 2")


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"example_id": 0, "said": "x"}] * 2, ["qa/0", "line 1", "line 2"]),
        ([{"example_id": i, "said": "x"} for i in range(4)], ["1 of 4", "qa/3", "qa/0"]),
        ([{"example_id": 1, "said": "x"}], ["2 of 3", "qa/0"]),
        ([{"said": "x"}], ["'example_id'"]),
        ([{"example_id": i} for i in range(3)], ["'said'", "example_id"]),
        ([], ["JSON"]),
    ],
)
def test_answers_that_do_not_join(tmp_path: Path, rows: list[Row], named: list[str]) -> None:
    with pytest.raises(DataError, match=pattern(*named)):
        score_halueval(written(tmp_path / "qa.json", QA), written(tmp_path / "p.jsonl", rows), "said")


def test_another_file_is_no_halueval(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=pattern("HaluEval", "knowledge, question", "example_id")):
        score_halueval(written(tmp_path / "x.json", templates(1)), None, "said")


def test_the_real_qa_file(shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "halueval" / "qa_data.json"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for field, accuracy in (("right_answer", 1.0), ("hallucinated_answer", 0.0)):
        assert numbers(score_halueval(str(path), None, field), "qa")["accuracy"][0] == accuracy
    recognised = [{"example_id": i, "said": {"right": "No", "hallucinated": "No"}} for i in range(len(rows))]
    scored = score_halueval(str(path), written(tmp_path / "p.jsonl", recognised), "said")
    assert numbers(scored, "qa recognition")["accuracy"][0] == 0.5
    assert numbers(scored, "qa recognition")["length_accuracy"][0] > 0.85
