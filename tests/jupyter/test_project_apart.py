"""Own tasks and rewards in another process and in the terminal: by the import paths of the project file."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.cli import main, verbs
from grpo_nb.jupyter import kernel, project, project_file
from grpo_nb.jupyter.start import start
from grpo_nb.jupyter.workers import Job
from grpo_nb.presets import demo
from grpo_nb.run.run import Run
from grpo_nb.types import StepStats
from tests.jupyter.test_project_file import CHANGES, OWN, OWN_TASK
from tests.support.cli_stage import fake_grpo
from tests.support.tokens import names, pattern

REWARD = {"geography": [("own_code_apart:length", 0.5)]}
TASK = {name: path.replace("own:", "own_code_apart:") for name, path in OWN_TASK.items()}


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project whose own code lies beside its notebooks, where the kernel ran; the terminal stands in the project."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "own_code_apart.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(project_file.ELSEWHERE)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in ("own_code_apart", "bad_code_apart"):
        sys.modules.pop(name, None)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The tasks and rewards of each GRPO that the terminal began."""
    begun: list[dict[str, Any]] = []

    def grpo(run: Run, *, steps: int, **own: Any) -> Iterator[StepStats]:
        begun.append(own)
        yield from fake_grpo(run, steps=steps)

    monkeypatch.setattr(verbs, "grpo", grpo)
    return begun


def made(at: Path, monkeypatch: pytest.MonkeyPatch, **kept: Any) -> Run:
    """Opened in a notebook of `lab`, whose kernel is gone by now."""
    with monkeypatch.context() as notebook:
        notebook.chdir(at / "lab")
        notebook.syspath_prepend(at / "lab")
        run = project.open_run("capitals", preset="demo", changes=CHANGES | {"run.steps": 2}, **kept)
    sys.modules.pop("own_code_apart", None)
    return run


