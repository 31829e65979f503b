"""The dashboard follows a run, sends its browser what is new, and leaves nothing."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from ipywidgets.widgets.widget import _instances

from grpo_nb import rules
from grpo_nb.jupyter import dashboard, notices, session
from grpo_nb.jupyter.dashboard import Dashboard
from grpo_nb.jupyter.start import attach, start
from grpo_nb.jupyter.workers import Job
from grpo_nb.report import report
from grpo_nb.report.tables import Table
from grpo_nb.run.run import Run
from grpo_nb.training import guards
from tests.support import made_rows
from tests.support.stage import FOREVER, Stage, row, until
from tests.support.tiny import tiny_run
from tests.support.tokens import names


def test_dashboard_follows_to_the_last_row_and_ends_when_closed(stage: Stage, run: Run, sent: list[int]) -> None:
    stage.release(3)
    live = start(run)
    board = live.dashboard()
    assert live.dashboard() is board
    stage.release(FOREVER)
    live.wait_blocking()
    until(board.resting.is_set)
    assert sent[-1] == 6 and board.bar.value == 6 and "done" in board.status.value
    board.close()
    until(lambda: not board._thread.is_alive())  # type: ignore[union-attr]


@pytest.mark.ux(10, 37, at="unit")
def test_resting_dashboard_notices_that_its_run_is_taken_up_again(
    run: Run, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "REST_SECONDS", 0.01)
    looks: list[str] = []
    status, refresh = Run.status, Dashboard.refresh
    monkeypatch.setattr(Run, "status", lambda run: looks.append("look") or status(run))
    monkeypatch.setattr(Dashboard, "refresh", lambda board: looks.append("words") or refresh(board))
    run.log_metrics(row(run, 1))
    run.log_event("stopped", step=1)
    board = attach(run).dashboard()
    until(board.resting.is_set)
    looks.clear()
    until(lambda: len(looks) > 9)
    assert set(looks) == {"look"} and sent == [1], "at rest it looks where the run stands, and no more"
    with Run.open(run.path).lock():  # as another process would
        run.log_event("resume", step=1)
        until(lambda: "running" in board.status.value and not board.resting.is_set())
        run.log_metrics(row(run, 2))
        until(lambda: board.bar.value == 2)
        run.log_event("stopped", step=2)
    until(board.resting.is_set)
    assert "stopped" in board.status.value and sent[-1] == 2
    board.widget.close()  # as ipywidgets does when all widgets are closed
    until(lambda: not board._thread.is_alive())  # type: ignore[union-attr]


def test_folder_that_is_gone_is_said_and_what_was_known_stays(
    run: Run, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "REST_SECONDS", 0.01)
    run.log_metrics(row(run, 1))
    board = attach(run).dashboard()
    until(board.resting.is_set)
    away = run.path.rename(run.path.with_name("away"))
    until(lambda: "(No such file or directory)" in board.notices.value)
    until(lambda: "knobs.json" in board.message.value)  # it comes a moment after the notice
    assert names(board.status.value, 1, 6) and sent == [1]
    away.rename(run.path)
    until(lambda: board.notices.value == "" and board.message.value == "")
    board.close()


def test_dashboard_that_is_closed_leaves_nothing_and_can_be_shown_again(run: Run, sent: list[int]) -> None:
    seen = attach(run)
    for trained in (seen, session.Session(run, Job(run, "sft"))):
        before, shown = len(_instances), []
        for _ in range(3):
            board = trained.dashboard()
            shown.append(board)
            assert not board.closed and trained.dashboard() is board and len(_instances) > before
            board.close()
            board.close()
            until(lambda board=board: not board._thread.is_alive())
            assert len(_instances) == before, "no widget is kept"
        assert len({id(board) for board in shown}) == 3


def test_nothing_new_is_not_sent_again(run: Run, sent: list[int]) -> None:
    board = Dashboard(attach(run))
    board.refresh()
    assert sent == [0]
    run.log_metrics(row(run, 1))
    board.refresh()
    board.refresh()
    assert sent == [0, 1]


def test_pages_are_turned_in_the_browser(run: Run, sent: list[int]) -> None:
    board = Dashboard(attach(run))
    for page in ("rewards", "machinery", "overview"):
        board.pages.value = page
        assert board.curves.page == page
    assert sent == [0], "the browser has the rows of every page"


@pytest.mark.ux(17, 18, at="unit")
def test_warnings_are_shown_as_they_come_and_remarks_are_not(run: Run) -> None:
    board = Dashboard(attach(run))
    for severity in ("info", "warning", "error"):
        run.log_event("finding", step=3, severity=severity, message=f"<{severity}>", advice=f"raise {severity}_cap")
    board.refresh()
    shown = board.findings.value
    assert "step 3: &lt;warning&gt;" in shown and "raise warning_cap" in shown and "info" not in shown
    assert shown.index("error_cap") < shown.index("warning_cap"), "the worst first"
    for step in (4, 5, 6):
        run.log_event("finding", step=step, severity="warning", message="later", advice="")
    board.refresh()
    order = [board.findings.value.find(word) for word in ("error_cap", "step 6: later", "step 5: later", "and 2 more")]
    assert -1 not in order and order == sorted(order) and "step 4" not in board.findings.value
    assert all(f"background:{notices.BADGES[severity]}" in shown for severity in ("warning", "error"))


@pytest.mark.ux(17, 18, at="unit")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"truncation/fairness": 0.6}, "max_completion_length"),
        ({"frac_reward_zero_std/fairness": 1.0}, "signal"),
    ],
)
def test_findings_of_the_guards_reach_the_panel(run: Run, change: dict[str, Any], said: str) -> None:
    rows: list[dict[str, Any]] = []
    for step in range(1, 21):
        rows.append(made_rows.healthy(step)[-1] | change)
        guards.log_and_raise(run, [f for f in rules.after_step(rows, run.config) if f.action != "stop"])
    board = Dashboard(attach(run))
    assert said in board.findings.value


@pytest.mark.ux(19, at="unit")
def test_panel_explains_the_loss_and_has_reward_for_its_headline(run: Run) -> None:
    run.log_metrics(row(run, 1) | {"loss": 0.0})
    board = Dashboard(attach(run))
    assert names(board.caption.value, "loss", "Reward")
    figure = report.picture(run)
    assert "fairness   reward 0.50" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_samples_take_the_place_of_the_picture(run: Run) -> None:
    board = Dashboard(attach(run))
    assert board.samples is not None and board.samples.widget.layout.display == "none"
    run.log_samples([{"step": 1, "objective": "fairness", "example": "e", "completion": "so it is"}])
    board.pages.value = "samples"
    until(lambda: "so it is" in board.samples.text.value)  # type: ignore[union-attr]
    assert board.curves.layout.display == "none" and board.samples.widget.layout.display is None
    board.pages.value = "overview"
    assert board.curves.layout.display is None and board.samples.widget.layout.display == "none"


def test_sft_has_no_pages_to_turn(stage: Stage, run: Run) -> None:
    board = Dashboard(session.Session(run, Job(run, "sft")))
    assert board.pages.layout.display == "none" and board.samples is None and not board.caption.value


def test_failed_view_is_said_and_the_watching_goes_on(stage: Stage, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    live = start(run)
    board = live.dashboard()
    monkeypatch.setattr(board.curves, "update", lambda *_: 1 / 0)
    stage.release()
    until(lambda: "division by zero" in board.message.value)
    assert board._thread is not None and board._thread.is_alive()


def test_closed_dashboard_leaves_the_run_alone(stage: Stage, run: Run, sent: list[int]) -> None:
    live = start(run)
    board = live.dashboard()
    board.close()
    assert live.live
    stage.release(FOREVER)
    live.wait_blocking()


def test_resume_wakes_the_dashboard(stage: Stage, run: Run, sent: list[int]) -> None:
    live = start(run)
    board = live.dashboard()
    live.stop()
    stage.release()
    live.wait_blocking()
    until(board.resting.is_set)
    stage.release(FOREVER)
    live.resume()
    live.wait_blocking()
    until(board.resting.is_set)
    assert sent[-1] == 6


def test_dashboard_of_an_earlier_start_rests(stage: Stage, run: Run, sent: list[int]) -> None:
    stage.release(2)
    first = start(run, steps=2)
    board = first.dashboard()
    first.wait_blocking()
    second = start(run)
    until(board.resting.is_set)
    assert second.live and board.bar.value == 2
    until(lambda: second.state == "running")
    assert first.state == "continued"


def test_dashboard_follows_a_run_of_another_process(stage: Stage, run: Run, sent: list[int]) -> None:
    with run.lock():
        board = attach(Run.open(run.path)).dashboard()
        run.log_metrics(row(run, 1))
        until(lambda: board.bar.value == 1)
        assert board._thread is not None
    until(board.resting.is_set)


@pytest.mark.ux(31, at="unit")
def test_session_shows_widget_picture_and_text(run: Run) -> None:
    assert set(attach(run)._repr_mimebundle_()) == {"application/vnd.jupyter.widget-view+json", "text/plain"}
    run.log_metrics(row(run, 1))
    bundle = attach(run)._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    assert bundle["image/png"].startswith("iVBORw0KGgo")
    assert names(bundle["text/plain"], "tiny", "stopped", 1, 6)


def test_what_is_shown_is_escaped(tmp_path: Path, sent: list[int]) -> None:
    board = Dashboard(attach(tiny_run(tmp_path, name="<b>run")))
    board.notify("<script>")
    assert "&lt;b&gt;run" in board.status.value and "<script>" not in board.message.value
    assert "<img" not in Table(pd.DataFrame({"<img": ["<img src=x>"]}), "<img")._repr_html_()
