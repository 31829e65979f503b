"""The run directory: made once, opened anywhere, logged into, rewound without loss."""

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
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb.config import ConfigError
from grpo_nb.run import run as module
from grpo_nb.run.listing import list_runs
from grpo_nb.run.run import Run, RunError
from tests.support.kill_points import ROOT, survives
from tests.support.run_folder import CONFIG, STEPS, files, log, save
from tests.support.tokens import caused_by, pattern


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "demo", CONFIG)


def edit(run: Run, change: Callable[[dict[str, Any]], Any]) -> None:
    file = run.path / "config.json"
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


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
    with pytest.raises(RunError, match=pattern(run.path, "`Run.open`")):
        Run.create(run.path, CONFIG.replace(**{"run.seed": 5}))
    assert files(run.path) == before


def test_a_change_whose_key_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Run.open_or_create(tmp_path / "one", CONFIG, changes={"run.steps": 2, 1: 2})  # type: ignore[dict-item]
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("remains", ["metrics.jsonl", "checkpoints", "sft"])
def test_what_is_left_of_a_run_is_not_built_upon(tmp_path: Path, remains: str) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / remains).touch()
    with pytest.raises(RunError, match=pattern(tmp_path / "demo", remains, "config.json")):
        Run.open_or_create(tmp_path / "demo", CONFIG)


def test_a_folder_with_other_things_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "notes.md").write_text("mine")
    Run.create(tmp_path, CONFIG)
    assert (tmp_path / "notes.md").read_text() == "mine"


def test_two_that_make_the_same_run_at_once_share_it(tmp_path: Path) -> None:
    code = (
        "import sys; from grpo_nb import presets; from grpo_nb.run.run import Run\n"
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
    with pytest.raises(RunError, match=pattern(tmp_path / "dmeo", f"'{tmp_path / 'demo'}'")):
        Run.open(tmp_path / "dmeo")
    with pytest.raises(RunError, match=pattern(tmp_path / "xyz", "demo")):
        Run.open(tmp_path / "xyz")
    (tmp_path / "junk").mkdir()
    with pytest.raises(RunError, match=pattern(tmp_path / "junk", "config.json")):
        Run.open(tmp_path / "junk")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=pattern(tmp_path / "file", "a file", "folder")):
        Run.open(tmp_path / "file")
    with pytest.raises(RunError, match=pattern(tmp_path / "no" / "such", "none")):
        Run.open(tmp_path / "no" / "such")


@pytest.mark.parametrize("content", ['{"run": {"steps": 1', "", "\xff\xfe", "NaNsense"])
def test_a_broken_configuration_is_one_clear_error(run: Run, content: str) -> None:
    (run.path / "config.json").write_bytes(content.encode("latin-1"))
    for opening in (Run.open, Run.open_or_create):
        with pytest.raises(RunError, match=pattern(run.path / "config.json", "JSON")):
            opening(run.path)


def test_a_configuration_that_does_not_validate_says_what(run: Run) -> None:
    edit(run, lambda tree: tree["batch"].update(grup_size=8))
    with pytest.raises(RunError, match=pattern(run.path / "config.json", "'batch.grup_size'")):
        Run.open(run.path)
    edit(run, lambda tree: tree["batch"].pop("grup_size") and tree["batch"].update(group_size=1))
    with pytest.raises(RunError, match=pattern(run.path / "config.json", "batch", "group_size=1")):
        Run.open(run.path)
    (run.path / "config.json").write_text("[1, 2]")
    invalid = pytest.raises(RunError, check=lambda error: isinstance(error.__context__, ConfigError))
    with invalid:
        Run.open(run.path)


# ---- places that cannot be written


def test_a_run_below_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match=pattern(path), check=caused_by(errno.ENOTDIR, errno.EEXIST)):
            Run.open_or_create(path, CONFIG)


def test_a_read_only_file_system_is_one_clear_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(module.Path, "mkdir", refuse)
    with pytest.raises(RunError, match=pattern(run.path.parent / "other"), check=caused_by(errno.EROFS)):
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
                with pytest.raises(RunError, check=caused_by(errno.EACCES)):
                    write()
        assert files(run.path) == before
    finally:
        shutil.rmtree(folder)


# ---- logs


def test_rows_become_tables(run: Run) -> None:
    run.log_metrics({"step": 1, "loss": 0.5, "kl/fairness": float("nan")})
    run.log_metrics({"step": 2, "loss": float("inf"), "status": "ok", "clip_ratio/low": None})
    run.log_samples([{"step": 1, "prompt": [{"role": "user", "content": "NaN"}], "completion": "Infinity"}])
    run.log_samples([])
    run.log_event("knob", step=2, key="temperature", old=1.0, new=0.7, by="dashboard")
    run.log_sft({"step": 1, "loss": 2.0})
    run.log_evaluation({"stage": "base", "rows": [1, 2]})
    metrics = run.metrics()
    assert list(metrics["step"]) == [1, 2] and metrics["loss"][1] == float("inf")
    assert metrics["kl/fairness"].isna().all() and metrics["clip_ratio/low"].isna().all()
    assert metrics["loss"].dtype == float
    assert run.samples()["completion"][0] == "Infinity" and run.samples()["prompt"][0][0]["content"] == "NaN"
    event = run.events().iloc[0]
    assert (event["kind"], event["step"], event["by"]) == ("knob", 2, "dashboard")
    assert abs(event["time"] - time.time()) < 60
    assert list(run.sft_metrics()["loss"]) == [2.0] and run.evaluations()["rows"][0] == [1, 2]
    assert run.last_step() == 2 and [row["step"] for row in run.metric_rows()] == [1, 2]


def test_a_key_in_an_error_stays_out_of_the_log(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_4711abcdefghijklmn")
    for field in ("error", "traceback", "reason"):
        run.log_event("failed", goal=1, **{field: "it raised ValueError: key hf_4711abcdefghijklmn of /tmp/x"})
    assert b"4711" not in (run.path / "events.jsonl").read_bytes()
    assert run.events()["error"][0] == "it raised ValueError: key *** of /tmp/x"


def test_a_torn_row_is_not_the_last_step(run: Run) -> None:
    log(run, 1, 2)
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "loss":')
    assert run.last_step() == 2 and list(run.metrics()["step"]) == [1, 2]


def test_a_checkpoint_brings_the_logs_to_disk_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_nb.storage import journal

    log(run, 1)
    synced: list[str] = []
    monkeypatch.setattr(journal, "sync", lambda path: synced.append(path.name))
    run.checkpoints.save(1, {"policy": {"w": torch.zeros(1)}}, {})
    assert synced == ["metrics.jsonl", "samples.jsonl"]


# ---- going back


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
