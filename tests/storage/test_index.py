"""The index of a long log gives what its JSON lines give, whatever became of it, and parses only what is new."""

import json
import math
import os
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.storage import index as module
from grpo_nb.storage import lines, schema, user_cache
from grpo_nb.storage.files import to_json
from grpo_nb.storage.index import Index, LogRows, chunks, packing, store
from grpo_nb.storage.journal import Journal
from grpo_nb.storage.safe_open import RunError

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few rows, and a cache of this test's own."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 900)
    monkeypatch.setenv(user_cache.FOLDER, str(tmp_path / "cache"))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "metrics.jsonl")


def rows_of(count: int, seed: int = 0) -> list[Row]:
    """Rows with all that a log may hold: keys that come and go, nan and inf, None, texts, whole numbers."""
    noise, rows = random.Random(seed), []
    for step in range(1, count + 1):
        row: Row = {"step": step, "loss": noise.choice([noise.gauss(0, 1), math.nan, math.inf, -0.0, 1e300])}
        row |= {"tokens": noise.randrange(1 << 40), "status": noise.choice(["ok", "skipped", "ü"])}
        if step % 3 == 0:
            row = {"rareü": step / 7, **row, "grad/cosine": noise.choice([None, 0.5, True])}
        rows.append(row)
    return rows


def index_of(journal: Journal, keys: tuple[str, ...] | None = None) -> Index:
    return Index(journal.path, journal._row, keys)


def bits(value: object) -> object:
    return value.hex() if isinstance(value, float) else value


def agree(found: LogRows, wanted: list[Row]) -> None:
    """Rows, slices and columns are those of a full read."""
    assert [list(map(bits, row.values())) for row in found] == [list(map(bits, row.values())) for row in wanted]
    assert [row.keys() for row in found] == [row.keys() for row in wanted] and len(found) == len(wanted)
    for part in (slice(-3, None), slice(2, 5), slice(5, 2), slice(None, None, 7), slice(4, -4)):
        assert str(list(found[part])) == str(wanted[part])
    for key in {key for row in wanted for key in row}:
        for view, rows in ((found, wanted), (found[4:-4], wanted[4:-4])):
            if isinstance(view, LogRows):
                column(view, rows, key)


