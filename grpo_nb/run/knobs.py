"""Live settings of a run: each beta, temperature, learning rate, and commands to the trainer.

A change of a knob replaces `knobs.json`; the trainer takes one snapshot a step. So a knob is requested here, and its
active value is in the metrics row of each step.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_nb.config import Config, ConfigError, ObjectiveConfig
from grpo_nb.config.setting_keys import settings
from grpo_nb.metrics import keys
from grpo_nb.printable import clean_logger
from grpo_nb.run.knob_file import (
    LAST_VERSION,
    MOST_TURNS,
    KnobFile,
    KnobSnapshot,
    Mode,
    Order,
    Record,
    Request,
    Turn,
    file_of,
    snapshot_of,
)
from grpo_nb.storage import safe_open, schema
from grpo_nb.storage.files import RunError, clear_errors, to_json, write_atomically
from grpo_nb.storage.lock import exclusive
from grpo_nb.storage.vocabulary import Command
from grpo_nb.suggest import close_matches

logger = clean_logger(__name__)

BOUNDS = {"beta": (0.0, 10.0), "temperature": (0.05, 5.0), "learning_rate": (0.0, 1.0)}
"""Bounds of each kind of knob, ends included."""


class Knob:
    """One live setting: `knobs["beta/fairness"].set(0.1)`."""

    def __init__(self, name: str, knobs: "Knobs") -> None:
        self.name = name
        self._knobs = knobs

    @property
    def value(self) -> float:
        """Requested value; in mode `auto` the last requested one, while the metrics have the controller's."""
        return self._knobs.snapshot().values[self.name]

    @property
    def mode(self) -> Mode:
        """`manual`, or `auto`: a controller keeps the objective's KL in its band."""
        return self._knobs.snapshot().modes[self.name]

    @property
    def bounds(self) -> tuple[float, float]:
        return bounds(self.name)

    @property
    def meaning(self) -> str:
        """The sentence of the setting that the knob starts from."""
        return self._knobs.meaning_of(self.name)

    def set(self, value: float | int | str, by: str = "user") -> None:
        """Request `value` from the next step on, in mode `manual`. A text that is a number counts as one.

        Raises:
            RunError: not a number within the knob's bounds; nothing is changed.
        """
        self._knobs._change(self.name, value=_number(self.name, value), mode="manual", by=by)

    def set_auto(self, by: str = "user") -> None:
        """Give the knob back to its controller, which starts from its own last value, else from the configured one.

        Raises:
            RunError: it has no controller: only a beta whose objective has a `kl_band` and a controller that moves
            does.
        """
        if not self._knobs.has_controller(self.name):
            raise RunError(
                f"knob '{self.name}' has no controller; only a beta whose objective has a kl_band and "
                "a controller other than 'fixed' can be automatic"
            )
        self._knobs._change(self.name, mode="auto", by=by)

    def __repr__(self) -> str:
        low, high = self.bounds
        return f"Knob({self.name!r}: {self.value:g}, {self.mode}, from {low:g} to {high:g})"


