"""Findings of a stored log of any length: its columns show where a rule can fire, and the rule is applied there.

The rule alone decides, on the rows themselves; a place where it does not fire is dropped.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from grpo_nb import rules
from grpo_nb.config import Config
from grpo_nb.losses.rounding import FAR_SHARE, HIGH_FLOOR, MEAN_FLOOR
from grpo_nb.metrics import keys
from grpo_nb.rules import Moment, MomentRule, canaries, health, numeric, updates
from grpo_nb.rules.finding import FIRST_STEP, WINDOW, Finding
from grpo_nb.rules.history import KEPT, History, numbers
from grpo_nb.storage.index import LogRows
from grpo_nb.storage.index.packing import Floats, Places

FEW_ROWS = 5_000
"""Length up to which every row of a log is read."""
REACH = max(updates.SKIPS_TO_STOP, updates.FROZEN_STEPS, WINDOW + 1)
"""Rows by which a rule of moments decides; its first finding shows more."""

Suspects = Callable[[LogRows, Config], Places]
"""Places of all rows at which a rule can fire, and possibly of others."""


def post_mortem(rows: LogRows, config: Config, *, without_sft: bool = False) -> list[Finding]:
    """The findings of `rules.post_mortem` in all rows; worst first.

    Args:
        without_sft: as for `History`.
    """
    if len(rows) <= FEW_ROWS:
        return rules.post_mortem(rows, config, History(config, without_sft=without_sft))
    moments: dict[str, Moment] = {}
    for rule, suspects in SUSPECTS.items():
        for place in np.unique(suspects(rows, config)).tolist():
            reach = REACH if moments.keys() & {rule.__name__} else KEPT
            rules.note(moments, rule(rows[max(place + 1 - reach, 0) : place + 1], config))
    return rules.summed_up(History.of(config, rows, without_sft=without_sft), config, moments)


def _where(rows: LogRows, key: str, suspicious: Callable[[Floats], NDArray[np.bool_]]) -> Places:
    at, values = numbers(rows, key)
    places: Places = at[suspicious(values)]
    return places


def _not_finite(rows: LogRows, config: Config) -> Places:
    found = [_where(rows, key, lambda values: ~np.isfinite(values)) for key in updates.must_be_finite((*rows.keys,))]
    return np.concatenate([np.zeros(0, np.int64), *found])


def _large_gradient(rows: LogRows, config: Config) -> Places:
    limit = config.algorithm.skip_grad_norm
    return _where(rows, keys.GRAD_NORM, lambda norm: ~(norm <= (np.inf if limit is None else limit)))


def _skipped(rows: LogRows, config: Config) -> Places:
    return rows.places(keys.STATUS, {"skipped"})


def _no_update(rows: LogRows, config: Config) -> Places:
    return _where(rows, keys.GRAD_UPDATE, lambda moved: moved == 0)


def _first_step(rows: LogRows, config: Config) -> Places:
    return _where(rows, "step", lambda step: step == FIRST_STEP)


def _moved_ratio(rows: LogRows, config: Config) -> Places:
    """Places where a bound may be crossed: each value is at least its floor."""
    mean = _where(rows, keys.RATIO_DIFFERENCE.mean, lambda gap: ~(gap <= MEAN_FLOOR))
    high = _where(rows, keys.RATIO_DIFFERENCE.p99, lambda gap: ~(gap <= HIGH_FLOOR))
    far = _where(rows, keys.RATIO_DIFFERENCE.far, lambda share: ~(share <= FAR_SHARE))
    return np.concatenate([mean, high, far])


def _wide_gap(rows: LogRows, config: Config) -> Places:
    wide = _where(rows, keys.SAMPLER_DIFFERENCE.mean, lambda gap: ~(gap <= numeric.SAMPLER_NATS))
    return np.concatenate([wide, _first_step(rows, config)])


def _overflown(rows: LogRows, config: Config) -> Places:
    return rows.texts(keys.OVERFLOW_LAYER).at


def _left_out(rows: LogRows, config: Config) -> Places:
    found = [_where(rows, keys.BAD_ROWS.of(name), lambda count: count > 0) for name in config.objectives]
    return np.concatenate([np.zeros(0, np.int64), *found])


def _jumps(key: keys.Key) -> Suspects:
    """Places where a value is far from the lowest or highest of those before it, between which their median lies."""

    def suspects(rows: LogRows, config: Config) -> Places:
        guards, places = config.guards, [np.zeros(0, np.int64)]
        for name in config.objectives:
            at, values = numbers(rows, key.of(name))
            if len(values) <= WINDOW:
                continue
            past = sliding_window_view(values, WINDOW)[:-1]
            now, low, high = values[WINDOW:], np.nanmin(past, axis=1), np.nanmax(past, axis=1)
            if key is keys.TRUNCATION:
                far = now - low >= (np.inf if guards.truncation_jump is None else guards.truncation_jump)
            else:
                factor = guards.length_jump if key is keys.LENGTH_MEAN else guards.entropy_jump
                far = (now >= (factor or np.inf) * low) | (high >= (factor or np.inf) * now)
            places += [at[:WINDOW], at[WINDOW:][far]]
        return np.concatenate(places)

    return suspects


def _rolled_back(rows: LogRows, config: Config) -> Places:
    return rows.places(keys.STATUS, {"rolled_back"})


SUSPECTS: Mapping[MomentRule, Suspects] = {
    updates.non_finite: _not_finite,
    updates.grad_spike: _large_gradient,
    updates.repeated_skips: _skipped,
    updates.params_frozen: _no_update,
    updates.first_update_wrong: _first_step,
    updates.gradient_wrong: _first_step,
    updates.ratio_broken: _moved_ratio,
    numeric.sampler_broken: _wide_gap,
    health.exploded: _rolled_back,
    health.repeated_rollbacks: _rolled_back,
    health.overflow: _overflown,
    health.bad_rows: _left_out,
    canaries.length_jump: _jumps(keys.LENGTH_MEAN),
    canaries.entropy_jump: _jumps(keys.ENTROPY),
    canaries.truncation_jump: _jumps(keys.TRUNCATION),
}
"""Candidate places of each rule about moments."""
