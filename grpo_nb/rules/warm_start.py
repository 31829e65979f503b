"""Advice about SFT in findings: more of it, or that GRPO started without it, which explains several of them."""

from collections.abc import Sequence

from grpo_nb.config import Config
from grpo_nb.rules.finding import Finding, Rows
from grpo_nb.rules.history import History

EXPLAINED = ("truncation", "unparsed", "dead_groups", "low_entropy_start")
"""Rules that fire on a model that was never trained on the form of an answer."""


def started_without(rows: Rows) -> bool:
    """Whether GRPO started without the SFT that the settings have, as far as the log shows."""
    return isinstance(rows, History) and rows.without_sft


def more_sft(rows: Rows, config: Config, purpose: str) -> str:
    """Advice to run more SFT for a purpose; to run it at all where GRPO started without it."""
    if started_without(rows):
        return f"begin a new run and call sft(run) before grpo(run) {purpose}: this run had no SFT"
    return f"raise sft.steps (now {config.sft.steps}) {purpose}"


def sft_not_run(rows: Rows, config: Config, found: Sequence[Finding]) -> Finding | None:
    """GRPO started without SFT, and findings follow from it: their common cause."""
    explained = [one for one in found if one.rule in EXPLAINED and one.severity != "info"]
    if not explained or not started_without(rows):
        return None
    names = list(dict.fromkeys(one.rule for one in explained))
    return Finding(
        "sft_not_run",
        "error" if any(one.severity == "error" for one in explained) else "warning",
        0,
        f"GRPO started without SFT although sft.steps is {config.sft.steps}: the likely cause of {', '.join(names)}.",
        {"sft_steps": config.sft.steps, "explains": names},
        "begin a new run and call sft(run) before grpo(run), or set sft.steps=0 if no SFT is wanted",
    )
