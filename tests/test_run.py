"""The run directory: made once, opened anywhere, contradicted never, rewound without loss, told apart by status."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb import presets
from grpo_nb import run as module
from grpo_nb.config import ConfigError
from grpo_nb.lock import Owner
from grpo_nb.run import Run, RunError, list_runs
from tests.kill_points import ROOT, survives

CONFIG = presets.demo()
STEPS = CONFIG.run.steps


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "demo", CONFIG)


def edit(run: Run, change: Callable[[dict[str, Any]], Any]) -> None:
    file = run.path / "config.json"
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


def log(run: Run, *steps: int) -> None:
    for step in steps:
        run.log_samples([{"step": step, "text": "a"}, {"step": step, "text": "b"}])
        run.log_metrics({"step": step, "loss": step / 10})


def write_owner(run: Run, owner: Owner) -> None:
    from dataclasses import asdict

    (run.path / "lock").write_text(json.dumps(asdict(owner)).ljust(1023) + "\n")


def dead_owner() -> Owner:
    return replace(Owner.here(), pid=2**22 + 7)


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The folder as somebody without the right to write sees it; root, who may write anywhere, becomes nobody."""
    was, me = folder.stat().st_mode, os.geteuid()
    folder.chmod(0o555)
    if me == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(me)
        folder.chmod(was)


# ---- made once


def test_a_new_run_is_a_folder_of_readable_files(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "runs" / "first", CONFIG)
    assert run.name == "first" and run.config == CONFIG
    assert json.loads((run.path / "config.json").read_text()) == CONFIG.model_dump(mode="json")
    assert json.loads((run.path / "knobs.json").read_text())["command"]["value"] == "run"
    assert Run.open(str(run.path)).config == CONFIG
    assert run.metrics().empty and list(run.metrics().columns) == ["step"] and run.last_step() is None
    assert repr(run) == f"Run('{run.path}': new, step 0 of {STEPS})"


def test_a_run_is_never_made_twice(run: Run) -> None:
    before = files(run.path)
    with pytest.raises(RunError, match=r"holds a run already; open it \(`Run.open`\), or choose another folder"):
        Run.create(run.path, CONFIG.replace(**{"run.seed": 5}))
    assert files(run.path) == before


@pytest.mark.parametrize("remains", ["metrics.jsonl", "checkpoints", "sft"])
def test_what_is_left_of_a_run_is_not_built_upon(tmp_path: Path, remains: str) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / remains).touch()
    with pytest.raises(RunError, match=f"has {remains} but no config.json; restore config.json, or choose another"):
        Run.open_or_create(tmp_path / "demo", CONFIG)


def test_a_folder_with_other_things_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "notes.md").write_text("mine")
    Run.create(tmp_path, CONFIG)
    assert (tmp_path / "notes.md").read_text() == "mine"


def test_two_that_make_the_same_run_at_once_share_it(tmp_path: Path) -> None:
    code = (
        "import sys; from grpo_nb import presets; from grpo_nb.run import Run\n"
        "run = Run.open_or_create(sys.argv[1], presets.demo()); run.knobs['temperature'].set(float(sys.argv[2]))"
    )
    crowd = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "r"), t], cwd=ROOT, stderr=subprocess.PIPE)
        for t in ("0.5", "0.6", "0.7")
    ]
    assert [writer.communicate()[1] for writer in crowd] == [b""] * 3
    assert Run.open(tmp_path / "r").knobs.snapshot().version == 3


def test_opening_and_watching_writes_nothing(run: Run) -> None:
    log(run, 1, 2)
    before = {p: p.stat().st_mtime_ns for p in run.path.rglob("*")}
    watcher = Run.open(run.path)
    for look in (watcher.metrics, watcher.samples, watcher.events, watcher.sft_metrics, watcher.evaluations):
        look()
    watcher.status(), watcher.knobs.snapshot(), watcher.checkpoints.latest(), list_runs(run.path.parent), repr(watcher)
    assert {p: p.stat().st_mtime_ns for p in run.path.rglob("*")} == before


