"""The lab itself: its table, that faults leave nothing behind, and four of them in runs small enough for every test."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from grpo_nb import fingerprint, judge, losses, optim
from grpo_nb.fault_lab import CLEAN, FAULTS, Fault, Lab, Outcome, bench, matrix
from grpo_nb.fault_lab.catalogue import ALL
from grpo_nb.fault_lab.lab import SIZE
from grpo_nb.policy.tokenization import TokenizerAdapter
from grpo_nb.rollout import eager
from grpo_nb.run import checkpoints
from grpo_nb.run.run import Run, RunError
from grpo_nb.training import gradients, sampling, threads
from grpo_nb.training import grpo as trainer
from grpo_nb.training.sft import sft
from grpo_nb.types import Experience
from tests.support.tiny import REWARDS, SMALL, small_tasks, tiny_run
from tests.support.tokens import names

pytestmark = pytest.mark.usefixtures("narrow_model")

PLACES: tuple[Any, ...] = (
    *(trainer, sampling, gradients, optim, losses, judge, checkpoints, eager, Tensor, TokenizerAdapter, Experience),
)
QUICK = ("wrong_temperature", "data_replaced", "sft_without_eos", "overwritten_gradients")
"""Caught without an answer that is right."""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run after three steps of SFT, which teach nothing."""
    run = tiny_run(tmp_path_factory.mktemp("lab"), "warm")
    for _ in sft(run, tasks=small_tasks()):
        pass
    return run


@pytest.fixture
def lab(warm: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """Trials of it, as small as tests are, with rewards that tell any two answers apart."""
    for key in ("batch.prompts", "batch.group_size", "batch.micro_batch"):
        monkeypatch.setitem(SIZE, key, SMALL[key])  # type: ignore[arg-type]
    monkeypatch.setitem(SIZE, "batch.micro_batch", 4)  # type: ignore[arg-type]
    made = Lab.of(warm)
    yield Lab(made.run, made.folder, made.model, small_tasks())


def everything() -> list[dict[str, Any]]:
    noted = {"kl": fingerprint._loaded.get("grpo_nb.losses.kl")}
    return [*(dict(vars(place)) for place in PLACES), dict(losses.KL), noted]


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_caught_by_what_claims_it(lab: Lab, name: str) -> None:
    fault = FAULTS[name]
    trial = lab.trial(fault)
    trial.rewards = REWARDS
    before = everything()
    outcome = trial.execute()
    assert everything() == before, "a fault is gone after its run"
    steps = outcome.caught(fault)
    assert steps is not None and steps <= fault.within, outcome


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.id)
def test_the_table_is_whole(fault: Fault) -> None:
    assert fault.caught_by and fault.what and 0 <= fault.within <= 5 <= CLEAN.within
    assert fault.claim in ("rule", "guard", "refusal") and fault.inject.__doc__
    presets_of = matrix.presets.demo().replace(**{**SIZE, **fault.settings})
    assert presets_of.run.steps >= 1


def test_a_fault_leaves_when_its_run_fails(lab: Lab) -> None:
    before = everything()
    trial = lab.trial(FAULTS["pad_is_eos"])
    trial.tasks = {}
    with pytest.raises(RuntimeError), trial.injected():
        assert everything() != before
        raise RuntimeError
    assert everything() == before


def test_without_an_sft_result_there_is_no_lab(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        Lab.of(tiny_run(tmp_path))


# What was measured


def test_every_fault_was_measured_with_three_seeds_and_caught_within_its_bound() -> None:
    outcomes = matrix.recorded()
    assert sorted((o.fault, o.seed) for o in outcomes) == sorted((name, s) for name in ALL for s in matrix.SEEDS)
    for outcome in outcomes:
        if outcome.fault == CLEAN.id:
            assert outcome.alarms == [] and outcome.steps == CLEAN.within
        else:
            steps = outcome.caught(FAULTS[outcome.fault])
            assert steps is not None and steps <= FAULTS[outcome.fault].within, f"measure again: {matrix.COMMAND}"


def test_the_matrix_has_a_row_a_fault_and_a_column_a_rule() -> None:
    table, page = matrix.confusion(matrix.recorded()), matrix.markdown()
    assert table["fault"].tolist() == [*ALL]
    assert {name for fault in FAULTS.values() for name in fault.caught_by} <= {*table.columns}
    assert all(f"| {name} |" in page for name in ALL) and matrix.COMMAND in page
    assert set(table.iloc[0, 1:]) == {""}


def test_a_fault_that_nothing_found_is_shown_as_such() -> None:
    missed = [Outcome("clamped_kl", 0, {"dead_groups": 3}, {"dead_groups": "info"}, 5)]
    assert matrix.caught(missed)["steps by seed"].tolist() == ["not caught"]
    late = [Outcome("clamped_kl", 0, {"kl_estimator": 9, "truncation": 3}, {"truncation": "warning"}, 9)]
    row = matrix.caught(late).iloc[0]
    assert (row["steps by seed"], row["also found"]) == ("9", "truncation")


# In a notebook


def test_a_record_holds_nothing_of_the_folder_that_it_was_measured_in(tmp_path: Path) -> None:
    for error in (f"{tmp_path}/demo-lab/a-0 is gone: why", f"cannot write into {tmp_path}/demo-lab/a-0", "no: x"):
        matrix.write(tmp_path / "record", [Outcome("a", 0, {}, {}, 1, error)], 1.0)
        assert str(tmp_path) not in (text := (tmp_path / "record").read_text())
        assert ("demo-lab/a-0" if "demo" in error else '"no"') in text


def test_the_menu_lists_every_fault_and_the_run_without_one(lab: Lab) -> None:
    workbench = bench.Bench(lab, "nan_gradient")
    assert [value for _, value in workbench.menu.options] == [*ALL]
    assert workbench.fault is FAULTS["nan_gradient"]
    workbench.menu.value = CLEAN.id
    assert workbench.fault is CLEAN


def test_a_trial_trains_in_a_thread_and_its_fault_leaves_with_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    before, workbench, asked_twice = everything(), bench.Bench(lab, "wrong_temperature"), threading.Event()
    choose = threads.choose

    def held(*given: Any) -> int | None:
        assert asked_twice.wait(60)
        return choose(*given)

    monkeypatch.setattr(threads, "choose", held)
    workbench.button.click()
    assert workbench.session is not None and workbench.session.dashboard().widget in workbench.panel.children
    with pytest.raises(RunError):
        workbench.start(CLEAN.id)
    asked_twice.set()
    asyncio.run(workbench.wait())
    assert everything() == before and not workbench.session.live
    assert workbench.trial is not None and "sampler_broken" in workbench.trial.outcome().found
    assert names(workbench.named.value, "sampler_broken", "nats")


def test_an_error_ends_the_trial_and_not_the_cell(lab: Lab) -> None:
    workbench = bench.Bench(lab, "sft_without_eos")
    workbench.start()
    assert names(asyncio.run(workbench.wait()), "TrainingError")
    assert workbench.trial is not None and workbench.trial.outcome().caught(workbench.fault) == 0


def test_another_sft_result_is_another_model(warm: Run, tmp_path: Path) -> None:
    other = tiny_run(tmp_path, "other", sft__steps=1)
    for _ in sft(other, tasks=small_tasks()):
        pass
    folder = tmp_path / "lab"
    assert Lab.of(warm, folder).model == Lab.of(warm, folder).model != Lab.of(other, folder).model
