"""Engines that draw completions: one protocol, chosen by name."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from grpo_nb.config import ConfigError, SamplingConfig
from grpo_nb.policy.model import Policy
from grpo_nb.rollout.eager import EagerEngine
from grpo_nb.types import Rollouts

__all__ = ["ENGINES", "EagerEngine", "Engine", "engine"]


@runtime_checkable
class Engine(Protocol):
    """What draws K completions per prompt from a policy."""

    def generate(
        self,
        policy: Policy,
        prompt_ids_P: Sequence[Sequence[int]],
        group_size: int,
        sampling: SamplingConfig,
        temperature: float,
        uniforms: Tensor | None,
        *,
        greedy: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Rollouts:
        """K = `group_size` completions for each prompt, prompt-major.

        `uniforms` is float64 in [0, 1), shape [P * K, at least max_completion]: entry (row, t) alone decides
        token t of that row given the tokens before it, so a result does not depend on what else is drawn with it.
        `temperature` stands above `sampling.temperature` (it is a knob). `greedy` takes the likeliest token and
        needs no uniforms. `progress(finished, rows)` is called as completions end.
        """
        ...


ENGINES: dict[str, Callable[[], Engine]] = {"eager": EagerEngine}
"""Engines by name."""


def engine(name: str = "eager") -> Engine:
    """A new engine of this name.

    Raises:
        ConfigError: no engine has it.
    """
    if name not in ENGINES:
        raise ConfigError(f"engine '{name}' is unknown; use one of: {', '.join(ENGINES)}")
    return ENGINES[name]()