# ---- opened: missing and broken ones


def test_a_missing_run_names_its_neighbours(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run in .*dmeo: it is missing; did you mean '.*/demo'\?"):
        Run.open(tmp_path / "dmeo")
    with pytest.raises(RunError, match=r"it is missing; runs there: demo"):
        Run.open(tmp_path / "xyz")
    (tmp_path / "junk").mkdir()
    with pytest.raises(RunError, match=r"no run in .*junk: it has no config.json"):
        Run.open(tmp_path / "junk")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"it is a file, not a folder"):
        Run.open(tmp_path / "file")
    with pytest.raises(RunError, match=r"it is missing; runs there: none"):
        Run.open(tmp_path / "no" / "such")


@pytest.mark.parametrize("content", ['{"run": {"steps": 1', "", "\xff\xfe", "NaNsense"])
def test_a_broken_configuration_is_one_clear_error(run: Run, content: str) -> None:
    (run.path / "config.json").write_bytes(content.encode("latin-1"))
    for opening in (Run.open, Run.open_or_create):
        with pytest.raises(
            RunError, match=r"config\.json is not valid JSON \(.*\); restore it, a run never changes it"
        ):
            opening(run.path)


def test_a_configuration_that_does_not_validate_says_what(run: Run) -> None:
    edit(run, lambda tree: tree["batch"].update(grup_size=8))
    with pytest.raises(RunError, match=r"config\.json does not validate: unknown setting 'batch\.grup_size'"):
        Run.open(run.path)
    edit(run, lambda tree: tree["batch"].pop("grup_size") and tree["batch"].update(group_size=1))
    with pytest.raises(RunError, match=r"config\.json does not validate: batch: group_size=1"):
        Run.open(run.path)
    (run.path / "config.json").write_text("[1, 2]")
    with pytest.raises(RunError, match="does not validate"):
        Run.open(run.path)


# ---- contradiction


def test_the_same_settings_are_no_contradiction(run: Run) -> None:
    before = files(run.path)
    for arguments in (
        {},
        {"config": CONFIG},
        {"changes": {"run.seed": CONFIG.run.seed, "algorithm.loss": CONFIG.algorithm.loss}},
        {"config": CONFIG, "changes": {"batch.group_size": CONFIG.batch.group_size}},
        {"config": CONFIG.replace(**{"run.steps": STEPS + 5})},  # a run may always go further
        {"config": CONFIG, "steps": STEPS + 50},
        {"changes": {"run.steps": STEPS}},
    ):
        opened = Run.open_or_create(run.path, **arguments)
        assert opened.config == CONFIG
    assert files(run.path) == before, "config.json itself never changes"


def test_other_settings_are_refused_and_listed_with_both_values(run: Run) -> None:
    log(run, 1)
    other = CONFIG.replace(**{"run.seed": 7})
    with pytest.raises(RunError) as refusal:
        Run.open_or_create(run.path, other, changes={"objectives.fairness.beta": 0.5})
    message = str(refusal.value)
    assert f"run {run.path} was made with other settings, which never change:" in message
    assert f"objectives.fairness.beta: the run has {CONFIG.objectives['fairness'].beta}, asked for 0.5" in message
    assert f"run.seed: the run has {CONFIG.run.seed}, asked for 7" in message
    assert message.count("asked for") == 2
    assert "leave them out to go on with the run as it is, or choose another run folder" in message


def test_single_changes_are_compared_with_the_run_not_with_a_preset(tmp_path: Path) -> None:
    made = Run.open_or_create(tmp_path / "r", CONFIG, changes={"run.seed": 3})
    assert Run.open_or_create(made.path, changes={"run.seed": 3}).config == made.config
    log(made, 1)
    with pytest.raises(RunError, match=r"algorithm\.loss: the run has '.*', asked for 'grpo'"):
        Run.open_or_create(made.path, changes={"algorithm.loss": "grpo"})
    with pytest.raises(RunError, match=r"run\.seed: the run has 3, asked for 0"):
        Run.open_or_create(made.path, CONFIG)


