"""What is kept of a run gives what a full read gives, costs the same at any length, and does not grow."""

import gc
import math
import statistics
import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from grpo_nb import presets, rules
from grpo_nb.rules import history as module
from grpo_nb.rules.finding import Steps, series, spans
from grpo_nb.rules.history import Curve, Forgotten, History
from tests.support.made_rows import OBJECTIVES, Row, healthy

CONFIG = presets.demo().replace(**{f"objectives.{name}.kl_band": (0.01, 0.05) for name in OBJECTIVES})
KEYS = [key for key in healthy(1)[0] if key not in ("step", "status")]
FALLS = ("reward/fairness/mean", "reward/hallucination/mean", "label/fairness/correct", "kl/fairness", "grad/cosine")


SEEDS = (5, 7)
"""Of runs in which a curve falls."""


def seeds(count: int) -> list[Any]:
    return [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(count) if seed not in SEEDS)]


def made(seed: int, steps: int) -> list[Row]:
    """A run with faults in stretches, falls, holes, skipped updates, and keys that are measured now and then."""
    draw = np.random.default_rng(seed)
    rows = healthy(steps, seed)
    for _ in range(6):
        key, first = str(draw.choice(KEYS)), int(draw.integers(steps))
        value = [None, "NaN", 0.0, math.inf, float(draw.normal(0.5, 1.0))][int(draw.integers(5))]
        for row in rows[first : first + int(draw.choice([1, 3, 30]))]:
            row[key] = value
    for key in FALLS:
        high, low, since, noise = (
            draw.uniform(0.5, 1),
            draw.uniform(-0.5, 0.6),
            draw.integers(steps),
            draw.choice([0, 0.1]),
        )
        over = draw.choice([1, 10, 100])
        for row in rows if draw.random() < 0.6 else []:
            done = min(max((row["step"] - since + 1) / over, 0.0), 1.0)
            row[key] = float(high + (low - high) * done + draw.normal(0, noise))
    if draw.random() < 0.3:
        every = int(draw.choice([2, 7, 30]))
        for row in rows:
            row |= {key: None for key in FALLS if row["step"] % every}
    for row in rows:
        row["status"] = "skipped" if draw.random() < 0.02 else row["status"]
    return [row for row in rows if draw.random() > 0.05]


def shares(row: Row, key: str) -> list[float]:
    """The row's value of a curve; no right answer among the labels of a row is a share of 0."""
    labels = [name for name in row if key.startswith("label/") and name.startswith(key.removesuffix("correct"))]
    return [0.0] if row.get(key) is None and any(row[name] is not None for name in labels) else series([row], key)


def plain_fall(rows: list[Row], key: str) -> tuple[float, float, int] | None:
    """The definition: the best running median, the one of the end, and the first step nearer to the latter."""
    known = [(row["step"], v) for row in rows for v in shares(row, key)]
    steps, values = [step for step, _ in known], [value for _, value in known]
    if len(known) < 8:
        return None
    earlier, now = values[:-5], statistics.median(values[-5:])
    width = min(5, len(earlier))
    best = max(statistics.median(earlier[i : i + width]) for i in range(len(earlier) - width + 1))
    jumps = [abs(b - a) for a, b in pairwise(values)][-module.NOISE_ROWS :]
    if best - now <= 3.5 * (1.4826 * statistics.median(jumps) / math.sqrt(2)):
        return None
    last_high = max(i for i, value in enumerate(values[:-2]) if value >= (best + now) / 2)
    return best, now, steps[min(last_high + 1, len(steps) - 1)]


def plain_around(rows: list[Row], since: int, key: str) -> tuple[list[float], list[float]]:
    before, after = ([row for row in rows if (row["step"] >= since) == late] for late in (False, True))
    return series(before[-module.LOOK_BACK :], key), series(after[: module.LOOK_AHEAD], key)


@pytest.mark.parametrize("seed", seeds(60))
def test_running_figures_are_those_of_all_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOISE_ROWS", 40)
    rows, kept, falls = made(seed, 160), History(CONFIG), 0
    for n, row in enumerate(rows, 1):
        kept.append(row)
        assert kept[-1] is row and kept[-9:] == rows[max(n - 9, 0) : n] and kept[:5] == rows[:n][:5] and len(kept) == n
        assert list(kept.cosines) == series(rows[:n], "grad/cosine")[-20:]
        for name, past in kept.objectives.items():
            kls = series(rows[:n], f"kl/{name}")
            assert (past.kl_count, past.kl_above) == (len(kls), sum(kl > 0.05 for kl in kls))
            assert past.spread.median() == statistics.median(series(rows[:n], f"reward/{name}/std")[-40:] or [0.0])
            for curve, key in ((past.reward, f"reward/{name}/mean"), (past.correct, f"label/{name}/correct")):
                found = curve.fall()
                assert (found and (found.best, found.now, found.since)) == plain_fall(rows[:n], key)
                if found:
                    falls, around = falls + 1, past.around(found.first)
                    wanted = plain_around(rows[:n], found.since, "grad/norm")
                    assert (series(around.before, "grad/norm"), series(around.after, "grad/norm")) == wanted
    assert falls or seed not in SEEDS


