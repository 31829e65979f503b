"""Checkpoints: whole or not there, proven by hashes, through kills, damage, full disks and read-only folders."""

import errno
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from grpo_nb.run import checkpoints as module
from grpo_nb.run.checkpoints import Checkpoints, NotFinite
from grpo_nb.storage.files import RunError
from tests.support import forked
from tests.support.kill_points import ROOT, survives
from tests.support.tokens import caused_by, names, pattern

NAN = float("nan")


def tensors(value: float, size: int = 8) -> dict[str, dict[str, torch.Tensor]]:
    return {"policy": {"w": torch.full((size,), value)}, "optimizer": {"w/step": torch.tensor(value)}}


def save(folder: Path, step: int, value: float | None = None) -> Path:
    return Checkpoints(folder).save(step, tensors(float(step) if value is None else value), {"step": step})


def value_of(folder: Path, step: int) -> float:
    return float(Checkpoints(folder).load(step).tensors("policy")["w"][0])


def newest(folder: Path) -> int | None:
    checkpoint, _ = Checkpoints(folder).latest()
    return checkpoint and checkpoint.step


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def flip(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


# ---- what is not finite is no checkpoint


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["policy", "optimizer"])
def test_what_is_not_finite_is_refused_and_the_good_ones_stay(
    tmp_path: Path, bad: float, dtype: torch.dtype, where: str
) -> None:
    save(tmp_path, 1)
    poisoned = tensors(2.0) | {where: {"a": torch.zeros(2), "b": torch.tensor([1.0, bad, bad], dtype=dtype)}}
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(NotFinite, match=pattern("2 of 3", f"{where}/b")):
        Checkpoints(tmp_path).save(2, poisoned, {"step": 2})
    assert sorted(path.name for path in tmp_path.rglob("*")) == before and newest(tmp_path) == 1


def test_one_that_was_saved_before_they_were_refused_counts_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr("grpo_nb.run.checkpoints._not_finite", lambda name, group: None)
    save(tmp_path, 2, NAN)
    monkeypatch.undo()
    assert newest(tmp_path) == 2, "its hashes are right"
    good, ((path, reason),) = Checkpoints(tmp_path).latest(finite=True)
    assert good is not None and good.step == 1 and path.name == "000002"
    assert names(reason, "8 of 8", "policy/w") or names(reason, "optimizer/w/step")


# ---- what is saved comes back


def test_tensors_and_state_come_back_to_the_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    saved = {
        "policy": {
            "float32": torch.randn(3, 5, generator=generator),
            "bfloat16": torch.randn(7, generator=generator).bfloat16(),
            "transposed": torch.randn(4, 2, generator=generator).T,
            "empty": torch.empty(0),
        },
        "optimizer": {"step": torch.tensor(3, dtype=torch.int64)},
        "nothing": {},
    }
    state = {"step": 40, "beta": 0.1 + 0.2, "window": (1e-300, NAN, float("-inf")), "text": "NaN", "none": None}
    Checkpoints(tmp_path / "c").save(40, saved, state)

    checkpoint, damaged = Checkpoints(tmp_path / "c").latest()
    assert checkpoint is not None and checkpoint.step == 40 and not damaged
    assert checkpoint.path.name == "000040" and checkpoint.names() == ["nothing", "optimizer", "policy"]
    for name, group in saved.items():
        loaded = checkpoint.tensors(name)
        assert loaded.keys() == group.keys()
        for key, tensor in group.items():
            assert loaded[key].dtype == tensor.dtype and loaded[key].shape == tensor.shape
            assert torch.equal(loaded[key].nan_to_num(9), tensor.nan_to_num(9))
    back = checkpoint.state()
    assert back["beta"] == 0.1 + 0.2 and back["text"] == "NaN" and back["none"] is None
    assert back["window"][0] == 1e-300 and back["window"][1] != back["window"][1] and back["window"][2] == -float("inf")