def test_a_changed_number_of_steps_is_refused_with_the_way_to_go_further(run: Run) -> None:
    log(run, 1)
    with pytest.raises(RunError, match=rf"run\.steps: the run has {STEPS}, asked for 7[\s\S]*--steps N\)"):
        Run.open_or_create(run.path, changes={"run.steps": 7})


# ---- corrected, while nothing stands on the settings


WRONG = {"model.name": "no/such-model", "objectives.fairness.beta": 0.5}


def test_settings_may_be_corrected_until_something_was_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run.open_or_create(tmp_path / "r", CONFIG, changes=WRONG, steps=9)
    run.knobs["temperature"].set(0.5)
    version = run.knobs.snapshot().version
    right = Run.open_or_create(run.path, changes={"model.name": "demo", "objectives.fairness.beta": 0.25})
    assert right.config == Run.open(run.path).config
    assert right.config == CONFIG.replace(**{"objectives.fairness.beta": 0.25, "run.steps": 9})
    assert right.knobs["beta/fairness"].value == 0.25, "knobs start from the settings"
    assert right.knobs.snapshot().version > version and right.knobs.snapshot().problem is None
    (event,) = [e for e in right.rows("events") if e["kind"] == "config_changed"]
    assert event["differences"]["model.name"] == ["no/such-model", "demo"] and len(event["differences"]) == 2
    assert "model.name: was 'no/such-model', now 'demo'" in caplog.text
    assert Run.open_or_create(run.path, CONFIG, steps=7, changes={"run.seed": 1}).config.run.steps == 7


def train_a_step(run: Run) -> None:
    log(run, 1)


def train_sft(run: Run) -> None:
    run.sft_checkpoints.save(3, {"policy": {"w": torch.ones(2)}}, {"step": 3})


def measure(run: Run) -> None:
    run.log_evaluation({"stage": "base"})


@pytest.mark.parametrize("work", [train_a_step, train_sft, measure, lambda run: save(run, 0)])
def test_after_any_work_settings_are_frozen(run: Run, work: Callable[[Run], None]) -> None:
    assert not run.has_work()
    work(run)
    before = files(run.path)
    with pytest.raises(RunError, match="never change"):
        Run.open_or_create(run.path, changes=WRONG)
    assert files(run.path) == before


def test_settings_are_not_corrected_under_a_trainer_that_is_loading(run: Run) -> None:
    with run.lock(), pytest.raises(RunError, match="is being trained by this process"):
        Run.open_or_create(run.path, changes=WRONG)
    assert Run.open(run.path).config == CONFIG


def test_a_run_opened_before_a_correction_is_not_trained_with_the_old_settings(run: Run) -> None:
    run.check_settings()
    Run.open_or_create(run.path, changes={"run.seed": 4})
    with pytest.raises(RunError, match=r"changed since the run was opened here:\n  run\.seed: opened with 0, now 4"):
        run.check_settings()


def correct_there(folder: Path) -> None:
    Run.open_or_create(folder, changes={"objectives.fairness.beta": 0.5, "sampling.temperature": 0.5})


def check_old_or_new(folder: Path) -> None:
    correct_there(folder)
    run = Run.open(folder)
    assert (run.knobs["beta/fairness"].value, run.knobs["temperature"].value) == (0.5, 0.5)
    assert run.config.sampling.temperature == 0.5


def test_a_kill_at_any_call_of_a_correction_is_mended_by_asking_again(run: Run) -> None:
    assert survives(correct_there, check_old_or_new, run.path) >= 10


def test_a_knob_out_of_bounds_makes_no_run_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^sampling\.temperature starts the knob 'temperature': .*from 0\.05 to 5"):
        Run.create(tmp_path / "r", CONFIG.replace(**{"sampling.temperature": 9.0}))
    assert not (tmp_path / "r").exists()


