"""Append-only logs: whole lines, torn tails, bad lines, nan and inf, many writers, rows set aside."""

import errno
import json
import logging
import math
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.storage import journal as module
from grpo_nb.storage import lines
from grpo_nb.storage.appending import mend_tail
from grpo_nb.storage.files import RunError, flock, from_json, to_json
from grpo_nb.storage.journal import Journal
from tests.support.kill_points import ROOT, survives
from tests.support.tokens import caused_by, names, pattern

TEXT = st.text(st.characters(exclude_categories=[])) | st.sampled_from(
    ["NaN", "Infinity", "-Infinity", "\\NaN", "\\\\Infinity"]
)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def whole(value: Any) -> Any:
    """With the replacement character for each half of a surrogate pair, which no reader of a row can show."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [whole(part) for part in value]
    return {whole(key): whole(part) for key, part in value.items()} if isinstance(value, dict) else value


def same(a: Any, b: Any) -> bool:
    """Equal, with nan equal to nan, 0.0 apart from -0.0, and True apart from 1."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return type(a) is type(b) and a == b


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "metrics.jsonl")


def steps(journal: Journal) -> list[int]:
    return [row["step"] for row in journal.read()]


# ---- JSON that keeps everything


@given(st.dictionaries(TEXT, VALUE, max_size=4))
def test_any_row_comes_back_and_is_one_line_of_strict_json(row: dict[str, Any]) -> None:
    data = to_json(row)
    assert same(from_json(data), whole(row))
    assert b"\n" not in data

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads(data.decode("utf-8"), parse_constant=refuse)


def test_nan_and_inf_are_words_that_other_readers_understand() -> None:
    data = to_json({"loss": math.nan, "kl": math.inf, "low": -math.inf, "text": "NaN"})
    assert data == b'{"loss": "NaN", "kl": "Infinity", "low": "-Infinity", "text": "\\\\NaN"}'
    assert [float(word) for word in ("NaN", "Infinity", "-Infinity")][1:] == [math.inf, -math.inf]
    assert from_json(b'{"loss": NaN}')["loss"] != 0  # what other writers leave is read too


def test_scalars_of_numpy_and_torch_are_numbers_and_the_rest_is_refused_by_name() -> None:
    row = {
        "a": np.float32(0.5),
        "b": torch.tensor(2),
        "c": np.int64(3),
        "d": torch.tensor(math.nan),
        "e": np.bool_(True),
    }
    back = from_json(to_json(row))
    assert (back["a"], back["b"], back["c"], back["e"]) == (0.5, 2, 3, True) and math.isnan(back["d"])
    with pytest.raises(TypeError, match=pattern("'kl/fairness'", "Tensor", "JSON")):
        to_json({"kl/fairness": torch.zeros(2)})
    with pytest.raises(TypeError, match=pattern("'parts.seen'", "set")):
        to_json({"parts": {"seen": {1}}})


# ---- appending and reading


def test_rows_come_back_in_order(journal: Journal) -> None:
    assert journal.read() == [] and list(journal.backwards()) == []
    journal.append({"step": 1, "loss": 0.1 + 0.2})
    journal.append({"step": 2, "text": "β ≤ 0.1\n\r\u2028"}, {"step": 3})
    journal.append()
    rows = [{"step": 1, "loss": 0.1 + 0.2}, {"step": 2, "text": "β ≤ 0.1\n\r\u2028"}, {"step": 3}]
    assert journal.read() == rows and list(journal.backwards()) == rows[::-1]
    assert journal.path.read_text(encoding="utf-8").count("\n") == 3


