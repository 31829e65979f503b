"""A mirror gives each number once, whatever happens to it or to the run, and never disturbs the training."""

import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb import presets
from grpo_nb.evaluation.evaluate import evaluate
from grpo_nb.run import settings
from grpo_nb.run.run import Run
from grpo_nb.storage.files import flock
from grpo_nb.trackers import mirror, mirroring
from grpo_nb.trackers.tracker import LOGS, About, Tracker
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import sft
from tests.support.stage import PATIENCE, until
from tests.support.tiny import edited, given, small_tasks, stable, tiny_run, weights
from tests.support.tracking import Store

NUMBERS = {"accuracy": {"value": 0.75, "low": 0.5, "high": 1.0}}


def made(folder: Path, *names: str) -> Run:
    return Run.create(folder / "run", presets.demo().replace(**{"run.trackers": names or ("mlflow",)}))


def log(run: Run, *steps: int) -> None:
    for step in steps:
        run.log_metrics({"step": step, "status": "ok", "loss": step / 10})


def evaluation(step: int = 4, mode: str = "greedy") -> dict[str, Any]:
    where = {"stage": "latest", "step": step, "split": "test", "mode": mode, "objective": "fairness"}
    return where | {"metrics": NUMBERS}


def mirrored(run: Run) -> None:
    with mirroring(run):
        pass


def test_numbers_arrive_once_each_under_their_keys(tmp_path: Path, store: Store) -> None:
    run = made(tmp_path)
    run.log_sft({"step": 1, "status": "ok", "loss": 2.5})
    with mirroring(run):
        log(run, 1, 2)
        run.log_evaluation(evaluation())
        run.log_evaluation(evaluation(mode="quick"))
    found = [(point.log, point.step, dict(point.numbers)) for point in store.points["mlflow"]]
    assert sorted(found) == [
        ("evaluations", 4, {"evaluation/latest/test/greedy/fairness/accuracy": 0.75}),
        ("metrics", 1, {"loss": 0.1}),
        ("metrics", 2, {"loss": 0.2}),
        ("sft", 1, {"sft/loss": 2.5}),
    ]
    mirrored(run)
    assert len(store.points["mlflow"]) == 4
    log(run, 3)
    mirrored(Run.open(run.path))
    assert store.steps("mlflow") == [1, 2, 3] and len(store.points["mlflow"]) == 5
    (_, about), *_ = store.abouts
    assert about.name == "run" and about.settings["run.trackers"] == '["mlflow"]' and about.settings["batch.prompts"]
    assert {each.id for _, each in store.abouts} == {about.id} and store.closed == ["mlflow"] * 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_row_that_arrived_right_before_a_kill_is_not_sent_again(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store.answers = made(tmp_path), True
    log(run, 1, 2)
    mirrored(run)
    log(run, 3, 4)
    note = mirror.Mirror._note

    def killed(self: mirror.Mirror) -> None:
        if self._notes.steps["metrics"] == 4:
            raise SystemExit
        note(self)

    with monkeypatch.context() as patch:
        patch.setattr(mirror.Mirror, "_note", killed)
        mirrored(run)
    log(run, 5)
    mirrored(run)
    assert store.steps("mlflow") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("name", "newest", "steps"), [("tensorboard", 4, [5, 6, 7, 8]), ("mlflow", 7, [8])])
def test_steps_trained_again_replace_those_set_aside_where_a_tracker_can(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, name: str, newest: int, steps: list[int]
) -> None:
    run = made(tmp_path, name)
    log(run, *range(1, 8))
    mirrored(run)
    with run.lock():
        run.rewind(4)
    waited = threading.Event()

    def busy_until_trained(fd: int) -> str:
        if run.last_step() != 4:
            return flock(fd)
        waited.set()
        return "busy"

    with monkeypatch.context() as patch:
        patch.setattr(mirror, "flock", busy_until_trained)
        with mirroring(run):  # begun before, and at work after the log is as long again
            assert waited.wait(PATIENCE)
            log(run, *range(5, 9))
    assert store.abouts[-1][1].newest["metrics"] == newest
    assert store.steps(name) == [*range(1, 8), *steps]


def test_a_copy_under_another_name_is_another_run(tmp_path: Path, store: Store) -> None:
    run = made(tmp_path)
    log(run, 1)
    mirrored(run)
    run.path.rename(tmp_path / "other")
    mirrored(Run.open(tmp_path / "other"))
    assert store.steps("mlflow") == [1, 1] and len({about.id for _, about in store.abouts}) == 2


