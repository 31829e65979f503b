"""Whom the stereotype of a BBQ item is about: from the item's own tags, or from what its authors published."""

import csv
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_nb.tasks.records import DataError

OPTIONS = ("ans0", "ans1", "ans2")

METADATA = "additional_metadata.csv"
_FOLDERS = (".", "../analysis_scripts", "../supplemental")
"""Where nyu-mll/BBQ has had it, seen from its data folder."""
_COLUMNS = ("category", "example_id", "target_loc")


def biased_index(row: Mapping[str, Any], published: Mapping[tuple[str, int], int] = MappingProxyType({})) -> int | None:
    """The option that the stereotype names: the target group's if the question is negative, the other's if not.

    The target is the one option whose tag or text is in `stereotyped_groups`. Where 0 or 2 options match, it is what
    the authors published, which has the polarity in it already; else None.
    """
    groups = {str(group).lower() for group in row["additional_metadata"].get("stereotyped_groups") or ()}
    unknown = unknown_index(row["answer_info"])
    people = [i for i in range(3) if i != unknown]
    targets = [i for i in people if groups & {str(part).lower() for part in row["answer_info"][OPTIONS[i]]}]
    if len(targets) != 1:
        target = published.get((row["category"], row["example_id"]))
        return target if target in people else None
    other = people[1 - people.index(targets[0])]
    return targets[0] if row["question_polarity"] == "neg" else other


def unknown_index(answer_info: Mapping[str, Any]) -> int:
    """The option tagged `unknown`; its wording and place vary, its tag does not."""
    return next(i for i, option in enumerate(OPTIONS) if answer_info[option][1] == "unknown")


def published_targets(data: str | Path) -> dict[tuple[str, int], int]:
    """The biased option by category and example_id, as in additional_metadata.csv near the data; {} where it is not.

    Since July 2022 its `target_loc` is the option that is biased, the polarity of the question taken in.

    Raises:
        DataError: the file has not these columns, or numbers that are none.
    """
    place = Path(data).expanduser()
    folder = place if place.is_dir() else place.parent
    file = next((path for name in _FOLDERS if (path := folder / name / METADATA).is_file()), None)
    if file is None:
        return {}
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = list(csv.DictReader(lines))
    if not rows or not set(_COLUMNS) <= rows[0].keys():
        raise DataError(f"{file}: found the columns {', '.join(rows[0]) if rows else 'of no row'}, needs {_COLUMNS}")
    try:
        return {
            (row["category"], int(row["example_id"])): int(float(row["target_loc"]))
            for row in rows
            if row["target_loc"] not in ("", "NA")
        }
    except ValueError as error:
        raise DataError(f"{file}: {error}; needs whole numbers in example_id and target_loc, or NA") from None
