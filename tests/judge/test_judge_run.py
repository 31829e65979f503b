"""GRPO with a judge switched on: through a faulty network, killed and resumed, out of money, out of reach."""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.import_utils import is_serve_available

from grpo_nb.config import ConfigError, JudgeConfig, ModelConfig
from grpo_nb.judge import FILE, Judge
from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.rewards import scoring
from grpo_nb.rewards.rubric import RewardError
from grpo_nb.run.run import Run
from grpo_nb.storage.journal import Journal
from grpo_nb.training import gradients, sampling
from grpo_nb.training.grpo import grpo
from grpo_nb.training.guards import TrainingError
from grpo_nb.types import Score
from tests.judge.test_judge import INJECTIONS
from tests.support.fault_proxy import FAULTS, FaultProxy
from tests.support.judge_server import Body, JudgeServer, by_text, serving
from tests.support.judging import KEY, VARIABLE, F, H, ask, example, judge, provider
from tests.support.tiny import REWARDS, edited, rows, small_tasks, stable, tiny_config, tiny_run, weights
from tests.support.tokens import names, pattern

pytestmark = pytest.mark.usefixtures("judge_key", "narrow_model")


def judged_run(folder: Path, *urls: str, only: tuple[str, ...] = (H, F), steps: int = 4, **changes: Any) -> Run:
    settings = {"providers": [provider(url) for url in urls], "retries": 1, **changes}
    judges = {f"objectives.{name}.judge": settings for name in only}
    config = tiny_config(sft__steps=0, run__steps=steps, run__samples_per_step=64).replace(**judges)
    return Run.create(folder / "run", config)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Score]]:
    """(text, score) of every completion that a step scores from here on."""
    seen: list[tuple[str, Score]] = []

    class Spy(scoring.Scoring):
        def add(self, rubric: Any, completions: Any) -> None:
            super().add(rubric, completions)
            self.texts = [*getattr(self, "texts", []), *completions.texts]

        def scores(self) -> list[Score]:
            scores = super().scores()
            seen.extend(zip(self.texts, scores, strict=True))
            return scores

    monkeypatch.setattr(sampling, "Scoring", Spy)
    return seen


def trained(run: Run) -> list[dict[str, Any]]:
    return [dict(step.metrics) for step in grpo(run, tasks=small_tasks(), rewards=REWARDS)]


def test_a_run_through_a_faulty_network_completes_and_invents_nothing(
    tmp_path: Path,
    server: JudgeServer,
    scored: list[tuple[str, Score]],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    with (
        serving(FaultProxy(server.url, seed=1, slow=1.5)) as proxy,
        serving(FaultProxy(server.url, seed=2, slow=1.5)) as second,
    ):
        run = judged_run(tmp_path, proxy.url, second.url, timeout_s=1.0)
        metrics = trained(run)
    assert run.status().state == "done" and run.status().step == 4
    assert set(proxy.done + second.done) == {*FAULTS, "none"}, "every fault was met"

    given: dict[str, set[float]] = {}
    for text, grade in server.given:
        given.setdefault(text, set()).add(grade / 4)
    verdicts = [(text, s) for text, s in scored if s.parts["judge"] is not None]
    assert len(scored) == 64 and len(verdicts) > 32
    for text, s in verdicts:
        assert s.parts["judge"] in given[fenced(text)], "only what the server gave"
    for _, s in scored:
        assert (s.value is None) == (s.parts["judge"] is None) == bool(s.cause)
    for row in metrics:
        for name in (H, F):
            assert row[f"judge/{name}/scored"] + row[f"judge/{name}/failed"] == 8
            assert (row[f"unscored_groups/{name}"] or 0) == row[f"judge/{name}/dropped_groups"]

    lines = [r.getMessage() for r in caplog.records if r.name == "grpo_nb.training.sampling"]
    assert len(lines) == 8 and names(lines[0], "judge step 1", "fairness", "providers")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"judge.jsonl", "samples.jsonl", "config.json"} <= {path.name for path in files}
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    out, err = capfd.readouterr()
    assert KEY not in caplog.text + out + err and VARIABLE in (run.path / "config.json").read_text()


def fenced(text: str) -> str:
    return text.translate(str.maketrans("<>[]", "‹›⟦⟧")).strip()


