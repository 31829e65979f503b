"""What can go wrong in a run, written once: the trainer's guards and the doctor's findings are these functions.

A rule reads metric rows and the configuration and returns a Finding or None. `before_update` and `after_step` ask
the rules about the newest row while a run trains; `post_mortem` replays the same rules over a whole log. Rules about
the learning signal and the answers are in symptoms.py, about a judge in judge_rules.py, about settings that distort
numbers in numeric_rules.py; here are those about numbers, weights, KL and beta.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.optim import gradient_refused
from grpo_nb.rules import judge, learning, numeric, regressions
from grpo_nb.rules.finding import (
    BASELINE,
    ENOUGH,
    FIRST_STEP,
    WINDOW,
    Finding,
    Row,
    Rows,
    in_use,
    level,
    newest,
    number,
    series,
    start,
)
from grpo_nb.rules.history import ABOVE_ROWS, History, ObjectiveRule, Rule
from grpo_nb.run.knobs import bounds

SKIPS_TO_STOP = 3
"""Skips in a row after which the run stops: a lone outlier recovers, three mean the weights are damaged."""
FROZEN_STEPS = 3
"""Steps with a gradient but no change of the weights: rounding may swallow one, not three."""
FAINT_SPREAD = 1e-8
"""Standard deviation of rewards in their groups below which advantages, divided by it plus 1e-4, vanish."""
RATIO_NOISE, RATIO_BROKEN = 1e-3, 0.4
"""max |ratio - 1| of the first update in logs that have no robust measure of it: float32, and half precision's tail."""
KL_START_NOISE, KL_START_BROKEN = 1e-3, 0.02
"""KL at step 1, when policy and reference are the same weights: rounding, and a wrong reference."""
KL_ZERO, KL_ZERO_STEPS = 1e-10, 5
"""Nats per token that count as no distance, and how long: half precision hides the first small steps."""
KL_EXPLODED_FACTOR, KL_EXPLODED = 3.0, 1.0
"""Median KL above 3 x the band's top is beyond what beta's 15% moves mend soon; 1 nat where there is no band."""
ABOVE_STEPS, ABOVE_SHARE = ABOVE_ROWS // 2, 0.5
"""Steps that the share of KLs above the band needs, and the share that is no longer an excursion."""
PINNED_STEPS = 5
"""Steps at a bound of beta: one window of the controller."""
STATIC_STEPS, STATIC_KL_SHARE, STATIC_REWARD = 30, 0.1, 0.02
"""After 30 steps KL is below a tenth of its band and no reward moved by 0.02: the steps are too small."""


# Guards of one step


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
        f"lower algorithm.learning_rate (now {_rate(row, config):g}); use bfloat16 or float32 instead of float16; "
        "read this step's samples for a degenerate answer",
        "skip",
    )


_REACH_WEIGHTS = keys.GRAD_NORM, keys.KL.below(), keys.LOSS_TERM.below()


@lru_cache(maxsize=32)
def must_be_finite(found: tuple[str, ...]) -> tuple[str, ...]:
    """Those of some keys whose nan or infinity would reach the weights."""
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
        f"nothing while it stays alone; if it comes back, lower the learning rate ({_rate(rows[-1], config):g} now)",
        "skip",
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
        f"go on from the checkpoint before the first skip with half the learning rate (now {_rate(rows[-1], config):g})"
        if any(number(row, keys.GRAD_NORM) is not None for row in tail)
        else "no group was scored whole, so there was nothing to learn from: read `cause` in samples.jsonl",
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
        {"norm": norm, "update": 0.0, "learning_rate": _rate(rows[-1], config), **faint},
        _SCALE_ADVICE
        if faint
        else f"train LoRA or float32 weights (model.train, model.dtype) or raise algorithm.learning_rate (now "
        f"{_rate(rows[-1], config):g}): a bfloat16 weight ignores changes below 0.4% of itself",
        "stop",
    )


def _faint(row: Row, config: Config) -> dict[str, float]:
    """The spread of each objective's rewards, where all are too small to move a weight; else nothing."""
    found = {key: number(row, key) for key in map(keys.REWARD_STD.of, config.objectives)}
    spreads = {key: spread for key, spread in found.items() if spread}
    return spreads if spreads and max(spreads.values()) < FAINT_SPREAD else {}


