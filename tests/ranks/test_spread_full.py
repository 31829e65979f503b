"""All weights learn, and each rank trains its rows of them: the same tokens, the same numbers to rounding as on one."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_nb.config import ConfigError
from grpo_nb.metrics import keys
from grpo_nb.policy.loading import quietly
from grpo_nb.policy.model import load_policy
from grpo_nb.run.run import Run
from grpo_nb.training import spread
from tests.ranks.test_faults import FAILS_IN, QUICK, events, fault, train
from tests.ranks.test_spread import SHARDED, known
from tests.ranks.test_training import CLOSE, STEPS, alone, apart, run_of, texts, together
from tests.support import ranks
from tests.support.spread_process import PROMPTS
from tests.support.tiny import tiny_config
from tests.support.tokens import names

FULL = {"model__train": "full", "rollout__engine": "eager", "batch__passes": "model"}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return alone(run_of(tmp_path_factory.mktemp("one"), "one", **FULL))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return together(2, run_of(tmp_path_factory.mktemp("two"), "two", **FULL, **SHARDED))


def test_two_ranks_have_the_numbers_of_one(one: Run, two: Run) -> None:
    assert apart(known(one), known(two)) < CLOSE
    assert apart(one.rows("sft"), two.rows("sft")) < CLOSE
    assert texts(one) == texts(two)


def test_checkpoints_hold_whole_tensors(one: Run, two: Run) -> None:
    for step in one.checkpoints.steps():
        expected, found = one.checkpoints.load(step), two.checkpoints.load(step)
        for name in expected.names():
            own, other = expected.tensors(name), found.tensors(name)
            assert own.keys() == other.keys()
            for key, tensor in own.items():
                assert tensor.dtype == other[key].dtype and torch.allclose(tensor, other[key], rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_a_checkpoint_opens_in_transformers(two: Run, tmp_path: Path) -> None:
    policy, (newest, _) = load_policy(two.config.model, two.config.run.seed), two.checkpoints.latest()
    assert newest is not None
    policy.model.to(torch.float64)  # type: ignore[arg-type]
    policy.load_state(newest.tensors("policy"))
    policy.save(tmp_path / "model")
    with quietly():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        assert torch.allclose(plain(input_ids=ids).logits, policy.model(input_ids=ids).logits)


@pytest.mark.slow
def test_runs_go_from_one_rank_to_several_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, run = (run_of(tmp_path, name, **FULL) for name in ("straight", "run"))
    alone(straight)
    alone(run, steps=1)
    monkeypatch.setenv(spread.SHARD, "fsdp2")
    together(2, run, steps=2, sft=False)
    together(3, run, steps=3, sft=False)
    monkeypatch.setenv(spread.SHARD, "none")
    alone(run)
    assert apart(known(straight), known(run)) < CLOSE
    assert texts(straight) == texts(run)


@pytest.mark.slow
def test_an_update_is_undone_on_all_ranks(tmp_path: Path) -> None:
    changes = {**QUICK, **FULL, "guards__rollback_kl": 1e-9, "guards__recovery_steps": 2, "run__steps": 2}
    expected = alone(run_of(tmp_path, "one", **changes), steps=2)
    found = together(2, run_of(tmp_path, "two", **changes, **SHARDED), sft=False)
    assert [row[keys.STATUS] for row in found.rows("metrics")].count("rolled_back") > 0
    assert apart(known(expected), known(found)) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("do", ["kill", "raise"])
def test_where_a_rank_fails_the_newest_checkpoint_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: str
) -> None:
    run = run_of(tmp_path, "run", **QUICK, **FULL, **SHARDED)
    first, _ = train(2, run, faults=fault(do, work="gradients"))
    assert first.status == 1 and names(first.errors, "RankError", "rank 1")
    assert run.checkpoints.steps()[-1] == 2 == FAILS_IN - 1 and events(run, "rank_failed")[0]["rank"] == 1
    straight = alone(run_of(tmp_path, "straight", **QUICK, **FULL))
    monkeypatch.setenv(spread.SHARD, "none")
    alone(Run.open(run.path))
    assert run.last_step() == STEPS and apart(known(straight), known(run)) < CLOSE


def test_gradients_that_must_be_whole_are_refused() -> None:
    for changes in ({"algorithm__combine": "pcgrad"}, {"algorithm__gradient_report_every": 2}):
        with pytest.raises(ConfigError, match=next(iter(changes)).replace("__", r"\.")):
            spread.refuse_reports(tiny_config(**changes))


@pytest.mark.slow
def test_a_refusal_ends_all_ranks(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run", **FULL, **SHARDED, **QUICK, algorithm__combine="pcgrad")
    first, second = ranks.train(2, run.path)
    assert first.status == second.status == 1 and names(first.errors, "ConfigError", "pcgrad")
