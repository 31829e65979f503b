"""A project that was cloned or unpacked names nothing to import, although its file is this user's."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_nb import presets
from grpo_nb.jupyter import project, project_file
from grpo_nb.jupyter.project_file import OwnPaths
from grpo_nb.run.run import Run
from grpo_nb.storage import user_cache

MODULE = "module_of_a_project"


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a module beside its runs."""
    home = tmp_path / "project"
    home.mkdir()
    (home / "pyproject.toml").touch()
    (home / f"{MODULE}.py").write_text("class Capitals: ...\n")
    monkeypatch.chdir(home)
    monkeypatch.delenv(project_file.ELSEWHERE)
    path = list(sys.path)
    yield home
    sys.path[:] = path
    sys.modules.pop(MODULE, None)


@pytest.mark.parametrize("how", ["moved", "no seal", "edited", "another user's key"])
def test_a_folder_from_elsewhere_names_nothing_to_import(
    how: str, at: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(at / "runs" / "a", presets.demo())
    project_file.remember(run.path, "now", OwnPaths(tasks={"fairness": f"{MODULE}:Capitals"}))
    assert {*project.own(run).tasks} == {"fairness"}
    sys.modules.pop(MODULE)
    file = at / project_file.FOLDER / project_file.FILE
    content = json.loads(file.read_text())
    if how == "moved":
        theirs = tmp_path / "theirs"
        shutil.copytree(at, theirs)
        monkeypatch.chdir(theirs)
        run = Run.open(theirs / "runs" / "a")
    elif how == "another user's key":
        monkeypatch.setenv(user_cache.FOLDER, str(tmp_path / "cache"))
    else:
        if how == "no seal":
            del content["seal"]
        else:
            content["own"]["runs/a"]["tasks"]["fairness"] = f"{MODULE}:Other"
        file.write_text(json.dumps(content))
    assert project_file.read().run == "runs/a" and not project_file.read().own
    assert not project.own(run).tasks and MODULE not in sys.modules
