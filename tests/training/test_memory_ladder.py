"""A device whose memory is full: the step is done again with less at a time, and the run goes on."""

import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist

from grpo_nb.policy.full_memory import full_memory
from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.ranks.link import Link
from grpo_nb.rollout import EagerEngine, Request
from grpo_nb.run.run import Run
from grpo_nb.training import follower, gradients, rollback
from grpo_nb.training import sft as sft_module
from grpo_nb.training.grpo import grpo
from grpo_nb.training.guards import TrainingError
from grpo_nb.training.memory_ladder import RolloutMemoryError
from grpo_nb.training.recovery import Recovery
from grpo_nb.training.sft import sft
from grpo_nb.training.state import TrainState
from grpo_nb.types import Rollouts
from tests.support.tiny import given, rows, small_tasks, tiny_run, weights


def full(count: int) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {count} rows")


def room_for(count: int, monkeypatch: pytest.MonkeyPatch, after: int = 0) -> list[int]:
    """Passes of more than `count` completions fail, once `after` of them went well; the sizes of those that were
    tried."""
    plain, sizes = Policy.logprobs, []

    def logprobs(self: Policy, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and batch.completion_mask.shape[1] > 4:  # no self-check's
            sizes.append(len(batch))
            if len(batch) > count and len(sizes) > after:
                raise full(len(batch))
        return plain(self, batch, *args, **kwargs)

    monkeypatch.setattr(Policy, "logprobs", logprobs)
    return sizes


def begun(folder: Path, name: str, **changes: Any) -> Run:
    return tiny_run(folder, name, sft__steps=0, run__checkpoint_every=1, run__steps=2, **changes)


def events(run: Run, kind: str) -> list[Any]:
    return list(run.stored("events").having("kind", {kind}))


def same_weights(one: Run, two: Run) -> bool:
    return all(torch.equal(weight, weights(two)[name]) for name, weight in weights(one).items())


@pytest.mark.parametrize("shaped", [{}, {"algorithm__advantage": "reinforce_pp", "shaping__normalise": True}])
def test_the_step_is_that_of_a_smaller_micro_batch(
    shaped: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = begun(tmp_path, "small", batch__micro_batch=2, **shaped)
    expected = rows(list(grpo(small, **given())))
    run = begun(tmp_path, "full", **shaped)
    sizes = room_for(2, monkeypatch)
    found = rows(list(grpo(run, steps=1, **given())))
    tried = len(sizes)
    assert sizes[:3] == [8, 4, 2], "half as much each time, from what a pass really holds"
    found += rows(list(grpo(run, **given())))
    assert max(sizes[tried:]) == 2, "a run that goes on does not try again"
    assert found == expected and same_weights(run, small)
    assert [(e["step"], e["now"]) for e in events(run, "out_of_memory")] == [(1, "micro_batch=4"), (1, "micro_batch=2")]


def test_one_row_that_does_not_fit_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path, "nothing")
    room_for(0, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        list(grpo(run, **given()))
    assert events(run, "failed") and run.last_step() in (None, 0)
    monkeypatch.undo()
    assert [row["step"] for row in rows(list(grpo(run, **given())))] == [1, 2], "nothing is lost"


ONE_BY_ONE: dict[str, Any] = {"sft__steps": 0, "run__steps": 2, "run__checkpoint_every": 10, "batch__micro_batch": 1}


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps with a completion at a time."""
    run = tiny_run(tmp_path_factory.mktemp("whole"), **ONE_BY_ONE)
    list(grpo(run, **given()))
    return run


@pytest.mark.parametrize(("rollback", "moved"), [(True, True), (False, True), (False, False)])
def test_a_step_that_cannot_be_done_loses_none_before_it(
    rollback: bool, moved: bool, one_by_one: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its weights have moved, that takes a copy of them."""
    run = tiny_run(tmp_path, "broken", guards__rollback=rollback, **ONE_BY_ONE)
    failing(monkeypatch, "training.grpo.step_row" if moved else "training.grpo.objective_gradients", {2})
    with pytest.raises(torch.OutOfMemoryError):
        list(grpo(run, **given()))
    newest, _ = run.checkpoints.latest()
    undone = rollback or not moved
    assert newest is not None and newest.step == (1 if undone else 0)
    assert bool(events(run, "step_undone")) is undone and bool(events(run, "torn")) is not undone
    monkeypatch.undo()
    list(grpo(run, **given()))
    assert same_weights(run, one_by_one)


SAID = (
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "MPS backend out of memory (MPS allocated: 9.0 GB, other allocations: 1.0 MB, max allowed: 9.07 GB)",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate",
)
"""A full memory, as cuBLAS, cuDNN, CUDA, MPS and the CPU's allocator say it."""


@pytest.mark.parametrize("said", SAID)
def test_a_full_memory_is_one_error_whoever_says_it(said: str) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=re.escape(said)), full_memory():
        raise RuntimeError(said)


@pytest.mark.parametrize("other", [RuntimeError("CUDA error: an illegal memory access"), TrainingError(SAID[2])])
def test_another_error_stays_what_it_is(other: RuntimeError) -> None:
    with pytest.raises(type(other)) as found, full_memory():
        raise other
    assert found.value is other


@pytest.mark.parametrize("target", ["training.grpo.objective_gradients", "training.sft.logprobs"])
def test_a_step_is_done_with_less_whoever_says_it(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path, "blas", sft__steps=0 if "grpo" in target else 1)
    failing(monkeypatch, target, {1}, RuntimeError(SAID[0]))
    list(grpo(run, steps=1, **given()) if "grpo" in target else sft(run))
    prefix = "" if "grpo" in target else "sft_evaluation_"
    assert [e["step"] for e in events(run, f"{prefix}out_of_memory")] == [0 if prefix else 1]


def test_another_rank_is_full_whoever_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def crowded(*_: object) -> Any:
        raise RuntimeError(SAID[0])

    link, policy, group = (create_autospec(kind, instance=True) for kind in (Link, Policy, dist.ProcessGroup))
    policy.parameters_by_name.return_value, policy.device = {}, torch.device("cpu")
    replica = follower.Replica(link, Run.__new__(Run), policy, follower.Given(), group)
    monkeypatch.setitem(follower.WORK, "draw", crowded)
    follower._answer(replica, follower.Message("draw", {}))
    ((rank, reply), _) = link.send.call_args
    assert (rank, reply.work, reply.data["error"]) == (0, follower.MEMORY_FULL, SAID[0])


def test_weights_that_have_moved_are_not_moved_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path, "moved", batch__num_iterations=2, guards__rollback=False)
    room_for(4, monkeypatch, after=4)  # two of the gradient's check, and the first update's two
    with pytest.raises(torch.OutOfMemoryError):
        list(grpo(run, **given()))
    assert not events(run, "out_of_memory") and events(run, "torn")


