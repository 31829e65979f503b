"""Rules about one step: its numbers, its update, and what must hold before the first."""

import math
import statistics
from collections.abc import Mapping
from functools import lru_cache

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.optim import gradient_refused
from grpo_nb.rules import causes, numeric
from grpo_nb.rules.finding import FIRST_STEP, WINDOW, Finding, Row, Rows, newest, number, rate_of, series

SKIPS_TO_STOP = 3
"""Skips in a row after which the run stops: a lone outlier recovers, three mean the weights are damaged."""
FROZEN_STEPS = 3
"""Steps with a gradient but no change of the weights: rounding may swallow one, not three."""
FAINT_SPREAD = 1e-8
"""Standard deviation of rewards in their groups below which advantages, divided by it plus 1e-4, are near 0."""
RATIO_NOISE, RATIO_BROKEN = 1e-3, 0.4
"""max |ratio - 1| of the first update in logs that have no robust measure of it: float32, and half precision's tail."""
GRADIENT_APART = 0.02
"""Allowed difference, as a share of the gradient's norm: far above the rounding of sums."""
KL_START_NOISE, KL_START_BROKEN = 1e-3, 0.02
"""KL at step 1, when policy and reference are the same weights: rounding, and a wrong reference."""


def non_finite(rows: Rows, config: Config) -> Finding | None:
    """Loss, KL or gradient is nan or infinite: applying it would poison every weight at once."""
    row = rows[-1]
    bad = {k: str(v) for k in must_be_finite(tuple(row)) if (v := number(row, k)) is not None and not math.isfinite(v)}
    if not bad:
        return None
    return Finding(
        "non_finite",
        "error",
        newest(rows),
        f"{', '.join(f'{k} = {v}' for k, v in bad.items())}: applying this update would turn all weights into nan, "
        "so it is left out.",
        {"values": bad, "norms_before": series(rows[-4:-1], keys.GRAD_NORM)},
        f"lower algorithm.learning_rate (now {rate_of(row, config):g}); "
        + ("use bfloat16 or float32 instead of float16; " if config.model.dtype == "float16" else "")
        + "read this step's samples for a degenerate answer",
        "skip",
    )


_REACH_WEIGHTS = keys.GRAD_NORM, keys.KL.below(), keys.LOSS_TERM.below()


@lru_cache(maxsize=32)
def must_be_finite(found: tuple[str, ...]) -> tuple[str, ...]:
    """Keys among `found` whose nan or infinity would reach the weights."""
    return tuple(key for key in found if key == keys.LOSS or key.startswith(_REACH_WEIGHTS))


def grad_spike(rows: Rows, config: Config) -> Finding | None:
    """The gradient norm is above algorithm.skip_grad_norm: one such update can end a run."""
    norm, limit = number(rows[-1], keys.GRAD_NORM), config.algorithm.skip_grad_norm
    if norm is None or limit is None or not math.isfinite(norm) or not gradient_refused(norm, limit):
        return None
    usual = statistics.median(series(rows[-WINDOW - 1 : -1], keys.GRAD_NORM) or [math.nan])
    return Finding(
        "grad_spike",
        "warning",
        newest(rows),
        f"gradient norm {norm:.4g} is above skip_grad_norm {limit:g} (usual here: {usual:.3g}): update left out.",
        {"norm": norm, "limit": limit, "usual": usual},
        f"nothing while it stays alone; if it comes back, lower the learning rate ({rate_of(rows[-1], config):g} now)",
        "skip",
        f"lower the learning rate ({rate_of(rows[-1], config):g} now): it came back",
    )


