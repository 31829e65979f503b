"""Lines of a sweep where there is no terminal: of each run that trains, and of the parts that are done."""

import sys
from pathlib import Path

import pytest

from grpo_nb.cli import progress, study_progress
from grpo_nb.cli.study_progress import StudyLines, followed
from grpo_nb.sweeps import Arm, sweep, work
from tests.support.tiny import tiny_config
from tests.support.tokens import names


def test_a_line_comes_for_each_tenth_of_a_run_and_each_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_SECONDS", 1e9)
    study = sweep(tmp_path / "study", tiny_config(run__steps=50, sft__steps=0), {"usual": Arm()}, (0, 1))
    lines = StudyLines(study.trials)
    run = study.trials[0].made()
    with run.lock():
        for step in range(1, 51):
            run.log_metrics({"step": step, "loss": 0.25, "time/step": 600.0})
            lines.write()
    found = capsys.readouterr().err.splitlines()
    assert len(found) == 11
    assert names(found[0], "usual-0", "GRPO", "1/50", "loss 0.250", "left") and names(found[-1], "50/50")
    lines.write()
    assert not capsys.readouterr().err, "it trains no more"
    parts = sum(len(work.left(trial)) for trial in study.trials)
    monkeypatch.setattr(study_progress, "left", lambda trial: work.left(trial)[1:])
    lines.write()
    (line,) = capsys.readouterr().err.splitlines()
    assert names(line, f"2 of {parts}")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_has_a_bar_instead(
    terminal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[StudyLines] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(StudyLines, "write", lambda lines: written.append(lines))
    study = sweep(tmp_path / "study", tiny_config(run__steps=2, sft__steps=0), {"usual": Arm()}, (0,))
    with followed(study.trials):
        pass
    assert bool(written) is not terminal
