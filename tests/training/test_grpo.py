"""GRPO end to end on the tiny demo: determinism, resume, knobs, invariance, guards, own rewards."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb import optim
from grpo_nb.combine_gradients import COMBINERS
from grpo_nb.config import ConfigError
from grpo_nb.preflight import requirements
from grpo_nb.rewards.rubric import RewardError
from grpo_nb.run.run import Run, RunError
from grpo_nb.tasks import DataError
from grpo_nb.training import grpo as train
from grpo_nb.training import metrics, resume, samples, state
from grpo_nb.training.gradients import GradientStats
from grpo_nb.training.grpo import TrainingError
from grpo_nb.training.grpo import grpo as product_grpo
from grpo_nb.training.sft import sft
from grpo_nb.training.state import TrainState
from grpo_nb.types import Example, Score, StepStats
from tests.support.tiny import REWARDS, edited, rows, small_tasks, stable, tiny_config, tiny_run, varied, weights
from tests.support.tokens import names, pattern

Trained = tuple[Run, list[dict[str, Any]]]
"""A run and the rows of its steps."""


def grpo(run: Run, **options: Any) -> Iterator[StepStats]:
    return product_grpo(run, **{"rewards": REWARDS, "tasks": small_tasks()} | options)


def straight(folder: Path, name: str = "tiny", **changes: Any) -> Trained:
    run = tiny_run(folder, name, **changes)
    return run, rows(list(grpo(run)))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The tiny run trained to its end, and its rows: tests only read it."""
    return straight(tmp_path_factory.mktemp("done"))


@pytest.mark.ux(33, at="unit")
def test_one_seed_gives_one_run(done: Trained, tmp_path: Path) -> None:
    first, first_rows = done
    second, second_rows = straight(tmp_path, "b")
    assert first_rows == second_rows
    assert equal(weights(first), weights(second))


def test_another_seed_gives_another_run(done: Trained, tmp_path: Path) -> None:
    assert done[1] != straight(tmp_path, "b", run__seed=1)[1]


@pytest.mark.ux(5, at="unit")
@pytest.mark.parametrize(
    "geometry", [{}, {"batch__num_iterations": 2}, {"batch__mini_batch": 8, "batch__micro_batch": 4}]
)
def test_a_broken_off_run_resumes_to_the_same_bits(done: Trained, tmp_path: Path, geometry: dict[str, Any]) -> None:
    run, expected = straight(tmp_path, "straight", **geometry) if geometry else done
    broken = tiny_run(tmp_path, "broken", **geometry)
    for step in grpo(broken):
        if step.step == 3:
            break
    list(grpo(broken))
    logged = [stable(row) for row in map(json.loads, (broken.path / "metrics.jsonl").read_text().splitlines())]
    assert logged == json.loads(json.dumps(expected))
    assert equal(weights(run), weights(broken))


@pytest.mark.ux(20, at="unit")
def test_rows_past_the_checkpoint_are_moved_aside(tmp_path: Path) -> None:
    run, expected = straight(tmp_path)
    newest, _ = run.checkpoints.latest()
    assert newest is not None and newest.step == 4
    next(iter(newest.path.glob("policy*"))).write_bytes(b"torn")
    resumed = list(grpo(run))
    assert [step.step for step in resumed] == [3, 4]
    assert rows(resumed) == expected[2:]
    assert (run.path / "metrics.discarded.jsonl").read_text().count("\n") == 2
    assert "checkpoint_damaged" in set(run.events()["kind"])


def test_a_hole_in_the_log_is_said_with_its_steps_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run(tmp_path)
    for step in grpo(run):
        if step.step == 3:
            break
    next(grpo(run))
    assert "log_hole" not in set(run.events()["kind"])
    path = run.path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[3])
    assert [step.step for step in grpo(run, steps=5)] == [5]
    (event,) = [e for e in run.rows("events") if e["kind"] == "log_hole"]
    assert (event["step"], event["missing"]) == (4, [2, 3])
    assert names(caplog.text, "metrics.jsonl", 2, 3, 4)


