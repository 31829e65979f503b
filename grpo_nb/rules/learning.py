"""Rules about what the policy learns and writes: signal, length, entropy, parsing, sampler, conflict, memory.

Asked through rules.py; each judges a stretch of rows at its end.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
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
    label_level,
    level,
    newest,
    series,
    start,
)
from grpo_nb.rules.history import CONFLICT_ROWS, History, ObjectiveRule, Rule
from grpo_nb.rules.regressions import Hedges, alike, hedges, hedging_advice

DEAD_SHARE = 0.7
"""Share of groups without any spread of reward; at K = 8, answers that are 85% right give 27% by chance."""
CHANCE = 1.64
"""Standard errors of a share: one in twenty shares is so far above the true one."""
SOLVED, FAILED = 0.9, 0.1
"""Share of `correct` above (below) which groups are dead because the task is solved (out of reach)."""
TRUNCATED, TRUNCATED_BADLY = 0.15, 0.5
"""A truncated answer is mostly judged wrong whatever it knew: from 15% on the reward measures the cap as well."""
COLLAPSED_LENGTH, LENGTH_FACTOR = 2, 3
"""Median length in tokens, terminator included, and how many times longer answers were at the start."""
ENTROPY_FACTOR, LOW_ENTROPY = 0.1, 0.05
"""Entropy against the run's own start; and, in nats per token, a start so low that groups are near copies."""
SAMPLER_GAP, SAMPLER_GAP_STALE = 0.05, 0.1
"""Mean |difference of log-probs| in nats: above half precision's rounding; and what only other weights explain."""
UNSCORED, UNSCORED_BADLY = 0.05, 0.5
UNPARSED = 0.2
"""Share without a readable answer: from a fifth on the reward teaches format more than the task."""
CONFLICT_COSINE, CONFLICT_SHARE = -0.1, 0.8
"""Objectives pull apart in 80% of the last CONFLICT_ROWS steps; a single negative cosine is the noise of a batch."""
CLIP_HIGHER = 1.4
"""DAPO's upper clip against PPO's: 0.28 / 0.2."""
NEAR_ZERO_LOSS = 0.02
MEMORY_WARM_UP = 20
"""Rows left out at the start: caches fill, and a peak can only rise."""
MEMORY_ROWS, MEMORY_SLOPE_MIB, MEMORY_SLOPE_SHARE = 20, 1.0, 0.002
"""Growth in both halves of the last 20 steps, by 1 MiB and 0.2% a step; warm-up is one jump, a leak goes on."""
REWARD_UP, ACCURACY_UP = 0.1, 0.02
"""Training reward rose by more than the first while held-out accuracy rose by less than the second."""


def _always_hedges(rows: Rows, objective: str) -> Hedges | None:
    hedged = hedges(rows, objective)
    return hedged if hedged is not None and hedged.always else None


def _mostly_dead(rows: Rows, config: Config, objective: str) -> float | None:
    """The share of groups without signal, where it is above DEAD_SHARE by more than the chance of so few groups."""
    key = keys.FRAC_REWARD_ZERO_STD.of(objective)
    share, groups = level(rows, key), len(series(rows[-WINDOW:], key)) * config.prompts_per_objective
    if share is None or share - CHANCE * math.sqrt(share * (1 - share) / groups) < DEAD_SHARE:
        return None
    return share