def test_tensors_that_share_memory_are_saved_apart(tmp_path: Path) -> None:
    one = torch.arange(6.0)
    Checkpoints(tmp_path).save(1, {"policy": {"all": one, "view": one.view(2, 3), "again": one}}, {})
    loaded = Checkpoints(tmp_path).load(1).tensors("policy")
    assert torch.equal(loaded["all"], one) and torch.equal(loaded["view"], one.view(2, 3))


def test_other_files_belong_to_the_checkpoint_and_are_verified(tmp_path: Path) -> None:
    def adapter(folder: Path) -> None:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "adapter_config.json").write_text("{}")

    path = Checkpoints(tmp_path).save(1, tensors(1), {}, adapter)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"]["adapter/adapter_config.json"]["bytes"] == 2
    assert set(manifest["files"]) == {
        "adapter/adapter_config.json",
        "optimizer.safetensors",
        "policy.safetensors",
        "state.json",
    }
    (path / "adapter" / "adapter_config.json").write_text("[]")
    with pytest.raises(RunError, match=pattern("adapter_config.json", "manifest")):
        Checkpoints(tmp_path).load(1)


def test_nothing_is_pickled(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


def test_an_unknown_set_or_step_names_what_there_is(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with pytest.raises(RunError, match=pattern("'adapter.safetensors'", "['optimizer', 'policy']")):
        Checkpoints(tmp_path).load(10).tensors("adapter")
    with pytest.raises(RunError, match=pattern(20, tmp_path, "[10]")):
        Checkpoints(tmp_path).load(20)


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "absent")
    assert (
        store.latest() == (None, []) and store.steps() == [] and store.prune(1) == [] and store.discard_after(0) == []
    )
    assert not (tmp_path / "absent").exists()


def test_steps_beyond_six_digits_sort_as_numbers(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        save(tmp_path, step)
    assert newest(tmp_path) == 1_000_000


def test_the_logs_are_synced_before_the_checkpoint_is_there(tmp_path: Path) -> None:
    seen: list[bool] = []
    store = Checkpoints(tmp_path, before_save=lambda: seen.append((tmp_path / "000001").exists()))
    store.save(1, tensors(1), {})
    assert seen == [False]


# ---- damage is seen, named and passed over


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one bit flipped": (lambda p: flip(p / "policy.safetensors"), "policy.safetensors"),
    "file cut": (lambda p: os.truncate(p / "policy.safetensors", 10), "policy.safetensors has 10 bytes"),
    "file missing": (lambda p: (p / "optimizer.safetensors").unlink(), "optimizer.safetensors"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json"),
    "manifest cut": (lambda p: os.truncate(p / "manifest.json", 40), "manifest.json"),
    "manifest of another shape": (lambda p: (p / "manifest.json").write_text("[1]"), "manifest.json"),
    "state edited": (lambda p: (p / "state.json").write_text('{"step": 99}'), "state.json"),
    "another step's folder": (lambda p: shutil.copytree(p.parent / "000010", p, dirs_exist_ok=True), "step"),
    "a file in a folder's place": (
        lambda p: ((p / "policy.safetensors").unlink(), (p / "policy.safetensors").mkdir()),
        "policy.safetensors",
    ),
}


@pytest.mark.ux(11, at="unit")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 10)
    path = save(tmp_path, 20)
    break_it, reason = DAMAGES[damage]
    break_it(path)
    checkpoint, damaged = Checkpoints(tmp_path).latest()
    assert checkpoint is not None and checkpoint.step == 10
    assert [d.path for d in damaged] == [path] and reason in damaged[0].reason
    with pytest.raises(RunError, match=pattern(path, reason)):
        Checkpoints(tmp_path).load(20)


def test_junk_beside_checkpoints_is_ignored(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "000099.bak").mkdir()
    (tmp_path / "latest").mkdir()
    assert Checkpoints(tmp_path).latest()[1] == [] and newest(tmp_path) == 10


def test_a_file_named_like_a_checkpoint_is_damage(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "000020").write_text("")
    checkpoint, damaged = Checkpoints(tmp_path).latest()
    assert checkpoint is not None and checkpoint.step == 10 and [d.path.name for d in damaged] == ["000020"]


# ---- saving over, going back, pruning


def test_the_same_step_saved_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 10, 1.0)
    save(tmp_path, 10, 2.0)
    assert value_of(tmp_path, 10) == 2.0 and hidden(tmp_path) == []


