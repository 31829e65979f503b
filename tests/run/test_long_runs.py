"""A long run is read by column, from its end, or at the rows that matter: same findings, same pictures, less work."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest

from grpo_nb import doctor, presets, rules
from grpo_nb.plots import thinning
from grpo_nb.report import report
from grpo_nb.rules import hindsight, history
from grpo_nb.rules.finding import Finding
from grpo_nb.run.listing import list_runs
from grpo_nb.run.run import Run
from grpo_nb.storage import index, user_cache
from grpo_nb.storage.files import to_json
from grpo_nb.storage.index import frames
from grpo_nb.storage.journal import Journal
from tests.support.made_rows import Row, healthy
from tests.support.tiny import tiny_run
from tests.support.tokens import names

F, H = "fairness", "hallucination"
CONFIG = presets.demo().replace(
    **{
        "sampling.max_completion_length": 12,
        f"objectives.{F}.kl_band": (0.01, 0.1),
        f"objectives.{H}.kl_band": (0.01, 0.1),
    }
)


@pytest.fixture(autouse=True)
def by_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done with long logs is done with these, which have chunks of some ten rows."""
    monkeypatch.setattr(index, "CHUNK_BYTES", 40_000)
    monkeypatch.setenv(user_cache.FOLDER, str(tmp_path / "cache"))
    for module in (hindsight, frames):
        monkeypatch.setattr(module, "FEW_ROWS", 0)


def stored(folder: Path, rows: list[Row]) -> index.LogRows:
    journal = Journal(folder / "metrics.jsonl")
    journal.append(*rows)
    return journal.stored()


def kl_high(row: Row) -> Row:
    return {f"kl/{F}": 0.3}


def reward_lost(row: Row) -> Row:
    labels = {f"label/{F}/correct": 0.1, f"label/{F}/wrong": 0.9}
    return {f"reward/{F}/mean": 0.1, "lr": 9e-4, **labels}


def no_label_correct(row: Row) -> Row:
    return {f"label/{H}/correct": None, f"label/{H}/wrong": 1.0}


FAULTS: dict[str, Callable[[Row], Row]] = {
    "nan": lambda row: {"loss": math.nan, "status": "skipped", "grad/norm": math.inf},
    "spike": lambda row: {"grad/norm": 1e7, "status": "skipped"},
    "frozen": lambda row: {"grad/update": 0.0},
    "kl zero": lambda row: {f"kl/{F}": 0.0},
    "kl exploded": lambda row: {f"kl/{H}": 5.0},
    "kl above": kl_high,
    "lost": reward_lost,
    "unlabelled": no_label_correct,
    "dead": lambda row: {f"frac_reward_zero_std/{F}": 1.0},
    "cut": lambda row: {f"truncation/{H}": 0.9},
    "gap": lambda row: {"sampler_logp_difference": math.nan if row["step"] % 2 else 0.8},
    "conflict": lambda row: {"grad/cosine": -0.9 if row["step"] % 3 == 0 else None},
    "memory": lambda row: {"memory/peak_mib": 800.0 + 5 * row["step"]},
    "step one": lambda row: {f"kl/{F}": 0.5, "ratio/max_deviation": 0.9} if row["step"] == 1 else {},
}


def planted(seed: int, steps: int) -> list[Row]:
    """A run with three faults in stretches of it, some to its end."""
    noise, rows = random.Random(seed), healthy(steps, seed)
    for fault in noise.sample(sorted(FAULTS), 3):
        since = noise.choice([1, noise.randint(1, steps), steps - noise.randrange(1, 20)])
        until = noise.choice([steps, since + noise.randrange(1, 30)])
        rows = [row | FAULTS[fault](row) if since <= row["step"] <= until else row for row in rows]
    return rows


def plain(findings: list[Finding]) -> list[str]:
    return [repr(finding) for finding in findings]


@pytest.mark.parametrize("seed", range(6))
def test_columns_give_the_findings_of_a_full_read(tmp_path: Path, seed: int) -> None:
    rows = planted(seed, steps=[30, 160, 420][seed % 3])
    wanted = rules.post_mortem(rows, CONFIG)
    assert plain(hindsight.post_mortem(stored(tmp_path, rows), CONFIG)) == plain(wanted)
    assert len(wanted) > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 200))