def test_the_reference_is_the_sft_result_also_after_a_resume(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    list(sft(run))
    first = next(iter(grpo(run)))
    assert first["kl/fairness"] == pytest.approx(0.0, abs=1e-6)
    later = list(grpo(run))
    assert later[0].step == 2
    assert later[-1]["kl/fairness"] > 1e-7  # type: ignore[operator]
    assert equal(run.checkpoints.load(0).tensors("policy"), run.sft_checkpoints.latest()[0].tensors("policy"))  # type: ignore[union-attr]


def test_settings_edited_between_start_and_resume_are_refused_and_listed(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    next(grpo(run))
    # the model is looked for later: what was edited is said first
    other = edited(run, batch__group_size=8, model__name="elsewhere/model", run__steps=9)
    with pytest.raises(RunError) as refusal:
        next(grpo(other))
    said = str(refusal.value)
    assert names(said, "config.json", "000001", "checkpoints/", "steps=N", "--steps N")
    listed = [line.strip() for line in said.splitlines() if re.match(r"\s*(batch|model|run)\.\w+: ", line)]
    assert len(listed) == 3 and names(listed[0], "batch.group_size", 4, 8)
    assert names(listed[1], "model.name", "'demo'", "'elsewhere/model'") and names(listed[2], "run.steps", 4, 9)
    assert [step.step for step in grpo(edited(run), steps=5)] == [2, 3, 4, 5], "going further is no edit"


def test_settings_corrected_elsewhere_are_not_trained_over(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    right = Run.open_or_create(run.path, changes={"run.seed": 1})
    for stage in (sft, grpo):
        with pytest.raises(RunError, match=pattern("run.seed", 0, 1)):
            next(stage(run))
    assert next(grpo(right)).step == 1


def test_settings_edited_between_sft_and_grpo_are_refused(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    list(sft(run))
    with pytest.raises(RunError, match=pattern("000003", "sft/", "run.seed", 0, 1)):
        next(grpo(edited(run, run__seed=1)))
    assert run.checkpoints.steps() == []


def test_a_checkpoint_of_the_first_versions_which_kept_no_settings_goes_on(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    next(grpo(run))
    saved = run.checkpoints.load(1)
    state = {key: value for key, value in saved.state().items() if key != "config"}
    run.checkpoints.save(1, {name: saved.tensors(name) for name in saved.names()}, state)
    assert next(grpo(run)).step == 2


def test_a_damaged_checkpoint_of_the_start_is_no_matter_of_taking_another(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    next(grpo(run))
    (run.path / "checkpoints" / "000000" / "policy.safetensors").write_bytes(b"cut")
    with pytest.raises(RunError, match=pattern("policy.safetensors", 3, "checkpoints/000000")) as caught:
        next(grpo(run))
    assert "000001" not in str(caught.value), "no other can stand in for it"


def test_step_one_holds_its_invariants(tmp_path: Path) -> None:
    first = next(iter(grpo(tiny_run(tmp_path))))
    assert first["ratio/max_deviation"] < 1e-4  # type: ignore[operator]
    assert first["sampler_logp_difference"] < 1e-4  # type: ignore[operator]
    assert first["grad/update"] > 0  # type: ignore[operator]


def test_a_reference_that_is_not_the_start_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = resume._start

    def perturbed(state: TrainState, warm: Any) -> None:
        honest(state, warm)
        with torch.no_grad():
            for parameter in state.policy.parameters_by_name().values():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))

    monkeypatch.setattr(resume, "_start", perturbed)
    with pytest.raises(TrainingError, match="reference"):
        list(grpo(tiny_run(tmp_path)))


def test_parameters_that_do_not_move_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    with pytest.raises(TrainingError, match=r"grad/update|no weight"):
        list(grpo(tiny_run(tmp_path)))


def update(status: Any, norm: float = 1.0) -> Any:
    return GradientStats(loss=0.0, tokens=4), optim.Update(norm=norm, moved=0.0, status=status)


@pytest.mark.parametrize(
    ("statuses", "status", "skipped"),
    [
        (["skipped", "skipped"], "skipped", 2),
        (["skipped", "ok"], "ok", 1),
        (["ok", "clipped", "skipped"], "clipped", 1),
        (["empty", "empty"], "empty", 0),
        (["empty", "ok"], "ok", 0),
        (["ok"], "ok", 0),
    ],
)
def test_a_step_is_skipped_when_none_of_its_updates_was_applied(statuses: list[str], status: str, skipped: int) -> None:
    row = metrics.update_row([update(one) for one in statuses])
    assert (row["status"], row["grad/skipped"]) == (status, skipped)


def test_clipping_is_logged_for_each_pass(tmp_path: Path) -> None:
    """Two updates a pass: only the first of all is on-policy, and the row's share is the passes' mean."""
    changes = {"algorithm__learning_rate": 3e-3, "batch__mini_batch": 8, "batch__micro_batch": 4}
    row = rows(list(grpo(tiny_run(tmp_path, batch__num_iterations=3, run__steps=1, **changes))))[0]
    for side in ("low", "high"):
        shares = [row[f"clip_ratio/{side}/{number}"] for number in (1, 2, 3)]
        assert row[f"clip_ratio/{side}"] == pytest.approx(sum(shares) / 3) and f"clip_ratio/{side}/4" not in row
    assert row["clip_ratio/low/1"] + row["clip_ratio/high/1"] < row["clip_ratio/low/3"] + row["clip_ratio/high/3"]
    first = metrics.update_row([update("ok")] * 2)
    assert not [key for key in first if key.startswith(("clip_ratio/low/", "clip_ratio/high/"))]


def test_an_outlier_a_step_is_logged_and_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the updates are applied: three such steps are no run in which nothing is learnt."""
    own, calls = optim.apply, []

    def every_second(*given: Any, **more: Any) -> Any:
        calls.append(1)
        return own(*given, **more | ({"skip_above": 1e-12} if len(calls) % 2 else {}))

    monkeypatch.setattr(optim, "apply", every_second)
    run = tiny_run(tmp_path, batch__mini_batch=8, batch__micro_batch=4)
    steps = rows(list(grpo(run)))
    assert [row["grad/skipped"] for row in steps] == [1] * 4 and {row["status"] for row in steps} <= {"ok", "clipped"}
    assert all(row["grad/update"] > 0 for row in steps)


def test_a_turn_of_the_temperature_empties_the_controllers_window(tmp_path: Path) -> None:
    """KL is measured at the sampling temperature; a median over two of them is of nothing."""
    run = tiny_run(tmp_path, run__steps=3)
    for step in grpo(run):
        if step.step == 1:
            run.knobs["temperature"].set(0.5)
    (said,) = [e for e in run.rows("events") if e["kind"] == "beta" and names(e["message"], "temperature")]
    assert said["step"] == 2 and names(said["message"], "band")
    states = run.checkpoints.load(3).state()["betas"]
    assert all(len(state["window"]) <= 2 for state in states.values()), "the KL of step 1 is forgotten"


def test_every_update_has_its_share_of_each_objective_and_an_order_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PCGrad draws an order; the same one in each update of a step would favour one objective all along."""
    updates: list[tuple[dict[str, int], int]] = []
    own = train.objective_gradients

    def watched(policy: Any, batch: Any, rows: Any, plan: Any, generator: Any) -> Any:
        updates.append(({name: len(indices) for name, indices in rows.items()}, generator.initial_seed()))
        return own(policy, batch, rows, plan, generator)

    monkeypatch.setattr(train, "objective_gradients", watched)
    next(grpo(tiny_run(tmp_path, batch__mini_batch=8, batch__micro_batch=4, batch__num_iterations=2)))
    assert [rows for rows, _ in updates] == [{"fairness": 4, "hallucination": 4}] * 4
    assert len({seed for _, seed in updates}) == 4


@pytest.mark.parametrize(
    ("loss", "combine"),
    [("grpo", "sum"), ("dr_grpo", "pcgrad"), ("dapo", "sum"), *(("dapo", name) for name in COMBINERS if name != "sum")],
)
def test_any_micro_batch_gives_the_same_gradient(tmp_path: Path, loss: str, combine: str) -> None:
    norms = []
    for micro in (16, 2):
        run = tiny_run(
            tmp_path, f"micro{micro}", algorithm__name=loss, algorithm__combine=combine, batch__micro_batch=micro
        )
        norms.append(next(iter(grpo(run)))["grad/norm"])
    assert norms[0] > 1e-3  # type: ignore[operator]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


CONFLICT: dict[str, Any] = {"run__steps": 1, "sft__steps": 0, "run__seed": 2}


def conflicting(folder: Path, name: str, **changes: Any) -> Trained:
    """A first step in which the objectives' gradients conflict: what one of them rewards, the other punishes."""
    run = tiny_run(folder, name, **CONFLICT | changes)
    against = {"fairness": [varied], "hallucination": [lambda completion_ids: [-v for v in varied(completion_ids)]]}
    return run, rows(list(grpo(run, tasks=small_tasks(), rewards=against)))


@pytest.fixture(scope="module")
def summed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Such a step of the sum, which combiners are compared with."""
    return conflicting(tmp_path_factory.mktemp("summed"), "sum")


@pytest.mark.parametrize("combine", [name for name in COMBINERS if name != "sum"])
def test_a_step_with_a_combiner_is_another_one_and_the_same_each_time(
    summed: Trained, tmp_path: Path, combine: str
) -> None:
    plain, plain_rows = summed
    first, first_rows = conflicting(tmp_path, "a", algorithm__combine=combine)
    second, second_rows = conflicting(tmp_path, "b", algorithm__combine=combine)
    assert first_rows[0]["grad/cosine"] < 0
    assert first_rows == second_rows and equal(weights(first), weights(second))
    assert first_rows[0]["grad/norm"] != pytest.approx(plain_rows[0]["grad/norm"], rel=1e-6)
    assert not equal(weights(first), weights(plain))


def test_c_of_cagrad_leads_away_from_the_sum(summed: Trained, tmp_path: Path) -> None:
    _, (expected,) = summed
    norms = []
    for c in (0.0, 0.5):
        changes = {"algorithm__combine": "cagrad", "algorithm__cagrad_c": c}
        norms.append(conflicting(tmp_path, f"c{c}", **changes)[1][0]["grad/norm"])
    assert norms[0] == pytest.approx(expected["grad/norm"], rel=1e-5)
    assert norms[1] != pytest.approx(expected["grad/norm"], rel=1e-2)


@pytest.mark.parametrize("combine", ["cagrad", "upgrad"])
@pytest.mark.parametrize("verb", [grpo, sft])
def test_a_missing_solver_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Callable[[Run], Iterator[StepStats]], combine: str
) -> None:
    monkeypatch.setattr("torchjd._mixins.find_spec", lambda package: None)
    run = tiny_run(tmp_path, algorithm__combine=combine)
    with pytest.raises(ConfigError, match=pattern(f"combine='{combine}'", 'pip install "grpo_nb[combine]"')):
        next(verb(run))
    assert run.last_step() is None and not (run.path / "sft").exists()


def test_one_objective_needs_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchjd._mixins.find_spec", lambda package: None)
    config = tiny_config(algorithm__combine="upgrad")
    requirements.check_combiner(config.model_copy(update={"objectives": {"fairness": config.objectives["fairness"]}}))


def test_num_iterations_leave_the_old_policy_and_clip(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, batch__num_iterations=3, algorithm__learning_rate=3e-3, algorithm__clip_low=0.01)
    steps = list(grpo(run))
    assert steps[1]["ratio/max_deviation"] < 1e-4  # type: ignore[operator]
    assert max(step["clip_ratio/low"] + step["clip_ratio/high"] for step in steps) > 0  # type: ignore[operator]
    assert run.config.batch.updates_per_rollout == 3


@pytest.mark.ux(3, 4, at="unit")
def test_a_turned_knob_acts_at_the_next_step_is_logged_and_survives(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=6)
    for step in grpo(run):
        if step.step == 2:
            run.knobs["beta/fairness"].set(0.5)
            run.knobs["temperature"].set(0.7)
        if step.step == 3:
            assert (step["beta/fairness"], step["temperature"]) == (0.5, 0.7)
            assert step["beta/hallucination"] != 0.5
            break
    last = list(grpo(run))[-1]
    assert (last["beta/fairness"], last["temperature"]) == (0.5, 0.7)
    turns = run.events().query("kind == 'knob'")
    turns = turns[turns["key"] != "command"]
    assert set(turns["key"]) == {"beta/fairness", "temperature"}
    assert set(turns["step"]) == {3}


def test_an_undone_knob_acts_at_the_next_step_and_is_logged_as_a_turn(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, sft__steps=0, run__steps=4)
    run.knobs["beta/fairness"].set(0.5)
    used = []
    for step in grpo(run):
        used.append((step["temperature"], step["beta/fairness"]))
        if step.step == 1:
            run.knobs["temperature"].set(0.7)
        if step.step in (2, 3):
            run.knobs.undo(by="dashboard")
    start = run.config.objectives["fairness"].start
    assert used == [(1.0, 0.5), (0.7, 0.5), (1.0, 0.5), (1.0, start)], "beta is its controller's again"
    turns = run.events().query("kind == 'knob'")
    turns = turns[turns["key"] != "command"]
    assert [*zip(turns["step"], turns["key"], turns["new"], turns["by"], strict=True)][-2:] == [
        (3, "temperature", 1.0, "dashboard"),
        (4, "beta/fairness", "auto", "dashboard"),
    ]


DUAL = {"controller": "dual_ascent", "kl_band": [0.05, 0.5], "controller_gain": 0.01}
"""A first KL of about 0 is below such a band: beta falls in every step."""


def beta_after_a_step(folder: Path, name: str, **changes: Any) -> float:
    settings = {f"objectives__fairness__{key}": value for key, value in (DUAL | changes).items()}
    run = tiny_run(folder, name, sft__steps=0, run__steps=1, **settings)
    list(grpo(run))
    newest, _ = run.checkpoints.latest()
    assert newest is not None
    return float(newest.state()["betas"]["fairness"]["value"])


def test_every_setting_of_a_controller_changes_what_beta_does(tmp_path: Path) -> None:
    """Beta starts at 0.04, KL at 0; the middle of the band is 0.275."""
    assert beta_after_a_step(tmp_path, "dual") == pytest.approx(0.04 - 0.01 * 0.275, rel=1e-3)
    assert beta_after_a_step(tmp_path, "target", kl_target=0.1) == pytest.approx(0.04 - 0.01 * 0.1, rel=1e-3)
    assert beta_after_a_step(tmp_path, "gain", controller_gain=0.02) == pytest.approx(0.04 - 0.02 * 0.275, rel=1e-3)
    assert beta_after_a_step(tmp_path, "limit", controller_limit=0.01) == pytest.approx(0.04 * 0.99)
    proportional = beta_after_a_step(tmp_path, "proportional", controller="proportional", controller_gain=0.1)
    assert proportional == pytest.approx(0.04 * 0.98)
    assert beta_after_a_step(tmp_path, "fixed", controller="fixed") == 0.04
    assert beta_after_a_step(tmp_path, "band", controller="band") == 0.04, "its window is not yet full"


def test_a_moved_beta_is_said_with_its_objective(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=1, **{f"objectives__fairness__{key}": value for key, value in DUAL.items()})
    list(grpo(run))
    (event,) = run.events().query("kind == 'beta'").to_dict("records")
    assert event["objective"] == "fairness"
    assert names(event["message"], "fairness", "KL", 0.05, "7%")


def test_stop_saves_and_the_next_start_goes_on(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    for step in grpo(run):
        if step.step == 1:
            run.knobs.request("stop")
    assert run.last_step() == 1
    assert [step.step for step in grpo(run)] == [2, 3, 4]


def test_a_call_for_more_steps_is_the_total_that_the_run_shows(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=1)
    for _ in grpo(run, steps=3):
        assert run.goal() == 3
        break
    assert names(repr(run), "stopped", 1, 3)
    assert len(list(grpo(run, steps=2))) == 1 and names(repr(run), "done", 2)


def test_a_second_trainer_is_refused(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    walk = grpo(run)
    next(walk)
    with pytest.raises(RunError):
        next(grpo(Run.open(run.path)))
    walk.close()
    assert next(grpo(Run.open(run.path))).step == 2


def test_an_exploding_gradient_is_skipped_and_three_in_a_row_stop(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, algorithm__skip_grad_norm=1e-9)
    before = None
    with pytest.raises(TrainingError, match="skipped"):
        for step in grpo(run):
            before = step
    assert before is not None and before.status == "skipped"
    assert equal(run.checkpoints.load(0).tensors("policy"), weights(run))


def test_own_reward_functions_with_trl_signature_add_to_the_task(tmp_path: Path) -> None:
    def brevity(completions: list[Any], **columns: Any) -> list[float]:
        return [-float(len(c[0]["content"].split())) for c in completions]

    steps = list(grpo(tiny_run(tmp_path), rewards={"fairness": [(brevity, 0.1)]}))
    assert steps[0]["reward/fairness/part/brevity"] < 0  # type: ignore[operator]
    assert "reward/hallucination/part/brevity" not in steps[0].metrics


def test_a_reward_function_that_uses_all_that_trl_hands_over_trains_unchanged(tmp_path: Path) -> None:
    def told(completions: Any, trainer_state: Any, log_metric: Any, log_extra: Any, **kwargs: Any) -> list[float]:
        log_metric("step", trainer_state.global_step)
        log_metric("left", trainer_state.max_steps - trainer_state.global_step)
        log_extra("place", range(len(completions)))
        return [trainer_state.epoch] * len(completions)

    run = tiny_run(tmp_path)
    count = len(small_tasks()["fairness"].examples("train"))
    steps = list(grpo(run, tasks=small_tasks(), rewards={"fairness": [told]}, steps=2))
    assert [step["user/fairness/step"] for step in steps] == [0, 1]
    assert [step["user/fairness/left"] for step in steps] == [2, 1]
    assert [step["reward/fairness/part/told"] for step in steps] == [0, run.config.prompts_per_objective / count]
    rows = [row for row in run.rows("samples") if row["step"] == 2]
    assert [row["extra"]["place"] for row in rows if row["objective"] == "fairness"] == [0, 1, 2, 3]
    assert not any("extra" in row for row in rows if row["objective"] == "hallucination")


def test_each_reward_function_has_a_spread_inside_its_groups() -> None:
    def scored(*values: float | None) -> list[Score]:
        return [Score(0.0, parts={"task": 0.0, "own": value}) for value in values]

    rewards = torch.zeros(3, 2)
    row = metrics.reward_row("a", scored(0.0, 2.0, 5.0, 5.0, None, 9.0), rewards, torch.ones(3, 2, dtype=torch.bool))
    assert row["reward/a/part_std/own"] == pytest.approx(2**0.5 / 2)  # of the two whole groups
    assert row["reward/a/part/own"] == pytest.approx(21 / 5) and row["reward/a/part_std/task"] == 0


@pytest.mark.parametrize("bad", [[1.0], [float("inf")] * 8, ["one"] * 8])
def test_a_wrong_reward_names_the_function_and_loses_nothing(tmp_path: Path, bad: list[Any]) -> None:
    run = tiny_run(tmp_path)
    calls = []

    def broken(completions: list[Any], **columns: Any) -> list[Any]:
        calls.append(1)
        return [0.0] * len(completions) if len(calls) == 1 else bad

    with pytest.raises(RewardError, match="broken"):
        list(grpo(run, rewards={"fairness": [broken]}))
    newest, _ = run.checkpoints.latest()
    assert newest is not None and newest.step == run.last_step() == 1
    assert next(grpo(run)).step == 2


def test_unscored_groups_are_left_out_and_counted(tmp_path: Path) -> None:
    def silent(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        return [None] + [1.0] * (len(completions) - 1)

    step = next(iter(grpo(tiny_run(tmp_path), rewards={"fairness": [silent]})))
    assert step["unscored_groups/fairness"] == 1
    assert step["scored/fairness"] == pytest.approx(7 / 8)


def test_an_own_task_trains(tmp_path: Path) -> None:
    class Shout:
        name = "shout"

        def examples(self, split: str) -> list[Example]:
            return [Example(id=f"{split}/{i}", prompt=[{"role": "user", "content": "answer :"}]) for i in range(4)]

        def score(self, example: Example, completion: str) -> Score:
            return Score(value=float(len(completion)), label="any")

    tasks = {"fairness": Shout(), "hallucination": Shout()}
    assert len(list(grpo(tiny_run(tmp_path, sft__steps=0), tasks=tasks))) == 4


def test_prompts_that_do_not_fit_are_refused_before_any_work(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, sampling__max_prompt_length=5)
    with pytest.raises(ConfigError, match="max_prompt_length"):
        next(grpo(run))
    assert run.last_step() in (None, 0)


def test_what_grpo_would_refuse_is_refused_before_the_warm_up(tmp_path: Path) -> None:
    for name, change, error in (
        ("prompt", {"sampling__max_prompt_length": 5}, "sampling.max_prompt_length is 5"),
        ("context", {"sampling__max_completion_length": 100_000}, r"\b100000\b|max_completion_length"),
        ("general", {"objectives__fairness__task": "halueval_general"}, "halueval_general"),
    ):
        run = tiny_run(tmp_path / name, **change)
        with pytest.raises(ConfigError, match=error):
            next(sft(run))
        assert run.rows("sft") == []


def test_objective_whose_task_only_grpo_is_given_does_not_hinder_the_warm_up(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, objectives__fairness__task="capitals", sampling__max_prompt_length=5)
    with pytest.raises(ConfigError, match=pattern("hallucination/", "max_prompt_length")):
        next(sft(run))
    next(sft(tiny_run(tmp_path / "b", objectives__fairness__task="capitals", sft__data="demo")))


def test_the_warm_up_warns_of_a_judge_that_could_not_be_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("A_JUDGES_KEY", raising=False)
    judge = {"providers": [{"model": "m", "api_key_env": "A_JUDGES_KEY"}]}
    next(sft(tiny_run(tmp_path, sft__steps=1, objectives__hallucination__judge=judge)))
    assert names(caplog.text, "A_JUDGES_KEY")


def test_sft_is_refused_once_grpo_has_begun(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    next(grpo(run))
    with pytest.raises(RunError, match="reference"):
        next(sft(run))


def test_prompts_of_all_epochs_are_drawn_once_each() -> None:
    drawn = [i for step in range(1, 11) for i in state.draw(10, 3, step, 0, "s")]
    assert all(sorted(drawn[e * 10 : e * 10 + 10]) == list(range(10)) for e in range(3))
    assert drawn[:10] != drawn[10:20]


def test_every_row_of_an_epoch_is_in_exactly_one_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path, batch__mini_batch=8, batch__micro_batch=8, batch__num_iterations=2)
    seen: list[dict[str, list[int]]] = []
    honest = train.objective_gradients

    def spy(policy: Any, batch: Any, rows_: Any, *rest: Any) -> Any:
        seen.append(rows_)
        return honest(policy, batch, rows_, *rest)

    monkeypatch.setattr(train, "objective_gradients", spy)
    next(iter(grpo(run)))
    assert len(seen) == run.config.batch.updates_per_rollout == 4
    for epoch in (seen[:2], seen[2:]):
        assert sorted(i for update in epoch for share in update.values() for i in share) == list(range(16))


def test_resuming_with_other_rewards_is_noted(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    next(grpo(run))
    next(grpo(run))
    assert "rewards_changed" not in set(run.events()["kind"])
    next(grpo(run, rewards={}))
    assert "rewards_changed" in set(run.events()["kind"])


class Bare:
    name = "bare"

    def score(self, example: Example, completion: str) -> Score:
        return Score(value=0.0)


class Wordy(Bare):
    def examples(self, split: str) -> Any:
        return ["who", "was"]


class Single(Bare):
    def examples(self, split: str) -> Any:
        return Example(id="1", prompt="who")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("task", "named"),
    [
        (Bare(), ("'fairness'", "Bare", "examples", "`examples(split)`", "`score(example, completion)`")),
        (object(), ("name", "examples", "score")),
        (Single, ("Single", "Single()")),
        (Wordy(), ("'bare'", "str", "train", "Example(id=, prompt=)")),
        (Single(), ("'bare'", "Example", "train", "list")),
    ],
)
def test_what_is_no_task_is_refused_before_any_work(tmp_path: Path, task: Any, named: tuple[str, ...]) -> None:
    run = tiny_run(tmp_path)
    with pytest.raises((ConfigError, DataError), match=pattern(*named)):
        next(grpo(run, tasks={"fairness": task}))
    assert not run.has_work()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("rewards", "named"),
    [
        ({"fairness": REWARDS["fairness"][0]}, ("function", "list")),
        (REWARDS["fairness"], ("list", "{'fairness': [f]}")),
    ],
)
def test_rewards_of_another_shape_are_refused_before_any_work(
    tmp_path: Path, rewards: Any, named: tuple[str, ...]
) -> None:
    run = tiny_run(tmp_path)
    with pytest.raises((ConfigError, RewardError), match=pattern("rewards", *named)):
        next(grpo(run, rewards=rewards))
    assert not run.has_work()


def test_an_objective_that_is_misspelt_is_told_the_nearest(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [{"tasks": {"fairnes": small_tasks()["fairness"]}}, {"rewards": {"fairnes": [len]}}]
    run = tiny_run(tmp_path)
    for given in wrong:
        with pytest.raises(ConfigError, match=pattern("'fairness'")):
            next(grpo(run, **given))


def test_a_key_that_a_step_lacks_is_told_the_nearest() -> None:
    step = StepStats(3, {"reward/fairness/mean": 0.5, "kl/fairness": 0.1, "loss": 0.0})
    with pytest.raises(KeyError, match=pattern("'reward/fairnes/mean'", 3, "reward/fairness/mean", "kl/fairness")):
        step["reward/fairnes/mean"]
    with pytest.raises(KeyError, match=pattern("'zzz'", 3, "reward/fairness/mean", "kl/fairness", "loss")):
        step["zzz"]
    with pytest.raises(KeyError, match=pattern("'reward/fairness'", "'reward/fairness/mean'")):
        step["reward/fairness"]


def test_repeated_example_ids_are_refused(tmp_path: Path) -> None:
    class Twins:
        name = "twins"

        def examples(self, split: str) -> list[Example]:
            return [Example(id="x", prompt=f"Who {verb}") for verb in ("broke", "hid", "lost")]

        def score(self, example: Example, completion: str) -> Score:
            return Score(value=0.0)

    with pytest.raises(DataError, match=pattern("'x'", 3)):
        next(grpo(tiny_run(tmp_path), tasks={"fairness": Twins(), "hallucination": Twins()}))


def test_samples_tell_the_log_probs_of_their_tokens(tmp_path: Path) -> None:
    run, _ = straight(tmp_path, run__steps=2)
    logged = run.rows("samples")
    assert len(logged) == 2 * 8 and {row["objective"] for row in logged} == {"fairness", "hallucination"}
    for row in logged:
        pieces, old, reference = row["token_texts"], row["logprobs_old"], row["logprobs_reference"]
        assert len(pieces) == len(old) == len(reference) == row["tokens"] <= samples.TOKENS_LOGGED
        assert row["completion"].split() == re.sub("<[^ ]*?>", "", "".join(pieces)).split()
        assert all(value < 0 for value in old) and row["group_size"] == 4
        assert old == (pytest.approx(reference, abs=2e-4) if row["step"] == 1 else old)
    assert any(row["logprobs_old"] != row["logprobs_reference"] for row in logged if row["step"] == 2)


def test_long_samples_are_told_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "TOKENS_LOGGED", 2)
    run, _ = straight(tmp_path, run__steps=1)
    assert max(row["tokens"] for row in run.rows("samples")) > 2
    for row in run.rows("samples"):
        assert len(row["token_texts"]) == len(row["logprobs_old"]) == min(2, row["tokens"])


def test_log_probs_that_no_pass_has_seen_are_left_out(tmp_path: Path) -> None:
    class Mute:
        def __init__(self, task: Any) -> None:
            self.name, self.examples = task.name, task.examples

        def score(self, example: Example, text: str) -> Score:
            return Score(None, cause="no verdict")

    tasks = {"fairness": Mute(small_tasks()["fairness"]), "hallucination": small_tasks()["hallucination"]}
    run = tiny_run(tmp_path, run__steps=2, objectives__fairness__kl_band=None, objectives__fairness__beta=0)
    list(product_grpo(run, rewards={"hallucination": REWARDS["hallucination"]}, tasks=tasks))
    unseen = [row for row in run.rows("samples") if row["step"] == 2 and row["objective"] == "fairness"]
    seen = [row for row in run.rows("samples") if row["step"] == 2 and row["objective"] == "hallucination"]
    assert [row["logprobs_old"] for row in unseen] == [None] * 4
    assert all(row["logprobs_old"] for row in seen)


def test_a_start_without_sft_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny_run(tmp_path, run__steps=2)
    for steps in (1, 2):
        list(grpo(run, steps=steps))
    (event,) = run.stored("events").having("kind", {"sft_not_run"})
    (warning,) = [record for record in caplog.records if "sft.steps" in record.getMessage()]
    assert (event["step"], event["sft_steps"]) == (0, 3) and event["message"] == warning.getMessage()
    assert names(event["message"], 3, "sft(run)", "sft.steps=0")


def test_a_start_from_half_of_sft_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny_run(tmp_path, sft__steps=2, sft__warmup_steps=0)
    with closing(sft(run)) as steps:
        next(steps)
    next(grpo(run, steps=1))
    (event,) = run.stored("events").having("kind", {"sft_unfinished"})
    assert names(event["message"], 1, 2, "sft.steps") and event["message"] in caplog.text


@pytest.mark.parametrize("sft_steps", [0, 1])
def test_a_start_that_needs_no_sft_or_had_it_logs_nothing(sft_steps: int, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, sft__steps=sft_steps, sft__warmup_steps=0)
    if sft_steps:
        list(sft(run))
    list(grpo(run, steps=1))
    assert not [*run.stored("events").having("kind", {"sft_not_run", "sft_unfinished"})]
