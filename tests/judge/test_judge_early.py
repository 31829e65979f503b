"""Completions are judged as they end: while others are drawn, with the same results as after all have been."""

import asyncio
import gc
import importlib
import json
import socket
import threading
import warnings
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.judge import FILE, Judge
from grpo_nb.policy.model import Policy
from grpo_nb.rewards.background import Background, Loop
from grpo_nb.rollout import EagerEngine, Ended, Engine, Request
from grpo_nb.run.run import Run
from grpo_nb.storage.journal import Journal
from grpo_nb.training.grpo import grpo
from grpo_nb.types import Rollouts, Score
from tests.judge.test_judge_run import judged_run
from tests.support.judge_server import JudgeServer, by_text, parts_of, serving
from tests.support.judging import KEY, F, H, example, given_by, judge
from tests.support.tiny import REWARDS, small_tasks, stable, weights

pytestmark = pytest.mark.usefixtures("judge_key", "narrow_model")


class Late:
    """An engine that hands nothing over while it draws."""

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        return EagerEngine().generate(policy, replace(request, ended=None))


class Waiting:
    """An engine that draws on, once a completion has ended, only when `wanted` requests of the step have arrived."""

    def __init__(self, server: JudgeServer, wanted: int) -> None:
        self.server, self.wanted, self.asked_before_the_last = server, wanted, list[int]()
        self.arrived = threading.Condition()
        grade = server.grade

        def arrives(parts: dict[str, str]) -> int:
            with self.arrived:
                self.arrived.notify_all()
            return grade(parts)

        server.grade = arrives

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        left, before = request.rows, len(self.server.bodies)

        def ended(completions: Sequence[Ended]) -> None:
            nonlocal left
            assert request.ended is not None
            request.ended(completions)
            left -= len(completions)
            if left:
                with self.arrived:
                    assert self.arrived.wait_for(lambda: len(self.server.bodies) >= before + self.wanted, 30)
            else:
                self.asked_before_the_last.append(len(self.server.bodies) - before)

        return EagerEngine(max_rows=4).generate(policy, replace(request, ended=ended))  # a prompt after the other


def trained(run: Run, engine: Engine | str = "eager") -> list[dict[str, Any]]:
    return [stable(dict(step.metrics)) for step in grpo(run, tasks=small_tasks(), rewards=REWARDS, engine=engine)]


def test_requests_arrive_before_the_last_completion_ended(tmp_path: Path, server: JudgeServer) -> None:
    engine = Waiting(server, wanted=1)
    (row,) = trained(judged_run(tmp_path, server.url, steps=1), engine)
    assert [row[f"judge/{name}/scored"] for name in (H, F)] == [8, 8]
    (early,) = engine.asked_before_the_last
    assert 1 <= early < len(server.bodies) <= 16


def test_the_run_is_bit_for_bit_that_of_an_engine_that_hands_over_nothing(tmp_path: Path, server: JudgeServer) -> None:
    settings = {"steps": 3, "weight": 0.5, "decides_ties": True}
    runs = {name: judged_run(tmp_path / name, server.url, **settings) for name in ("early", "late")}
    rows = {name: trained(run, {"early": "eager", "late": Late()}[name]) for name, run in runs.items()}
    early, late = runs.values()
    assert [logged(row) for row in rows["early"]] == [logged(row) for row in rows["late"]]
    assert (early.path / "samples.jsonl").read_bytes() == (late.path / "samples.jsonl").read_bytes()
    assert [logged(row) for row in early.events().to_dict("records")] == [
        logged(row) for row in late.events().to_dict("records")
    ]
    assert all(value.equal(weights(late)[name]) for name, value in weights(early).items())
    written = [sorted(map(told, Journal(run.path / FILE).read())) for run in runs.values()]
    assert written[0] == written[1] and len(written[0]) > 20


