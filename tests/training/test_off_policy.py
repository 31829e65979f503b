"""One step off-policy: completions drawn one update early, judged meanwhile, kept in checkpoints, bit for bit."""

import asyncio
import math
import shutil
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from grpo_nb.config import ConfigError
from grpo_nb.metrics import keys
from grpo_nb.policy.model import Policy
from grpo_nb.rollout import EagerEngine, Request
from grpo_nb.run.run import Run, RunError
from grpo_nb.tasks import demo
from grpo_nb.training import ahead
from grpo_nb.training import grpo as trainer
from grpo_nb.training.grpo import grpo
from grpo_nb.types import Rollouts, StepStats
from tests.support.kill_points import survives
from tests.support.tiny import (
    NARROW,
    REWARDS,
    FirstOf,
    given,
    rows,
    small_tasks,
    stable,
    tiny_config,
    tiny_run,
    weights,
)
from tests.support.tokens import pattern

OFF_POLICY = {"rollout__steps_off_policy": 1, "algorithm__importance_correction": "tis"}
SHORT = {"sft__steps": 0, "batch__group_size": 2, "sampling__max_completion_length": 8, "run__checkpoint_every": 1}
"""Of a step; a checkpoint after each, so that any can be gone back to."""
MOVING: dict[str, Any] = {**OFF_POLICY, **SHORT, "run__steps": 4, "algorithm__learning_rate": 1e-3}
STALENESS, DIFFERENCE = keys.STALENESS, keys.SAMPLER_DIFFERENCE.mean


def train(run: Run, steps: int | None = None) -> list[dict[str, Any]]:
    return rows(list(grpo(run, steps=steps, **given())))


def same(one: Run, other: Run) -> None:
    """Rows and weights."""
    assert rows(list(map(stats, one.rows("metrics")))) == rows(list(map(stats, other.rows("metrics"))))
    expected, found = weights(one), weights(other)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def stats(row: dict[str, Any]) -> StepStats:
    return StepStats(row["step"], row)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = tiny_run(tmp_path_factory.mktemp("straight"), **MOVING)
    train(run)
    return run


