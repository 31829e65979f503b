"""Rules about an LLM judge: it fails, scores everything alike, scores by length, or takes too much money or time.

Called through `rules`. A run without a judge has none of these keys, so no rule fires.
"""

from grpo_nb.config import Config
from grpo_nb.judge.failures import advice
from grpo_nb.metrics import keys
from grpo_nb.rules.finding import ENOUGH, WINDOW, Finding, Rows, keys_below, level, newest, number, series
from grpo_nb.rules.history import ObjectiveRule

ENOUGH_VERDICTS = 20
"""Verdicts before equal ones mean anything: a good step may well be all right answers."""
LENGTH_CORRELATION = 0.5
"""Mean rank correlation of score and length; a few answers a step reach 0.3 by chance."""
SLOW_SECONDS, SLOW_SHARE = 3.0, 0.5
"""Seconds and share of the step from which a judge is slow: the run mostly waits for it."""
FALLBACK_SHARE = 0.1
"""Share of verdicts that did not come from the first provider."""
DISAGREEMENT = -0.2
"""Mean rank correlation with the task's own score: below it the two rewards pull against each other."""


def judge_failed(rows: Rows, config: Config, objective: str) -> Finding | None:
    """The judge gave no verdict at all, several steps in a row: nothing of this objective is learnt."""
    judge, tail = config.objectives[objective].judge, rows[-ENOUGH:]
    failed, scored = (series(tail, key.of(objective)) for key in (keys.JUDGE_FAILED, keys.JUDGE_SCORED))
    if judge is None or len(failed) < ENOUGH or any(scored) or not all(failed):
        return None
    prefix = keys.JUDGE_FAILURE.below(objective)
    kinds = sorted({key.removeprefix(prefix) for row in tail for key in row if key.startswith(prefix)})
    cause = str(tail[-1].get(keys.JUDGE_CAUSE.of(objective)) or "")
    return Finding(
        "judge_failed",
        "error",
        newest(rows),
        f"the judge of {objective} gave no verdict on any of the {sum(failed):.0f} answers of the last {ENOUGH} steps "
        f"({', '.join(kinds)}): every group is left out, so nothing of this objective is learnt."
        + (f" Most frequent cause: {cause}." if cause else ""),
        {"objective": objective, "failed": sum(failed), "kinds": kinds, "cause": cause},
        f"{advice(kinds, judge, f'objectives.{objective}.judge')}. The limits of a judge may be changed in the run's "
        "config.json, anything else in a new run; then start it again, it continues from here",
        "end",
    )


