"""Quick evaluation changes no bit of training, asks held-out questions, and is in the log once, whatever happens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from grpo_nb.beta_control import BetaState
from grpo_nb.evaluation import evaluate as evaluation
from grpo_nb.evaluation.compare import compare_stages
from grpo_nb.evaluation.evaluate import examples_of
from grpo_nb.evaluation.pareto import best, pareto
from grpo_nb.policy.model import Policy
from grpo_nb.rewards.foreign_code import RewardError
from grpo_nb.rewards.rubric import Rubric
from grpo_nb.rollout import EagerEngine, Request
from grpo_nb.run.run import Run
from grpo_nb.tasks import Task
from grpo_nb.training import quick_eval
from grpo_nb.training.grpo import grpo as product_grpo
from grpo_nb.training.objectives import Objective
from grpo_nb.types import Example, Rollouts, Score, StepStats
from tests.support.quiz import Quiz
from tests.support.tiny import REWARDS, rows, small_tasks, tiny_run, weights
from tests.support.tokens import names, pattern

F, H = "fairness", "hallucination"
ON = {"run__quick_eval_every": 2, "run__quick_eval_examples": 5}


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "RESAMPLES", 50)


def grpo(run: Run, **options: Any) -> Iterator[StepStats]:
    return product_grpo(run, **{"rewards": REWARDS, "tasks": small_tasks()} | options)


def own(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key.startswith("eval/")}


def logged(run: Run) -> list[tuple[int, str]]:
    return [(row["step"], row["objective"]) for row in run.rows("evaluations")]


def objective(run: Run, task: Task) -> Objective:
    beta = BetaState(value=0.1, mode="manual")
    return Objective(F, run.config.objectives[F], Rubric(task), task.examples("train"), beta)


# Training


def test_training_has_the_same_bits_with_and_without(tmp_path: Path) -> None:
    plain, watched = tiny_run(tmp_path, "plain"), tiny_run(tmp_path, "watched", **ON)
    expected, found = rows(list(grpo(plain))), rows(list(grpo(watched)))
    assert [row for row in found if own(row)] == [found[1], found[3]]
    assert [{k: v for k, v in row.items() if k not in own(row)} for row in found] == expected
    before, after = weights(plain), weights(watched)
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


def test_each_measure_is_a_row_of_the_evaluations_and_its_values_are_in_the_metrics(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **ON)
    steps = list(grpo(run))
    assert logged(run) == [(step, name) for step in (0, 2, 4) for name in (F, H)]
    for row in run.rows("evaluations"):
        assert (row["stage"], row["mode"], row["split"], row["n"]) == (f"step {row['step']}", "quick", "test", 5)
    row = run.rows("evaluations")[-1]
    values = {f"eval/{H}/{name}": m["value"] for name, m in row["metrics"].items() if m["value"] == m["value"]}
    assert values and values.items() <= steps[3].metrics.items()
    assert steps[3]["time/eval"] > 0 and "time/eval" not in steps[2].metrics  # type: ignore[operator]


def test_the_first_answers_are_logged_with_their_tokens(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **ON)
    list(grpo(run))
    found: dict[Any, list[Any]] = {}
    for row in run.rows("evaluations"):
        assert len(row["answers"]) == quick_eval.ANSWERS_LOGGED < row["n"]
        for answer in row["answers"]:
            found.setdefault((row["objective"], answer["example"]), []).append(row["step"])
            assert (answer["label"], answer["reward"]) == tuple(row[k][answer["example"]] for k in ("labels", "values"))
            assert len(answer["token_texts"]) == len(answer["logprobs_old"]) == answer["tokens"]
            assert max(answer["logprobs_old"]) <= 0 and answer["prompt"]
    assert len(found) == 2 * quick_eval.ANSWERS_LOGGED and all(steps == [0, 2, 4] for steps in found.values())


def test_what_is_measured_is_the_policy_after_the_step(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **ON)
    list(grpo(run))
    task = small_tasks()[F]
    examples = quick_eval.pool(run, objective(run, task))
    policy = evaluation.restore_policy(run, 4)
    texts = evaluation.ask(policy, examples, run.config.sampling, EagerEngine()).texts
    (row,) = [r for r in run.rows("evaluations") if (r["step"], r["objective"]) == (4, F)]
    again = evaluation.measured(run, F, task, examples, texts)
    assert [row[key] for key in ("pool", "labels", "values")] == [again[key] for key in ("pool", "labels", "values")]


def test_the_pool_is_ordered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ordered: list[str] = []
    honest = quick_eval.pool
    monkeypatch.setattr(quick_eval, "pool", lambda run, of: ordered.append(of.name) or honest(run, of))
    list(grpo(tiny_run(tmp_path, **ON)))
    assert ordered == [F, H]


def test_any_two_steps_are_compared_in_pairs(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **ON)
    list(grpo(run))
    frame = compare_stages(run, 0, 4, mode="quick")
    assert set(frame["objective"]) == {F, H} and frame["difference"].notna().any()
    assert pareto(run)["stage"].tolist() == ["step 0", "step 2", "step 4"]


# Once only


def test_rows_past_the_checkpoint_are_moved_aside_and_measured_again_to_the_same_numbers(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **ON)
    list(grpo(run))
    before = json.dumps(run.rows("evaluations"))  # text, since NaN is not NaN
    newest, _ = run.checkpoints.latest()
    assert newest is not None and newest.step == 4
    next(iter(newest.path.glob("policy*"))).write_bytes(b"torn")
    list(grpo(run))
    assert json.dumps(Run.open(run.path).rows("evaluations")) == before
    assert (run.path / "evaluations.discarded.jsonl").read_text().count("\n") == 2


def test_a_start_that_was_killed_between_two_rows_measures_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, honest, write = tiny_run(tmp_path, **ON), quick_eval.ask, Run.log_evaluation
    asked: list[int] = []

    def killed(self: Run, row: Any) -> None:
        if row["objective"] == H:
            raise KeyboardInterrupt
        write(self, row)

    monkeypatch.setattr(quick_eval, "ask", lambda *given, **named: asked.append(1) or honest(*given, **named))
    monkeypatch.setattr(Run, "log_evaluation", killed)
    with pytest.raises(KeyboardInterrupt):
        next(grpo(run))
    assert logged(run) == [(0, F)] and len(asked) == 2
    monkeypatch.setattr(Run, "log_evaluation", write)
    next(grpo(run))
    assert logged(run) == [(0, F), (0, H)] and len(asked) == 3


def test_off_it_does_nothing(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    assert run.config.run.quick_eval_every == 0
    step = next(grpo(run))
    assert not run.rows("evaluations") and not own(dict(step.metrics)) and "time/eval" not in step.metrics


# The pool


class Both(Quiz):
    """A task whose two splits share some prompts."""

    def __init__(self, n: int, shared: int) -> None:
        super().__init__(n)
        self.shared = shared

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        return [
            Example(e.id, f"question {i}" if i < self.shared else f"{split} {i}", e.target, e.columns)
            for i, e in enumerate(super().examples(split))
        ]


def pool_of(run: Run, task: Task) -> tuple[list[Example], list[Example], dict[str, int]]:
    asked = objective(run, task)
    found = quick_eval.pool(run, asked)
    return found, examples_of(run, F, task), quick_eval.overlap(run, asked, found)


def test_the_pool_is_held_out_and_apart_from_the_final_one(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__eval_examples=40, run__quick_eval_examples=10)
    found, final, overlap = pool_of(run, Both(60, 0))
    assert len(found) == 10 == len({e.id for e in found}) and (overlap["n"], overlap["trained"], overlap["final"]) == (
        10,
        0,
        0,
    )
    assert not {e.id for e in found} & {e.id for e in final} and all(e.id.startswith("test/") for e in found)
    assert found == pool_of(Run.open(run.path), Both(60, 0))[0]


def test_templates_that_the_final_pool_lacks_come_first(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__eval_examples=3, run__quick_eval_examples=45)
    found, final, _ = pool_of(run, Both(60, 0))
    assert not {e.columns["cluster"] for e in found} & {e.columns["cluster"] for e in final}


APART = {"run__quick_eval_every": 2, "run__checkpoint_every": 2}


def test_a_third_of_the_templates_is_kept_for_the_pool_where_it_is_on(tmp_path: Path) -> None:
    """12 templates of 5 questions: 5 for the quick pool, 7 for the final one, however many questions are asked for."""
    run = tiny_run(tmp_path, run__eval_examples=60, run__quick_eval_examples=30, **APART)
    _, final, overlap = pool_of(run, Both(60, 0))
    assert overlap == {"n": 25, "trained": 0, "final": 0, "clusters": 5, "final_clusters": 0}
    assert len(final) == 35 and len({e.columns["cluster"] for e in final}) == 7
    assert examples_of(run, F, Both(60, 0), limit=9) == final[:9]


def test_fewer_than_ten_templates_are_shared_and_counted(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__eval_examples=20, run__quick_eval_examples=10, **APART)
    found, final, overlap = pool_of(run, Both(25, 0))
    assert len(final) == 20 and overlap["final_clusters"] > 0
    shared = {e.columns["cluster"] for e in found} & {e.columns["cluster"] for e in final}
    assert overlap["final_clusters"] == len(shared)


def test_a_run_that_was_measured_on_shared_templates_keeps_its_pools(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__eval_examples=60, run__quick_eval_examples=30, **APART)
    row = {"stage": "sft", "step": 0, "split": "test", "mode": "greedy", "objective": F}
    probed = row | {"mode": "probe"}
    run.log_evaluation(probed)
    assert len(examples_of(run, F, Both(60, 0))) == 35
    run.log_evaluation(row)
    assert len(examples_of(run, F, Both(60, 0))) == 60 and len(pool_of(run, Both(60, 0))[0]) == 30


def test_a_split_too_small_for_both_shares_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny_run(tmp_path, run__eval_examples=24, **{**ON, "run__quick_eval_examples": 4})
    next(grpo(run))
    assert names(caplog.text, 4, 0, "run.quick_eval_examples", "run.eval_examples")
    (event,) = [e for e in run.rows("events") if e["kind"] == "quick_pool"]
    assert event["pools"][F] == {"n": 4, "trained": 0, "final": 4, "clusters": 1, "final_clusters": 1}


def test_held_out_prompts_that_are_trained_on_are_a_finding_before_any_step(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, **ON)
    next(grpo(run, tasks={**small_tasks(), F: Both(60, 10)}))
    (finding,) = [e for e in run.rows("events") if e["kind"] == "finding" and e["rule"] == "evaluation_leaked"]
    assert (finding["step"], finding["severity"]) == (0, "error")
    assert finding["evidence"] == {"objective": F, "leaked": 10, "of": 60}


def test_training_prompts_are_the_last_resort(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__eval_examples=40, run__quick_eval_examples=30)
    found, _, overlap = pool_of(run, Both(60, 10))
    assert overlap["trained"] == 0 and overlap["final"] > 0 and all("test" in str(e.prompt) for e in found)


# Checkpoints


class Scored:
    """Samples as the real engine does; greedy answers are right as often as the script says, call by call."""

    def __init__(self, right: list[int]) -> None:
        self.right, self.engine = iter(right), EagerEngine()

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        found = self.engine.generate(policy, request)
        if not request.greedy:
            return found
        count = next(self.right)
        texts = ["right" if i < count else "wrong" for i in range(len(found.texts))]
        return Rollouts(found.prompt_ids, found.completion_ids, found.logprobs, found.stop_reasons, texts, 1)


class Said:
    """Right is who says so."""

    name = "said"

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        return [Example(f"{split}/{i}", [{"role": "user", "content": f"answer : {split} {i}"}]) for i in range(30)]

    def score(self, example: Example, completion: str) -> Score:
        return Score(value=float(completion == "right"), label="correct" if completion == "right" else "wrong")


def test_the_best_of_each_objective_and_the_knee_outlive_pruning(tmp_path: Path) -> None:
    changes = {"run__quick_eval_every": 1, "run__checkpoint_every": 1, "run__keep_checkpoints": 1}
    run = tiny_run(tmp_path, run__steps=6, run__quick_eval_examples=10, sft__steps=0, **changes)
    # fairness and hallucination, step by step from 0: the best are 1 and 5, the knee is 3
    script = [0, 0, 10, 1, 2, 2, 8, 8, 3, 3, 1, 10, 4, 4]
    tasks: dict[str, Task] = {F: Said(), H: Said()}
    list(grpo(run, tasks=tasks, engine=Scored(script)))
    assert run.checkpoints.steps() == [0, 1, 3, 5, 6]
    assert (best(run, F), best(run, H)) == (1, 5)


@pytest.mark.parametrize("step", [0, 2])
def test_a_task_that_fails_on_a_held_out_answer_ends_nothing_but_a_start(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, held_out = tiny_run(tmp_path, **ON), {example.id for example in small_tasks()[H].examples("test")}
    whole = tiny_run(tmp_path, "whole", **ON)
    list(grpo(whole))

    tasks = small_tasks()
    sound = tasks[H].score

    def failing(example: Example, completion: str) -> Score:
        if example.id in held_out and (run.last_step() or 0) >= step - 1:
            raise ValueError("this answer")
        return sound(example, completion)

    monkeypatch.setattr(tasks[H], "score", failing)
    if step == 0:
        with pytest.raises(RewardError, match=pattern("this answer")):
            list(grpo(run, tasks=tasks))
        assert run.last_step() in (None, 0)
        return
    list(grpo(run, tasks=tasks))
    failed = [event for event in run.rows("events") if event["kind"] == "evaluation_failed"]
    assert failed and failed[0]["step"] == step and names(failed[0]["error"], "this answer")
    assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(run).items())
    assert [row["step"] for row in run.metric_rows()] == [row["step"] for row in whole.metric_rows()]
