"""The command line's contract: help, usage, exit statuses, opening a run, steering one."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_nb import __version__, presets
from grpo_nb.cli.arguments import commands
from grpo_nb.run.run import Run
from tests.conftest import ROOT
from tests.support.cli_stage import STEPS, save, says
from tests.support.tiny import tiny_config
from tests.support.tokens import names

# ---- help and usage


@pytest.mark.parametrize("name", commands())
def test_help_is_enough_to_work_from(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = says(capsys, *name.split()[1:], "--help")
    assert status == 0
    assert all(len(line) <= 100 for line in out.splitlines())
    if name == "grpo-nb":
        assert re.search(r"\b0 .*\b1 .*\b2 .*\b130 ", out), "the exit statuses"
        assert all(command.split()[-1] in out for command in commands())


def test_examples_in_the_help_are_understood() -> None:
    text = "\n".join(command.format_help() for command in commands().values()).replace("\\\n", " ")
    examples = re.findall(r"^ +grpo-nb (.+?)(?:   .*)?$", re.sub(r"\n +--set", " --set", text), re.MULTILINE)
    assert len(examples) > 15
    for example in examples:
        commands()["grpo-nb"].parse_args(example.split())


def test_help_needs_no_torch() -> None:
    code = "import sys; from grpo_nb.cli import main; main(['train', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert says(capsys, "--version")[1].strip() == f"grpo-nb {__version__}"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], ["COMMAND"]),
        (["trian", "x"], ["'trian'"]),
        (["train"], ["RUN"]),
        (["train", "x", "--preset", "gpu_25gb"], ["--preset", "'gpu_25gb'", "gpu_24gb"]),
        (["train", "x", "--set", "batch.group_size"], ["--set", "KEY=VALUE", "batch.group_size=4"]),
        (["train", "x", "--set", 'objectives={"a": 1'], ["--set", "objectives", "JSON"]),
        (["train", "x", "--steps", "0"], ["--steps", "'0'", 1]),
        (["train", "x", "--step", "3"], ["--step"]),
        (["train", "x", "--seed", "-1"], ["--seed", "'-1'", 0]),
        (["eval", "x", "--stage", "last"], ["--stage", "'last'", "base", "sft", "latest"]),
        (["plan", "--gib", "none"], ["--gib", "'none'"]),
        (["score", "mmlu", "--data", "x", "--field", "y"], ["'mmlu'"]),
        (["score", "bbq", "--data", "x"], ["--field"]),
        (["score", "bbq", "--field", "x"], ["--data"]),
    ],
)
def test_wrong_usage_is_2(argv: list[str], named: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = says(capsys, *argv)
    assert (status, out) == (2, "")
    assert names(err.partition("error: ")[2], *named) and "Traceback" not in err


# ---- opening a run


def test_a_missing_run_is_not_made_by_accident(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.path.parent / "mien"
    status, out, err = says(capsys, "train", path)
    assert (status, out) == (2, "")
    assert names(err, path, run.path, f"grpo-nb train {path} --preset demo")
    assert not path.exists()


def test_preset_and_set_make_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new"
    flags = ["--set", "sft.steps=0", "--set", "model.name=my/model", "--set", "objectives.fairness.kl_band=null"]
    assert says(capsys, "train", path, "--preset", "demo", *flags, "--seed", 7, "--no-deterministic")[0] == 0
    config = Run.open(path).config
    assert (config.sft.steps, config.model.name, config.run.seed, config.run.deterministic) == (0, "my/model", 7, False)
    assert config.objectives["fairness"].kl_band is None
    assert config.sampling == presets.demo().sampling


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_a_file_of_settings_changes_the_presets(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"mine.{kind}"
    tree = {"batch": {"group_size": 4}, "run": {"steps": 7}, "objectives": {"one": {"task": "bbq", "data": "demo"}}}
    toml = '[batch]\ngroup_size = 4\n[run]\nsteps = 7\n[objectives.one]\ntask = "bbq"\ndata = "demo"\n'
    file.write_text(json.dumps(tree) if kind == "json" else toml)
    status, out, _ = says(capsys, "settings", "--settings", file, "--set", "run.steps=8", "--json")
    shown = {row["key"]: row["value"] for row in json.loads(out)}
    assert (status, shown["batch.group_size"], shown["run.steps"], shown["objectives.one.task"]) == (0, 4, 8, "bbq")
    assert "objectives.fairness.task" not in shown and shown["batch.prompts"] == presets.demo().batch.prompts


@pytest.mark.parametrize("text", ["[batch", "1", None])
def test_a_file_of_settings_that_is_none_is_refused(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.json"
    if text is not None:
        file.write_text(text)
    status, _, err = says(capsys, "settings", "--settings", file)
    assert status == 2 and names(err, "--settings", str(file)) and "Traceback" not in err


def test_the_same_command_again_is_no_contradiction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", tmp_path / "new", "--preset", "demo", "--set", "sft.steps=0", "--set", "algorithm.kl=k2"]
    assert says(capsys, *command, "--steps", 2)[0] == 0
    status, out, _ = says(capsys, *command, "--steps", 2)
    assert status == 0 and names(out, tmp_path / "new", "already", 2, "--steps") and out.count("\n") == 1


def test_a_contradiction_is_refused_with_both_values(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, 1)
    for flags in (["--set", "batch.prompts=8"], ["--preset", "demo"], ["--seed", "3"]):
        status, out, err = says(capsys, "train", run.path, *flags)
        assert (status, out) == (2, "")
        assert names(err, run.path)
    assert names(err, "run.seed", 0, 3)


def test_a_wrong_path_is_corrected_by_the_same_command_with_the_right_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", tmp_path / "new", "--set", "sft.steps=0", "--steps", 2]
    status, _, err = says(capsys, *command, "--set", "objectives.fairness.data=nowhere.jsonl")
    assert status == 1 and "nowhere.jsonl" in err
    status, out, _ = says(capsys, *command, "--set", "objectives.fairness.data=demo")
    assert status == 0 and names(out, "done", 2)
    assert Run.open(tmp_path / "new").config.objectives["fairness"].data == "demo"


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("sampling.temperature=9", ["'temperature'", "temperature=9.0", 0.05, 5]),
        ("objectives.fairness.beta=11", ["objectives.fairness.beta", "'beta/fairness'"]),
        ("algorithm.learning_rate=2", ["algorithm.learning_rate", "'learning_rate'"]),
        ("batch.group_sice=4", ["group_sice", "'group_size'"]),
        ("batch.group_size=1", ["group_size=1", 2]),
        ("batch.group_size=many", ["batch.group_size", "'many'"]),
        ("algorithm.kl=k1", ["'k1'", "'k2'", "'k3'", "'k3_k2'"]),
    ],
)
def test_a_wrong_setting_is_one_clear_error(
    flag: str, named: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = says(capsys, "train", tmp_path / "new", "--preset", "demo", "--set", flag)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and names(err, *named) and "Traceback" not in err
    assert not (tmp_path / "new").exists()


# ---- steering


def test_tell_reaches_whoever_trains(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    status, out, _ = says(capsys, "tell", run.path, "pause")
    assert status == 1 and names(out, "new") and run.knobs.command == "run"
    with run.lock():
        run.log_event("start", step=0)
        for word, command in (("pause", "pause"), ("resume", "run"), ("stop", "stop"), ("step", "pause")):
            status, out, _ = says(capsys, "tell", run.path, word)
            assert (status, run.knobs.command) == (0, command) and f"to {word}" in out
        says(capsys, "tell", run.path, "save")
        asked = run.knobs.snapshot()
        assert asked.orders == ["step", "save"] and asked.by["save"] == "the command line"
        assert says(capsys, "tell", run.path, "dance")[0] == 2
        assert says(capsys, "tell", run.path, "beta/fairness=0.3")[0] == 0
        assert (run.knobs["beta/fairness"].value, run.knobs["beta/fairness"].mode) == (0.3, "manual")
        assert says(capsys, "tell", run.path, "beta/fairness=auto")[0] == 0
        status, out, _ = says(capsys, "tell", run.path, "undo")
        assert status == 0 and "beta/fairness = 0.3" in out and run.knobs["beta/fairness"].value == 0.3
        assert says(capsys, "tell", run.path, "undo")[0] == 0 and run.knobs["beta/fairness"].mode == "auto"
        assert says(capsys, "tell", run.path, "undo")[0] == 1
        assert run.knobs["beta/fairness"].mode == "auto"
        for wrong in ("beta/fairnes=1", "temperature=-5", "temperature=auto", "temperature=much"):
            status, _, err = says(capsys, "tell", run.path, wrong)
            assert status == 1 and names(err, wrong.partition("=")[0])
        assert run.knobs.snapshot().by["beta/fairness"] == "the command line"
        copy = shutil.copytree(run.path, run.path.with_name("copy"))
        status, out, _ = says(capsys, "tell", copy, "pause")
        assert status == 1 and names(out, "stopped"), "nobody reads the knobs of a copy"


def test_grpo_without_sft_where_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = Run.create(tmp_path / "bare", tiny_config(run__steps=STEPS))
    assert says(capsys, "train", run.path, "--no-sft")[0] == 0
    assert run.checkpoints.steps() == [STEPS] and not run.sft_checkpoints.steps()


def test_two_totals_of_a_new_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--preset", "demo", "--set", "run.steps=4")
    status, _, err = says(capsys, "train", tmp_path / "new", *settings, "--steps", 2)
    assert status == 2 and names(err, "--steps 2", "run.steps=4", "--steps 4") and not (tmp_path / "new").exists()
    assert says(capsys, "train", tmp_path / "new", *settings, "--steps", 4)[0] == 0
