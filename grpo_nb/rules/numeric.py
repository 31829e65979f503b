"""Rules about numbers that are wrong without an error: a sampler that is not the trainer, advantages cut flat.

Called through `rules`.
"""

import math

from grpo_nb.config import Config
from grpo_nb.losses.rounding import Gap, broken
from grpo_nb.metrics import keys
from grpo_nb.rules.finding import ENOUGH, FIRST_STEP, Finding, Row, Rows, level, newest, number
from grpo_nb.rules.history import ObjectiveRule, Rule

CLIPPED_ADVANTAGES = 0.05
"""Share of answers at the bound: a bound is meant for outliers, and one answer in twenty is signal."""
SAMPLER_NATS = 0.5
"""Mean |Δ log p| that only other weights, positions or another distribution explain, in any precision."""


def beyond_rounding(row: Row, of: keys.Difference) -> dict[str, tuple[float, float]]:
    """Statistics of a log-prob difference that exceed rounding, by metric: (found, bound), in nats; `_far` a share.

    Empty for a row without its rounding, which an older version logged.
    """
    mean, eps = number(row, of.mean), number(row, keys.ROUNDING)
    if mean is None or eps is None:
        return {}
    tokens, temperature = number(row, keys.TOKENS), number(row, keys.TEMPERATURE)
    gap = Gap(mean, number(row, of.p99), number(row, of.far), math.inf if tokens is None else tokens)
    return {getattr(of, name): values for name, values in broken(gap, eps, temperature or 1.0).items()}


def sampler_broken(rows: Rows, config: Config) -> Finding | None:
    """The engine does not sample from the scored policy: a gap of nats stops the run, a smaller one at step 1 warns.

    Settings of `sampling` that shape the sampler, and a correction that expects another one, are left to
    `sampler_mismatch`.
    """
    row, gap = rows[-1], number(rows[-1], keys.SAMPLER_DIFFERENCE.mean)
    if gap is None or config.sampling.changes_policy or config.algorithm.importance_correction != "none":
        return None
    beyond = beyond_rounding(row, keys.SAMPLER_DIFFERENCE) if row["step"] == FIRST_STEP else {}
    stops = not gap <= SAMPLER_NATS
    if not stops and not beyond:
        return None
    return Finding(
        "sampler_broken",
        "error",
        newest(rows),
        f"the engine's log-probs of its own tokens differ from the trainer's by {gap:.3g} nats on average: it "
        "samples from another distribution than the trainer scores, so advantages belong to other answers.",
        {"gap": gap, "values": {key: found for key, (found, _) in beyond.items()}},
        "see that the engine has the newest weights, the temperature of the step, and positions and masks that count "
        "real tokens only; where it must differ a little, set algorithm.importance_correction to 'tis'",
        "stop" if stops else "warn",
    )


def sampler_stale(rows: Rows, config: Config) -> Finding | None:
    """The engine agreed with the trainer at the start and no longer does: it samples with older weights."""
    tail = rows[-ENOUGH:]
    if len(tail) < ENOUGH or tail[0]["step"] == FIRST_STEP:
        return None
    if config.sampling.changes_policy or config.algorithm.importance_correction != "none":
        return None
    if any(row.get(keys.POSITIONS) for row in tail):
        return None  # positions of the longest row: `sampler_mismatch`
    first = rows[0]
    gaps = [number(row, keys.SAMPLER_DIFFERENCE.mean) for row in (first, *tail)]
    agreed = gaps[0] is not None and not beyond_rounding(first, keys.SAMPLER_DIFFERENCE)
    if not agreed or not all(beyond_rounding(row, keys.SAMPLER_DIFFERENCE) for row in tail):
        return None
    return Finding(
        "sampler_stale",
        "error",
        newest(rows),
        f"the engine's log-probs were the trainer's at step {first['step']} and have differed from them since, by "
        f"{gaps[-1]:.3g} nats on average now: it draws from older weights, so rewards are those of another policy.",
        {"gap_start": gaps[0], "gaps": gaps[1:]},
        "see that the engine is given the new weights after every update, and that it uses them",
    )


def advantage_clipped(rows: Rows, config: Config, objective: str) -> Finding | None:
    """`advantage_clip` cuts many advantages, so that answers of different rewards teach the same."""
    share, bound = level(rows, keys.ADVANTAGE_CLIPPED.of(objective)), config.algorithm.advantage_bound
    if share is None or bound is None or share <= CLIPPED_ADVANTAGES:
        return None
    row = config.algorithm.row
    unit = "standard deviations" if row.scale_free else "units of the reward"
    return Finding(
        "advantage_clipped",
        "warning",
        newest(rows),
        f"algorithm.advantage_clip={bound:g} cut the advantages of {share:.0%} of the {objective} answers: beyond it a "
        f"better answer teaches no more than a good one ('{row.advantage}' gives advantages in {unit}).",
        {"objective": objective, "share": share, "bound": bound, "advantage": row.advantage},
        "set algorithm.advantage_clip to null in a new run, or scale the rewards to about 1"
        if not row.scale_free
        else f"raise algorithm.advantage_clip in a new run, or look for rewards far from all others of {objective}",
    )


OBJECTIVE_RULES: tuple[ObjectiveRule, ...] = (advantage_clipped,)
RULES: tuple[Rule, ...] = (sampler_stale,)
