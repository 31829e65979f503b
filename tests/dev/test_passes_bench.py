"""The benchmark of the passes shows each phase of both ways, and leaves the trainer's clock as it was."""

import torch

from grpo_nb.dev import passes_bench
from grpo_nb.dev.bench import PHASES
from grpo_nb.dev.passes_bench import Figures
from grpo_nb.training.metrics import Clock


def test_the_table_has_a_row_a_phase() -> None:
    seconds = dict(zip((*PHASES, "step"), (4.0, 0.5, 1.0, 2.0, 7.5), strict=True))
    drawn = passes_bench.table({"one": Figures(9.0, seconds, {"train": 3.0}), "two": Figures(8.0, seconds, {})})
    assert drawn.row_count == len(PHASES) + 2
    cells = [list(column.cells) for column in drawn.columns]
    assert cells[1][PHASES.index("train")].startswith("2.000") and cells[2][-2] == cells[2][PHASES.index("train")]
    assert not any(cells[4])


def test_peaks_of_phases_are_watched_for_a_while() -> None:
    plain, found = Clock.__call__, dict[str, float]()
    with passes_bench._peaks(torch.device("cpu"), found):
        clock = Clock()
        with clock("train"):
            pass
        assert Clock.__call__ is not plain
    assert Clock.__call__ is plain and set(clock.phases) == {"train"} and not found