def logged(row: dict[str, Any]) -> dict[str, Any]:
    """An event, or the metrics of a step, without its time and what the engine is called."""
    return {key: repr(value) for key, value in row.items() if key not in ("time", "engine")}


def told(row: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in row.items() if key != "seconds"}, sort_keys=True)


def test_a_run_broken_off_while_it_draws_keeps_what_the_judge_said(tmp_path: Path, server: JudgeServer) -> None:
    class Breaks(Waiting):
        def generate(self, policy: Policy, request: Request) -> Rollouts:
            super().generate(policy, request)
            raise KeyboardInterrupt

    run = judged_run(tmp_path, server.url, steps=1)
    engine = Breaks(server, wanted=1)
    with pytest.raises(KeyboardInterrupt):
        trained(run, engine)
    assert "grpo_nb waits" not in {thread.name for thread in threading.enumerate()}
    kept = [row["key"] for row in Journal(run.path / FILE).read() if row["score"] is not None]
    before = len(server.bodies)
    (row,) = trained(Run.open(run.path))
    assert [row[f"judge/{name}/scored"] for name in (H, F)] == [8, 8]
    assert 1 <= len(kept) == len({*map(json.dumps, server.bodies)}) - (len(server.bodies) - before)


# ---- one step, answer by answer


async def one_by_one(texts: Sequence[str], order: Sequence[int]) -> AsyncIterator[tuple[int, str]]:
    for place in order:
        yield place, texts[place]
        await asyncio.sleep(0.1)  # time for a request that should not be sent


def early(function: Judge, texts: Sequence[str], order: Sequence[int], groups: int = 1) -> list[Score]:
    """The verdicts on answers to `groups` examples, handed over in an order."""
    examples = [example(i * groups // len(texts)) for i in range(len(texts))]
    columns = {name: [item.columns[name] for item in examples] for name in examples[0].columns}
    return asyncio.run(function.as_they_end(one_by_one(texts, order), **columns))


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 3, 0, 4, 1, 2]])
def test_verdicts_go_to_their_places(tmp_path: Path, server: JudgeServer, order: list[int]) -> None:
    texts = ["a", "b", "a", "d", "e", "f"]
    scores = early(judge(tmp_path, server.url), texts, order, groups=2)
    assert [score.value for score in scores] == [given_by(server)[text] for text in texts]
    assert len(server.bodies) == 5 == len(Journal(tmp_path / FILE).read())


def test_an_answer_that_is_replaced_counts_as_it_ended(tmp_path: Path, server: JudgeServer) -> None:
    """An engine that starts a batch again hands over its rows again."""
    texts = ["draft", "b", "final"]

    async def again() -> AsyncIterator[tuple[int, str]]:
        for place, n in ((0, 0), (1, 1), (0, 2)):
            yield place, texts[n]

    columns = {name: [value] * 2 for name, value in example().columns.items()}
    scores = asyncio.run(judge(tmp_path, server.url).as_they_end(again(), **columns))
    assert [score.value for score in scores] == [given_by(server)["final"], given_by(server)["b"]]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_what_the_second_provider_knows_of_a_whole_group_the_first_is_not_asked(
    tmp_path: Path, server: JudgeServer, order: list[int]
) -> None:
    with serving(JudgeServer(lambda parts: 99 if parts["ANSWER"] == "b" else 1, key=KEY)) as first:
        once = early(judge(tmp_path, first.url, server.url), ["a", "b", "c"], order)
        asked = len(first.bodies), len(server.bodies)
        known = judge(tmp_path, first.url, server.url)
        assert early(known, ["a", "b", "c"], order) == once
        assert (len(first.bodies), len(server.bodies)) == asked and known.tally.cached == 3
        first.grade = by_text
        other = judge(tmp_path, first.url, server.url)
        early(other, ["a", "b", "new"], order)
        assert sorted(parts_of(body)["ANSWER"] for body in first.bodies[asked[0] :]) == ["b", "new"]
        assert other.tally.cached == 1, "the first provider's own"


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_judge_that_is_given_up_while_it_connects_leaves_no_coroutine_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """The connection attempt is a task that has, or has not, begun when the loop is closed."""
    anyio = importlib.import_module("anyio")  # what the client of a judge connects with
    background, closed = Background(), threading.Event()
    connect_tcp, closers = anyio.connect_tcp, list[threading.Thread]()

    async def closing_meanwhile(*given: Any, **named: Any) -> Any:
        if not closers:
            queued, loop = threading.Event(), asyncio.get_running_loop()
            call = loop.call_soon_threadsafe
            monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a, **k: (call(*a, **k), queued.set()))
            closers.append(threading.Thread(target=lambda: (background.close(), closed.set())))
            closers[0].start()
            assert queued.wait(30)
            for _ in range(turns):
                await asyncio.sleep(0)
        return await connect_tcp(*given, **named)

    monkeypatch.setattr(anyio, "connect_tcp", closing_meanwhile)
    with warnings.catch_warnings(record=True) as caught, socket.create_server(("127.0.0.1", 0)) as unanswering:
        warnings.simplefilter("always")
        function = judge(tmp_path, f"http://127.0.0.1:{unanswering.getsockname()[1]}/v1")
        texts = ["a", "b", "c"]
        columns = {name: [value] * 3 for name, value in example().columns.items()}
        asked = background.start(function.as_they_end(one_by_one(texts, [0, 1, 2]), **columns))
        assert closed.wait(60)
        gc.collect()
    assert asked.cancelled() and not [str(warning.message) for warning in caught]


