"""Settings that fight each other, found in configurations and in the text of notebooks."""

import json
from pathlib import Path

import nbformat
import pytest

from grpo_nb import cli, doctor, presets
from grpo_nb.config import Config
from grpo_nb.doctor.settings_lint import CLASS_DEFAULTS
from grpo_nb.run.run import RunError
from tests.conftest import ROOT
from tests.support.tiny import tiny_run
from tests.support.tokens import names, pattern


def rules(found: list[doctor.Finding]) -> list[str]:
    return [finding.rule for finding in found]


FIGHTS = {
    "guards.rollback_kl": {"guards.rollback_kl": 0.05},
    "algorithm.warmup_steps": {"algorithm.warmup_steps": 100, "run.steps": 50},
    "run.quick_eval_every": {"run.quick_eval_every": 100, "run.steps": 60},
    "algorithm.clip_low": {"algorithm.clip_low": 0.1},
    "model.quantize='nf4'": {"model.quantize": "nf4", "rollout.engine": "vllm"},
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


DEEP = "[" * 90 + "]" * 90
VALUES = {
    "list as key": "{[]: 1}",
    "list in a set": "{[1]}",
    "5,000 digits": hex(10**5000),
    "5,000 digits below": "{'a': " + hex(10**5000) + "}",
    "deep": DEEP,
    "long": repr("x" * 10_000),
    "long dictionary": repr({f"k{n}": "y" * 100 for n in range(1_000)}),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_of_any_kind_is_one_short_finding(value: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f'x = {{"run.steps": {value}}}')
    (finding,) = doctor.lint(tmp_path / "a.py")
    assert finding.rule == "setting_refused" and names(finding.message, "run.steps", "line 1")
    assert len(finding.message) < 250


@pytest.mark.parametrize("text", ["[" * 20_000, '{"run": {"steps": ' + "9" * 5000 + "}}", '{"run": [1]}', "3"])
def test_a_json_of_any_kind_is_a_finding(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    assert set(rules(doctor.lint(tmp_path / "a.json"))) == {"setting_refused"}


def test_each_error_is_a_finding_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text('x = {"run.steps": -1, "sft.batch": 0, "run.seed": "a\\nb"}')
    found = doctor.lint(tmp_path / "a.py")
    assert [next(key for key in ("run.steps", "sft.batch", "run.seed") if key in f.message) for f in found] == [
        "sft.batch", "run.steps", "run.seed",
    ]  # fmt: skip
    assert cli.main(["doctor", "--lint", str(tmp_path / "a.py")]) == 1
    assert capsys.readouterr().out.count("\n") == 4


def test_what_completes_the_settings_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "a.py"

    def base(*options: str) -> str | None:
        cli.main(["doctor", "--lint", str(script), "--json", *options])
        found: str | None = json.loads(capsys.readouterr().out)["completed_with"]
        return found

    script.write_text('x = {"batch.group_size": 4}')
    assert base() == CLASS_DEFAULTS and base("--preset", "demo") == "preset demo"
    script.write_text('PRESET = "cpu_small"\nx = {"batch.group_size": 4}')
    assert base() == "preset cpu_small" and base("--preset", "demo") == "preset demo"
    cli.main(["doctor", "--lint", str(script)])
    assert names(capsys.readouterr().out, "preset cpu_small", "--preset")
    assert cli.main(["doctor", "--preset", "demo"]) == 2


def test_the_given_preset_completes_the_settings(tmp_path: Path) -> None:
    fits = {preset: presets.PRESETS[preset]().batch.prompts for preset in ("demo", "gpu_24gb")}
    assert len({*fits.values()}) == 2, "else the presets show nothing"
    for name, text in (
        ("a.py", 'x = {{"batch.prompts": {0}, "batch.group_size": 3}}'),
        ("a.json", '{{"batch": {{"prompts": {0}, "group_size": 3}}}}'),
    ):
        (tmp_path / name).write_text(text.format(2))
        said = {preset: [f.message for f in doctor.lint(tmp_path / name, preset)] for preset in fits}
        assert said["demo"] != said["gpu_24gb"]
    with pytest.raises(ValueError, match=pattern("nothing", "demo")):
        doctor.lint(tmp_path / "a.py", "nothing")


def test_a_file_that_is_missing_is_called_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("none.json", "none.py", "none.ipynb"):
        assert cli.main(["doctor", "--lint", str(tmp_path / name)]) == 2
        assert names(capsys.readouterr().err, "file", tmp_path / name)
        with pytest.raises(RunError, match=pattern("file", tmp_path / name)):
            doctor.lint(tmp_path / name)
