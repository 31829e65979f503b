"""Canaries: a length, an entropy or a truncation that jumps away from the run's own recent steps.

A jump of entropy or truncation is an early sign of a damaged policy; the learning rate is halved then, and returns
after `guards.recovery_steps` healthy steps. A length may jump for good reasons, so that it is logged only.
"""

import statistics
from collections.abc import Callable
from functools import partial

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.rules.finding import WINDOW, Action, Finding, Rows, newest, number, series

USUAL_ROWS = 5
"""Values that the recent steps need before a jump is judged."""
LEAST_LENGTH, LEAST_ENTROPY = 4.0, 0.5
"""Tokens, and nats per token, that a jump has at least: ratios of small numbers are noise."""


def length_jump(rows: Rows, config: Config) -> Finding | None:
    """The mean length is guards.length_jump times the usual one, or that much shorter."""
    factor = config.guards.length_jump
    advice = "read this step's samples: repetition, an early stop token, or a reward that pays for length"
    return _jump(rows, config, keys.LENGTH_MEAN, partial(far, factor=factor, least=LEAST_LENGTH), (advice, "warn"))


def entropy_jump(rows: Rows, config: Config) -> Finding | None:
    """The entropy is guards.entropy_jump times the usual one, or that much smaller."""
    factor = config.guards.entropy_jump
    advice = "nothing if it returns by itself; if it recurs, lower algorithm.learning_rate or the temperature"
    found = partial(far, factor=factor, least=LEAST_ENTROPY)
    return _jump(rows, config, keys.ENTROPY, found, (advice, _action(config)))


def truncation_jump(rows: Rows, config: Config) -> Finding | None:
    """The share of truncated completions rose by guards.truncation_jump."""
    limit = config.guards.truncation_jump
    advice = "read this step's samples for completions that never stop; if they are fine, raise the cap on their length"
    found = partial(rose, by=limit)
    return _jump(rows, config, keys.TRUNCATION, found, (advice, _action(config)))


def rose(now: float, usual: float, by: float | None) -> bool:
    """Whether the newest value is at least `by` above the usual one."""
    return by is not None and now - usual >= by


def far(now: float, usual: float, factor: float | None, least: float) -> bool:
    """Whether one value is `factor` times the other, and the two are at least `least` apart."""
    return factor is not None and abs(now - usual) >= least and (now >= factor * usual or usual >= factor * now)


def _jump(
    rows: Rows, config: Config, key: keys.Key, jumps: Callable[[float, float], bool], words: tuple[str, Action]
) -> Finding | None:
    """The finding of the first objective whose newest value jumps away from its usual one."""
    for name in config.objectives:
        past = series(rows[-WINDOW - 1 : -1], key.of(name))
        now = number(rows[-1], key.of(name))
        if now is not None and len(past) >= USUAL_ROWS and jumps(now, usual := statistics.median(past)):
            return _finding(key, newest(rows), name, (now, usual), words)
    return None


def _action(config: Config) -> Action:
    return "slow" if config.guards.canary_halves else "warn"


def _finding(
    key: keys.Key, step: int, objective: str, found: tuple[float, float], words: tuple[str, Action]
) -> Finding:
    (now, usual), (advice, action) = found, words
    halved = "; the learning rate was halved" if action == "slow" else ""
    return Finding(
        f"{key.name.partition('/')[0]}_jump",
        "warning",
        step,
        f"{key.of(objective)} is {now:.3g} {key.unit}, and was {usual:.3g} in the steps before{halved}.",
        {"objective": objective, "now": now, "usual": usual},
        advice,
        action,
    )
