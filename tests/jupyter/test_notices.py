"""What the panel says of a run in each state."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_nb.jupyter import notices, session
from grpo_nb.jupyter.controls import Controls
from grpo_nb.jupyter.start import attach, start
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage.vocabulary import RunState
from tests.conftest import ROOT
from tests.support.stage import FOREVER, Stage, row, until
from tests.support.tokens import names


def told(live: session.Session) -> str:
    return " ".join(notice.text for notice in notices.notices(live, live.state, live.step))


def test_run_with_nothing_logged_says_so(stage: Stage, run: Run) -> None:
    assert "grpo_nb.start(" in told(attach(run))
    live = start(run)
    assert told(live) and "grpo_nb.start(" not in told(live), "it was started: the model is being loaded"


def test_healthy_run_needs_no_notice(stage: Stage, run: Run) -> None:
    live = start(run)
    stage.release()
    live.wait_blocking(step=1)
    assert told(live) == ""


@pytest.mark.ux(13, at="unit")
def test_trainer_that_failed_says_what_ended_it(stage: Stage, run: Run) -> None:
    stage.error = ZeroDivisionError("of <the> worker")
    stage.release()
    live = start(run)
    with pytest.raises(ZeroDivisionError):
        live.wait_blocking()
    board = live.dashboard()
    until(lambda: "ZeroDivisionError: of &lt;the&gt; worker" in board.notices.value)
    assert f"background:{notices.BADGES['error']}" in board.status.value
    run.log_event("failed", step=0, error="ZeroDivisionError: as logged")
    (run.path / "worker.log").write_text("line\n" * 99)
    said = told(attach(Run.open(run.path)))
    assert names(said, 0, "ZeroDivisionError: as logged", "events.jsonl") and "line" not in said


@pytest.mark.parametrize("error", [RunError("full-disk."), KeyError("a fault")])
def test_panel_speaks_of_a_traceback_only_where_one_is_kept(stage: Stage, run: Run, error: Exception) -> None:
    stage.error = error
    stage.release()
    live = start(run)
    with pytest.raises(type(error)):
        live.wait_blocking()
    kept = any(event["kind"] == "traceback" for event in run.rows("events"))
    assert ("traceback" in told(live)) == kept == isinstance(error, KeyError)


@pytest.mark.ux(14, at="unit")
def test_memory_that_ran_out_is_explained_freed_and_can_be_started_again(stage: Stage, run: Run) -> None:
    stage.error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8 GiB of which 1 GiB is free."
    )
    stage.release()
    live = start(run)
    until(lambda: not live.live)
    trace = live.error.__traceback__ if live.error else None
    while trace is not None:
        assert "goal" not in trace.tb_frame.f_locals, "frames of the training would hold the model and the batch"
        trace = trace.tb_next
    with pytest.raises(torch.OutOfMemoryError):
        live.wait_blocking()
    (notice,) = notices.notices(live, live.state, live.step)
    assert names(notice.text, "2.50 GiB", "1 GiB")
    for setting in ("batch.micro_batch", "model.gradient_checkpointing", "sampling.max_completion_length"):
        assert setting in notice.more
    stage.error = None
    stage.release(FOREVER)
    again = start(run)
    again.wait_blocking()
    assert again.state == "done"


def test_trainer_that_died_says_where_resume_goes_on(run: Run) -> None:
    code = (
        "import os, sys; from pathlib import Path; from grpo_nb.run.run import Run; run = Run.open(Path(sys.argv[1])); "
        "lock = run.lock(); lock.__enter__(); run.log_event('start', step=0); run.log_metrics({'step': 1}); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(run.path)], check=False, cwd=ROOT)
    seen = attach(run)
    assert seen.state == "dead"
    assert told(seen).count("step 1") == 1
    run.checkpoints.save(1, {}, {"step": 1})
    assert told(seen).count("step 1") == 2, "where it died, and where Resume continues from"
    controls = Controls(seen, lambda text, severity="warning", /: None)
    controls.follow(seen.state, {})
    assert not controls.buttons["run"].disabled and controls.buttons["stop"].disabled


@pytest.mark.ux(37, at="unit")
def test_run_of_another_process_names_its_owner(run: Run) -> None:
    run.log_metrics(row(run, 1))
    with run.lock():
        run.log_event("start", step=0)
        seen = attach(Run.open(run.path))
        assert names(told(seen), os.getpid(), socket.gethostname())


@pytest.mark.parametrize(
    ("free", "severity", "said"),
    [(0, "error", r"tiny.*\bfull\b.*Resume"), (2**25, "warning", r"\b32 MiB\b")],
)
def test_full_disk_is_said(run: Run, monkeypatch: pytest.MonkeyPatch, free: int, severity: str, said: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    first = notices.notices(attach(run), RunState.RUNNING, 1)[0]
    assert first.severity == severity and re.search(said, first.text)


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.DEAD])
def test_trainer_that_a_full_disk_ended_has_one_notice(
    run: Run, monkeypatch: pytest.MonkeyPatch, state: RunState
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    (notice,) = notices.notices(attach(run), state, 3)
    assert names(notice.text, "full", 3)


def test_folder_that_is_gone_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(path: Path) -> None:
        raise OSError(2, "No such file or directory")

    monkeypatch.setattr(shutil, "disk_usage", gone)
    assert "(No such file" in notices.notices(attach(run), RunState.DONE, 6)[0].text


def test_what_was_asked_of_a_running_step_is_said(stage: Stage, run: Run) -> None:
    stage.release()
    live = start(run)
    live.wait_blocking(step=1)
    live.pause()
    assert "pause" in told(live), "it is requested, not yet held"


def test_badges_are_readable_on_their_own_ground() -> None:
    """WCAG contrast of white on each, so that a dark page and a light one show the same."""
    for colour in notices.BADGES.values():
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        assert 1.05 / (luminance + 0.05) >= 4.5
