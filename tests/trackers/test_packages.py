"""The real packages, without a network: what they read back is what the logs hold, once each, after kill and resume."""

import json
import math
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from grpo_nb import presets
from grpo_nb.config.trackers import PACKAGES
from grpo_nb.run.run import Run
from grpo_nb.trackers import mirror, mirroring, to_tensorboard
from grpo_nb.trackers.tracker import About
from tests.support import forked, ranks
from tests.support.tiny import tiny_config, tiny_run
from tests.trackers.test_mirror import evaluation

# in the thread of a mirror, a package's warning must not become the error that ends it
pytestmark = pytest.mark.filterwarnings("ignore")

Values = dict[str, list[tuple[int, float]]]
"""Key -> steps and values, in the order in which they were written."""
AGAIN = 100.0
"""What is added to the rewards of steps that are trained again."""
EVALUATION = "evaluation/latest/test/greedy/fairness/accuracy"


def needs(name: str) -> Any:
    """Skips where no package of a tracker is installed."""
    return pytest.mark.skipif(not _installed(name), reason=f'needs {name}: pip install "grpo_nb[{name}]"')


def _installed(name: str) -> bool:
    for distribution in PACKAGES[name].distributions:
        try:
            return bool(version(distribution))
        except PackageNotFoundError:
            continue
    return False


def rows(run: Run, first: int, last: int, more: float = 0.0) -> None:
    for step in range(first, last + 1):
        numbers = {"kl/fairness": math.nan if step == 2 else step / 8, "reward/fairness/mean": step / 4 + more}
        run.log_metrics({"step": step, "status": "ok", **numbers})


