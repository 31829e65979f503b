"""The live view reads what is new, keeps a bounded part of it, and leaves nothing behind when it is closed."""

import gc
import os
import threading
import weakref
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import ipywidgets
import pytest

from grpo_nb.jupyter import tailing as module
from grpo_nb.jupyter.dashboard import Dashboard
from grpo_nb.jupyter.start import attach, start
from grpo_nb.jupyter.tailing import Followed
from grpo_nb.jupyter.workers import Job
from grpo_nb.run.run import Run
from grpo_nb.storage.journal import Journal
from tests.support.made_rows import healthy
from tests.support.tiny import tiny_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny_run(tmp_path, sft__steps=0)


def write(run: Run, log: str, *rows: Any) -> None:
    Journal(run.path / f"{log}.jsonl").append(*rows)


def steps(view: Followed) -> list[int]:
    return [int(step) for step in view.frames()[0]["step"]]


def test_a_short_run_is_kept_whole_and_a_long_one_at_even_distances(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 50)
    view = Followed(run, "metrics", 3)
    view.read()
    assert steps(view) == [] and view.newest() == []
    for first in range(1, 500, 7):
        write(run, "metrics", *({"step": n, "status": "skipped" if n == 4 else "ok"} for n in range(first, first + 7)))
        view.read()
        last, shown = first + 6, steps(view)
        assert shown[-20:] == [*range(max(last - 19, 1), last + 1)][-20:] == [row["step"] for row in view.newest()]
        assert len(shown) <= 50 + 20 + 1 and (4 in shown or last < 4) and (last > 50 or shown == [*range(1, last + 1)])
        even = [n for n in shown[:-20] if n != 4 or last <= 50]
        assert len({b - a for a, b in pairwise(even)}) <= 1


def test_rows_that_were_moved_away_are_forgotten(run: Run) -> None:
    view = Followed(run, "metrics", 3)
    write(run, "metrics", *({"step": n} for n in range(1, 31)))
    view.read()
    with run.lock():
        run.rewind(12)
    write(run, "metrics", {"step": 13, "status": "ok"})
    view.read()
    assert steps(view) == [*range(1, 14)]


def test_findings_and_marks_are_the_newest_ones_and_the_rest_is_counted(run: Run) -> None:
    view = Followed(run, "metrics", 2)
    for n in range(1, 40):
        severity = "error" if n in (5, 6) else "info" if n % 2 else "warning"
        write(run, "events", {"kind": "finding", "severity": severity, "step": n}, {"kind": "beta", "step": n})
        write(run, "events", {"kind": "resume", "step": n, "goal": 100 + n})
    view.read()
    shown, others = view.findings()
    assert [event["step"] for event in shown] == [6, 5] and others == 18
    events = view.frames()[1]
    assert {*events["kind"]} == {"resume"} and events["goal"].dropna().iloc[-1] == 139


def test_findings_of_steps_that_are_trained_again_stand_once(run: Run) -> None:
    view = Followed(run, "metrics", 5)
    found = [{"kind": "finding", "severity": "warning", "step": step} for step in (3, 7, 9)]
    write(run, "events", *found, {"kind": "resume", "step": 6}, *found[1:])
    view.read()
    shown, others = view.findings()
    assert [event["step"] for event in shown] == [9, 7, 3] and others == 0
    write(run, "events", {"kind": "begun_anew", "step": 0})
    view.read()
    assert view.findings() == ([], 0)


def test_a_tick_reads_only_what_is_new(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, parse = Counter[str](), Journal._row
    monkeypatch.setattr(
        Journal, "_row", lambda self, line, end: parsed.update([self.path.stem]) or parse(self, line, end)
    )
    board = Dashboard(attach(run))

    def tick() -> int:
        write(run, "metrics", {"step": next(numbers), "status": "ok"})
        write(run, "events", {"kind": "beta", "step": 1})
        parsed.clear()
        board.refresh()
        return parsed.total()

    numbers = iter(range(1, 10_000))
    tick()
    few = tick()
    write(run, "metrics", *({"step": next(numbers), "status": "ok"} for _ in range(3000)))
    write(run, "events", *({"kind": "beta", "step": 1} for _ in range(3000)))
    tick()
    assert tick() <= 3 * few and tick() <= 3 * few, "lines parsed"
    board.close()


KEPT = (
    "Dashboard",
    "Session",
    "Followed",
    "SampleBrowser",
    "KnobControl",
    "Curves",
    "Thread",
    "HTML",
    "Journal",
    "Run",
)


def left() -> dict[str, int]:
    """What a view that was closed could leave behind."""
    gc.collect()
    kinds = Counter(type(thing).__name__ for thing in gc.get_objects())
    return {name: kinds[name] for name in KEPT} | {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "widgets": len(ipywidgets.widgets.widget._instances),
    }


@pytest.mark.parametrize("cycles", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_views_that_are_closed_leave_nothing_behind(run: Run, cycles: int) -> None:
    for row in healthy(3):
        run.log_metrics(row)

    def cycle() -> None:
        board = Dashboard(attach(run))
        board.watch()
        assert board.resting.wait(60)
        board.close()
        assert board._thread is not None
        board._thread.join(60)

    for _ in range(2):
        cycle()
    before = left()
    for _ in range(cycles):
        cycle()
    more = {kind: count for kind, count in left().items() if count > before[kind]}
    assert not more, "what an earlier test left may end meanwhile"


def test_a_training_that_ended_keeps_no_session(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "work", lambda job: (step for step in ()))
    session = start(run)
    session.stop()
    session.wait_blocking()
    kept, timers = weakref.ref(session), [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
    del session
    for timer in timers:
        timer.join(10)  # one that was cancelled ends soon
    gc.collect()
    assert kept() is None and not [timer for timer in timers if not timer.finished.is_set()]
