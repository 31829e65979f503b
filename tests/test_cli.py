"""The command line's contract: help, usage, exit statuses, opening a run, steering one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_nb import __version__, presets
from grpo_nb.cli.arguments import commands
from grpo_nb.run import Run
from tests.cli_stage import STEPS, mine, save, says, train_nothing
from tests.conftest import ROOT
from tests.tiny import tiny_config


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return mine(tmp_path)


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    train_nothing(monkeypatch)


# ---- help and usage


@pytest.mark.parametrize("name", commands())
def test_help_is_enough_to_work_from(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = says(capsys, *name.split()[1:], "--help")
    assert status == 0
    assert all(len(line) <= 100 for line in out.splitlines())
    if name == "grpo-nb":
        assert "exit status: 0 done, 1 findings or failure, 2 usage, 130 interrupted and saved" in out
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
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["trian", "x"], "invalid choice: 'trian'"),
        (["train"], "required: RUN"),
        (["train", "x", "--preset", "gpu_25gb"], "choose from"),
        (["train", "x", "--set", "batch.group_size"], "needs KEY=VALUE, e.g. batch.group_size=4"),
        (["train", "x", "--steps", "0"], "'0'; needs a whole number of 1 or more"),
        (["train", "x", "--step", "3"], "unrecognized arguments"),
        (["train", "x", "--seed", "-1"], "needs a whole number of 0 or more"),
        (["eval", "x", "--stage", "last"], "needs base, sft, latest or the step of a checkpoint"),
        (["plan", "--gib", "none"], "needs the device's memory in GiB"),
        (["score", "mmlu", "--data", "x", "--field", "y"], "invalid choice: 'mmlu'"),
        (["score", "bbq", "--data", "x"], "required: --field"),
        (["score", "bbq", "--field", "x"], "required: --data"),
    ],
)
def test_wrong_usage_is_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = says(capsys, *argv)
    assert (status, out) == (2, "")
    assert message in err and "Traceback" not in err


# ---- opening a run


def test_a_missing_run_is_not_made_by_accident(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.path.parent / "mien"
    status, out, err = says(capsys, "train", path)
    assert (status, out) == (2, "")
    assert f"no run in {path}" in err and "did you mean" in err and f"grpo-nb train {path} --preset demo" in err
    assert not path.exists()


def test_preset_and_set_make_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new"
    flags = ["--set", "sft.steps=0", "--set", "model.name=my/model", "--set", "objectives.fairness.kl_band=null"]
    assert says(capsys, "train", path, "--preset", "demo", *flags, "--seed", 7, "--no-deterministic")[0] == 0
    config = Run.open(path).config
    assert (config.sft.steps, config.model.name, config.run.seed, config.run.deterministic) == (0, "my/model", 7, False)
    assert config.objectives["fairness"].kl_band is None
    assert config.sampling == presets.demo().sampling


def test_the_same_command_again_is_no_contradiction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", tmp_path / "new", "--preset", "demo", "--set", "sft.steps=0", "--set", "algorithm.kl=k2"]
    assert says(capsys, *command, "--steps", 2)[0] == 0
    status, out, _ = says(capsys, *command, "--steps", 2)
    assert (status, out.strip()) == (0, f"{tmp_path / 'new'}: already at step 2 of 2; pass --steps to go on")


def test_a_contradiction_is_refused_with_both_values(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, 1)
    for flags in (["--set", "batch.prompts=8"], ["--preset", "demo"], ["--seed", "3"]):
        status, out, err = says(capsys, "train", run.path, *flags)
        assert (status, out) == (2, "")
        assert "was made with other settings, which never change" in err
    assert "run.seed: the run has 0, asked for 3" in err


def test_a_wrong_path_is_corrected_by_the_same_command_with_the_right_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", tmp_path / "new", "--set", "sft.steps=0", "--steps", 2]
    status, _, err = says(capsys, *command, "--set", "objectives.fairness.data=nowhere.jsonl")
    assert status == 1 and "no file or folder at nowhere.jsonl" in err
    status, out, _ = says(capsys, *command, "--set", "objectives.fairness.data=demo")
    assert status == 0 and "done, step 2 of 2" in out
    assert Run.open(tmp_path / "new").config.objectives["fairness"].data == "demo"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("sampling.temperature=9", "starts the knob 'temperature': temperature=9.0 cannot be set; needs a number"),
        ("objectives.fairness.beta=11", "objectives.fairness.beta starts the knob 'beta/fairness'"),
        ("algorithm.learning_rate=2", "algorithm.learning_rate starts the knob 'learning_rate'"),
        ("batch.group_sice=4", "did you mean 'group_size'?"),
        ("batch.group_size=1", "needs 2 or more"),
        ("batch.group_size=many", "found 'many'"),
        ("algorithm.kl=k1", "use 'k2', 'k3' or 'k3_k2'"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(
    flag: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = says(capsys, "train", tmp_path / "new", "--preset", "demo", "--set", flag)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and message in err and "Traceback" not in err
    assert not (tmp_path / "new").exists()


# ---- steering


def test_tell_reaches_whoever_trains(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    status, out, _ = says(capsys, "tell", run.path, "pause")
    assert status == 1 and "new, nothing trains it" in out and run.knobs.command == "run"
    with run.lock():
        run.log_event("start", step=0)
        for word, command in (("pause", "pause"), ("resume", "run"), ("stop", "stop"), ("step", "pause")):
            status, out, _ = says(capsys, "tell", run.path, word)
            assert (status, run.knobs.command) == (0, command) and f"to {word}" in out
        says(capsys, "tell", run.path, "save")
        asked = run.knobs.snapshot()
        assert asked.orders == ["step", "save"] and asked.by["save"] == "the command line"
        assert says(capsys, "tell", run.path, "dance")[0] == 2


def test_grpo_without_sft_where_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = Run.create(tmp_path / "bare", tiny_config(run__steps=STEPS))
    assert says(capsys, "train", run.path, "--no-sft")[0] == 0
    assert run.checkpoints.steps() == [STEPS] and not run.sft_checkpoints.steps()
