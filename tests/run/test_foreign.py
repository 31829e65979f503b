"""A run folder from anybody: what lies in it is no link, no FIFO, and no more than it claims; it hides no other run."""

import json
import math
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb import presets
from grpo_nb.doctor import diagnose
from grpo_nb.jupyter.tailing import Rows
from grpo_nb.jupyter.workers import _last_words, _spawn
from grpo_nb.metrics import keys
from grpo_nb.report import report
from grpo_nb.rules.finding import FURTHEST, Steps
from grpo_nb.run.listing import list_runs
from grpo_nb.run.run import Run
from grpo_nb.storage import lines, safe_open, schema
from grpo_nb.storage.files import RunError, from_json
from grpo_nb.storage.index import frames
from grpo_nb.storage.journal import Journal
from grpo_nb.storage.lock import exclusive
from grpo_nb.storage.safe_open import Irregular
from tests.support.tokens import names

CONFIG = presets.demo()
LOGS = ("metrics", "samples", "events", "sft", "evaluations")
PRECIOUS = "a hundred lines of a person's own\n" * 100


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Run.create(tmp_path_factory.mktemp("template") / "x", CONFIG)
    for step in (1, 2):
        run.log_metrics({"step": step, "loss": 0.5})
        run.log_samples([{"step": step, "prompt": "p", "completion": "c"}])
        run.log_sft({"step": step, "loss": 1.0})
    run.log_event("start", step=0, goal=5)
    run.checkpoints.save(2, {"policy": {"w": torch.zeros(2)}}, {"step": 2}, files=_files)
    return run.path


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Run:
    return Run(shutil.copytree(template, tmp_path / "runs" / "x"), CONFIG)


def _files(folder: Path) -> None:
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "words.json").write_text("{}")


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    file = tmp_path / "precious.txt"
    file.write_text(PRECIOUS)
    return file


