"""Runs told apart: new, running, paused, stopped, done, failed, dead; many of them in a list."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_nb.lock import Owner
from grpo_nb.run import Run, list_runs
from tests.kill_points import ROOT
from tests.run_folder import CONFIG, STEPS, log


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
    assert found["broken"].state == "unreadable" and "not valid JSON" in str(found["broken"].problem)
    assert found["folder-as-config"].state == "unreadable"


def test_listing_runs_imports_neither_torch_nor_pandas(run: Run) -> None:
    code = (
        "import sys; from grpo_nb.run import list_runs\n"
        f"assert [r.state for r in list_runs({str(run.path.parent)!r})] == ['new']\n"
        "print([m for m in ('torch', 'pandas', 'numpy', 'safetensors', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