def mirrored_in_two_parts(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Seven steps, of which the last three are set aside and trained again; an evaluation after them."""
    monkeypatch.setattr(mirror, "END_SECONDS", 120.0)
    run = Run.create(folder / "run", tiny_config(run__trackers=name))
    run.log_sft({"step": 1, "status": "ok", "loss": 2.5})
    run.log_sft({"step": 2, "status": "ok", "loss": 2.25})
    with mirroring(run):
        rows(run, 1, 7)
    with run.lock():
        run.rewind(4)
    run = Run.open(run.path)
    with mirroring(run):
        rows(run, 5, 9, AGAIN)
    with mirroring(run):
        run.log_evaluation(evaluation(9))
    return run


def same(found: Values, again: int = 8) -> None:
    """Each number once, at its step; from step `again` on those of the second training."""
    assert found["sft/loss"] == [(1, 2.5), (2, 2.25)]
    assert found["reward/fairness/mean"] == [
        (step, step / 4 + (AGAIN if step >= again else 0)) for step in range(1, 10)
    ]
    steps = [step for step, _ in found["kl/fairness"]]
    assert [step for step in steps if step != 2] == [1, *range(3, 10)]
    assert [value for _, value in found[EVALUATION]] == [0.75]


def read_tensorboard(run: Path) -> Values:
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    found: Values = {}
    for folder in sorted((run / "trackers" / "tensorboard").iterdir()):
        events = accumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        for key in events.Tags()["scalars"]:
            found[key] = [(event.step, event.value) for event in events.Scalars(key)]
    return found


@needs("tensorboard")
def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = mirrored_in_two_parts(tmp_path, "tensorboard", monkeypatch)
    found = read_tensorboard(run.path)
    same(found, again=5)
    assert math.isnan(dict(found["kl/fairness"])[2])


@needs("tensorboard")
def test_settings_that_a_kill_cut_off_are_written_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    about = About("id", "run", tmp_path / "tensorboard", {"batch.prompts": 4}, 0, {})

    def killed(*text: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SummaryWriter, "add_text", killed)
        to_tensorboard.TensorBoard(about)
    assert [*tmp_path.rglob("events.*")] and not about.folder.exists()
    for _ in range(2):
        to_tensorboard.TensorBoard(about).close()
    (events,) = tmp_path.rglob("events.*")
    assert events.parent == about.folder / "settings" and b"batch.prompts" in events.read_bytes()


@pytest.mark.slow
@needs("mlflow")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("alembic", reason='needs a local store: pip install "grpo_nb[mlflow]"')
    run = mirrored_in_two_parts(tmp_path, "mlflow", monkeypatch)
    client, (one,) = read_mlflow(tmp_path)
    same(
        {key: [(m.step, m.value) for m in client.get_metric_history(one.info.run_id, key)] for key in one.data.metrics}
    )
    assert one.data.params["batch.group_size"] == str(run.config.batch.group_size)
    assert (one.data.tags["mlflow.runName"], one.info.status) == ("run", "FINISHED")


def read_mlflow(folder: Path) -> tuple[Any, list[Any]]:
    client: Any = import_module("mlflow").MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    return client, client.search_runs([client.get_experiment_by_name("grpo_nb").experiment_id])


@pytest.mark.slow
@needs("wandb")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "4711abcdef" * 4)
    run = mirrored_in_two_parts(tmp_path, "wandb", monkeypatch)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    records = [record for file in files for record in read_wandb(file)]
    found, positions, ids = Values(), list[int](), set[tuple[str, str]]()
    for record in records:
        kind = record.WhichOneof("record_type")
        if kind == "run":
            ids.add((record.run.run_id, record.run.display_name))
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            assert config["batch.group_size"] == run.config.batch.group_size
        if kind == "history":
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            positions.append(row["_step"])
            axis = "grpo/step" if "grpo/step" in row else "sft/step"
            for key, value in row.items():
                found.setdefault(key, []).append((row[axis], value))
        if kind == "summary":
            for item in record.summary.update:
                if item.key == EVALUATION:
                    found[EVALUATION] = [(9, json.loads(item.value_json))]
    same(found)
    assert positions == sorted({*positions}) and len(ids) == 1 and ids.pop()[1] == "run"
    written = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file())
    assert b"4711abcdef" not in written


def read_wandb(file: Path) -> Iterator[Any]:
    """Records of an offline run: parts of at most a block, each with check sum, length and kind before it."""
    record_of, data = import_module("wandb.proto.wandb_internal_pb2").Record, file.read_bytes()
    block, head, place, whole = 1 << 15, 7, 7, b""
    while place + head <= len(data):
        if block - place % block < head:
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + head])
        whole += data[place + head : place + head + length]
        place += head + length
        if kind in (1, 4):  # complete, or the last part
            yield record_of.FromString(whole)
            whole = b""


@pytest.mark.slow
@needs("trackio")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    mirrored_in_two_parts(tmp_path, "trackio", monkeypatch)
    store = import_module("trackio.sqlite_storage").SQLiteStorage
    (name,) = store.get_runs("grpo_nb")
    found = Values()
    for row in store.get_logs("grpo_nb", name):
        for key, value in row.items():
            found.setdefault(key, []).append((row["step"], value))
    same(found)
    assert name.startswith("run ") and capsys.readouterr().out == ""


@pytest.mark.slow
@needs("tensorboard")
def test_a_training_that_is_killed_and_resumed_is_mirrored_once(tmp_path: Path) -> None:
    names = ["tensorboard"] + ["mlflow"] * _installed("mlflow")
    config = tiny_config(run__steps=12, run__checkpoint_every=4)
    flags = [f"--set={key}={json.dumps(mine)}" for key, (mine, _) in config.differences(presets.demo()).items()]
    command = forked.command("-m", "grpo_nb", "train", str(tmp_path / "run"), "--preset", "demo", *flags)
    command.append(f"--set=run.trackers={json.dumps(names)}")
    log = tmp_path / "run" / "metrics.jsonl"
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") >= 7):
        time.sleep(0.01)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    run = Run.open(tmp_path / "run")
    wanted = [(row["step"], row["lr"]) for row in run.metric_rows()]
    assert [step for step, _ in wanted] == [*range(1, 13)]
    found = read_tensorboard(run.path)["lr"]
    assert [step for step, _ in found] == [*range(1, 13)]
    assert [value for _, value in found] == pytest.approx([value for _, value in wanted])
    if "mlflow" in names:
        client, (one,) = read_mlflow(tmp_path)
        assert [(m.step, m.value) for m in client.get_metric_history(one.info.run_id, "lr")] == wanted


@pytest.mark.slow
@needs("tensorboard")
def test_of_several_ranks_the_first_alone_mirrors(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__trackers="tensorboard", run__steps=2)
    assert [rank.status for rank in ranks.train(2, run.path, sft=False)] == [0, 0]
    assert [row["step"] for row in run.metric_rows()] == [1, 2]
    assert len([*(run.path / "trackers" / "tensorboard" / "grpo").iterdir()]) == 1
    assert [step for step, _ in read_tensorboard(run.path)["lr"]] == [1, 2]