def test_the_terminal_trains_with_what_the_notebook_named(
    at: Path, given: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(at, monkeypatch, tasks=TASK, rewards=REWARD)
    assert main(["train", str(run.path)]) == 0
    (own,) = given
    assert own["tasks"]["geography"].name == "capitals"
    assert [(function.__name__, weight) for function, weight in own["rewards"]["geography"]] == [("length", 0.5)]


def test_the_terminal_names_own_code_itself(
    at: Path, given: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the next command, and a notebook, find it."""
    run = Run.create(at / "runs" / "capitals", demo().replace(**CHANGES | {"run.steps": 2}))
    monkeypatch.chdir(at / "lab")
    flags = ["--task", "geography=own_code_apart:Capitals", "--reward", "geography=own_code_apart:length=0.5"]
    assert main(["train", str(run.path), "--steps", "1", *flags]) == 0
    monkeypatch.chdir(at)
    assert main(["train", str(run.path), "--steps", "2"]) == 0
    assert [own.keys() for own in given] == [{"tasks", "rewards"}] * 2
    kept = project_file.read()
    assert kept.own["runs/capitals"].rewards == REWARD and kept.run is None, "which run is current is 01_load's to say"
    assert project.own(run).tasks["geography"].name == "capitals"


BAD = """
import sys
from own_code_apart import Capitals


class Needs(Capitals):
    def __init__(self, pairs):
        pass


class Ends(Capitals):
    def __init__(self):
        sys.exit(0)


class Length:
    def __init__(self, power=1):
        self.power = power

    def __call__(self, completions):
        return [0.0 for _ in completions]


class Weighs:
    def __init__(self, weights):
        pass


def lacks(completions, nowhere):
    return [0.0 for _ in completions]
"""


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], ("geography", "--task", "TASKS")),
        (["--task", "geographie=own_code_apart:Capitals"], ("geographie", "geography")),
        (["--task", "geography=own_code_apart:Nothing"], ("own_code_apart:Nothing", "AttributeError")),
        (["--task", "geography=bad_code_apart:Needs"], ("Needs", "TypeError")),
        (["--task", "geography=bad_code_apart:Ends"], ("Ends", "SystemExit")),
        (["--task", "geography=ends_code_apart:Capitals"], ("ends_code_apart", "SystemExit")),
        (["--task", f"geography={'a' * 5000}:b"], ("4096",)),
        (["--task", "geography=own_code_apart:Capitals"] * 2, ("--task", "geography")),
        (["--reward", "geography=bad_code_apart:Weighs"], ("Weighs", "TypeError")),
        (["--reward", "geography=bad_code_apart:lacks"], ("lacks", "nowhere")),
    ],
)
def test_own_code_that_is_missing_or_cannot_be_called_is_refused_before_any_work(
    flags: list[str],
    named: tuple[str, ...],
    at: Path,
    given: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run.create(at / "runs" / "capitals", demo().replace(**CHANGES))
    (at / "lab" / "bad_code_apart.py").write_text(BAD)
    (at / "lab" / "ends_code_apart.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(at / "lab")
    own = ["--task", "geography=own_code_apart:Capitals"] if "--reward" in flags else []
    assert main(["train", str(run.path), *own, *flags]) in (1, 2)
    out, err = capsys.readouterr()
    assert not given and not out and names(err, *named) and len(err) < 1000


def test_own_code_that_is_named_needs_no_file_to_remember_it(
    at: Path, given: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(at / "runs" / "capitals", demo().replace(**CHANGES))
    (at / "lab" / "bad_code_apart.py").write_text(BAD)
    (at / "file").write_text("")
    monkeypatch.setenv(project_file.ELSEWHERE, str(at / "file" / "x"))
    monkeypatch.chdir(at / "lab")
    flags = ["--task", "geography=own_code_apart:Capitals", "--reward", "geography=bad_code_apart:Length=0.5"]
    assert main(["train", str(run.path), *flags]) == 0
    (own,) = given
    ((function, weight),) = own["rewards"]["geography"]
    assert own["tasks"]["geography"].name == "capitals" and (type(function).__name__, weight) == ("Length", 0.5)


def test_a_run_brings_no_own_code_to_a_process(at: Path, given: list[dict[str, Any]]) -> None:
    (at / "own_code_apart.py").write_text(OWN)
    named = CHANGES | {"objectives": {"geography": {"task": "own_code_apart:Capitals"}}}
    run = Run.create(at / "runs" / "theirs", demo().replace(**named))
    assert main(["train", str(run.path)]) == 1
    with pytest.raises(project.NotReady, match=pattern("geography")):
        start(run, where="process")
    assert not given and "own_code_apart" not in sys.modules


def test_a_reward_that_the_run_had_is_missed(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the settings cell says that there is none."""
    run = Run.create(at / "runs" / "a", demo())
    monkeypatch.setattr(project, "_lacking", lambda run, found: ["length of fairness"])
    with pytest.raises(project.NotReady, match=pattern("length of fairness", "REWARDS", "--reward fairness")):
        project.own_apart(run)
    project_file.remember(run.path, "now", project_file.OwnPaths())
    assert project.own_apart(run) == project.Own({}, {})


@pytest.mark.usefixtures("unchecked")
def test_a_process_may_be_given_what_it_will_import(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "notify", lambda text: None)
    run = made(at, monkeypatch, tasks=TASK, rewards=REWARD)
    own = project.own(run)
    Job(run, "grpo", "process", own.tasks, own.rewards)
    Job(run, "grpo", "process")
    twice = {"geography": [(function, 2 * weight) for function, weight in own.rewards["geography"]]}
    for rewards in (twice, {"geography": [(len, 0.5)]}):
        with pytest.raises(project.NotReady, match=pattern("rewards['geography']", "where='thread'")):
            Job(run, "grpo", "process", own.tasks, rewards)
    other = object.__new__(type(own.tasks["geography"]))
    other.pairs = {}
    with pytest.raises(project.NotReady, match=pattern("tasks['geography']")):
        Job(run, "grpo", "process", {"geography": other}, own.rewards)


@pytest.mark.slow
@pytest.mark.usefixtures("this_checkout")
def test_a_process_trains_an_own_task(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(at, monkeypatch, tasks=TASK, rewards=REWARD)
    own = project.own(run)
    start(run, where="process", tasks=own.tasks, rewards=own.rewards).wait_blocking()
    assert run.last_step() == 2
    assert run.metric_rows()[-1]["reward/geography/part/length"] is not None
