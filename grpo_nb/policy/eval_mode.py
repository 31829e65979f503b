"""Switches off everything in a model and its configurations that makes a forward pass random or adds work to it."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

RANDOM = ("drop", "jitter")
"""Parts of the names of probabilities and noise: attention_dropout, resid_pdrop, layerdrop, router_jitter_noise, ..."""
EXTRAS = ("output_router_logits",)
"""Outputs of a forward pass that make a loss of the router out of a batch of training, and fail while decoding."""


@dataclass(frozen=True)
class Silenced:
    """One attribute that was changed, with its former value."""

    name: str
    owner: Any
    attribute: str
    value: Any


def silence(model: nn.Module) -> list[Silenced]:
    """Set dropout and router noise to 0 and router outputs to False, as attributes of modules and of configurations.

    Scores must be a function of the weights: with noise on, the ratio to the sampler is not 1 at step 1.
    """
    changed = []
    for name, owner in _owners(model):
        for attribute, value in list(vars(owner).items()):
            if (quiet := _quiet(owner, attribute, value)) is not None:
                setattr(owner, attribute, quiet)
                changed.append(Silenced(f"{name}.{attribute}", owner, attribute, value))
    return changed


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Eval mode inside the block; every flag of the model and of its configuration is as before after it.

    Flags are set directly, since `eval()` takes tens of milliseconds where adapters make thousands of modules.
    """
    flags = [(own, name, own[name]) for own in map(vars, _modules(model)) for name in _FLAGS if name in own]
    use_cache = getattr(model.config, "use_cache", None)
    try:
        for own, name, value in flags:
            if name == "training" and value:
                own[name] = False
        yield
    finally:
        for own, name, value in flags:
            own[name] = value
        if use_cache is not None:
            model.config.use_cache = use_cache


_FLAGS = ("training", "gradient_checkpointing")


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """Each module once, as from `model.modules()`, in a third of its time."""
    seen, waiting = {model}, [model]
    while waiting:
        module = waiting.pop()
        yield module
        new = [child for child in module._modules.values() if child is not None and child not in seen]
        seen.update(new)
        waiting += new


@contextlib.contextmanager
def as_it_came(changed: Sequence[Silenced]) -> Iterator[None]:
    """Configurations with their own values inside the block: for writing them to disk."""
    configured = [one for one in changed if isinstance(one.owner, PreTrainedConfig)]
    now = [getattr(one.owner, one.attribute) for one in configured]
    try:
        for one in configured:
            setattr(one.owner, one.attribute, one.value)
        yield
    finally:
        for one, value in zip(configured, now, strict=True):
            setattr(one.owner, one.attribute, value)


def _owners(model: nn.Module) -> list[tuple[str, Any]]:
    """Modules, and every configuration that one of them holds, nested ones too."""
    modules = list(model.named_modules())
    configs: dict[int, tuple[str, Any]] = {}
    waiting = [("config", getattr(module, "config", None)) for _, module in modules]
    while waiting:
        name, config = waiting.pop(0)
        if isinstance(config, PreTrainedConfig) and id(config) not in configs:
            configs[id(config)] = (name, config)
            waiting += [(f"{name}.{key}", value) for key, value in vars(config).items()]
    return [*modules, *configs.values()]


def _quiet(owner: Any, attribute: str, value: Any) -> float | bool | None:
    """Value that the attribute must have; None where it may stay."""
    if attribute in EXTRAS:
        return False if value is True else None
    named = any(part in attribute for part in RANDOM)
    named = named or (attribute == "p" and isinstance(owner, nn.modules.dropout._DropoutNd))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return 0.0 if named and number and value > 0 else None
