"""dependencies.json of a run: the content that it depends on, and the date that its chat template gets."""

from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_nb.config import ConfigError
from grpo_nb.storage import safe_open
from grpo_nb.storage.digests import Entry
from grpo_nb.storage.files import RunError, clear_errors, from_json, to_json, write_atomically
from grpo_nb.suggest import did_you_mean

OPTIMIZER = "optimizer"
"""Adam's moments in a checkpoint: accepted as changed, a resume may begin them anew where their file is missing."""
KINDS = ("data", "weights", "tokenizer", "template", "prompt", "generation", OPTIMIZER)
FILE = "dependencies.json"
CHANGE = "dependency_accepted"
"""Kind of the event that a changed dependency was accepted; its field `dependency` has the kind of content."""
LARGEST = 64 << 20
"""Bytes of a file that is read; a run of a hundred data files has a few hundred thousand."""


class Ledger(BaseModel):
    """Content of dependencies.json."""

    model_config = ConfigDict(frozen=True)
    started: datetime
    """Time when the run was made, in the local time of that machine; never changes."""
    entries: Mapping[str, Entry] = Field(default_factory=dict)
    """Content by kind and name, e.g. `data/fairness`, `weights/base`."""


def accepted_kinds(given: Collection[str] | str) -> frozenset[str]:
    """The kinds whose change is accepted.

    Raises:
        ConfigError: a name that is no kind.
    """
    names = frozenset([given] if isinstance(given, str) else given)
    for name in sorted(names - {*KINDS}):
        raise ConfigError(
            f"accept_changed={name!r} is no kind of dependency; needs one of {', '.join(KINDS)}"
            + did_you_mean(name, KINDS)
        )
    return names


def read(folder: Path) -> Ledger | None:
    """Ledger of a run; None for a run of an earlier version.

    Raises:
        RunError: the file is damaged.
    """
    file = folder / FILE
    try:
        with clear_errors("read", file):
            try:
                data = safe_open.read(file, LARGEST)
            except FileNotFoundError:
                return None
        return Ledger.model_validate(from_json(data))
    except (ValidationError, ValueError, RecursionError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(
            f"{file} is damaged ({type(error).__name__}); restore it from a copy, or move it away: the run then "
            "adopts the content it finds at its next start"
        ) from None


def write(folder: Path, ledger: Ledger) -> None:
    """Replace the file."""
    write_atomically(folder / FILE, to_json(ledger.model_dump(mode="json"), indent=1) + b"\n")


def begin(folder: Path) -> None:
    """Give a new run its date."""
    write(folder, Ledger(started=datetime.now().replace(microsecond=0)))
