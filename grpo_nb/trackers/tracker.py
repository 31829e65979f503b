"""Interface of a tracker, and the data that it gets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from grpo_nb.storage.journal import Row

Log = Literal["sft", "metrics", "evaluations"]
LOGS: tuple[Log, ...] = ("sft", "metrics", "evaluations")
AXES: Mapping[Log, str] = {"sft": "sft/step", "metrics": "grpo/step"}
"""Key of the step, for trackers that have one count of steps for all keys."""
Value = str | int | float | bool | None


@dataclass(frozen=True)
class About:
    """The run that a tracker mirrors."""

    id: str
    """Id of the run: unchanged if it was killed, resumed or moved; another one for a copy under another name."""
    name: str
    folder: Path
    """Folder for files that the tracker writes by itself; may not exist."""
    settings: Mapping[str, Value]
    """Settings by dotted name, without secrets."""
    sft_steps: int
    newest: Mapping[str, int]
    """The newest step of `sft` and `metrics` that was mirrored before; 0 for none."""


@dataclass(frozen=True)
class Point:
    """The numbers of one row."""

    log: Log
    step: int
    numbers: Mapping[str, float]


@runtime_checkable
class Tracker(Protocol):
    """An open tracker: every call may fail or block."""

    @property
    def fresh(self) -> bool:
        """Whether it had no data of this run, whatever the notes say."""

    @property
    def newest(self) -> Mapping[str, int] | None:
        """The newest step of `sft` and `metrics` that it has, where it can report it; None: the notes count."""

    def log(self, points: Sequence[Point]) -> None:
        """Write these points."""

    def close(self) -> None:
        """Write the rest and close."""


def point(log: Log, row: Row) -> Point:
    """The numbers of a row under its own keys, those of SFT after `sft/`.

    >>> point("sft", {"step": 3, "status": "ok", "loss": 0.5})
    Point(log='sft', step=3, numbers={'sft/loss': 0.5})
    """
    if log == "evaluations":
        where = "/".join(str(row.get(key)) for key in ("stage", "split", "mode", "objective"))
        found = {f"evaluation/{where}/{name}": of["value"] for name, of in row.get("metrics", {}).items()}
        return Point(log, row.get("step", 0), found)
    prefix = "sft/" if log == "sft" else ""
    numbers = {
        f"{prefix}{key}": float(value) for key, value in row.items() if isinstance(value, int | float) and key != "step"
    }
    return Point(log, row["step"], numbers)