def test_weights_that_have_moved_are_taken_back_where_there_is_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, run = (begun(tmp_path, n, batch__num_iterations=2, batch__micro_batch=m) for n, m in (("a", 4), ("b", 8)))
    list(grpo(small, **given()))
    room_for(4, monkeypatch, after=2)  # the gradient's check and the first update go well
    list(grpo(run, **given()))
    (event,) = events(run, "out_of_memory")
    assert event["step"] == 1 and not events(run, "torn") and same_weights(run, small)


class Crowded(EagerEngine):
    """Has room for `most` completions at a time."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.asked, self.released = most, list[int | None](), 0

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        self.asked.append(request.rows_at_once)
        if request.prompts_at_once(self.max_rows) * request.group_size > self.most and request.rows > self.most:
            raise full(request.rows)
        return super().generate(policy, request)

    def release(self) -> None:
        self.released += 1


def test_fewer_completions_are_drawn_at_a_time(tmp_path: Path) -> None:
    plain, run, engine = begun(tmp_path, "plain"), begun(tmp_path, "crowded"), Crowded(4)
    expected, found = rows(list(grpo(plain, **given()))), rows(list(grpo(run, engine=engine, **given())))
    drawn = ("tokens", "reward/fairness/mean", "length/fairness/mean")
    assert [[row[key] for key in drawn] for row in found] == [[row[key] for key in drawn] for row in expected]
    assert engine.asked == [None, 8, 4, 4] and engine.released == 2
    less = [(e["step"], e["now"]) for e in events(run, "out_of_memory")]
    assert less == [(1, "rows_at_once=8"), (1, "rows_at_once=4")]
    with pytest.raises(RolloutMemoryError):
        list(grpo(begun(tmp_path, "none"), engine=Crowded(3), **given()))


def test_scores_are_asked_for_again_and_nothing_is_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def noted(completion_ids: Sequence[list[int]], log_metric: Any = None) -> list[float]:
        asked.append(len(completion_ids))
        if log_metric:
            log_metric("calls", 1.0)
        return [sum(ids) % 11 / 11 for ids in completion_ids]

    run = begun(tmp_path, "noted")
    room_for(4, monkeypatch)
    steps = list(grpo(run, steps=1, tasks=small_tasks(), rewards={"fairness": [noted], "hallucination": [noted]}))
    assert asked == [8, 8, 8, 8] and len(steps) == 1 == len(list(run.metric_rows()))
    assert steps[0]["user/fairness/calls"] == 1.0


def test_sft_takes_less_at_a_time_and_keeps_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"sft__steps": 2, "sft__checkpoint_every": 1}
    small = tiny_run(tmp_path, "small", sft__micro_batch=4, **changes)
    expected = rows(list(sft(small)))
    run = tiny_run(tmp_path, "full", **changes)
    sizes = room_for(4, monkeypatch)
    stage = sft(run)
    found = rows([next(stage)])
    stage.close()
    tried = len(sizes)
    assert sizes[:3] == [16, 8, 4]
    found += rows(list(sft(run)))
    assert found == expected and max(sizes[tried:]) == 4
    assert [(e["step"], e["now"]) for e in events(run, "sft_out_of_memory")] == [
        (1, "micro_batch=8"),
        (1, "micro_batch=4"),
    ]


@pytest.mark.parametrize("error", [full(1), KeyboardInterrupt()])
def test_the_first_update_of_sft_is_undone_where_it_is_broken_off(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There Adam's moments need memory: some are made and their weights have moved, the others' have not."""
    changes: dict[str, Any] = {"sft__steps": 2, "sft__micro_batch": 8}
    plain, run = (tiny_run(tmp_path, name, **changes) for name in ("plain", "full"))
    list(sft(plain))
    policy, step, broken = load_policy(run.config.model, run.config.run.seed), torch.optim.AdamW.step, list[int]()

    def half(self: torch.optim.AdamW, *given: Any) -> Any:
        if not broken:
            broken.append(1)
            parameters = self.param_groups[0]["params"]
            self.param_groups[0]["params"] = parameters[:3]
            step(self)
            self.param_groups[0]["params"] = parameters
            raise error
        return step(self, *given)

    monkeypatch.setattr(torch.optim.AdamW, "step", half)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            list(sft(run, policy=policy))
        assert [e["step"] for e in events(run, "sft_step_undone")] == [0] and not policy.interrupted_update
    list(sft(run, policy=policy))
    newest, expected = (r.sft_checkpoints.load(2).tensors("policy") for r in (run, plain))
    again = [(e["step"], e["now"]) for e in events(run, "sft_out_of_memory")]
    assert again == ([] if isinstance(error, KeyboardInterrupt) else [(1, "micro_batch=4")])
    assert not events(run, "sft_torn")
    for name, weight in newest.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0 if not again else 1e-5)


