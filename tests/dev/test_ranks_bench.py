"""The bench of several ranks: its figures are medians, and weak scaling compares tokens a second for each rank."""

import json
from pathlib import Path

import pytest

from grpo_nb.dev import ranks_bench
from grpo_nb.metrics import keys


def rows(seconds: float) -> list[ranks_bench.Figures]:
    every = {keys.TOKENS: 100, keys.MEMORY_PEAK: 2048.0, keys.TIME.of("rollout"): seconds / 2}
    every |= {keys.MEMORY_RANK.of("1"): 1024.0}
    return [{**every, "seconds": seconds * factor} for factor in (1, 1, 9)]


def test_weak_scaling_is_tokens_a_second_for_each_rank() -> None:
    one = ranks_bench.figures(rows(1.0), 1)
    two = ranks_bench.figures([{**row, keys.TOKENS: 200} for row in rows(1.25)], 2)
    assert (one["step_s"], one["tokens_per_s"], two["tokens_per_s"]) == (1.0, 100.0, 160.0)
    cells = [list(column.cells) for column in ranks_bench.table(two, one).columns]
    assert cells[2][-1] == "80.0%"


def test_it_measures_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "one.json"
    given = ["--size", "tiny", "--steps", "1", "--warm-up", "1", "--prompts", "2", "--json", str(file)]
    assert ranks_bench.main(given) == 0
    found = json.loads(file.read_text())
    assert found["ranks"] == 1 and found["tokens"] > 0 and len(found["peak_mib"]) == 1
