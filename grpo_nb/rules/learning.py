"""Rules about the policy's learning and its completions: length, entropy, parsing, conflict, forgetting.

Called through `rules`; each judges a stretch of rows at its end.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_nb.config import Config
from grpo_nb.evaluation.compare import change
from grpo_nb.metrics import keys
from grpo_nb.rules import causes
from grpo_nb.rules.finding import (
    ENOUGH,
    WINDOW,
    Finding,
    Rows,
    label_level,
    level,
    newest,
    series,
    start,
)
from grpo_nb.rules.history import CONFLICT_ROWS, History, ObjectiveRule, Rule
from grpo_nb.rules.signal import SOLVED, mostly_dead
from grpo_nb.rules.warm_start import more_sft, started_without

TRUNCATED, TRUNCATED_BADLY = 0.15, 0.5
"""A truncated answer is mostly judged wrong whatever it knew: from 15% on the reward measures the cap as well."""
IGNORED_STOP = 0.5
"""Share of truncated completions with the same special token from which that token counts as a stop token."""
COLLAPSED_LENGTH, LENGTH_FACTOR = 2, 3
"""Median length in tokens, stop token included, and how many times longer answers were at the start."""
ENTROPY_FACTOR, LOW_ENTROPY = 0.1, 0.05
"""Entropy against the run's own start; and, in nats per token, a start so low that groups are near copies."""
UNSCORED, UNSCORED_BADLY = 0.05, 0.5
UNPARSED = 0.2
"""Share without a readable answer: from a fifth on the reward teaches format more than the task."""
CONFLICT_COSINE, CONFLICT_SHARE = -0.1, 0.8
"""Objectives pull apart in 80% of the last CONFLICT_ROWS steps; a single negative cosine is the noise of a batch."""
CLIP_HIGHER = 1.4
"""DAPO's upper clip against PPO's: 0.28 / 0.2."""
NEAR_ZERO_LOSS = 0.02
LONGEST_CAUSE = 200
"""Characters of a cause that a finding quotes."""


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
        (f"{more_sft(rows, config, 'to teach the stop token')}; then " if started_without(rows) else "")
        + f"raise sampling.max_completion_length from {cap} to {2 * cap}"
        + (
            "; if completions still do not end, SFT must teach the stop token (check the SFT data)"
            if never_ends
            else ""
        )
        + ("" if config.algorithm.mask_truncated else "; algorithm.mask_truncated=true leaves them out of the loss"),
    )


def with_ignored_stop(finding: Finding, samples: Iterable[Mapping[str, Any]]) -> Finding:
    """A finding of `truncation`, where samples of the run show that completions pass over a stop token."""
    found, cut = causes.ignored_stops(samples, str(finding.evidence["objective"]))
    if not found or max(found.values()) <= IGNORED_STOP * cut:
        return finding
    token = max(found, key=lambda text: found[text])
    return replace(
        finding,
        message=f"{finding.message} {found[token]} of the {cut} logged completions that were cut hold '{token}' before "
        "the cap, and were continued after it.",
        evidence={**finding.evidence, "ignored_stop": token, "holding_it": found[token], "cut_samples": cut},
        advice=f"if '{token}' ends an answer of this model, make it a stop token: see eos_token_id in the model's "
        "generation_config.json, and the stop_token_ids that 01_load shows and a custom engine must obey; a longer cap "
        "would not help",
    )


def with_commonest_cause(finding: Finding, samples: Iterable[Mapping[str, Any]]) -> Finding:
    """A finding of completions without a score, with the cause that most of the logged ones give."""
    if any(norm != "None" for norm in finding.evidence.get("norms", ())):
        return finding  # updates were left out for another reason
    objective = finding.evidence.get("objective")
    unscored = [row for row in samples if row.get("reward") is None and objective in (None, row.get("objective"))]
    given = Counter(cause for row in unscored if isinstance(cause := row.get("cause"), str) and cause)
    if not given:
        return finding
    ((cause, count),) = given.most_common(1)
    shown = cause if len(cause) <= LONGEST_CAUSE else f"{cause[:LONGEST_CAUSE]} …"
    return replace(
        finding,
        message=f"{finding.message} Commonest cause, of {count} of {len(unscored)} logged completions without a score: "
        f"{shown.rstrip('.')}.",
        evidence={**finding.evidence, "cause": shown, "with_cause": count, "unscored_samples": len(unscored)},
    )


def length_collapse(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Answers shrank to almost nothing: only the stop token, or one token before it."""
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
        f"stop token included (at the start: {before:g}).",
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
    """Advice that keeps answers varied: a higher upper clip where clipping acts (DAPO), else an entropy bonus."""
    row = config.algorithm.row
    if config.batch.on_policy or row.surrogate_row.high is None:
        return f"raise algorithm.entropy_coef (now {config.algorithm.entropy_coef:g}, 0.001 is a start)"
    return f"raise algorithm.clip_high from {row.clip[1]:g} to {CLIP_HIGHER * row.clip[1]:.2g}"


def low_entropy_start(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Entropy is near zero before the first update: SFT or the sampler caused it, not GRPO."""
    before, dead = start(rows, keys.ENTROPY.of(objective)), mostly_dead(rows, config, objective)
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
        ("" if started_without(rows) else f"fewer sft.steps (now {config.sft.steps}) or more varied SFT answers; then ")
        + f"a temperature above {config.sampling.temperature:g}",
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
        f"{1 - scored:.0%} of {objective} answers got no score; one such answer excludes its whole group.",
        {"objective": objective, "scored": scored, "groups": level(rows, keys.UNSCORED_GROUPS.of(objective))},
        "read `cause` in samples.jsonl: it names the reward function or judge that gave none, and the reason",
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
        f"{more_sft(rows, config, 'to teach the format sooner')}; look at samples, and at truncation first",
    )


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
    """The loss reads about 0, as it must on-policy: a note, since it surprises many users."""
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


RULES: tuple[Rule, ...] = (gradient_conflict, loss_near_zero)
OBJECTIVE_RULES: tuple[ObjectiveRule, ...] = (
    truncation,
    length_collapse,
    entropy_collapse,
    low_entropy_start,
    unscored,
    unparsed,
)
