"""Rules about settings that distort the numbers of a step without an error: asked through rules.py."""

from grpo_nb.algorithms import SCALE_FREE
from grpo_nb.config import Config
from grpo_nb.findings import Finding, ObjectiveRule, Rows, level, newest

CLIPPED_ADVANTAGES = 0.05
"""Share of answers at the bound: an outlier is what it is for, one answer in twenty is the signal itself."""


def advantage_clipped(rows: Rows, config: Config, objective: str) -> Finding | None:
    """`advantage_clip` cuts many advantages, so that answers of different rewards teach the same."""
    share, bound = level(rows, f"advantage_clipped/{objective}"), config.algorithm.advantage_bound
    if share is None or bound is None or share <= CLIPPED_ADVANTAGES:
        return None
    name = config.algorithm.row.advantage
    unit = "standard deviations" if name in SCALE_FREE else "units of the reward"
    return Finding(
        "advantage_clipped",
        "warning",
        newest(rows),
        f"algorithm.advantage_clip={bound:g} cut the advantages of {share:.0%} of the {objective} answers: beyond it a "
        f"better answer teaches no more than a good one ('{name}' gives advantages in {unit}).",
        {"objective": objective, "share": share, "bound": bound, "advantage": name},
        "set algorithm.advantage_clip to null in a new run, or scale the rewards to about 1"
        if name not in SCALE_FREE
        else f"raise algorithm.advantage_clip in a new run, or look for rewards far from all others of {objective}",
    )


OBJECTIVE_RULES: tuple[ObjectiveRule, ...] = (advantage_clipped,)
