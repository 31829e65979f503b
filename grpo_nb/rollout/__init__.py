"""Engines that sample completions: one protocol, chosen by name."""

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from grpo_nb.config import ConfigError, RolloutConfig
from grpo_nb.policy.model import Policy
from grpo_nb.rollout.eager import EagerEngine
from grpo_nb.rollout.graph import GraphEngine
from grpo_nb.rollout.grouped import GroupedEngine
from grpo_nb.rollout.request import Ended, Request
from grpo_nb.rollout.vllm import VLLMEngine
from grpo_nb.types import Rollouts

__all__ = [
    "ENGINES",
    "ChosenEngine",
    "EagerEngine",
    "Ended",
    "Engine",
    "GraphEngine",
    "GroupedEngine",
    "Remote",
    "Request",
    "VLLMEngine",
    "choose",
    "engine",
    "opened",
]


@runtime_checkable
class Engine(Protocol):
    """Samples K completions per prompt from a policy."""

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        """K = `request.group_size` completions for each prompt, prompt-major."""
        ...


@runtime_checkable
class Remote(Engine, Protocol):
    """An engine that can sample elsewhere, e.g. on a server, while this process trains (one step off-policy)."""

    def begin(self, policy: Policy, request: Request) -> "Future[Rollouts]":
        """Start a `generate` with the weights as they are when this returns; the future may be cancelled.

        `request.ended` may be called in another thread. The engine gets no other request until the future is done.
        """
        ...


ENGINES: dict[str, Callable[[RolloutConfig], Engine]] = {
    "eager": lambda _: EagerEngine(),
    "graph": lambda _: GraphEngine(),
    "grouped": lambda _: GroupedEngine(),
    "vllm": VLLMEngine,
}
"""Engines by name."""
_NAMES: dict[type, str] = {EagerEngine: "eager", GraphEngine: "graph", GroupedEngine: "grouped", VLLMEngine: "vllm"}


@dataclass(frozen=True)
class ChosenEngine:
    """The engine that samples from a policy, and its name."""

    engine: Engine
    name: str
    """Name in `ENGINES`, or the class of a caller's own engine."""
    reason: str = ""
    """Reason why it is not the requested engine; empty if it is."""


def choose(wanted: Engine | str | None, policy: Policy, rollout: RolloutConfig) -> ChosenEngine:
    """The requested engine, else that of the settings, where it serves this policy. `auto` is `graph` on CUDA,
    `grouped` for small Llama-like models on the CPU, and `eager` where these cannot serve it.

    They sample a few tokens to find out; a server gets no request yet.

    Raises:
        ConfigError: as `engine`.
        ModelError: the model's scores are not finite.
    """
    name = wanted or rollout.engine
    if name == "auto":
        name = {"cuda": "graph", "cpu": "grouped"}.get(policy.device.type, "eager")
    built = engine(name, rollout)
    if isinstance(built, GraphEngine | GroupedEngine) and policy.sharding is not None:
        return ChosenEngine(
            EagerEngine(), "eager", f"'{name}' reads weights that are spread over the ranks (model.shard)"
        )
    if isinstance(built, GraphEngine | GroupedEngine) and (reason := built.refused(policy)):
        return ChosenEngine(built.eager, "eager", reason)
    return ChosenEngine(built, _NAMES.get(type(built), type(built).__name__))


@contextmanager
def opened(engine: Engine) -> Iterator[Engine]:
    """Yield the engine; after the block it releases its resources on a server."""
    try:
        yield engine
    finally:
        if close := getattr(engine, "close", None):
            close()


def engine(given: Engine | str = "eager", rollout: RolloutConfig | None = None) -> Engine:
    """The engine itself, or a new one of this name with these settings.

    Raises:
        ConfigError: no engine has the name, the engine's `generate` takes other arguments, or a server's address is
            not set.
    """
    if isinstance(given, str):
        if given not in ENGINES:
            raise ConfigError(f"engine '{given}' is unknown; use one of: auto, {', '.join(ENGINES)}")
        return ENGINES[given](rollout or RolloutConfig())
    generate = getattr(given, "generate", None)
    try:
        inspect.signature(generate).bind(None, None)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(
            f"the engine {type(given).__name__} cannot be called as generate(policy, request): {error}. Needs a method "
            "of that signature that returns Rollouts. What was passed one by one is in `grpo_nb.rollout.Request`"
        ) from error
    return given