# ---- what comes after a step is settled does not do it again


class Evaluating(EagerEngine):
    """Where it draws greedily, it has room for `most(call)` answers at a time."""

    def __init__(self, most: Callable[[int], int] = lambda call: 4) -> None:
        super().__init__()
        self.most, self.asked, self.drawn = most, list[int | None](), 0

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        if not request.greedy:
            self.drawn += 1
            return super().generate(policy, request)
        self.asked.append(request.rows_at_once)
        if (request.rows_at_once or request.rows) > self.most(len(self.asked)):
            raise full(request.rows)
        return super().generate(policy, request)


def recoveries(run: Run) -> list[int]:
    """Healthy steps that were counted, by checkpoint."""
    return [run.checkpoints.load(step).state("recovery")["recovery"]["healthy"] for step in run.checkpoints.steps()]


@pytest.fixture(autouse=True, scope="module")
def every_healthy_step_counts() -> Iterator[None]:
    """Else a run that never halved its rate counts none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recovery, "went_well", lambda self, steps: replace(self, healthy=self.healthy + 1))
        yield


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[dict[str, Any]]]:
    """Two steps with room for everything."""
    run = begun(tmp_path_factory.mktemp("calm"), "calm")
    return run, rows(list(grpo(run, engine=Evaluating(), **given())))


@pytest.mark.parametrize("room", [0, 1])
def test_an_evaluation_without_room_leaves_the_step_as_it_is(
    room: int, calm: tuple[Run, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """No room for the second objective's answers at all, or for one at a time."""
    run = begun(tmp_path, "full", run__quick_eval_every=1, run__quick_eval_examples=4)
    engine = Evaluating(lambda call: room if call in (4, 5, 6) else 4)  # calls 1 to 3: step 0, and the first of step 1
    found = rows(list(grpo(run, engine=engine, **given())))
    assert [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in found] == calm[1]
    assert engine.drawn == 2, "each step is done once"
    assert recoveries(run) == [0, 1, 2] and same_weights(run, calm[0])
    assert not events(run, "out_of_memory")
    fewer = [(e["step"], e["objective"], e["now"]) for e in events(run, "evaluation_out_of_memory")]
    assert fewer == [(1, "hallucination", "rows_at_once=2"), (1, "hallucination", "rows_at_once=1")]
    evaluated = [(row["step"], row["objective"]) for row in run.rows("evaluations")]
    both = [(step, name) for step in (0, 1, 2) for name in ("fairness", "hallucination")]
    assert evaluated == [place for place in both if room or place[0] != 1]
    assert [e["step"] for e in events(run, "evaluation_failed")] == ([] if room else [1])


