"""Several ranks train as one does: the same tokens, the same numbers to rounding, and a run that any number resumes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.metrics import keys
from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import sft
from tests.support import ranks
from tests.support.judge_server import JudgeServer
from tests.support.judging import provider
from tests.support.rank_process import policy_of, tasks_of
from tests.support.tiny import REWARDS, stable, tiny_run

STEPS, CLOSE = 4, 1e-6
PARTS = {
    "sft__steps": 2,
    "sft__batch": 5,
    "batch__prompts": 6,
    "batch__group_size": 2,
    "sampling__max_completion_length": 12,
}
"""Four ranks have one group or two of them each."""


def run_of(folder: Path, name: str, **changes: Any) -> Run:
    return tiny_run(folder, name, **{**PARTS, "run__steps": STEPS, "run__checkpoint_every": 2, **changes})


def alone(run: Run, dtype: str = "float64", steps: int | None = None) -> Run:
    policy = policy_of(run, dtype)
    if not run.checkpoints.steps():
        list(sft(run, policy=policy, tasks=tasks_of(run)))
    list(grpo(run, policy=policy, tasks=tasks_of(run), rewards=REWARDS, steps=steps))
    return run


def together(size: int, run: Run, **options: Any) -> Run:
    ended = ranks.train(size, run.path, **{"dtype": "float64", "sft": True, **options})
    assert [rank.status for rank in ended] == [0] * size, [rank.errors for rank in ended]
    return run


def apart(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> float:
    """The largest difference between two logs, of what does not hang on clock and machine."""
    assert len(one) == len(other)
    worst = 0.0
    for row, twin in zip(map(stable, one), map(stable, other), strict=True):
        assert row.keys() == twin.keys()
        for key, value in row.items():
            if not isinstance(value, float) or not isinstance(twin[key], float):
                assert value == twin[key], key
            elif not (math.isnan(value) and math.isnan(twin[key])):
                worst = max(worst, abs(value - twin[key]) / max(1.0, abs(value)))
    return worst


def texts(run: Run) -> list[Any]:
    return [(row["step"], row["example"], row["completion"], row["reward"]) for row in run.rows("samples")]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return alone(run_of(tmp_path_factory.mktemp("one"), "one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return together(2, run_of(tmp_path_factory.mktemp("two"), "two"))


def test_two_ranks_have_the_numbers_of_one(one: Run, two: Run) -> None:
    assert apart(one.rows("metrics"), two.rows("metrics")) < CLOSE
    assert texts(one) == texts(two)


def test_two_ranks_warm_up_as_one(one: Run, two: Run) -> None:
    assert [row["step"] for row in two.rows("sft")] == [1, 2]
    assert apart(one.rows("sft"), two.rows("sft")) < CLOSE


def test_the_log_says_how_many_ranks_and_what_each_took(one: Run, two: Run) -> None:
    (start,) = two.stored("events").having("kind", {"start"})
    assert start["ranks"] == 2
    for row in two.rows("metrics"):
        assert row[keys.TIME_RANK.of("0")] > 0 and row[keys.TIME_RANK.of("1")] > 0
        assert 0 <= row[keys.TIME_RANKS_WAITED] < row[keys.TIME_STEP]
    assert not any(keys.TIME_RANK.has(key) for row in one.rows("metrics") for key in row)


def test_one_rank_resumes_what_two_began(one: Run, two: Run, tmp_path: Path) -> None:
    straight = alone(run_of(tmp_path, "straight"), steps=STEPS + 1)
    alone(two, steps=STEPS + 1)
    assert apart(straight.rows("metrics"), two.rows("metrics")) < CLOSE
    assert "ranks" not in list(two.stored("events").having("kind", {"resume"}))[-1]


def test_two_ranks_draw_ahead_as_one_and_one_resumes_them(tmp_path: Path) -> None:
    changes = {"rollout__steps_off_policy": 1, "algorithm__importance_correction": "tis", "sft__steps": 0}
    expected, found = (run_of(tmp_path, name, **changes) for name in ("one", "two"))
    alone(expected)
    together(2, found, steps=2, sft=False)
    alone(found)
    assert [row[keys.STALENESS] for row in found.rows("metrics")] == [0, 1, 1, 1]
    assert apart(expected.rows("metrics"), found.rows("metrics")) < CLOSE
    assert texts(expected) == texts(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm__combine": "pcgrad", "batch__mini_batch": 6},
        {"batch__num_iterations": 2, "model__train": "lora"},
        {"batch__prompts": 2, "batch__group_size": 4},
        {"rollout__steps_off_policy": 1, "algorithm__importance_correction": "tis"},
    ],
    ids=["default", "apart", "lora", "fewer groups than ranks", "off-policy"],
)
def test_twenty_steps_on_four_ranks_two_and_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = {"run__steps": 20, "run__checkpoint_every": 20, **changes}
    expected = alone(run_of(tmp_path, "one", **changes))
    for size in (2, 4):
        found = together(size, run_of(tmp_path, f"{size}", **changes))
        assert apart(expected.rows("metrics"), found.rows("metrics")) < CLOSE
        assert texts(expected) == texts(found)


@pytest.mark.slow
def test_in_float32_the_first_step_is_within_1e_5_and_later_ones_within_1e_3(tmp_path: Path) -> None:
    expected = alone(run_of(tmp_path, "one"), "float32").rows("metrics")
    found = together(2, run_of(tmp_path, "two"), dtype="float32").rows("metrics")
    assert apart(expected[:1], found[:1]) < 1e-5
    assert apart(expected, found) < 1e-3


@pytest.mark.slow
def test_two_ranks_are_judged_as_one(tmp_path: Path, server: JudgeServer, judge_key: None) -> None:
    judge = {"providers": [provider(server.url)], "retries": 1}
    changes = {"sft__steps": 0, "run__steps": 2, "objectives__hallucination__judge": judge}
    expected = alone(run_of(tmp_path, "one", **changes))
    found = together(2, run_of(tmp_path, "two", **changes), sft=False)
    rows, others = expected.rows("metrics"), found.rows("metrics")
    assert apart(rows, others) < CLOSE
    assert all(row[keys.JUDGE_SCORED.of("hallucination")] == 6 for row in others)
    assert len(found.rows("metrics")) == 2 and (found.path / "judge.jsonl").exists()
