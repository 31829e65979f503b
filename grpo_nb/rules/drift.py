"""Rules about the distance to the reference, beta, and a policy that does not move."""

import statistics

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.rules.finding import (
    BASELINE,
    ENOUGH,
    FIRST_STEP,
    Finding,
    Rows,
    in_use,
    level,
    newest,
    number,
    rate_of,
    series,
    start,
)
from grpo_nb.rules.history import ABOVE_ROWS, History
from grpo_nb.run.knobs import bounds

KL_ZERO, KL_ZERO_STEPS = 1e-10, 5
"""Nats per token that count as no distance, and how long: half precision hides the first small steps."""
KL_FAINT, KL_NEAR, KL_APART = 1e-7, 0.02, 4.0
"""Nats between which log-ratios are larger than rounding and small enough for estimators to agree; and the factor that
noise of a batch does not reach."""
KL_EXPLODED_FACTOR, KL_EXPLODED = 3.0, 1.0
"""Median KL above 3 x the band's top is more than beta's 15% moves correct soon; 1 nat without a band."""
ABOVE_STEPS, ABOVE_SHARE = ABOVE_ROWS // 2, 0.5
"""Steps that the share of KLs above the band needs, and the share that is no longer an excursion."""
PINNED_STEPS = 5
"""Steps at a bound of beta: one window of the controller."""
STATIC_STEPS, STATIC_KL_SHARE, STATIC_REWARD = 30, 0.1, 0.02
"""After 30 steps KL is below a tenth of its band and no reward moved by 0.02: the steps are too small."""


def kl_zero(rows: Rows, config: Config, objective: str) -> Finding | None:
    """KL reads 0 while the weights move: the measure is blind."""
    tail = [row for row in rows[-KL_ZERO_STEPS:] if row["step"] > FIRST_STEP]
    kl, moved = series(tail, keys.KL.of(objective)), sum(series(rows[-KL_ZERO_STEPS - 1 : -1], keys.GRAD_UPDATE))
    if len(kl) < KL_ZERO_STEPS or max(map(abs, kl)) > KL_ZERO or moved == 0:
        return None
    return Finding(
        "kl_zero",
        "error",
        newest(rows),
        f"KL of {objective} has read 0 for {len(kl)} steps although the weights moved (by {moved:.2g} of their norm): "
        "the reference moves along with the policy, or the updates vanish in half precision.",
        {"objective": objective, "kl": kl, "moved": moved},
        "see that the reference is a frozen copy; if it is, raise algorithm.learning_rate (now "
        f"{rate_of(rows[-1], config):g})",
    )


def kl_estimator(rows: Rows, config: Config, objective: str) -> Finding | None:
    """The logged KL is wrong: near the reference every estimator is half of the squared log-ratio."""
    pairs = [(number(row, keys.KL.of(objective)), number(row, keys.KL_K2.of(objective))) for row in rows[-ENOUGH:]]
    near = [kl / k2 for kl, k2 in pairs if kl is not None and k2 is not None and KL_FAINT < k2 < KL_NEAR]
    if len(near) < ENOUGH or 1 / KL_APART <= statistics.median(near) <= KL_APART:
        return None
    kl, k2 = pairs[-1]
    return Finding(
        "kl_estimator",
        "error",
        newest(rows),
        f"the KL of {objective} reads {kl:.3g} nats per token and half of the mean squared log-ratio is {k2:.3g}: this "
        "close to the reference the two must agree, so this number is not the KL, and beta acts on it.",
        {"objective": objective, "kl": kl, "half_squared": k2, "factor": statistics.median(near)},
        "use an estimator of losses/kl.py as it is; clamp(ref - new, 0, 10) is 0 where training moves a token up",
    )