def test_a_damaged_one_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    save(tmp_path, 10)
    flip(save(tmp_path, 20) / "state.json")
    save(tmp_path, 20, 5.0)
    assert value_of(tmp_path, 20) == 5.0


def test_going_back_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    store = Checkpoints(tmp_path)
    assert store.discard_after(10) == [20, 30]
    assert newest(tmp_path) == 10 and (tmp_path / "discarded-000030" / "manifest.json").exists()
    save(tmp_path, 20, 7.0)
    assert store.discard_after(10) == [20]  # a second time: the newer one takes the place
    assert module.Checkpoint(20, tmp_path / "discarded-000020").tensors("policy")["w"][0] == 7.0
    save(tmp_path, 30)
    store.prune(5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000010", "000030"]  # the run has passed them again


def test_pruning_keeps_the_newest_and_where_the_run_started(tmp_path: Path) -> None:
    for step in (0, 10, 20, 30, 40):
        save(tmp_path, step)
    assert Checkpoints(tmp_path).prune(2) == [10, 20]
    assert Checkpoints(tmp_path).steps() == [0, 30, 40]
    assert Checkpoints(tmp_path).prune(1, always=()) == [0, 30]
    assert Checkpoints(tmp_path).prune(0) == [] and newest(tmp_path) == 40


def test_pruning_never_takes_the_last_good_one_for_damaged_newer_ones(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    for step in (30, 40):
        flip(tmp_path / f"{step:06d}" / "policy.safetensors")
    assert Checkpoints(tmp_path).prune(1) == [10]
    assert newest(tmp_path) == 20
    save(tmp_path, 50)
    Checkpoints(tmp_path).prune(1)
    assert Checkpoints(tmp_path).steps() == [50] and newest(tmp_path) == 50


def test_pruning_does_not_count_unfinished_ones(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "000020" / "manifest.json").unlink()
    assert Checkpoints(tmp_path).prune(2) == [20]
    assert Checkpoints(tmp_path).steps() == [10, 30]


def test_with_nothing_that_verifies_nothing_is_pruned(tmp_path: Path) -> None:
    for step in (10, 20):
        flip(save(tmp_path, step) / "policy.safetensors")
    assert Checkpoints(tmp_path).prune(1) == [] and Checkpoints(tmp_path).steps() == [10, 20]


# ---- refusals


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    before = sorted(tmp_path.rglob("*"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=module.SPARE_BYTES + 3_000))
    Checkpoints(tmp_path).save(20, tensors(1.0, size=8), {})  # fits
    with pytest.raises(RunError, match=pattern("17 MiB", "16 MiB", "run.keep_checkpoints")):
        Checkpoints(tmp_path).save(30, tensors(1.0, size=300_000), {})
    assert newest(tmp_path) == 20 and sorted(tmp_path.glob("000010/*")) == [
        p for p in before if p.parent.name == "000010"
    ]
    assert hidden(tmp_path) == []


def test_the_space_of_other_files_is_learned_from_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Checkpoints(tmp_path).save(
        10, tensors(1.0), {}, lambda folder: (folder / "big").write_bytes(bytes(5 << 20)) and None
    )
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=module.SPARE_BYTES + (4 << 20)))
    with pytest.raises(RunError, match=pattern("21 MiB", "20 MiB")):
        Checkpoints(tmp_path).save(20, tensors(1.0), {})


def test_a_disk_that_fills_up_under_the_tensors_says_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(RunError, match=r"\([\d,]+ bytes\b"):
        save(tmp_path, 10)