def repeated_skips(rows: Rows, config: Config) -> Finding | None:
    """Several updates in a row were skipped: waiting will not help."""
    tail = rows[-SKIPS_TO_STOP:]
    if len(tail) < SKIPS_TO_STOP or any(row.get(keys.STATUS) != "skipped" for row in tail):
        return None
    return Finding(
        "repeated_skips",
        "error",
        newest(rows),
        f"every update of the last {SKIPS_TO_STOP} steps was skipped: nothing is learnt, and the cause does not go by "
        "itself.",
        {"norms": [str(number(row, keys.GRAD_NORM)) for row in tail]},
        "continue from the checkpoint before the first skip with half the learning rate (now "
        f"{rate_of(rows[-1], config):g})"
        if any(number(row, keys.GRAD_NORM) is not None for row in tail)
        else "no group was scored completely, so no group had a signal: read `cause` in samples.jsonl",
        "stop",
    )


def params_frozen(rows: Rows, config: Config) -> Finding | None:
    """There is a gradient, but the weights do not change."""
    tail = rows[-FROZEN_STEPS:]
    frozen = [row for row in tail if _meant_to_move(row) and number(row, keys.GRAD_UPDATE) == 0]
    if len(frozen) < FROZEN_STEPS:
        return None
    norm, faint = number(rows[-1], keys.GRAD_NORM), _faint(rows[-1], config)
    return Finding(
        "params_frozen",
        "error",
        newest(rows),
        f"for {FROZEN_STEPS} steps the gradient was not zero (norm {norm:.3g}) but no weight changed: the optimizer "
        "holds other parameters than the model, or the updates are lost in rounding.",
        {"norm": norm, "update": 0.0, "learning_rate": rate_of(rows[-1], config), **faint},
        _SCALE_ADVICE
        if faint
        else f"train LoRA or float32 weights (model.train, model.dtype) or raise algorithm.learning_rate (now "
        f"{rate_of(rows[-1], config):g}): a bfloat16 weight ignores changes below 0.4% of itself",
        "stop",
    )


def _faint(row: Row, config: Config) -> dict[str, float]:
    """The spread of each objective's rewards, where all are too small to move a weight; else nothing."""
    found = {key: number(row, key) for key in map(keys.REWARD_STD.of, config.objectives)}
    spreads = {key: spread for key, spread in found.items() if spread}
    return spreads if spreads and max(spreads.values()) < FAINT_SPREAD else {}


def first_update_wrong(rows: Rows, config: Config) -> Finding | None:
    """Before the first update the ratio is 1 and the KL 0, and the update moves the weights; else code is wrong."""
    row = rows[-1]
    if row["step"] != FIRST_STEP:
        return None
    limits = {} if keys.RATIO_DIFFERENCE.mean in row else {keys.RATIO_MAX_DEVIATION: (RATIO_NOISE, RATIO_BROKEN)}
    limits |= {keys.KL.of(name): (KL_START_NOISE, KL_START_BROKEN) for name in config.objectives}
    values = _beyond(row, {key: noise for key, (noise, _) in limits.items()})
    gap = numeric.beyond_rounding(row, keys.RATIO_DIFFERENCE)
    frozen = _meant_to_move(row) and number(row, keys.GRAD_UPDATE) == 0
    if not values and not frozen and not gap:
        return None
    faint = _faint(row, config) if frozen else {}
    broken = bool(frozen or gap or _beyond(row, {key: limit for key, (_, limit) in limits.items()}))
    wrong = _wrong_at_start(values, gap, frozen) + [f"{key} is {spread:.3g}" for key, spread in faint.items()]
    open_ = causes.of_start(row, [*values, *gap, *([keys.GRAD_UPDATE] if frozen else [])])
    return Finding(
        "first_update_wrong",
        "error" if broken else "warning",
        FIRST_STEP,
        f"before its first update the policy is the reference, so the ratio is 1 and the KL 0, and an update moves the "
        f"weights; this run breaks that: {'; '.join(wrong)}.",
        {"values": {**values, **{k: v for k, (v, _) in gap.items()}, keys.GRAD_UPDATE: number(row, keys.GRAD_UPDATE)}}
        | faint
        | ({"causes": open_} if broken and not faint else {}),
        _SCALE_ADVICE if faint else causes.start_advice(open_) if broken else _ROUNDING_ADVICE,
        "stop" if broken else "warn",
    )


