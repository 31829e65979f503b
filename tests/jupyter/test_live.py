"""The curves of the live view: what the kernel sends, how little of it, and what no folder can put into it."""

import json
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_nb.jupyter import tailing
from grpo_nb.jupyter.dashboard import Dashboard
from grpo_nb.jupyter.live import LARGEST, Curves, packed
from grpo_nb.jupyter.session import Session
from grpo_nb.jupyter.start import attach
from grpo_nb.jupyter.tailing import Followed
from grpo_nb.jupyter.workers import Job
from grpo_nb.metrics import keys
from grpo_nb.run.run import Run
from grpo_nb.storage.journal import Journal
from tests.conftest import ROOT
from tests.support.hostile import FINITE, NOT_FINITE, all_keys
from tests.support.made_rows import healthy
from tests.support.strangers_run import MARKUP, strangers_run


class Browser:
    """Keeps rows as `live/plot.js` does."""

    def __init__(self, curves: Curves, monkeypatch: pytest.MonkeyPatch) -> None:
        self.curves = curves
        self.kept = 0
        self.generation = 0
        self.steps: list[int] = []
        self.table = np.zeros((0, 0))
        self.received: list[tuple[str, int]] = []
        """Kind of each message, and rows in it."""
        self.columns: list[str] = []
        monkeypatch.setattr(curves, "send", self.take)
        self.ask()

    def ask(self) -> None:
        self.curves._asked(self.curves, {"kind": "all"}, [])

    def take(self, about: dict[str, Any], buffers: list[bytes]) -> None:
        json.dumps(about, allow_nan=False)
        steps = np.frombuffer(buffers[0], np.float64).astype(int).tolist()
        self.received.append((about["kind"], len(steps)))
        if about["kind"] == "all":
            self.generation, self.columns, self.kept = about["generation"], about["columns"], 0
            self.steps, self.table = [], np.zeros((len(self.columns), 0))
        elif (about["generation"], about["first"]) != (self.generation, self.kept):
            return self.ask()
        new = np.frombuffer(buffers[1], "<f4").reshape(len(self.columns), len(steps))
        self.steps = [*self.steps[: self.kept], *steps]
        self.table = np.hstack([self.table[:, : self.kept], new])
        self.kept += about["kept"]

    def column(self, key: str) -> list[float]:
        found: list[float] = self.table[self.columns.index(key)].tolist()
        return found


def write(run: Run, *rows: Any, log: str = "metrics") -> None:
    Journal(run.path / f"{log}.jsonl").append(*rows)


@pytest.fixture
def board(run: Run) -> Dashboard:
    return Dashboard(attach(run))