def test_one_append_is_one_write_of_whole_lines(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.append({"step": 1})
    written: list[bytes] = []
    write = os.write
    monkeypatch.setattr(module.os, "write", lambda fd, data: written.append(data) or write(fd, data))
    journal.append({"step": 2}, {"step": 3})
    assert written == [b'{"step": 2}\n{"step": 3}\n']


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b"{", b"\0" * 5000, b'{"step": 3, "loss": 1.', b'"x"', b"\xff"])
def test_a_torn_last_line_is_passed_over_and_cut_before_the_next_row(
    journal: Journal, torn: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    journal.append({"step": 1}, {"step": 2})
    with open(journal.path, "ab") as file:
        file.write(torn)
    assert steps(journal) == [1, 2] and journal.bad_lines == 0 and not caplog.records
    assert next(journal.backwards()) == {"step": 2}
    journal.append({"step": 3})
    assert journal.path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert names(caplog.text, journal.path, len(torn))


def test_a_torn_only_line_longer_than_a_block_is_cut(journal: Journal) -> None:
    journal.path.write_bytes(b'{"text": "' + b"x" * 200_000)
    journal.append({"step": 1})
    assert journal.read() == [{"step": 1}] and journal.path.stat().st_size < 20


def test_a_whole_last_line_without_newline_is_a_row_and_stays_one(journal: Journal) -> None:
    journal.path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert steps(journal) == [1, 2]
    journal.append({"step": 3})
    assert steps(journal) == [1, 2, 3]


def test_bad_lines_in_the_middle_are_passed_over_counted_and_told_once(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    journal.path.write_bytes(b'{"step": 1}\n{"step": 2, "lo{"step": 3}\n\n[4]\n\xff\xfe\n{"step": 5}\r\n')
    assert steps(journal) == [1, 5] and journal.bad_lines == 3
    assert [row["step"] for row in journal.backwards()] == [5, 1]
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "3 line(s)" in caplog.text
    journal.read()
    assert len(caplog.records) == 1, "a dashboard reads every second"


def test_reading_backwards_crosses_blocks(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": i, "text": "x" * (i * 37 % 300)} for i in range(200)]
    journal.append(*rows)
    for block in (1, 7, 64, 1 << 16):
        monkeypatch.setattr(lines, "BLOCK", block)
        assert list(journal.backwards()) == rows[::-1]


def test_the_newest_rows_are_read_without_the_rest(journal: Journal) -> None:
    with open(journal.path, "wb") as file:
        file.seek(1 << 35)  # a hole of 32 GiB, which nobody could read here
        file.write(b'\n{"step": 8}\n{"step": 9}\n')
    newest = journal.backwards()
    assert [next(newest)["step"], next(newest)["step"]] == [9, 8]


def test_a_full_disk_takes_the_half_written_row_back(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.append({"step": 1})
    write = os.write
    monkeypatch.setattr(module.os, "write", lambda fd, data: write(fd, data[:5]))
    with pytest.raises(RunError, match=pattern(journal.path), check=caused_by(errno.ENOSPC)):
        journal.append({"step": 2})
    assert journal.path.read_bytes() == b'{"step": 1}\n'


def test_a_value_that_json_cannot_hold_writes_nothing(journal: Journal) -> None:
    with pytest.raises(TypeError):
        journal.append({"step": 1}, {"step": 2, "bad": object()})
    assert not journal.path.exists()


def test_places_that_cannot_be_written_are_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=pattern(tmp_path / "absent"), check=caused_by(errno.ENOENT)):
        Journal(tmp_path / "absent" / "a.jsonl").append({"step": 1})
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=pattern(tmp_path / "file" / "a.jsonl"), check=caused_by(errno.ENOTDIR)):
        Journal(tmp_path / "file" / "a.jsonl").append({"step": 1})

    def read_only(*_: object) -> int:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(module.os, "open", read_only)
    with pytest.raises(RunError, match=pattern(tmp_path / "a.jsonl"), check=caused_by(errno.EACCES)):
        Journal(tmp_path / "a.jsonl").append({"step": 1})


def test_a_reader_that_remembers_sees_what_any_other_sees(tmp_path: Path) -> None:
    """Grown, torn, mended, replaced by one of the same length, cut, removed, and back."""
    path = tmp_path / "metrics.jsonl"
    remembering, writer = Journal(path, remember=True), Journal(path)

    def agree() -> list[dict[str, Any]]:
        rows = remembering.read()
        assert rows == Journal(path).read() == remembering.read() and remembering.bad_lines == 0
        return rows

    assert agree() == []
    writer.append(*({"step": i, "text": "x" * i} for i in range(300)))
    assert len(agree()) == 300
    with open(path, "ab") as file:
        file.write(b'{"step": 300')
    assert len(agree()) == 300
    writer.append({"step": 301})
    assert agree()[-1] == {"step": 301}
    writer.move(lambda row: row["step"] > 99, Journal(tmp_path / "aside.jsonl"))
    assert len(agree()) == 100
    path.write_bytes(path.read_bytes().replace(b'{"step": 99', b'{"step": 98'))
    assert agree()[-1]["step"] == 98
    path.unlink()
    assert agree() == []
    writer.append({"step": 7})
    assert agree() == [{"step": 7}]


def test_a_reader_that_remembers_parses_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", remember=True)
    journal.append(*({"step": i} for i in range(1000)))
    journal.read()
    journal.append({"step": 1000})
    parsed: list[bytes] = []
    parse = module.parse
    monkeypatch.setattr(module, "parse", lambda line: (parsed.append(line), parse(line))[1])
    assert len(journal.read()) == 1001
    assert parsed == [b'{"step": 1000}']


# ---- several writers


APPENDER = """
import sys
from pathlib import Path
from grpo_nb.storage.journal import Journal
journal = Journal(Path(sys.argv[1]))
for i in range(300):
    journal.append({"step": i, "who": sys.argv[2], "n": i, "text": "x" * (i * 131 % 9000)})
"""


def test_rows_of_many_processes_never_mix(journal: Journal) -> None:
    """Events are written by the trainer and by whoever turns a knob; a killed writer's torn tail lies in between."""
    journal.append({"step": 0, "who": "first", "n": 0})
    with open(journal.path, "ab") as file:
        file.write(b'{"who": "kil')
    crowd = [
        subprocess.Popen([sys.executable, "-c", APPENDER, str(journal.path), who], cwd=ROOT, stderr=subprocess.PIPE)
        for who in ("a", "b", "c")
    ]
    assert [writer.communicate(timeout=60)[0] for writer in crowd] and all(w.returncode == 0 for w in crowd)
    rows = journal.read()
    assert journal.bad_lines == 0 and len(rows) == 901
    for who in ("a", "b", "c"):
        assert [row["n"] for row in rows if row["who"] == who] == list(range(300))


def test_an_append_waits_while_another_writer_mends_the_tail(journal: Journal) -> None:
    journal.append({"step": 1})
    fd = os.open(journal.path, os.O_RDWR)
    assert flock(fd) == "taken"
    appending = threading.Thread(target=journal.append, args=[{"step": 2}])
    appending.start()
    appending.join(0.3)
    assert appending.is_alive() and steps(journal) == [1]
    os.close(fd)
    appending.join()
    assert steps(journal) == [1, 2]


# ---- rows set aside


def past_two(row: dict[str, Any]) -> bool:
    return row["step"] > 2


def test_moved_rows_keep_their_bytes_and_their_order(journal: Journal) -> None:
    lines = [b'{"step": 1, "x":  1.0}\n', b"a bad line\n", b'{"step": 3}\n', b'{"step": 2}\n', b'{"step":4}\n', b'{"st']
    journal.path.write_bytes(b"".join(lines))
    aside = Journal(journal.path.with_name("aside.jsonl"))
    assert journal.move(past_two, aside) == 2
    assert journal.path.read_bytes() == lines[0] + lines[1] + lines[3]
    assert aside.path.read_bytes() == lines[2] + lines[4]


@pytest.mark.parametrize("killed_before", [False, True])
def test_a_log_is_moved_in_bounded_memory(tmp_path: Path, killed_before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MiB, of which every second row goes, then all."""
    journal, aside = Journal(tmp_path / "samples.jsonl"), Journal(tmp_path / "samples.discarded.jsonl")
    line = to_json({"step": 1, "text": "x" * 1000})
    lines_of = {step: line.replace(b"1", b"%d" % step, 1) + b"\n" for step in (1, 2)}
    with open(journal.path, "wb") as file:
        file.writelines(lines_of[1 + n % 2] for n in range(16_000))
    if killed_before:
        aside.path.write_bytes(b'{"step":9}\n' + lines_of[2] * 8_000)
    tracemalloc.start()
    try:
        assert journal.move(lambda row: row["step"] == 2, aside) == 8_000
        assert journal.move(lambda row: True, aside) == 8_000
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 << 20
    moved = lines_of[2] * 8_000 + lines_of[1] * 8_000
    assert journal.path.read_bytes() == b""
    assert aside.path.read_bytes() == (b'{"step":9}\n' if killed_before else b"") + moved


def test_moving_nothing_rewrites_nothing(journal: Journal) -> None:
    aside = Journal(journal.path.with_name("aside.jsonl"))
    assert journal.move(past_two, aside) == 0
    journal.append({"step": 1})
    before = journal.path.stat()
    assert journal.move(past_two, aside) == 0
    now = journal.path.stat()
    assert (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns) and not aside.path.exists()


def test_an_appender_that_waited_writes_into_the_new_file(journal: Journal) -> None:
    """Opened before the file was replaced, a writer must not log into the one that is gone."""
    journal.append({"step": 1}, {"step": 3})
    same_file, replaced = module.same_file, []

    def replace_once(fd: int, path: Path) -> bool:
        if not replaced:
            replaced.append(path)
            new = path.with_name("new")
            new.write_bytes(b'{"step": 1}\n')
            os.replace(new, path)
        return same_file(fd, path)

    module.same_file = replace_once
    try:
        journal.append({"step": 2})
    finally:
        module.same_file = same_file
    assert steps(journal) == [1, 2]


def move_aside(folder: Path) -> None:
    Journal(folder / "metrics.jsonl").move(past_two, Journal(folder / "aside.jsonl"))


def check_no_row_lost(folder: Path) -> None:
    journal, aside = Journal(folder / "metrics.jsonl"), Journal(folder / "aside.jsonl")
    assert sorted({*steps(journal), *steps(aside)}) == [1, 2, 3, 4, 9], "a row is in neither file"
    move_aside(folder)
    assert steps(journal) == [1, 2] and steps(aside) == [9, 3, 4], "and none is there twice"


def test_a_kill_at_any_call_loses_no_row_and_doubles_none(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    Journal(folder / "metrics.jsonl").append(*({"step": i} for i in (1, 2, 3, 4)))
    Journal(folder / "aside.jsonl").append({"step": 9})
    assert survives(move_aside, check_no_row_lost, folder) >= 5


def test_damaged_lines_are_reported_once_however_many_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("garbage\n{}\n")
    for _ in range(2):
        Journal(path).read()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_a_hole_behind_the_last_line_is_passed_and_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = tmp_path / "log.jsonl", []
    path.write_bytes(b'{"a": 1}\n')
    os.truncate(path, 1 << 36)
    plain = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: reads.append(count) or plain(fd, count, at))
    fd = os.open(path, os.O_RDWR)
    try:
        assert mend_tail(fd, path) == 9 == os.fstat(fd).st_size
    finally:
        os.close(fd)
    assert sum(reads) < 3 << 30, "a leap's remains, not 64 GiB"
