"""Runs told apart: new, running, paused, stopped, done, failed, dead; many of them in a list."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_nb.run.listing import list_runs
from grpo_nb.run.lock import Owner
from grpo_nb.run.run import Log, Run, RunError
from grpo_nb.run.status import MILESTONES, PAUSES, MilestoneReader
from grpo_nb.storage import journal, lines
from grpo_nb.storage.files import to_json, write_atomically
from grpo_nb.storage.journal import Journal
from tests.support.kill_points import ROOT
from tests.support.run_folder import CONFIG, STEPS, log
from tests.support.tokens import names, pattern


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "demo", CONFIG)


def write_owner(run: Run, owner: Owner) -> None:
    from dataclasses import asdict

    (run.path / "lock").write_text(json.dumps(asdict(owner)).ljust(1023) + "\n")


def dead_owner() -> Owner:
    return replace(Owner.here(), pid=2**22 + 7)


# ---- status


def test_the_total_is_never_below_the_step(run: Run) -> None:
    run.log_event("start", step=0, goal=2)  # less than the configuration's is a stop on the way
    assert (run.goal(), run.status().steps) == (STEPS, STEPS)
    run.log_event("resume", step=0, goal=STEPS + 2)
    assert run.goal() == STEPS + 2
    log(run, *range(1, STEPS + 2))
    run.log_event("stopped", step=STEPS + 1, goal=STEPS + 2)
    assert repr(run).endswith(f"stopped, step {STEPS + 1} of {STEPS + 2})")
    run.log_event("resume", step=STEPS + 1, goal=STEPS)  # asked again without a number: nothing is left
    run.log_event("done", step=STEPS + 1, goal=STEPS)
    assert repr(run).endswith(f"done, step {STEPS + 1} of {STEPS + 1})")
    assert list_runs(run.path.parent)[0].steps == STEPS + 1


def status(run: Run) -> tuple[str, int]:
    now = Run.open(run.path).status()
    return now.state, now.step


def test_the_life_of_a_run(run: Run) -> None:
    assert status(run) == ("new", 0)
    with run.lock():
        assert status(run) == ("running", 0)  # loading
        run.log_event("start", step=0)
        log(run, 1, 2)
        assert status(run) == ("running", 2)
        run.knobs.request("pause")
        assert status(run) == ("running", 2), "asked to pause is not paused"
        run.log_event("paused", step=2)
        assert status(run) == ("paused", 2)
        run.log_event("knob", key="temperature")
        assert status(run) == ("paused", 2), "other events do not matter"
        run.knobs.request("run")
        assert status(run) == ("running", 2)
        run.log_event("stopped", step=2)
    assert status(run) == ("stopped", 2)
    with run.lock():
        run.log_event("resume", step=2)
        assert status(run) == ("running", 2)
        log(run, STEPS)
        run.log_event("done", step=STEPS)
    assert status(run) == ("done", STEPS)


def test_a_run_that_ended_below_its_steps_is_stopped_however_it_ended(run: Run) -> None:
    run.log_event("start")
    log(run, 1)
    assert status(run) == ("stopped", 1)  # its loop was left, the lock given back
    run.log_event("done", step=1)  # asked for one step only
    assert status(run) == ("stopped", 1)


def test_a_killed_owner_makes_a_run_dead_until_it_goes_on(run: Run) -> None:
    write_owner(run, dead_owner())
    assert status(run) == ("dead", 0)
    run.log_event("start")
    log(run, 1)
    assert status(run) == ("dead", 1)
    owner = Run.open(run.path).status().owner
    assert owner is not None and owner.pid == dead_owner().pid
    with run.lock() as lock:
        assert lock.took_over is not None
        run.log_event("resume")
        assert status(run) == ("running", 1)


@pytest.mark.parametrize("kind", ["stopped", "done", "failed"])
def test_killed_after_its_last_word_it_is_what_it_said(run: Run, kind: str) -> None:
    run.log_event("start")
    log(run, STEPS)
    run.log_event(kind)
    write_owner(run, dead_owner())
    assert status(run) == (kind, STEPS)


def test_a_failed_run_stays_failed_until_it_goes_on(run: Run) -> None:
    run.log_event("start")
    run.log_event("failed", error="RuntimeError: out of memory")
    run.log_event("interrupted")
    assert status(run) == ("failed", 0)
    with run.lock():
        run.log_event("resume")
        assert status(run) == ("running", 0)
    assert status(run) == ("stopped", 0)


def test_a_run_on_another_machine_is_judged_by_its_heartbeat(run: Run) -> None:
    run.log_event("start")
    far = replace(Owner.here(), host="elsewhere")
    write_owner(run, replace(far, heartbeat=time.time() - 20))
    assert status(run) == ("running", 0)
    write_owner(run, replace(far, heartbeat=time.time() - 100))
    assert status(run) == ("dead", 0)


def test_the_list_says_why_a_run_is_dead_or_failed(run: Run) -> None:
    write_owner(run, dead_owner())
    run.log_event("start", step=0)
    (listed,) = list_runs(run.path.parent)
    assert listed.state == "dead" and names(str(listed.problem), dead_owner().pid)
    run.log_event("failed", error="RuntimeError: out of memory")
    (listed,) = list_runs(run.path.parent)
    assert (listed.state, listed.problem) == ("failed", "RuntimeError: out of memory")


def test_a_copy_of_a_run_that_trains_is_one_of_its_own(run: Run) -> None:
    with run.lock():
        run.log_event("start")
        log(run, 1)
        copy = run.path.with_name("copy")
        shutil.copytree(run.path, copy)
        assert status(run) == ("running", 1) and Run.open(copy).status().owner is None
        assert status(Run.open(copy)) == ("stopped", 1)
        Run.open(copy).lock().refuse_if_taken()
        with Run.open(copy).lock():
            assert status(Run.open(copy)) == status(run) == ("running", 1)


def test_status_reads_the_tail_only(run: Run) -> None:
    for name in ("metrics", "events"):
        with open(run.path / f"{name}.jsonl", "wb") as file:
            file.seek(1 << 35)  # a hole of 32 GiB
            file.write(b'\n{"step": 7, "kind": "done"}\n')
    assert status(run) == ("stopped", 7)


def test_updated_is_when_the_logs_last_grew(run: Run) -> None:
    assert run.status().updated is None
    log(run, 1)
    os.utime(run.path / "metrics.jsonl", (1000, 1000))
    os.utime(run.path / "samples.jsonl", (9000, 9000))
    run.log_event("start")
    os.utime(run.path / "events.jsonl", (2000, 2000))
    assert run.status().updated == 2000


# ---- the milestones are those of the whole log, whatever was read before


def plainly(file: Path) -> tuple[Any, Any]:
    """The newest milestone and the newest milestone or pause, read from the first line to the last."""
    rows = (
        [row for line in file.read_bytes().split(b"\n") if (row := parsed(line)) is not None] if file.exists() else []
    )
    kinds = [row["kind"] for row in rows]
    return tuple(
        next((row for row, kind in zip(reversed(rows), reversed(kinds), strict=True) if kind in wanted), {})
        for wanted in (MILESTONES, MILESTONES | PAUSES)
    )  # type: ignore[return-value]


def parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


KINDS = ["start", "paused", "stepping", "done", "failed", "sft_paused", *["beta"] * 20]
MESSAGE = st.sampled_from(["", "x" * 300, 'a "start" in words', "C:\\done", "\u00e9"])
WRITTEN = st.tuples(st.sampled_from(KINDS), MESSAGE, st.sampled_from([b"\n", b"\n\n", b"\nno row\n"]))
CHANGE = st.sampled_from(["append", "append", "append", "append", "torn", "cut", "replace", "remove", "escape"])


@given(st.lists(st.tuples(CHANGE, st.lists(WRITTEN, max_size=30)), max_size=8), st.sampled_from([16, 100, 1 << 16]))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_milestones_are_those_of_the_whole_log(tmp_path: Path, changes: Any, block: int) -> None:
    file, numbers = tmp_path / "events.jsonl", itertools.count()
    file.unlink(missing_ok=True)
    kept = MilestoneReader(Journal(file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK", block)
        for change, rows in changes:
            text = b"".join(
                to_json({"kind": kind, "n": next(numbers), "message": message}) + end for kind, message, end in rows
            )
            before = file.read_bytes() if file.exists() else b""
            if change == "remove":
                file.unlink(missing_ok=True)
            elif change == "replace":
                write_atomically(file, text)
            elif change == "cut":
                file.write_bytes(before[: len(before) // 2])
            else:
                words = {"torn": text.rstrip(b"\n"), "escape": text.replace(b'"start"', b'"st\\u0061rt"')}
                before += b"\n" if before and not before.endswith(b"\n") else b""
                file.write_bytes(before + words.get(change, text))
            for reader in (kept, MilestoneReader(Journal(file))):
                found = reader.read()
                assert (found.newest, found.pause) == plainly(file)


def test_a_log_put_in_the_place_of_one_that_ends_alike_is_read_anew(tmp_path: Path) -> None:
    kept, rest = MilestoneReader(Journal(tmp_path / "events.jsonl")), to_json({"kind": "beta", "m": "x" * 900}) + b"\n"
    for kind in ("stopped", "failed", "knob"):
        write_atomically(tmp_path / "events.jsonl", b'{"kind": "' + f'{kind}"'.ljust(9).encode() + b"}\n" + rest)
        assert kept.read().newest.get("kind") == (kind if kind in MILESTONES else None)


@pytest.mark.parametrize("fresh", [False, True])
def test_status_costs_the_same_however_many_events_there_are(
    run: Run, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: lines parsed, and in this process bytes of the event log that are read again."""
    parse, read, counted = Journal._row, lines.backwards, []
    monkeypatch.setattr(Journal, "_row", lambda self, line, end: counted.append(1) or parse(self, line, end))
    monkeypatch.setattr(
        lines,
        "backwards",
        lambda file, end, floor=0, sought=None: (
            counted.append(end - floor if sought else 0) or read(file, end, floor, sought)
        ),
    )
    run.log_event("start", step=0, goal=STEPS)
    with run.lock():
        for n in range(10):
            run.log_event("beta", step=n, message="KL 0.21 above its band")
        run.status()
        few = cost(run, fresh, counted)
        with open(run.path / "events.jsonl", "ab") as file:
            file.writelines(to_json({"kind": "beta", "time": 1.0, "step": n}) + b"\n" for n in range(10_000))
        run.status()
        assert cost(run, fresh, counted) <= few * 3 + (10_000 // 1000 if fresh else 0)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each look at the end of a log: the bytes that are new, and 1 for each line that is parsed."""
    parse, read, counted = Journal._row, lines.backwards, list[int]()
    monkeypatch.setattr(Journal, "_row", lambda self, line, end: counted.append(1) or parse(self, line, end))
    monkeypatch.setattr(
        lines,
        "backwards",
        lambda file, end, floor=0, sought=None: counted.append(end - floor) or read(file, end, floor, sought),
    )
    return counted


def beta(count: int) -> bytes:
    return b"".join(to_json({"kind": "beta", "time": 1.0, "step": n}) + b"\n" for n in range(count))


@pytest.mark.parametrize(
    ("log", "junk"),
    [
        ("events", beta(5_000)),
        ("metrics", b"x\n" * 50_000),
        ("metrics", b'{"step":"x"}\n' * 5_000),
        ("sft", b'{"step":"x"}\n' * 5_000),
        ("metrics", bytes(200_000)),
    ],
    ids=["honest", "short", "no rows", "no rows of sft", "zeros"],
)
def test_what_was_looked_at_once_is_not_looked_at_again(run: Run, log: Log, junk: bytes, looked_at: list[int]) -> None:
    run.log_event("start", step=0, goal=STEPS)
    run.log_metrics({"step": 1, "loss": 0.5})
    run.log_sft({"step": 1, "loss": 0.5})
    with open(run.path / f"{log}.jsonl", "ab") as file:
        file.write(junk)
    os.utime(run.path / f"{log}.jsonl", (1, 1))

    def look(opened: Run) -> None:
        assert (opened.last_step(), opened.last_step("sft"), opened.goal()) == (1, 1, STEPS)
        assert [(found.state, found.step) for found in list_runs(run.path.parent)] == [("stopped", 1)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "SETTLED_NS", -(10**18))
        look(run)
        first = sum(looked_at)
        looked_at.clear()
        look(Run.open(run.path))
    assert first > len(junk) / 2 and sum(looked_at) == 0


def test_a_reader_gives_up_where_too_many_lines_are_no_rows_and_goes_on_with_the_next_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, looked_at: list[int]
) -> None:
    monkeypatch.setattr(journal, "MOST_PASSED", 100)
    run.log_event("start", step=0, goal=STEPS)
    for name, row in (("metrics", b'{"step":"x"}\n'), ("events", b'{"kind":"note","x":{"kind":"start"}}\n')):
        with open(run.path / f"{name}.jsonl", "ab") as file:
            file.write(row * 1_000)
        for _ in range(2):
            with pytest.raises(RunError, match=pattern(f"{name}.jsonl", 100)):
                run.status()
            assert [found.state for found in list_runs(run.path.parent)] == ["unreadable"]
        assert looked_at.count(1) < 300
        run.log_event("start", step=0, goal=STEPS) if name == "events" else run.log_metrics({"step": 1})
        assert run.status().step == 1
        looked_at.clear()
    with pytest.raises(RunError, match=pattern("metrics.jsonl", 100)):
        [*run.newest_first("metrics")]