def kl_unheld(rows: Rows, config: Config, objective: str) -> Finding | None:
    """KL is far above its band while beta is at its upper bound: the controller is saturated."""
    settings = config.objectives[objective]
    held, band = _held_at_ceiling(rows, config, objective), settings.kl_band
    if held is None or band is None or held <= (limit := KL_EXPLODED_FACTOR * band[1]):
        return None
    rate, ceiling = rate_of(rows[-1], config), settings.beta_bounds[1]
    return Finding(
        "kl_unheld",
        "error",
        newest(rows),
        f"KL of {objective} is {held:.3g} nats per token, above the ceiling of {limit:.3g}, and its controller has "
        f"held beta at its upper bound {ceiling:g} for {PINNED_STEPS} steps: the controller is saturated, and nothing "
        "holds the policy.",
        {"objective": objective, "kl": held, "limit": limit, "beta": ceiling, "learning_rate": rate},
        f"resume from a checkpoint before the rise with the learning rate at {rate / 4:.2g} (now {rate:g}); more "
        f"beta needs a new run with objectives.{objective}.beta_bounds up to {10 * ceiling:g}",
    )


def _held_at_ceiling(rows: Rows, config: Config, objective: str) -> float | None:
    """Median KL of the newest steps, where the controller had beta at its upper bound in all of them."""
    settings, tail = config.objectives[objective], rows[-PINNED_STEPS:]
    betas, kls = series(tail, keys.BETA.of(objective)), series(tail, keys.KL.of(objective))
    by_hand = any(row.get(keys.BETA_MODE.of(objective)) == "manual" for row in tail)
    if not settings.controlled or by_hand or min(len(betas), len(kls)) < PINNED_STEPS:
        return None
    return statistics.median(kls) if min(betas) >= settings.beta_bounds[1] * (1 - 1e-6) else None


def kl_exploded(rows: Rows, config: Config, objective: str) -> Finding | None:
    """The policy is far outside its KL band, and beta will not bring it back soon."""
    if kl_unheld(rows, config, objective):
        return None
    band = config.objectives[objective].kl_band
    limit = KL_EXPLODED_FACTOR * band[1] if band else KL_EXPLODED
    values = series(rows[-BASELINE:], keys.KL.of(objective))
    if len(values) < ENOUGH or (kl := statistics.median(values)) <= limit:
        return None
    beta = in_use(rows[-1], keys.BETA.of(objective), config.objectives[objective].beta)
    return Finding(
        "kl_exploded",
        "error" if kl > 3 * limit else "warning",
        newest(rows),
        f"KL of {objective} is {kl:.3g} nats per token ({f'its band ends at {band[1]:g}' if band else 'no band'})"
        ": this far from the reference, text degenerates and rewards are easy to hack.",
        {"objective": objective, "kl": kl, "limit": limit, "beta": beta},
        f"{_more_beta(objective, beta)}halve the learning rate (now {rate_of(rows[-1], config):g}), and read the "
        "newest samples",
    )


def _more_beta(objective: str, beta: float) -> str:
    if beta == 0:
        return f"{keys.BETA.of(objective)} is 0, so nothing holds the policy: set it, 0.04 is usual; "
    highest = bounds("beta")[1]
    more = f"raise the knob {keys.BETA.of(objective)} from {beta:.3g} to {min(4 * beta, highest):.3g}, "
    return more if beta < highest else ""


