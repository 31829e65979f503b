"""The settings of the guards: automatic actions of the trainer on a step that goes wrong."""

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_nb.config.base import Count, Positive, Settings

Factor = Annotated[float, Field(gt=1)]
Share = Annotated[float, Field(gt=0, le=1)]


class GuardsConfig(Settings):
    """Each guard has a threshold and an off-switch (false or null), and logs an event with its numbers when it acts."""

    rollback: bool = True
    """Undo a step that leaves a weight not finite or the KL above `rollback_kl`, and halve the learning rate."""
    rollback_kl: Positive | None = 2.0
    """Highest KL to the reference after a step, nats per token, measured on a few of its completions where the update
    is larger than recent healthy ones or the KL is near the limit; null: only weights that are not finite are undone.
    """

    # advanced
    rollbacks_to_stop: Count = 3
    """Rollbacks without a healthy step between them after which the run ends, saved."""
    recovery_steps: Count = 10
    """Healthy steps after which a halved learning rate doubles, until it is the requested one again."""
    snapshot: Literal["host", "device"] = "host"
    """Memory that holds the last good weights and optimizer moments: the machine's (`host`) or the GPU's (`device`)."""
    mask_bad_rows: Share | None = 0.25
    """Completions with a log-prob that is not finite leave the loss, up to this share of a step; null: they stay."""
    find_overflow: bool = True
    """When numbers are not finite but all weights are, find the first layer that overflowed by one more forward pass.
    """
    length_jump: Factor | None = 4.0
    """Factor by which the mean length may differ from the median of the last steps before a warning; null: no warning.
    """
    entropy_jump: Factor | None = 4.0
    """Factor by which the entropy may jump, and by 0.5 nats at least, before the learning rate is halved; null: off."""
    truncation_jump: Share | None = 0.5
    """Rise of the share of truncated completions at which the learning rate is halved; null: off."""
    canary_halves: bool = True
    """Whether a jump of entropy or truncation halves the learning rate; false: it is logged only."""


OFF: dict[str, Any] = {
    "rollback": False,
    "mask_bad_rows": None,
    "find_overflow": False,
    "length_jump": None,
    "entropy_jump": None,
    "truncation_jump": None,
}
"""Settings without guards, as runs of versions before them had it."""
