"""Turning beta and temperature by keyboard while a run trains, and what must be seen: requested, then active."""

from typing import Any

from grpo_nb.run.run import Run
from tests.support.lab import Desk, until


def steer(desk: Desk, run: Run) -> None:
    """Hold the run, ask for another beta and temperature, take one step with them, go on."""
    desk.press("Pause")
    until(lambda: run.status().state == "paused", "the pause")
    desk.says("paused before step")
    before = run.last_step() or 0
    desk.type_into("β fairness", "0.09")
    until(lambda: run.knobs["beta/fairness"].value == 0.09, "the typed beta")
    desk.says("requested 0.09, active")
    desk.tab_to("temperature", start="β fairness")
    desk.type_into("temperature", "0.9")
    until(lambda: run.knobs["temperature"].value == 0.9, "the typed temperature")
    desk.says("requested 0.9, active 1")

    desk.press("Step")
    until(lambda: (run.last_step() or 0) > before, "one step")
    desk.says("active 0.09, set by dashboard")
    desk.says("active 0.9, set by dashboard")
    desk.tab_to("temperature", start="β fairness")
    desk.page.keyboard.press("Tab")
    desk.page.keyboard.press("ArrowRight")
    until(lambda: run.knobs["temperature"].value == 0.95, "one step of the slider")
    desk.press("Resume")
    until(lambda: (run.last_step() or 0) >= before + 3, "more steps")
    _check(run, before)


def _check(run: Run, before: int) -> None:
    rows = {row["step"]: row for row in run.rows("metrics")}
    old, new = rows[before], rows[before + 1]
    assert (new["beta/fairness"], new["beta_mode/fairness"], new["temperature"]) == (0.09, "manual", 0.9)
    assert old["beta_mode/fairness"] == "auto" and old["temperature"] == 1.0
    assert rows[before + 2]["temperature"] == 0.95
    assert new["beta_mode/hallucination"] == "auto", "the other objective's is left alone"
    turned = [event for event in run.rows("events") if event.get("kind") == "knob"]
    told: list[tuple[Any, ...]] = [(e["key"], e["old"], e["new"], e["by"], e["step"]) for e in turned]
    assert ("beta/fairness", "auto", 0.09, "dashboard", before + 1) in told
    assert ("temperature", 1.0, 0.9, "dashboard", before + 1) in told
