"""A base that is spread over ranks: one that dies, raises, hangs or is out of memory ends all in time, saved."""

import signal
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.run.run import Run
from grpo_nb.training import spread
from tests.ranks.test_faults import FAILS_IN, QUICK, check_saved, events, fault, train
from tests.ranks.test_spread import LORA, SHARDED
from tests.ranks.test_training import CLOSE, STEPS, alone, apart, run_of
from tests.support.tokens import names

SPREAD = {**QUICK, **LORA, **SHARDED}


def check_resumes(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = alone(run_of(folder, "straight", **QUICK, **LORA))
    monkeypatch.setenv(spread.SHARD, "none")
    alone(Run.open(run.path))
    assert run.last_step() == STEPS
    assert apart(straight.rows("metrics"), run.rows("metrics")) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize(("do", "work", "reason"), [("raise", "gradients", "ValueError"), ("kill", "draw", "died")])
def test_a_rank_that_fails_ends_all_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: str, work: str, reason: str
) -> None:
    run = run_of(tmp_path, "run", **SPREAD)
    ended = train(3, run, faults=fault(do, 1, work))
    assert ended[0].status == 1 and names(ended[0].errors, "RankError", "rank 1", reason)
    assert ended[1].status == (-signal.SIGKILL if do == "kill" else 1)
    check_saved(run, 1, reason, work)
    check_resumes(run, tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_rank_that_hangs_is_lost(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run", run__rank_timeout=4.0, **SPREAD)
    first, second = train(2, run, faults=fault("stop"))
    assert (first.status, second.status) == (1, -signal.SIGKILL)
    check_saved(run, 1, "rank_timeout")


@pytest.mark.slow
def test_where_rank_0_is_killed_the_newest_checkpoint_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, "run", **SPREAD)
    first, second = train(2, run, die_at=FAILS_IN)
    assert first.status == -signal.SIGKILL and second.status == 1 and names(second.errors, "rank 0")
    assert run.checkpoints.steps()[-1] == 2 and run.status().state == "dead"
    check_resumes(run, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("work", "less"), [("gradients", "micro_batch=1"), ("draw", "rows_at_once=3")])
def test_a_full_memory_of_one_rank_is_less_for_all(tmp_path: Path, work: str, less: str) -> None:
    run = run_of(tmp_path, "run", **SPREAD)
    ended = train(2, run, faults=fault("memory", work=work))
    assert [one.status for one in ended] == [0, 0], [one.errors for one in ended]
    (event,) = events(run, "out_of_memory")
    assert (event["now"], event["step"]) == (less, FAILS_IN) and "rank 1" in event["error"]
    straight: Any = alone(run_of(tmp_path, "straight", **QUICK, **LORA))
    assert apart(straight.rows("metrics"), run.rows("metrics")) < CLOSE