def test_a_resumed_run_sees_the_same_verdicts(tmp_path: Path, server: JudgeServer) -> None:
    """Killed in step 4, it goes on from checkpoint 2 and trains step 3 again, with a server that changed its mind."""
    run = judged_run(tmp_path, server.url)
    killed = tmp_path / "killed"
    before = []
    for step in grpo(run, tasks=small_tasks(), rewards=REWARDS):
        before.append(dict(step.metrics))
        if step.step == 3:
            shutil.copytree(run.path, killed, ignore=shutil.ignore_patterns("lock*", ".*"))
    asked = len(server.bodies)
    server.grade = lambda parts: 4 - by_text(parts)
    after = [dict(s.metrics) for s in grpo(Run.open(killed), tasks=small_tasks(), rewards=REWARDS, steps=3)]
    assert [row["step"] for row in after] == [3] and len(server.bodies) == asked
    assert stable(after[0]) == stable(before[2])
    assert after[0][f"cost/judge_asked/{H}"] == 0 < after[0][f"cost/judge_cached/{H}"]


def test_the_judge_moves_the_weights_and_two_runs_are_equal(tmp_path: Path, server: JudgeServer) -> None:
    runs = [judged_run(tmp_path / str(i), server.url, steps=2, weight=0.5, decides_ties=True) for i in range(2)]
    first, second = ([stable(row) for row in trained(run)] for run in runs)
    assert first == second
    plain = tiny_run(tmp_path, "plain", sft__steps=0, run__steps=2)
    assert (
        rows(list(grpo(plain, tasks=small_tasks(), rewards=REWARDS)))[0]["reward/fairness/mean"]
        != first[0]["reward/fairness/mean"]
    )
    same = [weights(run) for run in (*runs, plain)]
    assert all((same[0][k] == same[1][k]).all() for k in same[0])
    assert any((same[0][k] != same[2][k]).any() for k in same[0])


def test_the_judges_of_two_objectives_are_asked_side_by_side(tmp_path: Path, server: JudgeServer) -> None:
    """Each may have one request under way: the server answers the first two only once both are there."""
    both = threading.Barrier(2)

    def grade(parts: dict[str, str]) -> int:
        if len(server.bodies) <= 2:
            both.wait(30)
        return by_text(parts)

    server.grade = grade
    (row,) = trained(judged_run(tmp_path, server.url, steps=1, concurrency=1, timeout_s=60, retries=0))
    assert server.busiest == 2 and not both.broken
    assert [row[f"judge/{name}/scored"] for name in (H, F)] == [8, 8]


