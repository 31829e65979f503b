"""Rules about rewards: objectives on different scales, a reward that pays for length, leaked prompts.

Called through `rules`; `evaluation_leaked` is called by quick evaluation, which reads the held-out prompts.
"""

from grpo_nb.algorithms import ADVANTAGE_ROWS
from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.rules.finding import ENOUGH, WINDOW, Finding, Rows, keys_below, level, newest, series, start
from grpo_nb.rules.history import ObjectiveRule, Rule

SCALES_APART = 10.0
"""Factor between the spreads of two objectives' rewards beyond which the smaller one is noise in the sum."""
PAID_BY_LENGTH = 0.9
"""Rank correlation with length from which a reward function measures length."""
DIVIDED = next(name for name, row in ADVANTAGE_ROWS.items() if row.scale_free)
"""The advantage to take where scales differ."""
LEAKED_BADLY = 0.01
"""Share of the held-out prompts: one or two equals may be chance where texts are short."""


def reward_scales(rows: Rows, config: Config) -> Finding | None:
    """One objective's rewards spread far more than another's, and nothing divides by the spread."""
    if config.algorithm.row.scale_free or len(config.objectives) < 2:
        return None
    spreads = {name: level(rows, keys.REWARD_STD.of(name)) for name in config.objectives}
    known = {name: spread * config.objectives[name].weight for name, spread in spreads.items() if spread}
    if len(known) < 2 or max(known.values()) < SCALES_APART * min(known.values()):
        return None
    large, small = max(known, key=lambda name: known[name]), min(known, key=lambda name: known[name])
    return Finding(
        "reward_scales",
        "warning",
        newest(rows),
        f"inside a group the rewards of {large} spread {known[large] / known[small]:.3g} times as far as those of "
        f"{small}, and '{config.algorithm.row.advantage}' gives advantages in units of the reward: {small} hardly "
        "counts.",
        {"spreads": known, "large": large, "small": small},
        f"pay both on one scale, 0 to 1; or set objectives.{large}.weight to {_weight(known, large, small):.2g}; or "
        f"take an advantage that divides by the spread (algorithm.advantage='{DIVIDED}')",
    )


def _weight(known: dict[str, float], large: str, small: str) -> float:
    return known[small] / known[large]


def reward_length(rows: Rows, config: Config, objective: str) -> Finding | None:
    """A reward function ranks answers by their length."""
    prefix = keys.REWARD_PART_LENGTH.below(objective)
    found = {key: series(rows[-WINDOW:], key) for key in keys_below(rows[-1], prefix)}
    means = {key.removeprefix(prefix): sum(v) / len(v) for key, v in found.items() if len(v) >= ENOUGH}
    if not means or (correlation := means[part := max(means, key=lambda name: abs(means[name]))]) is None:
        return None
    if abs(correlation) < PAID_BY_LENGTH:
        return None
    before, now = start(rows, keys.LENGTH_MEAN.of(objective)), level(rows, keys.LENGTH_MEAN.of(objective))
    longer = correlation > 0
    known = before is not None and now is not None
    return Finding(
        "reward_length",
        "warning" if longer else "info",
        newest(rows),
        f"reward function '{part}' of {objective} pays for {'length' if longer else 'brevity'}: its rank correlation "
        f"with the number of tokens is {correlation:.2f}."
        + (f" Answers had {before:.3g} tokens at the start and have {now:.3g} now." if known else ""),
        {"objective": objective, "part": part, "correlation": correlation, "length": [before, now]},
        f"cap what length can earn below what a right answer earns, or take '{part}' out"
        if longer
        else "nothing, if short answers are what you want",
        "warn" if longer else "none",
    )


def evaluation_leaked(objective: str, leaked: int, of: int) -> Finding | None:
    """Held-out prompts are trained on."""
    if not leaked:
        return None
    return Finding(
        "evaluation_leaked",
        "error" if leaked > LEAKED_BADLY * of else "warning",
        0,
        f"{leaked} of the {of} held-out prompts of {objective} are also trained on: an evaluation on them measures "
        "memory.",
        {"objective": objective, "leaked": leaked, "of": of},
        "split the data by template or text before anything is made of it, and take these prompts out of training",
    )


RULES: tuple[Rule, ...] = (reward_scales,)
OBJECTIVE_RULES: tuple[ObjectiveRule, ...] = (reward_length,)
