"""A step that breaks the policy is undone: weights, optimizer and controllers are those before it, at half the rate."""

import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.deterministic as fills

from grpo_nb import rules
from grpo_nb.config.guards import OFF
from grpo_nb.metrics import keys
from grpo_nb.policy import distance
from grpo_nb.policy.model import Policy
from grpo_nb.rules import health
from grpo_nb.run.run import Run
from grpo_nb.storage.vocabulary import RunState
from grpo_nb.tasks import demo
from grpo_nb.training import rollback, switches
from grpo_nb.training.grpo import TrainingError, grpo
from grpo_nb.training.recovery import Recovery
from tests.support.kill_points import survives
from tests.support.tiny import NARROW, given, rows, small_tasks, stable, tiny_config, tiny_run, weights
from tests.support.tokens import pattern

SHORT = {"sft__steps": 0, "run__checkpoint_every": 1, "batch__group_size": 2, "sampling__max_completion_length": 8}
FAR: dict[str, Any] = {**SHORT, "run__steps": 4, "algorithm__learning_rate": 0.3, "guards__rollback_kl": 1.5}
FAR |= {"guards__rollbacks_to_stop": 4}
"""A rate at which a step takes the policy nats away, and limits that some of the steps meet."""


def events(run: Run, kind: str) -> list[Any]:
    return list(run.stored("events").having("kind", {kind}))


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.fixture(scope="module")
def exploded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[dict[str, Any]], Path]:
    """A run with a rollback, its rows, and its folder as a kill right after the first rollback leaves it."""
    folder = tmp_path_factory.mktemp("exploded")
    run, copied, found = tiny_run(folder, **FAR), folder / "killed", []
    for step in grpo(run, **given()):
        found.append(step)
        if step.status == "rolled_back" and not copied.exists():
            shutil.copytree(run.path, copied)
    return run, rows(found), copied


def test_an_exploding_step_is_undone_and_the_run_goes_on(exploded: Any) -> None:
    run, found, _ = exploded
    undone = [row["step"] for row in found if row["status"] == "rolled_back"]
    assert undone and len(found) == 4
    for step in undone:
        kept = [run.checkpoints.load(at) for at in (step - 1, step) if at in run.checkpoints.steps()]
        if len(kept) == 2:
            assert all(equal(*(each.tensors(name) for each in kept)) for name in ("policy", "optimizer"))
            assert kept[0].state()["betas"] == kept[1].state()["betas"]
    for before, after in itertools.pairwise(found):
        if before["status"] == "rolled_back":
            assert after["lr"] == before["lr"] / 2 and after["lr/requested"] == 0.3
            assert after["rollback/stream"] == before["rollback/stream"] + 1
    told = events(run, "rollback")
    assert [event["undone"] for event in told] == [[step] for step in undone]
    first = told[0]
    assert (first["learning_rate"], first["requested"], first["sampling_stream"]) == (0.15, 0.3, 1)
    assert max(first["values"].values()) > 1.5 and first["returns_after"] == 10


def test_a_kill_right_after_a_rollback_loses_no_bit(exploded: Any) -> None:
    run, found, copied = exploded
    again = Run.open(copied)
    done = again.last_step()
    assert again.metric_rows()[-1]["status"] == "rolled_back" and done is not None
    assert rows(list(grpo(again, **given()))) == found[done:]
    assert equal(weights(again), weights(run))


def test_what_acted_and_what_explains_it_are_one_rule(exploded: Any) -> None:
    run, found, _ = exploded
    undone = [row["step"] for row in found if row["status"] == "rolled_back"]
    assert [row["step"] for row in found if health.exploded([row], run.config)] == undone
    (finding,) = [one for one in rules.post_mortem(run.metric_rows(), run.config) if one.rule == "exploded"]
    assert finding.step == undone[0] and finding.action == "rollback"
    assert finding.evidence["values"] == events(run, "rollback")[0]["values"]


def test_a_weight_that_is_not_finite_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = torch.optim.AdamW.step, []

    def poisoned(self: Any, *args: Any, **options: Any) -> Any:
        result = step(self, *args, **options)
        calls.append(1)
        if len(calls) == 1:
            with torch.no_grad():
                self.param_groups[0]["params"][0].view(-1)[3] = math.inf
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", poisoned)
    run = tiny_run(tmp_path, **SHORT, run__steps=2)
    first, second = grpo(run, **given())
    assert (first.status, second.status) == ("rolled_back", "clipped") and not math.isfinite(first["grad/update"])  # type: ignore[arg-type]
    assert events(run, "rollback")[0]["values"].keys() == {"grad/update"}
    assert not run.checkpoints.load(1).tensors("optimizer"), "as before the optimizer's first step"
    assert all(tensor.isfinite().all() for tensor in weights(run).values())