def dead_groups(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Most groups have no spread of reward, so they give no gradient; split by why."""
    dead, right = _mostly_dead(rows, config, objective), label_level(rows, objective, "correct")
    if dead is None:
        return None
    solved, failed = right is not None and right >= SOLVED, right is not None and right <= FAILED
    always = _always_hedges(rows, objective)
    if solved:
        why = f"{right:.0%} of answers are correct, so there is little left to learn"
        advice = "nothing; add harder prompts if the run should go on"
    elif always:
        why = f"nearly all that are not correct {always.words} where the text answers, and earn the same"
        advice = hedging_advice(config, objective)
    elif failed:
        why = f"{f'only {right:.0%}' if right else 'none'} of their answers are correct: none beats its neighbours"
        advice = "look at samples for answers the scorer misreads; run more SFT, or begin with easier prompts"
    else:
        temperature = in_use(rows[-1], keys.TEMPERATURE, config.sampling.temperature)
        why = "the answers of a group all earn the same, right or wrong"
        advice = (
            f"raise sampling.temperature (now {temperature:g}) or batch.group_size (now {config.batch.group_size}), or "
            "make the reward finer"
        )
    return Finding(
        "dead_groups",
        "info" if solved else "error" if dead >= 0.999 else "warning",
        newest(rows),
        f"{dead:.0%} of the {objective} groups of the last steps give no learning signal: {why}.",
        {"objective": objective, "dead_share": dead, "correct_share": right},
        advice,
        "none" if solved else "warn",
    )


def truncation(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Answers hit the cap before they end."""
    share = level(rows, keys.TRUNCATION.of(objective))
    if share is None or share <= TRUNCATED:
        return None
    cap = config.sampling.max_completion_length
    never_ends = share > 0.95
    return Finding(
        "truncation",
        "error" if share > TRUNCATED_BADLY else "warning",
        newest(rows),
        f"{share:.0%} of {objective} answers hit the cap of {cap} tokens, so their reward is that of an unfinished text"
        + (": hardly any ever ends." if never_ends else "."),
        {"objective": objective, "share": share, "cap": cap, "p95": level(rows, keys.LENGTH_P95.of(objective))},
        f"raise sampling.max_completion_length from {cap} to {2 * cap}"
        + ("; if nothing ends then either, SFT must teach the terminator (check the SFT data)" if never_ends else "")
        + ("" if config.algorithm.mask_truncated else "; algorithm.mask_truncated=true leaves them out of the loss"),
    )


def length_collapse(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Answers shrank to almost nothing: only the terminator, or one token before it."""
    lengths, before = series(rows[-ENOUGH:], keys.LENGTH_P50.of(objective)), start(rows, keys.LENGTH_P50.of(objective))
    if len(lengths) < ENOUGH or before is None:
        return None
    empty = max(lengths) <= 1
    if not empty and not (max(lengths) <= COLLAPSED_LENGTH and before >= LENGTH_FACTOR * max(lengths)):
        return None
    return Finding(
        "length_collapse",
        "error" if empty else "warning",
        newest(rows),
        f"half of the {objective} answers have {lengths[-1]:g} token{'' if lengths[-1] == 1 else 's'} or fewer, the "
        f"terminator included (at the start: {before:g}).",
        {"objective": objective, "p50": lengths, "p50_start": before},
        f"see what an empty answer earns: it must earn least; raise beta/{objective} and go back to a checkpoint from "
        "before the fall",
    )


def entropy_collapse(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Entropy fell to a tenth of this run's own start before the task was solved."""
    now, before, right = level(rows, keys.ENTROPY.of(objective)), start(rows, keys.ENTROPY.of(objective)), None
    if now is None or before is None or now >= ENTROPY_FACTOR * before:
        return None
    right = label_level(rows, objective, "correct")
    if right is not None and right >= SOLVED:
        return None
    return Finding(
        "entropy_collapse",
        "warning",
        newest(rows),
        f"entropy of {objective} fell from {before:.3g} to {now:.3g} nats per token"
        + (f" with {right:.0%} of answers correct" if right is not None else "")
        + ": the policy has made up its mind, and groups of equal answers teach nothing.",
        {"objective": objective, "entropy": now, "entropy_start": before, "correct_share": right},
        f"{_holds_entropy(config)} or beta/{objective}, or lower the learning rate, from a checkpoint before the fall; "
        "a higher temperature alone only hides it",
    )


def _holds_entropy(config: Config) -> str:
    """What keeps answers varied in this run: a higher upper clip where clipping acts (DAPO), else an entropy bonus."""
    row = config.algorithm.row
    if config.batch.on_policy or row.surrogate_row.high is None:
        return f"raise algorithm.entropy_coef (now {config.algorithm.entropy_coef:g}, 0.001 is a start)"
    return f"raise algorithm.clip_high from {row.clip[1]:g} to {CLIP_HIGHER * row.clip[1]:.2g}"


def low_entropy_start(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Entropy is near zero before the first update: that is SFT's doing or the sampler's, not GRPO's."""
    before, dead = start(rows, keys.ENTROPY.of(objective)), _mostly_dead(rows, config, objective)
    if before is None or before >= LOW_ENTROPY or dead is None:
        return None
    if (label_level(rows, objective, "correct") or 0) >= SOLVED:
        return None
    return Finding(
        "low_entropy_start",
        "warning",
        newest(rows),
        f"{objective} began with an entropy of {before:.3g} nats per token: the model was this certain before "
        "the first update, and a group holds near copies of one answer.",
        {"objective": objective, "entropy_start": before, "dead_share": dead},
        f"fewer sft.steps (now {config.sft.steps}) or more varied SFT answers; then a temperature above "
        f"{config.sampling.temperature:g}",
    )


def unscored(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Answers without a verdict: their groups drop out of the gradient."""
    scored = level(rows, keys.SCORED.of(objective))
    if scored is None or 1 - scored <= UNSCORED:
        return None
    return Finding(
        "unscored",
        "error" if 1 - scored > UNSCORED_BADLY else "warning",
        newest(rows),
        f"{1 - scored:.0%} of {objective} answers got no score; a group with one such answer is left out whole.",
        {"objective": objective, "scored": scored, "groups": level(rows, keys.UNSCORED_GROUPS.of(objective))},
        "read `cause` in samples.jsonl: it says which reward function or judge gave none, and why",
    )


def unparsed(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Answers in which no choice can be read."""
    share = label_level(rows, objective, "unparsed")
    if share is None or share <= UNPARSED:
        return None
    return Finding(
        "unparsed",
        "warning",
        newest(rows),
        f"{share:.0%} of {objective} answers cannot be read as an answer, so the reward mostly teaches the format.",
        {"objective": objective, "share": share, "truncated": level(rows, keys.TRUNCATION.of(objective))},
        f"more sft.steps (now {config.sft.steps}) teach the format sooner; look at samples, and at truncation first",
    )


def sampler_mismatch(rows: Rows, config: Config) -> Finding | None:
    """Tokens are drawn from another distribution than the one they are scored under."""
    values = series(rows[-WINDOW:], keys.SAMPLER_DIFFERENCE.mean)
    if len(values) < ENOUGH or (gap := statistics.median(values)) <= SAMPLER_GAP:
        return None
    shaped, kind = _shaping(config), config.algorithm.importance_correction
    why, advice = (
        (f"{', '.join(shaped)} shape{'s' if len(shaped) == 1 else ''} the sampler only", "set them back to neutral")
        if shaped
        else ("nothing in `sampling` explains it", "see that the engine has the newest weights and the same precision")
    )
    stale = not shaped and gap > SAMPLER_GAP_STALE
    bias = (
        "the gradient is biased by that much"
        if kind == "none"
        else f"algorithm.importance_correction='{kind}' weighs against it (mean weight "
        f"{_known(rows, keys.IMPORTANCE_WEIGHT_MEAN)}, {_known(rows, keys.IMPORTANCE_WEIGHT_ZERO)} of the tokens at 0)"
    )
    return Finding(
        "sampler_mismatch",
        ("error" if stale else "warning") if kind == "none" else ("warning" if stale else "info"),
        newest(rows),
        f"sampled tokens differ by {gap:.3g} nats from the scored policy: {why}; {bias}.",
        {"gap": gap, "settings": shaped, "correction": kind},
        advice
        + (
            "; where the engine must differ, algorithm.importance_correction='tis' weighs against it"
            if kind == "none"
            else ""
        ),
        "warn" if kind == "none" or stale else "none",
    )


def _known(rows: Rows, key: str) -> str:
    value = level(rows, key)
    return "unknown" if value is None else f"{value:.3g}"


def gradient_conflict(rows: History, config: Config) -> Finding | None:
    """The objectives' gradients point against each other most of the time."""
    cosines = rows.cosines  # a report every N steps has one every N rows
    against = [c for c in cosines if c < CONFLICT_COSINE]
    if len(cosines) < CONFLICT_ROWS or len(against) < CONFLICT_SHARE * len(cosines):
        return None
    surgery = config.algorithm.combine != "sum"
    return Finding(
        "gradient_conflict",
        "info" if surgery else "warning",
        newest(rows),
        f"in {len(against)} of the last {len(cosines)} measured steps the objectives pulled apart (median cosine "
        f"{statistics.median(cosines):.2f}): what one gains the other loses.",
        {"cosine": statistics.median(cosines), "share": len(against) / len(cosines)},
        f"{config.algorithm.combine} already acts against it; weigh the objectives by what matters"
        if surgery
        else "try algorithm.combine='pcgrad', or weigh the objectives by what matters",
        "none" if surgery else "warn",
    )


def loss_near_zero(rows: Rows, config: Config) -> Finding | None:
    """The loss reads about 0, as it must on-policy: said before anybody asks."""
    losses, norms = series(rows[-WINDOW:], keys.LOSS), series(rows[-WINDOW:], keys.GRAD_NORM)
    if not config.batch.on_policy or len(losses) < ENOUGH or max(map(abs, losses)) > NEAR_ZERO_LOSS or not any(norms):
        return None
    return Finding(
        "loss_near_zero",
        "info",
        newest(rows),
        f"the loss reads {losses[-1]:.2g}: with one update per rollout the ratio is 1 and a group's advantages sum "
        f"to 0, so little but beta x KL is left of its value. Its gradient is not 0 (norm {norms[-1]:.3g}).",
        {"loss": losses[-1], "norm": norms[-1]},
        "watch the reward and the held-out accuracy instead",
        "none",
    )


def memory_trend(rows: Rows, config: Config) -> Finding | None:
    """Memory grows step by step, and keeps growing: a leak, or answers that get longer."""
    used = series(rows[max(MEMORY_WARM_UP, len(rows) - MEMORY_ROWS) :], keys.MEMORY_PEAK)
    if len(used) < MEMORY_ROWS:
        return None
    half = MEMORY_ROWS // 2
    slopes = [statistics.linear_regression(range(half), part).slope for part in (used[:half], used[half:])]
    limit = max(MEMORY_SLOPE_MIB, MEMORY_SLOPE_SHARE * used[0])
    if min(slopes) <= limit:
        return None
    return Finding(
        "memory_trend",
        "warning",
        newest(rows),
        f"peak memory grows by {statistics.fmean(slopes):.3g} MiB a step (now {used[-1]:.0f} MiB) and goes on growing.",
        {"slopes": slopes, "now_mib": used[-1]},
        "look whether lengths grow too (then lower sampling.max_completion_length); else something keeps tensors: own "
        "reward functions are the first suspect",
    )


def reward_without_accuracy(
    rows: Rows, config: Config, objective: str, evaluations: Sequence[Mapping[str, Any]]
) -> Finding | None:
    """Training reward rose, held-out accuracy did not: the reward is being tricked, or the prompts learnt by heart."""
    before, now = start(rows, keys.REWARD.of(objective)), level(rows, keys.REWARD.of(objective))
    pair = _start_and_newest(objective, evaluations)
    if before is None or now is None or pair is None:
        return None
    was, is_now = (e["metrics"]["accuracy"]["value"] for e in pair)
    if was is None or is_now is None or now - before <= REWARD_UP or is_now - was >= ACCURACY_UP:
        return None
    return Finding(
        "reward_without_accuracy",
        "warning",
        newest(rows),
        f"the training reward of {objective} rose from {before:.2f} to {now:.2f}, but held-out accuracy went from "
        f"{was:.2f} ({pair[0]['stage']}) to {is_now:.2f}: the reward is tricked, or prompts are known by heart.",
        {"objective": objective, "reward": [before, now], "accuracy": [was, is_now]},
        "read the best-paid samples of the last steps; make the reward ask for what the evaluation asks",
    )


def _start_and_newest(
    objective: str, evaluations: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The newest evaluation of a trained stage, and the one to compare it with from before training."""
    of_stages = [e for e in evaluations if e.get("objective") == objective and e.get("mode") not in ("quick", "probe")]
    scored = [e for e in of_stages if "accuracy" in (e.get("metrics") or {})]
    if not scored or scored[-1]["stage"] in ("base", "sft"):
        return None
    earlier = [e for e in scored if e["stage"] in ("base", "sft") and alike(e, scored[-1])]
    return (earlier[-1], scored[-1]) if earlier else None


def forgetting(evaluations: Sequence[Mapping[str, Any]]) -> Finding | None:
    """The newest probe of general ability is below the base's, more than chance: the paired interval is below 0."""
    rows = [e for e in reversed(evaluations) if e.get("mode") == "probe"]
    before = next((dict(row) for row in rows if row["stage"] == "base"), None)
    after = next((dict(row) for row in rows if row["stage"] != "base"), None)
    found = change(before, after, "accuracy") if before and after else None
    if before is None or after is None or found is None or not found[2] < 0:
        return None
    was, is_now = (row["metrics"]["accuracy"]["value"] for row in (before, after))
    fallen = _fallen_kinds(before, after)
    return Finding(
        "forgetting",
        "warning",
        after["step"],
        f"the model forgets: {after['stage']} answers {is_now:.0%} of the {after['n']} general probe questions, the "
        f"base {was:.0%} (change {found[0]:+.2f}, 95% {found[1]:+.2f} to {found[2]:+.2f})"
        + (f"; most in {', '.join(fallen)}." if fallen else "."),
        {"stage": after["stage"], "accuracy": [was, is_now], "change": list(found), "kinds": fallen},
        "probe stage 'sft' to see which half did it; then fewer sft.steps, or a lower learning rate and a higher beta, "
        "or take an earlier checkpoint",
    )


def _fallen_kinds(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Kinds of probe questions whose accuracy fell by more than chance."""
    changes = {name.removeprefix("accuracy_"): change(before, after, name) for name in after["metrics"]}
    return [kind for kind, found in changes.items() if kind != "accuracy" and found and found[2] < 0]


def _shaping(config: Config) -> list[str]:
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    values = {name: getattr(config.sampling, name) for name in neutral}
    return [f"sampling.{name}={value:g}" for name, value in values.items() if value != neutral[name]]


RULES: tuple[Rule, ...] = (sampler_mismatch, gradient_conflict, loss_near_zero, memory_trend)
OBJECTIVE_RULES: tuple[ObjectiveRule, ...] = (
    dead_groups,
    truncation,
    length_collapse,
    entropy_collapse,
    low_entropy_start,
    unscored,
    unparsed,
)
