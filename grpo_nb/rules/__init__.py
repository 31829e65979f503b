"""Rules for problems of a run, used both by the trainer's guards and by the doctor.

A rule reads metric rows and the configuration and returns a Finding or None. `before_update` and `after_step` apply
the rules to the newest row while a run trains; `post_mortem` replays the same rules over a complete log. One file per
subject: updates, health, canaries, drift, signal, learning, regressions, numeric, sampler, rewards, judge,
machine, ranks, warm_start.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from grpo_nb.config import Config
from grpo_nb.rules import (
    canaries,
    drift,
    health,
    judge,
    learning,
    machine,
    numeric,
    ranks,
    regressions,
    rewards,
    sampler,
    signal,
    updates,
    warm_start,
)
from grpo_nb.rules.finding import WINDOW, Finding, Row, Rows
from grpo_nb.rules.history import History, ObjectiveRule, Rule

MomentRule = Callable[[Rows, Config], Finding | None]
SKIP_RULES: tuple[MomentRule, ...] = (updates.non_finite, updates.grad_spike)
"""Rules applied before an update, to a row that has the loss and gradient norms already."""
MOMENT_RULES: tuple[MomentRule, ...] = (
    updates.repeated_skips,
    updates.params_frozen,
    updates.first_update_wrong,
    updates.gradient_wrong,
    updates.ratio_broken,
    numeric.sampler_broken,
    health.exploded,
    health.repeated_rollbacks,
    health.overflow,
    health.bad_rows,
    canaries.length_jump,
    canaries.entropy_jump,
    canaries.truncation_jump,
)
"""Rules about one moment; a post-mortem applies them to every row."""
RULES: tuple[Rule, ...] = (
    drift.policy_static,
    *sampler.RULES,
    *learning.RULES,
    *numeric.RULES,
    *rewards.RULES,
    *machine.RULES,
    *ranks.RULES,
)
OBJECTIVE_RULES: tuple[ObjectiveRule, ...] = (
    drift.kl_zero,
    drift.kl_estimator,
    drift.kl_unheld,
    drift.kl_exploded,
    drift.beta_pinned,
    drift.kl_above_band,
    *regressions.OBJECTIVE_RULES,
    *signal.OBJECTIVE_RULES,
    *learning.OBJECTIVE_RULES,
    *judge.OBJECTIVE_RULES,
    *numeric.OBJECTIVE_RULES,
    *rewards.OBJECTIVE_RULES,
)
"""Rules about a stretch of time, applied at its end."""

_ORDER = {"error": 0, "warning": 1, "info": 2}


def before_update(rows: Rows, config: Config) -> Finding | None:
    """The reason to leave the newest row's update out, if there is one; `rows[-1]` is the step in progress."""
    return next((finding for rule in SKIP_RULES if (finding := rule(rows, config))), None)


def after_step(rows: Rows, config: Config) -> list[Finding]:
    """Findings that became true with the newest row; the run stops if one's action is `stop`.

    With a History that was checked at the row before, the cost does not depend on the length of the run.
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
    if common := warm_start.sft_not_run(history, config, found):
        found.append(common)
    history.reported = len(history), frozenset(finding.key for finding in found)
    return worst_first(found)


def post_mortem(rows: Iterable[Row], config: Config, history: History | None = None) -> list[Finding]:
    """All findings of a log, read once: moments wherever they occurred, levels at the end; worst first.

    Args:
        history: an empty one, filled with the rows.
    """
    history = History(config) if history is None else history
    moments: dict[str, Moment] = {}
    for row in rows:
        history.append(row)
        for rule in (*SKIP_RULES, *MOMENT_RULES):
            note(moments, rule(history, config))
    return summed_up(history, config, moments)


def summed_up(history: History, config: Config, moments: "Mapping[str, Moment]") -> list[Finding]:
    """The findings of a log whose moments were found; worst first."""
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
        """One finding that sums up all its steps."""
        if len(self.steps) < 2:
            return self.first
        shown = ", ".join(map(str, self.steps[:8])) + (", ..." if len(self.steps) > 8 else "")
        message = f"{self.first.message} {len(self.steps)} times in this run: steps {shown}."
        found = replace(self.first, message=message, evidence={**self.first.evidence, "steps": self.steps})
        if not found.recurring or min(after - before for before, after in pairwise(self.steps)) > WINDOW:
            return found
        undone = found.action == "rollback"
        return replace(found, advice=found.recurring, severity="error" if undone else found.severity)


def worst_first(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda f: (_ORDER[f.severity], f.step or 0, f.key))
