"""The command line's contract: what is printed where, exit statuses, resuming, interrupts that save."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from grpo_nb import __version__, presets
from grpo_nb.cli import main, progress, verbs
from grpo_nb.cli.arguments import commands
from grpo_nb.doctor import Check
from grpo_nb.findings import Finding
from grpo_nb.run import Run, RunError
from grpo_nb.types import StepStats
from tests.conftest import ROOT
from tests.test_bbq import templates
from tests.test_halueval import RIGHT as QA_ROW
from tests.tiny import tiny_config

STEPS = 4


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of four steps without SFT."""
    return Run.create(tmp_path / "runs" / "mine", tiny_config(run__steps=STEPS, sft__steps=0))


def stats(step: int) -> StepStats:
    return StepStats(step, {"step": step, "loss": 0.5, "reward/fairness": 0.25, "kl/fairness": 0.01, "status": "ok"})


def save(run: Run, step: int, sft: bool = False) -> None:
    folder = run.sft_checkpoints if sft else run.checkpoints
    folder.save(step, {"policy": {"w": torch.zeros(1)}}, {"step": step})


def fake_grpo(run: Run, *, steps: int) -> Iterator[StepStats]:
    """Trains nothing; resumes, yields and saves as the real one does."""
    newest, _ = run.checkpoints.latest()
    step = newest.step if newest else 0
    try:
        while step < steps:
            step += 1
            yield stats(step)
    finally:
        save(run, step)


def fake_sft(run: Run) -> Iterator[StepStats]:
    try:
        for step in range(1, run.config.sft.steps + 1):
            yield stats(step)
    finally:
        save(run, step, sft=True)


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "grpo", fake_grpo)
    monkeypatch.setattr(verbs, "sft", fake_sft)