def ratio_broken(rows: Rows, config: Config) -> Finding | None:
    """After step 1, the ratio of a step's first update is not 1: its old log-probs are not the sampling policy's."""
    row = rows[-1]
    gap = {} if row["step"] == FIRST_STEP else numeric.beyond_rounding(row, keys.RATIO_DIFFERENCE)
    if not gap:
        return None
    largest, open_ = number(row, keys.RATIO_MAX_DEVIATION), causes.of_ratio(rows, config)
    return Finding(
        "ratio_broken",
        "error",
        newest(rows),
        f"before any weight of the step moves the ratio must be 1: {'; '.join(_wrong_at_start({}, gap, False))}. The "
        "ratio clips and weighs by a distance that this step did not make.",
        {"values": {key: found for key, (found, _) in gap.items()}, keys.RATIO_MAX_DEVIATION: largest, "causes": open_},
        causes.ratio_advice(open_),
        "stop",
    )


def gradient_wrong(rows: Rows, config: Config) -> Finding | None:
    """The first update's gradient is not the sum of its micro-batches', or its entropy bonus lowers the entropy."""
    row = rows[-1]
    apart, rise = number(row, keys.GRAD_CHECK), number(row, keys.GRAD_CHECK_ENTROPY)
    lost, turned = apart is not None and apart > GRADIENT_APART, rise is not None and rise < 0
    if row["step"] != FIRST_STEP or not (lost or turned):
        return None
    wrong, advice = [], []
    ratio, size = number(row, keys.GRAD_CHECK_RATIO), None
    if lost:
        size = None if ratio is None else causes.of_gradient(ratio)
        wrong.append(_apart(apart, ratio, size))
        advice.append(_GRADIENT_ADVICE if size is None else causes.gradient_advice(size))
    if turned:
        wrong.append(f"the entropy bonus moves the entropy by {rise:.2g} of what it should (1 is right)")
        advice.append("the loss must subtract entropy_coef x entropy, so that its gradient raises the entropy")
    return Finding(
        "gradient_wrong",
        "error",
        FIRST_STEP,
        f"{' and '.join(wrong)}: the weights are moved by something else than the loss.",
        {"apart": apart, "entropy_rise": rise, "ratio": ratio, "direction": size},
        "; ".join(advice),
        "stop",
    )


def _apart(apart: float | None, ratio: float | None, size: str | None) -> str:
    what = f"the accumulated gradient differs from the sum of its micro-batches by {apart:.2g} of its norm"
    if size is None:
        return what
    words = {"smaller": "too small", "larger": "too large", "turned": "about as large, in another direction"}
    return f"{what}: it is {words[size]} ({ratio:.3g} times that norm)"


_GRADIENT_ADVICE = "every backward pass must add to .grad, and zero_grad and step come once an update"
"""Advice where the log does not have the gradient's size."""
_SCALE_ADVICE = (
    "scale the rewards, so that right and wrong answers differ by about 1: advantages are as small as the rewards' "
    "spread where that is far below 1e-4, and the updates are lost in rounding"
)
_ROUNDING_ADVICE = "nothing if the model runs in half precision: this is its rounding"


def _wrong_at_start(values: Mapping[str, float], gap: Mapping[str, tuple[float, float]], frozen: bool) -> list[str]:
    wrong = [f"{key} is {value:.3g} and should be 0" for key, value in values.items()]
    wrong += [f"{key} is {value:.3g} nats, rounding explains {limit:.2g}" for key, (value, limit) in gap.items()]
    return [*wrong, f"{keys.GRAD_UPDATE} is 0 although there is a gradient"] if frozen else wrong


def _beyond(row: Row, limits: Mapping[str, float]) -> dict[str, float]:
    """The values whose size is above their limit, or no number."""
    values = {key: number(row, key) for key in limits}
    return {key: value for key, value in values.items() if value is not None and not abs(value) <= limits[key]}


def _meant_to_move(row: Row) -> bool:
    return (number(row, keys.GRAD_NORM) or 0) > 0 and number(row, keys.LR) != 0 and row.get(keys.STATUS) != "skipped"
