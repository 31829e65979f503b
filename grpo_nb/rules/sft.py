"""Rules about SFT, read from its own log: skipped and lost updates, a loss that did not fall, memorized pairs.

As in `rules`, a rule is a function that returns a Finding or None. It reads the rows of sft.jsonl and the losses on
held-out pairs (events of kind `sft_eval`, oldest first); `check` applies them all.
"""

from collections.abc import Callable, Iterator

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.rules.finding import BASELINE, WINDOW, Finding, Row, Rows, level, newest, number, series, spans, start
from grpo_nb.rules.updates import FROZEN_STEPS, SKIPS_TO_STOP
from grpo_nb.storage.index import LogRows

SKIPPED_BADLY = 0.1
"""Share of skipped updates from which SFT has trained much less than its steps suggest."""
FLAT_SHARE, FLAT_LOSS = 0.95, 0.1
"""A loss that keeps 95% of its start did not fall; below 0.1 nats per token there was little left to learn."""
RISEN_SHARE = 1.05
"""Held-out loss at its end against its start: beyond the noise of 64 pairs."""


def skipped(rows: Rows, losses: Rows, config: Config) -> Finding | None:
    """Updates were left out because their gradient was nan or infinite."""
    steps = [row["step"] for row in _having(rows, keys.STATUS, "skipped")]
    if not steps:
        return None
    bad = len(steps) >= max(SKIPS_TO_STOP, SKIPPED_BADLY * len(rows))
    return Finding(
        "sft_skipped",
        "error" if bad else "warning",
        steps[-1],
        f"{len(steps)} of {len(rows)} SFT updates were left out, their gradient was not finite: steps {spans(steps)}.",
        {"steps": steps, "of": len(rows)},
        f"lower sft.learning_rate (now {config.sft.learning_rate:g}), and use bfloat16 or float32 instead of float16",
    )


def frozen(rows: Rows, losses: Rows, config: Config) -> Finding | None:
    """There was a gradient, but the weights did not change."""
    steps = [row["step"] for row in _having(rows, keys.GRAD_UPDATE, 0.0) if _lost(row)]
    if len(steps) < FROZEN_STEPS:
        return None
    return Finding(
        "sft_frozen",
        "error",
        steps[-1],
        f"{len(steps)} of {len(rows)} SFT updates changed no weight although there was a gradient: they are lost in "
        "rounding, or the optimizer holds other parameters than the model.",
        {"steps": steps, "of": len(rows)},
        f"train LoRA or float32 weights (model.train, model.dtype), or raise sft.learning_rate (now "
        f"{config.sft.learning_rate:g})",
    )


def flat(rows: Rows, losses: Rows, config: Config) -> Finding | None:
    """The training loss ended where it began."""
    before, now = start(rows, keys.LOSS), level(rows, keys.LOSS)
    if len(rows) < WINDOW + BASELINE or before is None or now is None:
        return None
    if before < FLAT_LOSS or now < FLAT_SHARE * before:
        return None
    return Finding(
        "sft_flat",
        "warning",
        newest(rows),
        f"the SFT loss did not fall: {before:.3g} nats per token in its first steps, {now:.3g} in its last "
        f"{WINDOW} of {len(rows)}.",
        {"before": before, "now": now, "steps": len(rows)},
        f"raise sft.learning_rate (now {config.sft.learning_rate:g}; LoRA usually wants 1e-4 or more) or sft.steps "
        f"(now {config.sft.steps})"
        if now <= before / FLAT_SHARE
        else f"it rose: lower sft.learning_rate (now {config.sft.learning_rate:g})",
    )


def by_heart(rows: Rows, losses: Rows, config: Config) -> Finding | None:
    """The loss fell on the pairs that were trained, and rose on those that were held out."""
    first = max((i for i, row in enumerate(losses) if row.get("step") == 0), default=len(losses))
    held = series(losses[first:], "loss")
    before, now = start(rows, keys.LOSS), level(rows, keys.LOSS)
    if len(held) < 2 or before is None or now is None or now >= before or held[-1] <= RISEN_SHARE * held[0]:
        return None
    return Finding(
        "sft_by_heart",
        "warning",
        newest(rows),
        f"SFT memorised its pairs: their loss fell from {before:.3g} to {now:.3g} nats per token, on held-out "
        f"pairs it rose from {held[0]:.3g} to {held[-1]:.3g}.",
        {"trained": [before, now], "held_out": [held[0], held[-1]]},
        f"fewer sft.steps (now {config.sft.steps}), a lower sft.learning_rate (now {config.sft.learning_rate:g}), or "
        "more pairs",
    )


def check(rows: Rows, losses: Rows, config: Config) -> list[Finding]:
    """All findings of these rules in SFT's log."""
    return [finding for rule in RULES if rows and (finding := rule(rows, losses, config))]


def _having(rows: Rows, key: str, value: str | float) -> Iterator[Row]:
    """The rows with this value under a key; of a long log only these are parsed."""
    if not isinstance(rows, LogRows):
        return (row for row in rows if row.get(key) == value)
    return rows.having(key, {value}) if isinstance(value, str) else rows.at(rows.equal(key, value))


def _lost(row: Row) -> bool:
    still = number(row, keys.GRAD_UPDATE) == 0 and row.get(keys.STATUS) != "skipped"
    return still and (number(row, keys.GRAD_NORM) or 0) > 0 and number(row, keys.LR) != 0


RULES: tuple[Callable[[Rows, Rows, Config], Finding | None], ...] = (skipped, frozen, flat, by_heart)
