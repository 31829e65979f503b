"""A run's settings: contradicted never, corrected until something stands on them."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_nb import presets
from grpo_nb.config import ConfigError
from grpo_nb.run import settings
from grpo_nb.run.checkpoints import Checkpoints
from grpo_nb.run.lock import RunLocked
from grpo_nb.run.run import Run, RunError
from tests.support.kill_points import survives
from tests.support.run_folder import CONFIG, STEPS, files, log, save
from tests.support.tiny import tiny_config
from tests.support.tokens import names, pattern


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "demo", CONFIG)


# ---- contradiction


def test_a_default_that_has_changed_since_is_no_contradiction(tmp_path: Path) -> None:
    config = tiny_config(algorithm__kl_weight="ratio", algorithm__advantage_clip=10.0)
    Run.create(tmp_path / "old", config)
    again = Run.open_or_create(tmp_path / "old", tiny_config())
    assert (again.config.algorithm.kl_weight, again.config.algorithm.advantage_clip) == ("ratio", 10.0)
    asked = Run.open_or_create(tmp_path / "old", tiny_config(), changes={"algorithm.kl_weight": "auto"})
    assert asked.config.algorithm.kl_weight == "auto"


def test_a_judge_of_a_run_made_before_decides_ties_as_it_did(tmp_path: Path) -> None:
    """A version without `decides_ties` wrote no such key, into config.json and checkpoints."""
    today = tiny_config().replace(**{"objectives.fairness.judge": {"providers": [{"model": "m"}]}})
    assert not today.objectives["fairness"].judge.decides_ties  # type: ignore[union-attr]
    folder = Run.create(tmp_path / "old", today).path
    tree = json.loads((folder / "config.json").read_text())
    assert tree["objectives"]["fairness"]["judge"].pop("decides_ties") is False
    (folder / "config.json").write_text(json.dumps(tree))
    old = Run.open(folder)
    assert old.config.objectives["fairness"].judge.decides_ties  # type: ignore[union-attr]
    assert old.config.objectives["hallucination"].judge is None
    path = Checkpoints(tmp_path / "states").save(1, {}, {"step": 1, "config": tree})
    settings.refuse_edited(folder, old.config, Checkpoints(tmp_path / "states").load(1))
    assert path.is_dir() and Run.open_or_create(folder, today).config == old.config
    assert Run.open(folder).config == old.config, "nothing was corrected"
    changed = Run.open_or_create(folder, today, changes={"objectives.fairness.judge.decides_ties": False})
    assert changed.config == today
    Run.create(tmp_path / "new", today)
    assert Run.open(tmp_path / "new").config == today


def test_what_changes_no_step_may_be_edited(tmp_path: Path) -> None:
    before = tiny_config().replace(**{"objectives.fairness.judge": {"providers": [{"model": "m"}]}})
    state = {"step": 1, "config": before.model_dump(mode="json")}
    Checkpoints(tmp_path).save(1, {}, state)
    for name, value in {"max_tokens": 999, "timeout_s": 1.5, "deadline_s": 9.0, "retries": 0, "concurrency": 1}.items():
        after = before.replace(**{f"objectives.fairness.judge.{name}": value})
        settings.refuse_edited(tmp_path, after, Checkpoints(tmp_path).load(1))
    for name, value in {"run.checkpoints_gib": 9.0, "run.keep_checkpoints": 7}.items():
        settings.refuse_edited(tmp_path, before.replace(**{name: value}), Checkpoints(tmp_path).load(1))
    with pytest.raises(RunError, match=r"judge\.weight"):
        edited = before.replace(**{"objectives.fairness.judge.weight": 0.5})
        settings.refuse_edited(tmp_path, edited, Checkpoints(tmp_path).load(1))


def test_the_same_settings_are_no_contradiction(run: Run) -> None:
    before = files(run.path)
    for arguments in (
        {},
        {"config": CONFIG},
        {"changes": {"run.seed": CONFIG.run.seed, "algorithm.name": CONFIG.algorithm.name}},
        {"config": CONFIG, "changes": {"batch.group_size": CONFIG.batch.group_size}},
        {"config": CONFIG.replace(**{"run.steps": STEPS + 5})},  # a run may always go further
        {"config": CONFIG, "steps": STEPS + 50},
        {"changes": {"run.steps": STEPS}},
    ):
        opened = Run.open_or_create(run.path, **arguments)
        assert opened.config == CONFIG
    assert files(run.path) == before, "config.json itself never changes"


def test_other_settings_are_refused_and_listed_with_both_values(run: Run) -> None:
    log(run, 1)
    other = CONFIG.replace(**{"run.seed": 7})
    with pytest.raises(RunError) as refusal:
        Run.open_or_create(run.path, other, changes={"objectives.fairness.beta": 0.5})
    message = str(refusal.value)
    assert names(message, run.path)
    beta, seed = CONFIG.objectives["fairness"].beta, CONFIG.run.seed
    listed = [line.strip() for line in message.splitlines()[1:] if re.match(r"\s*[a-z_.]+: ", line)]
    assert len(listed) == 2 and names(listed[0], "objectives.fairness.beta", beta, 0.5)
    assert names(listed[1], "run.seed", seed, 7)


def test_single_changes_are_compared_with_the_run_not_with_a_preset(tmp_path: Path) -> None:
    made = Run.open_or_create(tmp_path / "r", CONFIG, changes={"run.seed": 3})
    assert Run.open_or_create(made.path, changes={"run.seed": 3}).config == made.config
    log(made, 1)
    with pytest.raises(RunError, match=pattern("algorithm.name", f"'{made.config.algorithm.name}'", "'grpo'")):
        Run.open_or_create(made.path, changes={"algorithm.name": "grpo"})
    with pytest.raises(RunError, match=pattern("run.seed", 3, 0)):
        Run.open_or_create(made.path, CONFIG)


def test_a_changed_number_of_steps_is_refused_with_the_way_to_go_further(run: Run) -> None:
    log(run, 1)
    with pytest.raises(RunError, match=pattern("run.steps", STEPS, 7, "--steps N")):
        Run.open_or_create(run.path, changes={"run.steps": 7})


# ---- corrected, while nothing stands on the settings


WRONG = {"model.name": "no/such-model", "objectives.fairness.beta": 0.5}


def test_settings_may_be_corrected_until_something_was_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run.open_or_create(tmp_path / "r", CONFIG, changes=WRONG, steps=9)
    run.knobs["temperature"].set(0.5)
    version = run.knobs.snapshot().version
    right = Run.open_or_create(run.path, changes={"model.name": "demo", "objectives.fairness.beta": 0.25})
    assert right.config == Run.open(run.path).config
    assert right.config == CONFIG.replace(**{"objectives.fairness.beta": 0.25, "run.steps": 9})
    assert right.knobs["beta/fairness"].value == 0.25, "knobs start from the settings"
    assert right.knobs.snapshot().version > version and right.knobs.snapshot().problem is None
    (event,) = [e for e in right.rows("events") if e["kind"] == "config_changed"]
    assert event["differences"]["model.name"] == ["no/such-model", "demo"] and len(event["differences"]) == 2
    assert "model.name: was 'no/such-model', now 'demo'" in caplog.text
    assert Run.open_or_create(run.path, CONFIG, steps=7, changes={"run.seed": 1}).config.run.steps == 7


def train_a_step(run: Run) -> None:
    log(run, 1)


def train_sft(run: Run) -> None:
    run.sft_checkpoints.save(3, {"policy": {"w": torch.ones(2)}}, {"step": 3})


def measure(run: Run) -> None:
    run.log_evaluation({"stage": "base"})


@pytest.mark.parametrize("work", [train_a_step, train_sft, measure, lambda run: save(run, 0)])
def test_after_any_work_settings_are_frozen(run: Run, work: Callable[[Run], None]) -> None:
    assert not run.has_work()
    work(run)
    before = files(run.path)
    with pytest.raises(RunError, match=pattern(run.path, *WRONG)):
        Run.open_or_create(run.path, changes=WRONG)
    assert files(run.path) == before


def test_settings_are_not_corrected_under_a_trainer_that_is_loading(run: Run) -> None:
    with run.lock(), pytest.raises(RunLocked):
        Run.open_or_create(run.path, changes=WRONG)
    assert Run.open(run.path).config == CONFIG


def test_a_run_opened_before_a_correction_is_not_trained_with_the_old_settings(run: Run) -> None:
    run.check_settings()
    Run.open_or_create(run.path, changes={"run.seed": 4})
    with pytest.raises(RunError, match=pattern("run.seed", 0, 4)):
        run.check_settings()


def correct_there(folder: Path) -> None:
    Run.open_or_create(folder, changes={"objectives.fairness.beta": 0.5, "sampling.temperature": 0.5})


def check_old_or_new(folder: Path) -> None:
    correct_there(folder)
    run = Run.open(folder)
    assert (run.knobs["beta/fairness"].value, run.knobs["temperature"].value) == (0.5, 0.5)
    assert run.config.sampling.temperature == 0.5


def test_a_kill_at_any_call_of_a_correction_is_mended_by_asking_again(run: Run) -> None:
    assert survives(correct_there, check_old_or_new, run.path) >= 10


def test_a_knob_out_of_bounds_makes_no_run_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=pattern("sampling.temperature", "'temperature'", 0.05, 5)):
        Run.create(tmp_path / "r", CONFIG.replace(**{"sampling.temperature": 9.0}))
    assert not (tmp_path / "r").exists()


def test_a_missing_run_is_made_as_asked_for(tmp_path: Path) -> None:
    assert Run.open_or_create(tmp_path / "a").config == presets.demo()
    assert Run.open_or_create(tmp_path / "b", CONFIG, changes={"run.seed": 3}, steps=9).config == CONFIG.replace(
        **{"run.seed": 3, "run.steps": 9}
    )
    with pytest.raises(ConfigError, match=pattern("'run.sed'")):
        Run.open_or_create(tmp_path / "c", CONFIG, changes={"run.sed": 3})
    assert not (tmp_path / "c").exists()
    with pytest.raises(ConfigError, match=pattern("'run.sed'")):
        Run.open_or_create(tmp_path / "a", changes={"run.sed": 3})
