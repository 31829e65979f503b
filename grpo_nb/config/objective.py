"""The settings of one objective: its task, its weight, and the KL penalty that holds it near the reference."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from grpo_nb.config.base import Positive, Settings
from grpo_nb.config.judge import JudgeConfig

USUAL_BETA = 0.04
"""DeepSeekMath's weight of the KL penalty (Shao et al. 2024, section 4.2)."""


class ObjectiveConfig(Settings):
    """One objective of the training: its task and data, its weight, and its distance to the reference."""

    task: str
    """`bbq`, `halueval_qa`, `halueval_dialogue`, `halueval_summarization`, or the name of a task passed to `grpo()`."""
    data: str | None = None
    """`demo` for the built-in world, else a file or folder in the task's public format."""
    weight: Positive = 1.0
    """Share of this objective in the combined gradient (`sum` uses it as it is)."""
    beta: Annotated[float, Field(ge=0)] = USUAL_BETA
    """Weight of the KL penalty at the start; a knob while training."""
    kl_band: tuple[float, float] | None = (0.01, 0.10)
    """Target band of the KL to the reference, nats per token; null keeps beta where it is set."""
    judge: JudgeConfig | None = None
    """LLM judge in addition to the task's own score: `providers`, `weight`, budgets; null: none."""
    system_prompt: str | None = None
    """Text of the system message that begins each prompt of this objective, in place of its own one; null: none added.
    The chat template needs a system role. `sft.data` is not changed by it."""

    # advanced
    beta_bounds: tuple[float, float] = (1e-4, 1.0)
    """The controller never moves beta outside these."""
    controller: Literal["fixed", "band", "proportional", "dual_ascent"] = "band"
    """Controller that moves beta while KL is out of `kl_band`: `band` by a factor, `proportional`, `dual_ascent`;
    `fixed`: none."""
    kl_target: Positive | None = None
    """KL that `proportional` and `dual_ascent` steer to, inside `kl_band`; null is the middle of the band."""
    controller_gain: Positive = 0.1
    """`proportional`: change of beta per error of KL, both relative; `dual_ascent`: beta per nat; else unused."""
    controller_limit: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Largest relative change of beta in one move of a controller; the rise to the lower of `beta_bounds` is exempt."""

    @property
    def start(self) -> float:
        """Value at which a controller restarts beta: `beta`, or its default where that is 0, within `beta_bounds`."""
        low, high = self.beta_bounds
        return min(max(self.beta or USUAL_BETA, low), high)

    @property
    def controlled(self) -> bool:
        """Whether a controller moves beta while no person holds it."""
        return self.kl_band is not None and self.controller != "fixed"

    def unused_settings(self, prefix: str) -> list[str]:
        """Changed settings that have no effect with the other settings, each with the setting it needs."""
        banded = ("a kl_band", self.kl_band is not None)
        moves = ("a controller that moves beta", self.controller != "fixed")
        steers = ("controller 'proportional' or 'dual_ascent'", self.controller in ("proportional", "dual_ascent"))
        return self._unused(
            prefix,
            {
                "beta_bounds": [banded, moves],
                "controller": [banded],
                "controller_gain": [banded, steers],
                "controller_limit": [banded, moves],
                "kl_target": [steers],
            },
        )

    @field_validator("system_prompt")
    @classmethod
    def _has_text(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError(f"system_prompt={value!r} has no text; write the system message, or set null for none")
        return value

    @model_validator(mode="after")
    def _bands_are_ordered(self) -> Self:
        if self.kl_band is not None and not 0 <= self.kl_band[0] < self.kl_band[1]:
            raise ValueError(f"kl_band={self.kl_band} is no band; needs 0 <= low < high, e.g. (0.01, 0.1), or null")
        if not 0 < self.beta_bounds[0] < self.beta_bounds[1]:
            raise ValueError(f"beta_bounds={self.beta_bounds}; needs 0 < low < high")
        return self

    @model_validator(mode="after")
    def _target_is_in_the_band(self) -> Self:
        if self.kl_target is None:
            return self
        if self.kl_band is None:
            raise ValueError(f"kl_target={self.kl_target} needs a kl_band around it; set one, or kl_target to null")
        low, high = self.kl_band
        if not low <= self.kl_target <= high:
            raise ValueError(
                f"kl_target={self.kl_target} is outside kl_band={self.kl_band}: beta rests at a KL inside the band, so "
                f"the target would never be met; needs {low} to {high}, or null for the middle"
            )
        return self