def test_what_changed_at_a_fall_is_known_of_a_reward_that_is_measured_now_and_then() -> None:
    kept, rows = History(CONFIG), healthy(900)
    for row in rows:
        row["reward/fairness/mean"] = (0.9 if row["step"] < 500 else 0.1) if row["step"] % 60 == 0 else None
        kept.append(row)
    past = kept.objectives["fairness"]
    found = past.reward.fall()
    assert found is not None and found.since == 540
    around = past.around(found.first)
    assert [row["step"] for row in (*around.before, *around.after)] == [*range(530, 590)]


def test_a_label_that_did_not_occur_before_a_fall_was_at_0() -> None:
    rows = [row | {"reward/fairness/mean": 0.9 if n < 20 else 0.1} for n, row in enumerate(made(0, 40))]
    for row in rows[:20]:
        del row["label/fairness/unparsed"]
    past = History(presets.demo(), rows).objectives["fairness"]
    found = past.reward.fall()
    assert found is not None
    assert series(past.around(found.first).before, "label/fairness/unparsed") == [0.0] * 10


@pytest.mark.parametrize("seed", seeds(20))
def test_the_live_findings_are_those_of_a_full_read(seed: int) -> None:
    rows, kept = made(seed, 120), History(CONFIG)
    for n, row in enumerate(rows, 1):
        kept.append(row)
        live = rules.after_step(kept, CONFIG)
        if live or n % 25 == 0:
            assert [str(f) for f in live] == [str(f) for f in rules.after_step(rows[:n], CONFIG)]
            assert str(rules.before_update(kept, CONFIG)) == str(rules.before_update(rows[:n], CONFIG))
    assert [str(f) for f in rules.check(kept, CONFIG)] == [str(f) for f in rules.check(rows, CONFIG)]
    assert [str(f) for f in rules.post_mortem(iter(rows), CONFIG)] == [str(f) for f in rules.post_mortem(rows, CONFIG)]


def test_a_history_that_was_read_again_reports_only_what_is_new() -> None:
    rows = [row | ({"truncation/fairness": 0.4} if row["step"] > 20 else {}) for row in healthy(60)]
    resumed = History(CONFIG, rows[:50])
    assert [f.rule for f in rules.check(resumed, CONFIG)] == ["truncation", "loss_near_zero"]
    resumed.append(rows[50])
    assert rules.after_step(resumed, CONFIG) == []


def test_a_rule_cannot_look_where_nothing_is_kept() -> None:
    kept = History(CONFIG, healthy(200))
    for look in (lambda: kept[100], lambda: kept[:100], lambda: list(kept), lambda: kept[-50:]):
        with pytest.raises(Forgotten):
            look()
    assert [row["step"] for row in kept[:5]] == [1, 2, 3, 4, 5] and kept[-1]["step"] == 200 and kept[250:] == []


class Counted(dict[str, Any]):
    """A row that counts how often it is looked at."""

    looks = 0

    def __getitem__(self, key: str) -> Any:
        Counted.looks += 1
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        Counted.looks += 1
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        Counted.looks += 1
        return super().__iter__()


def test_a_step_costs_the_same_in_a_long_run_and_what_is_kept_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOISE_ROWS", 100)
    kept, costs, alive = History(CONFIG), {}, {}
    pattern = healthy(40)
    rows: list[weakref.ref[Counted]] = []
    for step in range(1, 1601):
        row = Counted(pattern[step % 40] | {"step": step})
        rows.append(weakref.ref(row))
        kept.append(row)
        del row
        if step % 40 == 0:
            Counted.looks = 0
            rules.check(kept, CONFIG)
            costs[step], alive[step] = Counted.looks, sum(ref() is not None for ref in rows)
    assert costs[1600] <= 1.2 * costs[80], "looks at rows in one step"
    assert alive[1600] <= alive[80] <= 60
    gc.collect()
    past = kept.objectives["fairness"]
    assert len(past._recent) <= 2 * (module.LOOK_BACK + module.LOOK_AHEAD) and len(past.reward._highs) < 60


def test_a_curve_that_only_falls_is_kept_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HIGHS", 50)
    curve = Curve()
    for step in range(1, 1001):
        curve.add(module.Point(1.0 - step / 1000, step, step))
    found = curve.fall()
    assert len(curve._highs) <= 50 and found is not None and abs(found.since - 500) < 1000 / 10
    assert found.best == pytest.approx(1.0, abs=4e-3) and found.now == pytest.approx(0.0, abs=4e-3)


@pytest.mark.parametrize("steps", [[], [1, 2, 3], [1, 1, 2, 5], [4, 2, 9, 9, 3], [0, 3], [7]])
@pytest.mark.parametrize("last", [0, 3, 12])
def test_holes_are_found_without_all_steps_in_memory(steps: list[int], last: int) -> None:
    wanted = sorted({*range(1, last + 1)} - {*steps})
    assert Steps({"step": step} for step in steps).missing(last) == wanted, spans(wanted)
    assert len(Steps({"step": step} for step in range(1, 10_000))._spans) == 1
