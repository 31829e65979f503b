"""The project's runs as a notebook finds them, and what its first import lists."""

from pathlib import Path

import pytest

from grpo_nb import fingerprint
from grpo_nb.jupyter import project
from grpo_nb.run.run import Run, RunError
from tests.support.stage import row
from tests.support.tiny import tiny_run
from tests.support.tokens import names


def test_runs_live_in_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert project.run_path("demo") == tmp_path / "runs" / "demo"
    assert project.run_path("/elsewhere/demo") == Path("/elsewhere/demo")


@pytest.mark.ux(29, at="unit")
def test_notebook_out_of_order_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(project.NotReady, match="01_load") as caught:
        project.open_run(tmp_path / "none", needs="sft")
    assert caught.value._render_traceback_() == [str(caught.value)], "one line, no traceback"
    run = tiny_run(tmp_path)
    with pytest.raises(project.NotReady, match="02_sft"):
        project.open_run(run.path, needs="sft")
    with pytest.raises(project.NotReady, match="03_grpo"):
        project.open_run(run.path, needs="grpo")


def test_settings_cell_makes_the_run_once(tmp_path: Path) -> None:
    made = project.open_run(tmp_path / "r", preset="demo", changes={"run.steps": 7})
    assert made.config.run.steps == 7
    assert project.open_run(tmp_path / "r", preset="demo", changes={"run.steps": 7}).config == made.config
    made.log_metrics({"step": 1})
    with pytest.raises(RunError, match=r"run\.seed"):
        project.open_run(tmp_path / "r", preset="demo", changes={"run.steps": 7, "run.seed": 3})
    with pytest.raises(ValueError, match="'demmo'"):
        project.open_run(tmp_path / "s", preset="demmo")


def test_list_of_runs_says_what_to_do(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run.log_metrics(row(run, 2))
    frame = project.runs(tmp_path).frame
    assert frame.to_dict("records") == [
        {"run": "tiny", "state": "stopped", "step": 2, "steps": 6, "next": "resume: grpo_nb.start('tiny')"}
    ]


def test_module_imported_while_the_sources_are_looked_at_is_looked_at_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = fingerprint._modules()
    found = iter([known, [*known, ("grpo_nb.late", known[0][1], fingerprint.ROOT / "late.py")]] * 2)
    monkeypatch.setattr(fingerprint, "_modules", lambda: next(found))
    assert fingerprint.changed() == [] and len(fingerprint.fingerprint()) == 16


def test_many_edited_files_are_counted() -> None:
    assert names(fingerprint.sentence(["train.py"]), "train.py")
    many = fingerprint.sentence([f"{letter}.py" for letter in "abcdef"])
    assert names(many, "a.py", "d.py", 2) and "e.py" not in many


def test_lines_of_the_first_import_are_few_and_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert project.runs_summary(tmp_path) is None
    for number in range(4):
        made = tiny_run(tmp_path, f"r{number}")
        made.log_event("start", step=0)
        made.log_metrics(row(made, 1))
    made.sft_checkpoints.save(3, {}, {"step": 3})
    lines = (project.runs_summary(tmp_path, limit=2) or "").splitlines()
    assert names(lines[0], "r3", "stopped", 1, 4, "grpo_nb.start('r3')") and lines[1].startswith("r2: ")
    assert len(lines) == 3 and names(lines[2], 2, "grpo_nb.jupyter.project.runs()")
    fresh = tiny_run(tmp_path, "fresh")
    assert names(
        (project.runs_summary(tmp_path, limit=9) or "").splitlines()[0], "fresh", "new", 0, 4, "02_sft", "03_grpo"
    )
    fresh.sft_checkpoints.save(3, {}, {"step": 3})
    line = (project.runs_summary(tmp_path, limit=9) or "").splitlines()[0]
    assert names(line, "fresh", "new", 0, 4, "03_grpo") and "02_sft" not in line