@pytest.mark.ux(36, at="unit")
def test_a_tick_sends_the_new_rows_and_no_others(board: Dashboard, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    browser, rows = Browser(board.curves, monkeypatch), healthy(60)
    for n in range(0, 60, 3):
        write(run, *rows[n : n + 3])
        board.refresh()
    assert browser.steps == [*range(1, 61)]
    assert browser.column("reward/fairness/mean") == pytest.approx([r["reward/fairness/mean"] for r in rows], rel=1e-6)
    assert [count for kind, count in browser.received[2:]] == [3] * 19


@pytest.mark.ux(36, at="unit")
def test_a_long_run_costs_a_tick_no_more_and_the_browser_a_bounded_number_of_rows(
    board: Dashboard, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tailing, "MOST_ROWS", 50)
    monkeypatch.setattr(tailing, "MOST_MARKS", 20)
    browser, sizes = Browser(board.curves, monkeypatch), []
    for first in range(1, 3000, 7):
        rows = [{"step": n, "status": "skipped" if n % 11 == 0 else "ok", "lr": n / 4} for n in range(first, first + 7)]
        write(run, *rows)
        board.refresh()
        sizes.append(len(browser.steps))
        assert browser.steps[-1] == first + 6 and browser.column("lr") == [n / 4 for n in browser.steps]
    shown = [int(step) for step in board.followed.frames()[0]["step"]]
    older = [[step for step in steps if step < 2900] for steps in (browser.steps, shown)]
    assert older[0] == older[1], "what a picture of the run would have"
    assert max(sizes) <= 50 + 2 * 20 + tailing.NEWEST + 1
    more = [count for kind, count in browser.received if kind == "more"]
    assert max(more) <= 7 + tailing.NEWEST and len(more) > 300


def test_a_page_that_missed_a_message_asks_for_all(board: Dashboard, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = Browser(board.curves, monkeypatch)
    write(run, *healthy(5))
    board.refresh()
    monkeypatch.setattr(board.curves, "send", lambda *_: None)
    write(run, *healthy(8)[5:])
    board.refresh()
    monkeypatch.setattr(board.curves, "send", browser.take)
    write(run, *healthy(9)[8:])
    board.refresh()
    assert browser.steps == [*range(1, 10)]


def test_rows_that_were_set_aside_leave_the_browser(
    board: Dashboard, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = Browser(board.curves, monkeypatch)
    write(run, *healthy(6))
    board.refresh()
    with run.lock():
        run.rewind(2)
        run.log_event("resume", step=2, goal=6)
    write(run, *healthy(3)[2:])
    board.refresh()
    assert browser.steps == [1, 2, 3]
    assert board.curves.frame["resumed"] == [2] and board.curves.frame["end"] == 6


def test_a_turned_knob_is_marked(board: Dashboard, run: Run) -> None:
    write(run, *healthy(3))
    write(run, {"kind": "knob", "key": "beta/fairness", "step": 2, "new": 0.1, "by": "user"}, log="events")
    board.refresh()
    assert board.curves.frame["turned"] == {"beta/fairness": [2]}


def test_new_keys_are_described_and_sent(board: Dashboard, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    browser, part = Browser(board.curves, monkeypatch), "reward/fairness/part/task"
    assert part not in browser.columns
    write(run, *healthy(2))
    board.refresh()
    titles = [panel["title"] for panel in board.curves.pages["rewards"]["panels"]]
    assert len(titles) == 4 and part in browser.columns and len(browser.column(part)) == 2


def test_sft_has_a_page_of_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, {"step": 1, "loss": 2.0, "lr": 1e-4, "status": "ok"}, log="sft")
    board = Dashboard(Session(run, Job(run, "sft")))
    browser = Browser(board.curves, monkeypatch)
    assert board.curves.page == "sft" and len(board.curves.pages["sft"]["panels"]) == 3
    assert browser.column(keys.LOSS) == [2.0]


@pytest.mark.parametrize("value", [*FINITE, *NOT_FINITE, None, "text", True, [1.0], {}])
def test_any_value_of_a_row_is_sent_as_a_number_within_bounds(value: Any) -> None:
    columns = [keys.STATUS, *all_keys()]
    sent = np.frombuffer(packed([{"step": 1} | dict.fromkeys(columns, value)], columns), "<f4")
    assert len(sent) == len(columns) and not np.isinf(sent).any()
    assert (np.abs(sent[~np.isnan(sent)]) <= LARGEST).all()
    shares = [n for n, key in enumerate(columns) if (row := keys.row_of(key)) and row.unit == keys.SHARE]
    assert not ((sent[shares] < 0) | (sent[shares] > 1)).any()


def test_of_a_strangers_run_numbers_and_texts_are_sent_and_no_markup_of_ours(tmp_path: Path) -> None:
    run = strangers_run(tmp_path)
    followed = Followed(run, "metrics", 3)
    followed.read()
    curves = Curves(run, followed, "grpo")
    curves.update(goal=9)
    described = json.dumps([curves.pages, curves.frame], allow_nan=False)
    assert json.dumps(MARKUP)[1:-1] in described, "a name reaches the page as it is, to be shown as text"
    source = curves._esm
    assert not [
        way for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(") if way in source
    ]
    assert not [way for way in ("fetch(", "XMLHttpRequest", "import(", "http:", "https:") if way in source]


def test_a_run_of_many_names_stays_small(run: Run, board: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, {"step": 1} | {f"label/fairness/{n}": 0.001 for n in range(900)})
    browser = Browser(board.curves, monkeypatch)
    board.refresh()
    assert len(browser.columns) <= 300 and len(json.dumps(board.curves.pages)) < 100_000


def test_the_report_is_written_when_it_is_asked_for(
    board: Dashboard, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, bytes]] = []
    monkeypatch.setattr(board.curves, "hand_over", lambda page: sent.append(("page", page.encode())))
    board.refresh()
    assert not sent
    monkeypatch.setattr(board, "watch", board.refresh)
    board.curves._asked(board.curves, {"kind": "report"}, [])
    assert len(sent) == 1 and b"<html" in sent[0][1]


def test_a_file_has_a_name_without_paths(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    curves, sent = Curves(run, Followed(run, "metrics", 3), "grpo"), []
    monkeypatch.setattr(curves, "send", lambda about, buffers: sent.append((about["name"], buffers[0])))
    curves.run_path = Path("/somewhere/../a b<c>")
    curves.hand_over("page")
    assert sent == [("a-b-c--report.html", b"page")]


def test_the_browser_is_told_when_the_run_has_ended(board: Dashboard, run: Run) -> None:
    assert board.curves.frame["ended"]
    with run.lock():
        board.refresh()
        assert board.curves.frame["ended"] == ""


def test_what_the_browser_runs_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    files = [path.name for path in (ROOT / "grpo_nb/jupyter/live").iterdir() if path.suffix in (".js", ".css")]
    assert len(files) >= 5 and all(any(fnmatch(name, pattern) for pattern in patterns) for name in files)