# ---- two steps at a time


def test_two_steps_at_a_time_share_the_requests_and_have_a_tally_each(tmp_path: Path, server: JudgeServer) -> None:
    server.delay = 0.05
    function, loop = judge(tmp_path, server.url, concurrency=3), Loop()
    texts = [f"answer {n}" for n in range(8)]
    columns = {name: [value] * 8 for name, value in example().columns.items()}
    steps, begun, tallies = [Background(loop), Background(loop)], [], []
    for background in steps:
        begun.append(background.start(function.as_they_end(at_once(texts), **columns)))
        tallies.append(function.tally)
    scores = [asked.result(60) for asked in begun]
    for background in steps:
        background.close()
    assert loop.runs, "others use it still"
    loop.close()
    assert server.busiest == 3 and not loop.runs
    assert [score.value for score in scores[0]] == [score.value for score in scores[1]]
    assert [tally.providers.total() for tally in tallies] == [8, 8] and tallies[1] is function.tally


async def at_once(texts: Sequence[str]) -> AsyncIterator[tuple[int, str]]:
    for place, text in enumerate(texts):
        yield place, text


def test_two_steps_that_ask_about_one_text_at_a_time_have_the_verdict_that_a_resumed_run_finds(
    tmp_path: Path, server: JudgeServer
) -> None:
    count = iter(range(5))
    server.grade = lambda parts: next(count)  # another verdict at each request
    function, loop = judge(tmp_path, server.url), Loop()
    columns = {name: [value] for name, value in example().columns.items()}
    background = Background(loop)
    begun = [background.start(function.as_they_end(at_once(["geese"]), **columns)) for _ in range(2)]
    scores = [asked.result(60) for asked in begun]
    background.close()
    loop.close()
    assert len(server.bodies) == 2 and scores[0] == scores[1] == early(judge(tmp_path, server.url), ["geese"], [0])


def test_a_step_that_is_given_up_leaves_the_others_at_work() -> None:
    loop, ended = Loop(), threading.Event()

    async def wait() -> str:
        while not ended.is_set():
            await asyncio.sleep(0.01)
        return "done"

    first, second = Background(loop), Background(loop)
    given_up, other = first.start(wait()), second.start(wait())
    first.close()
    assert given_up.cancelled() and not other.done()
    ended.set()
    assert other.result(60) == "done"
    second.close()
    loop.close()