def beta_pinned(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Beta is at a bound and KL is outside its band: the controller is saturated."""
    settings, tail = config.objectives[objective], rows[-PINNED_STEPS:]
    betas, kls = series(tail, keys.BETA.of(objective)), series(tail, keys.KL.of(objective))
    by_hand = any(row.get(keys.BETA_MODE.of(objective)) == "manual" for row in tail)
    if settings.kl_band is None or by_hand or min(len(betas), len(kls)) < PINNED_STEPS:
        return None
    if kl_unheld(rows, config, objective):
        return None
    kl, (low, high), (floor, ceiling) = statistics.median(kls), settings.kl_band, settings.beta_bounds
    at_ceiling = min(betas) >= ceiling * (1 - 1e-6) and kl > high
    if not at_ceiling and not (max(betas) <= floor * (1 + 1e-6) and kl < low):
        return None
    return Finding(
        "beta_pinned",
        "warning" if at_ceiling else "info",
        newest(rows),
        f"beta of {objective} has stood at its {'upper' if at_ceiling else 'lower'} bound {betas[-1]:g} for "
        f"{PINNED_STEPS} steps with KL {kl:.3g} {'above' if at_ceiling else 'below'} its band ({low:g} to {high:g}): "
        "the controller has nothing left.",
        {"objective": objective, "beta": betas[-1], "kl": kl, "band": [low, high]},
        f"halve the learning rate (now {rate_of(rows[-1], config):g}), or widen objectives.{objective}.kl_band"
        if at_ceiling
        else "nothing if the reward rises: the penalty is as good as off; else raise algorithm.learning_rate",
        "warn" if at_ceiling else "none",
    )


def kl_above_band(rows: History, config: Config, objective: str) -> Finding | None:
    """KL is above its band in half of the steps, lately or in all: the controller does not hold the policy."""
    settings, past = config.objectives[objective], rows.objectives[objective]
    kls, steps = past.kls, past.kl_count
    if settings.kl_band is None or steps < ABOVE_STEPS:
        return None
    high = settings.kl_band[1]
    shares = [past.kl_above / steps, sum(kl > high for kl in kls) / len(kls)]
    if (share := max(shares)) < ABOVE_SHARE:
        return None
    if any(rule(rows, config, objective) for rule in (kl_unheld, kl_exploded, beta_pinned)):
        return None
    beta = in_use(rows[-1], keys.BETA.of(objective), settings.beta)
    by_hand = rows[-1].get(keys.BETA_MODE.of(objective)) == "manual"
    stretch = steps if share == shares[0] else len(kls)
    return Finding(
        "kl_above_band",
        "warning",
        newest(rows),
        f"KL of {objective} was above its band ({settings.kl_band[0]:g} to {high:g}) in {share:.0%} of {stretch} steps "
        f"(now {kls[-1]:.3g}, beta {beta:.3g}, {'set by hand' if by_hand else settings.controller}): the policy drifts "
        "further from the reference than allowed.",
        {"objective": objective, "share": share, "steps": stretch, "kl": kls[-1], "beta": beta, "by_hand": by_hand},
        f"give the knob back to its controller: run.knobs['{keys.BETA.of(objective)}'].set_auto()"
        if by_hand and settings.controlled
        else f"{_more_beta(objective, beta)}halve the learning rate (now {rate_of(rows[-1], config):g}), or widen "
        f"objectives.{objective}.kl_band in a new run",
    )


def policy_static(rows: Rows, config: Config) -> Finding | None:
    """After many steps neither KL nor reward has moved: the updates are too small."""
    if len(rows) < STATIC_STEPS or not all(_static(rows, config, name) for name in config.objectives):
        return None
    rate = rate_of(rows[-1], config)
    return Finding(
        "policy_static",
        "warning",
        newest(rows),
        f"after {len(rows)} steps every KL is below a tenth of its band and no reward has changed by {STATIC_REWARD:g}"
        ": the policy hardly moves.",
        {"steps": len(rows), "learning_rate": rate, "kl": {o: level(rows, keys.KL.of(o)) for o in config.objectives}},
        f"raise the learning rate (now {rate:g}) about five-fold; LoRA usually wants 1e-5 or more"
        if rate
        else f"the learning rate is 0, so nothing is learnt: set it, {config.algorithm.learning_rate:g} was planned",
    )


def _static(rows: Rows, config: Config, objective: str) -> bool:
    low = (config.objectives[objective].kl_band or (0.01, 0.1))[0]
    kl, before, now = (
        level(rows, keys.KL.of(objective)),
        start(rows, keys.REWARD.of(objective)),
        level(rows, keys.REWARD.of(objective)),
    )
    if kl is None or before is None or now is None:
        return False
    return kl < STATIC_KL_SHARE * low and abs(now - before) < STATIC_REWARD
