"""Every file of a run x every damage: each way to look at it, and to go on, works or gives one clear error."""

import json
import logging
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.config import ConfigError
from grpo_nb.doctor import diagnose
from grpo_nb.evaluation.compare import comparison
from grpo_nb.evaluation.evaluate import evaluate
from grpo_nb.policy.source import ModelError
from grpo_nb.report import report
from grpo_nb.run.listing import list_runs
from grpo_nb.run.run import Run, RunError
from grpo_nb.training.grpo import grpo
from grpo_nb.training.guards import TrainingError
from grpo_nb.training.sft import sft
from tests.support.tiny import REWARDS, small_tasks, tiny_run

pytestmark = pytest.mark.usefixtures("narrow_model")

CLEAR = (RunError, ConfigError, ModelError, TrainingError)
HANGS_AFTER = 120
BOTH_STAGES = {
    **{"sft__steps": 2, "sft__checkpoint_every": 1, "sft__data": None, "sft__batch": 4},
    **{"run__steps": 2, "run__checkpoint_every": 1, "batch__group_size": 2, "sampling__max_completion_length": 8},
}
Bytes = Callable[[bytes], bytes]
Value = Callable[[Any], Any]


# ---- damages: of the bytes, of the values, of what the file is


def deep(opening: bytes, closing: bytes, depth: int) -> bytes:
    return opening * depth + b"1" + closing * depth + b"\n"


BYTES: dict[str, Bytes] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "torn": lambda data: data[:-3],
    "zeros": lambda data: bytes(len(data)),
    "garbage": lambda data: bytes((7 * n * n + 13 * n) % 251 for n in range(len(data))),
    "one byte": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 255]) + data[len(data) // 2 + 1 :],
    "twice": lambda data: data + data,
    "utf-16": lambda data: data.decode("utf-8", "replace").encode("utf-16"),
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "carriage returns": lambda data: data.replace(b"\n", b"\r\n"),
    "deep array": lambda data: deep(b"[", b"]", 100_000),
    "deep object": lambda data: deep(b'{"a":', b"}", 5_000),
    "array": lambda data: b"[1,2,3]\n",
    "null": lambda data: b"null\n",
    "number": lambda data: b"1e999\n",
    "no field": lambda data: b"{}\n",
    "endless line": lambda data: b"x" * (20 << 20),
}


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


VALUES: dict[str, Value] = {
    "nan": lambda value: math.nan if number(value) else value,
    "infinite": lambda value: math.inf if number(value) else value,
    "negative": lambda value: -value if number(value) else value,
    "huge": lambda value: 10**30 if number(value) else value,
    "numbers as text": lambda value: str(value) if number(value) else value,
    "text as numbers": lambda value: 7 if isinstance(value, str) else value,
    "nulls": lambda value: None,
    "lists": lambda value: [value],
    "objects": lambda value: {"x": value},
    "truths": lambda value: True,
    "escapes": lambda value: "\x1b[2J<script>\ud800" if isinstance(value, str) else value,
    "long text": lambda value: "y" * 200_000 if isinstance(value, str) else value,
}


def with_values(change: Value) -> Bytes:
    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: changed(part) for key, part in value.items()}
        return [changed(part) for part in value] if isinstance(value, list) else change(value)

    return lambda data: b"".join(json.dumps(changed(row)).encode() + b"\n" for row in rows_of(data))


def with_keys(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Bytes:
    return lambda data: b"".join(json.dumps(change(row)).encode() + b"\n" for row in rows_of(data))


def rows_of(data: bytes) -> Iterator[dict[str, Any]]:
    """The rows of JSON lines, or the one object of a JSON file."""
    try:
        yield json.loads(data)
    except ValueError:
        yield from map(json.loads, data.splitlines())


JSON: dict[str, Bytes] = {
    **{name: with_values(change) for name, change in VALUES.items()},
    "half the keys": with_keys(lambda row: dict(sorted(row.items())[::2])),
    "3,000 keys more": with_keys(lambda row: row | {f"k{n}": n for n in range(3_000)}),
}
KINDS: dict[str, Callable[[Path], None]] = {
    "absent": lambda path: None,
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "fifo": lambda path: os.mkfifo(path),
    "folder": lambda path: path.mkdir(),
}


def damages(file: Path) -> list[str]:
    return [*BYTES, *KINDS, *(JSON if file.suffix in (".json", ".jsonl") else ())]


def damage(file: Path, name: str) -> None:
    if name in KINDS:
        file.unlink()
        KINDS[name](file)
    else:
        file.write_bytes((BYTES | JSON)[name](file.read_bytes()))


# ---- what a person does with a run

VIEWS: dict[str, Callable[[Path], Any]] = {
    "list": lambda path: list_runs(path.parent),
    "status": lambda path: Run.open(path).status(),
    "page": lambda path: report.page(Run.open(path)),
    "samples": lambda path: report.samples(Run.open(path)),
    "tables": lambda path: (Run.open(path).metrics(), Run.open(path).samples()),
    "diagnose": lambda path: diagnose(Run.open(path)),
    "comparison": lambda path: comparison(Run.open(path)),
}
TRAINS: dict[str, Callable[[Path], Any]] = {
    "evaluate": lambda path: evaluate(Run.open(path), tasks=small_tasks(), limit=2),
    "resume": lambda path: list(grpo(Run.open(path), tasks=small_tasks(), rewards=REWARDS, steps=1)),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tiny_run(tmp_path_factory.mktemp("whole"), "x", **BOTH_STAGES)
    list(sft(run, tasks=small_tasks()))
    list(grpo(run, tasks=small_tasks(), rewards=REWARDS))
    evaluate(run, tasks=small_tasks(), limit=2)
    return run.path


def files_of(whole: Path) -> list[Path]:
    """Those that are not empty, of the newest checkpoint only."""
    older = {f"{step:06d}" for step in Run.open(whole).checkpoints.steps()[:-1]}
    found = (path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file() and path.stat().st_size)
    return [path for path in found if not older & set(path.parts)]


def hangs(number: int, frame: Any) -> None:
    raise TimeoutError("it hangs")


def check(whole: Path, place: Path, file: Path, name: str, actions: dict[str, Callable[[Path], Any]]) -> None:
    """No error but a clear one, no hang, nothing hidden that config.json does not hide."""
    for what, act in actions.items():
        run = Path(shutil.copytree(whole, place / f"{what}" / "x"))
        damage(run / file, name)
        signal.signal(signal.SIGALRM, hangs)
        signal.alarm(HANGS_AFTER)
        try:
            seen = act(run)
        except CLEAR:
            seen = None
        except Exception as error:
            raise AssertionError(f"{what} of a run whose {file} is damaged ({name})") from error
        finally:
            signal.alarm(0)
        if what == "list" and file.name != "config.json":
            assert [summary.name for summary in seen] == ["x"], f"{file} ({name}) hides the run"
        shutil.rmtree(place / what)


def test_each_file_is_damaged_and_each_damage_met(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A diagonal through the matrix of the test below; pages, which are dear, now and then."""
    caplog.set_level(logging.CRITICAL)
    files, names = files_of(whole), damages(Path("x.json"))
    views = {what: act for what, act in VIEWS.items() if what != "page"}
    for turn in range(max(len(files), len(names))):
        file, name = files[turn % len(files)], names[turn % len(names)]
        if name in damages(file):
            check(whole, tmp_path, file, name, VIEWS if turn % 8 == 0 else views)


@pytest.mark.slow
def test_every_file_times_every_damage(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    for file in files_of(whole):
        for name in damages(file):
            check(whole, tmp_path, file, name, VIEWS | TRAINS)