def column(view: LogRows, rows: list[Row], key: str) -> None:
    numbers = {n: float(row[key]) for n, row in enumerate(rows) if isinstance(row.get(key), int | float)}
    texts = {n: row[key] for n, row in enumerate(rows) if isinstance(row.get(key), str)}
    found, words = view.numbers(key), view.texts(key)
    assert dict(zip(found.at.tolist(), map(bits, found.values.tolist()), strict=True)) == {
        n: bits(value) for n, value in numbers.items()
    }
    assert dict(zip(words.at.tolist(), (words.words[code] for code in words.codes), strict=True)) == texts


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each chunk that was made from JSON lines since."""
    made: list[int] = []
    chunk_of = chunks.chunk_of

    def counting(*arguments: Any) -> Any:
        chunk = chunk_of(*arguments)
        made.append(chunk.head.rows)
        return chunk

    monkeypatch.setattr(module, "chunk_of", counting)
    return made


# ---- the same rows


@pytest.mark.parametrize("count", [0, 1, 7, 60])
def test_rows_slices_and_columns_are_those_of_a_full_read(journal: Journal, count: int) -> None:
    journal.append(*rows_of(count))
    for found in (index_of(journal).rows(), index_of(journal).rows()):
        agree(found, journal.read())
        assert (found.bad_lines, found.bad_because) == (0, "")


def test_a_log_that_does_not_exist_has_no_rows(journal: Journal) -> None:
    index = index_of(journal)
    agree(index.rows(), [])
    journal.append({"step": 1})
    agree(index.rows(), [{"step": 1}])
    journal.path.unlink()
    agree(index.rows(), [])


LINES = st.one_of(
    st.integers(0, 10**6).map(lambda step: to_json({"step": step, "loss": step / 3})),
    st.sampled_from([b"", b" ", b"{", b'{"step": -1}', b'{"step": 5, "loss": "x"}', b"\xff", b'{"step": 1, "a": []}']),
    st.integers(1, 5000).map(lambda size: b'{"step": 3, "why": "' + b"x" * size + b'"}'),
    st.dictionaries(st.text(max_size=3), st.none() | st.floats() | st.booleans() | st.text(max_size=4), max_size=4).map(
        lambda row: to_json({**row, "step": 4})
    ),
)  # fmt: skip


@settings(max_examples=25)
@given(st.lists(LINES, max_size=40), st.booleans(), st.integers(1, 40))
def test_any_lines_give_what_a_full_read_gives(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends: bool, most_rows: int
) -> None:
    journal = Journal(tmp_path_factory.mktemp("log") / "metrics.jsonl")
    journal.path.write_bytes(b"\n".join(lines) + (b"\n" if ends else b""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "MOST_ROWS", most_rows)
        patch.setattr(module, "CHUNK_BYTES", 300)
        patch.setattr(schema, "LONGEST_LINE", 3000)
        patch.setenv(user_cache.FOLDER, str(journal.path.parent))
        wanted, index = journal.read(), index_of(journal)
        for found in (index.rows(), index_of(journal).rows()):
            agree(found, wanted)
            assert (found.bad_lines, found.bad_because) == (journal.bad_lines, journal.bad_because)


@given(st.lists(st.floats() | st.integers(-(2**60), 2**60).map(float), max_size=50), st.data())
def test_a_column_comes_back_to_the_bit(values: list[float], data: st.DataObject) -> None:
    rows = data.draw(st.integers(len(values), 100))
    at = np.sort(np.array(data.draw(st.permutations(range(rows)))[: len(values)], np.int64))
    found = packing.Numbers.unpack(packing.Numbers(at, np.array(values, float)).pack(rows), rows)
    assert found.at.tolist() == at.tolist() and found.values.tobytes() == np.array(values, float).tobytes()


@given(st.binary(max_size=60), st.integers(0, 100))
def test_bytes_that_are_no_column_are_refused(data: bytes, rows: int) -> None:
    for kind in (packing.Numbers, packing.Texts):
        try:
            found = kind.unpack(data, rows)
        except ValueError:
            continue
        assert len(found.at) <= rows and (not len(found.at) or found.at.max() < rows)


def test_an_index_takes_no_more_room_than_its_log_whatever_the_keys(journal: Journal) -> None:
    odd = [{"step": n, **{f"k{n}-{m}": 0.1 for m in range(40)}} for n in range(20)]
    journal.append(*odd, *({"step": 100} for _ in range(1000)))
    found = index_of(journal).rows()
    assert len(found.keys) == 801 and list(found) == journal.read()
    column(found, journal.read(), "k15-7")
    assert kept().stat().st_size < 12 * journal.path.stat().st_size


# ---- only what is new


def test_an_index_is_made_once_and_grows_by_what_was_appended(journal: Journal, parsed: list[int]) -> None:
    rows = rows_of(120)
    journal.append(*rows[:90])
    index_of(journal).rows()
    assert sum(parsed) == 90
    last = parsed[-1]
    for known in (index_of(journal), index_of(journal)):
        parsed.clear()
        known.rows()
        assert parsed == [last], "the last chunk, which is not full"
    parsed.clear()
    known.rows()
    assert parsed == [], "nothing changed"
    journal.append(*rows[90:])
    agree(known.rows(), rows)
    assert sum(parsed) == last + 30
    parsed.clear()
    agree(index_of(journal).rows(), rows)
    assert sum(parsed) < 20


def test_rows_that_a_resume_set_aside_cost_the_last_chunks_only(journal: Journal, parsed: list[int]) -> None:
    rows = rows_of(100)
    journal.append(*rows)
    known = index_of(journal)
    before = known.rows()
    parsed.clear()
    journal.move(lambda row: row["step"] > 80, Journal(journal.path.with_name("aside.jsonl")))
    journal.append(*rows[84:])
    wanted = rows[:80] + rows[84:]
    agree(known.rows(), wanted)
    agree(index_of(journal).rows(), wanted)
    assert sum(parsed) < 60
    agree(before, rows)  # as it was when it was opened
    parsed.clear()
    agree(index_of(journal).rows(), wanted)
    assert sum(parsed) < 20


def test_one_row_is_parsed_to_look_at_one(journal: Journal) -> None:
    journal.append(*rows_of(100))
    index_of(journal).rows()
    lines: list[bytes] = []
    index = Index(journal.path, lambda line, end: (lines.append(line), journal._row(line, end))[1])
    rows = index.rows()
    lines.clear()
    assert rows[50]["step"] == 51 and rows[-1]["step"] == 100 and len(rows[20:25]) == 5 and len(lines) == 7


# ---- whatever became of the log


@pytest.mark.parametrize("change", ["same length", "shorter", "longer", "other", "empty"])
@pytest.mark.parametrize("in_place", [True, False])
def test_an_edited_log_gives_its_new_figures(journal: Journal, change: str, in_place: bool) -> None:
    journal.append(*({"step": n, "loss": n % 7 / 8} for n in range(1, 150)))
    known = index_of(journal)
    known.rows()
    data = journal.path.read_bytes()
    new = {
        "same length": data.replace(b"0.125", b"0.625", 1),
        "shorter": data[: len(data) // 2],
        "longer": data.replace(b"0.125", b"0.1255", 1),
        "other": data.replace(b"0.5", b"0.75") * 2,
        "empty": b"",
    }[change]
    if in_place:
        with open(journal.path, "r+b") as file:
            file.write(new)
            file.truncate()
    else:
        journal.path.unlink()
        journal.path.write_bytes(new)
    agree(known.rows(), Journal(journal.path).read())
    agree(index_of(journal).rows(), Journal(journal.path).read())


def edit(path: Path, old: bytes, new: bytes) -> None:
    """Change the first of some bytes in place."""
    with open(path, "r+b") as file:
        file.seek(file.read().index(old))
        file.write(new)


def test_rows_appended_to_a_log_that_was_edited_come_with_the_edit(journal: Journal) -> None:
    journal.append(*({"step": n, "loss": 0.125} for n in range(1, 150)))
    known = index_of(journal)
    assert known.rows().numbers("loss").values[0] == 0.125
    edit(journal.path, b"0.125", b"0.625")
    journal.append({"step": 150, "loss": 0.125})
    agree(known.rows(), Journal(journal.path).read())
    agree(index_of(journal).rows(), Journal(journal.path).read())


@pytest.mark.parametrize("rows", [5, 150])
def test_a_second_edit_within_the_grain_of_the_clock_is_seen(
    journal: Journal, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append(*({"step": n, "loss": 0.125} for n in range(1, rows)))
    seen = _state_of(journal.path)
    monkeypatch.setattr(module, "_state", lambda fd: seen)  # as a file system whose times move every two seconds says
    known = index_of(journal)
    assert len(known.rows()) == rows - 1
    edit(journal.path, b"0.125", b"0.625")
    agree(known.rows(), Journal(journal.path).read())
    agree(index_of(journal).rows(), Journal(journal.path).read())


def test_a_state_is_that_of_the_chunks_it_was_noted_with(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.append(*({"step": n, "loss": 0.125} for n in range(1, 150)))
    monkeypatch.setattr(lines, "SETTLED_NS", -(10**18))
    assert len(index_of(journal).rows()) == 149
    kept = store.store_of(journal.path)
    first, last = kept.heads()[0], kept.heads()[-1]
    kept.cut(len(kept.heads()) - 1)
    stale = chunks.chunk_of(
        b'{"step":1}' + b" " * (last.stop - last.start - 11) + b"\n", last.start, journal._row, None
    )
    assert kept.add(stale) and first.start == 0
    agree(index_of(journal).rows(), Journal(journal.path).read())


def _state_of(path: Path) -> tuple[int, ...]:
    with open(path, "rb") as file:
        return module._state(file.fileno())


def test_a_log_that_is_no_file_is_refused(journal: Journal, tmp_path: Path) -> None:
    os.mkfifo(journal.path)
    with pytest.raises(RunError, match="a FIFO"):
        index_of(journal).rows()


def test_rows_are_refused_when_the_file_under_them_was_changed(journal: Journal) -> None:
    journal.append(*rows_of(100))
    rows = index_of(journal).rows()
    journal.path.write_bytes(b"x" * journal.path.stat().st_size)
    with pytest.raises(RunError, match="changed"):
        list(rows)


# ---- whatever became of the index


def kept() -> Path:
    (file,) = store.folder().glob("*.sqlite")
    return file


def link(file: Path) -> None:
    target = file.with_name("target")
    target.write_text("mine")
    file.symlink_to(target)


def changed(file: Path, script: str) -> None:
    base = sqlite3.connect(file)
    base.executescript(script)
    base.close()


def sealed(file: Path, key: bytes) -> None:
    """Wrong types and sizes that nothing but their own contradiction gives away, under a seal of that key."""
    base = sqlite3.connect(file)
    query = "SELECT kind, key, chunk, p.data, c.digest FROM part p JOIN chunk c ON c.n = p.chunk"
    for kind, name, n, data, digest in base.execute(query).fetchall():
        data = b"\x00" + (2**31).to_bytes(4, "little") + data[5:]
        row = (data, user_cache.seal(key, data, file.name, kind, name, n, digest.hex()), kind, name, n)
        base.execute("UPDATE part SET data = ?, seal = ? WHERE kind = ? AND key = ? AND chunk = ?", row)
    base.commit()
    base.close()


def forged(file: Path) -> None:
    """Other figures and other lines, as whoever can write the file but has not the key can make them."""
    base, key = sqlite3.connect(file), b"another user's"
    for n, head in base.execute("SELECT n, head FROM chunk").fetchall():
        start, stop, rows, _, _, *rest = json.loads(head)
        text = json.dumps([start, stop, rows, 5, "", *rest])
        seal = user_cache.seal(key, text.encode(), file.name, n)
        base.execute("UPDATE chunk SET head = ?, seal = ? WHERE n = ?", (text, seal, n))
    base.commit()
    base.close()
    sealed(file, key)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "absent": lambda file: None,
    "empty": lambda file: file.write_bytes(b""),
    "no database": lambda file: file.write_bytes(b"{}" * 5000),
    "a view": lambda file: changed(file, "CREATE VIEW chunk AS SELECT 0 AS n, x'' AS digest, 0 AS seal, 1 AS head;"),
    "another database": lambda file: changed(file, "CREATE TABLE chunk (x); VACUUM;"),
    "a link": link,
    "a FIFO": os.mkfifo,
    "a folder": lambda file: (file / "within").mkdir(parents=True),
    "not readable": lambda file: (file.touch(), file.chmod(0)),
}  # fmt: skip
IN_PLACE: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "shape": lambda file: changed(file, "UPDATE part SET data = substr(data, 1, length(data) / 2);"),
    "type": lambda file: sealed(file, user_cache.key()),
    "forged": forged,
    "a state": lambda file: changed(file, "INSERT OR REPLACE INTO log VALUES (1, 1, 'forged');"),
    "a head": lambda file: changed(file, "UPDATE chunk SET head = x'00' WHERE n = 1;"),
    "a trigger": lambda file: changed(file, "CREATE TRIGGER t AFTER INSERT ON chunk BEGIN DELETE FROM part; END;"),
    "no part": lambda file: sqlite3.connect(file).executescript("DELETE FROM part WHERE chunk = 2;").connection.close(),
    "no key": lambda file: (
        sqlite3.connect(file)
        .executescript("UPDATE part SET key = '\"other\"' WHERE key = '\"loss\"' AND chunk = 1;")
        .connection.close()
    ),
    "no chunk": lambda file: sqlite3.connect(file).executescript("DELETE FROM chunk WHERE n = 1;").connection.close(),
    "moved": lambda file: (
        sqlite3.connect(file)
        .executescript("UPDATE chunk SET n = -1 WHERE n = 1; UPDATE chunk SET n = 1 WHERE n = 2;")
        .connection.close()
    ),
}


@pytest.mark.parametrize("damage", [*DAMAGE, *IN_PLACE])
def test_a_damaged_or_hostile_index_is_made_anew(journal: Journal, damage: str) -> None:
    rows = rows_of(100)
    journal.append(*rows)
    known = index_of(journal)
    opened = known.rows()
    file = kept()
    if damage in DAMAGE:
        file.unlink()
        DAMAGE[damage](file)
    else:
        IN_PLACE[damage](file)
    agree(opened, rows)
    anew = index_of(journal).rows()
    agree(anew, rows)
    assert (anew.bad_lines, anew.bad_because) == (0, "")
    journal.append({"step": 999})
    agree(known.rows(), [*rows, {"step": 999}])
    assert damage == "a folder" or kept().is_file()
    assert damage != "a link" or file.with_name("target").read_text() == "mine"


@pytest.mark.slow
def test_any_byte_of_an_index_may_be_wrong(journal: Journal) -> None:
    rows = rows_of(60)
    journal.append(*rows)
    index_of(journal).rows()
    good, noise = kept().read_bytes(), random.Random(0)
    for place in sorted(noise.sample(range(len(good)), 40)):
        kept().write_bytes(good[:place] + bytes([good[place] ^ (1 << noise.randrange(8))]) + good[place + 1 :])
        agree(index_of(journal).rows(), rows)


@pytest.mark.parametrize("place", ["a file", "read-only", "nowhere"])
def test_where_nothing_can_be_kept_the_index_is_in_memory(
    journal: Journal, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    if place == "a file":
        folder.write_text("")
    if place == "read-only":
        monkeypatch.setattr(
            sqlite3, "connect", lambda *_, **__: (_ for _ in ()).throw(sqlite3.OperationalError("readonly"))
        )
    if place == "nowhere":
        monkeypatch.setattr(store, "folder", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    monkeypatch.setenv(user_cache.FOLDER, str(folder))
    rows = rows_of(100)
    journal.append(*rows)
    index = index_of(journal)
    agree(index.rows(), rows)
    journal.append(*rows)
    agree(index.rows(), rows * 2)


def key_of_others(file: Path) -> None:
    file.chmod(0o644)


@pytest.mark.parametrize("damage", [Path.unlink, key_of_others, lambda file: file.write_bytes(b"short")])
def test_a_key_that_is_not_this_users_alone_is_made_anew(journal: Journal, damage: Callable[[Path], object]) -> None:
    rows = rows_of(100)
    journal.append(*rows)
    index_of(journal).rows()
    before = user_cache.key()
    assert user_cache.key() == before
    damage(user_cache.folder() / "key")
    agree(index_of(journal).rows(), rows)
    assert user_cache.key() != before and (user_cache.folder() / "key").stat().st_mode & 0o077 == 0


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="gives a file to another user")
def test_a_key_of_another_user_is_made_anew() -> None:
    before = user_cache.key()
    os.chown(user_cache.folder() / "key", 12345, -1)
    assert user_cache.key() != before


def test_a_run_folder_gets_no_file(journal: Journal) -> None:
    journal.append(*rows_of(100))
    index_of(journal).rows()
    assert [path.name for path in journal.path.parent.iterdir() if path.is_file()] == ["metrics.jsonl"]
    assert kept().stat().st_mode & 0o777 & ~0o644 == 0 and store.folder().stat().st_mode & 0o077 == 0


def test_an_index_that_nobody_used_is_swept(journal: Journal, tmp_path: Path) -> None:
    journal.append(*rows_of(100))
    index_of(journal).rows()
    old = kept()
    os.utime(old, (0, 0))
    other = Journal(tmp_path / "sft.jsonl")
    other.append(*rows_of(100))
    index_of(other).rows()
    assert not old.exists()


def test_a_chunk_is_added_where_the_last_one_ends(journal: Journal) -> None:
    journal.append(*rows_of(60))
    index_of(journal).rows()
    shared = store.Kept(kept())
    heads, data = shared.heads(), journal.path.read_bytes()
    again = chunks.chunk_of(data[: heads[0].stop], 0, journal._row, None)
    later = chunks.chunk_of(data[heads[0].stop :], heads[-1].stop + 1, journal._row, None)
    assert not shared.add(again) and not shared.add(later) and shared.heads() == heads


@pytest.mark.slow
def test_readers_and_builders_at_once_agree(journal: Journal) -> None:
    """Threads with an index of their own stand for processes: they share nothing but the files."""
    rows, problems = rows_of(900), []
    journal.append(*rows[:100])

    def look() -> None:
        try:
            own = index_of(journal)
            for _ in range(6):
                found = own.rows()
                assert [row["step"] for row in found] == found.numbers("step").values.tolist()
        except BaseException as error:
            problems.append(error)

    readers = [threading.Thread(target=look) for _ in range(4)]
    for reader in readers:
        reader.start()
    for start in range(100, 900, 20):
        journal.append(*rows[start : start + 20])
    for reader in readers:
        reader.join()
    assert not problems
    agree(index_of(journal).rows(), rows)


def test_a_kill_while_a_chunk_is_written_leaves_the_chunks_before_it(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(100)
    journal.append(*rows)
    packed, written = store._packed, []

    def killed(chunk: chunks.Chunk) -> Iterator[Any]:
        written.append(chunk)
        yield from list(packed(chunk))[: 99 if len(written) < 4 else 3]
        if len(written) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(store, "_packed", killed)
    with pytest.raises(KeyboardInterrupt):
        index_of(journal).rows()
    monkeypatch.setattr(store, "_packed", packed)
    assert len(store.Kept(kept()).heads()) == 3
    agree(index_of(journal).rows(), rows)


def test_samples_get_columns_of_the_keys_that_are_asked_for(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "samples.jsonl")
    rows = [{"step": n, "prompt": "p", "completion": "c" * 50, "objective": "ab"[n % 2]} for n in range(200)]
    journal.append(*rows)
    found = index_of(journal, ("step", "objective")).rows()
    assert found.keys == ["step", "objective"] and list(found) == rows
    column(found, rows, "objective")