def step_one(rows: Rows, config: Config) -> Finding | None:
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
    return Finding(
        "step_one",
        "error" if broken else "warning",
        FIRST_STEP,
        f"what must hold before the first update does not: {'; '.join(wrong)}.",
        {"values": {**values, **{k: v for k, (v, _) in gap.items()}, keys.GRAD_UPDATE: number(row, keys.GRAD_UPDATE)}}
        | faint,
        _SCALE_ADVICE if faint else _START_ADVICE[broken],
        "stop" if broken else "warn",
    )


_SCALE_ADVICE = (
    "scale the rewards, so that right and wrong answers differ by about 1: advantages are as small as the rewards' "
    "spread where that is far below 1e-4, and the updates are lost in rounding"
)
_START_ADVICE = {
    False: "nothing if the model runs in half precision: this is its rounding",
    True: "see that log-probs are taken in eval mode, at the sampling temperature, from the weights that sampled; that "
    "the reference is the policy GRPO started from, and that trainable parameters reach the optimizer",
}


def _wrong_at_start(values: Mapping[str, float], gap: Mapping[str, tuple[float, float]], frozen: bool) -> list[str]:
    wrong = [f"{key} is {value:.3g} and should be 0" for key, value in values.items()]
    wrong += [f"{key} is {value:.3g} nats, rounding explains {limit:.2g}" for key, (value, limit) in gap.items()]
    return [*wrong, f"{keys.GRAD_UPDATE} is 0 although there is a gradient"] if frozen else wrong


def _beyond(row: Row, limits: Mapping[str, float]) -> dict[str, float]:
    """The values whose size is above their limit, or no number."""
    values = {key: number(row, key) for key in limits}
    return {key: value for key, value in values.items() if value is not None and not abs(value) <= limits[key]}


# KL and beta


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
        f"{_rate(rows[-1], config):g})",
    )


def kl_exploded(rows: Rows, config: Config, objective: str) -> Finding | None:
    """The policy is far outside its KL band, and beta will not bring it back soon."""
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
        ": that far from the reference, text falls apart and rewards are easily tricked.",
        {"objective": objective, "kl": kl, "limit": limit, "beta": beta},
        f"{_more_beta(objective, beta)}halve the learning rate (now {_rate(rows[-1], config):g}), and read the newest "
        "samples",
    )


def _more_beta(objective: str, beta: float) -> str:
    if beta == 0:
        return f"{keys.BETA.of(objective)} is 0, so nothing holds the policy: set it, 0.04 is usual; "
    highest = bounds("beta")[1]
    more = f"raise the knob {keys.BETA.of(objective)} from {beta:.3g} to {min(4 * beta, highest):.3g}, "
    return more if beta < highest else ""


