"""A rank that dies, raises, hangs, is out of memory or never comes: all end in time, saved, and the log says who."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.metrics import keys
from grpo_nb.run.run import Run
from tests.ranks.test_training import CLOSE, STEPS, alone, apart, run_of
from tests.support import ranks
from tests.support.tokens import names

FAILS_IN = 3
QUICK = {"sft__steps": 0}


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return list(run.stored("events").having("kind", {kind}))


def fault(do: str, rank: int = 1, work: str = "gradients", call: int = FAILS_IN) -> list[dict[str, Any]]:
    return [{"rank": rank, "work": work, "calls": [call], "do": do}]


def check_saved(run: Run, rank: int, reason: str, work: str = "gradients") -> None:
    """The newest step boundary is saved and the failure logged."""
    assert run.checkpoints.steps()[-1] == FAILS_IN - 1 == run.last_step()
    (failure,) = events(run, "rank_failed")
    assert (failure["rank"], failure["work"]) == (rank, work) and reason in failure["reason"]
    (failed,) = events(run, "failed")
    assert f"rank {rank}" in failed["error"] and failed["error"].startswith("RankError")
    assert run.status().state == "failed"


def check_resumes(run: Run, folder: Path) -> None:
    """Another number of ranks goes on with the numbers of an uninterrupted run."""
    straight = alone(run_of(folder, "straight", **QUICK))
    alone(Run.open(run.path))
    assert run.last_step() == STEPS
    assert apart(straight.rows("metrics"), run.rows("metrics")) < CLOSE


def train(size: int, run: Run, **options: Any) -> list[ranks.Ended]:
    return ranks.train(size, run.path, **{"dtype": "float64", **options})


def test_a_rank_that_raises_ends_all_saved(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run", **QUICK)
    first, second = train(2, run, faults=fault("raise"))
    assert first.status == second.status == 1 and names(first.errors, "RankError", "rank 1", "ValueError")
    check_saved(run, 1, "ValueError")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("work", ["draw", "gradients"])
def test_a_rank_that_is_killed_ends_all_saved(tmp_path: Path, rank: int, work: str) -> None:
    run = run_of(tmp_path, "run", **QUICK)
    ended = train(3, run, faults=fault("kill", rank, work))
    assert [one.status for one in ended][rank] == -signal.SIGKILL
    assert all(one.status == 1 for n, one in enumerate(ended) if n != rank) or ended[0].status == 1
    check_saved(run, rank, "died", work)
    check_resumes(run, tmp_path)


@pytest.mark.slow
def test_where_rank_0_is_killed_the_newest_checkpoint_resumes(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run", **QUICK)
    first, second = train(2, run, die_at=FAILS_IN)
    assert first.status == -signal.SIGKILL and second.status == 1 and names(second.errors, "rank 0")
    assert run.checkpoints.steps()[-1] == 2 and run.status().state == "dead"
    check_resumes(run, tmp_path)


@pytest.mark.slow
def test_a_rank_that_hangs_is_late_then_lost(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run", run__rank_timeout=4.0, **QUICK)
    began = time.monotonic()
    first, second = train(2, run, faults=fault("stop"), late_seconds=1.0)
    assert (
        first.status == 1 and second.status == -signal.SIGKILL and time.monotonic() - began < ranks.PATIENCE_SECONDS * 4
    )
    check_saved(run, 1, "rank_timeout")
    (late,) = events(run, "rank_late")
    assert (late["rank"], late["work"]) == (1, "gradients")
    check_resumes(run, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("work", "less"), [("gradients", "micro_batch=1"), ("draw", "rows_at_once=3")])
def test_a_full_memory_of_one_rank_is_less_for_all(tmp_path: Path, work: str, less: str) -> None:
    run = run_of(tmp_path, "run", **QUICK)
    ended = train(2, run, faults=fault("memory", work=work))
    assert [one.status for one in ended] == [0, 0], [one.errors for one in ended]
    (event,) = events(run, "out_of_memory")
    assert (event["now"], event["step"]) == (less, FAILS_IN) and "rank 1" in event["error"]
    straight = alone(run_of(tmp_path, "straight", **QUICK))
    assert apart(straight.rows("metrics"), run.rows("metrics")) < CLOSE


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run", **QUICK)
    (first,) = ranks.start(2, run.path, ranks=[0], join_seconds=3.0)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 1 and names(errors, "RankError", "rank [1]", "WORLD_SIZE=2", "torchrun")
    assert run.status().state == "new"


LONG = {**QUICK, "run__steps": 10, "run__checkpoint_every": 10}


def asleep(rank: int, calls: range) -> dict[str, Any]:
    return {"rank": rank, "work": "gradients", "calls": list(calls), "do": "sleep"}


def found(run: Run) -> list[tuple[str, Any]]:
    every = events(run, "finding")
    return [(one["rule"], one["evidence"].get("rank")) for one in every if one["rule"] in ("straggler", "uneven_ranks")]


@pytest.mark.slow
def test_a_rank_that_is_always_late_is_named_while_it_trains(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run", **LONG)
    ended = train(2, run, faults=[asleep(1, range(1, 11))])
    assert [one.status for one in ended] == [0, 0], [one.errors for one in ended]
    assert found(run) == [("straggler", 1)]
    late, own = ([row[keys.TIME_RANK.of(rank)] for row in run.rows("metrics")] for rank in ("1", "0"))
    assert all(slow > fast for slow, fast in zip(late, own, strict=True))


@pytest.mark.slow
def test_ranks_that_are_late_in_turn_are_uneven(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run", **LONG)
    ended = train(3, run, faults=[asleep(1, range(1, 11, 2)), asleep(2, range(2, 11, 2))])
    assert [one.status for one in ended] == [0, 0, 0], [one.errors for one in ended]
    assert found(run) == [("uneven_ranks", None)]
