"""Reports of a run need no kernel."""

import re
from datetime import datetime
from pathlib import Path

import pandas as pd
import pytest

from grpo_nb import presets
from grpo_nb.config import Config
from grpo_nb.report import report, tables
from grpo_nb.report.tables import Table
from grpo_nb.rules.finding import Finding
from grpo_nb.run.dependencies_file import CHANGE
from grpo_nb.run.run import Run
from tests.support.stage import row
from tests.support.tiny import tiny_run
from tests.support.tokens import names


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny_run(tmp_path, run__steps=6)


def test_report_needs_no_kernel(run: Run) -> None:
    for step in range(1, 4):
        run.log_metrics(row(run, step) | {"reward/fairness/mean": step / 10})
    shown = report.report(run)
    assert shown.bundle()["image/png"].startswith("iVBORw0KGgo") and "0.2" in repr(shown)
    assert names(shown.bundle()["text/plain"], "tiny", "stopped", 3, 6)
    assert "script" not in shown.table._repr_html_()


def test_empty_run_reports_without_failing(run: Run) -> None:
    for shown in (report.samples(run), report.events(run), report.starts(run), report.sft_losses(run)):
        assert repr(shown) and shown._repr_html_()
    assert report.report(run).table.frame.empty


def test_a_comparison_names_what_is_still_to_be_evaluated(run: Run) -> None:
    shown = report.comparison(run)
    assert shown.frame.empty and names(shown.caption, f"grpo-nb eval {run.shown}")
    assert all(f"stage={stage!r}" in shown.caption for stage in ("base", "sft", "latest"))
    numbers = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 40, "clusters": 20, "effective": 20.0}
    where = {"stage": "latest", "step": 6, "split": "test", "mode": "greedy", "objective": "fairness", "n": 40}
    draws = {"resamples": {"accuracy": [0.5] * 1000}, "asked": "q", "pool": "p", "clusters": 20}
    run.log_evaluation({**where, **draws, "metrics": {"accuracy": numbers}})
    shown = report.comparison(run)
    assert len(shown.frame) == 1 and "stage='sft'" in shown.caption and "stage='latest'" not in shown.caption
    for stage in ("base", "sft"):
        run.log_evaluation({**where, **draws, "stage": stage, "metrics": {"accuracy": numbers}})
    assert "evaluate" not in report.comparison(run).caption