def beta_pinned(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Beta is at a bound and KL asks for more: the controller has nothing left."""
    settings, tail = config.objectives[objective], rows[-PINNED_STEPS:]
    betas, kls = series(tail, keys.BETA.of(objective)), series(tail, keys.KL.of(objective))
    by_hand = any(row.get(keys.BETA_MODE.of(objective)) == "manual" for row in tail)
    if settings.kl_band is None or by_hand or min(len(betas), len(kls)) < PINNED_STEPS:
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
        f"halve the learning rate (now {_rate(rows[-1], config):g}), or widen objectives.{objective}.kl_band"
        if at_ceiling
        else "nothing if the reward rises: the penalty is as good as off; else raise algorithm.learning_rate",
        "warn" if at_ceiling else "none",
    )


def kl_above_band(rows: History, config: Config, objective: str) -> Finding | None:
    """KL is above its band in half of the steps, lately or in all: whatever holds beta does not hold the policy."""
    settings, past = config.objectives[objective], rows.objectives[objective]
    kls, steps = past.kls, past.kl_count
    if settings.kl_band is None or steps < ABOVE_STEPS:
        return None
    high = settings.kl_band[1]
    shares = [past.kl_above / steps, sum(kl > high for kl in kls) / len(kls)]
    if (share := max(shares)) < ABOVE_SHARE:
        return None
    if kl_exploded(rows, config, objective) or beta_pinned(rows, config, objective):
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
        else f"{_more_beta(objective, beta)}halve the learning rate (now {_rate(rows[-1], config):g}), or widen "
        f"objectives.{objective}.kl_band in a new run",
    )


def policy_static(rows: Rows, config: Config) -> Finding | None:
    """After many steps neither KL nor reward has moved: the updates are too small."""
    if len(rows) < STATIC_STEPS or not all(_static(rows, config, name) for name in config.objectives):
        return None
    rate = _rate(rows[-1], config)
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


def _meant_to_move(row: Row) -> bool:
    return (number(row, keys.GRAD_NORM) or 0) > 0 and number(row, keys.LR) != 0 and row.get(keys.STATUS) != "skipped"


def _rate(row: Row, config: Config) -> float:
    return in_use(row, keys.LR, config.algorithm.learning_rate)


# Asking the rules

MomentRule = Callable[[Rows, Config], Finding | None]
SKIP_RULES: tuple[MomentRule, ...] = (non_finite, grad_spike)
"""Asked before an update, of a row that has the loss and gradient norms already."""
MOMENT_RULES: tuple[MomentRule, ...] = (repeated_skips, params_frozen, step_one, numeric.sampler_broken)
"""True of one moment, so a post-mortem asks them of every row."""
RULES: tuple[Rule, ...] = (policy_static, *learning.RULES)
OBJECTIVE_RULES: tuple[ObjectiveRule, ...] = (
    kl_zero,
    kl_exploded,
    beta_pinned,
    kl_above_band,
    *regressions.OBJECTIVE_RULES,
    *learning.OBJECTIVE_RULES,
    *judge.OBJECTIVE_RULES,
    *numeric.OBJECTIVE_RULES,
)
"""True of a stretch of time, judged at its end."""

_ORDER = {"error": 0, "warning": 1, "info": 2}


def before_update(rows: Rows, config: Config) -> Finding | None:
    """The reason to leave the newest row's update out, if there is one; `rows[-1]` is the step in progress."""
    return next((finding for rule in SKIP_RULES if (finding := rule(rows, config))), None)


def after_step(rows: Rows, config: Config) -> list[Finding]:
    """Findings that became true with the newest row; the run stops if one's action is `stop`.

    Of a History that was asked about the row before, it costs the same however long the run is.
    """
    if not rows:
        return []
    if not isinstance(rows, History):
        past = History(config, rows[:-1])
        check(past, config)
        past.append(rows[-1])
        rows = past
    asked, known = rows.reported
    known = known if asked == len(rows) - 1 else frozenset()
    return [f for f in check(rows, config) if f.key not in known]


def check(rows: Rows, config: Config) -> list[Finding]:
    """Everything but the skip rules, as of the newest row; worst first."""
    history = rows if isinstance(rows, History) else History(config, rows)
    asked = [rule(history, config) for rule in (*MOMENT_RULES, *RULES) if rows]
    asked += [rule(history, config, name) for rule in OBJECTIVE_RULES for name in config.objectives if rows]
    found = [finding for finding in asked if finding]
    history.reported = len(history), frozenset(finding.key for finding in found)
    return worst_first(found)


def post_mortem(rows: Iterable[Row], config: Config, history: History | None = None) -> list[Finding]:
    """All findings of a log, read once: moments wherever they happened, levels as they stood at the end; worst first.

    Args:
        history: an empty one, which then holds what was read.
    """
    history = History(config) if history is None else history
    moments: dict[str, Moment] = {}
    for row in rows:
        history.append(row)
        for rule in (*SKIP_RULES, *MOMENT_RULES):
            note(moments, rule(history, config))
    return summed_up(history, config, moments)


def summed_up(history: History, config: Config, moments: "Mapping[str, Moment]") -> list[Finding]:
    """The findings of a log whose moments are known; worst first."""
    levels = {f.key: f for f in check(history, config)}
    return worst_first([*(levels | {m.first.key: m.summary() for m in moments.values()}).values()])


def note(moments: "dict[str, Moment]", found: Finding | None) -> None:
    """Add a finding of a step to those of its rule."""
    if found:
        moments.setdefault(found.rule, Moment(found)).steps.append(int(found.step or 0))


@dataclass
class Moment:
    """A finding of single steps: the first of them, and all steps."""

    first: Finding
    steps: list[int] = field(default_factory=list)

    def summary(self) -> Finding:
        """One finding of them all."""
        if len(self.steps) < 2:
            return self.first
        shown = ", ".join(map(str, self.steps[:8])) + (", ..." if len(self.steps) > 8 else "")
        message = f"{self.first.message} {len(self.steps)} times in this run: steps {shown}."
        return replace(self.first, message=message, evidence={**self.first.evidence, "steps": self.steps})


def worst_first(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda f: (_ORDER[f.severity], f.step or 0, f.key))
