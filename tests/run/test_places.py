"""Which run a name or a path means: one resolver for notebooks, functions and the command line."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_nb import cli
from grpo_nb.doctor import diagnose
from grpo_nb.jupyter import project
from grpo_nb.jupyter.start import attach
from grpo_nb.report import report
from grpo_nb.run import places
from grpo_nb.run.run import Run, RunError
from tests.support.tiny import tiny_config, tiny_run
from tests.support.tokens import names, pattern


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of a project in the home folder; the working directory is the project's notebooks."""
    project_folder = tmp_path / "project"
    (project_folder / "notebooks").mkdir(parents=True)
    (project_folder / "pyproject.toml").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(project_folder / "notebooks")
    return tiny_run(project_folder / "runs", "mine")


WAYS = ("mine", "runs/mine", "../runs/mine", "~/project/runs/mine", "ABSOLUTE", Path("../runs/mine"), Path("mine"))


def listed(name: str | Path) -> str:
    """The run that the command line lists the settings of."""
    assert cli.main(["settings", str(name), "--json"]) == 0
    return Run.open(name).shown


OPENERS: tuple[Callable[[Any], object], ...] = (
    Run.open, project.open_run, attach, diagnose, report.report, report.page, listed,
)  # fmt: skip


@pytest.mark.parametrize("name", WAYS, ids=str)
def test_a_run_opens_by_name_and_by_any_path(run: Run, name: str | Path) -> None:
    given = str(run.path) if name == "ABSOLUTE" else name
    assert Run.open(given).path.resolve() == project.open_run(given).path.resolve() == run.path.resolve()
    assert Run.open_or_create(given, run.config).path.resolve() == run.path.resolve(), "none is made beside it"


@pytest.mark.parametrize("opens", OPENERS, ids=lambda opens: opens.__qualname__)
def test_whatever_takes_a_run_takes_its_path(
    run: Run, opens: Callable[[Any], object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert opens("~/project/runs/mine") is not None and opens("mine") is not None


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mnie", ("config.json", "mine")),
        ("../runs/mnie", ("../runs/mine",)),
        ("../runs", ("config.json", "mine")),
        ("../runs/mine/checkpoints", ("../runs/mine",)),
        ("../runs/mine/config.json", ("../runs/mine",)),
        ("~/nowhere/at/all", ("nowhere/at/all", "none")),
    ],
)
def test_an_error_names_what_is_found_and_what_may_be_meant(run: Run, name: str, found: tuple[str, ...]) -> None:
    (run.path / "checkpoints").mkdir(exist_ok=True)
    wanted = [token for token in found if token != "config.json" or Path(name).exists()]
    with pytest.raises(RunError, match=pattern(*wanted)) as refused:
        Run.open(name)
    assert len(str(refused.value).splitlines()) == 1
    assert cli.main(["diagnose", name]) == 2


@pytest.mark.parametrize("opens", [Run.open, Run.open_or_create, lambda name: Run.create(name, tiny_config())])
@pytest.mark.parametrize(
    ("name", "found"), [("a\0b", "NUL"), ("x" * 5000, "5,000"), ("x/" * 2500, "5,000"), ("a\ud800", "UTF-8")]
)
def test_a_name_that_no_disk_takes_is_refused(opens: Callable[[str], Run], name: str, found: str) -> None:
    with pytest.raises(RunError, match=pattern(found, places.LONGEST_NAME)) as refused:
        opens(name)
    assert len(str(refused.value)) < 400 and str(refused.value).isprintable()


def test_an_error_lists_few_of_many_runs(run: Run) -> None:
    for number in range(places.MOST_NAMED + 3):
        tiny_run(run.path.parent, f"r{number:02}")
    said = places.missing(run.path.parent / "zzzzzz")
    assert names(said, "mine", "r00", 4) and "r10" not in said


def test_a_name_of_two_runs_is_refused_and_their_paths_are_not(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny_run(Path.cwd(), "mine")
    with pytest.raises(RunError, match=pattern("./mine", "../runs/mine")):
        Run.open("mine")
    assert cli.main(["diagnose", "mine"]) == 1 and names(capsys.readouterr().err, "./mine")
    assert Run.open("./mine").path == Run.open(Path("mine")).path == other.path
    assert Run.open("../runs/mine").path == run.path
    os.rename(other.path, "elsewhere")
    os.symlink(run.path, "mine")
    assert Run.open("mine").path.resolve() == run.path.resolve(), "one run by two ways"


def test_a_new_run_is_made_where_its_path_says(run: Run, tmp_path: Path) -> None:
    made = Run.create("~/made", run.config)
    assert made.path == tmp_path / "made" and not (Path.cwd() / "~").exists()
    assert project.open_run("fresh", preset="demo").path == run.path.parent / "fresh"
