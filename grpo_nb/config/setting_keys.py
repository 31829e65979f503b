"""Keys that `--set` and `Config.replace` take, each with its value and the sentence under its field."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from grpo_nb.config.base import ConfigError, OneOf, Settings


@dataclass(frozen=True)
class Setting:
    """One setting: its dotted key, its value and its meaning."""

    key: str
    value: Any
    meaning: str
    active: bool = True
    """Whether the configuration has this value; False for defaults of a group that is null or of a list's item."""
    default: Any = None
    """The default; None too where a value has to be given."""
    choices: tuple[Any, ...] = ()
    """All values that it may have; empty where they cannot be listed."""

    @property
    def text(self) -> str:
        """The value as `--set` takes it; in brackets where it is such a default."""
        return value_text(self.value) if self.active else f"({value_text(self.value)})"

    @property
    def default_text(self) -> str:
        """The default as `--set` takes it."""
        return value_text(self.default)

    @property
    def changed(self) -> bool:
        """Whether the value differs from the default."""
        return self.active and bool(self.value != self.default)


def settings(config: Settings) -> list[Setting]:
    """Every setting of a configuration, in the order of its fields."""
    return list(_of_group(type(config), config, ""))


def _of_group(kind: type[Settings], group: Settings | None, prefix: str) -> Iterator[Setting]:
    """Settings of a group; the defaults, for a group that is null."""
    for name, field in kind.model_fields.items():
        value = _default(field) if group is None else getattr(group, name)
        members = value if isinstance(value, dict) else {}
        if isinstance(value, Settings):
            yield from _of_group(type(value), value, f"{prefix}{name}.")
        elif any(isinstance(member, Settings) for member in members.values()):
            for key, member in members.items():
                yield from _of_group(type(member), member, f"{prefix}{name}.{key}.")
        else:
            meaning = " ".join((field.description or "").split())
            default = _default(field)
            choices = _choices(field.annotation, field.metadata)
            yield Setting(f"{prefix}{name}", value, meaning, group is not None, default, choices)
            for key, member in members.items():
                usual = default.get(key) if isinstance(default, dict) else None
                yield Setting(f"{prefix}{name}.{key}", member, meaning, group is not None, usual)
            if (inner := _inside(field.annotation)) is not None:
                item = "[]" if isinstance(value, list | tuple) or group is None else ""
                yield from _of_group(inner, None, f"{prefix}{name}{item}.")


def _inside(annotation: Any) -> type[Settings] | None:
    """Settings group inside an optional field or a list."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation
    return next((found for part in get_args(annotation) if (found := _inside(part)) is not None), None)


def _default(field: FieldInfo) -> Any:
    """The default; None where it is from the environment and not valid: it may hold a password."""
    value = None if field.is_required() else field.get_default(call_default_factory=True)
    if not field.validate_default:
        return value
    kind: Any = Annotated[field.annotation, *field.metadata]
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return None


def _choices(kind: Any, rules: Sequence[Any] = ()) -> tuple[Any, ...]:
    """All values of a type, where they can be listed."""
    if rule := next((rule for rule in rules if isinstance(rule, OneOf)), None):
        return rule.choices
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _choices(parts[0], parts[1:])
    if origin is Literal:
        return parts
    if origin in (Union, UnionType):
        listed = [_choices(part) for part in parts]
        return tuple(value for values in listed for value in values) if all(listed) else ()
    return {bool: (False, True), NoneType: (None,)}.get(kind, ())


def keys_at(tree: Any, dotted: str) -> list[str] | None:
    """Keys of nested mappings that a dotted name stands for, each of which may have dots itself; None: it has no value.

    >>> keys_at({"objectives": {"a.b": {"beta": 0.1}}}, "objectives.a.b.beta")
    ['objectives', 'a.b', 'beta']
    """
    return _keys_at(tree, dotted.split("."))


def _keys_at(tree: Any, path: Sequence[str]) -> list[str] | None:
    if not path or not isinstance(tree, dict):
        return None if path else []
    for end in range(1, len(path) + 1):
        name = ".".join(path[:end])
        if name in tree and (rest := _keys_at(tree[name], path[end:])) is not None:
            return [name, *rest]
    return None


def read_value(text: str) -> Any:
    """The value that a text stands for, on the command line and in a form: JSON, else the text itself.

    >>> read_value("4"), read_value("null"), read_value("cpu")
    (4, None, 'cpu')

    Raises:
        ConfigError: it begins like JSON and is not, or JSON cannot hold it.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if text.startswith(("{", "[", '"')):
            raise ConfigError(f"begins like JSON and is not: {error}") from None
        return text
    except (ValueError, RecursionError) as error:  # too many digits, too deep
        raise ConfigError(f"is too large: {error}") from None


def value_text(value: Any) -> str:
    """The text that `read_value` reads as `value`."""
    plain = isinstance(value, str) and not _means_another(value)
    return value if plain else json.dumps(value, default=_plain)


def _means_another(text: str) -> bool:
    try:
        return bool(read_value(text) != text)
    except ConfigError:
        return True


def _plain(value: Settings) -> dict[str, Any]:
    return value.model_dump(mode="json")
