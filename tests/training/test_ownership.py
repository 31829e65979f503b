"""A policy belongs to one training at a time, for as long as that training is open and no longer."""

import copy
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb import release
from grpo_nb.evaluation import evaluate as evaluation
from grpo_nb.evaluation.evaluate import evaluate
from grpo_nb.policy.model import ModelError, Policy, load_policy
from grpo_nb.policy.ownership import PolicyTaken
from grpo_nb.rewards.foreign_code import RewardError
from grpo_nb.rollout import EagerEngine
from grpo_nb.run.lock import RunLock, RunLocked
from grpo_nb.run.run import Run, RunError
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import sft
from tests.support import tiny_models
from tests.support.tiny import REWARDS, small_tasks, tiny_run, varied, weights
from tests.support.tokens import pattern

STAGES = ("sft", "grpo")
SMALL = {
    **{"sft__steps": 3, "sft__checkpoint_every": 1, "sft__data": None, "sft__batch": 4, "run__steps": 3},
    **{"run__checkpoint_every": 1, "batch__group_size": 2, "batch__prompts": 2, "sampling__max_completion_length": 6},
}
Weights = dict[str, torch.Tensor]


def begun(folder: Path, name: str = "a", **changes: Any) -> Run:
    return tiny_run(folder, name, **SMALL | changes)


def loaded(run: Run) -> Policy:
    return load_policy(run.config.model, run.config.run.seed)


def trained(run: Run, policy: Policy, stage: str = "grpo", **given: Any) -> Any:
    if stage == "sft":
        return sft(run, tasks=small_tasks(), policy=policy)
    return grpo(run, policy=policy, **{"tasks": small_tasks(), "rewards": REWARDS} | given)


def saved(run: Run, stage: str = "grpo") -> Weights:
    newest, _ = (run.sft_checkpoints if stage == "sft" else run.checkpoints).latest()
    assert newest is not None
    return newest.tensors("policy")


def same(one: Weights, two: Weights) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def can_be_claimed(policy: Policy, run: Run) -> bool:
    with run.lock() as lock:
        policy.ownership.claim(lock)
        return policy.ownership.is_of(lock)


@pytest.fixture(scope="module", params=STAGES)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Weights]:
    """A stage, and the weights that it ends with where nobody else has its policy."""
    run = begun(tmp_path_factory.mktemp(request.param))
    list(trained(run, loaded(run), request.param))
    return request.param, saved(run, request.param)


# ---- a second training


def test_a_second_training_is_refused_and_the_first_goes_on(alone: tuple[str, Weights], tmp_path: Path) -> None:
    stage, expected = alone
    run = begun(tmp_path)
    policy = loaded(run)
    walk = trained(run, policy, stage)
    next(walk)
    around_it = Policy(policy.model, policy.tokenizer)
    for other, given in (("sft", policy), ("grpo", policy), ("grpo", around_it)):
        second = begun(tmp_path, f"{other} {given is policy}")
        with pytest.raises(PolicyTaken, match=pattern(run.path, "grpo_nb.release", "load_policy")):
            next(trained(second, given, other))
        assert second.status().owner is None and not second.checkpoints.steps()
    assert [step.step for step in walk] == [2, 3] and same(saved(run, stage), expected)
    after = begun(tmp_path, "after")
    assert next(trained(after, policy)).step == 1, "one after the other"


def test_from_sft_to_grpo_to_evaluation_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "RESAMPLES", 50)
    run, other = begun(tmp_path, sft__steps=1), begun(tmp_path, "b", sft__steps=1)
    policy = loaded(run)
    for now in (run, other):
        list(trained(now, policy, "sft"))
        walk = trained(now, policy)
        next(walk)
        now.knobs.request("stop")
        assert not list(walk)
        assert [step.step for step in trained(now, policy)] == [2, 3]
        assert len(evaluate(now, policy=policy, tasks=small_tasks(), limit=2))
        policy.load_state(weights(now))
        policy.save(tmp_path / "model")


def left_in_a_cycle(walk: Any) -> None:
    cycle: list[Any] = [walk]
    cycle.append(cycle)


def ends_with(error: type[BaseException], call: Callable[[], object]) -> None:
    with pytest.raises(error):
        call()