def judge_failure_scored(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Answers that the judge failed on have a score all the same."""
    row, prefix = rows[-1], keys.JUDGE_FAILURE.below(objective)
    kinds = {key.removeprefix(prefix): number(row, key) or 0 for key in keys_below(row, prefix)}
    failures, unscored = sum(kinds.values()), number(row, keys.JUDGE_FAILED.of(objective))
    if config.objectives[objective].judge is None or unscored is None or failures <= unscored:
        return None
    return Finding(
        "judge_failure_scored",
        "error",
        newest(rows),
        f"the judge of {objective} failed on {failures:.0f} answers ({', '.join(sorted(kinds))}), and "
        f"{failures - unscored:.0f} of them have a score from it: the policy learns from the server's trouble.",
        {"objective": objective, "failures": kinds, "unscored": unscored},
        "give None where there is no verdict, never a number: the group is then left out",
    )


def judge_budget(rows: Rows, config: Config, objective: str) -> Finding | None:
    """The judge has used up its budget for this run."""
    judge, used, spent = (
        config.objectives[objective].judge,
        number(rows[-1], keys.JUDGE_TOKENS.of(objective)),
        number(rows[-1], keys.JUDGE_USD.of(objective)),
    )
    if judge is None or used is None or spent is None:
        return None
    over = [f"budget_tokens={judge.budget_tokens}"] if judge.budget_tokens and used >= judge.budget_tokens else []
    over += [f"budget_usd={judge.budget_usd:g}"] if judge.budget_usd and spent >= judge.budget_usd else []
    if not over:
        return None
    per_step = used / max(newest(rows), 1)
    return Finding(
        "judge_budget",
        "error",
        newest(rows),
        f"the judge of {objective} has used {used:.0f} tokens ({spent:.4g} dollars) and reached {' and '.join(over)}: "
        f"the run ends here, saved at step {newest(rows)}.",
        {"objective": objective, "tokens": used, "usd": spent, "per_step": per_step},
        f"raise objectives.{objective}.judge.{over[0].partition('=')[0]} in the run's config.json and start it again, "
        f"or begin a run with a smaller batch or a cheaper model (now about {per_step:.0f} tokens a step)",
        "end",
    )


def judge_constant(rows: Rows, config: Config, objective: str) -> Finding | None:
    """The judge gives every answer the same score, so it adds nothing but cost."""
    tail = rows[-WINDOW:]
    lows, highs = (series(tail, key.of(objective)) for key in (keys.JUDGE_LOW, keys.JUDGE_HIGH))
    scored = sum(series(tail, keys.JUDGE_SCORED.of(objective)))
    if len(lows) < ENOUGH or scored < ENOUGH_VERDICTS or min(lows) < max(highs):
        return None
    return Finding(
        "judge_constant",
        "warning",
        newest(rows),
        f"all {scored:.0f} verdicts on {objective} in the last {len(lows)} steps are {highs[0]:g}: inside a group an "
        "equal score cancels, so the judge costs and teaches nothing.",
        {"objective": objective, "value": highs[0], "verdicts": scored},
        "read `reason` in judge.jsonl: a weak model grades everything alike, so take a stronger one, or judge=null in "
        "a new run",
    )


def judge_length(rows: Rows, config: Config, objective: str) -> Finding | None:
    """The judge's score follows the length of an answer more than the task's score."""
    by_length, by_task = (
        level(rows, keys.JUDGE_LENGTH.of(objective)),
        level(rows, keys.JUDGE_AGREEMENT.of(objective)),
    )
    if by_length is None or abs(by_length) < LENGTH_CORRELATION or (by_task or 0) >= abs(by_length):
        return None
    return Finding(
        "judge_length",
        "warning",
        newest(rows),
        f"the judge of {objective} prefers {'long' if by_length > 0 else 'short'} answers: its score has a rank "
        f"correlation of {by_length:.2f} with length and "
        f"{'none that can be measured' if by_task is None else f'{by_task:.2f}'} with the task's own score.",
        {"objective": objective, "length_correlation": by_length, "agreement": by_task},
        "compare verdicts on long and short answers in judge.jsonl; take a stronger model or lower the judge's weight "
        "in a new run, before length is all that is learnt",
    )


def judge_disagrees(rows: Rows, config: Config, objective: str) -> Finding | None:
    """The judge ranks answers against the task's own score: the two rewards pull apart."""
    agreement = level(rows, keys.JUDGE_AGREEMENT.of(objective))
    if agreement is None or agreement > DISAGREEMENT:
        return None
    return Finding(
        "judge_disagrees",
        "warning",
        newest(rows),
        f"the judge of {objective} ranks answers against the task's own score (rank correlation {agreement:.2f}): "
        "what one rewards the other takes away.",
        {"objective": objective, "agreement": agreement},
        "compare the reasons in judge.jsonl with the labels in samples.jsonl and see which of the two is right",
    )


def judge_slow(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Most of a step is spent waiting for the judge."""
    judge, scoring = config.objectives[objective].judge, level(rows, keys.TIME.of("score"))
    seconds, step = level(rows, keys.TIME_JUDGE.of(objective)), level(rows, keys.TIME_STEP)
    if seconds is not None and scoring is not None:
        seconds = min(seconds, scoring)  # the rest went by while the step measured log-probs
    if judge is None or seconds is None or step is None or seconds <= max(SLOW_SECONDS, SLOW_SHARE * step):
        return None
    p95, limited = (level(rows, key.of(objective)) for key in (keys.TIME_JUDGE_P95, keys.JUDGE_LIMITED))
    return Finding(
        "judge_slow",
        "warning",
        newest(rows),
        f"a step waits {seconds:.1f} s of its {step:.1f} s for the judge of {objective}"
        + (f" (95% of its requests are done in {p95:.1f} s)." if p95 is not None else "."),
        {"objective": objective, "seconds": seconds, "step_seconds": step, "p95": p95, "limited": limited},
        f"the server refuses {limited:.0f} requests a step as too many: raise its limit, or judge fewer completions"
        if limited
        else f"judge.concurrency (now {judge.concurrency}) should reach the completions of a step; else a faster "
        "server or a smaller model. A shorter timeout or fewer retries would only cost groups",
    )


def judge_fallback(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Many verdicts come from another provider than the first: rewards are no longer comparable between groups."""
    judge, first = config.objectives[objective].judge, level(rows, keys.JUDGE_FIRST.of(objective))
    if judge is None or first is None or 1 - first <= FALLBACK_SHARE:
        return None
    return Finding(
        "judge_fallback",
        "warning",
        newest(rows),
        f"{1 - first:.0%} of the verdicts on {objective} did not come from the first provider, "
        f"{judge.providers[0].label}.",
        {"objective": objective, "first_share": first},
        "read `cause` in judge.jsonl and the key and limits of the first server; groups are never mixed, but steps are",
    )


OBJECTIVE_RULES: tuple[ObjectiveRule, ...] = (
    judge_failed,
    judge_failure_scored,
    judge_budget,
    judge_constant,
    judge_length,
    judge_disagrees,
    judge_slow,
    judge_fallback,
)