class Watched(EagerEngine):
    """Keeps what was asked, and a sum of the weights that drew it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[float, float]] = []

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        assert request.uniforms is not None
        weight = sum(float(parameter.detach().double().sum()) for parameter in policy.parameters_by_name().values())
        self.asked.append((float(request.uniforms[0, 0]), weight))
        return super().generate(policy, request)


# ---- what draws what


def test_each_step_but_the_first_is_drawn_by_the_weights_before_the_newest_update(tmp_path: Path) -> None:
    ahead_of, plain = Watched(), Watched()
    list(grpo(tiny_run(tmp_path, "ahead", **{**MOVING, "run__steps": 3}), engine=ahead_of, **given()))
    on = {name: value for name, value in MOVING.items() if name not in OFF_POLICY}
    list(grpo(tiny_run(tmp_path, "plain", **{**on, "run__steps": 4}), engine=plain, **given()))
    assert [u for u, _ in ahead_of.asked] == [u for u, _ in plain.asked], "each step has its own random numbers"
    first, second, third, fourth = (weight for _, weight in ahead_of.asked)
    assert first == second == plain.asked[0][1] and len({second, third, fourth}) == 3


def test_the_log_has_the_staleness_and_the_weights_against_it(straight: Run) -> None:
    found = straight.rows("metrics")
    assert [row[STALENESS] for row in found] == [0, 1, 1, 1]
    assert found[0][DIFFERENCE] < 1e-5 and found[0][keys.IMPORTANCE_WEIGHT_MEAN] == pytest.approx(1, abs=1e-5)
    for row in found[1:]:
        assert row[DIFFERENCE] > 1e-3 and abs(row[keys.IMPORTANCE_WEIGHT_MEAN] - 1) > 1e-4
        assert row[keys.RATIO_MAX_DEVIATION] < 1e-3, "the ratio is that to the policy before the update"


def test_switched_off_nothing_is_logged_kept_or_drawn_ahead(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **{**SHORT, "run__steps": 2})
    assert not any(STALENESS in row for row in train(run))
    newest, _ = run.checkpoints.latest()
    assert newest is not None and ahead.FILE not in newest.names() and "rollouts" not in newest.state()


def test_without_a_correction_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=pattern("steps_off_policy=1", "importance_correction", "tis")):
        tiny_config(rollout__steps_off_policy=1)
    assert tiny_config(**OFF_POLICY).geometry != tiny_config().geometry


# ---- judges work while the step before trains


class Patient:
    """A reward function that answers about a step once the update of the step before has begun."""

    __name__ = "patient"

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.training = threading.Event()

    async def as_they_end(self, arrivals: AsyncIterator[tuple[int, str]], **columns: Any) -> list[float]:
        answers = [answer async for answer in arrivals]
        self.asked.append(len(answers))
        if len(self.asked) > 1:
            while not self.training.is_set():
                await asyncio.sleep(0.01)
        return [len(answer) % 5 / 5 for answer in answers]

    def __call__(self, completions: list[Any]) -> list[float]:
        raise AssertionError


def test_a_judge_is_at_work_on_the_next_step_while_one_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, apply = Patient(), trainer.apply

    def watched(*values: Any, **named: Any) -> Any:
        assert len(function.asked) >= 2, "the next step's completions were handed over before this update"
        function.training.set()
        return apply(*values, **named)

    monkeypatch.setattr(trainer, "apply", watched)
    run = tiny_run(tmp_path, **{**MOVING, "run__steps": 3})
    found = list(grpo(run, tasks=small_tasks(), rewards={"fairness": [function]}))
    assert [step[keys.SCORED.of("fairness")] for step in found] == [1.0] * 3
    assert len(function.asked) == 3, "nobody is asked about a step past the goal"


def test_reward_functions_see_the_step_that_trains(tmp_path: Path) -> None:
    seen: list[int] = []

    def counted(completions: list[Any], trainer_state: Any, log_metric: Any) -> list[float]:
        seen.append(trainer_state.global_step)
        log_metric("at", trainer_state.global_step)
        return [0.0] * len(completions)

    run = tiny_run(tmp_path, **{**MOVING, "run__steps": 3})
    found = list(grpo(run, tasks=small_tasks(), rewards={"fairness": [counted]}))
    assert seen == [0, 1, 2] == [step[keys.USER.of("fairness", "at")] for step in found]


# ---- an engine that draws elsewhere


class Elsewhere(EagerEngine):
    """A server of a sort: it gives what it was asked for once `arrives` is set, or `fails` at one of the calls."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.arrives, self.begun, self.fails = threading.Event(), list["Future[Rollouts]"](), fails

    def begin(self, policy: Policy, request: Request) -> "Future[Rollouts]":
        self.arrives.clear()
        future = Future[Rollouts]()
        self.begun.append(future)
        drawn = self.generate(policy, request)  # by the weights of now
        if len(self.begun) == self.fails:
            future.set_exception(ConnectionError("gone"))
        else:
            threading.Thread(target=lambda: (self.arrives.wait(60), future.set_result(drawn))).start()
        return future


def test_an_engine_elsewhere_draws_while_the_step_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, apply = Elsewhere(), trainer.apply

    def watched(*values: Any) -> Any:
        assert not engine.begun[-1].done()
        update = apply(*values)
        engine.arrives.set()
        return update

    run, plain = (tiny_run(tmp_path, name, **MOVING) for name in ("run", "plain"))
    list(grpo(plain, engine=EagerEngine(), **given()))
    monkeypatch.setattr(trainer, "apply", watched)
    list(grpo(run, engine=engine, **given()))
    assert len(engine.begun) == 4
    expected, found = ([stable(row) for row in one.rows("metrics")] for one in (plain, run))
    assert [row | {keys.ENGINE: ""} for row in found] == [row | {keys.ENGINE: ""} for row in expected]


