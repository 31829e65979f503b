"""Rows of a run's logs for the live view: each row is read once, and the number kept is bounded."""

import itertools
import sys
import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pandas as pd

from grpo_nb.metrics import keys
from grpo_nb.plots.marks import Found
from grpo_nb.plots.thinning import UNDONE
from grpo_nb.run.run import Log, Run
from grpo_nb.storage import schema
from grpo_nb.storage.index.frames import narrowed
from grpo_nb.storage.journal import Row

MOST_ROWS = 2000
"""Rows of the curves; of more, every second one is left out, then every second one of those that are left."""
MOST_MARKS = 500
"""Marks of each kind: skipped steps, resumes, knob changes."""
ANSWERS = frozenset({"checkpoint", "checkpoint_rewritten", "evaluated", "evaluation_failed"})
"""Kinds of events that report the result of a command."""
NEWEST = 20
"""The newest rows, all of which are kept."""


_generations = itertools.count(1)


@dataclass(frozen=True)
class Place:
    """Position of a reader in the rows: so many of the kept ones, of one generation."""

    generation: int = 0
    kept: int = 0
    count: int = 0
    """Rows in all, also those that are no longer kept."""


@dataclass(frozen=True)
class News:
    """Rows since a place: those that stay, and the newest ones after them, which later news replaces."""

    place: Place
    """Position after these rows."""
    anew: bool
    """Whether they are all rows, so that earlier ones must be dropped."""
    kept: list[Row]
    tail: list[Row]


class Rows:
    """The rows of a run for its pictures, at even distances, with the newest ones and those without an update."""

    def __init__(self) -> None:
        self.count = 0
        """Rows that were added."""
        self.latest: dict[str, Any] = {}
        """The newest value of each key."""
        self.newest: deque[Row] = deque(maxlen=NEWEST)
        self._stride = 1
        self._even: list[Row] = []
        self._undone: list[Row] = []
        self._kept: list[Row] = []
        """Both kinds of rows, by step; rows are only appended while the generation is the same."""
        self._generation = next(_generations)

    def add(self, row: Row) -> None:
        """Add the next row."""
        row = {sys.intern(key): value for key, value in row.items()}  # each row brings its own copies of the keys
        even, undone = self.count % self._stride == 0, row.get(keys.STATUS) in UNDONE
        self._even += [row] if even else []
        self._undone += [row] if undone else []
        self._kept += [row] if even or undone else []
        self.count += 1
        self.newest.append(row)
        if len(self.latest) < schema.MOST_KEYS:
            self.latest |= row
        if len(self._even) > MOST_ROWS or len(self._undone) > 2 * MOST_MARKS:
            self._thin()

    def _thin(self) -> None:
        if len(self._even) > MOST_ROWS:
            self._even, self._stride = self._even[::2], 2 * self._stride
        self._undone = self._undone[-MOST_MARKS:]
        self._kept, self._generation = _by_step([*self._even, *self._undone]), next(_generations)

    def frame(self) -> pd.DataFrame:
        """Table with one row per step, by step."""
        return narrowed(_by_step([*self._kept, *self.newest]), "step")

    def since(self, place: Place) -> News:
        """Rows that are new after a place."""
        known = place.kept if place.generation == self._generation else 0
        last = self._kept[-1] if self._kept else None
        tail = list(itertools.takewhile(lambda row: row is not last, reversed(self.newest)))[::-1]
        here = Place(self._generation, len(self._kept), self.count)
        return News(here, place.generation != self._generation, self._kept[known:], tail)


def _by_step(rows: list[Row]) -> list[Row]:
    return sorted({id(row): row for row in rows}.values(), key=lambda row: int(row["step"]))


