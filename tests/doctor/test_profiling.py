"""A profile says where a step's time goes and leaves the run alone; debug mode says what it cannot switch on."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grpo_nb.cli import main
from grpo_nb.doctor import debug_mode, debugging, memory_snapshot, profile, profiling
from grpo_nb.doctor.profiling import PHASE_RANGE, Operator, Profile
from grpo_nb.rules.history import PHASES
from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo
from tests.support.tiny import small_worlds, tiny_run
from tests.support.tokens import names


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, narrow_model: None) -> Iterator[Run]:
    """A run of one step; a profile's copy of it writes a world of its own."""
    with small_worlds():
        run = tiny_run(tmp_path_factory.mktemp("profiled"), run__steps=1, sampling__max_completion_length=4)
        for _ in grpo(run):
            pass
        yield run


def files_of(run: Run) -> dict[str, bytes]:
    paths = (path for path in run.path.rglob("*") if path.is_file() and path.name != "trace.json.gz")
    return {str(path): path.read_bytes() for path in paths}


def test_a_profile_has_every_phase_and_changes_nothing_in_the_run(run: Run) -> None:
    before = files_of(run)
    found = profile(run, steps=1)
    assert files_of(run) == before
    assert {*PHASES} <= found.seconds.keys() and all(seconds > 0 for seconds in found.seconds.values())
    rows = found.rows()
    assert {row["phase"] for row in rows} >= {"rollout", "reference", "train"}
    train = {row["operator"]: row for row in rows if row["phase"] == "train"}
    assert any("mm" in name for name in train), "the matrix products of the backward pass, which is another thread"
    assert sum(row["share"] for row in train.values()) == pytest.approx(1.0)
    with gzip.open(found.trace) as file:
        events = json.load(file)["traceEvents"]
    named = {event.get("name", "") for event in events}
    assert found.trace == run.path / "trace.json.gz"
    assert {f"{PHASE_RANGE}{phase}" for phase in PHASES} <= named
    assert found.memory.tensors
    assert found.rates is not None and found.rates.bandwidth > 0 and found.rates.products > 0
    floors = {floor.phase: floor for floor in found.floors}
    assert floors.keys() == {"rollout", "train"}
    assert all(floor.floor > 0 and floor.seconds == found.seconds[phase] for phase, floor in floors.items())
    (row,) = [row for row in found.phase_rows() if row["phase"] == "train"]
    assert row["share of floor"] == pytest.approx(floors["train"].floor / found.seconds["train"])


def test_the_command_prints_phases_operators_and_the_trace(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, int]] = []

    def made(run: Run, steps: int, *, out: str | None) -> Profile:
        asked.append((run.path, steps))
        return Profile(steps, {"train": 0.25}, [Operator("train", "aten::mm", 4, 0.2, 0.0)], Path(str(out)), snapshot)

    kept = torch.zeros(3)
    snapshot = memory_snapshot()
    monkeypatch.setattr(profiling, "profile", made)
    call = ["profile", str(run.path), "--steps", "1", "--out", "t.json.gz"]
    assert main([*call, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"run": str(run.path), "trace": "t.json.gz", "seconds": {"train": 0.25}}
    assert main([*call, "--memory"]) == 0
    assert names(capsys.readouterr().out, "train", "aten::mm", 0.25, "t.json.gz", "MiB")
    assert asked == [(run.path, 1)] * 2 and kept.numel()


def test_a_snapshot_names_the_largest_tensor_once() -> None:
    large = torch.zeros(311, 1021, dtype=torch.float64)
    view = large[:10]
    found = memory_snapshot()
    (row,) = [held for held in found.tensors if held.dtype == "float64" and held.mib == large.nbytes / 2**20]
    assert row.count == 1 and row.device == "cpu" and view.shape[0] == 10
    assert found.allocated_mib >= row.mib and found.rows()[0]["MiB"] >= row.mib


@pytest.fixture
def debugging_over(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in debugging.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    debug_mode(False)


@pytest.mark.usefixtures("debugging_over")
def test_debug_mode_sets_what_is_read_at_the_start_and_names_a_nan() -> None:
    mode = debug_mode()
    assert {*debugging.VARIABLES} <= {*mode.on} and mode.too_late == ()
    assert {name: os.environ[name] for name in debugging.VARIABLES} == debugging.VARIABLES
    x = torch.zeros(1, requires_grad=True)
    with pytest.raises(RuntimeError, match="nan"):
        (0 * x.sqrt() / x).backward()
    assert debug_mode(False).on == () and not debugging.VARIABLES.keys() & os.environ.keys()
    (0 * x.sqrt() / x).backward()


@pytest.mark.usefixtures("debugging_over")
def test_debug_mode_says_what_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    mode = debug_mode()
    assert mode.too_late == tuple(debugging.VARIABLES) and "CUDA_LAUNCH_BLOCKING" in str(mode)
    assert mode.on == ("anomaly detection",)