def test_an_edit_in_place_is_seen(run: Run) -> None:
    run.log_event("failed", step=0, error="x" * 1000)
    run.log_metrics({"step": 1, "status": "x" * 1000})
    assert (run.milestone()["kind"], run.last_step()) == ("failed", 1)
    for name, old, new in (("events", b"failed", b"paused"), ("metrics", b'"step": 1', b'"step": 4')):
        path = run.path / f"{name}.jsonl"
        path.write_bytes(path.read_bytes().replace(old, new))
    assert (run.milestone()["kind"], run.last_step()) == ("paused", 4)


def cost(run: Run, fresh: bool, counted: list[int]) -> int:
    counted.clear()
    (Run.open(run.path) if fresh else run).status()
    return len(counted) if fresh else sum(counted)


# ---- many runs


def test_runs_are_listed_newest_first_and_junk_is_passed_over(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "absent") == []
    for age, name in enumerate(("new", "mid", "old")):
        made = Run.create(tmp_path / name, CONFIG)
        log(made, age + 1)
        os.utime(made.path / "metrics.jsonl", (5000 - age, 5000 - age))
    broken = Run.create(tmp_path / "broken", CONFIG)
    (broken.path / "config.json").write_text("{")
    os.utime(broken.path / "config.json", (1, 1))
    (tmp_path / "junk").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder-as-config" / "config.json").mkdir(parents=True)

    found = {run.name: run for run in list_runs(tmp_path)}
    assert [name for name in found if name in ("new", "mid", "old")] == ["new", "mid", "old"]
    assert set(found) == {"new", "mid", "old", "broken", "folder-as-config"}
    assert (found["mid"].state, found["mid"].step, found["mid"].steps) == ("stopped", 2, STEPS)
    assert found["broken"].state == "unreadable" and "JSON" in str(found["broken"].problem)
    assert found["folder-as-config"].state == "unreadable"


def test_listing_runs_imports_neither_torch_nor_pandas(run: Run) -> None:
    code = (
        "import sys; from grpo_nb.run.listing import list_runs\n"
        f"assert [r.state for r in list_runs({str(run.path.parent)!r})] == ['new']\n"
        "print([m for m in ('torch', 'pandas', 'numpy', 'safetensors', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