class Events:
    """The events that the live view shows: the newest findings, and those that are marks in a picture."""

    def __init__(self, most_findings: int) -> None:
        self._most = most_findings
        self._found: dict[str, deque[Row]] = {name: deque(maxlen=most_findings) for name in ("error", "warning")}
        self._marks: dict[str, deque[Row]] = {name: deque(maxlen=MOST_MARKS) for name in ("resume", "knob")}
        self._goals: dict[str, Row] = {}
        """Newest event of each stage that has the step at which it ends."""
        self.findings = 0
        """Number of findings that are more than a remark."""
        self.answers: dict[str, Row] = {}
        """The newest event of each kind that ends a command."""

    def add(self, event: Row) -> None:
        """Add the next event."""
        kind, severity = event.get("kind"), event.get("severity")
        if kind == "finding" and severity in self._found:
            self._found[severity].append(event)
            self.findings += 1
        if kind in ("resume", "begun_anew"):
            self._forget_after(event.get("step"))
        if kind in self._marks:
            self._marks[kind].append(event)
        if kind in ANSWERS:
            self.answers[str(kind)] = event
        if event.get("goal") is not None:
            self._goals["sft" if str(kind).startswith("sft_") else "grpo"] = event

    def _forget_after(self, step: int | None) -> None:
        """Drop the findings of steps that are trained again, which will repeat them."""
        for name, found in self._found.items():
            kept = [event for event in found if (event.get("step") or 0) <= (step or 0)]
            self.findings -= len(found) - len(kept)
            self._found[name] = deque(kept, maxlen=self._most)

    def newest_findings(self) -> list[Row]:
        """Errors first, then the newest."""
        return [event for found in self._found.values() for event in reversed(found)][: self._most]

    def goal(self, stage: str) -> int | None:
        """The step at which the newest start of a stage ends, where that was logged."""
        goal = self._goals.get(stage, {}).get("goal")
        return goal if isinstance(goal, int) and not isinstance(goal, bool) else None

    def steps(self, kind: str, key: str | None = None) -> list[int]:
        """Steps of the marks of a kind; of knobs, of one key."""
        marks = [event for event in self._marks[kind] if key is None or event.get("key") == key]
        return sorted({int(event["step"]) for event in marks if event.get("step") is not None})

    def frame(self) -> pd.DataFrame:
        """The marks and the newest goal, as the pictures read them."""
        goals = [event for stage, event in self._goals.items() if stage == "grpo"]
        return narrowed([*self._marks["resume"], *self._marks["knob"], *goals], "time", "kind")


class Followed:
    """Rows and events of a run, brought up to date by `read`; for any thread."""

    def __init__(self, run: Run, log: Log, most_findings: int) -> None:
        self._most, self._lock = most_findings, threading.Lock()
        self._new_rows, self._new_events = run.follower(log, self._anew), run.follower("events", self._events_anew)
        self._anew()
        self._events_anew()

    def read(self) -> None:
        """Read the new rows and events.

        Raises:
            RunError: a log cannot be read.
        """
        with self._lock:
            for row in self._new_rows.read():
                self._rows.add(row)
            for event in self._new_events.read():
                self._events.add(event)

    def newest(self) -> list[Row]:
        """The newest rows, oldest first."""
        with self._lock:
            return [*self._rows.newest]

    def findings(self) -> tuple[list[Row], int]:
        """The findings to show, errors first, then the newest; and how many others there are."""
        with self._lock:
            shown = self._events.newest_findings()
            return shown, self._events.findings - len(shown)

    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Rows and events as the pictures read them."""
        with self._lock:
            return self._rows.frame(), self._events.frame()

    def since(self, place: Place) -> News:
        """Rows that are new after a place that earlier news gave."""
        with self._lock:
            return self._rows.since(place)

    def found(self) -> Found:
        """Keys of the rows, and the newest value of each."""
        with self._lock:
            return Found([*self._rows.latest], dict(self._rows.latest))

    def answers(self) -> dict[str, Row]:
        """The newest event of each kind that ends a command."""
        with self._lock:
            return dict(self._events.answers)

    def goal(self, stage: str) -> int | None:
        """The step at which the newest start of a stage ends, where that was logged."""
        with self._lock:
            return self._events.goal(stage)

    def marks(self, knobs: Collection[str]) -> tuple[list[int], dict[str, list[int]]]:
        """Steps at which the run was resumed, and those at which each of the knobs was turned."""
        with self._lock:
            turned = {key: self._events.steps("knob", key) for key in knobs}
            return self._events.steps("resume"), {key: steps for key, steps in turned.items() if steps}

    def _anew(self) -> None:
        self._rows = Rows()

    def _events_anew(self) -> None:
        self._events = Events(self._most)