def test_events_are_told_in_clock_times_and_short_numbers(run: Run) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5).timestamp()
    run.log_event("knob", step=3, key="temperature", old=1.0, new=0.6666666666, by="dashboard", at=at + 0.123)
    run.log_event("takeover", step=4, dead_owner={"pid": 12, "since": at, "token": "x"})
    table = report.events(run)
    taken, knob = table.frame["what"]
    assert names(knob, "temperature", 1, 0.6667, "dashboard", "2026-01-02 03:04:05")
    assert names(taken, "dead_owner", 12, "2026-01-02 03:04:05", "x")
    assert list(table.frame.columns) == ["time", "step", "kind", "what"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", time) for time in table.frame["time"])


def test_samples_are_newest_first_and_no_answer_comes_twice(run: Run) -> None:
    prompt = [{"role": "user", "content": "Who?"}]
    for step, text in ((1, "A"), (1, "B"), (2, "B"), (3, "C")):
        run.log_samples([{"step": step, "objective": "fairness", "prompt": prompt, "completion": text}] * 2)
    frame = report.samples(run, objective="fairness", limit=2).frame
    assert frame[["step", "completion"]].values.tolist() == [[3, "C"], [2, "B"]] and frame["prompt"][0] == "Who?"
    assert report.samples(run, step=1).frame["completion"].tolist() == ["A", "B"]


def test_knob_trace_shows_both_sides_of_the_turn(run: Run) -> None:
    for step in range(1, 7):
        run.log_metrics({"step": step, "beta/fairness": 0.04 if step <= 3 else 0.1, "beta_mode/fairness": "auto"})
    trace = report.knob_trace(run, "beta/fairness", around=3, window=2).frame
    assert trace["step"].tolist() == [2, 3, 4, 5] and trace["beta/fairness"].tolist() == [0.04, 0.04, 0.1, 0.1]


def test_dollars_in_a_table_are_dollars() -> None:
    """JupyterLab typesets all HTML of an output but what has this class."""
    full = Table(pd.DataFrame({"completion": ["$x$"]}), "$y$")
    for table in (full, Table(full.frame, "$y$", folded=True), Table(pd.DataFrame(), "$y$")):
        shown = re.sub(r"<(\w+) class=\"mathjax_ignore\">.*?</\1>", "", table._repr_html_())
        assert "$" not in shown


def test_long_text_is_cut() -> None:
    assert len(Table(pd.DataFrame({"completion": ["x" * 10**6]}))._repr_html_()) < 2000


@pytest.mark.parametrize(
    ("value", "shown"), [(0.61, "0.61"), (999_999.0, "999999.00"), (1e6, "1e+06"), (-1.23456e300, "-1.235e+300")]
)
def test_large_measures_are_short(value: float, shown: str) -> None:
    assert tables.interval(value, value, value) == f"{shown} [{shown}, {shown}]"
    assert tables.interval(value, float("nan"), value).startswith(f"{shown} ")


def test_settings_that_differ_come_first_with_their_defaults(run: Run) -> None:
    config = run.config.replace(**{"run.samples_per_step": 5, "model.lora_alpha": 32.0, "sft.data": None})
    changed = tables.changed_settings(config).frame.set_index("setting")
    assert changed.loc["run.samples_per_step"].tolist() == ["5", "8"]
    assert changed.loc["objectives.fairness.task"].tolist() == ["bbq", "null"], "a value that has to be given"
    assert not {"model.lora_alpha", "sft.data", "guards.rollback"} & {*changed.index}
    every = tables.settings(config).frame
    assert {*every["setting"][: len(changed)]} == {*changed.index} and len(every) > 2 * len(changed)
    assert tables.changed_settings(Config()).frame["setting"].str.startswith("objectives.").all()


def test_the_glossary_has_a_row_for_each_kind_that_is_logged(run: Run) -> None:
    run.log_metrics({"step": 1, "kl/fairness": 0.1, "kl/hallucination": 0.1, "ratio/logp_difference_far": 0.0})
    run.log_sft({"step": 1, "loss": 1.0})
    frame = report.glossary(run).frame
    assert [*frame["metric"]] == ["step", "loss", "ratio/logp_difference_far", "kl/{objective}"]
    assert frame.iloc[3].tolist()[1] == "nats/token" and frame.iloc[:, 2:].map(len).gt(0).all(axis=None)
    assert report.glossary(run).folded and "kl/{objective}" in report.page(run)


def test_an_event_about_content_names_what_is_new_or_changed(tmp_path: Path) -> None:
    run, digests = Run.create(tmp_path / "content", presets.demo()), ["a" * 64, "b" * 64]
    entries = {key: {"digest": digests[0], "source": "x" * 500} for key in ("data/fairness train", "tokenizer")}
    run.log_event("dependencies", step=0, adopted=False, started="2026", entries=entries)
    old, new = ({"digest": digest, "source": "the-same-file"} for digest in digests)
    run.log_event(CHANGE, step=1, dependency="data", key="data/fairness train", old=old, new=new)
    changed, noted = report.events(run).frame["what"]
    assert names(noted, 2, *entries) and len(noted) < 80
    assert names(changed, "data/fairness train", "a" * 12, "b" * 12) and "the-same-file" not in changed


def test_an_event_of_a_failure_names_the_rule_that_the_log_has_already(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "ended", presets.demo())
    finding = Finding("first_update_wrong", "error", 1, "a-long-story", {}, "an-advice", "stop")
    run.log_event("failed", step=1, error=f"TrainingError: {finding}")
    run.log_event("failed", step=1, error="OSError: 4711")
    other, ended = report.events(run).frame["what"]
    assert names(ended, "first_update_wrong") and "a-long-story" not in ended and names(other, "OSError", 4711)


def test_a_table_as_text_has_no_escapes_where_a_kernel_forces_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    text = repr(tables.Table(pd.DataFrame({"step": [1, 2], "beta": [0.5, 0.25]})))
    assert text.split() == ["step", "beta", "1", "0.5", "2", "0.25"]
