"""Base class of every settings group."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from grpo_nb.printable import Clean

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, lt=2**53)]
MOST_STEPS = 10**9
Steps = Annotated[int, Field(ge=0, le=MOST_STEPS)]


@dataclass(frozen=True, eq=False)
class OneOf:
    """Validator: a text must be a name in a table, as the table is when it is checked, or one of `more`."""

    names: Collection[str]
    more: tuple[str, ...] = ()

    @property
    def choices(self) -> tuple[str, ...]:
        """All texts that are valid now."""
        return (*self.names, *self.more)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        if value not in self.choices:
            known = [f"'{name}'" for name in self.choices]
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(known[:-1])} or {known[-1]}"})
        return value


def one_of(names: Collection[str], *more: str) -> OneOf:
    """Annotation of a setting whose value is a name of a table, or one of `more`."""
    return OneOf(names, more)


class ConfigError(Clean, ValueError):
    """Raised for a wrong setting; the message names the value found, the value needed and the change to make."""

    def __init__(self, message: str = "", at: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.at: Mapping[str, str] = dict(at or {})
        """The message of each wrong setting by dotted name, where they are known. Of settings that contradict each
        other, the name of their group; of settings of several groups, the empty name."""


class Settings(BaseModel):
    """Base of every settings group: frozen, unknown keys refused, field sentences kept as descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    former: ClassVar[Mapping[str, str]] = {}
    """Former name of a setting -> its name now."""

    @model_validator(mode="before")
    @classmethod
    def _names_are_todays(cls, data: Any) -> Any:
        for name in cls.former.keys() & data.keys() if isinstance(data, dict) else ():
            raise ValueError(f"'{name}' is now called '{cls.former[name]}'; use that name")
        return data

    def _unused(self, prefix: str, needs: Mapping[str, Sequence[tuple[str, bool]]]) -> list[str]:
        """One sentence for each changed setting with an unmet need, given as (words, whether it is met)."""
        fields = type(self).model_fields
        return [
            f"{prefix}.{name}={value} does nothing here; it needs {', and '.join(missing)}"
            for name, all_needs in needs.items()
            if (missing := [what for what, met in all_needs if not met])
            and (value := getattr(self, name)) != fields[name].default
        ]