def test_a_disk_that_fills_up_on_the_way_leaves_no_trace(tmp_path: Path) -> None:
    save(tmp_path, 10)

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    said = r"\([\d,]+ bytes\b.*\brun\.keep_checkpoints\b"
    with pytest.raises(RunError, match=said):
        Checkpoints(tmp_path).save(20, tensors(1), {}, full)
    assert newest(tmp_path) == 10 and hidden(tmp_path) == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_save_leaves_no_trace(tmp_path: Path, interruption: type[BaseException]) -> None:
    def stop(_: Path) -> None:
        raise interruption

    save(tmp_path, 10)
    with pytest.raises(interruption):
        Checkpoints(tmp_path).save(10, tensors(2.0), {}, stop)
    assert value_of(tmp_path, 10) == 10.0 and hidden(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=pattern(tmp_path / "file" / "checkpoints"), check=caused_by(errno.ENOTDIR)):
        save(tmp_path / "file" / "checkpoints", 1)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(module.Path, "mkdir", read_only)
    with pytest.raises(RunError, match=pattern(tmp_path / "checkpoints"), check=caused_by(errno.EROFS)):
        save(tmp_path / "checkpoints", 1)


KNOBS = {"values": {"temperature": 1.0}, "modes": {"temperature": "manual"}, "command": "run", "version": 3}
KNOBS |= {"by": {"command": "me"}, "at": {"command": 1.5}}
STATE_OF_STEP_2 = {"step": 2, "betas": {"fairness": {"value": 0.1, "window": [0.1], "mode": "auto"}}, "knobs": KNOBS}
WRONG_STATES: dict[str, tuple[dict[str, Any], str]] = {
    "a text as step": ({"step": "2"}, "step"),
    "another step": ({"step": 3}, "of step 3"),
    "no knobs": ({"knobs": None}, "knobs"),
    "a knob that is a text": ({"knobs": KNOBS | {"values": {"temperature": "1"}}}, "knobs.values.temperature"),
    "a knob that is no number": ({"knobs": KNOBS | {"values": {"temperature": NAN}}}, "knobs.values.temperature"),
    "another command": ({"knobs": KNOBS | {"command": "rm"}}, "knobs.command"),
    "a field of no knobs": ({"knobs": KNOBS | {"path": "/etc"}}, "knobs.path"),
    "a beta that is infinite": ({"betas": {"fairness": {"value": float("inf")}}}, "betas.fairness.value"),
    "a beta without value": ({"betas": {"fairness": {}}}, "betas.fairness.value"),
    "moments that are a list": ({"reward_moments": {"fairness": [1, 2]}}, "reward_moments.fairness"),
    "judges that are numbers": ({"judged_by": {"fairness": [1]}}, "judged_by.fairness.0"),
    "settings that are a text": ({"config": "demo"}, "config"),
}


@pytest.mark.parametrize("name", WRONG_STATES)
def test_a_state_whose_hash_is_right_is_read_through_a_schema(tmp_path: Path, name: str) -> None:
    change, where = WRONG_STATES[name]
    folder = Checkpoints(tmp_path / "c")
    folder.save(2, {"policy": {"w": torch.zeros(2)}}, STATE_OF_STEP_2)
    assert folder.load(2).state("step", "knobs") == STATE_OF_STEP_2
    with pytest.raises(RunError, match=r"lacks judged_by, more"):
        folder.load(2).state("step", "judged_by", "more")
    folder.save(2, {"policy": {"w": torch.zeros(2)}}, STATE_OF_STEP_2 | change)
    with pytest.raises(RunError, match=f"state.json is broken.*{where}"):
        folder.load(2).state()


def test_state_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=pattern("'sampler.rng'", "Generator")):
        Checkpoints(tmp_path).save(1, tensors(1), {"sampler": {"rng": torch.Generator()}})
    assert Checkpoints(tmp_path).steps() == [] and hidden(tmp_path) == []


# ---- kills


def save_30(folder: Path) -> None:
    save(folder, 30, 3.0)


def save_20_again(folder: Path) -> None:
    save(folder, 20, 3.0)


def prune_to_one(folder: Path) -> None:
    Checkpoints(folder).prune(1)


def go_back(folder: Path) -> None:
    Checkpoints(folder).discard_after(0)


