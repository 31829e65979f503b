"""Finding, the record of one problem, and how rules read metric rows.

Rows are dictionaries as in metrics.jsonl, oldest first. A value that a row lacks was not measured: it reads as None,
and no rule fires on it.
"""

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol, overload, runtime_checkable

from grpo_nb.config import Config
from grpo_nb.metrics import keys, limits
from grpo_nb.printable import printable

Row = Mapping[str, Any]
Severity = Literal["info", "warning", "error"]
Action = Literal["none", "warn", "skip", "slow", "rollback", "stop", "end"]

FIRST_STEP = 1
WINDOW = 10
"""Rows a level is averaged over: short enough to react within a demo run, long enough to smooth a batch's noise."""
ENOUGH = 3
"""Rows a level needs before it is judged: one bad batch is no trend."""
FURTHEST = 10_000
"""Steps beyond ten times the rows that are looked for: a log or a folder's name may claim any number."""
BASELINE = 5
"""Rows at the start of the run that later rows are compared with: absolute levels differ between models."""


@runtime_checkable
class Rows(Protocol):
    """Protocol of rows in their order: a sequence, or `history.History` for a long one."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, place: int, /) -> Row: ...

    @overload
    def __getitem__(self, place: slice, /) -> Sequence[Row]: ...

    def __iter__(self) -> Iterator[Row]: ...


@dataclass(frozen=True)
class Finding:
    """One finding: what happened, the likely cause, and what to change, with its numbers.

    >>> print(Finding("truncation", "warning", 40, "32% of answers hit the cap.", {"share": 0.32}, "raise the cap"))
    warning: truncation at step 40: 32% of answers hit the cap. What to do: raise the cap.
    """

    rule: str
    severity: Severity
    step: int | None
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""
    action: Action = "warn"
    """Action of the trainer: none, log it, skip the update, halve the learning rate, undo the step, stop the run at
    once (this step is not kept), or end it at the step boundary, saved."""
    recurring: str = ""
    """The advice where a moment recurs within WINDOW steps; empty: the same."""

    @property
    def key(self) -> tuple[str, str]:
        """Rule and objective: findings with the same key are the same continuing problem."""
        return self.rule, str(self.evidence.get("objective", ""))

    def to_dict(self) -> dict[str, object]:
        """The finding as plain JSON values, as an event holds it."""
        return {
            "step": self.step,
            "rule": self.rule,
            "severity": self.severity,
            "message": self.message,
            "advice": self.advice,
            "action": self.action,
            "evidence": dict(self.evidence),
        }

    def __str__(self) -> str:
        where = "" if self.step is None else f" at step {self.step}"
        advice = f" What to do: {self.advice}." if self.advice else ""
        return printable(f"{self.severity}: {self.rule}{where}: {self.message}{advice}")


def named_in(text: str) -> list[str]:
    """The rules whose findings a text quotes, as the error does that they ended a training with.

    >>> named_in("TrainingError: error: first_update_wrong at step 1: the ratio is not 1.")
    ['first_update_wrong']
    """
    return list(dict.fromkeys(_QUOTED.findall(text)))


_QUOTED = re.compile(r"^(?:\w+: )?(?:info|warning|error): (\w+)(?: at step \d+)?: ", re.MULTILINE)
"""The head of `str(finding)`, at the beginning of a line."""


def number(row: Row, key: str) -> float | None:
    """The row's value as a float, within the key's limits, or nan or inf; None where it was not measured."""
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        return float(value) if value.lstrip("+-").lower() in ("nan", "inf", "infinity") else None
    low, high = limits.of(key)
    if not low <= value <= high and (isinstance(value, int) or math.isfinite(value)):
        value = low if value < low else high
    return float(value)


def in_use(row: Row, key: str, setting: float) -> float:
    """A knob as the row has it, 0 included; the setting where the row does not have it."""
    value = number(row, key)
    return setting if value is None else value


def series(rows: Iterable[Row], key: str) -> list[float]:
    """The finite values of a key, oldest first."""
    values = (number(row, key) for row in rows)
    return [v for v in values if v is not None and math.isfinite(v)]


def level(rows: Rows, key: str) -> float | None:
    """Mean over the last WINDOW rows; None with fewer than ENOUGH values."""
    values = series(rows[-WINDOW:], key)
    return statistics.fmean(values) if len(values) >= ENOUGH else None


def start(rows: Rows, key: str) -> float | None:
    """Mean over the first BASELINE rows."""
    values = series(rows[:BASELINE], key)
    return statistics.fmean(values) if values else None


def label_level(rows: Rows, objective: str, label: str, group: keys.Key = keys.LABEL) -> float | None:
    """Mean share of a label over the window; 0 where other labels were counted, None with fewer than ENOUGH rows."""
    labelled = _labelled(rows[-WINDOW:], objective, label, group)
    return statistics.fmean(labelled) if len(labelled) >= ENOUGH else None


def label_start(rows: Rows, objective: str, label: str, group: keys.Key = keys.LABEL) -> float | None:
    """Mean share of a label over the first BASELINE rows; None where no labels were counted."""
    labelled = _labelled(rows[:BASELINE], objective, label, group)
    return statistics.fmean(labelled) if labelled else None


def _labelled(rows: Rows, objective: str, label: str, group: keys.Key) -> list[float]:
    prefix = group.below(objective)
    counted = [row for row in rows if any(row[key] is not None for key in keys_below(row, prefix))]
    shares = [number(row, prefix + label) or 0.0 for row in counted]
    return [share for share in shares if math.isfinite(share)]


def keys_below(row: Row, prefix: str) -> tuple[str, ...]:
    """The keys of a row that begin with `prefix`; rows of one run share their keys, so they are searched once."""
    return _keys_below(tuple(row), prefix)


@lru_cache(maxsize=128)
def _keys_below(found: tuple[str, ...], prefix: str) -> tuple[str, ...]:
    return tuple(key for key in found if key.startswith(prefix))


def newest(rows: Rows) -> int:
    """Step of the last row."""
    return int(rows[-1]["step"])


class Steps:
    """Steps that rows have, as spans: a log without holes is one, whatever its length."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.rows = 0
        """Rows that were added."""
        self._spans: list[list[int]] = []
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Add the step of a row."""
        step, self.rows = row["step"], self.rows + 1
        if self._spans and self._spans[-1][0] <= step <= self._spans[-1][1] + 1:
            self._spans[-1][1] = max(step, self._spans[-1][1])
        else:
            self._spans.append([step, step])

    def missing(self, last: int) -> list[int]:
        """Steps from the first to `last` that no row has; of a `last` far beyond all rows only those near them."""
        found, following = list[int](), FIRST_STEP
        near = min(last, FURTHEST + 10 * self.rows)
        for low, high in sorted(self._spans):
            found += range(following, min(low - 1, near) + 1)
            following = max(following, high + 1)
        return [*found, *range(following, near + 1)]


def spans(steps: Sequence[int]) -> str:
    """Ascending numbers in words.

    >>> spans([3, 7, 8, 9])
    '3, 7 to 9'
    """
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def rate_of(row: Row, config: Config) -> float:
    """Learning rate of a step; the setting if its row has none."""
    return in_use(row, keys.LR, config.algorithm.learning_rate)
