"""Every key that `--set` takes, with its value and the sentence that stands under its field in config/."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_nb.config import Config, Settings


@dataclass(frozen=True)
class Setting:
    """One key that `--set` and `Config.replace` take."""

    key: str
    value: Any
    meaning: str

    @property
    def text(self) -> str:
        """The value as `--set` takes it."""
        return self.value if isinstance(self.value, str) else json.dumps(self.value, default=_plain)


def settings(config: Config) -> list[Setting]:
    """Every setting of a configuration, in the order of config/."""
    return list(_settings(config, ""))


def _settings(group: Settings, prefix: str) -> Iterator[Setting]:
    for name, field in type(group).model_fields.items():
        value = getattr(group, name)
        if isinstance(value, Settings):
            yield from _settings(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            for key, member in value.items():
                yield from _settings(member, f"{prefix}{name}.{key}.")
        else:
            yield Setting(f"{prefix}{name}", value, field.description or "")


def _plain(value: Settings) -> dict[str, Any]:
    return value.model_dump(mode="json")
