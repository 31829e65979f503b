"""The state of a run, as `Run.status` and the list of runs report it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_nb.lock import Owner

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