@pytest.mark.parametrize("off", [{"guards__rollback": False}, {f"guards__{k}": v for k, v in OFF.items()}])
def test_switched_off_nothing_is_undone(off: dict[str, Any], tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **FAR | off | {"run__steps": 2})
    found = list(grpo(run, **given()))
    assert not events(run, "rollback") and {step.status for step in found} <= {"ok", "clipped"}
    assert found[1]["lr"] == 0.3 and "health/kl" not in found[1].metrics


def test_three_in_a_row_end_the_run_saved_and_it_can_be_resumed(tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path,
        **FAR
        | {
            "guards__rollback_kl": 1e-9,
            "algorithm__learning_rate": 1e-3,
            "guards__rollbacks_to_stop": 3,
            "run__steps": 6,
        },
    )
    with pytest.raises(TrainingError, match=pattern("repeated_rollbacks", 3, 0.00025, 0.001)):
        list(grpo(run, **given()))
    assert run.last_step() == 3 and run.checkpoints.steps()[-1] == 3
    assert equal(weights(run), run.checkpoints.load(0).tensors("policy"))
    with pytest.raises(TrainingError, match=pattern("repeated_rollbacks", 4)):
        list(grpo(run, **given()))
    assert [event["in_a_row"] for event in events(run, "rollback")] == [1, 2, 3, 4]


def test_the_third_in_a_row_ends_the_run_at_its_last_step_too(tmp_path: Path) -> None:
    limits = {"guards__rollback_kl": 1e-9, "guards__rollbacks_to_stop": 2, "algorithm__learning_rate": 1e-3}
    run = tiny_run(tmp_path, **FAR | limits | {"run__steps": 2})
    with pytest.raises(TrainingError, match=pattern("repeated_rollbacks", 2)):
        list(grpo(run, **given()))
    assert run.status().state is RunState.FAILED and run.checkpoints.steps()[-1] == 2
    assert not events(run, "done") and len(events(run, "failed")) == 1
    assert list(grpo(run, **given())) == [] and run.status().state is RunState.DONE


def test_a_guard_that_never_acts_changes_no_bit(tmp_path: Path) -> None:
    plain = tiny_run(tmp_path, "plain", **SHORT, run__steps=2, **{f"guards__{k}": v for k, v in OFF.items()})
    guarded = tiny_run(tmp_path, "guarded", **SHORT, run__steps=2)
    bare, full = (rows(list(grpo(run, **given()))) for run in (plain, guarded))
    assert all(row.items() >= other.items() for row, other in zip(full, bare, strict=True))
    assert equal(weights(plain), weights(guarded))
    tensors = [run.checkpoints.load(2).tensors("optimizer") for run in (plain, guarded)]
    assert equal(*tensors)


def test_the_rate_returns_after_so_many_healthy_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def once(rows: Any, config: Any) -> Any:
        asked.append(1)
        limits = config.replace(**{"guards.rollback_kl": 1e-12 if len(asked) < 3 else 100.0})
        return found(rows, limits)

    found = health.exploded
    monkeypatch.setattr(rollback.health, "exploded", once)
    run = tiny_run(tmp_path, **SHORT, run__steps=7, guards__recovery_steps=2, algorithm__learning_rate=1e-3)
    steps = list(grpo(run, **given()))
    assert [step["lr"] for step in steps] == [1e-3, 5e-4, 2.5e-4, 2.5e-4, 5e-4, 5e-4, 1e-3]
    assert {step["lr/requested"] for step in steps} == {1e-3}
    assert [(event["step"], event["learning_rate"]) for event in events(run, "rate_returns")] == [(4, 5e-4), (6, 1e-3)]


def test_a_step_that_is_undone_at_hardly_any_rate_ends_the_run() -> None:
    config = tiny_config()
    undone = {keys.STEP: 9, keys.STATUS: "rolled_back", keys.ROLLBACKS: 1, keys.HEALTH_KL: 3.0, keys.LR_REQUESTED: 1e-4}
    finding = health.repeated_rollbacks([{**undone, keys.LR: 1e-4 / 64}], config)
    assert finding is not None and finding.action == "end" and finding.evidence["requested"] == 1e-4
    assert health.repeated_rollbacks([{**undone, keys.LR: 1e-4 / 32}], config) is None
    worst = Recovery()
    for _ in range(3000):
        worst = worst.rolled_back().went_well(10).slowed()
    assert worst.factor == health.LOWEST_FACTOR / 2, "never 0, however often"
    slow = Recovery()
    for _ in range(3000):
        slow = slow.slowed()
    assert slow.factor == health.LOWEST_FACTOR


