"""Training from the command line: what is said, resuming, interrupts that save, failures, progress."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from grpo_nb.cli import main, progress, verbs
from grpo_nb.jupyter import standing
from grpo_nb.jupyter.start import attach
from grpo_nb.jupyter.tailing import Followed
from grpo_nb.metrics.pace import duration
from grpo_nb.run.lock import RunLock
from grpo_nb.run.run import Run, RunError
from grpo_nb.tasks import DataError, load_tasks
from grpo_nb.training.gold import load_gold
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import sft
from grpo_nb.types import StepStats
from tests.conftest import ROOT
from tests.support import forked
from tests.support.cli_stage import STEPS, fake_grpo, save, says, stats
from tests.support.tiny import REWARDS, small_tasks, small_world, tiny_config, tiny_run
from tests.support.tokens import names, pattern

# ---- training


def test_train_goes_to_its_steps_and_says_what_is_next(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = says(capsys, "train", run.path)
    assert status == 0
    assert names(out.splitlines()[0], run.path, "GRPO", 4)
    assert names(out.splitlines()[-1], run.path, "done", 4, f"grpo-nb eval {run.path}", f"grpo-nb diagnose {run.path}")
    assert "GRPO step 4/4  loss 0.500  reward/fairness/mean 0.250  kl/fairness 0.010" in err


def test_train_resumes_and_says_so(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, 3)
    status, out, _ = says(capsys, "train", run.path)
    assert status == 0 and names(out, run.path, "resumed", 3, 4)


def test_a_second_trainer_is_refused_before_anything_is_announced(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, 3)
    with run.lock():
        for verb in ("train", "sft"):
            status, out, err = says(capsys, verb, run.path)
            assert (status, out) == (1, "") and names(err, run.path, "grpo_nb.release")
    assert says(capsys, "train", run.path)[0] == 0


def test_a_refused_training_is_not_announced(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(run: Run, *, steps: int) -> Iterator[StepStats]:
        raise RunError("changed")
        yield

    save(run, 3)
    monkeypatch.setattr(verbs, "grpo", refused)
    status, out, _ = says(capsys, "train", run.path)
    assert (status, out) == (1, "")


@pytest.mark.parametrize("verb", ["train", "sft", "eval"])
@pytest.mark.parametrize("there", [None, "", "mine.txt"])
def test_a_command_that_fails_before_any_work_leaves_nothing(
    verb: str, there: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(run: Run, **_: object) -> Iterator[StepStats]:
        raise RunError("no data")
        yield

    for name in ("grpo", "sft", "load_tasks"):
        monkeypatch.setattr(verbs, name, lambda *_, **__: list(refused(run=None)))  # type: ignore[arg-type]
    monkeypatch.setattr(verbs, "evaluate", lambda *_, **__: list(refused(run=None)))  # type: ignore[arg-type]
    path = tmp_path / "runs" / "new"
    if there is not None:
        path.mkdir(parents=True)
        (path / "mine.txt").write_text("") if there else None
    before = sorted(tmp_path.rglob("*"))
    assert says(capsys, verb, path, "--preset", "demo")[0] == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_failed_at_work_stays_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run: Run) -> Iterator[StepStats]:
        run.log_event("sft_failed", error="x")
        raise RunError("x")
        yield

    monkeypatch.setattr(verbs, "sft", fails)
    assert says(capsys, "sft", tmp_path / "new", "--preset", "demo")[0] == 1
    assert [event["kind"] for event in Run.open(tmp_path / "new").rows("events")] == ["sft_failed"]


@pytest.mark.parametrize("key", ["objectives.fairness.data", "sft.data"])
def test_a_missing_data_file_is_reported_with_its_setting(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config().replace(**{key: str(tmp_path / "absent.jsonl")})
    with pytest.raises(DataError, match=pattern(key.removesuffix(".data") if "fair" in key else key, "absent.jsonl")):
        load_gold(config, tmp_path) if key == "sft.data" else load_tasks(config, tmp_path, names=["fairness"])


def test_steps_is_the_total_to_reach(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert names(says(capsys, "train", run.path, "--steps", 2)[1], "done", 2)
    out = says(capsys, "train", run.path, "--steps", 6)[1]
    assert names(out.splitlines()[0], "resumed", 2, 6) and names(out.splitlines()[-1], "done", 6)
    assert names(says(capsys, "train", run.path)[1], "already", 6, "--steps")
    assert Run.open(run.path).config.run.steps == STEPS


def test_train_does_sft_first_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create(tmp_path / "mine", tiny_config(sft__steps=3))
    status, out, err = says(capsys, "train", run.path)
    assert status == 0
    assert re.search(r"\bSFT\b.*\bSFT\b\D+3 .*\bGRPO\b\D+4 ", out, re.DOTALL), "SFT comes first"
    assert "SFT step 3/3" in err
    assert "SFT" not in says(capsys, "train", run.path, "--steps", 5)[1]


def test_a_judge_without_its_key_is_refused_before_sft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("A_JUDGES_KEY", raising=False)
    judge = {"providers": [{"model": "m", "api_key_env": "A_JUDGES_KEY"}]}
    run = tiny_run(tmp_path, sft__steps=1, objectives__hallucination__judge=judge)
    status, out, err = says(capsys, "train", run.path)
    assert status == 2 and "A_JUDGES_KEY" in err and "SFT" not in out


def test_sft_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create(tmp_path / "mine", tiny_config(sft__steps=3))
    status, out, _ = says(capsys, "sft", run.path)
    assert status == 0 and names(out, "done", 3, f"grpo-nb train {run.path}")
    (line,) = says(capsys, "sft", run.path)[1].splitlines()
    assert names(line, run.path, "SFT", "done", 3)
    without = Run.create(tmp_path / "without", tiny_config(sft__steps=0))
    assert names(says(capsys, "sft", without.path)[1], "sft.steps", 0)


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
    assert "stopping" in err
    assert names(out.splitlines()[-1], "interrupted", 2, 4, f"grpo-nb train {run.path}")
    assert run.checkpoints.latest()[0].step == 2  # type: ignore[union-attr]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    monkeypatch.setattr(verbs, "grpo", fake_grpo)
    assert names(says(capsys, "train", run.path)[1], "resumed", 2, 4)


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
    assert status == 130 and "interrupted" in err and "Traceback" not in err


def test_a_stop_from_the_knobs_is_told_from_an_interrupt(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "grpo", lambda run, steps: fake_grpo(run, steps=1))
    status, out, _ = says(capsys, "train", run.path)
    assert status == 130 and names(out, "stopped", "knobs", 1, 4)


# ---- failures


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RunError("the-run-is-taken"), "error: the-run-is-taken"),
        (PermissionError(13, "Permission denied", "runs/x"), "error: [Errno 13] Permission denied: 'runs/x'"),
        (FloatingPointError("w-is-not-finite"), "error: w-is-not-finite"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "batch.micro_batch"),
        (ModuleNotFoundError("No module named 'rich'", name="rich"), f"'rich' in {sys.executable}"),
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


def test_a_key_in_a_failure_stays_out_of_standard_error(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(run: Run, *, steps: int) -> Iterator[StepStats]:
        raise RunError("the key is hf_4711abcdefghijklmn")
        yield

    monkeypatch.setenv("HF_TOKEN", "hf_4711abcdefghijklmn")
    monkeypatch.setattr(verbs, "grpo", failing)
    status, _, err = says(capsys, "train", run.path)
    assert status == 1 and "error: the key is ***" in err


def test_a_bug_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def buggy(run: Run, *, steps: int) -> Iterator[StepStats]:
        raise KeyError("loss")
        yield

    monkeypatch.setattr(verbs, "grpo", buggy)
    with pytest.raises(KeyError):
        main(["train", str(run.path)])


# ---- progress


@pytest.mark.parametrize(("total", "lines"), [(50, 11), (300, 11), (7, 7)])
def test_lines_are_few_where_there_is_no_terminal(
    total: int, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step and each tenth part, each with what is left; more where those are long in coming."""
    monkeypatch.setattr(progress, "EVERY_SECONDS", 1e9)

    def timed(step: int) -> StepStats:
        return StepStats(step, {**stats(step).metrics, "time/step": 600.0})

    last, interrupted = progress.follow((timed(step) for step in range(1, total + 1)), "GRPO", 0, total)
    written = capsys.readouterr().err
    found = written.splitlines()
    assert (last, interrupted, len(found)) == (total, False, lines) and "\r" not in written
    assert [line.split()[2] for line in (found[0], found[-1])] == [f"1/{total}", f"{total}/{total}"]
    assert names(found[0], "loss 0.500", duration(600 * (total - 1))) and " left" not in found[-1]
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    progress.follow((timed(step) for step in range(1, total + 1)), "GRPO", 0, total)
    assert len(capsys.readouterr().err.splitlines()) == total


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_done_before_the_first_step_is_shown(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Phase by phase: on the terminal, and in the lock, which is where a dashboard of any process reads it."""
    monkeypatch.setattr(Console, "is_terminal", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    run = tiny_run(tmp_path, run__steps=1, sft__steps=1, run__quick_eval_every=1, run__checkpoint_every=1)
    shown: list[str] = []
    note = RunLock.note
    monkeypatch.setattr(RunLock, "note", lambda lock, what: (note(lock, what), shown.append(_doing(run)))[0])
    for steps in (sft(run, tasks=small_tasks()), grpo(run, tasks=small_tasks(), rewards=REWARDS)):
        shown.clear()
        capsys.readouterr()
        progress.follow(steps, "stage", 0, 1)
        written = capsys.readouterr().err
        phases = [phase for phase in shown if phase]
        assert len(phases) >= 5 and run.config.model.name in " ".join(phases) and shown[-1] == ""
        assert terminal or [line for line in written.splitlines() if ": " in line] == [f"stage: {p}" for p in phases]
        assert not terminal or phases[-1] in written
    assert not [event for event in run.rows("events") if event["kind"] == "phase"]


def _doing(run: Run) -> str:
    """As the notebook's status line and one-line summary have it."""
    owner = Run.open(run.path).status().owner
    assert owner is not None
    session = attach(run)
    assert owner.doing in session.summary() and owner.doing in standing.status_html(
        session, session.state, Followed(run, "metrics", 1)
    )
    return owner.doing


# ---- the real thing


def command(path: Path, steps: int) -> list[str]:
    flags = {"sft.steps": 2, "sft.batch": 8, "sft.micro_batch": 8, "batch.prompts": 4, "batch.group_size": 4,
             "batch.micro_batch": 16, "run.quick_eval_every": 0}  # fmt: skip
    settings = [part for key, value in flags.items() for part in ("--set", f"{key}={value}")]
    arguments = ["-m", "grpo_nb", "train", str(path), "--preset", "demo", *settings, "--steps", str(steps)]
    return forked.command(*arguments)


def test_a_terminated_process_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    path, environment = tmp_path / "real", os.environ | {"OMP_NUM_THREADS": "1"}
    small_world(path)
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
    saved = re.search(r"interrupted\D+(\d+)\D+1000\b.*grpo-nb train", out)
    assert saved, out
    reached = int(saved[1])
    again = subprocess.run(
        command(path, reached + 1), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert names(again.stdout, "resumed", reached, reached + 1)
    assert [row["step"] for row in Run.open(path).rows("metrics")] == list(range(1, reached + 2))


def test_debug_is_on_before_the_run_is_opened(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "debug_mode", lambda: "debugging")
    status, out, _ = says(capsys, "train", run.path, "--debug")
    assert status == 0 and out.splitlines()[0] == "debugging"
    assert "debugging" not in says(capsys, "train", run.path)[1]
