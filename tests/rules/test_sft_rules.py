"""Rules about SFT: silent on a warm-up that went well, and each fires on its own trouble with its numbers."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_nb import presets
from grpo_nb.doctor import diagnose
from grpo_nb.rules.sft import check
from tests.support.tiny import tiny_run
from tests.support.tokens import names

CONFIG = presets.demo()
Row = dict[str, Any]
FELL = [{"step": 0, "loss": 4.0}, {"step": 40, "loss": 0.9}]


def healthy(steps: int = 40) -> list[Row]:
    return [
        {"step": i, "status": "ok", "loss": 4.0 * 0.93**i, "lr": 1e-4, "grad/norm": 0.8, "grad/update": 1e-4}
        for i in range(1, steps + 1)
    ]


def ill(change: Callable[[Row], Row], where: Callable[[int], bool] = lambda step: True) -> list[Row]:
    return [row | change(row) if where(row["step"]) else row for row in healthy()]


def found(rows: list[Row], losses: list[Row] = FELL) -> dict[str, Any]:
    return {finding.rule: finding for finding in check(rows, losses, CONFIG)}


@pytest.mark.parametrize("steps", [0, 1, 3, 40])
def test_a_warm_up_that_went_well_has_no_findings(steps: int) -> None:
    assert found(healthy(steps)) == {}
    assert found(healthy(steps), []) == {}


def test_skipped_updates_are_counted_and_named() -> None:
    blank = {"loss": math.nan, "grad/norm": math.nan, "grad/update": 0.0, "status": "skipped"}
    (finding,) = found(ill(lambda row: blank, lambda step: step in (5, 6))).values()
    assert (finding.rule, finding.severity, finding.step) == ("sft_skipped", "warning", 6)
    assert names(finding.message, "2 of 40", "SFT", 5, 6)
    assert "sft.learning_rate" in finding.advice
    assert found(ill(lambda row: blank, lambda step: step < 5))["sft_skipped"].severity == "error"


def test_updates_that_change_nothing_are_an_error_from_three_on() -> None:
    assert "sft_frozen" not in found(ill(lambda row: {"grad/update": 0.0}, lambda step: step < 3))
    finding = found(ill(lambda row: {"grad/update": 0.0}, lambda step: step < 4))["sft_frozen"]
    assert finding.severity == "error" and names(finding.message, "3 of 40", "SFT")


def test_a_loss_that_does_not_fall_or_rises() -> None:
    still = found(ill(lambda row: {"loss": 3.0}), [])["sft_flat"]
    assert names(still.message, 3, 10, 40) and names(still.advice, "raise", "sft.learning_rate")
    rose = found(ill(lambda row: {"loss": 3.0 + row["step"]}), [])["sft_flat"]
    assert names(rose.advice, "lower", "sft.learning_rate")
    assert "sft_flat" not in found(ill(lambda row: {"loss": 0.02}), []), "there was nothing left to learn"
    assert "sft_flat" not in found(ill(lambda row: {"loss": 3.0})[:12], []), "too few steps to say"


def test_pairs_learnt_by_heart() -> None:
    rose = [{"step": 0, "loss": 1.0}, {"step": 40, "loss": 1.2}]
    finding = found(healthy(), rose)["sft_by_heart"]
    assert finding.evidence["held_out"] == [1.0, 1.2] and names(finding.message, 1, 1.2)
    again = [{"step": 0, "loss": 0.5}, {"step": 0, "loss": 2.0}, {"step": 40, "loss": 1.2}]
    assert "sft_by_heart" not in found(healthy(), again), "the newest start counts"
    assert "sft_by_heart" not in found(ill(lambda row: {"loss": 3.0 + row["step"]}), rose), "that is another trouble"


def test_diagnose_reads_the_log_of_sft(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    for row in ill(lambda row: {"loss": 3.0}):
        run.log_sft(row)
    run.log_event("sft_eval", step=0, loss=3.0, n=64)
    (finding,) = diagnose(run)
    assert finding.rule == "sft_flat"
