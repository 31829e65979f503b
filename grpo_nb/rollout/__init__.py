"""Engines that draw completions: one protocol, chosen by name."""

import inspect
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from grpo_nb.config import ConfigError
from grpo_nb.policy.model import Policy
from grpo_nb.rollout.eager import EagerEngine
from grpo_nb.rollout.graph import GraphEngine
from grpo_nb.rollout.request import Ended, Request
from grpo_nb.types import Rollouts

__all__ = ["ENGINES", "EagerEngine", "Ended", "Engine", "GraphEngine", "Request", "engine"]


@runtime_checkable
class Engine(Protocol):
    """What draws K completions per prompt from a policy."""

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        """K = `request.group_size` completions for each prompt, prompt-major."""
        ...


ENGINES: dict[str, Callable[[], Engine]] = {"eager": EagerEngine, "graph": GraphEngine}
"""Engines by name."""


def engine(given: Engine | str = "eager") -> Engine:
    """The engine itself, or a new one of this name.

    Raises:
        ConfigError: no engine has the name, or the engine's `generate` takes other arguments.
    """
    if isinstance(given, str):
        if given not in ENGINES:
            raise ConfigError(f"engine '{given}' is unknown; use one of: {', '.join(ENGINES)}")
        return ENGINES[given]()
    generate = getattr(given, "generate", None)
    try:
        inspect.signature(generate).bind(None, None)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(
            f"the engine {type(given).__name__} cannot be called as generate(policy, request): {error}. Needs a method "
            "of that signature that returns Rollouts. What was passed one by one is in `grpo_nb.rollout.Request`"
        ) from error
    return given
