"""Every picture opens with any numbers that a log may hold: whoever sent the run, its dashboard shows."""

import random
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from grpo_nb import plots, presets
from grpo_nb.plots import to_png
from tests.support.hostile import FINITE, NOT_FINITE, all_keys
from tests.support.made_rows import Row, healthy

CONFIG = presets.demo()
PAGES: tuple[Callable[..., Any], ...] = (plots.dashboard, plots.rewards, plots.machinery)


def drawn(page: Callable[..., Any], rows: list[Row]) -> None:
    assert to_png(page(pd.DataFrame(rows), CONFIG)).startswith(b"\x89PNG")


@pytest.mark.slow  # those of several rows are quick, and see most
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("value", (*FINITE, *NOT_FINITE))
def test_a_page_opens_with_one_number_in_every_key(page: Callable[..., Any], value: float) -> None:
    drawn(page, [row | dict.fromkeys(all_keys(), value) for row in healthy(3)])


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("steps", [6, 45, 2100])
def test_a_page_opens_with_such_numbers_in_some_rows(page: Callable[..., Any], steps: int) -> None:
    draw, names = random.Random(steps), all_keys()
    rows = healthy(steps)
    for row in rows[1::3]:
        row |= {name: draw.choice((*FINITE, *NOT_FINITE)) for name in names}
    drawn(page, rows)


@pytest.mark.parametrize("values", [(1e308, -1e308), (5e-324, 1.7e308), (2, -1)])
def test_the_sft_page_opens_with_such_numbers(values: tuple[float, float]) -> None:
    rows = [{"step": step, "loss": values[step % 2], "lr": values[step % 2]} for step in range(1, 40)]
    assert to_png(plots.sft(pd.DataFrame(rows))).startswith(b"\x89PNG")
