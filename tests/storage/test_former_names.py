"""Runs of earlier versions: their files are read under today's names, and one that goes on has one curve."""

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from grpo_nb import fingerprint, plots, presets, rules
from grpo_nb.metrics import keys
from grpo_nb.rules import hindsight
from grpo_nb.run.run import Run
from grpo_nb.storage import former_names, schema, user_cache
from grpo_nb.storage import index as index_module
from grpo_nb.storage.files import to_json
from grpo_nb.storage.index import store
from grpo_nb.storage.journal import Journal
from tests.support import former
from tests.support.made_rows import healthy

Row = dict[str, Any]

METRICS = {
    "reward/fairness": "reward/fairness/mean",
    "reward_std/fairness": "reward/fairness/std",
    "shaped_reward/fairness": "reward/fairness/shaped",
    "reward_part/fairness/task": "reward/fairness/part/task",
    "reward_part/fairness/a/b": "reward/fairness/part/a/b",
    "reward_part_std/fairness/task": "reward/fairness/part_std/task",
    "rewards/fairness/long": "user/fairness/long",
    "dead_groups/fairness": "frac_reward_zero_std/fairness",
    "label_told/fairness/correct": "label_answerable/fairness/correct",
    "label_untold/fairness/correct": "label_unanswerable/fairness/correct",
    "kl_clamped/fairness": "log_ratio_clamped/fairness",
    "clip/low": "clip_ratio/low",
    "clip/high": "clip_ratio/high",
    "ratio/max_dev": "ratio/max_deviation",
    "ratio/gap": "ratio/logp_difference",
    "ratio/gap_p99": "ratio/logp_difference_p99",
    "ratio/gap_far": "ratio/logp_difference_far",
    "sampler_gap": "sampler_logp_difference",
    "sampler_gap_p99": "sampler_logp_difference_p99",
    "sampler_gap_far": "sampler_logp_difference_far",
    "weight/mean": "importance_weight/mean",
    "weight/zero": "importance_weight/zero",
}


def write(run: Run, *rows: Row) -> None:
    """Append rows to metrics.jsonl as they are."""
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.writelines(to_json(row) + b"\n" for row in rows)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", presets.demo())


@pytest.fixture
def mixed(run: Run) -> Run:
    """Thirty steps of an earlier version, and thirty of this one."""
    rows = healthy(60)
    write(run, *map(former.row, rows[:30]))
    for row in rows[30:]:
        run.log_metrics(row)
    return run


@pytest.mark.parametrize(("old", "now"), METRICS.items())
def test_a_metric_has_todays_name(old: str, now: str) -> None:
    assert former_names.metric(old) == now == former_names.metric(now)
    assert keys.row_of(old) is None and keys.row_of(now) is not None


def test_every_former_metric_is_tried_here() -> None:
    assert {keys.row_of(now).name for now in METRICS.values()} == set(former_names.METRICS.values())  # type: ignore[union-attr]


def test_rows_of_an_earlier_version_are_those_of_today(mixed: Run) -> None:
    wanted = healthy(60)
    first = json.loads((mixed.path / "metrics.jsonl").read_bytes().splitlines()[0])
    assert {"reward/fairness", "reward_std/fairness", "reward_part/fairness/task", "sampler_gap"} <= first.keys()
    read = [mixed.metric_rows(), [*mixed.stored("metrics")], [*mixed.oldest_first("metrics")]]
    read += [[*mixed.newest_first("metrics")][::-1], [*mixed.follower("metrics", lambda: None).read()]]
    assert read == [wanted] * 5 and mixed.last_step() == 60
    table = mixed.metrics()
    assert set(table) == set(wanted[0]) and not table[keys.REWARD.of("fairness")].isna().any()


def test_findings_and_curves_of_a_run_that_went_on_have_no_seam(mixed: Run) -> None:
    config = mixed.config
    ill = [
        row | {keys.TRUNCATION.of("fairness"): 0.9, keys.FRAC_REWARD_ZERO_STD.of("fairness"): 1.0}
        for row in healthy(60)
    ]
    (mixed.path / "metrics.jsonl").unlink()
    write(mixed, *map(former.row, ill[:55]), *ill[55:])
    assert hindsight.post_mortem(mixed.stored("metrics"), config) == rules.post_mortem(ill, config) != []
    shown, wanted = (
        [line.get_xydata().tolist() for line in plots.reward_curves(rows, config).axes[0].lines]
        for rows in (mixed.stored("metrics"), pd.DataFrame(ill))
    )
    assert str(shown) == str(wanted)