def test_columns_give_the_findings_of_a_full_read_of_many_runs(tmp_path: Path, seed: int) -> None:
    rows = planted(seed, steps=random.Random(seed).choice([1, 5, 12, 60, 300, 2500]))
    assert plain(hindsight.post_mortem(stored(tmp_path, rows), CONFIG)) == plain(rules.post_mortem(rows, CONFIG))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_a_single_stretch_is_found_by_column(tmp_path: Path, fault: str) -> None:
    rows = [row | FAULTS[fault](row) if row["step"] >= 41 or fault == "step one" else row for row in healthy(80)]
    wanted = rules.post_mortem(rows, CONFIG)
    assert plain(hindsight.post_mortem(stored(tmp_path, rows), CONFIG)) == plain(wanted)


def test_running_figures_from_columns_are_those_of_all_rows(tmp_path: Path) -> None:
    rows = [row | ({f"kl/{F}": 0.3} if row["step"] % 3 else {f"kl/{F}": None}) for row in healthy(90)]
    kept, found = history.History(CONFIG, rows), history.History.of(CONFIG, stored(tmp_path, rows))
    assert found.cosines == kept.cosines and len(found) == len(kept)
    for name in CONFIG.objectives:
        one, other = found.objectives[name], kept.objectives[name]
        assert (one.kl_count, one.kl_above, one.kls) == (other.kl_count, other.kl_above, other.kls)
        assert one.spread.median() == other.spread.median()
        for curve, wanted in ((one.reward, other.reward), (one.correct, other.correct)):
            assert (curve._count, curve._best, curve._values) == (wanted._count, wanted._best, wanted._values)
            assert [value for value, _ in curve._highs] == [value for value, _ in wanted._highs]


