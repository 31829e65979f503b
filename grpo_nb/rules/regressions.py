"""Rules about a policy that gets worse: reward or accuracy falls, or it hedges where the text answers.

Called through `rules`, as those of signal.py; `accuracy_fell` and `reward_without_accuracy` read evaluations and are
called by `doctor.diagnose`.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from grpo_nb.config import Config
from grpo_nb.evaluation.compare import change
from grpo_nb.metrics import keys
from grpo_nb.rules.finding import (
    ENOUGH,
    WINDOW,
    Finding,
    Rows,
    in_use,
    keys_below,
    label_level,
    label_start,
    level,
    newest,
    series,
    start,
)
from grpo_nb.rules.history import CURVES, KEPT, SETTINGS, Around, Fall, History, ObjectiveRule, Past
from grpo_nb.rules.warm_start import more_sft

HEDGES = ("unknown", "abstained")
"""Labels of answers that name nothing where the text answers; where it does not, naming nothing is `correct`."""
HEDGED, HEDGED_OVERALL = 0.6, 0.35
"""Share of hedges that counts as nearly always: among items that the text answers, and, in logs without
that share, among all items (half of BBQ's are answered by their text)."""
HEDGES_REST = 0.8
"""Hedges are at least this part of the answers that are not right: the policy hardly tries another way."""
HEDGE_RISE, HEDGE_RISE_OVERALL = 0.15, 0.1
"""Rise of the same shares since the start."""

FALLEN, FALLEN_BADLY = 0.25, 0.5
"""Fall from the best running median, as a part of it (of the spread inside groups, where that is more)."""
ACCURACY_FALLEN = 0.15
TURNED, TURNED_KNOB = 1.5, 1.05
"""Factor by which another curve, or a setting between two steps, changed."""

REWARD_UP, ACCURACY_UP, ACCURACY_LEARNT = 0.1, 0.02, 0.05
"""Training reward rose by more than the first (of twice its spread in a group, where that is below 1) while held-out
accuracy rose by less than the second; training answers are learnt where they rose by the third."""
LEFT_TO_LEARN = 0.05
"""An accuracy nearer to 1 than this has no room to follow the reward."""
HELD_OUT_FALL, HELD_OUT_FALL_ALONE = 0.03, 0.1
"""Fall of a held-out accuracy that matters where its paired interval leaves out 0; and where there is no interval."""


def collapse(rows: History, config: Config, objective: str) -> Finding | None:
    """Reward or share of right answers is far below its best and stays there."""
    past = rows.objectives[objective]
    falls = {"reward": _reward_fall(past), "correct": _fall_of_correct(past)}
    fallen = {name: fall for name, fall in falls.items() if fall is not None}
    if not fallen:
        return None
    first = min((fall.first for fall in fallen.values()), key=lambda point: point.step)
    since, turned = first.step, _turned(past.around(first), objective)
    words = {"reward": keys.REWARD.of(objective), "correct": "the share of right answers"}
    what = " and ".join(f"{words[name]} fell from {fall.best:.2f} to {fall.now:.2f}" for name, fall in fallen.items())
    others = "; ".join(f"{key} from {was:.3g} to {is_now:.3g}" for key, (was, is_now) in turned.items())
    beta = in_use(rows[-1], keys.BETA.of(objective), config.objectives[objective].beta)
    worst = max((fall.best - fall.now) / max(abs(fall.best), 1e-9) for fall in fallen.values())
    return Finding(
        "collapse",
        "error" if worst >= FALLEN_BADLY else "warning",
        newest(rows),
        f"{objective}: {what} since step {since} and did not recover: the policy lost what it had learned. "
        + (f"What changed then: {others}." if others else "No other curve or setting changed with it."),
        {
            "objective": objective,
            "since": since,
            "fell": {name: [fall.best, fall.now] for name, fall in fallen.items()},
            "turned": {key: list(pair) for key, pair in turned.items()},
        },
        f"take the weights of a checkpoint from before step {since}; continue in a new run with half the learning rate "
        f"({in_use(rows[-1], keys.LR, config.algorithm.learning_rate):g} now) or a higher beta/{objective} "
        f"({beta:.3g} now), and read the samples around step {since}",
    )


def hedging(rows: Rows, config: Config, objective: str) -> Finding | None:
    """The policy says "unknown" or abstains on items that the text answers: more and more, or nearly always."""
    found = hedges(rows, objective)
    if found is None or not (found.always or found.rising):
        return None
    what = f"to items that the text answers {found.words}" if found.told else f"{found.words} where the text answers"
    began = "" if found.before is None else f" (at the start {found.before:.0%})"
    return Finding(
        "hedging",
        "error" if found.always else "warning",
        newest(rows),
        f"{found.now:.0%} of {objective} answers {what}{began}"
        + ("; hardly any other answer is left" if found.always else "; right answers did not rise by as much")
        + ". A policy that cannot distinguish the two kinds of items earns most that way.",
        {
            "objective": objective,
            "share": found.now,
            "share_start": found.before,
            "always": found.always,
            "of": "told" if found.told else "all",
            "correct_share": label_level(rows, objective, "correct"),
        },
        hedging_advice(rows, config, objective),
    )


def hedging_advice(rows: Rows, config: Config, objective: str) -> str:
    """Advice against hedging; a temperature does not bring back answers that the policy has dropped."""
    return (
        f"{more_sft(rows, config, 'on items that the text answers, until it can answer them')}; draw as "
        f"many of them as of the others; pay hedges there less with a reward function of your own; begin again before "
        f"the rise, with a higher beta/{objective}"
    )


@dataclass(frozen=True)
class Hedges:
    """Share of hedges now and at the start: of items that the text answers (`told`), or of all items."""

    now: float
    before: float | None
    told: bool
    rising: bool
    always: bool
    words: str


def hedges(rows: Rows, objective: str) -> Hedges | None:
    """Share of an objective's answers that hedge; None where no labels were counted."""
    told = any(keys_below(row, keys.LABEL_ANSWERABLE.below(objective)) for row in rows[-WINDOW:])
    group = keys.LABEL_ANSWERABLE if told else keys.LABEL
    shares = {label: label_level(rows, objective, label, group) for label in HEDGES}
    right = label_level(rows, objective, "correct", group)
    if right is None:
        return None
    now = _total(shares.values())
    starts = [label_start(rows, objective, label, group) for label in HEDGES]
    before = None if starts[0] is None else _total(starts)
    right_before = label_start(rows, objective, "correct", group)
    rise = 0.0 if before is None else now - before
    gained = 0.0 if right_before is None else right - right_before
    most, risen = (HEDGED, HEDGE_RISE) if told else (HEDGED_OVERALL, HEDGE_RISE_OVERALL)
    return Hedges(
        now,
        before,
        told,
        rising=len(rows) > WINDOW and rise >= risen and gained < rise,
        always=now >= most and now >= HEDGES_REST * (1 - right) and rise > -risen / 2,
        words='say "unknown"' if _total([shares["unknown"]]) >= _total([shares["abstained"]]) else "abstain",
    )


def _total(shares: Iterable[float | None]) -> float:
    return sum(share or 0.0 for share in shares)


def accuracy_fell(
    rows: Rows, config: Config, objective: str, evaluations: Sequence[Mapping[str, Any]]
) -> Finding | None:
    """A held-out accuracy, of all items or of one condition, is lower than where GRPO started."""
    pair = _first_and_newest(objective, evaluations)
    falls = _held_out_falls(*pair) if pair else {}
    if pair is None or not falls:
        return None
    before, after = pair
    metric = min(falls, key=lambda name: falls[name][0])
    value, low, high = falls[metric]
    was, is_now = (row["metrics"][metric]["value"] for row in (before, after))
    reward = start(rows, keys.REWARD.of(objective)), level(rows, keys.REWARD.of(objective))
    rose = None not in reward and (reward[1] or 0) > (reward[0] or 0)
    hedged = _risen(before, after, _HEDGE_METRICS)
    words = f" while the training reward rose from {reward[0]:.2f} to {reward[1]:.2f}" if rose else ""
    words += _hedging(hedged)
    limits = "no interval" if math.isnan(low) else f"95% {low:+.2f} to {high:+.2f}"
    return Finding(
        "accuracy_fell",
        "warning",
        int(after["step"]) if after.get("step") is not None else None,
        f"held-out {metric} of {objective} fell from {was:.2f} ({before['stage']}) to {is_now:.2f} ({after['stage']}; "
        f"change {value:+.2f}, {limits}){words}: the reward is earned at the cost of these items.",
        {
            "objective": objective,
            "metric": metric,
            "accuracy": [was, is_now],
            "change": [value, low, high],
            "fell": sorted(falls),
            "hedges": {name: list(values) for name, values in hedged.items()},
            "reward": list(reward),
        },
        hedging_advice(rows, config, objective)
        if hedged
        else "read samples of these items; take an earlier checkpoint (`evaluate(run, stage=...)` measures it), then a "
        f"lower learning rate or a higher beta/{objective}",
    )


_HEDGE_METRICS = ("unknown_rate_disambiguated", "abstention_rate_answerable", "abstention_rate", "unknown_rate")


def _risen(before: Mapping[str, Any], after: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    values = {name: _values(before, after, name) for name in names}
    return {name: both for name, both in values.items() if both is not None and both[1] > both[0]}


def _hedging(risen: Mapping[str, tuple[float, float]]) -> str:
    return f"; {', '.join(f'{name} went from {a:.2f} to {b:.2f}' for name, (a, b) in risen.items())}" if risen else ""


def _held_out_falls(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Change and paired interval (NaN: none) of each accuracy that fell by enough."""
    found = {}
    for metric in (name for name in after["metrics"] if name.startswith("accuracy")):
        if (values := _values(before, after, metric)) is None:
            continue
        fall, limits = values[0] - values[1], (math.nan, math.nan)
        if all(metric in row.get("resamples", ()) for row in (before, after)):
            changed = change(dict(before), dict(after), metric)
            limits = limits if changed is None else changed[1:]
        if fall >= (HELD_OUT_FALL_ALONE if math.isnan(limits[1]) else HELD_OUT_FALL) and not limits[1] >= 0:
            found[metric] = (-fall, *limits)
    return found


def _values(before: Mapping[str, Any], after: Mapping[str, Any], metric: str) -> tuple[float, float] | None:
    was, is_now = ((row["metrics"].get(metric) or {}).get("value") for row in (before, after))
    if was is None or is_now is None or not math.isfinite(was) or not math.isfinite(is_now):
        return None
    return float(was), float(is_now)


def reward_without_accuracy(
    rows: Rows, config: Config, objective: str, evaluations: Sequence[Mapping[str, Any]]
) -> Finding | None:
    """Training reward rose, held-out accuracy did not: the reward is tricked, or prompts are memorised."""
    pair = _first_and_newest(objective, evaluations)
    moved = _values(*pair, "accuracy") if pair else None
    if pair is None or moved is None:
        return None
    was, is_now = moved
    rise, room = _reward_rise(rows, objective, pair[1]), 1 - was
    if rise is None or is_now - was >= ACCURACY_UP or room < LEFT_TO_LEARN or not _surely_no_rise(*pair, is_now - was):
        return None
    before, now = rise
    learnt = _correct_rise(rows, objective, pair[1])
    memorised = learnt is not None and learnt >= ACCURACY_LEARNT
    return Finding(
        "reward_without_accuracy",
        "warning",
        newest(rows),
        f"the training reward of {objective} rose from {before:.2f} to {now:.2f}, but held-out accuracy went from "
        f"{was:.2f} ({pair[0]['stage']}) to {is_now:.2f} ({pair[1]['stage']}): "
        + (
            f"{learnt:.0%} more of the training answers are right, so prompts are memorised."
            if memorised
            else "the reward pays for something else than right answers."
        ),
        {"objective": objective, "reward": [before, now], "accuracy": [was, is_now], "correct_rise": learnt}
        | {"cause": "memorised" if memorised else "tricked"},
        "train on more prompts, or fewer steps; a higher beta keeps the policy nearer to what generalises"
        if memorised
        else "read the best-paid samples of the last steps; make the reward ask for what the evaluation asks",
    )


def _reward_rise(rows: Rows, objective: str, after: Mapping[str, Any]) -> tuple[float, float] | None:
    """Reward at the start and about the step of an evaluation, where it rose by enough of the spread in a group."""
    key, near = keys.REWARD.of(objective), _near(rows, after)
    before, now = start(rows, key), level(near, key)
    spread = start(rows, keys.REWARD_STD.of(objective))
    if before is None or now is None:
        return None
    return (before, now) if now - before > REWARD_UP * (1.0 if spread is None else min(2 * spread, 1.0)) else None


def _correct_rise(rows: Rows, objective: str, after: Mapping[str, Any]) -> float | None:
    """Rise of the share of right training answers up to an evaluation; None where it was not counted."""
    before, now = label_start(rows, objective, "correct"), label_level(_near(rows, after), objective, "correct")
    return None if before is None or now is None else now - before


def _near(rows: Rows, after: Mapping[str, Any]) -> Rows:
    """The rows up to the step of an evaluation, where they are still kept; else all of them."""
    step = after.get("step")
    if not isinstance(step, int) or not len(rows) or newest(rows) <= step:
        return rows
    kept = rows[-min(len(rows), KEPT) :]
    upto = [row for row in kept if row["step"] <= step]
    return upto if len(upto) >= ENOUGH else rows


def _surely_no_rise(before: Mapping[str, Any], after: Mapping[str, Any], rise: float) -> bool:
    """Whether the paired interval, if it exists, excludes a rise that would match the reward's."""
    if not all("accuracy" in row.get("resamples", ()) for row in (before, after)):
        return True
    changed = change(dict(before), dict(after), "accuracy")
    return changed is None or math.isnan(changed[2]) or changed[2] < max(2 * ACCURACY_LEARNT, rise + ACCURACY_UP)


def _first_and_newest(
    objective: str, evaluations: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Evaluations of GRPO's start and of the newest stage, from one pool: of final evaluations, else of quick ones."""
    own = [e for e in evaluations if e.get("objective") == objective and e.get("metrics")]
    for modes in (("greedy", "sample"), ("quick",)):
        rows = [e for e in own if e.get("mode") in modes and e.get("split", "test") == "test"]
        for after in reversed(rows):
            if after.get("stage") not in _STARTS and (before := _start_of(rows, after)):
                return before, after
    return None


def _start_of(rows: Sequence[Mapping[str, Any]], after: Mapping[str, Any]) -> Mapping[str, Any] | None:
    comparable: list[Mapping[str, Any]] = [row for row in reversed(rows) if alike(row, after)]
    for stage in _STARTS:
        for row in comparable:
            if row.get("stage") == stage:
                return row
    return None


def alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two evaluations used the same questions of the same split in the same mode."""
    questions = "asked" if "asked" in one and "asked" in other else "pool"
    return all(one.get(key) == other.get(key) for key in ("split", "mode", questions))


_STARTS = ("sft", "step 0", "base")
"""Stages without a step of GRPO, the nearest to its start first."""


def _reward_fall(past: Past) -> Fall | None:
    fall = past.reward.fall()
    if fall is None:
        return None
    return fall if fall.best - fall.now >= FALLEN * max(abs(fall.best), past.spread.median()) else None


def _fall_of_correct(past: Past) -> Fall | None:
    fall = past.correct.fall()
    return fall if fall and fall.best - fall.now >= max(ACCURACY_FALLEN, FALLEN * fall.best) else None


def _turned(around: Around, objective: str) -> dict[str, tuple[float, float]]:
    """Other changes at a fall: curves by their medians before and after, settings by their last change."""
    before, after = around.before, around.after
    found = {}
    for key in (*SETTINGS, keys.BETA.of(objective)):
        near = series([*before, *after[:1]], key)
        jumps = [(a, b) for a, b in pairwise(near) if _apart(a, b, TURNED_KNOB)]
        if jumps and (key in SETTINGS or _apart(*jumps[-1], TURNED)):
            found[key] = jumps[-1]
    for curve in CURVES:
        key = curve(objective)
        was, is_now = series(before, key), series(after, key)
        if was and is_now and _apart(a := statistics.median(was), b := statistics.median(is_now), TURNED):
            found[key] = (a, b)
    return found


def _apart(a: float, b: float, factor: float) -> bool:
    low, high = sorted((abs(a), abs(b)))
    return high > 1e-3 and high >= factor * low if a * b >= 0 else True


OBJECTIVE_RULES: tuple[ObjectiveRule, ...] = (collapse, hedging)
