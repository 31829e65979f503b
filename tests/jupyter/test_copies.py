"""Copies of the notebooks: without outputs and pairs, renewed where nobody edited them, kept where somebody did."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.cli import main
from grpo_nb.jupyter import copies
from grpo_nb.run.run import RunError
from tests.support.tokens import names, pattern

NAMES = ("01_load", "02_sft", "03_grpo")


@pytest.fixture
def originals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Some of the project's notebooks, one with an output."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for name in NAMES:
        shutil.copy(copies.ORIGINALS / f"{name}.ipynb", folder)
    edit(folder / "01_load.ipynb", outputs=[{"output_type": "stream", "name": "stdout", "text": "of the demo"}])
    monkeypatch.setattr(copies, "ORIGINALS", folder)
    return folder


def edit(path: Path, **changes: Any) -> None:
    """The first code cell, as a person or JupyterLab changes it."""
    book = json.loads(path.read_text())
    next(cell for cell in book["cells"] if cell["cell_type"] == "code").update(changes)
    path.write_text(json.dumps(book))


def states(folder: Path) -> list[str]:
    return [state for _, state in copies.make(folder)]


def test_a_copy_has_no_outputs_and_no_pair(originals: Path, tmp_path: Path) -> None:
    assert states(tmp_path / "lab") == [copies.NEW] * 3
    book, original = (json.loads((folder / "01_load.ipynb").read_text()) for folder in (tmp_path / "lab", originals))
    assert not [cell for cell in book["cells"] if cell.get("outputs")]
    assert "jupytext" in original["metadata"] and "jupytext" not in book["metadata"]
    assert [cell["source"] for cell in book["cells"]] == [cell["source"] for cell in original["cells"]]
    assert [path.name for path in (tmp_path / "lab").iterdir() if path.suffix != ".ipynb"] == []


def test_copies_that_nobody_edited_are_renewed(originals: Path, tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    states(lab)
    edit(lab / "01_load.ipynb", outputs=[{"output_type": "stream", "name": "stdout", "text": "mine"}])
    edit(lab / "02_sft.ipynb", source="RUN = 'mine'")
    assert states(lab) == [copies.SAME, copies.EDITED, copies.SAME]
    assert "mine" in (lab / "01_load.ipynb").read_text(), "what was run is no edit, and stays"
    for name in NAMES:
        edit(originals / f"{name}.ipynb", source="import newer")
    edit(lab / "03_grpo.ipynb", source="import newer")
    assert states(lab) == [copies.RENEWED, copies.OLDER, copies.SAME]
    assert "RUN = 'mine'" in (lab / "02_sft.ipynb").read_text()
    assert "import newer" in (lab / "01_load.ipynb").read_text()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"metadata": {}, "cells": [{"cell_type": "code", "source": ["x"]}]}']
)
def test_what_is_no_copy_is_kept(originals: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "01_load.ipynb").write_text(content)
    assert states(tmp_path) == [copies.OLDER, copies.NEW, copies.NEW]
    assert (tmp_path / "01_load.ipynb").read_text() == content


def test_the_project_s_own_are_not_written_and_may_be_missing(
    originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match=pattern(originals)):
        states(originals / ".." / "notebooks")
    monkeypatch.setattr(copies, "ORIGINALS", tmp_path / "nowhere")
    with pytest.raises(RunError, match=pattern(tmp_path / "nowhere", "clone")):
        states(tmp_path / "lab")


def test_the_command_copies_into_the_project(
    originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(originals)
    assert main(["notebooks"]) == 0
    assert names(capsys.readouterr().out, "../lab/01_load.ipynb", copies.NEW)
    assert main(["notebooks", "elsewhere", "--json"]) == 0
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == [copies.NEW] * 3
    assert (originals / "elsewhere" / "03_grpo.ipynb").is_file()


def test_what_is_no_file_is_kept_and_not_waited_for(originals: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "01_load.ipynb")
    (tmp_path / "02_sft.ipynb").mkdir()
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(states(tmp_path)), daemon=True)
    thread.start()
    thread.join(10)
    os.close(os.open(tmp_path / "01_load.ipynb", os.O_RDWR))  # lets one that waits go
    assert found == [copies.OLDER, copies.OLDER, copies.NEW] and (tmp_path / "01_load.ipynb").is_fifo()
