"""Settings while they are edited: a text for each, the resulting configuration, and the invalid texts.

No widget is made here. A text is read as `--set` reads it, and the messages are the configuration's own.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from grpo_nb.config import Config, ConfigError, check_names
from grpo_nb.config.setting_keys import Setting, keys_at, read_value, settings, value_text
from grpo_nb.config.unknown import ELSEWHERE, NAME
from grpo_nb.printable import printable
from grpo_nb.run.knobs import check_start

OBJECTIVES = "objectives"


@dataclass(frozen=True)
class Field:
    """One setting that can be edited."""

    setting: Setting
    """The setting before any edit."""
    inside: tuple[Setting, ...] = ()
    """Settings of the group, or of the items, that its value may be."""

    @property
    def key(self) -> str:
        return self.setting.key

    @property
    def words(self) -> str:
        """Text that a search looks through: names and sentences, also the names that other trainers use."""
        parts = [f"{one.key} {one.meaning}" for one in (self.setting, *self.inside)]
        return " ".join([*parts, *_elsewhere(self.key)]).casefold()

    def matches(self, query: str) -> bool:
        """Whether each word of the query is in its names or sentences."""
        words = self.words
        return all(word in words for word in query.casefold().split())


@dataclass(frozen=True)
class Group:
    """Settings under one heading."""

    name: str
    """`batch`, or `objectives.fairness`."""
    meaning: str
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Outcome:
    """Result of the texts."""

    config: Config | None
    """The configuration; None where something is wrong."""
    changes: Mapping[str, Any]
    """Differences from the start, by dotted name as JSON values; empty where a text is invalid."""
    problems: Mapping[str, str]
    """Each message, by the name that the configuration gives for it."""
    notes: tuple[str, ...] = ()
    """Changed settings that have no effect with the other settings."""
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys of fields, with the messages and notes shown next to them."""


class Edits:
    """Texts of the settings of one configuration; `outcome` reads and validates them."""

    def __init__(self, start: Config, changes: Mapping[str, Any]) -> None:
        """`changes`: edits to begin with, as `start.replace` takes them.

        Raises:
            ConfigError: they do not validate, or a key is not a string.
        """
        check_names(changes)
        changed = start.replace(**changes)
        wanted = changed.model_dump(mode="json")
        changes = {key: _plain(value, wanted, key) for key, value in changes.items()}
        known = {setting.key for setting in settings(start) if setting.active}
        self.given = {key: value for key, value in changes.items() if key not in known}
        """Changes that are no edits: of groups and of mappings, which have no field of their own."""
        try:
            self._base = start.replace(**self.given) if self.given else start
        except ConfigError:  # they need others of the changes
            self.given, self._base = changes, changed
        if any(keys_at(wanted, key) is None for key in self.given):  # others of the changes replace them
            self.given, self._base = changes, changed
        self.groups = tuple(_groups(self._base))
        self.fields = {field.key: field for group in self.groups for field in group.fields}
        self.texts: dict[str, str] = {}
        """Typed text by key, where it differs from the field's first text."""
        before = self._base.model_dump(mode="json")
        for key in changes.keys() & self.fields.keys():
            if _at(wanted, key) != _at(before, key):
                self.write(key, value_text(changes[key]))

    def text(self, key: str) -> str:
        """Text of the field."""
        return self.texts.get(key, self.fields[key].setting.text)

    def write(self, key: str, text: str) -> None:
        """Put a text into a field; the text that it began with is no edit."""
        self.texts.pop(key, None)
        if text != self.fields[key].setting.text:
            self.texts[key] = text

    def find(self, query: str) -> list[Field]:
        """Fields that match a query, in their order."""
        return [field for field in self.fields.values() if field.matches(query)]

    def outcome(self) -> Outcome:
        """Read and validate the texts."""
        typed, problems = dict[str, Any](), dict[str, str]()
        for key in (key for key in self.fields if key in self.texts):
            try:
                typed[key] = read_value(self.texts[key])
            except ConfigError as error:
                problems[key] = f"{key}: {error}"
        config = None
        try:
            config = self._base.replace(**typed)
            check_start(config)
        except ConfigError as error:
            problems |= error.at or {"": str(error)}
        if config is None or problems:
            return Outcome(None, {}, problems, beside=self._beside(problems.items()))
        notes = tuple(config.unused_settings())
        beside = self._beside((None, note) for note in notes)
        differences = self._differences(config, typed)
        kept = {key: value for key, value in self.given.items() if key not in differences}
        return Outcome(config, kept | differences, {}, notes, beside)  # in the order in which they apply

    def _differences(self, config: Config, typed: Mapping[str, Any]) -> dict[str, Any]:
        """A group stays as it was typed, without its defaults."""
        before, after = self._base.model_dump(mode="json"), config.model_dump(mode="json")
        values = {key: value if isinstance(value, dict) else _at(after, key) for key, value in typed.items()}
        return {key: value for key, value in values.items() if _at(after, key) != _at(before, key)}

    def _beside(self, messages: Iterable[tuple[str | None, str]]) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for where, message in messages:
            for key in self._fields_of(where, message):
                found[key] = (*found.get(key, ()), message)
        return found

    def _fields_of(self, where: str | None, message: str) -> list[str]:
        """The fields that a message is about: the one of its name, else the edited ones that it mentions.

        Where it mentions none of those, the first field that it does mention, and for an error (which has a name, be it
        that of a group) the edited fields there, as one of them is the reason.
        """
        group = where or ""
        if own := [key for key in self.fields if group == key or group.startswith(f"{key}.")]:
            return own
        named = [key for key in self.fields if _mentions(message, key, group)]
        edited = [key for key in self.fields if key in self.texts and where is not None and key.startswith(group)]
        return [key for key in named if key in self.texts] or list(dict.fromkeys([*named[:1], *edited]))


