"""The measured result: what is committed agrees with itself, and with what its answers score."""

import json
from pathlib import Path

import pandas as pd
import pytest

from grpo_nb import presets
from grpo_nb.dev import result, result_views
from grpo_nb.dev.result_answers import FIELD, OBJECTIVES, _pairs
from grpo_nb.evaluation.predictions import score_halueval
from grpo_nb.sweeps.work import stages
from tests.conftest import ROOT

DATA = ROOT.parent / "shared/data/halueval/qa_data.json"
SEEDS = (0, 1, 2)


def answered(arm: str, stage: str, seed: int, kind: str) -> list[dict[str, object]]:
    file = result_views.FOLDER / "predictions" / f"{arm}-{seed}.{stage}.{kind}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_every_measure_of_every_arm_is_there() -> None:
    table = result_views.table().frame.set_index("measure")
    assert [*table.index] == [*result_views.MEASURES.values()] and [*table.columns] == [*result_views.ARMS.values()]
    assert (table != "").all(axis=None)
    less = result_views.differences().frame.set_index("measure")
    assert (less[result_views.ARMS[result_views.GRPO]] == "").all()
    assert (less.drop(columns=result_views.ARMS[result_views.GRPO]) != "").all(axis=None)


@pytest.mark.parametrize("kind", OBJECTIVES.values())
@pytest.mark.parametrize("seed", SEEDS)
def test_all_arms_answered_the_same_items(kind: str, seed: int) -> None:
    ids = [
        {(row.get("category"), row["example_id"]) for row in answered(*arm, seed, kind)} for arm in result_views.ARMS
    ]
    assert len(ids[0]) >= 80 and all(one == ids[0] for one in ids)


@pytest.mark.skipif(not DATA.exists(), reason="needs ../shared/data")
@pytest.mark.parametrize("arm", [("sft", "sft"), ("grpo", "latest")])
def test_the_table_is_what_the_answers_score(arm: tuple[str, str]) -> None:
    files = [result_views.FOLDER / "predictions" / f"{arm[0]}-{seed}.{arm[1]}.qa.jsonl" for seed in SEEDS]
    groups = [score_halueval(str(DATA), str(file), FIELD, part=True).groups["qa"] for file in files]
    rows = pd.read_csv(result_views.FOLDER / "results.csv").set_index(["arm", "stage", "objective", "metric"])
    for metric in ("accuracy", "grounded_rate", "hallucinated_rate"):
        mean = sum(group.metrics[metric]["value"] for group in groups) / len(groups)
        assert rows.loc[(*arm, "hallucination", metric), "value"] == pytest.approx(mean, abs=1e-6)


def test_the_study_shares_sft_and_measures_each_once(tmp_path: Path) -> None:
    usual = presets.gpu_result()
    made = result.study(tmp_path / "s", usual.model.name, "data/bbq", "data/qa.json", SEEDS)
    first = {trial.arm: trial for trial in made.trials if trial.seed == 0}
    assert {arm: stages(trial) for arm, trial in first.items() if not trial.grpo} == {
        "sft": ["base", "sft"],
        "sft-same-seconds": ["sft"],
        "sft-same-examples": ["sft"],
    }
    assert all(stages(trial) == ["latest"] for trial in first.values() if trial.grpo)
    assert result.REFERENCE in first and all(arm in first for arm, _ in result_views.ARMS)


def test_answers_about_both_texts_of_an_item_come_in_one_row() -> None:
    rows = [{"example_id": f"qa/{n}/{member}", FIELD: f"{n}{member}"} for n in (1, 0) for member in ("right", "other")]
    assert _pairs(rows) == [
        {"example_id": f"qa/{n}", FIELD: {"right": f"{n}right", "other": f"{n}other"}} for n in (0, 1)
    ]


def test_the_fronts_and_curves_are_of_the_runs_that_the_table_has() -> None:
    assert all(len(result_views.front(seed)) >= 3 for seed in SEEDS)
    steps = result_views.seeds().frame.set_index("arm")
    assert [*steps.columns] == list(SEEDS) and steps.loc["no-kl"].eq(100).all()