def link(path: Path, precious: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(precious)


def dangling(path: Path, precious: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(precious.with_name("nothing"))


def fifo(path: Path, precious: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path: Path, precious: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def unix_socket(path: Path, precious: Path) -> None:
    path.unlink(missing_ok=True)
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's address is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path, precious: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


KINDS = (link, dangling, fifo, folder, unix_socket, device)
kinds = pytest.mark.parametrize("put", KINDS, ids=lambda put: put.__name__)

WRITES: dict[str, Callable[[Run], Any]] = {
    "lock": lambda run: run.lock().acquire(),
    "metrics.jsonl": lambda run: run.log_metrics({"step": 3}),
    "samples.jsonl": lambda run: run.log_samples([{"step": 3}]),
    "events.jsonl": lambda run: run.log_event("start"),
    "sft.jsonl": lambda run: run.log_sft({"step": 3}),
    "evaluations.jsonl": lambda run: run.log_evaluation({"stage": "base"}),
    "metrics.discarded.jsonl": lambda run: run.rewind(1),
    ".knobs.json.lock": lambda run: run.knobs.request("pause"),
    "worker.log": lambda run: _spawn(["true"], run.path / "worker.log", {}),
    "checkpoints": lambda run: run.checkpoints.save(3, {"policy": {"w": torch.zeros(2)}}, {}),
    "sft": lambda run: run.sft_checkpoints.save(3, {"policy": {"w": torch.zeros(2)}}, {}),
}
READS: dict[str, Callable[[Run], object]] = {
    "config.json": lambda run: Run.open(run.path),
    "lock": lambda run: run.status(),
    "events.jsonl": lambda run: run.status(),
    "metrics.jsonl": lambda run: run.metrics(),
    "samples.jsonl": lambda run: list(run.newest_first("samples")),
    "sft.jsonl": lambda run: run.sft_metrics(),
    "evaluations.jsonl": lambda run: run.evaluations(),
    "checkpoints": lambda run: run.checkpoints.latest(),
    "sft": lambda run: run.sft_checkpoints.steps(),
    "checkpoints/000002/state.json": lambda run: run.checkpoints.load(2).state(),
    "checkpoints/000002/policy.safetensors": lambda run: run.checkpoints.load(2).tensors("policy"),
    "checkpoints/000002/manifest.json": lambda run: run.checkpoints.load(2),
    "checkpoints/000002/tokenizer/words.json": lambda run: run.checkpoints.load(2),
}


def replaced(path: Path, put: Callable[[Path, Path], None], precious: Path) -> None:
    if path.is_dir():
        path.rename(path.with_name(f"{path.name}.away"))
    put(path, precious)


@kinds
@pytest.mark.parametrize("name", WRITES)
def test_nothing_is_written_through_what_is_no_file_of_the_run(
    run: Run, precious: Path, name: str, put: Callable[[Path, Path], None]
) -> None:
    if (put, name) in ((folder, "checkpoints"), (folder, "sft")):
        return
    replaced(run.path / name, put, precious)
    with pytest.raises(RunError) as refused:
        WRITES[name](run)
    assert name in str(refused.value)
    if put is link:
        assert "precious.txt" in str(refused.value), "says where it leads"
    assert precious.read_text() == PRECIOUS and not precious.with_name("nothing").exists()


@kinds
@pytest.mark.parametrize("name", READS)
def test_nothing_is_read_through_what_is_no_file_of_the_run(
    run: Run, precious: Path, name: str, put: Callable[[Path, Path], None]
) -> None:
    if (put, name) in ((folder, "checkpoints"), (folder, "sft")):
        return
    replaced(run.path / name, put, precious)
    if name == "checkpoints":
        assert isinstance(_raised(lambda: READS[name](run)), Irregular)
    else:
        error = _raised(lambda: READS[name](run))
        assert isinstance(error, RunError) and Path(name).name in str(error)


def _raised(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", ".knobs.json.lock", "worker.log"])
@pytest.mark.parametrize("own", [True, False])
def test_a_file_of_two_names_is_not_written(
    run: Run, precious: Path, name: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of this user is replaced where it holds no rows; one of another user is refused."""
    (run.path / name).unlink(missing_ok=True)
    os.link(precious, run.path / name)
    user = os.geteuid() + (not own)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if own and name != "metrics.jsonl":
        if (process := WRITES[name](run)) is not None:
            process.wait()
        assert not os.path.samefile(precious, run.path / name)
    else:
        with pytest.raises(Irregular, match="2 names"):
            WRITES[name](run)
    assert precious.read_text() == PRECIOUS


def test_a_snapshot_by_hard_links_ends_no_training(run: Run, precious: Path) -> None:
    snapshot = run.path.parent / "snapshot"
    shutil.copytree(run.path, snapshot, copy_function=os.link)
    before = {log: (snapshot / f"{log}.jsonl").read_bytes() for log in ("metrics", "events", "sft", "samples")}
    with pytest.raises(Irregular, match="2 names"):
        run.log_metrics({"step": 3})
    with run.lock():
        run.log_metrics({"step": 3})
        run.rewind(1)
        run.rewind_sft(1)
        os.link(precious, run.path / "evaluations.jsonl")
        run.log_evaluation({"stage": "base"})
        link(run.path / "samples.jsonl", precious)
        with pytest.raises(Irregular, match=r"precious\.txt"):
            run.log_samples([{"step": 2}])
    assert before == {log: (snapshot / f"{log}.jsonl").read_bytes() for log in before}
    assert precious.read_text() == PRECIOUS
    assert [row["step"] for row in run.rows("metrics")] == [1]
    separated = {event["log"] for event in run.rows("events") if event["kind"] == "log_separated"}
    assert separated == {"metrics", "events", "samples", "sft", "evaluations"}


def test_a_link_that_is_replaced_or_deleted_leaves_what_it_leads_to(run: Run, precious: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept.txt").write_text("kept")
    checkpoints = run.path / "checkpoints"
    for name in (".tmp-000009-1-ab", "000001", ".old-000002", "discarded-000001", "000004"):
        (checkpoints / name).symlink_to(outside, target_is_directory=True)
    link(run.path / "knobs.json", precious)
    run.knobs.reset()
    assert run.checkpoints.latest()[0] is not None and len(run.checkpoints.latest()[1]) == 1
    run.checkpoints.save(4, {"policy": {"w": torch.zeros(2)}}, {"step": 4})
    run.checkpoints.prune(1, always=())
    assert run.checkpoints.steps() == [4] and not any(path.is_symlink() for path in checkpoints.iterdir())
    assert (outside / "kept.txt").read_text() == "kept" and precious.read_text() == PRECIOUS


def test_the_log_of_a_worker_is_not_read_through_a_link(run: Run, precious: Path) -> None:
    link(run.path / "worker.log", precious)
    assert _last_words(run) == ""


def test_runs_and_its_parents_may_be_links(tmp_path: Path, run: Run) -> None:
    (tmp_path / "elsewhere").symlink_to(run.path.parent, target_is_directory=True)
    (tmp_path / "runs" / "y").symlink_to(run.path, target_is_directory=True)
    assert sorted(s.name for s in list_runs(tmp_path / "elsewhere")) == ["x", "y"]
    linked = Run.open(tmp_path / "elsewhere" / "y")
    with linked.lock():
        linked.log_metrics({"step": 3})
        linked.checkpoints.save(3, {"policy": {"w": torch.zeros(2)}}, {"step": 3})
        linked.knobs.request("pause")
    assert run.last_step() == 3 and run.knobs.command == "pause"


@pytest.mark.parametrize(
    "name", ["../../x/state.json", "/etc/hostname", "a//b", "tokenizer/../../000002/state.json", ".", "a\\b", "a\0b"]
)
def test_a_manifest_names_files_of_its_own_folder_only(run: Run, name: str) -> None:
    manifest = run.path / "checkpoints" / "000002" / "manifest.json"
    found = json.loads(manifest.read_text())
    found["files"][name] = found["files"]["state.json"]
    manifest.write_text(json.dumps(found))
    assert run.checkpoints.latest()[0] is None


# ---- one bad folder hides no other


DEEP = "[" * 100_000
BAD_CONFIGS: dict[str, bytes] = {
    "deep": DEEP.encode(),
    "deep-object": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "deep-but-parsed": b"[" * 500 + b"]" * 500,
    "huge-number": b'{"run": {"steps": ' + b"9" * 5000 + b"}}",
    "many-steps": b'{"run": {"steps": 99999999999}}',
    "nan": b'{"run": {"steps": NaN}}',
    "work-to-check": b'{"batch": {"prompts": 1000000007, "group_size": 1000000007, "mini_batch": 7}}',
    "many-objectives": json.dumps(
        {"objectives": {str(i): {"task": "bbq", "data": "demo"} for i in range(64)}}
    ).encode(),
    "not-utf8": b"\xff\xfe{}",
    "empty": b"",
    "list": b"[]",
    "large": b'"' + b"x" * (schema.LARGEST_CONFIG + 1) + b'"',
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_config_that_cannot_be_read_hides_no_run(tmp_path: Path, name: str) -> None:
    Run.create(tmp_path / "good", CONFIG)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_bytes(BAD_CONFIGS[name])
    found = {summary.name: summary for summary in list_runs(tmp_path)}
    assert {name: summary.state for name, summary in found.items()} == {"bad": "unreadable", "good": "new"}
    assert found["bad"].problem and len(found["bad"].problem) < 1000


@kinds
@pytest.mark.parametrize("name", ["config.json", "lock", "events.jsonl", "metrics.jsonl", "knobs.json", "checkpoints"])
def test_a_file_of_any_kind_hides_no_run(
    tmp_path: Path, precious: Path, name: str, put: Callable[[Path, Path], None]
) -> None:
    for each in ("good", "bad"):
        Run.create(tmp_path / each, CONFIG)
    replaced(tmp_path / "bad" / name, put, precious)
    (tmp_path / "loop").symlink_to("loop")
    states = {summary.name: summary.state for summary in list_runs(tmp_path)}
    assert states.keys() == {"good", "bad"} and states["good"] == "new"
    if name not in ("knobs.json", "checkpoints"):  # neither is read for the list
        assert states["bad"] == "unreadable"


BAD_LINES: tuple[bytes, ...] = (
    DEEP.encode(),
    b'{"step": ' + b"9" * 5000 + b"}",
    b'{"step": 999999999999}',
    b'{"step": 999999999}',
    b'{"step": -1}',
    b'{"step": true}',
    b'{"step": 1e3}',
    b'{"step": NaN}',
    b'{"step": [7]}',
    b"null",
    b"\xff\xfe",
    b"x" * (2 << 16),
    b'{"step": 3, "loss": "<b>"}',
    b'{"step": 3, "reward/fairness/mean": "<b>"}',
    b'{"step": 3, "kl/fairness": {"a": 1}}',
    b'{"step": 3, "kl/fairness": 1' + b"0" * 400 + b"}",
)


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
@pytest.mark.parametrize("log", ["metrics", "sft"])
def test_a_row_that_is_none_is_left_out_and_counted(run: Run, log: Any, line: bytes) -> None:
    file = run.path / f"{log}.jsonl"
    file.write_bytes(file.read_bytes() + line + b"\n")
    assert [row["step"] for row in run.rows(log)] == [1, 2]
    assert [row["step"] for row in run.newest_first(log)] == [2, 1]
    journal = Journal(file)
    assert len(journal.read()) == 2 and journal.bad_lines == 1 and journal.bad_because
    assert run.status().step == 2 and run.goal() == CONFIG.run.steps


BAD_ROWS: dict[str, tuple[dict[str, Any], ...]] = {
    "samples": (
        {"step": 10**10},
        {"step": 1, "reward": "<b>"},
        {"step": 1, "group_size": "<img>"},
        {"step": 1, "tokens": [1]},
        {"step": 1, "parts": [1]},
        {"step": 1, "prompt": 5},
        {"step": 1, "prompt": [{"role": ["user"], "content": {}}]},
        {"step": 1, "token_texts": [1]},
        {"step": 1, "logprobs_old": ["<b>"]},
        {"step": 1, "completion": {"a": 1}},
        {"step": 1, "x" * 1000: 1},
    ),
    "events": (
        {"time": "x"},
        {"time": 1e300},
        {"time": math.nan},
        {"kind": ["start"]},
        {"kind": "start", "goal": 10**12},
        {"kind": "start", "step": "<b>"},
        {"kind": "finding", "severity": {"a": 1}},
        {"kind": "finding", "message": ["<b>"]},
    ),
    "evaluations": (
        {"stage": ["base"]},
        {"stage": "base", "step": "1"},
        {"stage": "base", "metrics": {"accuracy": "<b>"}},
        {"stage": "base", "metrics": {"accuracy": {"value": "<b>"}}},
        {"stage": "base", "resamples": {"accuracy": ["<b>"]}},
    ),
}


@pytest.mark.parametrize(("log", "row"), [(log, row) for log, rows in BAD_ROWS.items() for row in rows])
def test_rows_are_read_through_a_schema(run: Run, log: Any, row: dict[str, Any]) -> None:
    before = run.rows(log)
    with open(run.path / f"{log}.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    assert run.rows(log) == before


def test_half_of_a_surrogate_pair_reaches_no_table(run: Run) -> None:
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "\\ud800": "a\\ud800b\\ud83d\\ude00"}\n')
    assert run.metrics()["\ufffd"].tolist()[-1] == "a\ufffdb\U0001f600"


def test_rows_of_a_diverged_run_keep_what_shows_it(run: Run) -> None:
    worst = {"step": 3, "loss": math.nan, "kl/fairness": math.inf, "grad/norm": -math.inf, "reward/fairness/mean": None}
    run.log_metrics(worst)
    last = run.rows("metrics")[-1]
    assert math.isnan(last["loss"]) and last["kl/fairness"] == math.inf and last["grad/norm"] == -math.inf
    run.log_samples([{"step": 3, "completion": "c", "reward": math.nan, "logprobs_old": [math.nan, -math.inf]}])
    assert math.isnan(run.rows("samples")[-1]["reward"])


def test_steps_are_never_far_beyond_the_rows(run: Run) -> None:
    assert len(Steps([{"step": 1}]).missing(schema.MAX_STEP)) < 2 * FURTHEST
    (run.path / "checkpoints" / "999999999").mkdir()
    assert all(len(str(finding)) < 2000 for finding in diagnose(run))
    file = run.path / "metrics.jsonl"
    file.write_text("".join(f'{{"step":{n}}}\n' for n in range(1, 40_001)))
    assert run.last_step() == 40_000 and len(run.rows("metrics")) == 40_000, "a row a step, however short, is fine"


def test_a_line_without_end_is_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "LONGEST_LINE", 1 << 17)
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"step": 1})
    with open(journal.path, "ab") as file:
        file.write(b"x" * (1 << 20) + b'\n{"step": 2}\n')
    with open(journal.path, "rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        both = [*lines.backwards(opened, size), *lines.forwards(opened, 0, size)]
    assert max(len(line) for line, _ in both) < 1 << 18
    assert [row["step"] for row in journal.backwards()] == [2, 1] == [r["step"] for r in reversed(journal.read())]


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_a_line_of_any_length_is_read_up_to_a_bound(
    tmp_path: Path, name: str, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "LONGEST_LINE", 1 << 17)
    for each in ("good", "bad"):
        Run.create(tmp_path / each, CONFIG)
    log = tmp_path / "bad" / name
    with open(log, "wb") as file:
        file.truncate(1 << 28)
        file.seek(0, os.SEEK_END)
        file.write(end)
    taken: list[int] = []

    def read(fd: int, size: int, place: int, pread: Callable[[int, int, int], bytes] = os.pread) -> bytes:
        taken.append(place)
        return pread(fd, size, place)

    monkeypatch.setattr(os, "pread", read)
    found = {summary.name: summary for summary in list_runs(tmp_path)}
    assert found["good"].state == "new" and found["bad"].state == "unreadable"
    assert str(log) in str(found["bad"].problem) and min(taken) > 1 << 27
    with pytest.raises(RunError, match=name):
        next(Journal(log).backwards())


@pytest.mark.parametrize("name", ["metrics", "events", "samples", "evaluations"])
@pytest.mark.parametrize("way", ["rows", "oldest_first", "stored", "table", "rewind"])
def test_a_hole_in_a_log_is_one_clear_error_for_each_reader(
    tmp_path: Path, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of 16 GiB, of which the readers look at what they may pass over, and no more."""
    monkeypatch.setattr(schema, "LONGEST_LINE", 1 << 17)
    good, run = (Run.create(tmp_path / each, CONFIG) for each in ("good", "bad"))
    row = {"metrics": {"step": 1}, "samples": {"step": 1}, "events": {"kind": "note"}, "evaluations": {"stage": "base"}}
    log = run.path / f"{name}.jsonl"
    with open(log, "wb") as file:
        file.write(json.dumps(row[name]).encode() + b"\n")
        file.seek(1 << 34)
        file.write(b"\n" + json.dumps(row[name]).encode() + b"\n")
    readers: dict[str, Callable[[Any], object]] = {
        "rows": run.rows,
        "oldest_first": lambda log: [*run.oldest_first(log)],
        "stored": lambda log: [*run.stored(log)],
        "table": lambda log: run._table(log),
        "rewind": lambda log: run._discard_after(log, 0),
    }
    read = _counted(monkeypatch)
    with pytest.raises(RunError, match=f"{name}.jsonl"):
        readers[way](name)
    assert read() < 8 * lines.ENDLESS * schema.LONGEST_LINE
    assert {summary.name: summary.state for summary in list_runs(tmp_path)}["good"] == "new"
    assert list(good.rows("events")) == good.rows("events")


def _counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The bytes that lines and chunks were read in since."""
    sizes, forwards, pread = [0], lines.forwards, os.pread

    def counting(file: Any, start: int, end: int) -> Any:
        try:
            yield from forwards(file, start, end)
        finally:
            sizes[0] += file.tell() - start

    def place(fd: int, size: int, at: int) -> bytes:
        data = pread(fd, size, at)
        sizes[0] += len(data)
        assert sizes[0] < 1 << 30, "the hole is read in full"
        return data

    monkeypatch.setattr(lines, "forwards", counting)
    monkeypatch.setattr(os, "pread", place)
    return lambda: sizes[0]


def test_a_torn_line_too_long_to_be_a_row_is_cut_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "LONGEST_LINE", 1 << 17)
    journal, pread, sizes = Journal(tmp_path / "metrics.jsonl"), os.pread, list[int]()
    journal.append({"step": 1})
    os.truncate(journal.path, 1 << 24)
    monkeypatch.setattr(os, "pread", lambda fd, size, place: (sizes.append(size), pread(fd, size, place))[1])
    journal.append({"step": 2})
    assert max(sizes) <= 1 << 17 and [row["step"] for row in journal.read()] == [1, 2]


def test_a_table_has_no_more_columns_than_a_step_has_numbers() -> None:
    rows = [{"step": n, **{f"{n}/{k}": 0 for k in range(1000)}} for n in range(100)]
    kept, dropped = schema.narrow(rows)
    assert [row["step"] for row in kept] == [*range(100)] and dropped == 100_001 - schema.MOST_KEYS
    assert len({key for row in kept for key in row}) == schema.MOST_KEYS


@pytest.mark.parametrize("few", [True, False])
def test_a_table_keeps_each_row_where_the_names_change_with_each_step(
    run: Run, few: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(schema, "MOST_KEYS", 20)
    monkeypatch.setattr(frames, "FEW_ROWS", 1000 if few else 0)
    for step in range(3, 41):
        run.log_metrics({"step": step, "loss": 0.5, keys.USER.of("fairness", f"at {step}"): 1.0})
    table = run.metrics()
    assert list(table["step"]) == [*range(1, 41)] and table["loss"].notna().all()
    assert table.attrs[frames.DROPPED] == 20 and len(table.columns) == 20 and names(caplog.text, 20, 40)
    live = Rows()
    for row in run.rows("metrics"):
        live.add(row)
    assert list(live.frame()["step"]) == [*range(1, 41)] and live.frame().attrs[frames.DROPPED] == 20
    shown = report.picture(run, live.frame())
    assert any("20" in text.get_text() and "metrics" in text.get_text() for text in shown.texts)


def test_depth_is_bounded_whatever_python_would_read() -> None:
    assert from_json(b"[" * schema.DEEPEST + b"]" * schema.DEEPEST)
    assert from_json(b'{"text": "' + b"[" * 1000 + b'"}') == {"text": "[" * 1000}
    for deep in (schema.DEEPEST + 1, 900, 5000, 100_000):
        with pytest.raises(ValueError):
            from_json(b"[" * deep + b"]" * deep)


BAD_LOCKS = (
    {"pid": "1"},
    {"pid": 10**400},
    {"since": math.nan},
    {"since": 1e300},
    {"heartbeat": math.inf},
    {"host": ["h"]},
    {"token": "x" * 10_000},
)


@pytest.mark.parametrize("change", BAD_LOCKS, ids=range(len(BAD_LOCKS)))
def test_a_lock_that_names_nobody_stops_nothing(run: Run, change: dict[str, Any]) -> None:
    lock = run.lock()
    lock.acquire()
    content = json.loads((run.path / "lock").read_bytes())
    lock.release()
    (run.path / "lock").write_text(json.dumps(content | change)[:1000])
    assert run.status().owner is None and str(run.status())
    with run.lock():
        pass


def test_an_exclusive_change_takes_no_lock_of_another_kind(run: Run, precious: Path) -> None:
    link(run.path / ".config.json.lock", precious)
    with pytest.raises(Irregular), exclusive(run.path / "config.json"):
        pass
    assert precious.read_text() == PRECIOUS


def test_a_file_put_there_after_the_look_is_refused_too(
    run: Run, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link(run.path / "lock", precious)
    monkeypatch.setattr(safe_open, "refuse_irregular", lambda path: None)
    with pytest.raises((RunError, OSError)):
        safe_open.opened(run.path / "lock", os.O_RDWR | os.O_CREAT)
    assert precious.read_text() == PRECIOUS