def failing(
    monkeypatch: pytest.MonkeyPatch, target: str, calls: Collection[int], error: Exception | None = None
) -> list[int]:
    """The memory is full in these calls of a function, counted from 1; all that were made."""
    module, _, name = target.rpartition(".")
    plain, made = getattr(sys.modules[f"grpo_nb.{module}"], name), list[int]()

    def crowded(*args: Any, **named: Any) -> Any:
        made.append(len(made) + 1)
        if made[-1] in calls:
            raise error or full(1)
        return plain(*args, **named)

    monkeypatch.setattr(f"grpo_nb.{target}", crowded)
    return made


@pytest.mark.parametrize(
    ("target", "event"),
    [
        ("training.samples._row", "samples_not_logged"),
        ("training.rollback.probe", "health_not_measured"),
        ("training.overflow_report._overflow_row", "overflow_not_measured"),
    ],
)
def test_what_only_looks_at_a_settled_step_is_left_out(
    target: str,
    event: str,
    calm: tuple[Run, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = begun(tmp_path, "full")
    failing(monkeypatch, target, {1})
    steps = list(grpo(run, engine=Evaluating(), **given()))
    assert [e["step"] for e in events(run, event)] == [1] and not events(run, "out_of_memory")
    assert [s.step for s in steps] == [1, 2] == [row["step"] for row in run.metric_rows()]
    assert recoveries(run) == [0, 1, 2] and same_weights(run, calm[0])


def test_a_settled_step_whose_row_cannot_be_made_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path, "full")
    failing(monkeypatch, "training.commands.move_betas", {1})
    with pytest.raises(torch.OutOfMemoryError):
        list(grpo(run, **given()))
    assert not events(run, "out_of_memory") and events(run, "step_undone") and not list(run.metric_rows())


def test_what_a_step_counts_before_it_is_settled_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is full in a step that has counted itself and moved a beta, and whose weights have not moved."""
    run, plain = begun(tmp_path, "full"), rollback.remember

    def counted(state: TrainState) -> None:
        plain(state)
        if not crowded:
            monkeypatch.setattr("grpo_nb.training.grpo.measure", halfway(state))

    def halfway(state: TrainState) -> Callable[..., Any]:
        def measure(*given: Any) -> Any:
            monkeypatch.setattr("grpo_nb.training.grpo.measure", whole)
            state.recovery = state.recovery.went_well(1)
            state.objectives["fairness"].beta = replace(state.objectives["fairness"].beta, value=99.0)
            crowded.append(1)
            raise full(1)

        return measure

    crowded: list[int] = []
    whole = gradients.measure
    monkeypatch.setattr(rollback, "remember", counted)
    steps = list(grpo(run, **given()))
    assert crowded and recoveries(run) == [0, 1, 2]
    assert steps[0].metrics["beta/fairness"] == run.config.objectives["fairness"].beta


def test_a_checkpoint_is_written_once_the_memory_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path, "full")
    failing(monkeypatch, "training.parts.state_dict", {2})  # the first is step 0's
    assert len(list(grpo(run, **given()))) == 2 and run.checkpoints.steps() == [0, 1, 2]
    assert [e["step"] for e in events(run, "out_of_memory")] == [1]


def test_a_snapshot_that_the_device_has_no_room_for_is_kept_by_the_host(
    calm: tuple[Run, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path, "full", guards__snapshot="device")
    failing(monkeypatch, "training.snapshot._copy", {1})
    list(grpo(run, engine=Evaluating(), **given()))
    assert [(e["step"], e["now"]) for e in events(run, "out_of_memory")] == [(1, "guards.snapshot=host")]
    assert same_weights(run, calm[0])


@pytest.fixture(scope="module")
def with_room(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A step of SFT with room for everything."""
    run = tiny_run(tmp_path_factory.mktemp("with_room"), sft__steps=1)
    list(sft(run))
    return run


@pytest.mark.parametrize("room", [0, 2])
def test_the_loss_of_sft_is_measured_on_fewer_pairs_at_a_time_or_not_at_all(
    room: int, with_room: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, held = tiny_run(tmp_path, "full", sft__steps=1), []
    whole = sft_module.evaluate_loss

    def measured(policy: Policy, pairs: Any, micro_batch: int, numerics: Any = None) -> float:
        held.append(micro_batch)
        if micro_batch > room:
            raise full(micro_batch)
        return whole(policy, pairs, micro_batch, numerics)

    monkeypatch.setattr(sft_module, "evaluate_loss", measured)
    assert len(list(sft(run))) == 1 and events(run, "sft_done") and not events(run, "sft_out_of_memory")
    losses, expected = ([e["loss"] for e in events(r, "sft_eval")] for r in (run, with_room))
    assert losses == (pytest.approx(expected, rel=1e-5) if room else [])
    assert [e["step"] for e in events(run, "sft_evaluation_failed")] == ([] if room else [0, 1])
    assert held[:4] == [16, 8, 4, 2] and len(events(run, "sft_evaluation_out_of_memory")) == (6 if room else 8)
