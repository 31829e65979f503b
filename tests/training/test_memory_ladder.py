"""A device whose memory is full: the step is done again with less at a time, and the run goes on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb.policy.model import Policy
from grpo_nb.rollout import EagerEngine, Request
from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo
from grpo_nb.training.memory_ladder import RolloutMemoryError
from grpo_nb.training.sft import sft
from grpo_nb.types import Rollouts
from tests.support.tiny import REWARDS, rows, small_tasks, tiny_run, weights


def given() -> dict[str, Any]:
    return {"tasks": small_tasks(), "rewards": REWARDS}


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


@pytest.mark.parametrize("shaped", [{}, {"algorithm__advantage": "reinforce_pp"}])
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
