"""What the project remembers for its notebooks: the current run, and where own tasks and rewards are imported from."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_nb import presets
from grpo_nb.config import ConfigError
from grpo_nb.dev import render
from grpo_nb.jupyter import kernel, project, project_file
from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo
from tests.conftest import ROOT
from tests.support.tiny import SMALL, small_tasks, tiny_run
from tests.support.tokens import names, pattern

OWN = """
from grpo_nb import Example, Score

class Capitals:
    name = "capitals"

    def examples(self, split):
        pairs = {"France": "Paris", "Peru": "Lima", "Ghana": "Accra", "Japan": "Tokyo"}
        return [Example(id=c, prompt=f"The capital of {c} is", columns={"answer": a}) for c, a in pairs.items()]

    def score(self, example, completion):
        right = example.columns["answer"] in completion
        return Score(value=float(right), label="correct" if right else "wrong")

def length(completions, **columns):
    return [len(c) % 7 / 7 for c in completions]
"""
CHANGES = SMALL | {"objectives": {"geography": {"task": "capitals"}}, "sft.steps": 0, "run.quick_eval_every": 0}
OWN_TASK = {"geography": "own:Capitals"}


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project, and its notebooks as the working directory."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.syspath_prepend(tmp_path / "notebooks")
    monkeypatch.delenv(project_file.ELSEWHERE)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("own", None)


def make(name: str, **kept: object) -> Run:
    return project.open_run(name, preset="demo", changes=SMALL, **kept)  # type: ignore[arg-type]


def test_the_run_that_was_opened_last_with_its_settings_is_current(at: Path) -> None:
    make("a")
    assert project.open_run().path == at / "runs" / "a"
    make("b")
    assert project.open_run().name == "b" and project.open_run("a").name == "a"
    assert project.open_run().name == "b", "one line in a notebook is for that notebook"
    assert "a" not in project_file.read().own, "a run without own code needs no entry"
    elsewhere = make(str(at.parent / "elsewhere"))
    assert project.open_run().path == elsewhere.path


def test_a_notebook_says_which_run_it_opens(at: Path) -> None:
    a, b = make("a"), make("b")
    since = project_file.read().since
    assert names(project.opened(b, chosen=False), "b", since, "RUN")
    assert names(project.opened(b, chosen=True), "b") and "RUN" not in project.opened(b, chosen=True)
    assert names(project.opened(a, chosen=True), "a", "RUN", "runs/b")


def test_a_lost_file_and_a_deleted_run_are_said(at: Path) -> None:
    with pytest.raises(project.NotReady, match="01_load"):
        project.open_run()
    run = make("a")
    project_file.file().unlink()
    assert project.open_run().path == run.path, "there is only one"
    assert "01_load" not in project.opened(run, chosen=False)
    make("b")
    project_file.file().unlink()
    with pytest.raises(project.NotReady, match=pattern("RUN", "a, b")):
        project.open_run()
    make("c")
    (at / "runs" / "c").rename(at / "moved")
    with pytest.raises(project.NotReady, match=pattern("runs/c", "RUN", "a, b")) as caught:
        project.open_run()
    assert caught.value._render_traceback_() == [str(caught.value)]


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"run": 3}', b'{"run": "x", "more": 1}', b"\xff" * 99])
def test_a_damaged_file_is_as_good_as_none(at: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    run = make("a")
    project_file.file().write_bytes(content)
    assert project.open_run().path == run.path
    assert names(caplog.text, project_file.file())
    make("b")
    assert project.open_run().name == "b"


def test_a_file_that_others_may_write_is_not_believed(at: Path, caplog: pytest.LogCaptureFixture) -> None:
    make("a", tasks={"fairness": "own:Capitals"})
    make("b")
    os.chmod(project_file.file(), 0o666)
    assert project_file.read() == project_file.Project() and names(caplog.text, project_file.file())


def test_where_the_file_cannot_be_written_the_run_opens(
    at: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(project_file.ELSEWHERE, str(at / "pyproject.toml" / "below a file"))
    assert make("a").name == "a" and names(caplog.text, "RUN")


def test_own_code_comes_along_by_import_path_and_is_in_no_run(at: Path) -> None:
    run = project.open_run(
        "capitals", preset="demo", changes=CHANGES, tasks=OWN_TASK, rewards={"geography": ["own:length"]}
    )
    found = project.own(project.open_run())
    assert found.tasks["geography"].name == "capitals"
    ((function, weight),) = found.rewards["geography"]
    assert function.__name__ == "length" and weight == 1.0
    assert not [path for path in run.path.rglob("*") if path.is_file() and b"own:" in path.read_bytes()]
    project.open_run("capitals", preset="demo", changes=CHANGES)
    assert project.own(run).rewards, "who says nothing changes nothing"
    project.open_run("capitals", preset="demo", changes=CHANGES, tasks=OWN_TASK, rewards={})
    assert not project.own(run).rewards and project.own(run).tasks
    assert project.own(make("other")) == project.Own({}, {}), "they are those of one run"


def test_own_code_in_the_project_s_folder_is_found(at: Path) -> None:
    (at / "beside_runs.py").write_text(OWN)
    assert project_file.load("beside_runs:Capitals").name == "capitals"


def test_nothing_is_imported_because_a_run_names_it(at: Path) -> None:
    named = CHANGES | {"objectives": {"geography": {"task": "own:Capitals"}}}
    run = Run.create(at / "runs" / "from-elsewhere", presets.demo().replace(**named))
    (run.path / ".grpo_nb").mkdir()
    paths = {"own": {"runs/from-elsewhere": {"tasks": {"geography": "own:Capitals"}}}}
    (run.path / ".grpo_nb" / "project.json").write_text(json.dumps(paths))
    with pytest.raises(project.NotReady, match=pattern("geography", "TASKS", "01_load")):
        project.own(run)
    assert "own" not in sys.modules


@pytest.mark.parametrize(
    ("tasks", "rewards", "said"),
    [
        ({"fairness": object()}, {}, ("TASKS['fairness']",)),
        ({"fairness": "own"}, {}, ("TASKS['fairness']", "'own'")),
        ({"fairness": "own:Nothing"}, {}, ("'own:Nothing'", "AttributeError")),
        ({"fairness": "nowhere.at_all:X"}, {}, ("ModuleNotFoundError",)),
        ({}, {"fairness": "own:length"}, ("REWARDS['fairness']", "'own:length'")),
        ({}, {"fairness": [len]}, ("REWARDS['fairness']",)),
        ({}, {"fairness": [("own:length", "0.1")]}, ("REWARDS['fairness']", "'0.1'")),
        ({}, {"fairness": [("own:length", float("nan"))]}, ("REWARDS['fairness']", "nan")),
    ],
)
def test_what_cannot_come_along_is_refused_before_a_run_is_made(
    at: Path, tasks: dict[str, str], rewards: dict[str, list[str]], said: tuple[str, ...], unchecked: None
) -> None:
    with pytest.raises(ConfigError, match=pattern(*said)):
        make("a", tasks=tasks, rewards=rewards)
    assert not (at / "runs").exists()


def test_reward_functions_of_the_run_are_asked_for(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(kernel, "notify", said.append)

    def length(completions: list[Any], **_: Any) -> list[float]:
        return [0.1 for _ in completions]

    plain, run = (tiny_run(at / "runs", name, sft__steps=0, run__steps=1) for name in "ab")
    list(grpo(plain, tasks=small_tasks()))
    assert any("/part/" in key for key in plain.rows("metrics")[0])
    project.own(plain)
    assert not said, "a task's own parts are no reward functions"
    list(grpo(run, tasks=small_tasks(), rewards={"fairness": [(length, 0.1)]}))
    project.own(run)
    assert len(said) == 1 and names(said[0], "length of fairness", "REWARDS")
    project_file.remember(run.path, "now", project_file.OwnPaths(rewards={"fairness": [("own:length", 0.1)]}))
    project.own(run)
    assert len(said) == 1


@pytest.mark.slow
def test_the_guide_s_own_task_is_among_the_project_s_runs(at: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "grpo_nb/dev/pages/extending.md").read_text(), re.DOTALL)
    (task,) = [block for block in blocks if "class Capitals" in block]
    (training,) = [block for block in blocks if "own:Capitals" in block]
    (at / "notebooks" / "own.py").write_text(task)
    exec(training, {})
    assert [(row["run"], row["step"]) for row in project.runs().frame.to_dict("records")] == [("capitals", 3)]


@pytest.mark.slow
@pytest.mark.usefixtures("this_checkout")
def test_an_own_task_goes_through_the_notebooks(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named once, in 01_load; the others know the run and its task."""
    settings = {"RUN": "capitals", "CHANGES": CHANGES, "TASKS": OWN_TASK, "REWARDS": {"geography": ["own:length"]}}
    for name in ("01_load", "02_sft", "03_grpo", "04_diagnostics"):
        book = at / "notebooks" / f"{name}.ipynb"
        book.write_bytes((ROOT / "notebooks" / book.name).read_bytes())
        given = {"01_load": settings, "03_grpo": {"STEER_STEPS": 2}}.get(name, {})
        render.render(book, at / "pages", given)
    run = Run.open(at / "runs" / "capitals")
    assert run.status().state == "done"
    assert run.metric_rows()[-1]["reward/geography/part/length"] is not None
    assert names((at / "pages" / "03_grpo.html").read_text(), "capitals", project_file.read().since)
