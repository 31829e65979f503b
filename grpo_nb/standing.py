"""The state of a run, as `Run.status` and the list of runs report it, and the events that it hangs on."""

import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_nb.journal import Journal, Row, Unread
from grpo_nb.lines import Place
from grpo_nb.lock import Owner

MILESTONES = frozenset({"start", "resume", "paused", "stepping", "stopped", "done", "failed"})
PAUSES = frozenset({"paused", "sft_paused"})
_MARK = re.compile(rb'"kind"\s*:\s*"(?:%s)"' % "|".join(sorted(MILESTONES | PAUSES)).encode())

State = Literal["new", "running", "paused", "stopped", "done", "dead", "failed", "unreadable"]


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands, from its files alone.

    `dead`: its owner vanished without saying so (a killed kernel); it can be resumed. `stopped`: it ended
    before its last step, in good order.
    """

    state: State
    step: int
    """Newest GRPO step in the log; 0 before the first."""
    steps: int
    """GRPO steps in all: what its configuration asks for, or the newest call where that went further."""
    owner: Owner | None
    """Who trains it, or died doing so."""
    updated: float | None
    """When its logs last grew, in seconds since 1970."""


@dataclass(frozen=True)
class RunSummary:
    """One run of a folder of runs."""

    name: str
    path: Path
    state: State
    step: int = 0
    steps: int = 0
    updated: float | None = None
    problem: str | None = None
    """Why it is `unreadable`."""


@dataclass(frozen=True)
class Milestones:
    """The newest events that the state of a run hangs on; empty where there is none."""

    newest: Row
    """Of the kinds MILESTONES."""
    pause: Row
    """Of the kinds MILESTONES and PAUSES."""


class MilestoneReader:
    """The milestones of an event log. Each byte of the log is read once, from its end only as far as is needed."""

    def __init__(self, events: Journal) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._place, self._known = Place(), Milestones({}, {})

    def read(self) -> Milestones:
        """Of the log as it is now."""
        with self._lock, self._events.unread(self._place) as part:
            if part is None or part.anew:
                self._known = Milestones({}, {})
            if part is None:
                self._place = Place()
                return self._known
            self._known, found = _newest(part, self._known)
            self._place = part.place
            return found


def _newest(part: Unread, known: Milestones) -> tuple[Milestones, Milestones]:
    """The milestones after `known`: those of complete lines, and those with a last line that may still be cut off."""
    newest, pause, torn = Row(), Row(), Row()
    for row, complete in part.backwards(_may_hold_one):
        if row.get("kind") not in MILESTONES | PAUSES:
            continue
        if not complete:
            torn = row
            continue
        pause = pause or row
        if row["kind"] in MILESTONES:
            newest = row
            break
    kept = Milestones(newest or known.newest, pause or known.pause)
    if not torn:
        return kept, kept
    return kept, Milestones(torn if torn["kind"] in MILESTONES else kept.newest, torn)


def _may_hold_one(data: bytes) -> bool:
    """Whether there may be a milestone or a pause in it; a backslash may spell one in another way."""
    return b"\\" in data or _MARK.search(data) is not None
