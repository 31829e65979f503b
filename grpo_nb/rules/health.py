"""Rules about the state that a step leaves: an update that broke it is undone, and three in a row end the run."""

import math

from grpo_nb.config import Config
from grpo_nb.losses.rounding import overflow_advice
from grpo_nb.metrics import keys
from grpo_nb.presets import usual_rate
from grpo_nb.rules.finding import Finding, Row, Rows, newest, number, rate_of

LOWEST_FACTOR = 1 / 64
"""Factor of the requested learning rate at or below which an undone step shows that the rate is not the cause."""


def exploded(rows: Rows, config: Config) -> Finding | None:
    """After the step's updates a weight is not finite, or the policy is further away than guards.rollback_kl allows."""
    guards, row = config.guards, rows[-1]
    if not guards.rollback:
        return None
    limits = {keys.GRAD_UPDATE: None, keys.HEALTH_KL: guards.rollback_kl}
    found = {key: value for key in limits if (value := number(row, key)) is not None}
    bad = {key: value for key, value in found.items() if _beyond(value, limits[key])}
    if not bad:
        return None
    rate, told = (
        rate_of(row, config),
        [f"{key} = {value:.4g} (limit {_limit(limits[key])})" for key, value in bad.items()],
    )
    again, recurring = (number(row, keys.ROLLBACKS) or 0) > 1, _lower_rate(row, config)
    return Finding(
        "exploded",
        "error" if again else "warning",
        newest(rows),
        f"the updates left {', '.join(told)}, so the step was undone: weights, optimizer and controllers are those "
        "before it, and the learning rate was halved.",
        {"values": {key: _plain(value) for key, value in bad.items()}, "limits": limits, "learning_rate": rate},
        recurring
        if again
        else f"nothing if it stays alone: the rate returns after {guards.recovery_steps} healthy steps. If it recurs, "
        f"lower algorithm.learning_rate (this step: {rate:g})",
        "rollback",
        recurring,
    )


def _lower_rate(row: Row, config: Config) -> str:
    """Advice for steps that are undone again and again."""
    requested, usual = number(row, keys.LR_REQUESTED) or rate_of(row, config), usual_rate(config)
    lower = usual if usual < requested else requested / 4
    name = "the preset's default" if usual < requested else f"already at or below the preset's default of {usual:g}"
    return f"lower algorithm.learning_rate from {requested:g} to {lower:g} ({name}), in a new run or from a checkpoint"


def repeated_rollbacks(rows: Rows, config: Config) -> Finding | None:
    """Several steps in a row were undone, each at half the rate of the one before; or one at hardly any rate."""
    row, guards = rows[-1], config.guards
    count = number(row, keys.ROLLBACKS)
    if row.get(keys.STATUS) != "rolled_back" or count is None:
        return None
    rate, requested = rate_of(row, config), number(row, keys.LR_REQUESTED)
    if count < guards.rollbacks_to_stop:
        return _undone_at_any_rate(row, config) if requested and rate <= LOWEST_FACTOR * requested else None
    return Finding(
        "repeated_rollbacks",
        "error",
        newest(rows),
        f"{count:.0f} steps in a row were undone, the last at learning rate {rate:g}. Training ends here; the last "
        "good state is saved.",
        {"in_a_row": count, "learning_rate": rate, "requested": requested},
        f"resume with a lower learning rate than the requested {requested or rate:g}, a higher beta, or both",
        "end",
    )


def _undone_at_any_rate(row: Row, config: Config) -> Finding:
    rate, requested, limit = rate_of(row, config), number(row, keys.LR_REQUESTED), config.guards.rollback_kl
    return Finding(
        "repeated_rollbacks",
        "error",
        row["step"],
        f"a step was undone at learning rate {rate:.3g}, a small part of the requested {requested:.3g}: the rate is "
        f"not what moves the policy over its limit ({limit} nats). Training ends here; the last good state is saved.",
        {"learning_rate": rate, "requested": requested, "rollback_kl": limit, "kl": number(row, keys.HEALTH_KL)},
        "raise guards.rollback_kl if the policy may go that far, or the betas if it may not",
        "end",
    )


def _beyond(value: float, limit: float | None) -> bool:
    return not math.isfinite(value) or (limit is not None and value > limit)


def _limit(limit: float | None) -> str:
    return "finite" if limit is None else f"{limit:g}"


def _plain(value: float) -> float | str:
    """The value as JSON holds it."""
    return value if math.isfinite(value) else str(value)


def overflow(rows: Rows, config: Config) -> Finding | None:
    """Numbers of a step are not finite although all weights are: a layer's activation, or the backward pass."""
    row = rows[-1]
    layer, dtype, largest = (row.get(key) for key in (keys.OVERFLOW_LAYER, keys.OVERFLOW_DTYPE, keys.OVERFLOW_LARGEST))
    if layer is None:
        return None
    where = f"'{layer}' is the first layer whose output is not finite ({dtype}, largest input {largest})"
    nowhere = f"every layer's output is finite ({dtype}), so the numbers overflow in the loss or the backward pass"
    return Finding(
        "overflow",
        "warning",
        newest(rows),
        f"all weights are finite, and numbers of this step are not: {where if layer else nowhere}.",
        {"layer": layer, "dtype": dtype, "largest": largest},
        overflow_advice(str(dtype)),
    )


def bad_rows(rows: Rows, config: Config) -> Finding | None:
    """Completions left the loss because a log-prob of theirs is not finite."""
    counts = {name: number(rows[-1], keys.BAD_ROWS.of(name)) for name in config.objectives}
    found = {name: int(count) for name, count in counts.items() if count and math.isfinite(count)}
    if not found:
        return None
    return Finding(
        "bad_rows",
        "warning",
        newest(rows),
        f"completions with a log-prob that is not finite: {', '.join(f'{n} of {name}' for name, n in found.items())}; "
        "they were left out of the loss.",
        {"completions": found, "most": config.guards.mask_bad_rows},
        "read the finding `overflow` of this step, which names the layer; nothing if it stays alone",
    )
