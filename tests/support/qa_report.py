"""How the QA reward judges the labelled answers beside a person: a confusion table by kind.

    python -m tests.support.qa_report [folder] [--held] [--errors]

The folder holds a qa.jsonl in the form of tests/answers, with --held a qa_held.jsonl. `paid` is correct where a person
sees another label, `missed` another label where a person sees correct, `undecided` no verdict, `other` any further
disagreement.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_nb.tasks.halueval import UNDECIDED, judge
from grpo_nb.tasks.reading import abstains
from grpo_nb.types import Score
from tests.support import confusion

HERE = Path(__file__).parents[1] / "answers"
VERDICTS = ("agree", "paid", "missed", "undecided", "other")


def score_of(row: Mapping[str, Any]) -> Score:
    """What the reward gives a labelled answer."""
    columns = {**row["item"], "kind": "qa", "answerable": not abstains(row["item"]["right_answer"]), "evidence": True}
    return judge(columns, row["text"])


def verdict(row: Mapping[str, Any]) -> str:
    """One of VERDICTS."""
    found = score_of(row).label
    if found in row["right"]:
        return "agree"
    if found == UNDECIDED:
        return "undecided"
    return "paid" if found == "correct" else "missed" if "correct" in row["right"] else "other"


def counted(rows: Iterable[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Verdicts by kind, and of all."""
    return confusion.counted(rows, verdict)


def rows_of(folder: Path, name: str = "qa") -> list[dict[str, Any]]:
    """The labelled answers to QA items of a folder; a line may hold an item with several `answers`."""
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        row
        for line in lines
        for row in ([{**answer, "item": line} for answer in line["answers"]] if "answers" in line else [line])
    ]


def main() -> None:
    """Print the table, and with --errors each answer that is judged otherwise."""
    folders = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("--")]
    rows = rows_of(folders[0] if folders else HERE, "qa_held" if "--held" in sys.argv else "qa")
    confusion.show(counted(rows), VERDICTS)
    if "--errors" in sys.argv:
        for row in rows:
            if (found := verdict(row)) != "agree":
                score, gold = score_of(row), row["item"]["right_answer"]
                print(f"{found}: {row['kind']} {row['id']} {gold!r} {row['right']} {score.label} {score.cause}")
                print(f"    {row['text']!r}")


if __name__ == "__main__":
    main()
