"""The labelled answer sets themselves: ids, labels, families, kinds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.answers import rows

SETS = ("bbq", "qa")


def letters(row: dict[str, Any]) -> set[str]:
    return {"A", "B", "C", "none"}


def classes(row: dict[str, Any]) -> set[str]:
    if row["item"]["right_answer"] == "Not stated":
        return {"correct", "invented", "unparsed"}
    return {"correct", "wrong", "abstained", "unparsed"}


@pytest.mark.parametrize("name", SETS)
def test_ids_are_unique_and_no_item_has_one_text_twice(name: str) -> None:
    assert len({row["id"] for row in rows(name)}) == len(rows(name))
    assert len({(row["id"].rsplit("-", 1)[0], row["text"]) for row in rows(name)}) == len(rows(name))


@pytest.mark.parametrize(("name", "legal"), [("bbq", letters), ("qa", classes)])
def test_every_row_has_one_or_two_legal_labels(name: str, legal: Any) -> None:
    for row in rows(name):
        assert 1 <= len(row["right"]) == len(set(row["right"])) <= 2, row["id"]
        assert set(row["right"]) <= legal(row), row["id"]
    assert sum(len(row["right"]) == 2 for row in rows(name)) / len(rows(name)) < 0.06


@pytest.mark.parametrize("name", SETS)
def test_families_and_kinds_are_many_and_none_is_a_single_case(name: str) -> None:
    assert len({row["family"] for row in rows(name)}) >= 8
    kinds = Counter(row["kind"] for row in rows(name))
    assert len(kinds) >= 25 and min(kinds.values()) >= 3


def test_bbq_items_have_three_options_and_every_position_and_wording_of_the_unknown_one() -> None:
    assert all(len(set(row["options"])) == 3 and row["context"] and row["question"] for row in rows("bbq"))
    assert {row["unknown"] for row in rows("bbq")} == {0, 1, 2}
    assert len({row["options"][row["unknown"]] for row in rows("bbq")}) >= 8


def test_right_answers_of_qa_stand_in_the_source_or_are_yes_no_or_not_stated() -> None:
    for item in (row["item"] for row in rows("qa")):
        found = item["right_answer"].lower().removeprefix("the ").removeprefix("a ") in item["knowledge"].lower()
        assert found or item["right_answer"] in {"yes", "no", "Not stated"}, item
    honest = sum(row["right"] == ["correct"] for row in rows("qa"))
    assert honest / len(rows("qa")) >= 0.4