class Knobs(Mapping[str, Knob]):
    """The knobs of one run by name; any number of processes may read and change them at once."""

    def __init__(self, path: Path, config: Config) -> None:
        self.path = path
        self._config = config
        self._good = snapshot_of(_initial(config))
        """Newest valid content, used while the file is broken."""
        self._done: dict[str, float] = {}
        """Orders that were carried out, by the time they were given, since they cannot be removed from a broken file.
        """

    def __getitem__(self, name: str) -> Knob:
        """The knob of that name.

        Raises:
            RunError: it does not exist; the message names similar ones.
        """
        if name not in self:
            close = close_matches(name, self, count=1)
            meant = f"did you mean '{close[0]}'?" if close else "there are: " + ", ".join(self)
            raise RunError(f"unknown knob '{name}': {meant}")
        return Knob(name, self)

    def __iter__(self) -> Iterator[str]:
        return iter(self._good.values)

    def __len__(self) -> int:
        return len(self._good.values)

    def __contains__(self, name: object) -> bool:
        return name in self._good.values

    def meaning_of(self, name: str) -> str:
        """The sentence of the setting that the knob starts from."""
        key = setting_of(name)
        return next(setting.meaning for setting in settings(self._config) if setting.key == key)

    def has_controller(self, name: str) -> bool:
        """Whether a controller can move the knob."""
        kind, _, objective = name.partition("/")
        return kind == "beta" and self._config.objectives[objective].controlled

    @property
    def command(self) -> Command:
        """The request that the trainer follows until the next one: run, pause or stop."""
        return self.snapshot().command

    def request(self, command: str, by: str = "user") -> None:
        """Request a `Command` from the trainer at the next step boundary.

        `run`, `pause` and `stop` hold until another of them comes; `step`, `save` and `evaluate` are done once. A stop
        must reach the trainer: where knobs.json is broken, that file is set aside and the last good values are written
        with the request, and with the changes that led to them and can be undone. The changes in the broken file are
        not read: they need not belong to these values.

        Raises:
            RunError: an unknown command; or knobs.json is broken and the command is not `stop`.
        """
        if command not in list(Command):
            raise RunError(f"unknown command '{command}'; needs one of {', '.join(Command)}")
        command, now, by = Command(command), time.time(), by[: schema.LONGEST_KEY]

        def change(file: KnobFile) -> KnobFile:
            if command.once:
                held = {"command": Request(value=Command.PAUSE, by=by, at=now)} if command is Command.STEP else {}
                return file.model_copy(update={"orders": file.orders | {command: Order(by=by, at=now)}, **held})
            if file.command.value is command:
                return file
            orders = {name: order for name, order in file.orders.items() if name is not Command.STEP}  # ends in a pause
            return file.model_copy(update={"command": Request(value=command, by=by, at=now), "orders": orders})

        self._update(change, mend=command is Command.STOP)

    def done(self, name: Command, at: float) -> None:
        """Remove an order that was given at time `at` and is done; one given since stays.

        Where knobs.json is broken, this object treats the order as done once the file is valid again.
        """
        self._done[name] = at

        def change(file: KnobFile) -> KnobFile:
            given = file.orders.get(name)
            if given is None or given.at != at:
                return file
            return file.model_copy(update={"orders": {k: v for k, v in file.orders.items() if k != name}})

        try:
            self._update(change)
        except RunError as error:
            logger.warning("the order to %s is carried out and cannot be struck out: %s", name, error)

    def undo(self, by: str = "user", turn: Turn | None = None) -> Turn:
        """Set the knob that was changed last back to what it was before; called again, undo the change before that.

        The undo is a request like any other: it is active from the next step on, and the log has it as a change.

        Args:
            by: who requests it.
            turn: undo this change only, the `last_turn` of a snapshot. None: the newest, whichever it is.

        Raises:
            RunError: no change is left to undo, `turn` is not the newest one, or knobs.json is broken.
        """
        undone: list[Turn] = []

        def change(file: KnobFile) -> KnobFile:
            if not file.turns:
                raise RunError("no change of a knob is left to undo; set a value instead")
            *rest, last = file.turns
            if turn is not None and turn != last:
                raise RunError(f"another change came after the one to undo. Undo now goes back to {last}")
            undone.append(last)
            return _turned(file, last.name, by, value=last.value, mode=last.mode).model_copy(
                update={"turns": tuple(rest)}
            )

        self._update(change)
        return undone[0]

    def snapshot(self) -> KnobSnapshot:
        """All knobs now. Never fails: where the file is broken, the last good values and `problem`."""
        try:
            now = snapshot_of(self._read())
        except RunError as error:
            # a broken file orders nothing, and nothing in it can be undone
            return replace(self._good, problem=str(error), orders=[], turns=())
        orders = [name for name in now.orders if now.at[name] != self._done.get(name)]
        self._good = replace(now, version=max(now.version, self._good.version), orders=orders)
        return self._good

    def reset(self, by: str = "user") -> None:
        """Write knobs.json anew from the run's configuration: the way out when it is missing or broken."""
        with exclusive(self.path):
            self._write(_initial(self._config, by).model_copy(update={"version": self._good.version + 1}))

    def create(self) -> None:
        """Write the first knobs.json."""
        self._write(_initial(self._config))

    def _change(self, name: str, **update: Any) -> None:
        def change(file: KnobFile) -> KnobFile:
            record = file.knobs[name]
            if all(getattr(record, key) == update[key] for key in ("value", "mode") if key in update):
                return file
            changed = _turned(file, name, **update)
            before = Turn(name=name, value=record.value, mode=record.mode, at=changed.knobs[name].at)
            return changed.model_copy(update={"turns": (*file.turns, before)[-MOST_TURNS:]})

        self._update(change)

    def _update(self, change: Callable[[KnobFile], KnobFile], mend: bool = False) -> None:
        """Read, change, replace, while no other process does; a change without effect writes nothing."""
        with exclusive(self.path):
            try:
                before = self._read()
            except RunError as error:
                if mend:
                    self._mend(change, error)
                    return
                raise RunError(f"{error}; correct it, or write it anew with `run.knobs.reset()`") from None
            if (after := change(before)) is not before:
                version = max(before.version, self._good.version) + 1
                self._write(after.model_copy(update={"version": version}))

    def _mend(self, change: Callable[[KnobFile], KnobFile], error: RunError) -> None:
        """Replace an unreadable file by the last good values, changed; the unreadable one is kept next to it."""
        aside = self.path.with_name("knobs.broken.json")
        with clear_errors("set aside", self.path), contextlib.suppress(FileNotFoundError):
            self.path.replace(aside)
        logger.warning(
            "%s: set aside as %s, and written anew with the last good values that this process has read; "
            "changes that can be undone: %d",
            *(error, aside.name, len(self._good.turns)),
        )
        file = change(file_of(self._good))
        self._write(file.model_copy(update={"version": self._good.version + 1}))

    def _write(self, file: KnobFile) -> None:
        file = file.model_copy(update={"version": min(file.version, LAST_VERSION)})
        write_atomically(self.path, to_json(file.model_dump(), indent=2) + b"\n")
        self._good = snapshot_of(file)

    def _read(self) -> KnobFile:
        with clear_errors("read", self.path):
            try:
                data = safe_open.read(self.path, schema.LARGEST_KNOBS)
            except FileNotFoundError:
                raise RunError(f"{self.path} is missing") from None
        try:
            file = KnobFile.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise RunError(f"{self.path} is broken: {where and where + ': '}{first['msg']}") from None
        self._check(file)
        return file

    def _check(self, file: KnobFile) -> None:
        if missing := [name for name in self if name not in file.knobs]:
            raise RunError(f"{self.path} is broken: it lacks {', '.join(missing)}")
        for turn in file.turns:
            self._check_one(turn.name, turn)
        for name, record in file.knobs.items():
            self._check_one(name, record)
            if record.mode == "auto" and self._edited(name, record):
                raise RunError(
                    f"{self.path} gives '{name}' the value {record.value:g}, but its controller sets it; add "
                    '"mode": "manual", or restore the value'
                )

    def _check_one(self, name: str, asked: Record | Turn) -> None:
        try:
            _number(self[name].name, asked.value)
        except RunError as error:
            raise RunError(f"{self.path} is broken: {error}") from None
        if asked.mode == "auto" and not self.has_controller(name):
            raise RunError(f"{self.path} is broken: '{name}' is auto but has no controller")

    def _edited(self, name: str, record: Record) -> bool:
        """Whether the value changed while its time stayed: somebody edited the file."""
        return self._good.at.get(name) == record.at and self._good.values[name] != record.value


