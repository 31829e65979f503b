"""Evaluation asks every stage the same questions, with honest intervals and paired differences."""

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_nb import seeding
from grpo_nb.config import SamplingConfig
from grpo_nb.evaluation import evaluate as evaluation
from grpo_nb.evaluation import intervals
from grpo_nb.evaluation.compare import compare_stages, comparison
from grpo_nb.evaluation.evaluate import bootstrap, evaluate, examples_of, restore_policy, stage_checkpoint
from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.rollout import EagerEngine, Request
from grpo_nb.run.run import Run, RunError
from grpo_nb.tasks import DataError
from grpo_nb.types import Example, Rollouts, Score
from tests.support.quiz import Quiz, Scripted
from tests.support.tiny import tiny_config, tiny_run
from tests.support.tokens import names, pattern

pytestmark = pytest.mark.usefixtures("narrow_model")

F, H = "fairness", "hallucination"


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(tiny_config().model, 0)


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "RESAMPLES", 200)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny_run(tmp_path, run__eval_examples=40)


def answer_first(run: Run, right: int) -> Callable[[int], str]:
    """Right answers to the first `right` questions of the pool, wrong ones after."""
    numbers = [e.columns["number"] for e in examples_of(run, F, Quiz())]
    return lambda i: str(numbers[i]) if i < right else "no idea"


def ask(run: Run, policy: Policy, stage: Any, right: int, **more: Any) -> Any:
    """Evaluate with the same scripted answers for both objectives (their pools differ, so only F is looked at)."""
    engine = Scripted(answer_first(run, right))
    frame = evaluate(run, stage=stage, policy=policy, tasks={F: Quiz(), H: Quiz()}, engine=engine, **more)
    return frame[(frame.objective == F) & (frame.metric == "accuracy")].iloc[0]


# The pool


def test_the_pool_is_fixed_by_the_seed_and_a_smaller_one_is_its_head(run: Run, tmp_path: Path) -> None:
    ids = [e.id for e in examples_of(run, F, Quiz())]
    assert len(ids) == 40 == len(set(ids)) and all(i.startswith("test/") for i in ids)
    assert ids == [e.id for e in examples_of(Run.open(run.path), F, Quiz())] != sorted(ids)
    assert [e.id for e in examples_of(run, F, Quiz(), limit=7)] == ids[:7]
    other = tiny_run(tmp_path, "other", run__eval_examples=40, run__seed=1)
    assert ids != [e.id for e in examples_of(other, F, Quiz())]
    assert len(examples_of(run, F, Quiz(3))) == 3


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_below_one_is_refused(run: Run, limit: int) -> None:
    with pytest.raises(ValueError, match=pattern(f"limit={limit}", 1, "run.eval_examples")):
        examples_of(run, F, Quiz(), limit=limit)


def test_an_id_that_comes_twice_is_refused(run: Run) -> None:
    class Twice(Quiz):
        def examples(self, split: Literal["train", "test"]) -> list[Example]:
            return [*super().examples(split), super().examples(split)[3]]

    with pytest.raises(DataError, match=pattern("'quiz'", "'fairness'", 1, "'test/3'")):
        examples_of(run, F, Twice())


def test_a_split_without_examples_is_refused(run: Run) -> None:
    with pytest.raises(DataError, match=pattern("'quiz'", "'fairness'", "test", "split='train'")):
        examples_of(run, F, Quiz(0))


@pytest.mark.parametrize("wrong", [{"split": "dev"}, {"mode": "beam"}])
def test_unknown_words_are_refused_with_the_known_ones(run: Run, wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="needs 'train' or 'test', and 'greedy' or 'sample'"):
        inspect.unwrap(evaluate)(run, **wrong)  # without the test's own check of signatures


def test_an_unknown_stage_is_refused_with_the_known_ones(run: Run) -> None:
    with pytest.raises(ValueError, match=pattern("'best'", "'base'", "'sft'", "'latest'")):
        inspect.unwrap(stage_checkpoint)(run, "best")


