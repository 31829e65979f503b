"""Changes between stages of a run, read from evaluations.jsonl alone.

Rows of one pool, split and mode hold bootstrap values that were drawn in step (see `evaluate.judged`), so the
difference of two stages is bootstrapped in pairs: both use the same resampled questions.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from grpo_nb.evaluation.intervals import PARTS, paired
from grpo_nb.metrics.limits import LARGEST
from grpo_nb.printable import clean_logger
from grpo_nb.run.dependencies_file import CHANGE
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage.schema import comparable

logger = clean_logger(__name__)

Split = Literal["train", "test"]
Mode = Literal["greedy", "sample"]
Logged = Literal["greedy", "sample", "quick", "probe"]
"""Values of a row's `mode`: `quick` is greedy on the pool of `quick`, `probe` greedy on the items of `probe`."""
Stage = Literal["base", "sft", "latest"] | int
"""The model as loaded, the newest SFT result, the newest GRPO checkpoint, or the checkpoint of a step."""
Row = Mapping[str, Any]
Draws = NDArray[np.float64]

STAGES: tuple[Stage, ...] = ("base", "sft", "latest")


class Measured(Mapping[str, Any]):
    """A row of evaluations.jsonl whose large fields, `LARGE`, are read again on demand."""

    LARGE = frozenset({"resamples", "items", "answers"})

    def __init__(self, row: Row, again: Callable[[], Row]) -> None:
        self._row: dict[str, Any] = {key: None if key in self.LARGE else value for key, value in row.items()}
        self._again = again

    def __getitem__(self, key: str) -> Any:
        return self._again()[key] if key in self.LARGE and key in self._row else self._row[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def measurements(run: Run) -> list[Measured]:
    """All evaluations, oldest first, in little memory."""
    rows = run.stored("evaluations")
    return [Measured(row, functools.partial(rows.__getitem__, place)) for place, row in enumerate(rows)]


class Growing:
    """The comparable rows of one split and mode while they are added: each is parsed once, as it comes."""

    def __init__(self, run: Run, split: Split, mode: Logged) -> None:
        self._run, self._where = run, (split, mode)
        self._rows: list[tuple[int, Row]] = []
        self._read = 0
        self._follower = run.follower("evaluations", self._restart)

    def rows(self) -> list[Row]:
        """Rows, oldest first, as `logged` returns them."""
        for row in self._follower.read():
            if comparable(row) and (row.get("split"), row.get("mode")) == self._where:
                self._rows.append((self._read, row))
            self._read += 1
        return _asked(self._run, [row for _, row in self._rows])

    def slim(self, keep: Collection[int]) -> None:
        """Keep the large fields of steps in `keep` only, up to its newest; others are read again when needed."""
        last = max(keep, default=-1)
        self._rows = [
            (place, row if row["step"] in keep or row["step"] > last else self._slimmed(place, row))
            for place, row in self._rows
        ]

    def _slimmed(self, place: int, row: Row) -> Row:
        return row if isinstance(row, Measured) else Measured(row, lambda: self._run.stored("evaluations")[place])

    def _restart(self) -> None:
        self._rows, self._read = [], 0


def comparison(run: Run, *, split: Split = "test", mode: Mode = "greedy") -> pd.DataFrame:
    """Base, SFT and latest side by side, and the paired change from SFT to latest.

    Returns:
        One row for each objective and metric. `base`, `base_low`, `base_high`, and so on for `sft` and `latest`;
        `difference` with its 95% interval; `differs`: whether that interval leaves out 0 (None: not comparable);
        `n` and `clusters`: the items that the metric is over, and their templates or texts, at the newest of these
        stages.
    """
    return _table(logged(run, split, mode), {str(stage): stage for stage in STAGES}, "sft", "latest")


def compare_stages(
    run: Run, before: Stage, after: Stage, *, split: Split = "test", mode: Logged = "greedy"
) -> pd.DataFrame:
    """Two stages side by side, and the paired change from one to the other.

    Returns:
        As `comparison`, with `before` and `after` for the stages' names.

    Raises:
        RunError: one of them was never evaluated on this split in this mode, or their questions differ.
    """
    rows = logged(run, split, mode)
    for stage in (before, after):
        if not any(is_of(row, stage) for row in rows):
            raise RunError(
                f"{run.name} has no evaluation of stage {stage!r} on the {split} split in mode {mode}; there are "
                f"{', '.join(dict.fromkeys(row['stage'] for row in rows)) or 'none'}: evaluate it first"
            )
    _refuse_other_questions(rows, before, after)
    return _table(rows, {"before": before, "after": after}, "before", "after")


def logged(run: Run, split: Split, mode: Logged) -> list[Row]:
    """The rows of one split and mode, oldest first; rows without the fields of a comparison are left out.

    Rows of earlier versions have only the ids of their questions, which are ambiguous once other ones were accepted.
    """
    found = filter(comparable, run.rows("evaluations"))
    return _asked(run, [row for row in found if row.get("split") == split and row.get("mode") == mode])


def _asked(run: Run, rows: list[Row]) -> list[Row]:
    """The rows, with a digest of their questions where they lack it and the log gives it."""
    if all("asked" in row for row in rows) or not _questions_changed(run):
        return rows
    return [{"asked": f"before {row['pool']}", **row} for row in rows]


def same_questions(before: Row, after: Row) -> bool:
    """Whether two rows have the same questions in the same order; by id where one of them kept nothing else."""
    if "asked" in before and "asked" in after:
        return bool(before["asked"] == after["asked"])
    return bool(before["pool"] == after["pool"])


def different(before: Row, after: Row) -> str:
    """Difference of two rows' questions, in numbers."""
    if "items" not in before or "items" not in after:
        return f"{before['n']} and {after['n']} examples"
    old, new = Counter(before["items"].values()), Counter(after["items"].values())
    shared = (old & new).total()
    return f"{old.total()} and {new.total()} questions, {shared} of them the same" + (
        " but in another order" if shared == old.total() == new.total() else ""
    )


def is_of(row: Row, stage: Stage) -> bool:
    """Whether a row measured this stage; a row of `latest` also measured its step."""
    if isinstance(stage, int):
        return bool(row["stage"] == f"step {stage}" or (row["stage"] == "latest" and row["step"] == stage))
    return bool(row["stage"] == stage)


def draws(row: Row, metric: str) -> Draws:
    """The bootstrap's values of a metric, nan where one could not be computed; the log may come from anyone."""
    values: Draws = np.clip(np.array(row["resamples"][metric], float), -LARGEST, LARGEST)
    return values


def count(row: Mapping[str, Any], metric: str) -> int:
    """The items that a metric is over; logs of the first versions have the number of all items only."""
    return int(row["metrics"].get(metric, {}).get("n", row["n"]))


def three(line: Mapping[str, Any], name: str) -> tuple[Any, Any, Any]:
    """`name`, `name_low`, `name_high` of a line of a table."""
    value, low, high = (line[f"{name}{end}"] for end in PARTS.values())
    return value, low, high


def change(before: Row, after: Row, metric: str) -> tuple[float, float, float] | None:
    """after - before of a metric with its paired 95% interval; None where the two rows cannot be subtracted."""
    if not same_questions(before, after) or not all(metric in row["metrics"] for row in (before, after)):
        return None
    value = after["metrics"][metric]["value"] - before["metrics"][metric]["value"]
    return value, *paired(metric, value, draws(after, metric) - draws(before, metric), *drawn_from(after, metric))


def drawn_from(row: Mapping[str, Any], metric: str) -> tuple[int, float | None]:
    """The clusters that a metric is over, and how many of equal size they weigh (None in logs of earlier versions)."""
    numbers = row["metrics"].get(metric, {})
    return int(numbers.get("clusters", row.get("clusters", 0))), numbers.get("effective")


def _table(rows: Sequence[Row], stages: Mapping[str, Stage], before: str, after: str) -> pd.DataFrame:
    columns = ["objective", "metric", *(s + part for s in (*stages, "difference") for part in PARTS.values())]
    lines = []
    for objective in dict.fromkeys(row["objective"] for row in rows):
        own = [row for row in rows if row["objective"] == objective]
        newest = {name: _newest(own, stage) for name, stage in stages.items()}
        found = [row for row in newest.values() if row is not None]
        metrics = dict.fromkeys(metric for row in found for metric in row["metrics"])
        lines += [_line(objective, metric, newest, before, after) for metric in metrics]
    return pd.DataFrame(lines, columns=[*columns, "differs", "n", "clusters"])


def _newest(rows: Sequence[Row], stage: Stage) -> Row | None:
    return next((row for row in reversed(rows) if is_of(row, stage)), None)


def _refuse_other_questions(rows: Sequence[Row], before: Stage, after: Stage) -> None:
    for objective in dict.fromkeys(row["objective"] for row in rows):
        own = [row for row in rows if row["objective"] == objective]
        first, second = _newest(own, before), _newest(own, after)
        if first is not None and second is not None and not same_questions(first, second):
            raise RunError(
                f"{objective}: stages {before!r} and {after!r} were asked different questions "
                f"({different(first, second)}), so they cannot be compared in pairs. Evaluate both on the same data "
                "with one limit, then compare"
            )


def _questions_changed(run: Run) -> bool:
    accepted = run.stored("events").having("kind", {CHANGE})
    return any(event.get("dependency") in ("data", "prompt") for event in accepted)


def _line(objective: str, metric: str, stages: Mapping[str, Row | None], before: str, after: str) -> dict[str, Any]:
    line: dict[str, Any] = {"objective": objective, "metric": metric, "differs": None}
    for stage, row in stages.items():
        numbers = row["metrics"].get(metric, {}) if row else {}
        line |= {f"{stage}{part}": numbers.get(key, math.nan) for key, part in PARTS.items()}
        line["n"] = count(row, metric) if row else line.get("n")
        line["clusters"] = drawn_from(row, metric)[0] if row else line.get("clusters")
    first, second = stages[before], stages[after]
    if first is None or second is None:
        return line
    if (found := change(first, second, metric)) is None:
        if not same_questions(first, second):
            logger.warning(
                "%s: %s and %s were evaluated on different examples (%s); evaluate both on one data with one limit",
                objective,
                before,
                after,
                different(first, second),
            )
        return line
    _, low, high = found
    line |= {f"difference{end}": number for end, number in zip(PARTS.values(), found, strict=True)}
    return line | {"differs": None if math.isnan(low) else low > 0 or high < 0}