def test_where_it_fails_the_step_is_undone_and_what_waited_is_saved(tmp_path: Path) -> None:
    run, straight = (tiny_run(tmp_path, name, **MOVING) for name in ("run", "straight"))
    engine = Elsewhere(fails=3)
    engine.arrives = Always()
    with pytest.raises(ConnectionError):
        list(grpo(run, engine=engine, **given()))
    newest, _ = run.checkpoints.latest()
    assert newest is not None and (newest.step, newest.state()["rollouts"]["step"]) == (2, 3)
    for one in (run, straight):
        list(grpo(Run.open(one.path), engine=EagerEngine(), **given()))
    assert all(torch.equal(*pair) for pair in zip(weights(run).values(), weights(straight).values(), strict=True))


class Always(threading.Event):
    def clear(self) -> None:
        self.set()


# ---- resumed bit for bit


@pytest.mark.parametrize("at", [0, 1, 3])
def test_stopped_and_resumed_it_has_the_bits_of_the_straight_run(tmp_path: Path, straight: Run, at: int) -> None:
    run = tiny_run(tmp_path, **MOVING)
    train(run, steps=at)
    train(Run.open(run.path))
    same(straight, run)


@pytest.mark.parametrize("work", ["measure", "apply", "finish"])
def test_interrupted_within_a_step_it_resumes_to_the_same_bits(
    tmp_path: Path, straight: Run, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls, own = tiny_run(tmp_path, **MOVING), [0], getattr(trainer, work)

    def interrupted(*values: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return own(*values, **named)

    monkeypatch.setattr(trainer, work, interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    newest, _ = run.checkpoints.latest()
    assert newest is not None and (newest.step, newest.state()["rollouts"]["step"]) == (2, 3)
    train(Run.open(run.path))
    same(straight, run)


def prepare() -> None:
    torch.set_num_threads(1)
    demo.SIZES |= NARROW
    small_tasks()


def train_on(folder: Path) -> None:
    train(Run.open(folder / "run"))


def check_bits(folder: Path) -> None:
    train_on(folder)
    same(Run.open(folder / "straight"), Run.open(folder / "run"))


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 61])
def test_a_kill_before_any_call_loses_nothing(tmp_path: Path, every: int) -> None:
    folder, settings = tmp_path / "runs", {**MOVING, "run__steps": 3}
    train(tiny_run(folder, "straight", **settings))
    tiny_run(folder, "run", **settings)
    assert survives(train_on, check_bits, folder, every) >= 150 // every


# ---- rollback and knobs


def test_a_rollback_gives_up_what_was_drawn_ahead(tmp_path: Path) -> None:
    changes = {"algorithm__learning_rate": 0.3, "guards__rollback_kl": 1.5, "guards__rollbacks_to_stop": 4}
    run, copied = tiny_run(tmp_path, **{**MOVING, **changes}), tmp_path / "killed"
    for step in grpo(run, **given()):
        if step.status == "rolled_back" and not copied.exists():
            shutil.copytree(run.path, copied)
    found = run.rows("metrics")
    undone = [row["step"] for row in found if row["status"] == "rolled_back"]
    assert undone and undone[0] < 4
    assert [row[STALENESS] for row in found] == [int(n > 1 and n - 1 not in undone) for n in range(1, 5)]
    newest, _ = Run.open(copied).checkpoints.latest()
    assert newest is not None and ("rollouts" in newest.state()) == (newest.step not in undone)
    train(Run.open(copied))
    same(run, Run.open(copied))


def test_a_turn_of_the_temperature_acts_at_once_and_on_policy(tmp_path: Path) -> None:
    run, found = tiny_run(tmp_path, **MOVING), []
    for step in grpo(run, **given()):
        found.append((step[keys.TEMPERATURE], step[STALENESS]))
        if step.step == 2:
            run.knobs["temperature"].set(0.8)
    assert found == [(1.0, 0), (1.0, 1), (0.8, 0), (0.8, 1)]
    assert run.rows("metrics")[2][DIFFERENCE] < 1e-5


def test_a_turn_of_beta_acts_at_once_and_keeps_them(tmp_path: Path) -> None:
    run, found = tiny_run(tmp_path, **MOVING), []
    for step in grpo(run, **given()):
        found.append((step[keys.BETA.of("fairness")], step[STALENESS]))
        if step.step == 2:
            run.knobs[keys.BETA.of("fairness")].set(0.5)
    assert found[1][0] != 0.5 and found[2:] == [(0.5, 1), (0.5, 1)]


def test_a_step_done_again_with_less_memory_trains_the_same_completions(
    tmp_path: Path, straight: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = trainer.objective_gradients, [0]

    def full(*values: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return own(*values)

    monkeypatch.setattr(trainer, "objective_gradients", full)
    run = tiny_run(tmp_path, **MOVING)
    found = train(run)
    assert [row[STALENESS] for row in found] == [0, 1, 1, 1]
    texts = [[(row["step"], row["completion"]) for row in one.rows("samples")] for one in (run, straight)]
    assert texts[0] == texts[1]


# ---- what a checkpoint keeps


def damaged(run: Run, change: Any) -> None:
    """Change the tensors of the newest checkpoint, manifest included."""
    newest, _ = run.checkpoints.latest()
    assert newest is not None
    tensors = {name: newest.tensors(name) for name in newest.names()}
    change(tensors[ahead.FILE])
    run.checkpoints.save(newest.step, tensors, newest.state())


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("ids/lengths"),
        lambda tensors: tensors.update({"ids/flat": tensors["ids/flat"].float()}),
        lambda tensors: tensors.update({"ids/flat": tensors["ids/flat"] * 1j}),
        lambda tensors: tensors.update({"ids/flat": tensors["ids/flat"] + 10**6}),
        lambda tensors: tensors.update({"reasons": tensors["reasons"][1:]}),
        lambda tensors: tensors.update({"reasons": tensors["reasons"] + 9}),
        lambda tensors: tensors.update({"logprobs/flat": tensors["logprobs/flat"][1:]}),
        lambda tensors: tensors.update({"texts/flat": tensors["texts/flat"] * 0 + 255}),
        lambda tensors: tensors.update({"texts/lengths": -tensors["texts/lengths"]}),
    ],
    ids=["missing", "floats", "complex", "unknown tokens", "too few", "no reason", "torn", "no text", "negative"],
)
def test_rollouts_that_were_tampered_with_are_refused_by_name(tmp_path: Path, change: Any) -> None:
    run = tiny_run(tmp_path, **MOVING)
    train(run, steps=1)
    damaged(run, change)
    with pytest.raises(RunError, match=pattern("rollouts.safetensors", "000001")):
        train(Run.open(run.path))


def test_rollouts_of_prompts_that_are_no_longer_asked_are_given_up(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **MOVING)
    train(run, steps=1)
    other = {name: FirstOf(task, 20) for name, task in small_tasks().items()}
    found = list(grpo(Run.open(run.path), tasks=other, rewards=REWARDS, accept_changed={"data"}))
    assert [step[STALENESS] for step in found] == [0, 1, 1]
    assert len(list(run.stored("events").having("kind", {"rollouts_given_up"}))) == 1


def test_log_probs_that_are_not_finite_survive_a_checkpoint() -> None:
    rollouts = Rollouts(
        [[1, 2], [3]],
        [[4, 0], [5], [6, 6], [7, 0]],
        [[-0.1, -math.inf], [math.nan], [-0.5, -1e-300], [-2.0, 0.0]],
        ["stop", "length", "length", "stop"],
        ["a", "", "ü", "\udc80"],
        2,
        [],
    )
    kept = ahead.Ahead()
    kept.keep(ahead.Sampled(ahead.SamplingPlan(3, 0.7, 1), rollouts))
    stored = kept.stored(3)
    assert stored is not None and kept.stored(2) is None
    found = ahead.restored(stored[0], safetensors.torch.load(safetensors.torch.save(stored[1])), 2, 8)
    assert found.plan == ahead.SamplingPlan(3, 0.7, 1) and repr(found.rollouts) == repr(rollouts)
