"""The geometry of a step."""

from typing import Literal, Self

from pydantic import model_validator

from grpo_nb.config.base import Count, Settings
from grpo_nb.storage import former_names

MOST_COMPLETIONS = 10**6
"""A config.json may claim any number, and what checks or shows a run works through these."""


class BatchConfig(Settings):
    """The geometry of a step in plain words: prompts x group, cut into updates, cut into micro-batches."""

    former = former_names.SETTINGS["batch"]

    prompts: Count = 8
    """Prompts per step, over all objectives together, shared equally."""
    group_size: int = 8
    """Completions per prompt (K): an answer is judged against the others of its group."""
    micro_batch: Count = 8
    """Completions per forward and backward pass; changes memory, never the gradient."""

    # advanced
    mini_batch: Count | None = None
    """Completions per optimizer update; null: all of the step's, so that training stays on-policy."""
    num_iterations: Count = 1
    """Passes over each step's completions (mu); above 1 the ratio leaves 1 and clipping acts."""
    share_prompts: Literal["auto", "never"] = "auto"
    """A prompt stands once before its K completions in the passes that score and train: `auto` where the model bears
    it and it is cheaper. Other bits, the same numbers to rounding."""
    passes: Literal["auto", "model"] = "auto"
    """What scores and trains: `auto` takes one line of tokens without padding where the policy is LoRA on a model of
    Llama's kin on CUDA, fewer and larger operations where it is a small one on the CPU, and the model's own forward
    pass else; `model` always that. Other bits, as above."""

    @property
    def completions(self) -> int:
        """Completions per step: prompts x group_size."""
        return self.prompts * self.group_size

    @property
    def update_size(self) -> int:
        """Completions per optimizer update."""
        return self.mini_batch or self.completions

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer updates per step: num_iterations x (completions / mini_batch)."""
        return self.num_iterations * (self.completions // self.update_size)

    @property
    def on_policy(self) -> bool:
        """One update per rollout: the ratio is exactly 1 and clipping never acts."""
        return self.updates_per_rollout == 1

    def describe(self, objectives: int = 1) -> str:
        """The geometry as one sentence; a micro-batch holds rows of one objective only."""
        share = self.update_size // objectives
        passes = objectives * -(-share // self.micro_batch)
        policy = "on-policy, clipping inactive" if self.on_policy else "off-policy after the first, clipping active"
        return (
            f"{self.prompts} prompts x {self.group_size} completions = {self.completions} per step; "
            f"{self.updates_per_rollout} update(s) of {self.update_size} per step ({policy}); "
            f"{passes} micro-batch(es) of {min(self.micro_batch, share)} per update"
        )

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size}: an answer is compared with the others of its group, so every "
                "advantage would be 0; needs 2 or more, 8 is usual"
            )
        if self.completions > MOST_COMPLETIONS:
            raise ValueError(
                f"{self.prompts} prompts x {self.group_size} completions are {self.completions} a step; at most "
                f"{MOST_COMPLETIONS} can be"
            )
        if self.update_size > self.completions:
            raise ValueError(
                f"mini_batch={self.update_size} is more than the {self.completions} completions of a step "
                f"({self.prompts} prompts x {self.group_size}); lower mini_batch or raise prompts"
            )
        if self.completions % self.update_size:
            raise ValueError(
                f"mini_batch={self.update_size} does not divide the {self.completions} completions of a step; "
                f"use one of {divisors(self.completions)}"
            )
        if self.update_size % self.micro_batch and self.micro_batch < self.update_size:
            raise ValueError(
                f"micro_batch={self.micro_batch} does not divide an update of {self.update_size} completions; "
                f"use one of {divisors(self.update_size)}"
            )
        return self


def divisors(n: int) -> list[int]:
    """The numbers that divide `n`, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]