def test_a_missing_run_is_made_as_asked_for(tmp_path: Path) -> None:
    assert Run.open_or_create(tmp_path / "a").config == presets.demo()
    assert Run.open_or_create(tmp_path / "b", CONFIG, changes={"run.seed": 3}, steps=9).config == CONFIG.replace(
        **{"run.seed": 3, "run.steps": 9}
    )
    with pytest.raises(ConfigError, match=r"unknown setting 'run\.sed'"):
        Run.open_or_create(tmp_path / "c", CONFIG, changes={"run.sed": 3})
    assert not (tmp_path / "c").exists()
    with pytest.raises(ConfigError, match=r"unknown setting 'run\.sed'"):
        Run.open_or_create(tmp_path / "a", changes={"run.sed": 3})


# ---- places that cannot be written


def test_a_run_below_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match=r"cannot create the run .*a part of this path is a file and not a folder"):
            Run.open_or_create(path, CONFIG)


def test_a_read_only_file_system_is_one_clear_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(module.Path, "mkdir", refuse)
    with pytest.raises(RunError, match=r"cannot create the run .*read-only file system; it is read-only for this user"):
        Run.create(run.path.parent / "other", CONFIG)


def test_a_folder_without_the_right_to_write_is_watched_and_not_written() -> None:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        run = Run.create(folder / "run", CONFIG)
        run.path.chmod(0o755)
        log(run, 1)
        for file in run.path.iterdir():
            file.chmod(0o444)
        before = files(run.path)
        with read_only(run.path):
            watcher = Run.open(run.path)
            assert list(watcher.metrics()["step"]) == [1] and watcher.status().step == 1
            for write in (
                lambda: watcher.log_metrics({"step": 2}),
                lambda: watcher.log_event("x"),
                lambda: watcher.knobs["temperature"].set(0.5),
                lambda: watcher.lock().acquire(),
                lambda: watcher.checkpoints.save(1, {"policy": {"w": torch.zeros(1)}}, {}),
                lambda: watcher.rewind(0),
                lambda: Run.create(run.path / "inner", CONFIG),
            ):
                with pytest.raises(RunError, match="permission denied; it is read-only for this user"):
                    write()
        assert files(run.path) == before
    finally:
        shutil.rmtree(folder)


# ---- logs


def test_rows_become_tables(run: Run) -> None:
    run.log_metrics({"step": 1, "loss": 0.5, "kl/fairness": float("nan")})
    run.log_metrics({"step": 2, "loss": float("inf"), "status": "ok", "clip": None})
    run.log_samples([{"step": 1, "prompt": [{"role": "user", "content": "NaN"}], "completion": "Infinity"}])
    run.log_samples([])
    run.log_event("knob", step=2, key="temperature", old=1.0, new=0.7, by="dashboard")
    run.log_sft({"step": 1, "loss": 2.0})
    run.log_evaluation({"stage": "base", "rows": [1, 2]})
    metrics = run.metrics()
    assert list(metrics["step"]) == [1, 2] and metrics["loss"][1] == float("inf")
    assert metrics["kl/fairness"].isna().all() and metrics["clip"].isna().all()
    assert metrics["loss"].dtype == float
    assert run.samples()["completion"][0] == "Infinity" and run.samples()["prompt"][0][0]["content"] == "NaN"
    event = run.events().iloc[0]
    assert (event["kind"], event["step"], event["by"]) == ("knob", 2, "dashboard")
    assert abs(event["time"] - time.time()) < 60
    assert list(run.sft_metrics()["loss"]) == [2.0] and run.evaluations()["rows"][0] == [1, 2]
    assert run.last_step() == 2 and [row["step"] for row in run.metric_rows()] == [1, 2]


def test_a_torn_row_is_not_the_last_step(run: Run) -> None:
    log(run, 1, 2)
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "loss":')
    assert run.last_step() == 2 and list(run.metrics()["step"]) == [1, 2]


