"""The state of a run, as `Run.status` and the list of runs report it, and the events that it depends on."""

import re
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

from grpo_nb.run.lock import Owner
from grpo_nb.storage.journal import Journal, Row, Unread
from grpo_nb.storage.lines import Place, settled
from grpo_nb.storage.safe_open import RunError
from grpo_nb.storage.schema import STEPWISE
from grpo_nb.storage.vocabulary import RunState

Known = TypeVar("Known")

MILESTONES = frozenset({"start", "resume", "paused", "stepping", "stopped", "done", "failed"})
PAUSES = frozenset({"paused", "sft_paused"})
_MARK = re.compile(rb'"kind"\s*:\s*"(?:%s)"' % "|".join(sorted(MILESTONES | PAUSES)).encode())
_LETTER = re.compile(rb"\\u00[4-7]")


@dataclass(frozen=True)
class RunStatus:
    """State and progress of a run, from its files alone."""

    state: RunState
    step: int
    """Newest GRPO step in the log; 0 before the first."""
    steps: int
    """GRPO steps in all: the configuration's, or those of the newest call where that went further."""
    owner: Owner | None
    """Process that trains it, or died while training; None without one."""
    updated: float | None
    """Time when its logs last grew, in seconds since 1970."""
    sft: tuple[int, int] | None = None
    """Newest step of SFT and its steps in all, where SFT has begun and GRPO has not; else None."""

    def __str__(self) -> str:
        state, step, steps = shown(self.state, (self.step, self.steps), self.sft)
        return f"{state}, step {step} of {steps}"


@dataclass(frozen=True)
class RunSummary:
    """Summary of one run in a folder of runs."""

    name: str
    path: Path
    state: RunState
    step: int = 0
    steps: int = 0
    updated: float | None = None
    problem: str | None = None
    """Reason why it is unreadable, or ended as dead or failed; else None."""
    sft: tuple[int, int] | None = None
    """Steps done and total of SFT, as `RunStatus.sft`."""

    @property
    def shown(self) -> tuple[str, int, int]:
        """State, step and steps to show: of SFT where GRPO has not begun."""
        return shown(self.state, (self.step, self.steps), self.sft)


def shown(state: RunState, grpo: tuple[int, int], sft: tuple[int, int] | None) -> tuple[str, int, int]:
    """State, step and steps to show: of SFT where that is given, else of GRPO.

    >>> shown(RunState.NEW, (0, 100), (154, 300))
    ('SFT stopped', 154, 300)
    >>> shown(RunState.NEW, (0, 100), None)
    ('new', 0, 100)
    """
    if sft is None:
        return str(state), *grpo
    if state is RunState.NEW:  # the state of a run is that of GRPO
        state = RunState.DONE if sft[0] >= sft[1] else RunState.STOPPED
    return f"SFT {state}", *sft


@dataclass(frozen=True)
class Milestones:
    """Newest events that determine the state of a run; empty without any."""

    newest: Row
    """Newest event of the kinds MILESTONES."""
    pause: Row
    """Newest event of the kinds MILESTONES and PAUSES."""


class Tail(ABC, Generic[Known]):
    """Reader of the newest rows of a log. Each byte is read once, from the end only as far as needed."""

    def __init__(self, log: Journal) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._place, self._state, self._problem = Place(), (0, 0, 0), ""
        self._settled = False
        """Whether no write can have happened since in that state."""
        self._known = self._found = self.nothing()

    def read(self) -> Known:
        """Content of the log as it is now.

        Raises:
            RunError: it cannot be read, or has too much invalid text near its end.
        """
        with self._lock, self._log.unread(self._place) as part:
            if part is None:
                self._place, self._known, self._problem = Place(), self.nothing(), ""
                return self._known
            return self._read(part)

    def _read(self, part: Unread) -> Known:
        state = part.state
        if part.anew or state != self._state or not self._settled:
            if state[0] == self._state[0] and state != self._state:
                part.read_anew()
            self._settled = settled(*state[1:])
            self._look(part)
            self._place, self._state = part.place, state
        if self._problem:
            raise RunError(self._problem)
        return self._found

    def _look(self, part: Unread) -> None:
        if part.anew:
            self._known, self._problem = self.nothing(), ""
        try:
            self._known, self._found, new = self.newest(part, self._known)
            self._problem = "" if new else self._problem
        except RunError as error:
            self._problem = str(error)

    @abstractmethod
    def nothing(self) -> Known:
        """Value for a log without rows."""

    @abstractmethod
    def newest(self, part: Unread, known: Known) -> tuple[Known, Known, bool]:
        """Value of the complete lines; value with a last line that may be cut off; whether it is new."""


class MilestoneReader(Tail[Milestones]):
    """The milestones of an event log."""

    def nothing(self) -> Milestones:
        return Milestones({}, {})

    def newest(self, part: Unread, known: Milestones) -> tuple[Milestones, Milestones, bool]:
        newest, pause, torn = Row(), Row(), Row()
        for row, complete in part.backwards(_may_hold_one, _is_one):
            if not complete:
                torn = row
                continue
            pause = pause or row
            if row["kind"] in MILESTONES:
                newest = row
                break
        kept = Milestones(newest or known.newest, pause or known.pause)
        if not torn:
            return kept, kept, bool(newest)
        return kept, Milestones(torn if torn["kind"] in MILESTONES else kept.newest, torn), True


class StepReader(Tail[int | None]):
    """The newest step of a log of one row a step; None before the first."""

    def nothing(self) -> int | None:
        return None

    def newest(self, part: Unread, known: int | None) -> tuple[int | None, int | None, bool]:
        torn: int | None = None
        for row, complete in part.backwards(_may_have_step, lambda row: True):
            if complete:
                return row["step"], row["step"] if torn is None else torn, True
            torn = row["step"]
        return known, known if torn is None else torn, torn is not None


class Standing:
    """Progress of a run by its logs. One object serves all readers in this process."""

    def __init__(self, path: Path) -> None:
        self.milestones = MilestoneReader(Journal(path / "events.jsonl"))
        self.steps = {log: StepReader(Journal(path / f"{log}.jsonl")) for log in STEPWISE}


standing_of = lru_cache(4096)(Standing)
"""The standing of the run in a folder: listing many runs again reads only their new rows."""


def _is_one(row: Row) -> bool:
    return row.get("kind") in MILESTONES | PAUSES


def _may_hold_one(data: bytes) -> bool:
    """Whether the bytes may hold a milestone or a pause; an escape may spell one in another way."""
    return _MARK.search(data) is not None or _escapes(data)


def _may_have_step(data: bytes) -> bool:
    return b'"step"' in data or _escapes(data)


def _escapes(data: bytes) -> bool:
    """Whether a letter is escaped by its number, which this package never writes."""
    return b"\\u" in data and _LETTER.search(data) is not None


def modified(path: Path) -> float | None:
    """Time of its last change, in seconds since 1970; None where it cannot be read."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return None
