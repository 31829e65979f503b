"""A study with a run that is damaged or not its own: the others are shown and trained, its numbers count nowhere."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.cli import main
from grpo_nb.dev import result, result_answers
from grpo_nb.run.run import Run, RunError
from grpo_nb.sweeps import Study, sweep
from grpo_nb.sweeps.work import stages
from tests.support.tokens import names, pattern
from tests.sweeps.test_sweeps import NO_KL, Pretended, evaluated, pretended, tiny  # noqa: F401

SEEDS = (0, 1)


def other_settings(path: Path) -> None:
    run = Run.create(path, tiny().replace(**{"objectives.fairness.beta": 0.9, "run.seed": 7}))
    for objective in run.config.objectives:
        run.log_evaluation(evaluated("latest", objective, 0.99))


def another_arm(path: Path) -> None:
    path.symlink_to(path.with_name("usual-0"))


def broken(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{")


def fifo(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "config.json")


@pytest.fixture
def study(tmp_path: Path, pretended: list[Pretended]) -> Study:  # noqa: F811
    made = sweep(tmp_path / "kl", tiny(), {"usual": {}, "no-kl": NO_KL}, SEEDS)
    made.train()
    pretended.clear()
    return made


@pytest.mark.parametrize("damage", [other_settings, another_arm, broken, fifo])
def test_a_run_that_is_not_the_study_s_hides_no_other_and_counts_nowhere(
    damage: Any,
    study: Study,
    pretended: list[Pretended],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.rmtree(study.folder / "no-kl-0")
    damage(study.folder / "no-kl-0")
    found = study.status().frame.set_index(["arm", "seed"])
    assert list(found["state"] == "unreadable") == [False, True, False, False]
    assert list(found["left"] != "") == [False, True, False, False]
    results = study.results().set_index(["arm", "objective", "metric"])
    assert results.loc[("no-kl", "fairness", "accuracy"), "seeds"] == 1
    assert results.loc[("no-kl", "fairness", "accuracy"), "value"] == pytest.approx(0.5)
    shutil.rmtree(study.folder / "usual-1")
    assert main(["sweep", str(study.folder), "--only", "usual"]) == 0
    assert pretended and "usual" in capsys.readouterr().out
    pretended.clear()
    with pytest.raises(RunError, match=pattern("no-kl-0")):
        study.train(arms=["no-kl"])
    assert not pretended


def test_an_arm_that_is_not_there_is_refused_when_shown_too(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(study.folder), "--show", "--only", "usul"]) == 2
    assert names(capsys.readouterr().err, "usul", "usual")


# ---- the measured result


def answers(study: Study, *arms: str) -> None:
    """A file of each kind for the ends of some arms."""
    for trial in study.trials:
        for stage in stages(trial) if trial.arm in arms else ():
            for kind in result_answers.KINDS:
                file = result_answers.answer_file(trial.path, str(stage), kind)
                file.parent.mkdir(exist_ok=True)
                file.write_text(json.dumps({"example_id": "a", "answer": "b"}) + "\n")


@pytest.fixture
def measured(tmp_path: Path, pretended: list[Pretended], monkeypatch: pytest.MonkeyPatch) -> Study:  # noqa: F811
    arms = {name: result.ARMS[name] for name in ("sft", "grpo")}
    made = sweep(tmp_path / "measured", tiny(), arms, [0])
    for trial in made.trials:
        trial.made()
    monkeypatch.setattr(result, "measures", lambda *given: [])
    return made


@pytest.mark.parametrize("arms", [(), ("grpo",)])
def test_a_study_that_has_not_answered_yet_leaves_the_committed_tables(
    arms: tuple[str, ...], measured: Study, tmp_path: Path
) -> None:
    answers(measured, *arms)
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.csv").write_text("kept")
    with pytest.raises(RunError, match=pattern("sft-0")):
        result.take(measured, result_answers.Sources("qa", "unseen"), out)
    assert [path.name for path in out.iterdir()] == ["results.csv"] and (out / "results.csv").read_text() == "kept"


@pytest.mark.parametrize("line", ["{", "[]", '{"example_id": "a"}', '{"answer": "a"}', "\x00"])
def test_a_damaged_file_of_answers_is_named(line: str, measured: Study) -> None:
    answers(measured, "grpo")
    path = measured.folder / "grpo-0"
    file = result_answers.answer_file(path, "latest", "bbq")
    file.write_text(f'{{"example_id": "a", "answer": "b"}}\n{line}\n')
    with pytest.raises(RunError, match=pattern(file)):
        result_answers._texts(path, "latest", "bbq")
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(RunError, match=pattern(file)):
        result_answers._texts(path, "latest", "bbq")


def test_answers_that_lack_items_are_refused(measured: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.open(measured.folder / "grpo-0")
    with pytest.raises(RunError, match=pattern("fairness", "predictions")):
        result_answers._evaluated(run, "fairness", {"a": "b"})