def as_python(changes: Mapping[str, Any]) -> str:
    """The changes as the line of Python that the settings cell of 01_load has.

    >>> print(as_python({"batch.prompts": 8, "model.dtype": "auto", "batch.mini_batch": None}))
    CHANGES = {"batch.prompts": 8, "model.dtype": "auto", "batch.mini_batch": None}
    """
    return f"CHANGES = {_literal(changes)}"


def _literal(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, str):  # escapes of JSON, and those of `printable`, mean the same in Python
        return printable(json.dumps(value, ensure_ascii=False))
    return repr(value)


def _groups(config: Config) -> Iterator[Group]:
    found = settings(config)
    for name in type(config).model_fields:
        own = getattr(config, name)
        parts = {f"{OBJECTIVES}.{each}": part for each, part in own.items()} if name == OBJECTIVES else {name: own}
        for prefix, part in parts.items():
            meaning = " ".join((type(part).__doc__ or "").split())
            yield Group(prefix, meaning, tuple(_fields(found, f"{prefix}.")))


def _fields(found: list[Setting], prefix: str) -> Iterator[Field]:
    mine = [setting for setting in found if setting.key.startswith(prefix)]
    for setting in (setting for setting in mine if setting.active):
        inner = (f"{setting.key}.", f"{setting.key}[].")
        yield Field(setting, tuple(one for one in mine if not one.active and one.key.startswith(inner)))


def _elsewhere(key: str) -> list[str]:
    """Names of the setting in other trainers."""
    parts = key.split(".")
    if parts[0] == OBJECTIVES:
        parts[1:-1] = [NAME]
    return [theirs for theirs, ours in ELSEWHERE.items() if ours == ".".join(parts)]


def _mentions(message: str, key: str, group: str) -> bool:
    """Whether a message has the dotted name; of a message about a group, the name inside of it is enough."""
    names = [key] + ([key.removeprefix(f"{group}.")] if group and key.startswith(f"{group}.") else [])
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", message) for name in names)


def _at(tree: Any, key: str) -> Any:
    for part in keys_at(tree, key) or key.split("."):
        tree = tree[part]
    return tree


def _plain(value: Any, valid: Any, key: str) -> Any:
    """A change as JSON has it: a mapping stays as it was given, without defaults; all else is the validated value."""
    if isinstance(value, dict):
        with suppress(TypeError, ValueError):
            return json.loads(json.dumps(value))
    return value if keys_at(valid, key) is None else _at(valid, key)