def check_start(config: Config) -> None:
    """Refuse a configuration that starts a knob outside its bounds, or gives one a name that no log can hold.

    Raises:
        ConfigError: the setting, its value and the knob's bounds; or the objective's name.
    """
    for name in config.objectives:
        if not schema.is_name(name):
            raise ConfigError(f"objectives has the name {name!r:.60}; needs {schema.NAME_RULE}")
    for name, record in _initial(config).knobs.items():
        try:
            _number(name, record.value)
        except RunError as error:
            raise ConfigError(f"{setting_of(name)} starts the knob '{name}': {error}") from None
    for name, objective in config.objectives.items():
        if objective.controlled:
            _check_bounds(name, objective)


def _check_bounds(name: str, objective: ObjectiveConfig) -> None:
    (floor, ceiling), highest = objective.beta_bounds, BOUNDS["beta"][1]
    if ceiling > highest:
        raise ConfigError(
            f"objectives.{name}.beta_bounds={objective.beta_bounds}: the knob ends at {highest:g}; lower the second"
        )
    if objective.beta > 0 and not floor <= objective.beta <= ceiling:
        raise ConfigError(
            f"objectives.{name}.beta={objective.beta:g} is outside its beta_bounds, {floor:g} to {ceiling:g}, between "
            "which the controller moves it; change one of them, or set kl_band to null to hold beta"
        )


def _turned(file: KnobFile, name: str, by: str, **update: Any) -> KnobFile:
    """The file with another request for one knob."""
    record = file.knobs[name].model_copy(update=update | {"by": by[: schema.LONGEST_KEY], "at": time.time()})
    return file.model_copy(update={"knobs": file.knobs | {name: record}})


def bounds(name: str) -> tuple[float, float]:
    """Bounds of the knob, ends included."""
    return BOUNDS[name.partition("/")[0]]


def _number(name: str, value: float | int | str) -> float:
    low, high = bounds(name)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        number = math.nan
    if not low <= number <= high:
        raise RunError(f"{name}={value!r} cannot be set; needs a number from {low:g} to {high:g}")
    return number


def setting_of(name: str) -> str:
    """The dotted setting that a knob starts from."""
    kind, _, objective = name.partition("/")
    return {"beta": f"objectives.{objective}.beta", "temperature": "sampling.temperature"}.get(
        kind, f"algorithm.{kind}"
    )


def _initial(config: Config, by: str = "config") -> KnobFile:
    now = time.time()

    def record(value: float, mode: Mode = "manual") -> Record:
        return Record(value=value, mode=mode, by=by, at=now)

    betas = {
        keys.BETA.of(name): record(objective.beta, "auto" if objective.controlled else "manual")
        for name, objective in config.objectives.items()
    }
    others = {
        "temperature": record(config.sampling.temperature),
        "learning_rate": record(config.algorithm.learning_rate),
    }
    return KnobFile(version=0, command=Request(value=Command.RUN, by=by, at=now), knobs=betas | others)