def check_10_and_20_or_newer(folder: Path) -> None:
    """The old ones are whole, the new one is whole or absent, nothing counts as damaged, and life goes on."""
    checkpoint, damaged = Checkpoints(folder).latest()
    assert not damaged, damaged
    assert checkpoint is not None and checkpoint.step in (20, 30)
    assert value_of(folder, 10) == 10.0
    assert value_of(folder, 20) in (20.0, 3.0)
    assert checkpoint.step == 20 or value_of(folder, 30) == 3.0
    save(folder, 40)
    assert hidden(folder) == [], "leftovers of the killed writer"
    assert Checkpoints(folder).steps() in ([10, 20, 40], [10, 20, 30, 40])


def check_20_is_the_newest(folder: Path) -> None:
    checkpoint, damaged = Checkpoints(folder).latest()
    assert checkpoint is not None and checkpoint.step == 20 and not damaged
    assert [value_of(folder, step) for step in Checkpoints(folder).steps()] in ([10.0, 20.0], [20.0]), "half deleted"
    Checkpoints(folder).prune(1)
    assert Checkpoints(folder).steps() == [20] and hidden(folder) == []


def check_no_jump(folder: Path) -> None:
    """Going back was interrupted: what is left counts from the oldest, so a resume cannot skip ahead."""
    assert Checkpoints(folder).steps() in ([10, 20], [10], [])
    Checkpoints(folder).discard_after(0)
    assert {p.name for p in folder.iterdir()} == {"discarded-000010", "discarded-000020"}


@pytest.mark.ux(11, at="unit")
@pytest.mark.parametrize(
    ("action", "check", "at_least"),
    [
        (save_30, check_10_and_20_or_newer, 10),
        (save_20_again, check_10_and_20_or_newer, 12),
        (prune_to_one, check_20_is_the_newest, 4),
        (go_back, check_no_jump, 2),
    ],
    ids=["save", "save again", "prune", "go back"],
)
def test_a_kill_at_any_call_loses_nothing(
    tmp_path: Path, action: Callable[[Path], None], check: Callable[[Path], None], at_least: int
) -> None:
    folder = tmp_path / "checkpoints"
    for step in (10, 20):
        save(folder, step)
    assert survives(action, check, folder) >= at_least


WRITER = """
import sys, torch
from pathlib import Path
from grpo_nb.run.checkpoints import Checkpoints, NotFinite
store = Checkpoints(Path(sys.argv[1]))
for step in range(1, 100_000):
    print(step, flush=True)
    store.save(step % 7 + 1, {"policy": {"w": torch.full((500_000,), float(step))}}, {"value": float(step)})
"""


@pytest.mark.ux(11, at="unit")
def test_kill_9_while_saving_over_and_over(tmp_path: Path) -> None:
    """A busy writer killed at moments drawn at random: whatever is there afterwards is whole and consistent."""
    draw, folder, started = random.Random(0), tmp_path / "c", 0
    for _ in range(3):
        child = subprocess.Popen(forked.command("-c", WRITER, str(folder)), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(8):
            started = int(child.stdout.readline())
        time.sleep(draw.uniform(0.0, 0.03))
        child.kill()
        child.communicate()
        checkpoint, damaged = Checkpoints(folder).latest()
        assert checkpoint is not None and damaged == [] and started >= 8
        for step in Checkpoints(folder).steps():
            whole = Checkpoints(folder).load(step)
            assert whole.tensors("policy")["w"].unique().tolist() == [whole.state()["value"]]
    save(folder, 8)
    assert hidden(folder) == []


def test_checkpoints_stay_within_a_limit_of_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each takes a little more than 4 MiB: of five, step 0, the newest and one more fit into 13 MiB."""
    store = Checkpoints(tmp_path / "checkpoints")
    for step in (0, 10, 20, 30, 40):
        store.save(step, {"policy": {"w": torch.zeros(1 << 20)}}, {"step": step})
    assert store.prune(9, most_gib=1.0) == []
    assert store.prune(9, most_gib=13 / 2**10) == [10, 20] and store.steps() == [0, 30, 40]
    assert not caplog.records
    assert store.prune(9, (0, 30), most_gib=1 / 2**10) == [] and names(caplog.text, "run.checkpoints_gib", 0.01)
    assert store.prune(9, most_gib=1 / 2**10) == [30] and store.steps() == [0, 40]
    assert len(caplog.records) == 1, "told once"
