"""How the reader reads the labelled answers beside a person: a confusion table by kind.

    python -m tests.support.answer_report [folder] [--errors]

The folder holds a bbq.jsonl in the form of tests/answers. `misread` is a wrong option, or one where a person sees none;
`unread` is none where a person sees one.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_nb.tasks.bbq import judge
from tests.support import confusion

HERE = Path(__file__).parents[1] / "answers"
VERDICTS = ("agree", "misread", "unread")


def reading_of(row: Mapping[str, Any]) -> str:
    """A, B, C or none: what the reader sees in a labelled answer."""
    columns = {name: row[name] for name in ("question", "options", "unknown")}
    chosen = judge({**columns, "label": 0}, row["text"])[1]
    return "none" if chosen is None else "ABC"[chosen]


def verdict(row: Mapping[str, Any]) -> str:
    """One of VERDICTS."""
    found = reading_of(row)
    if found in row["right"]:
        return "agree"
    return "unread" if found == "none" else "misread"


def counted(rows: Iterable[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Verdicts by kind, and of all."""
    return confusion.counted(rows, verdict)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The labelled answers to BBQ items of a folder."""
    return [json.loads(line) for line in (folder / "bbq.jsonl").read_text(encoding="utf-8").splitlines()]


def wordings() -> list[dict[str, Any]]:
    """The rows of wordings.jsonl, each answer with its item, in the form of bbq.jsonl."""
    items = [json.loads(line) for line in (HERE / "wordings.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {**item, "kind": item["question"], "text": text, "right": right.split("|")}
        for item in items
        for right, texts in item["answers"].items()
        for text in texts
    ]


def main() -> None:
    """Print the table, and with --errors each answer that is read otherwise."""
    folders = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("--")]
    rows = rows_of(folders[0] if folders else HERE)
    confusion.show(counted(rows), VERDICTS)
    if "--errors" in sys.argv:
        for row in rows:
            if (found := verdict(row)) != "agree":
                print(f"{found}: {row['kind']} {row['id']} {row['options']} {row['right']} read {reading_of(row)}")
                print(f"    {row['text']!r}")


if __name__ == "__main__":
    main()
