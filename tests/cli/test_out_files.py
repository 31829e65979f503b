"""What a command writes by --out replaces nothing but what it wrote there before."""

import os
from pathlib import Path

import pytest

from grpo_nb import presets
from grpo_nb.cli import main
from grpo_nb.cli.options import UsageError
from grpo_nb.cli.output import check_out
from grpo_nb.run.run import Run
from tests.support.tokens import names


@pytest.mark.parametrize("command", [["answer", "fairness"], ["report"], ["bundle"], ["profile"]], ids=lambda c: c[0])
def test_a_log_of_a_run_is_not_replaced(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create(tmp_path / "run", presets.demo())
    run.log_metrics({"step": 1})
    file = run.path / "metrics.jsonl"
    before = file.read_bytes()
    assert main([command[0], str(run.path), *command[1:], "--out", str(file)]) == 2
    assert names(capsys.readouterr().err, "--out", file) and file.read_bytes() == before


@pytest.mark.parametrize("kind", ["answers", "report", "bundle", "trace"])
def test_only_what_was_written_there_is_replaced(kind: str, tmp_path: Path) -> None:
    written = {
        "answers": b'{"example_id": 0, "category": "Age", "answer": "x"}\n{}',
        "report": b"<!doctype html>\n<html>",
        "bundle": b"PK\x03\x04",
        "trace": b"\x1f\x8b\x08",
    }
    data = b'{"example_id": 0, "category": "Age", "answer": "x", "context": "y"}\n'
    for name, content in {**written, "data": data, "json": b"[", "deep": b"[" * 100_000, "text": b"\xff"}.items():
        file = tmp_path / name
        file.write_bytes(content)
        if name == kind:
            check_out(str(file), kind)
            continue
        with pytest.raises(UsageError):
            check_out(str(file), kind)
    (tmp_path / "empty").touch()
    for fine in ("empty", "new"):
        check_out(str(tmp_path / fine), kind)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for none in (str(tmp_path), ".", os.devnull, str(tmp_path / "link")):
        with pytest.raises(UsageError):
            check_out(none, kind)
