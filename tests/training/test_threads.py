"""CPU threads: measured where a training starts, kept in its checkpoints, and used again when it resumes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb.ranks import launch
from grpo_nb.run.run import Run
from grpo_nb.training import threads
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import sft
from grpo_nb.training.spread import loaded
from tests.support.tiny import given, rows, small_tasks, tiny_run, weights

BUSY, QUIET = {1: 0.05, 2: 1.0, 4: 3.0}, {1: 1.0, 2: 0.52, 4: 0.5}
pytestmark = pytest.mark.usefixtures("narrow_model")


@pytest.fixture(autouse=True)
def four(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process with four threads, and a user who named no number."""
    for name in threads.GIVEN:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "measured", lambda policy, counts: BUSY)


def events(run: Run, kind: str) -> list[Any]:
    return list(run.stored("events").having("kind", {kind}))


def watched(seen: list[int]) -> dict[str, Any]:
    """What a tiny GRPO is handed over, with a reward function that notes with how many threads the step computes."""

    def note(completion_ids: list[list[int]]) -> list[float]:
        seen.append(torch.get_num_threads())
        return [sum(ids) % 11 / 11 for ids in completion_ids]

    return given() | {"rewards": {"fairness": [note]}}


def train(run: Run, steps: int, seen: list[int]) -> list[dict[str, Any]]:
    return rows(list(grpo(run, steps=steps, **watched(seen))))


@pytest.mark.parametrize(("seconds", "best"), [(BUSY, 1), (QUIET, 2)])
def test_the_fewest_threads_that_are_about_as_fast_as_any_are_used_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], best: int
) -> None:
    monkeypatch.setattr(threads, "measured", lambda policy, counts: {n: seconds[n] for n in counts})
    run, seen = tiny_run(tmp_path, sft__steps=0), list[int]()
    train(run, 1, seen)
    assert set(seen) == {best} and torch.get_num_threads() == 4, "in the training alone"
    (found,) = events(run, "threads")
    assert found["threads"] == best and found["seconds"] == {str(n): s for n, s in seconds.items()}
    assert events(run, "start")[0]["threads"] == best
    newest, _ = run.checkpoints.latest()
    assert newest is not None and newest.state()["numerics"]["threads"] == best


def test_a_run_that_resumes_has_the_threads_that_it_began_with_and_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: None
) -> None:
    straight, run, seen = tiny_run(tmp_path, "a", sft__steps=0), tiny_run(tmp_path, "b", sft__steps=0), list[int]()
    expected = train(straight, 4, [])
    train(run, 2, [])
    monkeypatch.setattr(threads, "measured", lambda policy, counts: QUIET)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    train(run, 4, seen)
    assert set(seen) == {1} and events(run, "resume")[0]["threads"] == 1 and len(events(run, "threads")) == 1
    assert rows_of(run) == expected
    assert all(torch.equal(value, weights(straight)[name]) for name, value in weights(run).items())


def rows_of(run: Run) -> list[dict[str, Any]]:
    return [
        {key: row[key] for key in row if not key.startswith(("time/", "memory/", "cost/"))} for row in run.metric_rows()
    ]


def test_sft_measures_and_resumes_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: None) -> None:
    run, seen = tiny_run(tmp_path, sft__steps=4, sft__checkpoint_every=1), list[int]()
    steps = sft(run, tasks=small_tasks())
    next(steps)
    seen.append(torch.get_num_threads())
    steps.close()
    monkeypatch.setattr(threads, "measured", lambda policy, counts: QUIET)
    for _ in sft(run, tasks=small_tasks()):
        seen.append(torch.get_num_threads())
    assert set(seen) == {1} and torch.get_num_threads() == 4
    assert [found["threads"] for found in events(run, "sft_threads")] == [1]


def test_a_number_that_the_user_gave_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "measured", lambda policy, counts: 1 / 0)
    run = tiny_run(tmp_path)
    policy = loaded(run)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads.choose(run, policy) == 4
    monkeypatch.delenv("OMP_NUM_THREADS")
    exact = tiny_run(tmp_path, "exact", run__deterministic=True)
    assert threads.choose(exact, policy) == 4, "the same on each day"
    torch.set_num_threads(1)
    assert threads.choose(run, policy) == 1
    torch.set_num_threads(4)
    monkeypatch.setattr(launch, "place", lambda: object())
    assert threads.choose(run, policy) is None, "torchrun's ranks share the cores"
    with threads.computing(2):
        assert torch.get_num_threads() == 4
    assert not events(run, "threads")


def test_a_second_training_in_the_process_takes_the_number_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "measured", lambda policy, counts: 1 / 0)
    run = tiny_run(tmp_path)
    policy = loaded(run)
    with threads.computing(3):
        assert threads.choose(run, policy) == 3 and not caplog.records
        with threads.computing(2):
            assert "3" in caplog.text and threads.choose(run, policy) == 3
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 4


def test_each_number_is_timed_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    policy = loaded(tiny_run(tmp_path))
    policy.model.train()
    state = torch.get_rng_state()
    found = threads.measured(policy, [1, 2])
    assert found.keys() == {1, 2} and min(found.values()) > 0
    assert torch.get_num_threads() == 4 and policy.model.training and torch.equal(state, torch.get_rng_state())
