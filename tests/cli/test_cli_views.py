"""Commands that look: evaluation, scores, findings, reports, lists, plans, settings."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from grpo_nb import presets
from grpo_nb.cli import verbs
from grpo_nb.config import JudgeConfig, RunConfig
from grpo_nb.doctor import Check
from grpo_nb.jupyter.project import runs_summary
from grpo_nb.report import tables, text_table
from grpo_nb.rules.finding import Finding
from grpo_nb.run.run import Run
from tests.conftest import ROOT
from tests.support.cli_stage import STEPS, save, says, stats
from tests.support.tiny import tiny_run
from tests.support.tokens import names
from tests.tasks.test_bbq import templates
from tests.tasks.test_halueval import RIGHT as QA_ROW

# ---- looking


def measures(run: Run, **asked: Any) -> pd.DataFrame:
    shared = {"stage": asked["stage"], "step": 4, "split": asked["split"], "mode": asked["mode"]}
    rows = [("fairness", "accuracy", 0.75, 0.5, 1.0, 8, 8), ("fairness", "bias", float("nan"), None, None, 8, 4)]
    names = ("objective", "metric", "value", "low", "high", "n", "clusters")
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
        "objective": "fairness", "metric": "accuracy", "value": 0.75, "low": 0.5, "high": 1.0, "n": 8, "clusters": 8,
    }  # fmt: skip
    assert answer["metrics"][1]["value"] is None


def test_eval_takes_the_newest_stage(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "evaluate", measures)
    assert names(says(capsys, "eval", run.path)[1].splitlines()[0], "base")
    save(run, 3, sft=True)
    assert names(says(capsys, "eval", run.path)[1].splitlines()[0], "sft")
    save(run, 4)
    out = says(capsys, "eval", run.path)[1]
    assert names(out, "latest", 4, "test", "greedy") and re.search(r"accuracy +0.75 +0.5", out)


def scores_of(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "answered.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_score_bbq_prints_a_table_or_pure_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = scores_of(tmp_path, *(r | {"said": "A" if i % 2 else "B"} for i, r in enumerate(templates(5))))
    status, out, err = says(capsys, "score", "bbq", "--data", path, "--field", "said")
    assert (status, err) == (0, "")
    assert re.search(r"^Guilds +accuracy +100\.0 +\[\d", out, re.MULTILINE)
    assert re.search(r"^all +bias_ambiguous +0\.0 +\[-30\.0, 30\.0\] +20 +10$", out, re.MULTILINE)
    status, out, _ = says(capsys, "score", "bbq", "--data", path, "--field", "said", "--json")
    answer = json.loads(out)
    assert status == 0
    assert [answer[k] for k in ("benchmark", "data", "predictions", "field")] == ["bbq", str(path), None, "said"]
    assert list(answer["groups"]) == ["Guilds", "Peoples", "all"]
    assert answer["groups"]["all"]["metrics"]["accuracy"]["value"] == 1.0
    assert answer["groups"]["all"]["counts"]["ambig"] == 20


def test_score_halueval_says_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = QA_ROW | {"hallucinated_answer": QA_ROW["right_answer"]}
    path = scores_of(tmp_path, QA_ROW | {"said": "goats"}, same | {"said": "goats"})
    status, out, _ = says(capsys, "score", "halueval", "--data", path, "--field", "said")
    assert status == 0 and re.search(r"^qa +accuracy_unanswerable +- +- +0 +0$", out, re.MULTILINE)
    assert names(out, "1 of 2")
    answer = json.loads(says(capsys, "score", "halueval", "--data", path, "--field", "said", "--json")[1])
    none = {"value": None, "low": None, "high": None, "n": 0, "clusters": 0, "effective": 0.0}
    assert answer["groups"]["qa"]["metrics"]["accuracy_unanswerable"] == none
    assert len(answer["notes"]) == 1


def test_a_score_that_cannot_be_made_is_one_line_and_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = scores_of(tmp_path, *templates(1))
    status, out, err = says(capsys, "score", "bbq", "--data", path, "--field", "said", "--json")
    assert (status, out) == (1, "")
    assert err.startswith("error: ") and names(err, "'said'", path) and err.count("\n") == 1
    status, out, err = says(capsys, "score", "halueval", "--data", tmp_path / "none", "--field", "said")
    assert (status, out) == (1, "") and names(err, tmp_path / "none")


def test_eval_compare_needs_evaluations(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = says(capsys, "eval", run.path, "--compare")
    assert status == 1 and names(err, "grpo-nb eval", "--stage base")
    assert re.findall(r"--stage (\w+)\n", err) == ["base", "sft", "latest"]
    flags = ["--mode", "sample", "--split", "train"]
    err = says(capsys, "eval", run.path, "--compare", *flags)[2]
    assert f"grpo-nb eval {run.path} --stage sft --split train --mode sample\n" in err


def test_eval_compare_says_what_is_not_measured_yet(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row: dict[str, Any] = {"objective": "fairness", "metric": "accuracy", "differs": None, "n": 4, "clusters": 4}
    for name, value in (("base", None), ("sft", 0.4), ("latest", None), ("difference", None)):
        row |= {name: value, f"{name}_low": value, f"{name}_high": value}
    monkeypatch.setattr(verbs, "comparison", lambda *_, **__: pd.DataFrame([row], dtype=object))
    out = says(capsys, "eval", run.path, "--compare")[1]
    assert re.findall(r"--stage (\w+)\n", out) == ["base", "latest"]


def probed(run: Run, stage: Any) -> pd.DataFrame:
    """Takes the place of `probe`."""
    numbers = {"before": 0.8, "after": 0.6, "difference": -0.2}
    bounds = {f"{k}{end}": v + d for k, v in numbers.items() for end, d in (("_low", -0.1), ("_high", 0.1))}
    return pd.DataFrame(
        [{"objective": "probe", "metric": "accuracy", **numbers, **bounds, "differs": True, "n": 40, "clusters": 40}]
    )


def test_eval_probe_compares_with_the_base(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "probe", probed)
    save(run, 4)
    status, out, _ = says(capsys, "eval", run.path, "--probe")
    assert status == 0 and names(out, 40, "base", "latest")
    assert re.search(r"accuracy +0.800 \[0.700, 0.900\] +0.600 \[0.500, 0.700\] +-0.200 \[-0.300, -0.100\] +yes", out)
    answer = json.loads(says(capsys, "eval", run.path, "--probe", "--stage", "4", "--json")[1])
    assert (answer["stage"], answer["mode"], answer["comparison"][0]["difference"]) == (4, "probe", -0.2)


def test_eval_probe_takes_no_settings_of_other_evaluations(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = says(capsys, "eval", run.path, "--probe", "--limit", 3, "--mode", "sample")
    assert (status, out) == (2, "") and names(err, "--limit", "--mode")


def test_eval_probe_of_a_model_that_cannot_read_it_fails_with_the_reason(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = says(capsys, "eval", run.path, "--probe")
    assert (status, out) == (1, "") and names(err, "'demo'", "tokenizer")


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
        assert names(says(capsys, "diagnose", run.path)[1], "truncation", 3, "32%")


def test_diagnose_of_nothing_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = says(capsys, "diagnose", tmp_path / "none", "--json")
    assert (status, out) == (2, "") and names(err, tmp_path / "none")


def test_report_is_one_page_that_needs_nothing_else(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.log_metrics(dict(stats(1).metrics))
    run.log_event("knob", step=1, key="temperature", new="<0.7>")
    status, out, _ = says(capsys, "report", run.path)
    page = run.path / "report.html"
    assert (status, out) == (0, f"{page}\n")
    text = page.read_text()
    titles = ["Training", "Findings", "Before and after", "Answers", "Events", "Settings", "Metrics"]
    assert re.findall("<h2>(.*?)</h2>", text) == titles, "nothing was evaluated while training"
    assert 'src="data:image/png;base64,' in text and not re.search('(src|href)="http', text)
    assert "&lt;0.7&gt;" in text and names(text, "mine", "stopped", 1, 4)


def test_report_goes_where_it_is_told(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    answer = json.loads(says(capsys, "report", run.path, "--out", file, "--json")[1])
    assert answer == {"run": str(run.path), "file": str(file)} and file.read_text().startswith("<!doctype html>")
    assert not (run.path / "report.html").exists()
    status, out, err = says(capsys, "report", run.path, "--out", tmp_path / "none" / "page.html")
    assert (status, out) == (1, "") and names(err, tmp_path / "none")
    assert says(capsys, "report", tmp_path / "nowhere")[0] == 2


def test_runs_lists_every_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    root = run.path.parent
    (line,) = [row for row in says(capsys, "runs", root)[1].splitlines() if str(run.path) in row]
    assert line.split()[1:3] == ["new", "0/4"]
    (row,) = json.loads(says(capsys, "runs", root, "--json")[1])
    assert (row["name"], row["state"], row["step"], row["steps"]) == ("mine", "new", 0, 4)
    assert says(capsys, "runs", root / "nowhere")[0] == 2
    (root / "empty").mkdir()
    status, out, _ = says(capsys, "runs", root / "empty")
    assert status == 0 and names(out, root / "empty") and out.count("\n") == 1


@pytest.mark.parametrize(("done", "state", "advice"), [(3, "stopped", "sft"), (8, "done", "train")])
def test_a_run_within_sft_shows_its_steps_and_what_continues_it(
    done: int, state: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_run(tmp_path / "runs", "warm", run__steps=STEPS, sft__steps=8)
    run.log_sft({"step": done, "loss": 1.0})
    save(run, done, sft=True)
    out = says(capsys, "status", run.path)[1]
    assert names(out, "SFT", state, done, 8, f"grpo-nb {advice} {run.shown}", f"[{done}]")
    assert not names(out, "new") and not names(out, "none")
    answer = json.loads(says(capsys, "status", run.path, "--json")[1])
    assert (answer["state"], answer["sft"]) == ("new", [done, 8])
    assert re.search(rf"warm +SFT {state} +{done}/8 ", says(capsys, "runs", run.path.parent)[1])
    assert names(repr(run), "SFT", state, done, 8)
    lines = runs_summary(run.path.parent)
    assert lines and names(lines, "SFT", state, done, 8, "stage='sft'" if done < 8 else "03_grpo")
    assert names(says(capsys, "tell", run.path, "pause")[1], "SFT", f"grpo-nb {advice}")
    with run.lock():
        out = says(capsys, "status", run.path)[1]
        assert "grpo-nb" not in out and names(out, "running")
        assert names(out, "SFT", done, 8) == (done < 8), "past the last step, GRPO loads"
    run.log_event("start", step=0, goal=STEPS)
    assert run.status().sft is None and names(says(capsys, "status", run.path)[1], "stopped", 0, STEPS)


def test_runs_shortens_a_long_reason(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (run.path / "config.json").write_text('{"' + "unknown " * 60 + '": 1}')
    root = run.path.parent
    reason = json.loads(says(capsys, "runs", root, "--json")[1])[0]["problem"]
    shown = says(capsys, "runs", root)[1]
    assert len(reason) > 300 and reason[:60] in " ".join(shown.split()) and reason[-40:] not in " ".join(shown.split())


REFUSED = {
    "diagnose": ["diagnose", "none"],
    "report": ["report", "none"],
    "eval": ["eval", "none"],
    "two totals": ["train", "none", "--steps", "3", "--set", "run.steps=6"],
    "unknown setting": ["train", "none", "--set", "run.step=6"],
    "other settings": ["sft", "trained", "--set", "run.seed=6"],
}


@pytest.mark.parametrize("argv", REFUSED.values(), ids=REFUSED)
def test_wrong_arguments_are_refused_without_torch(argv: list[str], tmp_path: Path) -> None:
    run = Run.create(tmp_path / "trained", presets.demo())
    run.log_metrics({"step": 1, "loss": 0.5})
    verb, name, *options = argv
    code = f"import sys; from grpo_nb.cli import main; status = main({[verb, str(tmp_path / name), *options]!r}); "
    code += "sys.exit(status + 10 * ('torch' in sys.modules))"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert made.returncode == 2


@pytest.mark.parametrize(("statuses", "expected"), [(["ok", "warning", "info"], 0), (["ok", "error"], 1)])
def test_doctor_exits_1_if_a_check_fails(
    statuses: list[Any], expected: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_nb.doctor.environment", lambda: [Check(f"c{s}", s, "found " * 50) for s in statuses])
    status, out, _ = says(capsys, "doctor")
    assert max(map(len, out.splitlines())) <= 100, "read by people, so wrapped"
    assert status == expected and all(f"c{s}" in out for s in statuses)
    assert [row["status"] for row in json.loads(says(capsys, "doctor", "--json")[1])] == statuses


def test_plan_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = says(capsys, "plan", "--preset", "gpu_24gb", "--gib", 24)
    assert status == 0 and names(out, "7,615,616,512", "fits")
    status, out, _ = says(capsys, "plan", "--preset", "gpu_80gb", "--set", "batch.micro_batch=64", "--gib", 40)
    assert status == 1 and "batch.micro_batch=" in out
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
    assert re.search(r"^objectives.fairness.kl_band +\[0.02, 0.06\] +[A-Z]", out, re.MULTILINE)
    rows = {row["key"]: row for row in json.loads(says(capsys, "settings", run.path, "--json")[1])}
    meaning = RunConfig.model_fields["steps"].description
    assert rows["run.steps"]["value"] == STEPS and rows["run.steps"]["meaning"] == meaning


def test_settings_lists_switches_of_the_template_and_keys_of_a_judge(capsys: pytest.CaptureFixture[str]) -> None:
    judge = json.dumps({"providers": [{"model": "m"}], "weight": 0.01})
    switch = "model.chat_template_kwargs.enable_thinking"
    given = ("--set", f"{switch}=false", "--set", f"objectives.fairness.judge={judge}")
    status, out, _ = says(capsys, "settings", "--preset", "demo", *given)
    rows = dict(re.findall(r"^(\S+) +(\S+)", out, re.MULTILINE))
    assert status == 0 and "\\n" not in out
    assert (rows[switch], rows["model.chat_template_kwargs"]) == ("false", '{"enable_thinking":')
    assert rows["objectives.fairness.judge.weight"] == "0.01"
    assert rows["objectives.hallucination.judge"] == "null"
    weight, model = JudgeConfig.model_fields["weight"].default, "providers[].model"
    assert rows["objectives.hallucination.judge.weight"] == f"({weight})"
    assert {f"objectives.{name}.judge.{model}" for name in ("fairness", "hallucination")} <= rows.keys()
    found = json.loads(says(capsys, "settings", "--preset", "demo", *given, "--json")[1])
    assert {row["key"]: row["active"] for row in found}["objectives.hallucination.judge.weight"] is False
    config = presets.demo().replace(**{switch: False})
    assert switch in set(tables.settings(config).frame["setting"])


@pytest.mark.parametrize("width", [20, 60, 100, 400])
def test_a_printed_table_has_each_column_and_each_cell(width: int) -> None:
    head = [f"column {n}" for n in range(12)]
    rows = [[f"{row}/{n} has some-words_and more" for n in range(12)] for row in range(3)]
    text = text_table.drawn(head, rows, [False] * 12, width)
    fits = text_table.fits(head, rows, width)
    assert fits == (width >= 100)
    cells = [cell for row in rows for cell in row]
    assert _letters(text) == _letters(*(head if fits else 3 * head), *cells)
    assert set(_letters(*head, *cells)) <= set(_letters(repr(tables.Table(pd.DataFrame(rows, columns=head)))))


def test_names_stand_unbroken_beside_numbers_that_can_be_wrapped() -> None:
    rows = [["sampler_logp_difference/of_each_token", "nats", *["0.0008374", "0.001154 ± 0.0003145"] * 2]] * 2
    text = text_table.drawn(["metric", "unit", "a: last", "a: mean", "b: last", "b: mean"], rows, [False] * 6, 90)
    assert text.count(rows[0][0]) == 2 and max(map(len, text.splitlines())) <= 90


def _letters(*texts: str) -> list[str]:
    return sorted("".join("".join(texts).split()))


# ---- status and samples


def logged(run: Run) -> Run:
    for step in (1, 2, 3):
        run.log_metrics({"step": step, "reward/fairness/mean": step / 10, "kl/fairness": 0.02})
        wrote = {
            "step": step,
            "objective": "fairness",
            "prompt": "Who?",
            "completion": f"A\x1b[2J{step}",
            "reward": 1.0,
        }
        run.log_samples([wrote, wrote | {"objective": "hallucination", "completion": f"B{step}"}])
    return run


def test_status_says_where_a_run_stands(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = says(capsys, "status", run.path)
    assert status == 0 and names(out, "mine", "new", 0, 4)
    logged(run).log_event("failed", step=3, error="E: \x1b[31m no")
    status, out, _ = says(capsys, "status", run.path)
    assert status == 0 and names(out, "mine", "failed", 3, "fairness", 0.3, 0.02) and "\x1b" not in out
    answer = json.loads(says(capsys, "status", run.path, "--json")[1])
    assert [answer[key] for key in ("state", "step", "steps")] == ["failed", 3, 4]
    assert answer["newest"]["reward/fairness/mean"] == 0.3 and names(answer["error"], "no")


def test_samples_are_those_that_the_notebook_shows(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = says(capsys, "samples", logged(run).path)
    assert status == 0 and names(out, "B3", "B2") and "B1" not in out and "\x1b" not in out
    asked = ("--step", 1, "-n", 9, "--objective", "hallucination", "--json")
    (row,) = json.loads(says(capsys, "samples", run.path, *asked)[1])["samples"]
    assert (row["step"], row["completion"]) == (1, "B1")
    status, out, _ = says(capsys, "samples", run.path, "--step", 9)
    steps = [row["step"] for row in run.rows("samples")]
    assert status == 1 and names(out, 9, min(steps), max(steps))
    status, _, err = says(capsys, "samples", run.path, "--objective", "fair")
    assert status == 2 and names(err, "fairness", "hallucination")


@pytest.mark.parametrize("verb", ["status", "samples"])
def test_a_run_that_is_missing_is_one_line(verb: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = says(capsys, verb, run.path.parent / "mnie\x1b[2J")
    assert (status, out) == (2, "") and err.count("\n") == 1 and "\x1b" not in err and names(err, "mine")
