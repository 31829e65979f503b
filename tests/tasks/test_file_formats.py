"""Data files in every format that is read give the same rows; the others are refused by the format's name."""

import bz2
import gzip
import itertools
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.tasks import file_formats
from grpo_nb.tasks.file_formats import DataError, records
from grpo_nb.tasks.records import read_rows
from tests.support.tokens import pattern

ROWS = [{"a": "one", "n": 1}, {"a": "two\nlines, [and] {brackets}", "n": 2}, {"a": "", "n": 3}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "data", "second"),
    [
        ("x.jsonl", LINES.encode(), "line 2"),
        ("x.json", ("\ufeff\n" + LINES.replace("\n", "\r\n")).encode(), "line 3"),
        ("x.json", json.dumps(ROWS).encode(), "element 1"),
        ("x.json", ("\n " + json.dumps(ROWS, indent=2)).encode(), "element 1"),
        ("x.json", ("[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]").encode(), "element 1"),
        ("x.json", "\n".join(json.dumps(row, indent=1) for row in ROWS).encode(), "line 5"),
        ("x.json", ",\n".join(json.dumps(row, indent=1) for row in ROWS).encode(), "line 5"),
        ("x.jsonl.gz", gzip.compress(LINES.encode(), mtime=0), "line 2"),
        ("x.jsonl", gzip.compress(json.dumps(ROWS).encode(), mtime=0), "element 1"),
        ("x.bz2", bz2.compress(LINES.encode()), "line 2"),
        ("x.xz", lzma.compress(LINES.encode()), "line 2"),
    ],
    ids=itertools.count(),
)
def test_every_format_gives_the_same_rows_and_their_places(tmp_path: Path, name: str, data: bytes, second: str) -> None:
    (tmp_path / name).write_bytes(data)
    found = list(records(tmp_path / name))
    assert [row for _, row in found] == ROWS
    assert found[1][0] == f"{tmp_path / name}, {second}"


def test_parquet_gives_the_same_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "x.parquet")
    assert [row for _, row in records(tmp_path / "x.parquet")] == ROWS
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "x.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match="Parquet"):
        list(records(tmp_path / "cut.parquet"))


@pytest.mark.parametrize(
    ("name", "data", "named"),
    [
        ("x.zip", b"PK\x03\x04rest", "zip"),
        ("x.jsonl.zst", b"\x28\xb5\x2f\xfdrest", "zstd"),
        ("x.arrow", b"ARROW1\x00\x00", "Arrow"),
        ("x.json", LINES.encode("utf-16"), "UTF-16"),
        ("x.csv", b"a,n\none,1\n", "CSV"),
        ("x.yaml", b"- a: one\n", "YAML"),
        ("x.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], "decompressed"),
        ("x.jsonl", b"\x80\x04\x95", "UTF-8"),
        ("x.json", b'[{"a": 1}, {"a": ', "not JSON"),
        ("x.json", b'[\n{"a": 1},\n2\n]', "element 1"),
        ("x.json", b'{\n "a": 1\n}\n{\n "a": \n}', "line 4"),
        ("x.jsonl", b"[1]\n[2]\n", "line 1"),
        ("x.jsonl", b'{"a": 1\n{"a": 2}\n', "line 1"),
        ("x.json", b"[" * 100_000, r"\[{60}\.\.\."),
    ],
    ids=itertools.count(),
)
def test_a_format_that_is_not_read_is_named(tmp_path: Path, name: str, data: bytes, named: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=named) as caught:
        list(records(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\n \n", b"[]", gzip.compress(b"", mtime=0)])
def test_a_file_without_rows_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(DataError, match="empty"):
        read_rows([tmp_path / "x.jsonl"], {})


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError):
        list(records(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_small_file_that_unpacks_to_more_than_data_is_refused(
    tmp_path: Path, pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_formats, "LARGEST", 1000)
    fits, more = tmp_path / "fits.jsonl", tmp_path / "more.jsonl"
    fits.write_bytes(pack(b'{"a": 1}\n' * 100))
    more.write_bytes(pack(b'{"a": 1}\n' * 112))
    assert len(list(records(fits))) == 100
    with pytest.raises(DataError, match=pattern(1000)):
        list(records(more))