def says(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    capsys.readouterr()
    status = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return status, out, err


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


# ---- training


def test_train_goes_to_its_steps_and_says_what_is_next(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = says(capsys, "train", run.path)
    assert status == 0
    assert f"{run.path}: GRPO, 4 steps\n" in out
    assert f"{run.path}: done, step 4 of 4; next: grpo-nb eval {run.path}, grpo-nb diagnose {run.path}\n" in out
    assert "GRPO step 4/4  loss 0.500  reward/fairness 0.250  kl/fairness 0.010" in err


def test_train_resumes_and_says_so(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, 3)
    status, out, _ = says(capsys, "train", run.path)
    assert status == 0 and f"{run.path}: resumed at step 3 of 4\n" in out


def test_a_second_trainer_is_refused_before_anything_is_announced(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, 3)
    with run.lock():
        for verb in ("train", "sft"):
            status, out, err = says(capsys, verb, run.path)
            assert (status, out) == (1, "") and "is being trained by" in err
    assert says(capsys, "train", run.path)[0] == 0


def test_steps_is_the_total_to_reach(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "done, step 2 of 2" in says(capsys, "train", run.path, "--steps", 2)[1]
    out = says(capsys, "train", run.path, "--steps", 6)[1]
    assert "resumed at step 2 of 6" in out and "done, step 6 of 6" in out
    assert "already at step 6 of 4; pass --steps to go on" in says(capsys, "train", run.path)[1]
    assert Run.open(run.path).config.run.steps == STEPS


def test_train_does_sft_first_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create(tmp_path / "mine", tiny_config(sft__steps=3))
    status, out, err = says(capsys, "train", run.path)
    assert status == 0
    assert out.index("SFT comes first") < out.index("SFT, 3 steps") < out.index("GRPO, 4 steps")
    assert "SFT step 3/3" in err
    assert "SFT" not in says(capsys, "train", run.path, "--steps", 5)[1]


def test_sft_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create(tmp_path / "mine", tiny_config(sft__steps=3))
    status, out, _ = says(capsys, "sft", run.path)
    assert status == 0 and f"done, step 3 of 3; next: grpo-nb train {run.path}" in out
    assert says(capsys, "sft", run.path)[1] == f"{run.path}: SFT is done, 3 steps\n"
    without = Run.create(tmp_path / "without", tiny_config(sft__steps=0))
    assert "sft.steps is 0, nothing to do" in says(capsys, "sft", without.path)[1]


# ---- interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_finishes_the_step_saves_and_says_how_to_go_on(
    number: int, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(run: Run, *, steps: int) -> Iterator[StepStats]:
        for step in fake_grpo(run, steps=steps):
            if step.step == 2:
                os.kill(os.getpid(), number)
                time.sleep(0.01)  # the handler runs between two instructions of this thread
            yield step

    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(verbs, "grpo", interrupted)
    status, out, err = says(capsys, "train", run.path)
    assert status == 130
    assert "stopping after this step, then saving" in err
    assert out.endswith(f"interrupted and saved at step 2 of 4; go on with: grpo-nb train {run.path}\n")
    assert run.checkpoints.latest()[0].step == 2  # type: ignore[union-attr]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    monkeypatch.setattr(verbs, "grpo", fake_grpo)
    assert "resumed at step 2 of 4" in says(capsys, "train", run.path)[1]


def test_a_second_interrupt_ends_at_once(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(run: Run, *, steps: int) -> Iterator[StepStats]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        yield stats(1)

    monkeypatch.setattr(verbs, "grpo", stuck)
    status, _, err = says(capsys, "train", run.path)
    assert status == 130 and "interrupted at once" in err and "Traceback" not in err


def test_a_stop_from_the_knobs_is_told_from_an_interrupt(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "grpo", lambda run, steps: fake_grpo(run, steps=1))
    status, out, _ = says(capsys, "train", run.path)
    assert status == 130 and "stopped by a request in its knobs and saved at step 1 of 4" in out


# ---- failures


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RunError("the run is trained by process 7"), "error: the run is trained by process 7"),
        (PermissionError(13, "Permission denied", "runs/x"), "error: [Errno 13] Permission denied: 'runs/x'"),
        (FloatingPointError("parameter w is not finite"), "error: parameter w is not finite"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "Halve batch.micro_batch"),
        (
            ModuleNotFoundError("No module named 'rich'", name="rich"),
            f"No module named 'rich' in {sys.executable}; call",
        ),
    ],
)
def test_a_failure_is_one_clear_error(
    error: Exception, shown: str, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(run: Run, *, steps: int) -> Iterator[StepStats]:
        yield stats(1)
        raise error

    monkeypatch.setattr(verbs, "grpo", failing)
    status, _, err = says(capsys, "train", run.path)
    assert status == 1 and shown in err and "Traceback" not in err


def test_a_bug_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def buggy(run: Run, *, steps: int) -> Iterator[StepStats]:
        raise KeyError("loss")
        yield

    monkeypatch.setattr(verbs, "grpo", buggy)
    with pytest.raises(KeyError):
        main(["train", str(run.path)])


# ---- looking


def measures(run: Run, **asked: Any) -> pd.DataFrame:
    shared = {"stage": asked["stage"], "step": 4, "split": asked["split"], "mode": asked["mode"]}
    rows = [("fairness", "accuracy", 0.75, 0.5, 1.0, 8), ("fairness", "bias", float("nan"), None, None, 8)]
    names = ("objective", "metric", "value", "low", "high", "n")
    return pd.DataFrame([shared | dict(zip(names, row, strict=True)) for row in rows])


def test_eval_json_is_pure_json(run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "evaluate", measures)
    status, out, _ = says(capsys, "eval", run.path, "--json", "--stage", "base", "--mode", "sample")
    answer = json.loads(out)
    assert status == 0
    assert [answer[key] for key in ("run", "stage", "step", "split", "mode")] == [
        str(run.path), "base", 4, "test", "sample",
    ]  # fmt: skip
    assert answer["metrics"][0] == {
        "objective": "fairness", "metric": "accuracy", "value": 0.75, "low": 0.5, "high": 1.0, "n": 8,
    }  # fmt: skip
    assert answer["metrics"][1]["value"] is None


def test_eval_takes_the_newest_stage(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "evaluate", measures)
    assert "stage base" in says(capsys, "eval", run.path)[1]
    save(run, 3, sft=True)
    assert "stage sft" in says(capsys, "eval", run.path)[1]
    save(run, 4)
    out = says(capsys, "eval", run.path)[1]
    assert "stage latest, step 4, split test, mode greedy" in out and re.search(r"accuracy +0.75 +0.5", out)


def scores_of(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "answered.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_score_bbq_prints_a_table_or_pure_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = scores_of(tmp_path, *(r | {"said": "A" if i % 2 else "B"} for i, r in enumerate(templates(4))))
    status, out, err = says(capsys, "score", "bbq", "--data", path, "--field", "said")
    assert (status, err) == (0, "")
    assert re.search(r"^Guilds +accuracy +100\.0 +\[\d", out, re.MULTILINE)
    assert re.search(r"^all +bias_ambiguous +0\.0 +\[0\.0, 0\.0\] +32$", out, re.MULTILINE)
    status, out, _ = says(capsys, "score", "bbq", "--data", path, "--field", "said", "--json")
    answer = json.loads(out)
    assert status == 0
    assert [answer[k] for k in ("benchmark", "data", "predictions", "field")] == ["bbq", str(path), None, "said"]
    assert list(answer["groups"]) == ["Guilds", "Peoples", "all"]
    assert answer["groups"]["all"]["metrics"]["accuracy"]["value"] == 1.0
    assert answer["groups"]["all"]["counts"]["ambig"] == 16


def test_score_halueval_says_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = QA_ROW | {"hallucinated_answer": QA_ROW["right_answer"]}
    path = scores_of(tmp_path, QA_ROW | {"said": "goats"}, same | {"said": "goats"})
    status, out, _ = says(capsys, "score", "halueval", "--data", path, "--field", "said")
    assert status == 0 and re.search(r"^qa +accuracy_unanswerable +- +- +1$", out, re.MULTILINE)
    assert "1 of 2 rows are not in" in out
    answer = json.loads(says(capsys, "score", "halueval", "--data", path, "--field", "said", "--json")[1])
    assert answer["groups"]["qa"]["metrics"]["accuracy_unanswerable"] == {"value": None, "low": None, "high": None}
    assert len(answer["notes"]) == 1


def test_a_score_that_cannot_be_made_is_one_line_and_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = scores_of(tmp_path, *templates(1))
    status, out, err = says(capsys, "score", "bbq", "--data", path, "--field", "said", "--json")
    assert (status, out) == (1, "")
    assert err.startswith("error: ") and "field 'said' is missing" in err and err.count("\n") == 1
    status, out, err = says(capsys, "score", "halueval", "--data", tmp_path / "none", "--field", "said")
    assert (status, out) == (1, "") and "no file or folder at" in err


def test_eval_compare_needs_evaluations(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = says(capsys, "eval", run.path, "--compare")
    assert status == 1 and "run these first:" in err
    assert re.findall(r"--stage (\w+)\n", err) == ["base", "sft", "latest"]
    flags = ["--mode", "sample", "--split", "train"]
    err = says(capsys, "eval", run.path, "--compare", *flags)[2]
    assert f"grpo-nb eval {run.path} --stage sft --split train --mode sample\n" in err


def probed(run: Run, stage: Any) -> pd.DataFrame:
    """Takes the place of `probe`."""
    numbers = {"before": 0.8, "after": 0.6, "difference": -0.2}
    bounds = {f"{k}{end}": v + d for k, v in numbers.items() for end, d in (("_low", -0.1), ("_high", 0.1))}
    return pd.DataFrame([{"objective": "probe", "metric": "accuracy", **numbers, **bounds, "differs": True, "n": 40}])


def test_eval_probe_compares_with_the_base(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "probe", probed)
    save(run, 4)
    status, out, _ = says(capsys, "eval", run.path, "--probe")
    assert status == 0 and "40 general questions, before: base, after: latest" in out
    assert re.search(r"accuracy +0.800 \[0.700, 0.900\] +0.600 \[0.500, 0.700\] +-0.200 \[-0.300, -0.100\] +yes", out)
    answer = json.loads(says(capsys, "eval", run.path, "--probe", "--stage", "4", "--json")[1])
    assert (answer["stage"], answer["mode"], answer["comparison"][0]["difference"]) == (4, "probe", -0.2)


def test_eval_probe_takes_no_settings_of_other_evaluations(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = says(capsys, "eval", run.path, "--probe", "--limit", 3, "--mode", "sample")
    assert (status, out) == (2, "") and "leave out --limit, --mode" in err


def test_eval_probe_of_a_model_that_cannot_read_it_fails_with_the_reason(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = says(capsys, "eval", run.path, "--probe")
    assert (status, out) == (1, "") and "has no words for" in err and "pretrained model" in err


def finding(severity: Any) -> Finding:
    return Finding("truncation", severity, 3, "32% of answers hit the cap.", {"share": float("nan")}, "raise it")


@pytest.mark.parametrize(("severity", "expected"), [("info", 0), ("warning", 1), ("error", 1), (None, 0)])
def test_diagnose_exits_1_on_findings(
    severity: str | None,
    expected: int,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("grpo_nb.doctor.diagnose", lambda run: [finding(severity)] if severity else [])
    status, out, _ = says(capsys, "diagnose", run.path, "--json")
    assert status == expected
    answer = json.loads(out)
    assert answer["run"] == str(run.path) and len(answer["findings"]) == (severity is not None)
    if severity:
        assert answer["findings"][0]["severity"] == severity and answer["findings"][0]["evidence"] == {"share": None}
        assert "truncation at step 3: 32% of answers" in says(capsys, "diagnose", run.path)[1]


def test_diagnose_of_nothing_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = says(capsys, "diagnose", tmp_path / "none", "--json")
    assert (status, out) == (2, "") and "no run in" in err


def test_report_is_one_page_that_needs_nothing_else(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.log_metrics(dict(stats(1).metrics))
    run.log_event("knob", step=1, key="temperature", new="<0.7>")
    status, out, _ = says(capsys, "report", run.path)
    page = run.path / "report.html"
    assert (status, out) == (0, f"{page}\n")
    text = page.read_text()
    titles = ["Training", "Findings", "Before and after", "Answers", "Events", "Settings"]
    assert re.findall("<h2>(.*?)</h2>", text) == titles, "nothing was evaluated while training"
    assert 'src="data:image/png;base64,' in text and not re.search('(src|href)="http', text)
    assert "&lt;0.7&gt;" in text and "mine: stopped, step 1 of 4" in text


def test_report_goes_where_it_is_told(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    answer = json.loads(says(capsys, "report", run.path, "--out", file, "--json")[1])
    assert answer == {"run": str(run.path), "file": str(file)} and file.read_text().startswith("<!doctype html>")
    assert not (run.path / "report.html").exists()
    status, out, err = says(capsys, "report", run.path, "--out", tmp_path / "none" / "page.html")
    assert (status, out) == (1, "") and "cannot write" in err
    assert says(capsys, "report", tmp_path / "nowhere")[0] == 2


def test_runs_lists_every_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    root = run.path.parent
    (line,) = [row for row in says(capsys, "runs", root)[1].splitlines() if str(run.path) in row]
    assert line.split()[1:3] == ["new", "0/4"]
    (row,) = json.loads(says(capsys, "runs", root, "--json")[1])
    assert (row["name"], row["state"], row["step"], row["steps"]) == ("mine", "new", 0, 4)
    assert says(capsys, "runs", root / "nowhere")[0] == 2
    (root / "empty").mkdir()
    assert says(capsys, "runs", root / "empty")[:2] == (0, f"no runs in {root / 'empty'}\n")


@pytest.mark.parametrize(("statuses", "expected"), [(["ok", "warning", "info"], 0), (["ok", "error"], 1)])
def test_doctor_exits_1_if_a_check_fails(
    statuses: list[Any], expected: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_nb.doctor.environment", lambda: [Check(f"c{s}", s, "found") for s in statuses])
    status, out, _ = says(capsys, "doctor")
    assert status == expected and all(f"c{s}" in out for s in statuses)
    assert [row["status"] for row in json.loads(says(capsys, "doctor", "--json")[1])] == statuses


def test_plan_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = says(capsys, "plan", "--preset", "gpu_24gb", "--gib", 24)
    assert status == 0 and "2 B x 7,615,616,512 frozen parameters" in out and "fits: peak" in out
    status, out, _ = says(capsys, "plan", "--preset", "gpu_80gb", "--set", "batch.micro_batch=64", "--gib", 40)
    assert status == 1 and "set batch.micro_batch=" in out
    status, out, _ = says(
        capsys, "plan", "--model", "Qwen/Qwen2.5-0.5B", "--set", "model.train=lora", "--gib", 24, "--json"
    )
    answer = json.loads(out)
    assert status == 0 and answer["fits"] and answer["shape"]["parameters"] == 494_032_768
    held = sum(t["bytes"] for t in answer["terms"] if t["phase"] == "always")
    assert held < answer["peak"] <= sum(t["bytes"] for t in answer["terms"])


def test_plan_of_a_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert says(capsys, "plan", run.path, "--gib", 4)[0] == 0
    assert says(capsys, "plan", run.path, "--preset", "demo")[0] == 2


def test_settings_lists_every_key(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = says(capsys, "settings", "--preset", "cpu_small")
    assert status == 0 and re.search(r"^model.name +HuggingFaceTB/SmolLM2-135M-Instruct +`demo`", out, re.MULTILINE)
    assert re.search(r"^objectives.fairness.kl_band +\[0.02, 0.06\] +Target band", out, re.MULTILINE)
    rows = {row["key"]: row for row in json.loads(says(capsys, "settings", run.path, "--json")[1])}
    assert rows["run.steps"]["value"] == STEPS and rows["run.steps"]["meaning"].startswith("GRPO steps in total")


# ---- progress


def test_lines_are_few_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 1000.0)
    last, interrupted = progress.follow((stats(step) for step in range(1, 51)), "GRPO", 0, 50)
    assert (last, interrupted) == (50, False)
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == ["1/50", "50/50"]


# ---- the real thing


def command(path: Path, steps: int) -> list[str]:
    flags = {"sft.steps": 2, "sft.batch": 8, "sft.micro_batch": 8, "batch.prompts": 4, "batch.group_size": 4,
             "batch.micro_batch": 16, "run.eval_examples": 4}  # fmt: skip
    settings = [part for key, value in flags.items() for part in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "grpo_nb", "train", str(path), "--preset", "demo", *settings, "--steps", str(steps)]


def test_a_terminated_process_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    path, environment = tmp_path / "real", os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command(path, 1000), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith("GRPO step 1/"):
                break
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate()
    assert child.returncode == 130
    saved = re.search(r"interrupted and saved at step (\d+) of 1000; go on with: grpo-nb train", out)
    assert saved, out
    reached = int(saved[1])
    again = subprocess.run(
        command(path, reached + 1), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert f"resumed at step {reached} of {reached + 1}" in again.stdout
    assert [row["step"] for row in Run.open(path).rows("metrics")] == list(range(1, reached + 2))


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
