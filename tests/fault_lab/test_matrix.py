"""The matrix: every fault in a run of the demo after its SFT, with three seeds, and healthy runs beside them."""

from collections.abc import Iterator

import pytest

from grpo_nb.fault_lab import CLEAN, FAULTS, Lab, matrix
from grpo_nb.fault_lab.catalogue import BONUS, COOL, LORA, UNDIVIDED
from grpo_nb.fault_lab.records import Fault

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """On one SFT result for all."""
    yield Lab.of(matrix.warmed_up(tmp_path_factory.mktemp("matrix")))


@pytest.mark.parametrize("seed", matrix.SEEDS)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.id)
def test_a_fault_is_caught_within_its_bound(lab: Lab, fault: Fault, seed: int) -> None:
    outcome = lab.trial(fault, seed).execute()
    steps = outcome.caught(fault)
    assert steps is not None and steps <= fault.within, outcome


@pytest.mark.parametrize("seed", matrix.SEEDS)
def test_the_run_without_a_fault_raises_nothing(lab: Lab, seed: int) -> None:
    outcome = lab.trial(CLEAN, seed).execute()
    assert (outcome.alarms, outcome.error, outcome.steps) == ([], "", CLEAN.within)


@pytest.mark.parametrize("seed", matrix.SEEDS)
@pytest.mark.parametrize("settings", [COOL, LORA, UNDIVIDED, BONUS, {"run.quick_eval_every": 5}], ids=str)
def test_the_settings_of_a_fault_s_run_alone_raise_nothing(lab: Lab, settings: dict[str, object], seed: int) -> None:
    control = Fault("control", "no fault", "rule", (), 5, CLEAN.inject, settings)
    outcome = lab.trial(control, seed).execute()
    assert (outcome.alarms, outcome.error, outcome.steps) == ([], "", 5)
