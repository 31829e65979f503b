"""Where an export may be written, what is left there after failures and kills, and which errors name the place."""

import os
from pathlib import Path

import pytest

from grpo_nb.exports import README, ExportError, export
from grpo_nb.run.run import Run
from grpo_nb.storage.files import flock
from tests.support import exported
from tests.support.tokens import pattern

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own
KILLED = ".grpo_nb-export.1-00000000.tmp"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = exported.a_run(tmp_path_factory.mktemp("exported"))
    (made.path / "metrics.jsonl").unlink()  # no curves to draw
    return Run.open(made.path)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_empty_folder_is_filled_where_it_lies(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "real")
    before = os.stat(".").st_ino
    made = export(run, tmp_path / "link")
    assert names(tmp_path / "real") == {*made.files} and {README, WEIGHTS} < {*made.files}
    assert os.stat(tmp_path / "real").st_ino == before and names(tmp_path) == {"real", "link"}


@pytest.mark.usefixtures("unchecked")
def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_nb.exports.restore_policy", None)
    for place in (tmp_path / ("x" * 300), Path("/proc/self/out"), tmp_path / "a\0b", tmp_path / "a\udcff"):
        with pytest.raises(ExportError):
            export(run, place)
    assert not names(tmp_path)


@pytest.mark.parametrize("kind", [OSError, Exception])
def test_a_full_disk_is_one_error_that_names_the_folder(
    kind: type[Exception], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> None:
        raise kind("No space left on device (os error 28)")

    monkeypatch.setattr("grpo_nb.exports._write", fails)
    (tmp_path / "there").mkdir()
    for place in (tmp_path / "there", tmp_path / "out"):
        with pytest.raises(ExportError, match=pattern(place)):
            export(run, place)
    assert names(tmp_path) == {"there"} and not names(tmp_path / "there")


def test_a_bug_of_a_writer_stays_itself(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_nb.exports._write", None)
    with pytest.raises(TypeError):
        export(run, tmp_path / "out")
    assert not names(tmp_path)


def test_what_a_killed_export_left_is_removed_and_what_is_being_written_stays(run: Run, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "out"):
        (place / KILLED).mkdir(parents=True)
        (place / KILLED / WEIGHTS).write_bytes(b"half")
    living = tmp_path / KILLED.replace("1-", "2-")
    living.mkdir()
    held = os.open(living, os.O_RDONLY)
    try:
        assert flock(held) == "taken"
        made = export(run, tmp_path / "out")
        assert names(tmp_path / "out") == {*made.files}
        export(run, tmp_path / "other")
        assert names(tmp_path) == {"out", "other", living.name}
    finally:
        os.close(held)


def test_of_two_exports_to_one_folder_one_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(*given: object) -> bool:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / README).write_text("the other's")
        return False

    monkeypatch.setattr("grpo_nb.exports._draw", meanwhile)
    with pytest.raises(ExportError, match=pattern(tmp_path / "out")):
        export(run, tmp_path / "out")
    assert (tmp_path / "out" / README).read_text() == "the other's" and names(tmp_path) == {"out"}