@pytest.mark.parametrize("notes", [b"", b"{", b"[]", b'{"id": 1}', b'{"steps": {"sft": 1e999}}', b"\xff", b"[" * 1000])
def test_damaged_notes_are_none(notes: bytes) -> None:
    assert mirror.Notes.read(notes, "a").steps == {"sft": 0, "metrics": 0}


def test_a_link_in_a_strangers_folder_is_not_followed(tmp_path: Path, store: Store) -> None:
    run, elsewhere = made(tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run.path / mirror.FOLDER).symlink_to(elsewhere)
    log(run, 1)
    mirrored(run)
    assert not store.abouts and not [*elsewhere.iterdir()]


def test_a_snapshot_by_hard_links_is_mirrored_on_its_own(tmp_path: Path, store: Store) -> None:
    run, copy = made(tmp_path), tmp_path / "copies" / "run"
    log(run, 1)
    mirrored(run)
    shutil.copytree(run.path, copy, copy_function=os.link)
    noted = (copy / mirror.FOLDER / "mlflow.json").read_bytes()
    with run.lock():  # where it trains, a log of several names is separated
        log(run, 2)
    mirrored(run)
    assert store.steps("mlflow") == [1, 2] and (copy / mirror.FOLDER / "mlflow.json").read_bytes() == noted


def test_settings_hold_no_secret(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hunter2-4711-abcdefgh")
    config = presets.demo().replace(**{"run.trackers": "mlflow", "model.name": "models/hunter2-4711-abcdefgh"})
    assert "hunter2" not in str(mirror.plain_settings(config))
    assert mirror.plain_settings(config)["sft.steps"] == config.sft.steps


def test_trackers_that_fail_or_hang_change_no_bit_and_are_logged_once(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hunter2-4711-abcdefgh")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(mirror, "END_SECONDS", 0.5)
    monkeypatch.setattr(mirror, "RETRY_SECONDS", 0.01)
    names = ["tensorboard", "wandb", "trackio", "mlflow"]
    store.fails, store.error = {"tensorboard": "open", "wandb": "log", "trackio": "hang"}, "hunter2-4711-abcdefgh?"
    short = {"sft__steps": 1, "run__steps": 2}
    alone, watched = tiny_run(tmp_path, "alone", **short), tiny_run(tmp_path, "watched", **short, run__trackers=names)
    found = []
    (alone.path / "config.json").write_text(json.dumps(without_trackers(alone)))
    for run in (Run.open(alone.path), watched):
        with caplog.at_level(logging.WARNING, "grpo_nb.trackers"):
            list(sft(run, tasks=small_tasks()))
            list(grpo(run, **given()))
        found.append([stable(row) for row in run.metric_rows()])
    assert found[0] == found[1] and len(found[0]) == 2
    one, other = weights(alone), weights(watched)
    assert all(torch.equal(one[key], other[key]) for key in one)
    evaluate(watched, tasks=small_tasks(), limit=2)
    until(lambda: [sorted(store.steps("mlflow", log)) for log in LOGS] == [[1], [1, 2], [2, 2]])
    warned = [r.getMessage() for r in caplog.records if r.name.startswith("grpo_nb.trackers")]
    # by one mirror each of SFT, GRPO and the evaluation
    assert all(1 <= sum(name in text for text in warned) <= 3 for name in names[:3])
    assert "hunter2" not in caplog.text


def test_trackers_may_be_edited_while_a_run_stands_still(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    run.checkpoints.save(0, {"policy": {"w": torch.zeros(2)}}, {"step": 0, "config": without_trackers(run)})
    changed = edited(run, run__trackers=["tensorboard", "mlflow"])
    assert changed.config.run.trackers == ("tensorboard", "mlflow")
    settings.refuse_edited(changed.path, changed.config, changed.checkpoints.load(0))


def without_trackers(run: Run) -> dict[str, Any]:
    """The settings as a version before trackers wrote them."""
    tree = settings.plain(run.config)
    del tree["run"]["trackers"]
    return tree


def test_what_a_package_logs_while_it_tries_again_is_left_out(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    retries, run = logging.getLogger("urllib3.connectionpool"), made(tmp_path)
    opened = store.opened

    def tries_again(name: str, about: About) -> Tracker:
        retries.warning("retrying")
        return opened(name, about)

    monkeypatch.setattr(mirror, "open_tracker", tries_again)
    mirrored(run)
    assert len(store.abouts) == 1 and not caplog.records
    retries.warning("of somebody else")
    assert len(caplog.records) == 1
