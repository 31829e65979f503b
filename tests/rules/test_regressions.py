"""A policy that gets worse is found, whatever the shape of the fall; a healthy one is not, whatever its noise."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from grpo_nb import presets, rules
from grpo_nb.rules import regressions
from grpo_nb.rules.finding import Finding
from grpo_nb.tasks import told
from grpo_nb.training import metrics
from grpo_nb.types import Example, Score
from tests.support.made_rows import Row, healthy
from tests.support.quiz import Quiz

CONFIG = presets.demo()
F, H = "fairness", "hallucination"
NEW = {"collapse", "hedging", "accuracy_fell"}
Curve = Callable[[int], float]


def rows_of(steps: int, noise: float = 0.0, seed: int = 0, **curves: Curve) -> list[Row]:
    """The healthy run with curves of its own, `kl__fairness=...` for kl/fairness, and noise about each."""
    random = np.random.default_rng(seed)
    keys = {name: name.replace("__", "/") for name in curves}
    return [
        row | {keys[name]: float(curve(row["step"]) + random.normal(0, noise)) for name, curve in curves.items()}
        for row in healthy(steps, seed)
    ]


def found(rows: list[Row]) -> dict[tuple[str, str], Finding]:
    findings = rules.post_mortem(rows, CONFIG)
    return {f.key: f for f in findings if f.rule in NEW}


def falling(high: float, low: float, since: int, steps: int = 1) -> Curve:
    """`high`, then down to `low` over so many steps from `since` on."""
    return lambda step: high + (low - high) * min(max((step - since + 1) / steps, 0.0), 1.0)


# Reward and accuracy


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.08])
@pytest.mark.parametrize(
    ("steps", "since", "over"), [(15, 9, 1), (60, 40, 1), (60, 30, 20), (60, 56, 1), (200, 50, 100), (400, 380, 5)]
)
def test_a_fall_of_reward_and_accuracy_is_found_with_its_beginning(
    steps: int, since: int, over: int, noise: float
) -> None:
    curve = falling(0.87, 0.1, since, over)
    rows = rows_of(steps, noise, reward__fairness__mean=curve, label__fairness__correct=falling(0.9, 0.05, since, over))
    (finding,) = found(rows).values()
    assert finding.key == ("collapse", F) and finding.severity == "error"
    assert set(finding.evidence["fell"]) == {"reward", "correct"}
    assert since <= finding.evidence["since"] <= since + over
    if over > 1:
        assert finding.evidence["since"] >= since + over // 4, "the middle of a slow fall"


@pytest.mark.parametrize("key", ["reward__fairness__mean", "label__fairness__correct"])
def test_one_of_the_two_is_enough(key: str) -> None:
    ((name, finding),) = found(rows_of(60, 0.03, **{key: falling(0.8, 0.4, 40)})).items()
    assert name == ("collapse", F) and len(finding.evidence["fell"]) == 1


def test_both_objectives_have_their_own() -> None:
    rows = rows_of(
        60, 0.02, reward__fairness__mean=falling(0.8, 0.2, 40), reward__hallucination__mean=falling(0.8, 0.3, 20)
    )
    since = {f.evidence["objective"]: f.evidence["since"] for f in found(rows).values()}
    assert since == {F: 40, H: 20}


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e-3])
@pytest.mark.parametrize("offset", [0.0, -1.0])
def test_rewards_of_any_scale(scale: float, offset: float) -> None:
    def curves(*levels: float) -> list[Row]:
        high, low = ((level + offset) * scale for level in levels)
        rows = rows_of(60, 0.03 * scale, reward__fairness__mean=falling(high, low, 40))
        return [row | {f"reward/{F}/std": 0.3 * scale} for row in rows]

    assert ("collapse", F) in found(curves(0.8, 0.1))
    assert found(curves(0.8, 0.78)) == {}


def test_what_turned_then_is_named() -> None:
    rows = rows_of(60, 0.02, reward__fairness__mean=falling(0.8, 0.1, 40))
    turns = {f"kl/{F}": 0.9, f"entropy/{F}": 2.0, f"length/{F}/mean": 40.0, "lr": 3e-3}
    rows = [row | (turns if row["step"] >= 40 else {}) for row in rows]
    turned = found(rows)["collapse", F].evidence["turned"]
    assert turned["lr"] == [3e-4, 3e-3] and set(turned) == set(turns)
    assert (
        set(found(rows_of(60, 0.02, reward__fairness__mean=falling(0.8, 0.1, 40)))["collapse", F].evidence["turned"])
        == set()
    )


def test_rewards_that_are_missing_or_nan_are_no_fall() -> None:
    gaps = rows_of(60, 0.02, reward__fairness__mean=falling(0.8, 0.1, 40))
    for row in gaps[::3]:
        row[f"reward/{F}/mean"] = "NaN"
    assert ("collapse", F) in found(gaps)
    dead = [row | ({f"reward/{F}/mean": None} if row["step"] > 40 else {}) for row in healthy(60)]
    assert found(dead) == {}
    bare = [{"step": row["step"], f"reward/{F}/mean": 0.8 if row["step"] < 30 else 0.1} for row in dead]
    assert list(found(bare)) == [("collapse", F)], "all that a log of another version may have"


def test_two_bad_batches_and_a_fall_that_was_made_good_are_none() -> None:
    dip: Curve = lambda step: 0.1 if step in (57, 58) else 0.8  # noqa: E731
    assert found(rows_of(60, 0.03, reward__fairness__mean=dip, label__fairness__correct=dip)) == {}
    back: Curve = lambda step: 0.1 if 20 <= step < 35 else 0.8  # noqa: E731
    assert found(rows_of(60, 0.03, reward__fairness__mean=back, label__fairness__correct=back)) == {}


@pytest.mark.parametrize("steps", [3, 8, 15, 60, 200])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])
def test_a_healthy_run_has_none_of_them(steps: int, noise: float) -> None:
    for seed in range(8):
        rising: Curve = lambda step: 0.4 + 0.4 * step / steps  # noqa: E731
        flat: Curve = lambda step: 0.5  # noqa: E731
        gone: Curve = lambda step: max(0.0, 0.2 - 0.2 * step / steps)  # noqa: E731
        rows = rows_of(
            steps, noise, seed, reward__fairness__mean=rising, label__fairness__correct=rising,
            reward__hallucination__mean=flat, label__hallucination__correct=flat,
        )  # fmt: skip
        rows = [row | {f"label/{F}/unknown": gone(row["step"])} for row in rows]
        assert found(rows) == {}, (steps, noise, seed)


def test_the_live_view_has_it_as_the_log_has() -> None:
    rows = rows_of(60, 0.02, reward__fairness__mean=falling(0.8, 0.1, 40))
    news = [n for n in range(1, 61) if any(f.rule == "collapse" for f in rules.after_step(rows[:n], CONFIG))]
    assert news == [42], "when three of the newest five rows are low, and once"


# Hedging


def hedged(label: str, share: Curve, correct: Curve, objective: str = F, group: str = "label", steps: int = 60) -> Any:
    rows = []
    for row in healthy(steps):
        right, hedge = correct(row["step"]), share(row["step"])
        own = {"correct": right, label: hedge, "wrong": max(0.0, 1 - right - hedge)}
        rows.append(row | {f"{group}/{objective}/{name}": value for name, value in own.items()})
    return found(rows).get(("hedging", objective))


@pytest.mark.parametrize("dead", [1.0, 0.6])
def test_unknown_to_everything_is_found_and_no_temperature_advised(dead: float) -> None:
    change = {
        f"frac_reward_zero_std/{F}": dead,
        f"label/{F}/correct": 0.5,
        f"label/{F}/unknown": 0.45,
        f"label/{F}/wrong": 0.05,
    }
    rows = [row | (change | {f"reward/{F}/mean": 0.65} if row["step"] >= 45 else {}) for row in healthy(60)]
    findings = {f.rule: f for f in rules.post_mortem(rows, CONFIG)}
    assert findings["hedging"].evidence["always"] and findings["hedging"].severity == "error"
    assert ("dead_groups" in findings) == (dead == 1.0)
    assert not any("sampling.temperature" in findings[r].advice for r in ("hedging", "dead_groups") if r in findings)


@pytest.mark.parametrize("since", [1, 45])
def test_abstaining_from_everything_is_found(since: int) -> None:
    finding = hedged("abstained", falling(0.0, 1.0, since), falling(0.8, 0.0, since), H)
    assert finding.evidence["always"] and finding.evidence["share"] == 1.0
    assert finding.evidence["share_start"] == pytest.approx(1.0 if since == 1 else 0.0)


@pytest.mark.parametrize(
    ("label", "group", "hedge", "right"),
    [
        ("unknown", "label_answerable", 0.26, (0.5, 0.32)),  # SmolLM2-135M on BBQ, where the text tells
        ("abstained", "label", 0.26, (0.18, 0.15)),  # and on HaluEval
        ("unknown", "label", 0.13, (0.56, 0.65)),  # the first without the share by condition
    ],
)
@pytest.mark.parametrize("over", [1, 30])
def test_moving_towards_hedges_is_found(
    label: str, group: str, hedge: float, right: tuple[float, float], over: int
) -> None:
    finding = hedged(label, falling(0.0, hedge, 20, over), falling(*right, 20, over), group=group, steps=60)
    assert finding.severity == "warning" and not finding.evidence["always"]
    assert finding.evidence["share"] == pytest.approx(hedge) and finding.evidence["of"] == (
        "told" if group != "label" else "all"
    )


@pytest.mark.parametrize(
    ("hedge", "right"),
    [
        ((0.0, 0.0), (0.5, 0.9)),
        ((0.4, 0.05), (0.4, 0.9)),  # a model that hedged learns to answer
        ((0.02, 0.08), (0.5, 0.9)),
        ((0.0, 0.2), (0.3, 0.75)),  # right answers rise by more
        ((0.25, 0.25), (0.6, 0.6)),  # hedges that are no more than before, and not all that is left
    ],
)
@pytest.mark.parametrize("group", ["label", "label_answerable"])
def test_hedges_that_are_no_trouble(hedge: tuple[float, float], right: tuple[float, float], group: str) -> None:
    assert hedged("unknown", falling(*hedge, 10, 40), falling(*right, 10, 40), group=group) is None


# Held-out accuracy


def evaluated(stage: str, step: int = 0, mode: str = "greedy", **values: float) -> Row:
    return {
        "stage": stage, "step": step, "split": "test", "mode": mode, "objective": F, "pool": "p", "n": 100,
        "metrics": {name: {"value": value} for name, value in values.items()},
    }  # fmt: skip


@pytest.mark.parametrize(("stages", "mode"), [(("sft", "latest"), "greedy"), (("step 0", "step 40"), "quick")])
def test_a_condition_that_fell_while_the_reward_rose_is_found(stages: tuple[str, str], mode: str) -> None:
    before = {"accuracy": 0.56, "accuracy_ambiguous": 0.62, "accuracy_disambiguated": 0.5}
    after = {"accuracy": 0.65, "accuracy_ambiguous": 0.98, "accuracy_disambiguated": 0.32}
    evaluations = [
        evaluated(stages[0], 0, mode, **before, unknown_rate_disambiguated=0.0),
        evaluated(stages[1], 40, mode, **after, unknown_rate_disambiguated=0.26),
    ]
    finding = regressions.accuracy_fell(healthy(60), CONFIG, F, evaluations)
    assert finding is not None and finding.step == 40
    assert finding.evidence["metric"] == "accuracy_disambiguated" and finding.evidence["accuracy"] == [0.5, 0.32]
    assert finding.evidence["hedges"] == {"unknown_rate_disambiguated": [0.0, 0.26]}
    assert "sft.steps" in finding.advice
    assert regressions.accuracy_fell([], CONFIG, F, evaluations) is not None


def with_draws(row: Row, deviation: float) -> Row:
    metric, clusters = "accuracy_disambiguated", 10
    draws = np.random.default_rng(0 if row["step"] else 1).normal(row["metrics"][metric]["value"], deviation, 200)
    row["metrics"][metric] |= {"clusters": clusters}
    return row | {"resamples": {metric: draws.tolist()}}


@pytest.mark.parametrize(
    ("fall", "deviation", "fires"), [(0.18, 0.02, True), (0.18, 0.15, False), (0.02, 0.001, False)]
)
def test_the_paired_interval_decides_where_there_is_one(fall: float, deviation: float, fires: bool) -> None:
    rows = [
        with_draws(evaluated("sft", 0, accuracy_disambiguated=0.5), deviation),
        with_draws(evaluated("latest", 40, accuracy_disambiguated=0.5 - fall), deviation),
    ]
    assert (regressions.accuracy_fell(healthy(60), CONFIG, F, rows) is not None) == fires


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [evaluated("sft", accuracy=0.9)],
        [evaluated("sft", accuracy=0.5), evaluated("latest", 9, accuracy=0.8)],
        [evaluated("sft", accuracy=0.5), evaluated("latest", 9, accuracy=0.45)],
        [evaluated("sft", accuracy=0.9), evaluated("latest", 9, accuracy=0.2) | {"pool": "other"}],
        [evaluated("sft", accuracy=0.9), evaluated("latest", 9, accuracy=math.nan)],
        [evaluated("sft", reward=0.9), evaluated("latest", 9, reward=0.2)],
    ],
)
def test_evaluations_that_say_nothing_of_a_fall(rows: list[Row]) -> None:
    assert regressions.accuracy_fell(healthy(60), CONFIG, F, rows) is None


# Label shares by condition


@pytest.mark.parametrize(
    ("columns", "expected"),
    [({"condition": "disambig"}, True), ({"condition": "ambig"}, False), ({"answerable": False}, False), ({}, None)],
)
def test_whether_the_text_answers_is_read_off_the_columns(columns: Row, expected: bool | None) -> None:
    assert told(Quiz(), Example(id="a", prompt="?", columns=columns)) is expected


def test_a_task_may_say_itself_whether_the_text_answers() -> None:
    task = Quiz()
    task.told = lambda example: example.columns["number"] > 3  # type: ignore[attr-defined]
    assert [told(task, e) for e in task.examples("test")[3:5]] == [False, True]


def test_label_shares_are_counted_by_condition() -> None:
    scores = [Score(0.3, "unknown"), Score(1.0, "correct"), Score(None, "undecided"), Score(1.0, "correct"), Score(1.0)]
    row = metrics.condition_row(F, scores, [True, True, True, False, None])
    third = pytest.approx(1 / 3)
    assert row == {
        f"label_answerable/{F}/correct": third,
        f"label_answerable/{F}/undecided": third,
        f"label_answerable/{F}/unknown": third,
        f"label_unanswerable/{F}/correct": 1.0,
    }