def test_memory_that_is_full_in_the_guards_own_pass_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rollback, "probe", full)
    run = tiny_run(tmp_path, **SHORT, run__steps=2)
    assert [step.step for step in grpo(run, **given())] == [1, 2]
    assert events(run, "health_not_measured")[0]["step"] == 1


def test_the_switch_for_exact_algorithms_outlives_the_first_of_two_trainings() -> None:
    exact, config, device = torch.are_deterministic_algorithms_enabled, tiny_config(), torch.device("cpu")
    one, two = switches.deterministic(config, device), switches.deterministic(config, device)
    before = exact(), fills.fill_uninitialized_memory
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert exact() and not fills.fill_uninitialized_memory, "the other still trains"
    two.__exit__(None, None, None)
    assert (exact(), fills.fill_uninitialized_memory) == before


def test_recovery_is_a_record_that_json_keeps() -> None:
    kept = Recovery().rolled_back().went_well(3).rolled_back()
    assert (kept.factor, kept.stream, kept.in_a_row, kept.healthy) == (0.25, 2, 1, 0)
    assert Recovery.from_dict(kept.to_dict()) == kept and Recovery.from_dict({}) == Recovery()
    assert Recovery().went_well(3) == Recovery()
    assert kept.slowed().factor == 0.125 and kept.slowed().stream == 2


def test_the_kl_after_the_updates_is_that_of_the_next_step_and_of_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    own = distance.kl_to_reference

    def counted(policy: Policy, batch: Any, temperature: float) -> float:
        sizes.append(len(batch))
        return own(policy, batch, temperature)

    monkeypatch.setattr(distance, "kl_to_reference", counted)
    changes: dict[str, Any] = {"run__steps": 4, "algorithm__learning_rate": 1e-3, "batch__group_size": 8}
    steps = list(grpo(tiny_run(tmp_path, **SHORT | changes), **given()))
    assert sizes == [2] * len(sizes), "one of each objective"
    later = [(step["kl/fairness"] + step["kl/hallucination"]) / 2 for step in steps[1:]]  # type: ignore[operator]
    after = [step.metrics.get("health/kl") for step in steps]
    assert len([kl for kl in after if kl is not None]) == len(sizes) > 0
    assert all(0.2 < float(kl) / found < 5 for kl, found in zip(after, later, strict=False) if kl is not None)


def test_the_kl_is_measured_where_it_may_have_grown() -> None:
    config = tiny_config(guards__rollback_kl=2.0)
    healthy = {"step": 1, "status": "ok", "grad/update": 1e-3, "health/kl": 0.1}
    row = {"step": 2, "status": "ok", "grad/update": 1e-3, "kl/fairness": 0.1, "kl/hallucination": 0.1}
    assert rollback.due([], row, config), "nothing is known yet"
    assert not rollback.due([healthy], row, config)
    assert rollback.due([healthy], row | {"grad/update": 1.2e-3}, config)
    assert rollback.due([healthy], row | {"kl/fairness": 0.6}, config)
    assert rollback.due([healthy | {"status": "rolled_back"}], row, config)
    assert rollback.due([healthy, *[row] * rollback.RECENT], row, config)
    for unmeasured in (0.0, math.nan):
        assert not rollback.due([], row | {"grad/update": unmeasured}, config)
    assert not rollback.due([], row, tiny_config(guards__rollback_kl=None))


# ---- killed before each call, in forks of a process that has torch loaded


def prepare() -> None:
    torch.set_num_threads(1)
    demo.SIZES |= NARROW
    small_tasks()


def train_far(folder: Path) -> None:
    path = folder / "run"
    run = Run.open(path) if (path / "config.json").exists() else tiny_run(folder, "run", **FAR)
    list(grpo(run, **given()))


def check_far(folder: Path) -> None:
    train_far(folder)
    (found, state), (expected, wanted) = (
        ([stable(row) for row in Run.open(folder / name).metric_rows()], weights(Run.open(folder / name)))
        for name in ("run", "straight")
    )
    assert found == expected and equal(state, wanted)


@pytest.mark.slow
def test_a_kill_before_any_call_of_a_run_with_rollbacks_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    list(grpo(tiny_run(folder, "straight", **FAR), **given()))
    assert survives(train_far, check_far, folder, 13) >= 10