ENDINGS: dict[str, Callable[[Any, Run], object]] = {
    "done": lambda walk, run: list(walk),
    "closed": lambda walk, run: walk.close(),
    "interrupted": lambda walk, run: ends_with(KeyboardInterrupt, lambda: walk.throw(KeyboardInterrupt())),
    "failed": lambda walk, run: ends_with(RewardError, lambda: list(walk)),
    "garbage": lambda walk, run: left_in_a_cycle(walk),
    "released": lambda walk, run: release(run),
    "moved": lambda walk, run: run.path.rename(run.path.with_name("elsewhere")),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_policy_is_free_however_its_training_ended(how: str, tmp_path: Path) -> None:
    run, other, calls = begun(tmp_path), begun(tmp_path, "b"), list[int]()

    def failing(completion_ids: list[list[int]]) -> list[float]:
        calls.append(1)
        return varied(completion_ids) if how != "failed" or len(calls) == 1 else []

    policy = loaded(run)
    walk = trained(run, policy, rewards={"fairness": [failing]})
    next(walk)
    gc.disable()  # else it might find the cycle by chance
    try:
        ENDINGS[how](walk, run)
        if how == "garbage":
            del walk
        assert can_be_claimed(policy, other)
    finally:
        gc.enable()


@pytest.mark.parametrize("fault", ["of another model", "not finite"])
def test_a_start_that_fails_half_way_leaves_the_policy_free(fault: str, tmp_path: Path) -> None:
    run, other = begun(tmp_path), begun(tmp_path, "b")
    if fault == "of another model":
        list(trained(run, loaded(run), steps=1))
        policy = tiny_models.policy("llama")
    else:
        policy = loaded(run)
        next(iter(policy.parameters_by_name().values())).data.fill_(float("nan"))
    claimed: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        settle = Policy.settle
        patch.setattr(Policy, "settle", lambda self: claimed.append(True) or settle(self))
        with pytest.raises((ModelError, RunError), check=lambda error: not isinstance(error, PolicyTaken)):
            next(trained(run, policy))
    assert claimed, "it came that far"
    assert can_be_claimed(policy, other)


# ---- a training that lost its policy


def test_who_lost_the_policy_saves_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first's lock cannot be read for a moment, so that its claim looks like one of a training that is over."""
    run, other = begun(tmp_path, run__checkpoint_every=2), begun(tmp_path, "b")
    policy, mine = loaded(run), RunLock.mine
    walk = trained(run, policy)
    next(walk)
    monkeypatch.setattr(RunLock, "mine", lambda lock: lock.path.parent != run.path and mine(lock))
    second = trained(other, policy)
    next(second)
    monkeypatch.undo()
    with pytest.raises(PolicyTaken, match=pattern(run.path, other.path, "load_policy")):
        next(walk)
    assert run.checkpoints.steps() == [0] and [step.step for step in second] == [2, 3]
    assert [step.step for step in trained(run, loaded(run))] == [1, 2, 3], "it resumes from its own checkpoint"


@pytest.mark.parametrize("end", ["next", "close", "close within a step of the next"])
def test_a_training_that_was_released_leaves_the_policy_to_the_next(end: str, tmp_path: Path) -> None:
    run, other, plain = begun(tmp_path, run__checkpoint_every=2), begun(tmp_path, "b"), begun(tmp_path, "plain")
    policy = loaded(run)
    walk = trained(run, policy)
    next(walk)
    assert release(run)

    def rewarded(completion_ids: list[list[int]]) -> list[float]:
        if "within" in end:
            with ThreadPoolExecutor(1) as another_thread:
                another_thread.submit(walk.close).result()
        return varied(completion_ids)

    second = trained(other, policy, rewards={"fairness": [rewarded]})
    next(second)
    if end == "next":
        with pytest.raises(RunLocked):
            next(walk)
    else:
        walk.close()
    assert run.checkpoints.steps() == [0]
    with pytest.raises(PolicyTaken):
        next(trained(plain, policy))
    assert [step.step for step in second] == [2, 3]


# ---- third parties


def test_between_two_steps_others_read_and_do_not_write(
    alone: tuple[str, Weights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "RESAMPLES", 50)
    stage, expected = alone
    run, other = begun(tmp_path), begun(tmp_path, "b")
    monkeypatch.setattr(Run, "started", property(lambda run: datetime(2020, 1, 1 + (run.path.name == "b"))))
    policy, dates = loaded(run), list[datetime]()
    whole = Policy.encode
    monkeypatch.setattr(
        Policy, "encode", lambda self, prompt: dates.append(self.tokenization.date) or whole(self, prompt)
    )
    for step in trained(run, policy, stage):
        now = policy.state()
        evaluate(other, policy=policy, tasks=small_tasks(), limit=2)
        policy.save(tmp_path / f"model {step.step}")
        for write in (policy.load_state, policy.load_reference_state, lambda _: policy.freeze_reference()):
            with pytest.raises(PolicyTaken, match=pattern(run.path)):
                write({name: torch.zeros_like(weight) for name, weight in now.items()})
        assert same(policy.state(), now) and policy.tokenization.date == other.started
        del dates[:]
    assert same(saved(run, stage), expected) and {date.day for date in dates} <= {1}
    assert policy.tokenization.date == run.started


def test_within_a_step_nobody_else_reads_or_writes(tmp_path: Path) -> None:
    run, plain, refused = begun(tmp_path), begun(tmp_path, "plain"), dict[str, BaseException]()
    policy = loaded(run)

    def in_eval_mode() -> None:
        with policy.eval_mode():
            raise AssertionError

    uses: dict[str, Callable[[], object]] = {
        "evaluate": lambda: evaluate(run, policy=policy, tasks=small_tasks(), limit=2),
        "save": lambda: policy.save(tmp_path / "model"),
        "state": policy.state,
        "load": lambda: policy.load_state({}),
        "mode": in_eval_mode,
        "train": lambda: next(trained(begun(tmp_path, "b"), policy)),
    }

    def meanwhile() -> None:
        for name, use in uses.items():
            try:
                use()
            except BaseException as error:
                refused[name] = error

    def rewarded(completion_ids: list[list[int]]) -> list[float]:
        if not refused:
            thread = threading.Thread(target=meanwhile)
            thread.start()
            thread.join()
        return varied(completion_ids)

    list(trained(run, policy, rewards={"fairness": [rewarded]}))
    assert refused.keys() == uses.keys() and {type(error) for error in refused.values()} == {PolicyTaken}
    list(trained(plain, loaded(plain), rewards={"fairness": [varied]}))
    assert same(saved(run), saved(plain)) and not (tmp_path / "model").exists()


def test_a_step_that_is_still_at_work_keeps_the_policy_though_its_lock_was_released(tmp_path: Path) -> None:
    run, other, found = begun(tmp_path), begun(tmp_path, "b"), list[type[BaseException]]()
    policy = loaded(run)

    def meanwhile() -> None:
        release(run)
        try:
            next(trained(other, policy))
        except Exception as error:
            found.append(type(error))

    def rewarded(completion_ids: list[list[int]]) -> list[float]:
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()
        return varied(completion_ids)

    with pytest.raises(RunLocked):
        next(trained(run, policy, rewards={"fairness": [rewarded]}))
    assert found == [PolicyTaken] and can_be_claimed(policy, other)


def test_an_evaluation_that_a_step_overtakes_gives_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "RESAMPLES", 50)
    run = begun(tmp_path)
    policy = loaded(run)
    walk = trained(run, policy)
    next(walk)

    class Overtaken(EagerEngine):
        """While it draws for the second objective, the training takes its next step."""

        calls = 0

        def generate(self, policy: Policy, request: Any) -> Any:
            self.calls += 1
            if self.calls == 2:
                moving = threading.Thread(target=lambda: next(walk))
                moving.start()
                moving.join()
            return super().generate(policy, request)

    with pytest.raises(PolicyTaken, match=pattern("knobs.request", "evaluate(run)")):
        evaluate(run, policy=policy, tasks=small_tasks(), engine=Overtaken(), limit=2)
    assert run.last_step() == 2 and not run.rows("evaluations")
    assert len(evaluate(run, policy=policy, tasks=small_tasks(), engine=EagerEngine(), limit=2))


def test_a_copied_policy_belongs_to_nobody_and_policies_around_it_to_one_training(tmp_path: Path) -> None:
    run, other = begun(tmp_path), begun(tmp_path, "b")
    policy = loaded(run)
    walk = trained(run, policy)
    next(walk)
    copied = copy.deepcopy(policy)
    around_it = Policy(copied.model, copied.tokenizer)
    assert copied.ownership is around_it.ownership is not policy.ownership
    assert can_be_claimed(copied, other)
    policy.model = copied.model
    assert policy.ownership is copied.ownership, "a model that is exchanged brings its own"
