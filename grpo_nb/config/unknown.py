"""Hint for a setting that does not exist: the existing name that is most like it, or all existing names."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from grpo_nb.printable import cut
from grpo_nb.storage import former_names
from grpo_nb.suggest import close_matches

ELSEWHERE: Mapping[str, str] = {
    "lr": "algorithm.learning_rate",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "gradient_accumulation_steps": "batch.micro_batch",
    "kl_coef": "objectives.NAME.beta",
    "max_new_tokens": "sampling.max_completion_length",
    "max_steps": "run.steps",
    "max_tokens": "sampling.max_completion_length",
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "mu": "batch.num_iterations",
    "num_generations": "batch.group_size",
    "num_train_epochs": "run.steps",
    "per_device_train_batch_size": "batch.micro_batch",
    "save_steps": "run.checkpoint_every",
    "save_total_limit": "run.keep_checkpoints",
}
"""Name of a setting in other trainers -> its name here; equal names need no row."""
MOST_MEANT = 3
"""Settings of other groups that a message names."""
NAME = "NAME"
"""Placeholder for the name of an objective."""
OFFLOADING = ("device_map", "max_memory", "offload_folder", "offload_state_dict", "cpu_offload", "offload")
"""Settings of transformers, accelerate and others that move weights between devices."""
NO_OFFLOADING = (
    "the model stays on one device, which model.device names. Where it does not fit, start from "
    "presets.low_memory, or set what `grpo-nb plan` advises"
)


def unknown(dotted: str, name: str, known: Iterable[str], settings: type[BaseModel] | None = None) -> str:
    """Error sentence for setting `dotted`, whose part `name` is none of the `known` names at its place."""
    if now := former_names.setting(dotted):
        return f"'{dotted}' is now called '{now}'; use that name"
    if name in OFFLOADING:
        return f"unknown setting '{dotted}': nothing is offloaded here, {NO_OFFLOADING}"
    names = list(known)
    dotted, name = cut(dotted), cut(name)
    close = close_matches(name, names, count=1, cutoff=0.6)
    meant = f"did you mean '{close[0]}'?" if close else f"known here: {', '.join(names)}"
    word, alone = dotted.rpartition(".")[2], not close and dotted.startswith(f"{name}.")
    if settings is not None and (name == word or alone) and (found := _anywhere(settings, word)):
        meant = "did you mean " + " or ".join(f"'{each}'" for each in found) + "?"
    return f"unknown setting '{dotted}' ('{name}'): {meant}" if names else f"unknown setting '{dotted}': remove it"


def leaves(settings: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted name of every setting that is no group; of objectives under NAME, of a judge's providers none."""
    for name, field in settings.model_fields.items():
        group = _group(field.annotation)
        inside = next((arg for arg in reversed(get_args(group)) if _is_settings(arg)), None)
        if _is_settings(group):
            yield from leaves(group, f"{prefix}{name}.")
        elif get_origin(group) is dict and inside is not None:
            yield from leaves(inside, f"{prefix}{name}.{NAME}.")
        else:
            yield f"{prefix}{name}"


def _anywhere(settings: type[BaseModel], word: str) -> list[str]:
    """The settings of any group that are called `word`, here or by another trainer; SFT's and the deepest last."""
    found = [dotted for dotted in leaves(settings) if dotted.rpartition(".")[2] == word]
    if word in ELSEWHERE:
        found.append(ELSEWHERE[word])
    return sorted(found, key=lambda dotted: (dotted.startswith("sft."), dotted.count(".")))[:MOST_MEANT]


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


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