# The bootstrap


def mean_of(values: Sequence[float]) -> Callable[[list[int]], dict[str, float]]:
    return lambda rows: {"mean": sum(values[i] for i in rows) / len(rows)}


def test_independent_items_give_the_textbook_interval() -> None:
    values = [float(i % 10 < 3) for i in range(400)]
    draws = bootstrap(mean_of(values), [str(i) for i in range(400)], seed=0)["mean"]
    assert draws.std() == pytest.approx(math.sqrt(0.3 * 0.7 / 400), rel=0.08)
    assert draws.mean() == pytest.approx(0.3, abs=0.003)


def test_items_that_resemble_each_other_count_as_one() -> None:
    values = [float((i // 20) % 2) for i in range(400)]  # 20 clusters of 20 equal items
    draws = bootstrap(mean_of(values), [str(i // 20) for i in range(400)], seed=0)["mean"]
    assert draws.std() == pytest.approx(math.sqrt(0.25 / 20), rel=0.08)


def test_whole_clusters_are_drawn() -> None:
    clusters = ["a", "b", "b", "c", "c", "c"]
    seen: list[list[int]] = []
    bootstrap(lambda rows: seen.append(sorted(rows)) or {"x": 0.0}, clusters, seed=0, count=50)
    for rows in seen:
        counts = [rows.count(i) for i in range(6)]
        assert counts[1] == counts[2] and counts[3] == counts[4] == counts[5]
        assert counts[0] + counts[1] + counts[3] == 3


def test_two_measures_of_one_pool_are_drawn_in_step() -> None:
    noise = np.random.default_rng(0).random(100)
    clusters = [str(i) for i in range(100)]
    one = bootstrap(mean_of(list(noise)), clusters, seed=5)["mean"]
    other = bootstrap(mean_of(list(noise + 0.1)), clusters, seed=5)["mean"]
    assert np.allclose(other - one, 0.1)


@pytest.mark.parametrize(("value", "expected"), [(1.0, (0.7, 1.0)), (0.0, (0.0, 0.3))])
def test_a_perfect_score_on_few_clusters_is_not_certainty(value: float, expected: tuple[float, float]) -> None:
    assert intervals.interval("accuracy", value, np.full(9, value), 10) == pytest.approx(expected)


# Evaluating


def test_a_row_holds_metrics_intervals_and_each_verdict(run: Run, policy: Policy) -> None:
    line = ask(run, policy, "base", right=30)
    assert (line["value"], line["n"], line["stage"], line["split"], line["mode"]) == (
        0.75,
        40,
        "base",
        "test",
        "greedy",
    )
    assert 0.5 < line["low"] < 0.75 < line["high"] < 0.95
    row = next(r for r in run.rows("evaluations") if r["objective"] == F)
    ids = [e.id for e in examples_of(run, F, Quiz())]
    assert list(row["labels"]) == ids and list(row["labels"].values()) == ["correct"] * 30 + ["wrong"] * 10
    assert list(row["values"].values()) == [1.0] * 30 + [0.0] * 10
    assert row["metrics"]["accuracy"]["value"] == 0.75 and row["clusters"] <= 12
    assert len(row["resamples"]["accuracy"]) == 200 and math.isnan(row["metrics"]["never"]["low"])


def test_a_measure_under_a_condition_counts_the_items_it_is_over(run: Run, policy: Policy) -> None:
    class Conditional(Quiz):
        def summary(self, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, float]:
            return {"accuracy": 1.0, "accuracy_low": 1.0}

        def support(self, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, list[bool]]:
            return {"accuracy_low": [e.columns["number"] < 35 for e in examples]}

    tasks = {F: Conditional(), H: Conditional()}
    frame = evaluate(run, stage="base", policy=policy, tasks=tasks, engine=Scripted(str))
    pool = examples_of(run, F, Quiz())
    low = [e.columns["cluster"] for e in pool if e.columns["number"] < 35]
    own = frame[frame.objective == F].set_index("metric")
    assert 0 < len(low) < 35 and own["n"].to_dict() == {"accuracy": 40, "accuracy_low": len(low)}
    assert own["low"]["accuracy"] == pytest.approx(1 - 3 / len({e.columns["cluster"] for e in pool}))
    assert own["low"]["accuracy_low"] == pytest.approx(1 - 3 / len(set(low)))
    table, row = comparison(run), next(r for r in run.rows("evaluations") if r["objective"] == F)
    assert list(table[table.objective == F].n) == [40, len(low)]
    assert list(table[table.objective == F].clusters) == [row["clusters"], len(set(low))] == list(own["clusters"])


@pytest.mark.parametrize("given", [[1.0], {"accuracy": "high"}, {"accuracy": None}, None])
def test_a_summary_without_numbers_is_one_clear_error(run: Run, policy: Policy, given: Any) -> None:
    task = Quiz()
    task.summary = lambda examples, scores: given  # type: ignore[method-assign]
    with pytest.raises(DataError, match=pattern("'quiz'", "summary()", "dict")):
        evaluate(run, stage="base", policy=policy, tasks={F: task, H: Quiz()}, engine=Scripted(str))


def test_a_support_that_does_not_fit_is_one_clear_error(run: Run, policy: Policy) -> None:
    class Short(Quiz):
        def support(self, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, list[bool]]:
            return {"never": [True]}

    with pytest.raises(DataError, match=pattern("'quiz'", "support()", 1, "'never'", 40)):
        evaluate(run, stage="base", policy=policy, tasks={F: Short(), H: Quiz()}, engine=Scripted(str))


def test_the_frame_is_tidy(run: Run, policy: Policy) -> None:
    frame = evaluate(run, stage="base", policy=policy, tasks={F: Quiz(), H: Quiz()}, engine=Scripted(str))
    assert list(frame.columns) == evaluation.COLUMNS
    assert list(zip(frame.objective, frame.metric, strict=True)) == [
        (F, "accuracy"), (F, "never"), (H, "accuracy"), (H, "never"),
    ]  # fmt: skip


def test_modes_differ_in_greed_and_share_their_luck_across_stages(run: Run, policy: Policy) -> None:
    engine = Scripted(str)
    tasks = {F: Quiz(), H: Quiz()}
    evaluate(run, stage="base", policy=policy, tasks=tasks, engine=engine)
    evaluate(run, stage="sft", policy=policy, tasks=tasks, engine=engine, mode="sample")
    evaluate(run, stage="latest", policy=policy, tasks=tasks, engine=engine, mode="sample")
    assert [c.greedy for c in engine.calls] == [True, True, False, False, False, False]
    _, _, sft_f, sft_h, latest_f, latest_h = (c.uniforms for c in engine.calls)
    assert torch.equal(sft_f, latest_f) and torch.equal(sft_h, latest_h) and not torch.equal(sft_f, sft_h)
    assert sft_f.shape == (40, run.config.sampling.max_completion_length) and sft_f.dtype == torch.float64
    trained = torch.rand(sft_f.shape, dtype=torch.float64, generator=seeding.generator(0, 1, "rollout"))
    assert not torch.equal(sft_f, trained)


def test_an_answer_without_a_verdict_stays_without(run: Run, policy: Policy) -> None:
    evaluate(run, stage="base", policy=policy, tasks={F: Quiz(), H: Quiz()}, engine=Scripted(lambda i: "broken"))
    assert set(run.rows("evaluations")[0]["values"].values()) == {None}


def test_a_task_without_a_summary_is_judged_by_its_reward(run: Run, policy: Policy) -> None:
    class Plain:
        name, examples, score = "plain", Quiz().examples, Quiz().score

    frame = evaluate(
        run, stage="base", policy=policy, tasks={F: Plain(), H: Quiz()}, engine=Scripted(answer_first(run, 10))
    )
    assert frame[(frame.objective == F) & (frame.metric == "reward")]["value"].item() == 0.25
    some = evaluate(
        run, stage="base", policy=policy, tasks={F: Plain(), H: Quiz()},
        engine=Scripted(lambda i: "broken" if i < 4 else "no"),
    )  # fmt: skip
    assert some[some.objective == F].set_index("metric")["n"].to_dict() == {"reward": 36, "scored": 40}


def test_the_demo_from_end_to_end_gives_the_same_numbers_twice(run: Run) -> None:
    once = evaluate(run, stage="base", limit=6)
    again = evaluate(run, stage="base", limit=6)
    assert once.equals(again) and set(once.objective) == {F, H} and (once[once.metric == "accuracy"].n == 6).all()
    halves = once[once.metric.isin(("accuracy_ambiguous", "accuracy_disambiguated"))]
    assert halves.n.sum() == 6 and (halves.n > 0).all(), "those of a condition are fewer"
    assert {"accuracy_ambiguous", "bias_ambiguous", "hallucinated_rate"} <= set(once.metric)


# Stages


def shifted(policy: Policy, by: float) -> dict[str, Tensor]:
    return {name: tensor + by for name, tensor in policy.state().items()}


def first_value(policy: Policy) -> float:
    return float(next(iter(policy.state().values())).flatten()[0])


def test_each_stage_restores_its_own_weights(run: Run, policy: Policy) -> None:
    start = first_value(policy)
    run.sft_checkpoints.save(3, {"policy": shifted(policy, 1.0)}, {"step": 3})
    run.checkpoints.save(2, {"policy": shifted(policy, 2.0)}, {"step": 2})
    run.checkpoints.save(4, {"policy": shifted(policy, 4.0)}, {"step": 4})
    for stage, by in (("base", 0.0), ("sft", 1.0), ("latest", 4.0), (2, 2.0)):
        assert first_value(restore_policy(run, stage)) == pytest.approx(start + by), stage  # type: ignore[arg-type]


def test_the_row_names_stage_and_step(run: Run, policy: Policy) -> None:
    run.sft_checkpoints.save(3, {"policy": policy.state()}, {"step": 3})
    run.checkpoints.save(2, {"policy": policy.state()}, {"step": 2})
    named = []
    for stage in ("base", "sft", "latest", 2):
        frame = evaluate(run, stage=stage, limit=2, tasks={F: Quiz(), H: Quiz()}, engine=Scripted(str))  # type: ignore[arg-type]
        named.append((frame.stage[0], int(frame.step[0])))
    assert named == [("base", 0), ("sft", 0), ("latest", 2), ("step 2", 2)]


@pytest.mark.parametrize(("stage", "verb"), [("sft", "SFT"), ("latest", "GRPO")])
def test_a_stage_that_is_not_there_yet_says_what_makes_it(run: Run, stage: Literal["sft", "latest"], verb: str) -> None:
    with pytest.raises(RunError, match=pattern("tiny", verb, "stage='base'")):
        restore_policy(run, stage)


def test_a_run_without_sft_has_the_base_as_its_sft(tmp_path: Path) -> None:
    assert stage_checkpoint(tiny_run(tmp_path, sft__steps=0), "sft") is None


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(
    run: Run, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 4):
        run.checkpoints.save(step, {"policy": policy.state()}, {"step": step})
    (run.path / "checkpoints" / "000004" / "policy.safetensors").write_bytes(b"cut")
    with caplog.at_level(logging.WARNING):
        found = stage_checkpoint(run, "latest")
    assert found is not None and found.step == 2 and names(caplog.text, "000004")


# Comparing


def compared(run: Run) -> Any:
    frame = comparison(run)
    return frame[(frame.objective == F) & (frame.metric == "accuracy")].iloc[0]


def test_a_large_change_is_told_from_none(run: Run, policy: Policy) -> None:
    ask(run, policy, "base", right=5)
    ask(run, policy, "sft", right=20)
    ask(run, policy, "latest", right=38)
    line = compared(run)
    assert (line["base"], line["sft"], line["latest"]) == (0.125, 0.5, 0.95)
    assert line["difference"] == pytest.approx(0.45) and 0 < line["difference_low"] < 0.45 < line["difference_high"]
    assert line["differs"] is True
    ask(run, policy, "latest", right=20)
    same = compared(run)
    assert same["difference"] == 0 and same["differs"] is False
    assert (same["difference_low"], same["difference_high"]) == (-0.25, 0.25), (
        "3 of 12 clusters, of which nothing is seen"
    )


def test_pairing_sees_a_change_that_the_separate_intervals_hide(run: Run, policy: Policy) -> None:
    ask(run, policy, "sft", right=20)
    ask(run, policy, "latest", right=30)
    line = compared(run)
    assert line["sft_high"] > line["latest_low"] and line["differs"] is True


def test_the_newest_evaluation_of_a_stage_counts_and_other_modes_do_not(run: Run, policy: Policy) -> None:
    ask(run, policy, "latest", right=4)
    ask(run, policy, "latest", right=8)
    ask(run, policy, "latest", right=40, mode="sample")
    line = compared(run)
    assert line["latest"] == 0.2 and math.isnan(line["sft"]) and line["differs"] is None
    assert comparison(run, mode="sample")["latest"].iloc[0] == 1.0


def test_different_examples_are_not_subtracted(run: Run, policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    ask(run, policy, "sft", right=20)
    ask(run, policy, "latest", right=20, limit=25)
    with caplog.at_level(logging.WARNING):
        line = compared(run)
    assert math.isnan(line["difference"]) and line["differs"] is None and names(caplog.text, "sft", "latest", 40, 25)


def test_nothing_evaluated_is_an_empty_table(run: Run) -> None:
    assert comparison(run).empty and "differs" in comparison(run).columns


# Any two stages


def changed(run: Run, *stages: Any, **more: Any) -> Any:
    frame = compare_stages(run, *stages, **more)
    return frame[(frame.objective == F) & (frame.metric == "accuracy")].iloc[0]


def test_any_two_stages_are_compared_in_pairs(run: Run, policy: Policy) -> None:
    ask(run, policy, "base", right=20)
    ask(run, policy, 2, right=30)
    run.log_metrics({"step": 4})
    ask(run, policy, "latest", right=10)
    line = changed(run, "base", 2)
    assert (line["before"], line["after"], line["differs"], line["n"]) == (0.5, 0.75, True, 40)
    assert line["difference"] == pytest.approx(0.25) and line["before_high"] > line["after_low"], "pairing decides"
    assert changed(run, 2, 4)["after"] == 0.25 == changed(run, 2, "latest")["after"], "the latest was step 4"
    assert changed(run, 4, "base")["difference"] == pytest.approx(0.25)


def test_a_stage_that_was_not_evaluated_is_named_with_those_that_were(run: Run, policy: Policy) -> None:
    ask(run, policy, "base", right=20)
    with pytest.raises(RunError, match=pattern(2, "test", "greedy", "base")):
        compare_stages(run, "base", 2)
    with pytest.raises(RunError, match=pattern("'base'", "test", "sample", "none")):
        compare_stages(run, "base", "base", mode="sample")


def test_fewer_are_drawn_at_a_time_where_memory_is_full(policy: Policy) -> None:
    examples = [Example(str(i), f"question {i}", None) for i in range(10)]
    asked: list[int | None] = []

    class Crowded(EagerEngine):
        def generate(self, policy: Policy, request: Request) -> Rollouts:
            asked.append(request.rows_at_once)
            if (request.rows_at_once or request.rows) > room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().generate(policy, request)

    room = 10
    expected = evaluation.ask(policy, examples, SamplingConfig(max_completion_length=4), Crowded())
    room = 3
    found = evaluation.ask(policy, examples, SamplingConfig(max_completion_length=4), Crowded())
    assert list(found.completion_ids) == list(expected.completion_ids) and asked == [10, 10, 5, 2]
    room = 0
    with pytest.raises(torch.OutOfMemoryError):
        evaluation.ask(policy, examples, SamplingConfig(max_completion_length=4), Crowded())
