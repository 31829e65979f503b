"""Answers: tables and sentences for people, JSON for scripts."""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_nb.cli.options import UsageError
from grpo_nb.printable import json_text, one_line, printable
from grpo_nb.report.text_table import drawn
from grpo_nb.storage.safe_open import RunError

UNWRAPPED = 10_000
"""Columns of plain text, so that a row is on one line for programs that cut or search it."""

BEGINNING = 1 << 16
"""Bytes of a file that show its kind."""
OF_KIND: Mapping[str, Callable[[bytes], bool]] = {
    "answers": lambda head: _are_answers(head.partition(b"\n")[0]),
    "report": lambda head: b"<!doctype html" in head.lower(),
    "table": lambda head: head.startswith((b"step", b"PAR1")),
    "bundle": lambda head: head.startswith(b"PK"),
    "trace": lambda head: head.startswith(b"\x1f\x8b") or b"schemaVersion" in head,
}
"""Test whether a file begins as the output of a command does, by what the command writes."""


def check_out(given: str | None, kind: str) -> None:
    """Refuse a file to write that is no file, or has other content than an earlier output: a log, data.

    Raises:
        UsageError: it is refused; before any work.
        RunError: its folder is missing.
    """
    if given is None:
        return
    path = Path(given)
    if not path.parent.is_dir():
        raise RunError(f"--out {given}: the folder {path.parent} is missing; make it, or name another file")
    if not os.path.lexists(path):
        return
    if not path.is_file():
        raise UsageError(f"--out {given} is not a file; name the file to write")
    with open(path, "rb") as file:
        head = file.read(BEGINNING)
    if head and not OF_KIND[kind](head):
        raise UsageError(f"--out {given} holds something else than {kind}; name another file, or remove it first")


def _are_answers(line: bytes) -> bool:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"example_id", "answer"} <= found.keys() <= {"example_id", "category", "answer"}


def say(text: str) -> None:
    """A sentence on standard output, fit for a terminal."""
    sys.stdout.write(f"{printable(text)}\n")
    sys.stdout.flush()


def show(rows: Sequence[Mapping[str, Any]], empty: str = "nothing", width: int = UNWRAPPED) -> None:
    """Rows of one shape as a table; as plain text, of `width`, where standard output is no terminal."""
    if not rows:
        say(empty)
        return
    console = Console()
    numeric = [all(isinstance(row[name], int | float) or row[name] is None for row in rows) for name in rows[0]]
    cells = [[_cell(value) for value in row.values()] for row in rows]
    say(drawn([*map(one_line, rows[0])], cells, numeric, console.width if console.is_terminal else width))


def show_json(value: Any) -> None:
    """JSON on standard output; what JSON has no word for (nan, inf) is null."""
    text = json.dumps(_plain(value), indent=2, allow_nan=False, ensure_ascii=False)
    sys.stdout.write(f"{json_text(text)}\n")


def rows_of(table: Any) -> list[dict[str, Any]]:
    """The rows of a DataFrame as plain values."""
    return [_plain(row) for row in table.to_dict(orient="records")]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else one_line(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str):  # numpy's scalars
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)