def test_a_checkpoint_brings_the_logs_to_disk_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_nb import journal

    log(run, 1)
    synced: list[str] = []
    monkeypatch.setattr(journal, "sync", lambda path: synced.append(path.name))
    run.checkpoints.save(1, {"policy": {"w": torch.zeros(1)}}, {})
    assert synced == ["metrics.jsonl", "samples.jsonl"]


# ---- going back


def save(run: Run, step: int) -> None:
    run.checkpoints.save(step, {"policy": {"w": torch.full((2,), float(step))}}, {"step": step})


def test_rewinding_sets_aside_what_lies_past_the_step(run: Run) -> None:
    log(run, 1, 2, 3, 4)
    run.log_event("start", step=0)
    run.log_event("checkpoint", step=4)
    for step in (0, 2, 4):
        save(run, step)
    for step in (0, 2, 3, 4):
        run.log_evaluation({"stage": f"step {step}", "step": step})
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 5, "lo')
    kept = (run.path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:2]

    assert run.rewind(2) == {"metrics": 2, "samples": 4, "evaluations": 2}
    assert (run.path / "metrics.jsonl").read_bytes() == b"".join(kept), "kept rows keep their bytes"
    assert list(run.metrics()["step"]) == [1, 2] and list(run.samples()["step"]) == [1, 1, 2, 2]
    discarded = (run.path / "metrics.discarded.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in discarded] == [3, 4]
    assert (run.path / "samples.discarded.jsonl").read_text().count("\n") == 4
    assert len(run.events()) == 2, "events keep everything"
    assert run.checkpoints.steps() == [0, 2] and (run.path / "checkpoints" / "discarded-000004").is_dir()
    assert [row["step"] for row in run.rows("evaluations")] == [0, 2]
    assert run.rewind(2) == {"metrics": 0, "samples": 0, "evaluations": 0}

    log(run, 3)
    assert run.rewind(0) == {"metrics": 3, "samples": 6, "evaluations": 1}
    assert run.last_step() is None
    assert (run.path / "metrics.discarded.jsonl").read_text().count("\n") == 5


def test_sft_is_rewound_by_itself(run: Run) -> None:
    log(run, 1, 2)
    for step in (1, 2, 3):
        run.log_sft({"step": step})
    assert run.rewind_sft(1) == 2
    assert list(run.sft_metrics()["step"]) == [1] and list(run.metrics()["step"]) == [1, 2]
    assert (run.path / "sft.discarded.jsonl").read_text().count("\n") == 2


def rewind_to_two(folder: Path) -> None:
    Run.open(folder).rewind(2)


def check_nothing_lost(folder: Path) -> None:
    run = Run.open(folder)
    checkpoint, damaged = run.checkpoints.latest()
    assert checkpoint is not None and not damaged
    aside = module.Journal(folder / "metrics.discarded.jsonl")
    assert {row["step"] for row in run.metric_rows() + aside.read()} == {1, 2, 3, 4}
    assert checkpoint.step <= (run.last_step() or 0), "no checkpoint knows of steps that the log has not"
    rewind_to_two(folder)
    assert [row["step"] for row in run.metric_rows()] == [1, 2] and [r["step"] for r in aside.read()] == [3, 4]
    assert [row["step"] for row in run.rows("samples")] == [1, 1, 2, 2] and run.checkpoints.steps() == [2]


def test_a_kill_at_any_call_of_a_rewind_loses_nothing(run: Run) -> None:
    log(run, 1, 2, 3, 4)
    save(run, 2)
    save(run, 4)
    assert survives(rewind_to_two, check_nothing_lost, run.path) >= 10


def create_there(folder: Path) -> None:
    Run.create(folder / "r", CONFIG)


def check_whole_or_absent(folder: Path) -> None:
    assert Run.open_or_create(folder / "r", CONFIG).knobs.snapshot().problem is None


def test_a_kill_at_any_call_of_making_a_run_leaves_it_whole_or_absent(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert survives(create_there, check_whole_or_absent, tmp_path / "runs") >= 6


# ---- status


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