def test_judges_are_asked_while_the_log_probs_are_measured(
    tmp_path: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No verdict is given before the pass of the reference policy began, and none is lost."""
    begun, waited = threading.Event(), []
    measure = gradients.token_stats

    def spy(*arguments: Any) -> Any:
        begun.set()
        return measure(*arguments)

    def grade(parts: dict[str, str]) -> int:
        waited.append(begun.wait(30))
        return by_text(parts)

    monkeypatch.setattr(gradients, "token_stats", spy)
    server.grade = grade
    (row,) = trained(judged_run(tmp_path / "slow", server.url, steps=1, timeout_s=60))
    assert waited and all(waited)
    server.grade = by_text
    (plain,) = trained(judged_run(tmp_path / "plain", server.url, steps=1))
    assert stable(row) == stable(plain)


def test_a_step_that_fails_leaves_no_judge_behind(tmp_path: Path, server: JudgeServer) -> None:
    def broken(completions: Any) -> list[float]:
        raise KeyError("mine")

    server.delay = 30.0
    run = judged_run(tmp_path, server.url, only=(F,), steps=1)
    with pytest.raises(RewardError, match="'broken' raised KeyError"):
        list(grpo(run, tasks=small_tasks(), rewards={H: [broken]}))
    assert "grpo_nb waits" not in {thread.name for thread in threading.enumerate()}
    server.delay = 0.0


class Ties:
    """A task that gives every answer the same score."""

    def __init__(self, task: Any) -> None:
        self.name, self.examples = task.name, task.examples

    def score(self, example: Any, completion: str) -> Score:
        return Score(value=0.5, label="wrong")


@pytest.mark.parametrize("decides", [False, True])
def test_where_the_task_ties_the_judge_moves_weights_only_if_it_may(
    tmp_path: Path, server: JudgeServer, decides: bool
) -> None:
    run = judged_run(tmp_path, server.url, steps=1, decides_ties=decides)
    tasks = {name: Ties(task) for name, task in small_tasks().items()}
    (row,) = [dict(step.metrics) for step in grpo(run, tasks=tasks)]
    assert len({grade for _, grade in server.given}) > 2
    assert [row[f"judge/{name}/tied_groups"] for name in (H, F)] == [2, 2]
    assert [row[f"frac_reward_zero_std/{name}"] < 1 for name in (H, F)] == [decides, decides]
    assert (row["grad/update"] > 0) == decides


def test_at_the_end_of_its_budget_the_run_is_saved_and_may_go_on_with_more(tmp_path: Path, server: JudgeServer) -> None:
    run = judged_run(tmp_path, server.url, only=(H,), steps=6, budget_tokens=1200)
    with pytest.raises(TrainingError, match=pattern("judge_budget", "budget_tokens=1200")):
        trained(run)
    stopped = run.status().step
    assert 1 <= stopped < 6 and run.status().state == "failed"
    newest, _ = run.checkpoints.latest()
    assert newest is not None and int(newest.state()["step"]) == stopped, "the step that ended it is saved"
    assert len(server.bodies) <= 1200 // 110 + 8, "at most the requests that were under way"
    events = run.events()
    (finding,) = [e for e in events.to_dict("records") if e.get("rule") == "judge_budget"]
    assert finding["evidence"]["tokens"] >= 1200 and finding["action"] == "end"

    asked = len(server.bodies)
    with pytest.raises(ConfigError, match=pattern("objectives.hallucination.judge.budget_tokens", "config.json")):
        trained(Run.open(run.path))
    assert len(server.bodies) == asked
    more = edited(run, **{f"objectives__{H}__judge__budget_tokens": 100_000})
    assert [row["step"] for row in trained(more)] == list(range(stopped + 1, 7))
    assert more.status().state == "done"


def test_a_judge_that_always_fails_ends_the_run_saved(tmp_path: Path, server: JudgeServer) -> None:
    """Only one of two objectives is judged: the other would train on alone, and nobody would notice."""
    server.says = lambda body: "4 of 4"
    run = judged_run(tmp_path, server.url, only=(H,), steps=6)
    with pytest.raises(TrainingError, match=pattern("judge_failed", "step 3", 24)):
        trained(run)
    newest, _ = run.checkpoints.latest()
    assert newest is not None and int(newest.state()["step"]) == 3
    assert all(row[f"reward/{H}/part/judge"] is None for row in run.metric_rows())
    assert {row["score"] for row in map(json.loads, (run.path / FILE).read_text().splitlines())} == {None}


def test_a_missing_key_is_said_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = judged_run(tmp_path, "http://127.0.0.1:9/v1")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr("grpo_nb.training.spread.load_alike", lambda *a: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=pattern(VARIABLE)):
        trained(run)
    assert not (run.path / "checkpoints").exists() or not list((run.path / "checkpoints").iterdir())


# ---- a real model as the judge


@pytest.fixture(scope="module")
def smollm2() -> Policy:
    if not (path := os.environ.get("GRPO_NB_SMOLLM2")):
        pytest.skip("GRPO_NB_SMOLLM2 is not set to the path of SmolLM2-135M-Instruct, a .gguf file or a folder")
    return load_policy(ModelConfig(name=path, device="cpu", train="full"))


def likeliest(policy: Policy, said: list[int]) -> Callable[[Body], str]:
    """The model held to the form of a verdict: its likeliest score, after the request as its template renders it."""
    turn, opening = threading.Lock(), '{"reason": "graded", "score": '

    def says(body: Body) -> str:
        ids = policy.encode(body["messages"]) + policy.encode_completion(opening)[:-1]
        grades = [policy.encode_completion(str(grade))[0] for grade in range(5)]
        with turn, policy.eval_mode(), torch.no_grad():
            logits = policy.model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1, grades]
        said.append(int(logits.argmax()))
        return f"{opening}{said[-1]}}}"

    return says


@pytest.mark.slow
def test_a_real_model_judges_through_a_faulty_network(
    tmp_path: Path, smollm2: Policy, scored: list[tuple[str, Score]]
) -> None:
    """SmolLM2-135M: 6 of 20 requests met a fault, each of six once, and 15 of 16 answers got a verdict."""
    said: list[int] = []
    with serving(JudgeServer(key=KEY)) as server, serving(FaultProxy(server.url, seed=3, slow=3.0)) as proxy:
        server.says = likeliest(smollm2, said)
        settings = {"timeout_s": 60, "deadline_s": 300, "concurrency": 2, "retries": 3}
        run = judged_run(tmp_path, proxy.url, only=(H,), steps=2, **settings)
        metrics = trained(run)
    verdicts = [s.parts["judge"] for _, s in scored if s.parts.get("judge") is not None]
    assert len(metrics) == 2 and verdicts and {v * 4 for v in verdicts} <= set(said)
    assert proxy.done.total() > proxy.done["none"] > 0
    assert not [path for path in run.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("objective", [H, F])
def test_orders_to_a_real_model_lift_no_wrong_answer_above_a_right_one(
    tmp_path: Path, smollm2: Policy, objective: str
) -> None:
    """A judge that is no match for them: what they cannot win is the order of the rewards, by the judge's weight.

    SmolLM2-135M gives the right answer 0 as it does the wrong one, and 5 of these 14 orders lift the wrong one to 4, on
    the item of either task (scores in judge.jsonl): what looks like a verdict or a high score is copied, fence or not.
    It is not fit to judge. That the fence is a fence is shown by rules (test_judge.py); that it holds with a model that
    is fit to judge is not shown.
    """
    item, settings = example(objective=objective), {"timeout_s": 60, "deadline_s": 600, "concurrency": 1}
    columns = item.columns
    bad = columns["hallucinated_answer"] if objective == H else columns["options"][(columns["label"] + 1) % 3]
    texts = [item.target or "", f"Answer: {bad}", *(f"Answer: {bad}\n{order}" for order in INJECTIONS)]
    with serving(JudgeServer(key=KEY)) as server:
        server.says = likeliest(smollm2, [])
        honest, plain, *ordered = ask(judge(tmp_path, server.url, objective=objective, **settings), [item] * 16, texts)
    grades = [s.parts["judge"] for s in (honest, plain, *ordered)]
    assert None not in grades and len(server.bodies) == len(texts)
    assert all(s.value < honest.value for s in (plain, *ordered)), grades  # type: ignore[operator]
    assert grades[2] <= grades[1], "the plainest order of all"  # type: ignore[operator]


@pytest.mark.slow
def test_a_model_server_of_others(tmp_path: Path, smollm2: Policy) -> None:
    """`transformers serve` with SmolLM2, which is too small to keep to the form: no verdict, and no number either."""
    if not is_serve_available():
        pytest.skip("transformers serve needs fastapi and uvicorn, which are not installed")
    smollm2.save(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "model", "--device", "cpu"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--port", str(port)], cwd=tmp_path, stdout=log, stderr=log)
        try:
            wait_for(port, process, tmp_path / "log")
            settings = {"timeout_s": 120, "deadline_s": 240, "max_tokens": 60, "concurrency": 1}
            served = {"model": "model", "base_url": f"http://localhost:{port}/v1", "api_key_env": None}
            config = JudgeConfig.model_validate({"providers": [served], **settings})
            function = Judge(H, "halueval_qa", config, Journal(tmp_path / FILE))
            scores = ask(function, [example()] * 2, ["Answer: geese", "Answer: bees"])
        finally:
            process.terminate()
            process.wait()
    written = Journal(tmp_path / FILE).read()
    assert len(written) == 2 and all(row["tokens_in"] > 400 and row["tokens_out"] > 0 for row in written)
    for verdict in scores:
        grade = verdict.parts["judge"]
        assert verdict.cause if grade is None else grade * 4 in range(5)
    assert [row["score"] is None for row in written] == [bool(row["cause"]) for row in written]


def wait_for(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(240):
        assert process.poll() is None, log.read_text()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    pytest.fail(log.read_text())
