"""Rules about the sampler: completions come from another distribution than the policy that is trained, and why.

Called through `rules`; each judges a stretch of rows at its end.
"""

import statistics

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.rules.finding import ENOUGH, FIRST_STEP, WINDOW, Finding, Rows, level, newest, number, series
from grpo_nb.rules.history import Rule
from grpo_nb.rules.numeric import sampler_stale

SAMPLER_GAP, SAMPLER_GAP_BADLY = 0.05, 0.1
"""Median over the window of the mean |difference of log-probs| in nats: above half precision's rounding; and above the
effect of a setting."""
GROWN = 10.0
"""Ratio to the gap of step 1 from which the updates caused a gap: the engine has kept older weights."""
NO_GAP = 1e-5
"""Nats that count as that gap where the two agreed to the last bits."""


def sampler_mismatch(rows: Rows, config: Config) -> Finding | None:
    """Tokens are sampled from another distribution than the one they are scored under; split by cause."""
    values = series(rows[-WINDOW:], keys.SAMPLER_DIFFERENCE.mean)
    if len(values) < ENOUGH or (gap := statistics.median(values)) <= SAMPLER_GAP or sampler_stale(rows, config):
        return None
    cause = _cause(rows, config)
    kind = config.algorithm.importance_correction
    why, advice = _words(cause, rows, config)
    meant = cause in ("settings", "off_policy")
    worse = cause == "stale_weights" or (not meant and gap > SAMPLER_GAP_BADLY)
    bias = (
        "the gradient is biased by that much"
        if kind == "none"
        else f"algorithm.importance_correction='{kind}' weighs against it (mean weight "
        f"{_known(rows, keys.IMPORTANCE_WEIGHT_MEAN)}, {_known(rows, keys.IMPORTANCE_WEIGHT_ZERO)} of the tokens at 0)"
    )
    more = "; where the engine must differ, algorithm.importance_correction='tis' weighs against it"
    return Finding(
        "sampler_mismatch",
        ("error" if worse else "warning") if kind == "none" else ("warning" if worse else "info"),
        newest(rows),
        f"sampled tokens differ by {gap:.3g} nats from the scored policy: {why}; {bias}.",
        {"gap": gap, "gap_start": _first(rows), "settings": _shaping(config), "correction": kind, "cause": cause},
        advice + (more if kind == "none" else ""),
        "warn" if kind == "none" or worse else "none",
    )


def _cause(rows: Rows, config: Config) -> str:
    if _shaping(config):
        return "settings"
    if any(row.get(keys.POSITIONS) for row in rows[-WINDOW:]):
        return "positions"
    if any(row.get(keys.STALENESS) for row in rows[-WINDOW:]):
        return "off_policy"
    first, values = _first(rows), series(rows[-WINDOW:], keys.SAMPLER_DIFFERENCE.mean)
    if first is None:
        return "unknown"
    return "stale_weights" if statistics.median(values) >= GROWN * max(first, NO_GAP) else "since_start"


def _first(rows: Rows) -> float | None:
    """The gap of step 1, before any update; None where it is not in the log."""
    row = rows[0]
    return number(row, keys.SAMPLER_DIFFERENCE.mean) if row["step"] == FIRST_STEP else None


def _words(cause: str, rows: Rows, config: Config) -> tuple[str, str]:
    shaped = _shaping(config)
    first = _first(rows)
    kind = next((str(row[keys.POSITIONS]) for row in rows[-WINDOW:] if row.get(keys.POSITIONS)), "")
    return {
        "settings": (
            f"{', '.join(shaped)} shape{'s' if len(shaped) == 1 else ''} the sampler only",
            "set them back to neutral",
        ),
        "positions": (
            f"the model's positions ('{kind}') are those of the longest row of a batch, so a completion's log-probs "
            "depend on the other rows, and sampler and trainer batch differently",
            "lower sampling.max_prompt_length + sampling.max_completion_length to the length the model was first "
            "trained with (original_max_position_embeddings), or set batch.micro_batch=1",
        ),
        "off_policy": (
            "completions are drawn one update before they train (rollout.steps_off_policy=1), and an update moves the "
            "policy that far",
            "lower algorithm.learning_rate (the knob learning_rate), or set rollout.steps_off_policy=0 in a new run",
        ),
        "stale_weights": (
            f"at step 1 they differed by {first or 0:.2g}, and the gap grew with the updates, so the engine draws with "
            "older weights",
            "hand the engine the newest weights before each rollout, and drop its cache of prompts: keys and values of "
            "old weights are stale, too",
        ),
        "since_start": (
            f"it was {first or 0:.2g} at step 1, before any update, so the weights are not stale",
            "see that the engine has the same precision, temperature, chat template, positions and masks",
        ),
        "unknown": (
            "nothing in `sampling` explains it",
            "see that the engine has the newest weights and the same precision",
        ),
    }[cause]


def _known(rows: Rows, key: str) -> str:
    value = level(rows, key)
    return "unknown" if value is None else f"{value:.3g}"


def _shaping(config: Config) -> list[str]:
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    values = {name: getattr(config.sampling, name) for name in neutral}
    return [f"sampling.{name}={value:g}" for name, value in values.items() if value != neutral[name]]


RULES: tuple[Rule, ...] = (sampler_mismatch,)
