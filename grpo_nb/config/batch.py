"""The geometry of a step."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import model_validator

from grpo_nb.config.base import Count, Settings
from grpo_nb.config.inequalities import Inequality, of_batch, refuse
from grpo_nb.storage import former_names

MOST_COMPLETIONS = 10**6
"""Most completions: a config.json may claim any number, and checks and views work through them."""


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
    """Process a prompt once for its K completions in the passes that score and train: `auto` where the model supports
    it and it is cheaper. The results differ by rounding."""
    passes: Literal["auto", "model"] = "auto"
    """Forward pass that scores and trains. `auto`: one packed row without padding for LoRA on a Llama-like model on
    CUDA, fewer and larger operations for a small one on the CPU, else the model's own forward pass. `model`: always the
    model's own. The results differ by rounding, as above."""

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
        """Whether there is one update per rollout: the ratio is exactly 1 and clipping never acts."""
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

    def inequalities(self) -> Iterator[Inequality]:
        """Inequalities that the four counts must satisfy, with the numbers put in."""
        return of_batch(self.prompts, self.group_size, self.update_size, self.micro_batch, MOST_COMPLETIONS)

    @model_validator(mode="after")
    def _divides(self) -> Self:
        refuse(self.inequalities())
        return self
