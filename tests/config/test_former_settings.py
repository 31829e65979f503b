"""Settings under the names of earlier versions: a run's own files are read, and a person is told today's name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from grpo_nb import presets
from grpo_nb.cli import main
from grpo_nb.config import AlgorithmConfig, BatchConfig, Config, ConfigError, ModelConfig, SamplingConfig, parse
from grpo_nb.config.guards import OFF, GuardsConfig
from grpo_nb.run import settings
from grpo_nb.run.checkpoints import Checkpoints
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage import former_names
from tests.support import former as written
from tests.support.tokens import names, pattern

FORMER = {
    "batch.train_batch": ("batch.mini_batch", 32),
    "batch.inner_epochs": ("batch.num_iterations", 2),
    "sampling.max_completion": ("sampling.max_completion_length", 9),
    "sampling.max_prompt": ("sampling.max_prompt_length", 90),
    "algorithm.loss": ("algorithm.name", "dr_grpo"),
    "algorithm.correction": ("algorithm.importance_correction", "tis"),
    "algorithm.correction_level": ("algorithm.importance_correction_level", "sequence"),
    "algorithm.correction_bounds": ("algorithm.importance_correction_bounds", [0.4, 3.0]),
    "algorithm.entropy_top_share": ("algorithm.top_entropy_quantile", 0.2),
}
"""Former setting -> today's, with a value that is not the default."""
GROUPS = {"batch": BatchConfig, "sampling": SamplingConfig, "algorithm": AlgorithmConfig}
each = pytest.mark.parametrize(("former", "now", "value"), [(f, *rest) for f, rest in FORMER.items()])


@pytest.fixture(scope="module")
def config() -> Config:
    return presets.demo().replace(**dict(FORMER.values()))


def test_every_former_setting_is_tried_here() -> None:
    known = {f"{g}.{old}": f"{g}.{now}" for g, group in former_names.SETTINGS.items() for old, now in group.items()}
    assert known == {former: now for former, (now, _) in FORMER.items()}


def test_a_run_of_an_earlier_version_has_its_settings(config: Config, tmp_path: Path) -> None:
    folder = Run.create(tmp_path / "run", config).path
    tree = written.settings(settings.plain(config))
    assert all(former.partition(".")[2] in tree[former.partition(".")[0]] for former in FORMER)
    with pytest.raises(ConfigError):
        parse(tree)
    (folder / "config.json").write_text(json.dumps(tree))
    assert Run.open(folder).config == config == Run.open_or_create(folder, config).config
    Run.open(folder).check_settings()
    Checkpoints(tmp_path / "states").save(1, {}, {"step": 1, "config": tree})
    saved = Checkpoints(tmp_path / "states").load(1)
    assert settings.edits(config, saved) == {}
    (now, (was, is_now)), *others = settings.edits(config.replace(**{"batch.mini_batch": 16}), saved).items()
    assert (now, was, is_now, others) == ("batch.mini_batch", 32, 16, [])
    with pytest.raises(RunError, match=pattern("batch.mini_batch", 32, 16)):
        settings.refuse_edited(folder, config.replace(**{"batch.mini_batch": 16}), saved)


def test_a_file_with_both_names_of_a_setting_is_refused(tmp_path: Path) -> None:
    folder = Run.create(tmp_path / "run", presets.demo()).path
    tree = json.loads((folder / "config.json").read_text())
    tree["batch"]["train_batch"] = 8
    (folder / "config.json").write_text(json.dumps(tree))
    with pytest.raises(RunError, match=pattern("'train_batch'", "'mini_batch'")):
        Run.open(folder)


@pytest.mark.parametrize("tree", [[], None, {"batch": 3}, {"batch": None, "sampling": []}])
def test_what_is_no_configuration_is_refused_as_ever(tree: Any) -> None:
    with pytest.raises(ConfigError):
        settings.restored(tree)


@each
@pytest.mark.parametrize(
    "give",
    [
        lambda former, value: presets.demo().replace(**{former: value}),
        lambda former, value: parse({former.partition(".")[0]: {former.partition(".")[2]: value}}),
        lambda former, value: GROUPS[former.partition(".")[0]](**{former.partition(".")[2]: value}),
    ],
    ids=["replace", "file", "constructor"],
)
def test_a_former_name_is_refused_with_todays(
    former: str, now: str, value: Any, give: Callable[[str, Any], object]
) -> None:
    with pytest.raises((ConfigError, ValidationError)) as caught:
        give(former, value)
    assert all(names(str(caught.value), f"{name.partition('.')[2]}'") for name in (former, now))


def test_the_command_line_names_todays_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["train", run, "--preset", "demo", "--set", "batch.train_batch=8"]) == 2
    assert names(capsys.readouterr().err, "'batch.train_batch'", "'batch.mini_batch'") and not Path(run).exists()


def test_another_group_has_no_such_former_name() -> None:
    with pytest.raises(ValidationError) as caught:
        ModelConfig(loss="grpo")  # type: ignore[call-arg]
    assert caught.value.errors()[0]["type"] == "extra_forbidden"


def test_a_run_of_before_the_guards_goes_on_without_them(tmp_path: Path) -> None:
    """Its files have no `guards`; that it is asked for with today's preset is no contradiction."""
    config = presets.demo()
    tree = settings.plain(config)
    del tree["guards"]
    del tree["algorithm"]["skip_signal_free_groups"]
    found = settings.restored(tree)
    assert found.guards == GuardsConfig(**OFF) and not found.guards.rollback
    assert not found.algorithm.skip_signal_free_groups
    assert settings.contradictions(found, config, {}) == {}
    asked = config.replace(**{"guards.rollback_kl": 1.0})
    assert settings.contradictions(found, asked, {}).keys() == {"guards.rollback_kl"}
    Checkpoints(tmp_path / "states").save(1, {}, {"step": 1, "config": tree})
    assert settings.edits(found, Checkpoints(tmp_path / "states").load(1)) == {}
