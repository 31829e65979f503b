"""Settings that fight each other, found in configurations and in the text of notebooks."""

import json
from pathlib import Path

import nbformat
import pytest

from grpo_nb import cli, doctor, presets
from grpo_nb.config import Config
from grpo_nb.run.run import RunError
from tests.conftest import ROOT
from tests.support.tiny import tiny_run
from tests.support.tokens import names


def rules(found: list[doctor.Finding]) -> list[str]:
    return [finding.rule for finding in found]


FIGHTS = {
    "guards.rollback_kl": {"guards.rollback_kl": 0.05},
    "algorithm.warmup_steps": {"algorithm.warmup_steps": 100, "run.steps": 50},
    "run.quick_eval_every": {"run.quick_eval_every": 100, "run.steps": 60},
    "algorithm.clip_low": {"algorithm.clip_low": 0.1},
}


@pytest.mark.parametrize("setting", FIGHTS)
def test_settings_that_fight_are_named(setting: str) -> None:
    config = Config().replace(**FIGHTS[setting])
    (finding,) = doctor.lint(config)
    assert names(finding.message, setting) and (finding.rule, finding.severity) == ("idle_setting", "warning")


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_presets_do_not_fight(preset: str) -> None:
    assert doctor.lint(presets.PRESETS[preset]()) == []


def test_a_run_and_its_file_are_looked_at(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, algorithm__clip_low=0.1)
    for source in (run, run.path, str(run.path), run.path / "config.json"):
        assert rules(doctor.lint(source)) == ["idle_setting"]
    (note,) = [finding for finding in doctor.diagnose(run) if finding.rule == "idle_setting"]
    assert note.severity == "info" and names(note.message, "algorithm.clip_low")
    (tmp_path / "other.json").write_text(json.dumps({"run": {"step": 1}}))
    assert rules(doctor.lint(tmp_path / "other.json")) == ["setting_refused"]
    with pytest.raises(RunError):
        doctor.lint(tmp_path / "none")


def test_a_notebooks_literal_settings_are_checked_and_none_of_it_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [
        "%matplotlib inline\nPRESET = 'demo'\nCHANGES = {'algorithm.clip_low': 0.1, 'run.steps': steps()}",
        "raise SystemExit('run')\nawait nothing\nother = presets.demo().replace(**{'batch.group_size': 1})",
        "this is no Python",
        "x = {'some.file': 1, 'run.stepz': 3}\ny = {'a': 1}",
    ]
    book = tmp_path / "mine.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), book)
    found = doctor.lint(book)
    assert rules(found) == ["setting_refused", "setting_refused", "idle_setting"]
    said = "\n".join(finding.message for finding in found)
    assert names(said, "cell 1", "cell 2", "cell 4", "algorithm.clip_low", "group_size", "'run.stepz'", "line 3")
    assert cli.main(["doctor", "--lint", str(book)]) == 1 and names(capsys.readouterr().out, "algorithm.clip_low")
    script = tmp_path / "mine.py"
    script.write_text("\n".join(cells[:2]).replace("%matplotlib inline", ""))
    assert rules(doctor.lint(script)) == ["setting_refused", "idle_setting"]
    book.write_text("[]")
    with pytest.raises(RunError):
        doctor.lint(book)


def test_the_projects_own_notebooks_do_not_fight() -> None:
    for book in (ROOT / "notebooks").glob("*.ipynb"):
        assert doctor.lint(book) == []
