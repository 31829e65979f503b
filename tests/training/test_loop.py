"""The loop of SFT and GRPO: saved at step boundaries only, by the lock's owner only, whatever interrupts it."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from grpo_nb import optim, release
from grpo_nb.evaluation.evaluate import evaluate
from grpo_nb.jupyter import workers
from grpo_nb.jupyter.start import start
from grpo_nb.policy import adapters
from grpo_nb.policy.model import ModelError, Policy, load_policy
from grpo_nb.report import report
from grpo_nb.run import checkpoints
from grpo_nb.run.checkpoints import NotFinite
from grpo_nb.run.lock import RunLocked
from grpo_nb.run.run import Run, RunError
from grpo_nb.training import parts, rollback
from grpo_nb.training.grpo import grpo
from grpo_nb.training.guards import TrainingError
from grpo_nb.training.sft import sft
from tests.support.tiny import REWARDS, rows, small_tasks, tiny_run
from tests.support.tokens import pattern

PATIENCE = 120.0
STAGES = ("sft", "grpo")
EVERY = {
    **{"sft__steps": 4, "sft__checkpoint_every": 2, "sft__data": None, "sft__batch": 4},
    **{"run__steps": 4, "run__checkpoint_every": 2, "batch__group_size": 2, "sampling__max_completion_length": 8},
}


def trained(run: Run, stage: str, **arguments: Any) -> Any:
    if stage == "sft":
        return sft(run, tasks=small_tasks(), **arguments)
    return grpo(run, tasks=small_tasks(), rewards=REWARDS, **arguments)


def store(run: Run, stage: str) -> checkpoints.Checkpoints:
    return run.sft_checkpoints if stage == "sft" else run.checkpoints


def bits(run: Run, stage: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    newest, _ = store(run, stage).latest()
    assert newest is not None
    keep = {"loss", "grad/norm", "step", "reward/fairness/mean"}
    logged = [{k: v for k, v in row.items() if k in keep} for row in run.rows("sft" if stage == "sft" else "metrics")]
    return logged, newest.tensors("policy") | newest.tensors("optimizer")


def same(one: tuple[Any, dict[str, torch.Tensor]], two: tuple[Any, dict[str, torch.Tensor]]) -> bool:
    return (
        one[0] == two[0] and one[1].keys() == two[1].keys() and all(torch.equal(one[1][k], two[1][k]) for k in one[1])
    )


def events(run: Run, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in run.rows("events") if event["kind"] in kinds]


@pytest.fixture(scope="module", params=STAGES)
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    run = tiny_run(tmp_path_factory.mktemp(request.param), **EVERY)
    list(trained(run, request.param))
    return request.param, bits(run, request.param)


def interrupting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> Callable[[], None]:
    """Ctrl-C comes right after the `at`-th call of a function."""
    whole, calls = getattr(owner, name), []

    def interrupted(*arguments: Any, **named: Any) -> Any:
        result = whole(*arguments, **named)
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)
    return monkeypatch.undo


@pytest.mark.parametrize(
    "where", ["moved", "gradient", *(pytest.param(w, marks=pytest.mark.slow) for w in ("applied", "logged", "stored"))]
)
def test_interrupted_anywhere_in_a_step_it_resumes_to_the_same_bits(
    straight: tuple[str, Any], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, expected = straight
    run = tiny_run(tmp_path, **EVERY)
    owner, name, at = {
        "moved": (optim, "_assert_finite", 3),
        "applied": (optim, "apply", 3),
        "logged": (Run, "log_sft" if stage == "sft" else "log_metrics", 3),
        "stored": (checkpoints.Checkpoints, "prune", 2),
        "gradient": (torch.Tensor, "backward", 3),
    }[where]
    undo = interrupting(monkeypatch, owner, name, at)
    with pytest.raises(KeyboardInterrupt):
        list(trained(run, stage))
    undo()
    inside = where in ("moved", "applied", "logged") or (stage, where) == ("grpo", "gradient")
    assert bool(events(run, "sft_torn")) == (inside and stage == "sft") and not events(run, "torn")
    assert bool(events(run, "step_undone")) == (inside and stage == "grpo")
    list(trained(run, stage))
    assert same(bits(run, stage), expected)


@pytest.mark.parametrize(("train", "handed"), [("full", False), ("lora", True)])
def test_interrupted_on_the_way_back_from_the_reference_it_resumes_to_the_same_bits(
    train: str, handed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {**EVERY, "model__train": train, "batch__passes": "model", "run__steps": 3}
    changes |= {"run__checkpoint_every": 1}  # nothing is unsaved on the way out, so that nothing else brings it back
    whole, run = tiny_run(tmp_path, "whole", **changes), tiny_run(tmp_path, **changes)
    list(trained(whole, "grpo"))
    policy = load_policy(run.config.model, run.config.run.seed) if handed else None
    kind = adapters.CopiedReference if train == "full" else adapters.AdapterReference
    calls: list[bool] = []

    def half(reference: Any) -> None:
        """Ctrl-C before the adapter is back, or with five of the weights back; later calls do their work."""
        own = getattr(reference, "_own", {})
        calls.append(bool(own) or (train == "lora" and reference.model.active_adapters[0] == adapters.REFERENCE))
        if not calls[-1] or sum(calls) != 3:  # step 1 looks at the reference twice, before and after its update
            return settle(reference)
        for name, weights in [*own.items()][:5]:
            reference.trainable[name].data = weights
        raise KeyboardInterrupt

    settle = kind.settle
    monkeypatch.setattr(kind, "settle", half)
    with pytest.raises(KeyboardInterrupt):
        list(trained(run, "grpo", policy=policy))
    monkeypatch.undo()
    if policy is not None:
        (newest, _), now = run.checkpoints.latest(), policy.parameters_by_name()
        assert (
            newest is not None
            and newest.step == 1
            and all(torch.equal(now[n], t) for n, t in newest.tensors("policy").items())
        )
        assert policy.model.active_adapters == ["default"], "nor the reference's adapter"  # type: ignore[operator]
    list(trained(run, "grpo", policy=policy))
    assert same(bits(run, "grpo"), bits(whole, "grpo"))


def test_weights_from_within_an_update_begin_nothing(
    straight: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, expected = straight
    run, other = tiny_run(tmp_path, **EVERY), tiny_run(tmp_path, "other", **EVERY)
    policy = load_policy(run.config.model, run.config.run.seed)
    undo = interrupting(monkeypatch, torch.optim.AdamW, "step", 2)
    settle, again = Policy.settle, []

    def interrupted_again(policy: Policy) -> None:
        """A second and a third Ctrl-C, as the training is left."""
        if policy.interrupted_update and len(again) < 2:
            again.append(1)
            raise KeyboardInterrupt
        settle(policy)

    monkeypatch.setattr(Policy, "settle", interrupted_again)
    with pytest.raises(KeyboardInterrupt):
        list(trained(run, stage, policy=policy))
    undo()
    for use in (
        lambda: list(trained(other, stage, policy=policy)),
        lambda: policy.save(tmp_path / "model"),
        lambda: evaluate(run, policy=policy, tasks=small_tasks()),
    ):
        with pytest.raises(ModelError, match=pattern("step 2", run.name, "load_policy")):
            use()
    if stage == "sft":  # GRPO has its checkpoint 0
        with pytest.raises(ModelError, match=pattern("step 2", run.name, "load_policy")):
            list(trained(run, stage, policy=policy))
        policy = load_policy(run.config.model, run.config.run.seed)
    list(trained(run, stage, policy=policy))
    assert same(bits(run, stage), expected)
    list(trained(other, stage, policy=load_policy(run.config.model, run.config.run.seed)))


def test_a_second_interrupt_does_not_keep_the_boundary_from_being_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path, **EVERY | {"run__checkpoint_every": 50})
    undo = interrupting(monkeypatch, optim, "apply", 3)
    interrupting(monkeypatch, Policy, "settle", 4)  # of which three come before the steps
    with pytest.raises(KeyboardInterrupt):
        list(trained(run, "grpo"))
    undo()
    assert run.checkpoints.steps() == [0, 2] and not events(run, "torn")


def test_sft_does_not_begin_anew_with_weights_that_it_has_moved(tmp_path: Path) -> None:
    """Steps that no checkpoint has, as where a disk is full: the policy at hand is no start."""
    run, other = tiny_run(tmp_path, **EVERY), tiny_run(tmp_path, "other", **EVERY)
    policy = load_policy(run.config.model, run.config.run.seed)
    walk = trained(run, "sft", policy=policy)
    next(walk)
    (run.path / "sft").write_text("in the way")
    with pytest.raises(RunError):
        list(walk)
    (run.path / "sft").unlink()
    with pytest.raises(ModelError, match=pattern(run.path, "load_policy")):
        list(trained(run, "sft", policy=policy))
    next(trained(other, "sft", policy=policy))  # another run may begin with any weights


def test_gradients_are_on_whatever_an_interrupt_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path, **EVERY)
    leave, left = torch.no_grad.__exit__, []

    def interrupted(self: Any, *error: Any) -> None:
        """Ctrl-C at the first instruction of the way out."""
        if not left and run.last_step() == 1:
            left.append(1)
            raise KeyboardInterrupt
        leave(self, *error)

    monkeypatch.setattr(torch.no_grad, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(trained(run, "grpo"))
    assert left and torch.is_grad_enabled()
    assert [step.step for step in trained(run, "grpo")] == [2, 3, 4]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "an error of the disk"), ZeroDivisionError()])
def test_a_step_that_cannot_be_undone_does_not_hide_why_it_ended(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path, **EVERY)
    undo = interrupting(monkeypatch, optim, "apply", 3)
    monkeypatch.setattr(rollback, "take_back", raising(error))
    with pytest.raises(KeyboardInterrupt):
        list(trained(run, "grpo"))
    undo()
    assert [event["step"] for event in events(run, "torn")] == [2]


def raising(error: Exception) -> Callable[..., Any]:
    def fails(*_: Any, **named: Any) -> Any:
        raise error

    return fails


def test_a_log_that_cannot_be_written_does_not_hide_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path, **EVERY)
    walk = trained(run, "grpo")
    next(walk)
    monkeypatch.setattr(optim, "apply", raising(ZeroDivisionError()))
    log = Run.log_event

    def full(self: Run, kind: str, **data: Any) -> None:
        if kind in ("failed", "step_undone"):
            raise RunError("the disk is full")
        log(self, kind, **data)

    monkeypatch.setattr(Run, "log_event", full)
    with pytest.raises(ZeroDivisionError):
        list(walk)
    assert run.checkpoints.steps() == [0, 1]


def test_sft_that_begins_anew_measures_its_start_anew(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **EVERY | {"sft__checkpoint_every": 0, "sft__steps": 2})
    run.log_event("sft_eval", step=0, loss=99.0, n=1)
    list(trained(run, "sft"))
    assert [event["step"] for event in events(run, "sft_eval")] == [0, 0, 2]
    table = report.sft_losses(run).frame
    assert table["SFT step"].tolist() == [0, 2] and table["loss"].max() < 50


def test_a_policy_that_was_handed_over_keeps_no_gradient_of_a_step_broken_off(
    straight: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, expected = straight
    run = tiny_run(tmp_path, **EVERY)
    policy = load_policy(run.config.model, run.config.run.seed)
    undo = interrupting(monkeypatch, torch.Tensor, "backward", 3)
    with pytest.raises(KeyboardInterrupt):
        list(trained(run, stage, policy=policy))
    undo()
    list(trained(run, stage, policy=policy))
    assert same(bits(run, stage), expected)


# ---- a full disk


def full_from(patch: pytest.MonkeyPatch, call: int) -> list[str]:
    """No space is left from a call on of those that write; the names of all that are made."""
    made: list[str] = []

    def filling(name: str, whole: Any) -> Any:
        def write(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread().name.startswith("heartbeat"):
                return whole(*arguments, **named)
            made.append(name)
            if len(made) < call:
                return whole(*arguments, **named)
            if name == "save_file":
                raise SafetensorError(f"I/O error: No space left on device (os error {errno.ENOSPC})")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return write

    names = ("write", "pwrite", "fsync", "mkdir", "ftruncate")
    for owner, name in (*((os, name) for name in names), (Path, "write_bytes")):
        patch.setattr(owner, name, filling(name, getattr(owner, name)))
    patch.setattr(safetensors.torch, "save_file", filling("save_file", safetensors.torch.save_file))
    return made


def fills_up(stage: str, folder: Path, call: int, expected: Any) -> None:
    """Train on a disk that is full from some call on: it ends with one error and nothing is lost."""
    run = tiny_run(folder, f"{stage}-{call}", **EVERY)
    walk = trained(run, stage)
    next(walk)
    log = "sft" if stage == "sft" else "metrics"
    before = (run.path / f"{log}.jsonl").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        full_from(patch, call)
        with pytest.raises(RunError, match=r"\([\d,]+ bytes\b"):
            list(walk)
    assert (run.path / f"{log}.jsonl").read_bytes().startswith(before)
    assert run.status().owner is None
    list(trained(Run.open(run.path), stage))
    assert same(bits(run, stage), expected)


@pytest.mark.parametrize("call", [2, 9])
def test_a_full_disk_is_one_error_and_the_run_resumes_to_the_same_bits(
    straight: tuple[str, Any], call: int, tmp_path: Path
) -> None:
    fills_up(straight[0], tmp_path, call, straight[1])


@pytest.mark.slow
def test_a_disk_may_be_full_at_any_write(straight: tuple[str, Any], tmp_path: Path) -> None:
    stage, expected = straight
    run = tiny_run(tmp_path, **EVERY)
    walk = trained(run, stage)
    next(walk)
    with pytest.MonkeyPatch.context() as patch:
        made = full_from(patch, 10**9)
        list(walk)
    assert {"write", "fsync", "mkdir", "write_bytes", "save_file"} <= {*made}
    for call in range(1, len(made) + 1):
        fills_up(stage, tmp_path, call, expected)


# ---- checkpoints that are removed while the run trains


@pytest.mark.parametrize("done", [1, pytest.param(3, marks=pytest.mark.slow), 4])  # due after 2 and 4
def test_checkpoints_removed_while_it_trains_are_written_again(
    straight: tuple[str, Any], done: int, tmp_path: Path
) -> None:
    stage, expected = straight
    run = tiny_run(tmp_path, **EVERY)
    start: dict[str, bytes] = {}
    for step in trained(run, stage):
        if step.step == 1 and stage == "grpo":
            start = {f.name: f.read_bytes() for f in (store(run, stage).folder / "000000").iterdir()}
        if step.step == done:
            shutil.rmtree(store(run, stage).folder, ignore_errors=True)
    assert [event["step"] for event in events(run, "done", "sft_done")] == [4]
    newest, damaged = store(run, stage).latest()
    assert newest is not None and newest.step == 4 and not damaged
    assert same(bits(run, stage), expected)
    if stage == "grpo":
        again = {f.name: f.read_bytes() for f in (store(run, stage).folder / "000000").iterdir()}
        assert all(again[name] == start[name] for name in start if name != "manifest.json")
        assert [event["path"] for event in events(run, "checkpoint_rewritten")] == ["000000"]
        assert [step.step for step in trained(Run.open(run.path), stage, steps=5)] == [5]


@pytest.mark.parametrize("leave", ["done", "stopped", pytest.param("closed", marks=pytest.mark.slow)])
def test_a_training_that_cannot_save_its_last_step_is_not_done(
    straight: tuple[str, Any], leave: str, tmp_path: Path
) -> None:
    stage, expected = straight
    run = tiny_run(tmp_path, **EVERY | {"sft__checkpoint_every": 0, "run__checkpoint_every": 50})
    folder, walk = store(run, stage).folder, trained(run, stage)
    next(walk)
    aside = folder.with_name("aside")
    if folder.exists():
        folder.rename(aside)
    folder.write_text("in the way")
    if leave == "stopped":
        run.knobs.request("stop")
    with pytest.raises(RunError, match=pattern(folder)):
        if leave == "closed":
            walk.close()
        else:
            list(walk)
    assert not events(run, "done", "sft_done", "stopped", "sft_stopped")
    assert bool(events(run, "failed", "sft_failed")) == (leave != "closed")
    folder.unlink()
    if aside.exists():
        aside.rename(folder)
    list(trained(Run.open(run.path), stage))
    assert same(bits(run, stage), expected)


# ---- only the owner of the lock writes


def sizes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def taken_over(run: Run) -> None:
    """Another machine takes the run over while this one sleeps, and begins to write a checkpoint."""
    owner = json.loads((run.path / "lock").read_bytes())
    other = json.dumps(owner | {"host": "elsewhere", "token": "of the other", "heartbeat": time.time()})
    (run.path / "lock").write_bytes(other.encode().ljust(1024))
    for folder in ("checkpoints", "sft"):
        (run.path / folder / ".tmp-000005-7-other").mkdir(parents=True)
        (run.path / folder / ".tmp-000005-7-other" / "policy.safetensors").write_bytes(b"of the other")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("moment", ["between two steps", "before the rows", "before the commit"])
def test_who_lost_the_lock_writes_nothing_more(
    stage: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path, **EVERY)
    walk = trained(run, stage)
    next(walk)
    before: dict[str, int] = {}

    def lose(*_: Any) -> None:
        if not before:
            taken_over(run)
            before.update(sizes(run.path))

    if moment == "between two steps":
        lose()
    else:
        owner, name = (optim, "_assert_finite") if moment == "before the rows" else (checkpoints, "_seal")
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: (whole(*arguments), lose())[0])
    with pytest.raises(RunLocked, match="elsewhere"):
        list(walk)
    after = sizes(run.path)
    own = {name for name in after if ".tmp-" in name and "other" not in name}
    assert {name: size for name, size in after.items() if name not in own} == {
        name: size for name, size in before.items() if ".tmp-" not in name or "other" in name
    }
    assert not own, "its own unfinished checkpoint is gone"


@pytest.mark.parametrize("moment", ["between two steps", "before the rows", "in a checkpoint"])
def test_a_run_that_is_moved_while_it_trains_ends_with_one_error_and_resumes_where_it_is(
    straight: tuple[str, Any], moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, expected = straight
    run, moved = tiny_run(tmp_path / "here", **EVERY), tmp_path / "elsewhere"
    walk = trained(run, stage)
    next(walk)

    def move() -> None:
        if run.path.exists():
            run.path.rename(moved)

    if moment == "between two steps":
        move()
    else:
        owner, name = (optim, "_assert_finite") if moment == "before the rows" else (checkpoints, "_seal")
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: (move(), whole(*arguments))[1])
    with pytest.raises(RunError, match=str(run.path)):
        list(walk)
    monkeypatch.undo()
    assert not run.path.exists(), "nothing is made anew where it was"
    there = Run.open(moved)
    assert there.status().owner is None
    session = start(there, tasks=small_tasks(), rewards=REWARDS, stage=stage)  # type: ignore[arg-type]
    session.wait_blocking()
    assert same(bits(there, stage), expected)


def test_a_copy_in_the_place_of_a_run_that_trains_is_not_written(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **EVERY)
    walk = trained(run, "sft")
    next(walk)
    shutil.copytree(run.path, tmp_path / "copy")
    run.path.rename(tmp_path / "original")
    (tmp_path / "copy").rename(run.path)
    before = sizes(run.path)
    with pytest.raises(RunLocked, match=str(run.path)):
        list(walk)
    assert sizes(run.path) == before and Run.open(tmp_path / "original").status().owner is None


@pytest.mark.parametrize("stage", STAGES)
def test_a_snapshot_by_hard_links_ends_no_training(stage: str, tmp_path: Path) -> None:
    run, log = tiny_run(tmp_path, **EVERY), "sft" if stage == "sft" else "metrics"
    walk = trained(run, stage)
    next(walk)
    shutil.copytree(run.path, tmp_path / "snapshot", copy_function=os.link)
    kept = (tmp_path / "snapshot" / f"{log}.jsonl").read_bytes()
    steps = [stats.step for stats in walk]
    assert [row["step"] for row in run.rows(log)] == [1, *steps] and steps  # type: ignore[arg-type]
    assert run.rows("events")[-1]["kind"] in ("done", "sft_done")
    assert (tmp_path / "snapshot" / f"{log}.jsonl").read_bytes() == kept


@pytest.mark.parametrize(("steps", "level"), [(1, "ERROR"), (2, "WARNING")])  # saved every second step
def test_a_lost_lock_is_an_error_where_a_step_is_lost_with_it(
    steps: int, level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run(tmp_path, **EVERY)
    walk = trained(run, "sft")
    for _ in range(steps):
        next(walk)
    taken_over(run)
    with pytest.raises(RunLocked):
        next(walk)
    (record,) = [record for record in caplog.records if record.name == "grpo_nb.training.loop"]
    assert (record.levelname, record.args) == (level, (run.name, steps))


@pytest.mark.parametrize("stage", STAGES)
def test_a_training_left_open_is_ended_with_one_line(stage: str, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **EVERY)
    walk = trained(run, stage)
    next(walk)
    with pytest.raises(RunLocked, match=r"grpo_nb\.release"):
        next(trained(Run.open(run.path), stage))
    assert release(run.path) and not release(run)
    again = trained(Run.open(run.path), stage)
    next(again)
    before = sizes(run.path)
    with pytest.raises(RunLocked):
        next(walk)
    assert sizes(run.path) == before
    list(again)
    run.log_event("note", step=0)  # whoever only watches is not fenced


def test_a_training_of_a_session_is_not_released(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=400)
    session = start(run, tasks=small_tasks(), rewards=REWARDS)
    with pytest.raises(workers.AlreadyTraining):
        release(run)
    session.stop()
    session.wait_blocking()


# ---- what is not finite is not saved


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("slot", ["weight", "moment"])
def test_weights_that_are_not_finite_end_the_training_unsaved(stage: str, slot: str, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **EVERY | {"run__keep_checkpoints": 1})
    saved: dict[str, Any] = {}

    whole = parts.state_dict

    def state_dict(*given: Any) -> Any:
        tensors = whole(*given)
        if len(saved) >= 1 + (stage == "grpo"):  # from the second on; GRPO's first is step 0's
            group = tensors["policy" if slot == "weight" else "optimizer"]
            next(t for t in group.values() if t.numel() > 1).view(-1)[0] = float("inf")
        saved[str(len(saved))] = True
        return tensors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "state_dict", state_dict)
        with pytest.raises(TrainingError, check=lambda error: isinstance(error.__cause__, NotFinite)):
            list(trained(run, stage))
    (refused, *more) = events(run, "checkpoint_refused", "sft_checkpoint_refused")
    good = refused["resumes_from"]
    assert max(store(run, stage).steps()) == good and refused["step"] > good and len(more) <= 1
    assert next(step.step for step in trained(run, stage)) == good + 1, "it resumes from the last good one"


def test_a_gradient_that_is_not_finite_is_an_event_of_sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = tiny_run(tmp_path, **EVERY), []
    whole = optim.global_norm

    def norm(tensors: Any, *_: Any) -> float:
        calls.append(1)
        return float("nan") if len(calls) == 1 else whole(tensors)

    monkeypatch.setattr(optim, "global_norm", norm)
    steps = list(trained(run, "sft"))
    assert steps[0].status == "skipped" and steps[1].status != "skipped"
    (found,) = events(run, "finding")
    assert (found["rule"], found["step"]) == ("sft_skipped", 1)


# ---- the working directory means nothing to a run that is open


def test_another_working_directory_changes_nothing(
    straight: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, expected = straight
    (tmp_path / "here").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    tiny_run(Path("runs"), "x", **EVERY)
    run = Run.open("runs/x")
    assert run.shown == str(Path("runs/x"))
    for step in trained(run, stage):
        if step.step == 1:
            os.chdir(tmp_path / "other")
    assert not list((tmp_path / "other").iterdir()) and run.shown == str(tmp_path / "here" / "runs" / "x")
    assert same(bits(run, stage), expected) and run.status().owner is None


# ---- stop works where a reward hangs


def test_a_stop_that_is_late_names_what_it_waits_for_and_the_next_one_breaks_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "HANG_SECONDS", 0.2)
    hanging = threading.Event()

    def slow_reward(completions: list[Any], **columns: Any) -> list[float]:
        hanging.set()
        while hanging.is_set():
            time.sleep(0.01)
        return [0.0] * len(completions)

    run = tiny_run(tmp_path, **EVERY)
    session = start(run, tasks=small_tasks(), rewards={"fairness": [slow_reward]})
    assert hanging.wait(PATIENCE)
    session.stop()
    worker = session._worker
    assert worker is not None and worker.overdue.wait(PATIENCE) and session.live
    end = time.monotonic() + PATIENCE
    while not events(run, "stop_delayed") and time.monotonic() < end:
        time.sleep(0.01)
    (late,) = events(run, "stop_delayed")
    assert "slow_reward" in late["waits_for"] and __file__ in late["waits_for"] and late["step"] == 0
    session.stop()
    worker.join(PATIENCE)
    assert not session.live and run.status().owner is None
    hanging.clear()
    assert rows(list(trained(run, "grpo", steps=1))), "and it goes on"
