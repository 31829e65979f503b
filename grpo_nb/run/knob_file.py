"""Schema of knobs.json, and a snapshot of its values at one moment."""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

from grpo_nb.storage import schema
from grpo_nb.storage.vocabulary import Command

Mode = Literal["manual", "auto"]
MOST_TURNS = 50
"""Changes that can be undone."""
LAST_VERSION = 2**53 - 1
"""Last version number; a file made by hand may have it, and then keeps it, since a larger one could not be read."""


def _is_once(once: bool) -> AfterValidator:
    def check(command: Command) -> Command:
        if command.once is not once:
            raise ValueError(f"'{command}' cannot stand here")
        return command

    return AfterValidator(check)


class Record(BaseModel):
    """A knob with its value, its time and who set it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: FiniteFloat = Field(strict=True)
    """A number: `true` and "1" are none."""
    mode: Mode
    by: schema.Name
    at: schema.Seconds


class Request(BaseModel):
    """A command that lasts: run, pause or stop."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: Annotated[Command, _is_once(False)]
    by: schema.Name
    at: schema.Seconds


class Order(BaseModel):
    """A command that is done once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    by: schema.Name
    at: schema.Seconds


class Turn(BaseModel):
    """A change of a knob, with the setting to which an undo returns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: schema.Name
    value: FiniteFloat = Field(strict=True)
    """Before the change."""
    mode: Mode
    """Before the change."""
    at: schema.Seconds | None = None
    """Time of the change, in seconds since 1970, which tells it from others; files of earlier versions lack it."""

    def __str__(self) -> str:
        return f"{self.name} = {f'{self.value:g}' if self.mode == 'manual' else self.mode}"


class KnobFile(BaseModel):
    """knobs.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(ge=0, le=LAST_VERSION, strict=True)
    command: Request
    knobs: dict[str, Record]
    orders: dict[Annotated[Command, _is_once(True)], Order] = {}
    turns: tuple[Turn, ...] = ()
    """The newest changes of knobs that are not undone, the last at the end."""


@dataclass(frozen=True)
class KnobSnapshot:
    """All knobs at one moment, for one step of training."""

    values: dict[str, float]
    """Values by knob name. A beta in mode `auto` has its last manual or configured value, not the controller's."""
    modes: dict[str, Mode]
    command: Command
    version: int
    """Rises with every change, and never falls."""
    by: dict[str, str]
    """Who set each knob last, `command` and orders included."""
    at: dict[str, float]
    """Time of each knob's last change, in seconds since 1970, `command` and orders included."""
    problem: str | None = None
    """Reason why knobs.json is invalid and the last good values are used; None if it is valid."""
    orders: list[Command] = field(default_factory=list)
    """Commands to do once that are not done yet."""
    turns: tuple[Turn, ...] = field(default=(), compare=False)
    """Changes that can be undone, the newest at the end; no requests, so a checkpoint does not hold them."""

    @property
    def last_turn(self) -> Turn | None:
        """The change that an undo takes back."""
        return self.turns[-1] if self.turns else None

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: all fields but `turns`."""
        return {key: value for key, value in asdict(self).items() if key != "turns"}

    def changes_since(self, before: "KnobSnapshot") -> list[dict[str, Any]]:
        """Changes: `{"key": "beta/fairness", "old": "auto", "new": 0.1, "by": "user", "at": ...}` each."""
        old, new = before._requests(), self._requests()
        return [
            {"key": key, "old": old.get(key), "new": new[key], "by": self._who(key, before), "at": self.at[key]}
            for key in new
            if old.get(key) != new[key]
        ]

    def _requests(self) -> dict[str, float | str]:
        knobs = {k: v if self.modes[k] == "manual" else "auto" for k, v in self.values.items()}
        return {**knobs, "command": self.command}

    def _who(self, key: str, before: "KnobSnapshot") -> str:
        # a changed value under an unchanged time did not come from here
        return self.by[key] if self.at[key] != before.at.get(key) else "an editor of knobs.json"


def snapshot_of(file: KnobFile) -> KnobSnapshot:
    """Snapshot of the file's requests."""
    orders = {str(name): order for name, order in file.orders.items()}
    asked: dict[str, Record | Request | Order] = {**file.knobs, "command": file.command, **orders}
    return KnobSnapshot(
        values={name: record.value for name, record in file.knobs.items()},
        modes={name: record.mode for name, record in file.knobs.items()},
        command=file.command.value,
        version=file.version,
        by={name: record.by for name, record in asked.items()},
        at={name: record.at for name, record in asked.items()},
        orders=list(file.orders),
        turns=file.turns,
    )


def file_of(known: KnobSnapshot) -> KnobFile:
    """Undo `snapshot_of`."""
    knobs = {
        name: Record(value=value, mode=known.modes[name], by=known.by[name], at=known.at[name])
        for name, value in known.values.items()
    }
    command = Request(value=known.command, by=known.by["command"], at=known.at["command"])
    return KnobFile(version=known.version, command=command, knobs=knobs, turns=known.turns)