def test_a_rewind_keeps_the_lines_of_an_earlier_version(mixed: Run) -> None:
    before = (mixed.path / "metrics.jsonl").read_bytes().splitlines()
    assert mixed.rewind(20)["metrics"] == 40
    assert (mixed.path / "metrics.jsonl").read_bytes().splitlines() == before[:20]
    discarded = Journal(mixed.path / "metrics.discarded.jsonl")
    assert discarded.read() == healthy(60)[20:] and mixed.metric_rows() == healthy(60)[:20]


def test_a_number_of_an_earlier_version_holds_no_text(run: Run) -> None:
    write(run, {"step": 1, "reward/fairness": "<b>"}, {"step": 2, "reward/fairness": 1.0})
    assert run.metric_rows() == [{"step": 2, keys.REWARD.of("fairness"): 1.0}]


def test_an_index_made_by_an_earlier_version_is_not_used(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "CHUNK_BYTES", 4000)
    monkeypatch.setenv(user_cache.FOLDER, str(tmp_path / "cache"))
    write(run, *map(former.row, healthy(40)))
    with monkeypatch.context() as earlier:
        earlier.setattr(store, "VERSION", 2)
        earlier.setattr(former_names, "metrics", lambda row: row)
        assert "reward/fairness" in Run.open(run.path).stored("metrics").keys
    assert len(list((tmp_path / "cache").rglob("*.sqlite"))) == 1
    rows = Run.open(run.path).stored("metrics")
    assert set(rows.keys) == {key for key, value in healthy(1)[0].items()} and [*rows] == healthy(40)
    reward = [row[keys.REWARD.of("fairness")] for row in healthy(40)]
    assert rows.numbers(keys.REWARD.of("fairness")).values.tolist() == reward
    assert len(list((tmp_path / "cache").rglob("*.sqlite"))) == 2


def test_an_index_made_by_other_rules_of_reading_is_not_used(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with both names of a metric, of which an earlier version kept the former one's number."""
    monkeypatch.setattr(index_module, "CHUNK_BYTES", 4000)
    monkeypatch.setenv(user_cache.FOLDER, str(tmp_path / "cache"))
    key, package = keys.REWARD.of("fairness"), shutil.copytree(fingerprint.ROOT, tmp_path / "package")
    write(run, *({"step": step, key: 0.1, "reward/fairness": 0.9} for step in range(1, 201)))
    with monkeypatch.context() as earlier:
        (package / "storage" / "former_names.py").write_text("METRICS = {}\n")
        earlier.setattr(fingerprint, "ROOT", package)
        earlier.setattr(former_names, "metrics", lambda row: {"step": row["step"], key: row["reward/fairness"]})
        assert set(Run.open(run.path).stored("metrics").numbers(key).values) == {0.9}
    rows = Run.open(run.path).stored("metrics")
    assert set(rows.numbers(key).values) == {row[key] for row in rows} == {0.1}


@pytest.mark.parametrize("name", store.RULES)
def test_each_rule_of_reading_makes_another_index(name: str, tmp_path: Path) -> None:
    package = shutil.copytree(fingerprint.ROOT, tmp_path / "package", ignore=shutil.ignore_patterns("*.pyc"))
    assert store.rules(package) == store.rules(fingerprint.ROOT)
    (other := package.rename(tmp_path / "other") / name).write_bytes(other.read_bytes() + b"\n")
    assert store.rules(tmp_path / "other") != store.rules(fingerprint.ROOT)


def test_of_both_names_of_a_metric_todays_stands() -> None:
    both = {"reward/fairness/mean": 0.1, "reward/fairness": 0.9}
    for row in (both, dict(reversed(both.items()))):
        assert former_names.metrics(row) == {"reward/fairness/mean": 0.1}


def test_a_row_that_is_none_is_neither_renamed_nor_remembered() -> None:
    former_names._metrics.cache_clear()
    for row in ({f"dead_groups/{n}": 1.0 for n in range(schema.MOST_KEYS + 1)}, {"dead_groups/" + "x" * 600: 1.0}):
        assert former_names.metrics(row) is row
    long = {f"dead_groups/{n:0100}": 1.0 for n in range(1000)}
    assert not former_names.metrics(long).keys() & long.keys()
    assert former_names._metrics.cache_info().currsize == 0
