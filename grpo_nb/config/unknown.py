"""What is said of a setting that does not exist: the known name that is most like it, or the names that are known."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from grpo_nb.printable import cut
from grpo_nb.storage import former_names
from grpo_nb.suggest import close_matches


def unknown(dotted: str, name: str, known: Iterable[str]) -> str:
    """The sentence about setting `dotted`, whose part `name` is none of those `known` in its place."""
    if now := former_names.setting(dotted):
        return f"'{dotted}' is now called '{now}'; use that name"
    names = list(known)
    dotted, name = cut(dotted), cut(name)
    close = close_matches(name, names, count=1, cutoff=0.6)
    meant = f"did you mean '{close[0]}'?" if close else f"known here: {', '.join(names)}"
    return f"unknown setting '{dotted}' ('{name}'): {meant}" if names else f"unknown setting '{dotted}': remove it"


def names_at(settings: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The names of the settings in the group at `path`, e.g. `("objectives", "fairness", "judge")`."""
    kind: Any = settings
    for part in path:
        group = _group(kind)
        if isinstance(group, type) and issubclass(group, BaseModel):
            kind = group.model_fields[part].annotation if part in group.model_fields else None
        else:  # of a mapping the values, of a sequence the items
            kind = next((arg for arg in reversed(get_args(group)) if arg is not Ellipsis), None)
    group = _group(kind)
    return list(group.model_fields) if isinstance(group, type) and issubclass(group, BaseModel) else []


def _group(kind: Any) -> Any:
    """The type among several, such as `JudgeConfig | None`, that has something inside."""
    for each in (kind, *get_args(kind)):
        origin = get_origin(each)
        inside = origin if isinstance(origin, type) else each
        if isinstance(inside, type) and issubclass(inside, BaseModel | Mapping | list | tuple):
            return each
    return None
