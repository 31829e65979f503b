"""The field report's settings blow up a small model; the defaults survive the same data, seed and learning rate."""

import math
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.fault_lab import Lab, explosion
from grpo_nb.plots import exhibits
from grpo_nb.training.sft import sft
from tests.support.tiny import tiny_run

LOWEST, HIGHEST = 0.01, 10.0
"""Gradient norms of a healthy round."""


@pytest.fixture(scope="module")
def narrow_model() -> None:
    """The demo's own: a narrow one is not blown up within the test's rounds."""


def lab_of(folder: Path, **changes: Any) -> Lab:
    run = tiny_run(folder, sft__batch=64, sft__micro_batch=64, **changes)
    list(sft(run))
    return Lab.of(run, folder / "lab")


def check(courses: dict[str, explosion.Course], rounds: int) -> None:
    ours, reported = courses["defaults"], courses["as reported"]
    assert ours.finite and ours.rounds == rounds
    assert all(LOWEST < norm < HIGHEST for norm in ours.norms if norm), "0: a round without any signal"
    assert not reported.finite and reported.rounds < rounds
    assert reported.rolled_back == []


def test_the_reported_settings_blow_up_and_the_defaults_do_not(tmp_path: Path) -> None:
    courses = explosion.compare(lab_of(tmp_path), rounds=6)
    check(courses, 6)
    table = explosion.table(courses)
    assert list(table.columns) == ["as reported", "defaults"] and len(table) == 6
    assert exhibits.explosion(table)


@pytest.mark.slow
def test_over_three_seeds_and_two_rates(tmp_path: Path) -> None:
    """At the demo's own batch; `RATE` is 83 times its learning rate."""
    lab = lab_of(tmp_path, sft__steps=40, batch__prompts=16, batch__group_size=8, batch__micro_batch=64)
    for seed in range(3):
        for rate in (1e-3, explosion.RATE):
            courses = explosion.compare(lab, seed, rate=rate)
            check(courses, explosion.ROUNDS)
            assert math.isfinite(sum(courses["defaults"].norms))
