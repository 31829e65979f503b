"""Metrics as CSV and Parquet hold what the run's own table has."""

import io
import sys
from pathlib import Path

import pandas as pd
import pytest

from grpo_nb import cli
from grpo_nb.report.table_files import table
from grpo_nb.run.run import Run, RunError
from tests.report.test_run_comparison import made
from tests.support.tiny import tiny_run
from tests.support.tokens import pattern


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = made(tmp_path, "a", 7)
    run.log_metrics({"step": 8, "status": "=HYPERLINK(1)", "loss": float("inf"), "reward/fairness/mean": None})
    return run


def test_csv_has_the_numbers_of_the_log(run: Run) -> None:
    read = pd.read_csv(io.BytesIO(table(run, ".csv")))
    expected = run.metrics()
    assert list(read.columns) == list(expected.columns) and list(read["step"]) == list(range(1, 9))
    for name in ("reward/fairness/mean", "loss", "grad/norm"):
        pd.testing.assert_series_equal(read[name], expected[name].astype(float), check_exact=False, rtol=1e-12)
    assert read["status"].iloc[-1] == "'=HYPERLINK(1)"


def test_a_key_of_a_strangers_log_is_no_formula(run: Run) -> None:
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step":9,"=HYPERLINK(1)":1.0,"+cmd":2.0,"@x":3.0}\n')
    head = pd.read_csv(io.BytesIO(table(Run.open(run.path), ".csv"))).columns
    assert {"'=HYPERLINK(1)", "'+cmd", "'@x"} < {*head} and not any(name.startswith(("=", "+", "@")) for name in head)


def test_parquet_has_them_with_their_types(run: Run) -> None:
    pytest.importorskip("pyarrow", reason="the extra `datasets` is not installed")
    read = pd.read_parquet(io.BytesIO(table(run, ".parquet")))
    expected = run.metrics()
    assert list(read.columns) == list(expected.columns)
    assert read["status"].iloc[-1] == "=HYPERLINK(1)" and read["loss"].iloc[-1] == float("inf")
    assert read["reward/fairness/mean"].equals(
        expected["reward/fairness/mean"].astype(read["reward/fairness/mean"].dtype)
    )


def test_without_pyarrow_the_error_says_how_to_get_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=pattern("pyarrow", "grpo_nb[datasets]")):
        table(run, ".parquet")


def test_a_run_without_steps_has_an_empty_table(tmp_path: Path) -> None:
    assert table(tiny_run(tmp_path), ".csv").splitlines() == [b"step"]


def test_the_command_line(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "m.CSV"
    for _ in range(2):
        assert cli.main(["report", str(run.path), "--out", str(out)]) == 0
    assert out.read_bytes() == table(run, ".csv")
    mine = tmp_path / "mine.csv"
    mine.write_text("a,b\n1,2\n")
    assert cli.main(["report", str(run.path), "--out", str(mine)]) == 2 and mine.read_text() == "a,b\n1,2\n"
