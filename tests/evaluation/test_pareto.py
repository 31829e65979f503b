"""The front claims only what the paired intervals carry; best and knee name stages that can be loaded."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_nb.evaluation import compare, dominance
from grpo_nb.evaluation import evaluate as evaluation
from grpo_nb.evaluation.compare import Growing, Measured, logged
from grpo_nb.evaluation.dominance import orient
from grpo_nb.evaluation.evaluate import load_best, load_knee, measured
from grpo_nb.evaluation.pareto import best, knee, pareto, steps_to_keep
from grpo_nb.policy.model import load_policy
from grpo_nb.report import report
from grpo_nb.run.run import Run, RunError
from grpo_nb.types import Example, Score
from tests.support.quiz import Quiz
from tests.support.tiny import tiny_run
from tests.support.tokens import names, pattern

F, H = "fairness", "hallucination"
N = 60


class Biased(Quiz):
    """Also with measures that have another direction, or none."""

    def summary(self, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, float]:
        right = np.mean([s.label == "correct" for s in scores])
        return {"unknown_rate": right, "bias_ambiguous": right - 0.5, "wrong_rate": 1 - right, "accuracy": right}


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "RESAMPLES", 200)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny_run(tmp_path)


def asked(run: Run, stage: str, step: int, right: Mapping[str, int], task: Any = None, mode: str = "quick") -> None:
    """Log an evaluation in which so many of N questions of each objective were answered right, the first ones."""
    task, examples = task or Quiz(N), Quiz(N).examples("test")
    for objective, count in right.items():
        texts = [str(i) if i < count else "no" for i in range(N)]
        where = {"stage": stage, "step": step, "split": "test", "mode": mode}
        run.log_evaluation(where | measured(run, objective, task, examples, texts))


def step(run: Run, number: int, fairness: int, hallucination: int, **more: Any) -> None:
    asked(run, f"step {number}", number, {F: fairness, H: hallucination}, **more)


def saved(run: Run, *steps: int) -> None:
    for number in steps:
        run.checkpoints.save(number, {"policy": {"w": torch.zeros(1)}}, {"step": number})


def front(run: Run) -> list[str]:
    frame = pareto(run)
    return list(frame[frame["front"]]["stage"])


def test_a_stage_that_is_surely_better_in_everything_dominates(run: Run) -> None:
    step(run, 0, 10, 10)
    step(run, 2, 50, 50)
    frame = pareto(run)
    assert list(frame["stage"]) == ["step 0", "step 2"] and list(frame["front"]) == [False, True]
    assert list(frame["dominated_by"]) == ["step 2", ""] and list(frame["n"]) == [N, N]
    assert frame[f"{F}/accuracy"].tolist() == pytest.approx([10 / N, 50 / N])
    assert (frame[f"{F}/accuracy_low"] < frame[f"{F}/accuracy"]).all()


def test_front_is_read_with_its_intervals(run: Run) -> None:
    step(run, 0, 10, 10)
    step(run, 2, 50, 50)
    saved(run, 2)
    table = report.front(pareto(run)).frame
    *measured, place, beaten = list(table)
    assert measured == ["stage", "saved", f"{F}/accuracy", f"{H}/accuracy"]
    assert table["saved"].tolist() == ["no", "yes"] and table[place].tolist() == ["", "knee"]
    assert table[beaten].tolist() == ["step 2", ""]
    assert re.fullmatch(r"0\.\d\d \[0\.\d\d, 0\.\d\d\]", table[f"{F}/accuracy"][0])


def test_one_uncertain_objective_is_enough_to_claim_nothing(run: Run) -> None:
    step(run, 0, 10, 30)
    step(run, 2, 50, 31)  # better in both, but one question is noise
    assert front(run) == ["step 0", "step 2"]


def test_a_stage_equal_in_one_objective_is_not_dominated(run: Run) -> None:
    step(run, 0, 10, 30)
    step(run, 2, 50, 30)
    assert front(run) == ["step 0", "step 2"]


def test_a_trade_leaves_both_on_the_front(run: Run) -> None:
    step(run, 0, 30, 50)
    step(run, 2, 50, 30)
    step(run, 4, 5, 5)
    assert front(run) == ["step 0", "step 2"]
    assert pareto(run)["dominated_by"].tolist() == ["", "", "step 0, step 2"]


def test_pairing_decides_where_separate_intervals_would_not(run: Run) -> None:
    step(run, 0, 20, 20)
    step(run, 2, 40, 40)
    frame = pareto(run)
    assert frame[f"{F}/accuracy_high"][0] > frame[f"{F}/accuracy_low"][1] and front(run) == ["step 2"]


def test_more_is_better_but_for_rates_and_distance_from_no_bias() -> None:
    values = np.array([-0.3, 0.1])
    assert orient("accuracy_ambiguous", values).tolist() == [-0.3, 0.1]
    assert orient("hallucinated_rate", values).tolist() == [0.3, -0.1]
    assert orient("bias_ambiguous", values).tolist() == [-0.3, -0.1]
    with pytest.raises(ValueError, match="unknown_rate"):
        orient("unknown_rate", values)


def test_any_metric_of_an_objective_may_count(run: Run) -> None:
    step(run, 0, 32, 30, task=Biased(N))
    step(run, 2, 58, 30, task=Biased(N))
    saved(run, 0, 2)
    assert best(run, F) == 2 and best(run, F, "bias_ambiguous") == 0 and best(run, F, "wrong_rate") == 2
    assert f"{F}/bias_ambiguous" in pareto(run, {F: "bias_ambiguous"})
    with pytest.raises(ValueError, match=pattern("'bias'", f"'{F}'", f"{F}: unknown_rate, bias_ambiguous, wrong_rate")):
        pareto(run, {F: "bias"})
    with pytest.raises(ValueError, match=pattern("'fair'", "tiny", "fairness, hallucination")):
        best(run, "fair")


def test_the_knee_gives_up_least(run: Run) -> None:
    for number, values in ((0, (5, 50)), (2, (40, 45)), (4, (50, 5))):
        step(run, number, *values)
    saved(run, 0, 2, 4)
    assert (best(run, F), best(run, H), knee(run)) == (4, 0, 2)
    assert pareto(run)["knee"].tolist() == [False, True, False]


def test_of_equal_stages_the_earliest_is_taken(run: Run) -> None:
    for number in (2, 4):
        step(run, number, 30, 30)
    saved(run, 2, 4)
    assert best(run, F) == 2 and knee(run) == 2


def test_only_what_can_be_loaded_is_named(run: Run) -> None:
    step(run, 2, 20, 20)
    step(run, 4, 50, 50)
    with pytest.raises(RunError, match=pattern("step 2", "step 4")):
        best(run, F)
    saved(run, 2)
    assert best(run, F) == knee(run) == 2 and pareto(run)["saved"].tolist() == [True, False]


def test_a_stage_without_a_rival_is_said_to_be_one(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    step(run, 2, 30, 30)
    saved(run, 2)
    for ask in (lambda: best(run, F), lambda: knee(run)):
        caplog.clear()
        assert ask() == 2 and names(caplog.text, "step 2")
    (alone,) = report.front(pareto(run)).frame.iloc[:, -2]
    assert alone not in ("", "yes", "knee")
    step(run, 4, 30, 30)
    saved(run, 4)
    caplog.clear()
    assert knee(run) == 2 and caplog.text == ""
    assert report.front(pareto(run)).frame.iloc[:, -2].tolist() == ["knee", "yes"]


def test_nothing_evaluated_is_an_empty_frame_and_no_best(run: Run) -> None:
    assert pareto(run).empty and "front" in pareto(run) and steps_to_keep(run, []) == ()
    for ask in (lambda: best(run, F), lambda: knee(run)):
        with pytest.raises(RunError, match=r"set run\.quick_eval_every"):
            ask()


def test_without_quick_rows_the_greedy_ones_count_and_the_latest_is_a_step(run: Run) -> None:
    asked(run, "base", 0, {F: 5, H: 5}, mode="greedy")
    asked(run, "latest", 2, {F: 20, H: 20}, mode="greedy")
    asked(run, "latest", 4, {F: 50, H: 50}, mode="greedy")
    saved(run, 2, 4)
    assert pareto(run)["stage"].tolist() == ["base", "step 2", "step 4"] and best(run, F) == 4
    step(run, 2, 30, 30)
    assert pareto(run)["stage"].tolist() == ["step 2"] and pareto(run, mode="greedy")["step"].tolist() == [0, 2, 4]


def test_other_questions_are_not_compared(run: Run) -> None:
    where = {"stage": "step 2", "step": 2, "split": "test", "mode": "quick"}
    for objective in (F, H):
        few = Quiz(N).examples("test")[:7]
        run.log_evaluation(where | measured(run, objective, Quiz(N), few, ["no"] * 7))
    step(run, 4, 30, 30)
    assert pareto(run)["stage"].tolist() == ["step 4"]


def test_the_best_and_the_knee_are_worth_keeping(run: Run) -> None:
    for number, values in ((0, (20, 20)), (2, (5, 50)), (4, (40, 45)), (6, (50, 5)), (8, (10, 10))):
        step(run, number, *values)
    saved(run, 0, 2, 4, 6, 8)
    quick = Growing(run, "test", "quick")
    assert steps_to_keep(run, quick.rows()) == (2, 4, 6)
    quick.slim([2, 4, 6])
    asked(run, "step 8", 8, {F: N, H: N}, mode="greedy")
    assert steps_to_keep(run, quick.rows()) == (2, 4, 6), "only quick evaluations count"


def test_rows_that_grow_are_parsed_once_and_say_what_the_log_says(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, parsed = Growing(run, "test", "quick"), []
    honest = compare.comparable
    monkeypatch.setattr(compare, "comparable", lambda row: parsed.append(row["step"]) or honest(row))
    for number in range(4):
        step(run, number, 10 + number, 20)
        asked(run, "latest", number, {F: 5}, mode="greedy")
        with (run.path / "evaluations.jsonl").open("a") as log:
            log.write("no row\n")
        assert [row["step"] for row in quick.rows()[-2:]] == [number, number]
        quick.slim([0, number])
    assert parsed == [n for n in range(4) for _ in range(3)], "each row once, however many there are"
    plain = [json.dumps(dict(row)) for row in logged(run, "test", "quick")]  # text, since NaN is not NaN
    held = [isinstance(row, Measured) for row in quick.rows()]
    assert held == [False, False, True, True, True, True, False, False], "of steps 1 and 2 nothing large is held"
    assert [json.dumps(dict(row)) for row in quick.rows()] == plain and '"resamples"' in plain[2]


def test_one_call_loads_the_best_and_one_the_knee(run: Run) -> None:
    policy = load_policy(run.config.model, 0)
    for number, right in ((2, 50), (4, 10), (6, 31)):
        state = {name: tensor + number for name, tensor in policy.state().items()}
        run.checkpoints.save(number, {"policy": state}, {"step": number})
        step(run, number, right, 60 - right)
    name = next(iter(policy.state()))
    for objective, number in ((F, 2), (H, 4)):
        loaded = load_best(run, objective).state()[name]
        assert torch.allclose(loaded, policy.state()[name] + number)
    assert torch.allclose(load_knee(run).state()[name], policy.state()[name] + 6)


# All pairs at once


def made(draw: np.random.Generator, metric: str, resamples: int) -> dict[str, Any]:
    """A row of an evaluation whose draws are noise, constant, or nearly those of others."""
    value = float(np.round(draw.choice([0.0, 0.5, 0.50001, 0.7, 1.0, draw.uniform(0, 1)]), 5))
    shared = np.random.default_rng(0).normal(0, 0.05, resamples)
    kind = str(draw.choice(["noise", "constant", "shared", "close"]))
    noise = {"noise": draw.normal(0, 0.1, resamples), "constant": np.zeros(resamples), "shared": shared}
    drawn = value + noise.get(kind, shared + draw.normal(0, 1e-4, resamples))
    if metric == "accuracy_answerable" and draw.random() < 0.2:
        drawn[0] = np.nan
    numbers = {"value": value, "clusters": int(draw.choice([3, 5, 40])), "effective": float(draw.choice([3.7, 20.0]))}
    return {"metrics": {metric: numbers}, "resamples": {metric: np.round(drawn, 5).tolist()}}


METRICS = ["accuracy", "reward", "bias_ambiguous", "wrong_rate", "accuracy_answerable"]


@pytest.mark.parametrize("metric", METRICS)
def test_many_at_once_are_what_the_definition_says_of_each_pair(metric: str) -> None:
    draw = np.random.default_rng(7)
    rows = [made(draw, metric, 50) for _ in range(45)]
    comparison, every = dominance.Comparison(rows, metric), np.arange(45)
    found = np.stack([comparison.better(every, before) for before in range(45)], axis=1)
    wanted = [[dominance.least_gain(before, after, metric) > 0 for before in rows] for after in rows]
    assert found.tolist() == wanted and 0 < found.sum() < found.size


@pytest.mark.parametrize("count", [1, 2, 60])
@pytest.mark.parametrize("pair", [(m, n) for m in METRICS for n in METRICS if m <= n])
def test_the_front_is_what_the_definition_says(pair: tuple[str, str], count: int) -> None:
    draw = np.random.default_rng(count)
    rows = {k: [made(draw, metric, 50) for _ in range(count)] for k, metric in enumerate(pair)}

    def dominates(after: int, before: int) -> bool:
        return all(dominance.least_gain(rows[k][before], rows[k][after], metric) > 0 for k, metric in enumerate(pair))

    found = dominance.dominators([dominance.Comparison(rows[k], metric) for k, metric in enumerate(pair)])
    for place, over in enumerate(found):
        wanted = [other for other in range(count) if dominates(other, place)]
        assert set(over) <= set(wanted) and bool(over) == bool(wanted) and len(over) <= dominance.MOST_NAMED
        best = [other for other in wanted if not found[other]]
        assert not best or set(over) <= set(best), "rows of the front are named"


def rising(draw: np.random.Generator, value: float, noise: float) -> dict[str, Any]:
    drawn = (value + noise * draw.normal(0, 1, 60)).tolist()
    return {"metrics": {"accuracy": {"value": value, "clusters": 40}}, "resamples": {"accuracy": drawn}}


def test_comparisons_grow_with_the_stages_and_not_with_their_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    compared, better = [0], dominance.Comparison.better

    def counting(self: dominance.Comparison, after: Any, before: int) -> Any:
        compared[0] += len(after)
        return better(self, after, before)

    monkeypatch.setattr(dominance.Comparison, "better", counting)
    monkeypatch.setattr(dominance, "least_gain", lambda *given: asked.append(1) or 0.0)
    costs = []
    for count in (100, 1000):
        draw = np.random.default_rng(0)
        rows = [[rising(draw, n / 1000, 0.004) for n in range(count)] for _ in range(2)]
        compared[0] = 0
        found = dominance.dominators([dominance.Comparison(own, "accuracy") for own in rows])
        costs.append(compared[0] / count)
        assert sum(map(bool, found)) > 0.7 * count
    assert costs[1] < 1.5 * costs[0] < 200 and len(asked) < 20
