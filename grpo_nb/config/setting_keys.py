"""Keys that `--set` and `Config.replace` take, each with its value and the sentence under its field."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic.fields import FieldInfo

from grpo_nb.config.base import Settings


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

    @property
    def text(self) -> str:
        """The value as `--set` takes it; in brackets where it is such a default."""
        return _text(self.value) if self.active else f"({_text(self.value)})"

    @property
    def default_text(self) -> str:
        """The default as `--set` takes it."""
        return _text(self.default)

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
            yield Setting(f"{prefix}{name}", value, meaning, group is not None, default)
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
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=_plain)


def _plain(value: Settings) -> dict[str, Any]:
    return value.model_dump(mode="json")
