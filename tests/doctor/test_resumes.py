"""A resume that gives other numbers than the steps it repeats is found, and one that repeats them is not."""

import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.doctor import diagnose
from grpo_nb.rules.finding import Finding
from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo
from tests.support.made_rows import healthy
from tests.support.tiny import tiny_run

pytestmark = pytest.mark.usefixtures("narrow_model")

HERE = {"device": "cpu", "fingerprint": "a", "engine": "eager", "torch": "2.13"}


def resumed(folder: Path, change: dict[str, Any], **now: Any) -> list[Finding]:
    """Ten steps, back to step 6, and the last four again with `change`."""
    run: Run = tiny_run(folder, run__steps=10)
    run.log_event("start", step=0, **HERE)
    rows = healthy(10)
    for row in rows:
        run.log_metrics(row)
    run.rewind(6)
    run.log_event("resume", step=6, **(HERE | now))
    for row in rows[6:]:
        run.log_metrics(row | {"time/step": 9.0, "memory/peak_mib": 1.0} | (change if row["step"] == 7 else {}))
    return [finding for finding in diagnose(run) if finding.rule == "resume_inexact"]


def test_the_same_steps_again_are_exact(tmp_path: Path) -> None:
    assert resumed(tmp_path, {}) == []


def test_another_loss_after_a_resume_is_named(tmp_path: Path) -> None:
    (finding,) = resumed(tmp_path, {"loss": 0.25, "reward/fairness/mean": 0.5})
    assert (finding.step, finding.severity) == (7, "warning")
    assert {*finding.evidence["differences"]} == {"loss", "reward/fairness/mean"}
    assert finding.evidence["differences"]["loss"][1] == 0.25


@pytest.mark.parametrize(
    ("now", "changed"),
    [
        ({"fingerprint": "b"}, ["fingerprint"]),
        ({"torch": "2.14"}, ["torch"]),
        ({"device": "cuda"}, ["device"]),
        ({"server": {"exact": False}}, []),
    ],
)
def test_other_code_or_another_machine_is_a_remark(tmp_path: Path, now: dict[str, Any], changed: list[str]) -> None:
    (finding,) = resumed(tmp_path, {"loss": 0.25}, **now)
    assert (finding.severity, finding.evidence["changed"]) == ("info", changed)


@pytest.mark.parametrize("change", [{"lr": 1e-5}, {"temperature": 0.7}, {"beta/fairness": 0.3}])
def test_a_knob_turned_in_between_explains_it(tmp_path: Path, change: dict[str, Any]) -> None:
    assert resumed(tmp_path, {"loss": 0.25} | change) == []


def test_another_engine_explains_it(tmp_path: Path) -> None:
    assert resumed(tmp_path, {"loss": 0.25}, engine="graph") == []


@pytest.mark.parametrize("exact", [True, False])
def test_a_real_resume_is_exact_unless_a_reward_has_a_memory(tmp_path: Path, exact: bool) -> None:
    run, calls = tiny_run(tmp_path, run__steps=3, run__checkpoint_every=2), count(1)

    def reward(completions: list[str], **_: Any) -> list[float]:
        seen = 0 if exact else next(calls)
        return [float(len(text)) % 7 + seen % 5 * (i % 2) for i, text in enumerate(completions)]

    for _ in range(2):
        for _ in grpo(run, rewards={"fairness": [reward]}):
            pass
        shutil.rmtree(run.path / "checkpoints" / "000003", ignore_errors=True)
    found = [finding for finding in diagnose(run) if finding.rule == "resume_inexact"]
    assert [finding.severity for finding in found] == ([] if exact else ["warning"])
