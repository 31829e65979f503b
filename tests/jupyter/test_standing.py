"""The two lines that say where a run stands: stage, step of how many, where it trains, the newest numbers."""

import asyncio
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.jupyter import kernel, standing, waiting
from grpo_nb.jupyter.session import Session
from grpo_nb.jupyter.start import attach, start
from grpo_nb.jupyter.tailing import Followed
from grpo_nb.jupyter.workers import Job
from grpo_nb.run.lock import Owner
from grpo_nb.run.run import Run
from grpo_nb.storage.journal import Journal
from tests.support.made_rows import healthy
from tests.support.stage import FOREVER, Stage, until
from tests.support.tiny import tiny_run
from tests.support.tokens import names


def line(session: Session, log: Any = "metrics") -> str:
    followed = Followed(session.run, log, 3)
    followed.read()
    return standing.status_html(session, session.state, followed)


def test_newest_numbers_and_settings_are_told(run: Run) -> None:
    for row in healthy(3):
        run.log_metrics(row)
    assert names(line(attach(run)), "GRPO", 3, 6, "reward", "KL", "β", "fairness", "hallucination", "temperature 1")


def test_steps_of_sft_are_told_by_its_own_view(run: Run) -> None:
    Journal(run.path / "sft.jsonl").append({"step": 2, "loss": 1.25, "lr": 1e-4, "status": "ok"})
    assert names(line(Session(run, Job(run, "sft")), "sft"), "SFT", 2, 3, "loss 1.25")


def test_view_of_a_run_that_is_in_its_sft_tells_those_steps(run: Run) -> None:
    with run.lock():
        Journal(run.path / "sft.jsonl").append({"step": 2, "loss": 1.25, "lr": 1e-4, "status": "ok"})
        assert names(line(attach(Run.open(run.path))), "SFT", 2, 3) and "GRPO" not in line(attach(Run.open(run.path)))


def test_a_start_that_ends_earlier_is_told_by_its_own_last_step(stage: Stage, run: Run) -> None:
    session = start(run, steps=4)
    stage.release(2)
    until(lambda: session.step == 2)
    assert names(line(session), "step 2 of 4", "6 in all")
    assert names(session.summary(), "step 2 of 4", "6 in all")
    assert session.dashboard().bar.max == 4
    stage.release(FOREVER)
    session.wait_blocking()


def test_goal_of_sft_is_none_of_grpo(run: Run) -> None:
    run.log_event("sft_done", step=300, goal=300)
    followed = Followed(run, "metrics", 3)
    followed.read()
    assert followed.goal("grpo") is None and followed.goal("sft") == 300
    run.log_event("resume", step=0, goal=33)
    followed.read()
    assert followed.goal("grpo") == 33


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"pid": os.getpid()}, "in this kernel"),
        ({"pid": 7}, "process 7 of this machine"),
        ({"pid": 7, "host": "far"}, "process 7 on far"),
    ],
)
def test_where_a_run_trains_is_told_by_its_owner(run: Run, change: dict[str, Any], told: str) -> None:
    owner = replace(Owner.here(), host=change.get("host", socket.gethostname()), pid=change["pid"])
    assert told in standing.place(attach(run), owner)


def test_process_that_a_session_started_is_not_this_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path)
    session = Session(run, Job(run, where="process"))
    monkeypatch.setattr(Session, "live", True)
    assert standing.place(session, replace(Owner.here(), pid=7, host=socket.gethostname())) != "in this kernel"
    assert standing.place(Session(run), None) == "in this kernel"


def test_a_line_that_cannot_be_shown_ends_no_wait(stage: Stage, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: Session) -> None:
        raise ValueError("no view")

    monkeypatch.setattr(kernel, "in_notebook", lambda: True)
    monkeypatch.setattr(waiting, "_Line", failing)
    stage.release(FOREVER)
    assert names(asyncio.run(start(run).wait()), "done", 6)


def test_a_part_before_the_next_step_has_its_seconds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    session = attach(run)
    assert session.doing("loading the model x") == "loading the model x"
    now[0] += 42
    assert names(session.doing("loading the model x"), "loading the model x", 42)
    assert session.doing("checking the model") == "checking the model", "another part begins at 0"
    assert session.doing("") == ""