# ---- work that does not grow


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log of each row that is parsed."""
    found: list[str] = []
    of_line = Journal._row

    def counting(journal: Journal, line: bytes, end: int) -> Any:
        found.extend([journal.path.name] if line else [])
        return of_line(journal, line, end)

    monkeypatch.setattr(Journal, "_row", counting)
    return found


def long_run(folder: Path, steps: int) -> Run:
    folder.mkdir()
    run = tiny_run(folder, run__steps=steps)
    pattern = healthy(50)
    (run.path / "metrics.jsonl").write_bytes(
        b"".join(to_json(pattern[step % 50] | {"step": step}) + b"\n" for step in range(1, steps + 1))
    )
    events = [("start", 0), *(("checkpoint", step) for step in range(1, steps + 1)), ("done", steps)]
    (run.path / "events.jsonl").write_bytes(
        b"".join(to_json({"time": 1e9 + step, "kind": kind, "step": step}) + b"\n" for kind, step in events)
    )
    return run


def seen(run: Run) -> None:
    """All that shows a run, as another process does it."""
    other = Run.open(run.path)
    doctor.diagnose(other)
    thinning.ordered(other.stored("metrics"))
    report.events(other)
    report.starts(other)
    list_runs(run.path.parent)


def test_what_is_parsed_to_show_and_diagnose_a_run_does_not_grow(
    tmp_path: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(thinning, "MOST_POINTS", 50)
    monkeypatch.setattr(report, "NEWEST_ROWS", 100)
    costs = []
    for steps in (300, 900):
        run = long_run(tmp_path / str(steps), steps)
        seen(run)
        parsed.clear()
        seen(run)
        costs.append(len(parsed))
    assert costs[1] < 1.3 * costs[0]


def test_an_index_is_made_by_parsing_each_row_once(tmp_path: Path, parsed: list[str]) -> None:
    run = long_run(tmp_path / "run", 400)
    parsed.clear()
    run.stored("metrics")
    assert 400 <= len(parsed) <= 402, "the checker of types looks at a row of what is returned"


def sample(step: int, objective: str = F, completion: str = "") -> Row:
    text = completion or f"answer {step}"
    return {"step": step, "objective": objective, "prompt": "p", "completion": text, "reward": 1.0}


def test_the_newest_samples_are_read_from_the_end(tmp_path: Path, parsed: list[str]) -> None:
    run = tiny_run(tmp_path)
    run.log_samples(sample(step, completion=f"answer {step // 2}") for step in range(1, 901))
    parsed.clear()
    assert list(report.samples(run, limit=3).frame["step"]) == [900, 899, 897] and len(parsed) < 10
    parsed.clear()
    assert list(report.samples(Run.open(run.path), step=40).frame["completion"]) == ["answer 20"]


def test_samples_that_are_rare_are_looked_for_in_the_newest_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: list[str]
) -> None:
    monkeypatch.setattr(report, "NEWEST_ROWS", 100)
    run = tiny_run(tmp_path)
    run.log_samples([sample(1, H), *(sample(step) for step in range(2, 500)), sample(500, H)])
    parsed.clear()
    table = report.samples(run, objective=H)
    assert list(table.frame["step"]) == [500] and "100" in table.caption and len(parsed) == 100
    assert "100" not in report.samples(run, objective=F).caption


def test_a_quick_diagnosis_names_the_log_that_it_did_not_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: list[str]
) -> None:
    monkeypatch.setattr(doctor, "UNREAD", 50_000)
    run = tiny_run(tmp_path)
    run.log_samples(sample(step) for step in range(1, 901))
    with (run.path / "samples.jsonl").open("ab") as file:
        file.write(b"no row\n" * 3)
    parsed.clear()
    (unread,) = doctor.diagnose(run, quick=True)
    assert unread.rule == "log_unread" and unread.evidence["file"] == "samples.jsonl" and "samples.jsonl" not in parsed
    (damaged,) = doctor.diagnose(run)
    assert damaged.rule == "log_damaged" and damaged.evidence["lines"] == 3
    assert [f.rule for f in doctor.diagnose(run, quick=True)] == ["log_damaged"]


# ---- tables and points


def test_a_long_table_has_the_values_of_its_rows(tmp_path: Path) -> None:
    rows = planted(3, 60)
    found, wanted = frames.frame(stored(tmp_path, rows)), pd.DataFrame(rows)
    assert set(found) == set(wanted) and found["step"].dtype == np.int64
    for key in wanted:
        assert [str(v) for v in found[key]] == [
            str(float(v) if type(v) is int and key != "step" else v) for v in wanted[key]
        ]


def test_points_keep_every_extreme_and_the_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinning, "MOST_POINTS", 40)
    rows = [row | {"kl/fairness": 9.0} if row["step"] == 333 else row for row in healthy(900)]
    rows[500] |= {"status": "skipped", "grad/norm": 1e6}
    rows[501] |= {"kl/fairness": math.nan, "loss": math.inf}
    table = pd.DataFrame(rows)
    for points in (thinning.ordered(table), thinning.ordered(stored(tmp_path, rows))):
        assert (
            len(points) < 60 and list(points["step"])[:5] == [1, 2, 3, 4, 5] and points["step"].is_monotonic_increasing
        )
        assert list(points["step"])[-10:] == list(range(891, 901))
        assert points["max:kl/fairness"].max() == 9.0 and points["min:kl/fairness"].min() == 0.0
        assert list(points[points["status"] == "skipped"]["step"]) == [501]
        assert points["grad/norm"][points["status"] != "skipped"].max() < 2
        assert points["reward/fairness/mean"].tail(10).mean() == pytest.approx(
            table["reward/fairness/mean"].tail(10).mean()
        )
        inner = points[(points["step"] > 5) & (points["step"] < 891)]
        assert inner["reward/fairness/mean"].mean() == pytest.approx(table["reward/fairness/mean"].mean(), abs=0.02)
        assert set(points["beta_mode/fairness"]) == {"auto"}


def test_equal_rows_out_of_order_and_twice_share_points_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinning, "MOST_POINTS", 20)
    steps = [*range(1, 101), 50, 7]
    rows = pd.DataFrame({"step": steps, "loss": [1.0] * 100 + [5.0, 6.0]})
    points = thinning.ordered(rows)
    assert points["max:loss"].max() == 6.0 and list(points["step"])[-1] == 100
    assert thinning.ordered(pd.DataFrame()).empty and thinning.ordered(pd.DataFrame({"loss": [1.0]})).empty


@pytest.mark.parametrize("log", ["metrics", "events"])
def test_a_table_of_few_values_in_many_keys_and_rows_stays_small(
    tmp_path: Path, log: Literal["metrics", "events"], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run(tmp_path)
    monkeypatch.setattr(frames, "CELLS", 10_000)
    row = {"time": 1.0, "kind": "made", "step": 1}
    rows = [row | {f"rare-{n}": 1.0 for n in range(500)}, *(row | {"step": step + 2} for step in range(6_000))]
    (run.path / f"{log}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = run.metrics() if log == "metrics" else run.events()
    assert len(table) == 6_001 and {*row} <= {*table.columns} and table.size <= 10_000 + 16 * 18_503 + 6_001
    assert names(caplog.text, 6_001, 503 - len(table.columns))


def test_a_table_keeps_what_is_measured_now_and_then(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    for step in range(1, 200):
        run.log_metrics({"step": step} | ({"eval/fairness/accuracy": 0.5} if step % 50 == 0 else {}))
    assert run.metrics()["eval/fairness/accuracy"].notna().sum() == 3
