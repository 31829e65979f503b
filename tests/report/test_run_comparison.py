"""Two runs side by side, of any length and from anybody."""

import json
from pathlib import Path

import pytest

import grpo_nb
from grpo_nb import cli
from grpo_nb.report import run_comparison
from grpo_nb.report.run_comparison import compare
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage import index
from tests.support.made_rows import healthy, ill
from tests.support.tiny import tiny_run
from tests.support.tokens import names


def made(folder: Path, name: str, steps: int, **changes: object) -> Run:
    run = tiny_run(folder, name, **changes)
    run.log_event("start", step=0, torch="2.9.0", threads=1 if name == "a" else 2)
    for row in healthy(steps, seed=len(name)):
        run.log_metrics(row)
    return run


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Run, Run]:
    return made(tmp_path, "a", 12), made(tmp_path, "b", 7, run__seed=3, algorithm__learning_rate=1e-3)


def test_what_differs_and_nothing_else(runs: tuple[Run, Run]) -> None:
    found = compare(*runs)
    assert found.names == ("a", "b")
    assert found.settings.to_numpy().tolist() == [
        ["algorithm.learning_rate", "0.00012", "0.001"],
        ["run.seed", "0", "3"],
    ]
    assert found.versions.to_numpy().tolist() == [["threads", "1", "2"]]
    same = compare(runs[0], runs[0])
    assert same.settings.empty and same.versions.empty and (same.metrics["difference"] == 0).all()
    assert same.names[0] != same.names[1]


def test_metrics_are_of_the_shared_steps(runs: tuple[Run, Run]) -> None:
    """Of a step that is logged twice the last row counts, as a resume leaves it; what is not finite does not."""
    a, b = runs
    a.log_metrics({"step": 7, "loss": 9.0, "grad/norm": float("inf")})
    a.log_metrics({"step": 30, "loss": 99.0})
    found = compare(a, b)
    rows = found.metrics.set_index("metric")
    mine = [row["loss"] for row in a.metric_rows()[:6]] + [9.0]
    assert rows.loc["loss", "a_mean"] == pytest.approx(sum(mine) / 7) and rows.loc["loss", "a_last"] == 9.0
    assert rows.loc["loss", "a_spread"] == pytest.approx((sum((v - sum(mine) / 7) ** 2 for v in mine) / 7) ** 0.5)
    assert rows.loc["loss", "difference"] == pytest.approx(rows.loc["loss", "b_mean"] - rows.loc["loss", "a_mean"])
    assert rows.loc["grad/norm", "a_last"] == a.metric_rows()[5]["grad/norm"]
    assert names(found.steps, 7, 1) and "step" not in rows.index and "status" not in rows.index
    assert rows.index[0] == "reward/fairness/mean" and rows.loc["kl/fairness", "unit"] == "nats/token"


def test_what_did_not_occur_counts_as_0(tmp_path: Path) -> None:
    """Labels and failures of a judge have a key only in the steps in which they occur."""
    a, b = tiny_run(tmp_path, "a"), tiny_run(tmp_path, "b")
    sparse = {"label/fairness/unparsed": 0.5, "judge/fairness/failure/timeout": 4, "eval/fairness/accuracy": 0.25}
    sparse |= {"label_answerable/fairness/wrong": 0.75}
    for step in range(1, 5):
        base = {"step": step, "loss": 0.1, "label/fairness/correct": 0.5, "judge/fairness/scored": 8}
        base |= {"label_answerable/fairness/correct": 0.25} if step < 4 else {}
        a.log_metrics(base | (sparse if step == 2 else {}))
        b.log_metrics(base)
    found = compare(a, b)
    rows = found.metrics.set_index("metric")
    parts = ["a_mean", "a_last", "a_last_step", "b_mean"]
    assert rows.loc["label/fairness/unparsed", parts].tolist()[:3] == [0.125, 0.0, 4.0]
    assert rows.loc["judge/fairness/failure/timeout", parts].tolist() == [1.0, 0.0, 4.0, 0.0]
    assert rows.loc["label/fairness/unparsed", "difference"] == -0.125
    assert rows.loc["label_answerable/fairness/wrong", parts].tolist()[:3] == [0.25, 0.0, 3.0]
    assert rows.loc["eval/fairness/accuracy", parts].tolist()[:3] == [0.25, 0.25, 2.0]
    shown = {row[0]: row for table in found.tables() if "metric" in table.frame for row in table.frame.to_numpy()}
    assert names(shown["eval/fairness/accuracy"][2], 0.25, 2) and shown["loss"][2] == 0.1


def test_runs_that_share_nothing_are_compared(tmp_path: Path, runs: tuple[Run, Run]) -> None:
    new, sick = tiny_run(tmp_path, "new"), tiny_run(tmp_path, "sick")
    for row in ill(lambda row: {"truncation/fairness": 0.9}, 40)[20:]:
        sick.log_metrics(row)
    for a, b in ((runs[0], new), (new, new), (sick, runs[0])):
        found = compare(a, b)
        assert found.metrics.empty and repr(found) and found._repr_html_() and json.dumps(found.rows())
    assert {("a", "truncation")} <= {*found.findings[["run", "rule"]].itertuples(index=False, name=None)}


def test_a_part_that_cannot_be_read_hides_no_other(runs: tuple[Run, Run]) -> None:
    a, b = runs
    (b.path / "events.jsonl").unlink()
    (b.path / "events.jsonl").mkdir()
    (b.path / "dependencies.json").write_text("{")
    found = compare(a.path, str(b.path))
    assert len(found.settings) == 2 and not found.metrics.empty and found.versions.empty
    with pytest.raises(RunError):
        compare(a, b.path / "none")


def test_long_logs_are_read_by_column(runs: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(Run, "rows", lambda *_: pytest.fail("a log was read as a whole"))
    monkeypatch.setattr(run_comparison, "diagnose", lambda *_, **__: [])
    assert len(compare(*runs).metrics) > 30


def test_the_front_door_and_the_command_line_compare(runs: tuple[Run, Run], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (str(run.path) for run in runs)
    assert repr(grpo_nb.compare(a, b)) and cli.main(["compare", a, b]) == 0
    said = capsys.readouterr().out
    assert names(said, "run.seed", "kl/fairness", "threads", 7)
    assert cli.main(["compare", a, b, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["settings"][1] == {"setting": "run.seed", "a": "0", "b": "3"} and answer["a"] == a
    assert cli.main(["compare", a, f"{b}x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
