"""A server that answers 429: it gets fewer requests and pauses, and every verdict that it would give comes.

Seconds are those of a loop whose clock jumps, so that they are the same on every machine.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.judge import FILE, Judge
from grpo_nb.judge.client import Endpoint
from grpo_nb.judge.failures import RateLimited
from grpo_nb.judge.network import retry_after
from grpo_nb.judge.prompts import Messages
from grpo_nb.judge.replies import Reply
from grpo_nb.storage.journal import Journal
from grpo_nb.types import Score
from tests.support import virtual_time
from tests.support.judge_server import JudgeServer, parts_of
from tests.support.judging import H, ask, example, given_by, judge
from tests.support.tokens import names

pytestmark = pytest.mark.usefixtures("judge_key")

VERDICT = '{"reason": "by the rules", "score": 3}'


class Server(Endpoint):
    """A server without a network: each reply after `latency`, at most `rate` a second, else 429 at once."""

    def __init__(self, function: Judge, latency: float, rate: float = 1e9, says: float | None = None) -> None:
        super().__init__(function.config.providers[0], function.config)
        self.latency, self.rate, self.says = latency, rate, says
        self.sent: list[float] = []
        self.refused: list[float] = []
        self.busy = self.busiest = 0
        self.left, self._at = rate, 0.0
        function._endpoints = [self]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        yield

    async def ask(self, client: Any, messages: Messages) -> Reply:
        now = asyncio.get_running_loop().time()
        self.sent.append(now)
        self.left, self._at = min(self.rate, self.left + (now - self._at) * self.rate), now
        if self.left < 1:
            self.refused.append(now)
            raise RateLimited("RateLimitError: 429 not now", self.says)
        self.left -= 1
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        await asyncio.sleep(self.latency)
        self.busy -= 1
        return Reply(VERDICT, 10, 1)


async def timed(function: Judge, count: int) -> tuple[list[Score], float]:
    """The verdicts on `count` answers that are there at once, and the seconds that they took."""
    columns = {name: [value] * count for name, value in example().columns.items()}
    scores = await function([f"Answer: {i}" for i in range(count)], **columns)
    return scores, asyncio.get_running_loop().time()


@pytest.mark.parametrize(("concurrency", "rounds"), [(32, 4), (8, 16), (200, 1)])
def test_latency_counts_once_a_round_of_requests(tmp_path: Path, concurrency: int, rounds: int) -> None:
    function = judge(tmp_path, "http://127.0.0.1:1/v1", concurrency=concurrency)
    server = Server(function, latency=3.0)
    scores, seconds = virtual_time.run(timed(function, 128))
    assert {score.value for score in scores} == {0.75} and server.busiest == min(concurrency, 128)
    assert seconds == pytest.approx(3.0 * rounds)
    assert virtual_time.run(timed(function, 128))[1] == 0 and len(server.sent) == 128, "the cache knows them"


@pytest.mark.parametrize("says", [None, 1.0])
@pytest.mark.parametrize("latency", [0.0, 1.0, 3.0])
def test_a_limit_of_20_a_second_slows_and_fails_nothing(tmp_path: Path, latency: float, says: float | None) -> None:
    """128 answers are 5.4 s at that rate (20 at once, the rest at 20 a second)."""
    function = judge(tmp_path, "http://127.0.0.1:1/v1", concurrency=32, retries=0)
    server = Server(function, latency, rate=20, says=says)
    scores, seconds = virtual_time.run(timed(function, 128))
    assert {score.value for score in scores} == {0.75}
    assert 0 < len(server.refused) == function.tally.limited < 128 and not function.tally.failures
    assert len(server.sent) == 128 + len(server.refused)
    assert seconds < 2 * 5.4 + 128 / 32 * latency * 3
    assert len(Journal(tmp_path / FILE).read()) == 128, "a refusal is no reply"


def test_a_refusal_halves_the_requests_and_answers_raise_them_again(tmp_path: Path) -> None:
    function = judge(tmp_path, "http://127.0.0.1:1/v1", concurrency=32)
    server = Server(function, latency=1.0, rate=20, says=1.0)
    virtual_time.run(timed(function, 30))
    before = server.pace.allowed
    assert before < 20, "10 of the burst were refused, which counts once"
    server.rate = server.left = 1e9
    virtual_time.run(timed(function, 200))
    assert before < server.pace.allowed <= 32, "known in the next step"
    virtual_time.run(timed(function, 2000))
    assert server.pace.allowed == 32 and server.busiest == 32


def test_nothing_is_sent_before_the_server_wants_it(tmp_path: Path) -> None:
    function = judge(tmp_path, "http://127.0.0.1:1/v1", concurrency=16)
    server = Server(function, latency=0.5, rate=10, says=2.5)
    virtual_time.run(timed(function, 30))
    refused = sorted(set(server.refused))
    assert refused and not [at for at in server.sent for no in refused if no < at < no + 2.5]


def test_a_server_that_says_nothing_gets_longer_and_longer_pauses(tmp_path: Path) -> None:
    function = judge(tmp_path, "http://127.0.0.1:1/v1", concurrency=1, deadline_s=60)
    server = Server(function, latency=1.0, rate=1.0)
    server.left = -20.0
    virtual_time.run(timed(function, 1))
    pauses = [after - at for at, after in zip(server.sent, server.sent[1:], strict=False)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0][: len(pauses)] and len(pauses) > 5


def test_a_storm_that_does_not_end_is_bounded_and_named(tmp_path: Path) -> None:
    function = judge(tmp_path, "http://127.0.0.1:1/v1", deadline_s=20)
    Server(function, latency=1.0, rate=0.0)
    scores, seconds = virtual_time.run(timed(function, 4))
    assert seconds == 20 and {score.value for score in scores} == {None}
    assert all(names(score.cause, "RateLimitError", 429, "deadline_s") for score in scores)
    assert function.tally.failures == {"limit": 4}


def test_the_deadline_counts_from_the_last_completion(tmp_path: Path) -> None:
    """The first request takes longer than it, and ends while the last completion is drawn."""
    function = judge(tmp_path, "http://127.0.0.1:1/v1", deadline_s=10)
    server = Server(function, latency=15.0)

    async def drawn() -> AsyncIterator[tuple[int, str]]:
        yield 1, "Answer: soon"
        await asyncio.sleep(20)
        server.latency = 9.0
        yield 0, "Answer: later"

    columns = {name: [value] * 2 for name, value in example().columns.items()}
    scores = virtual_time.run(function.as_they_end(drawn(), **columns))
    assert [score.value for score in scores] == [0.75, 0.75] and server.sent == [0, 20]


# ---- over HTTP


def test_no_verdict_is_lost_to_a_server_that_refuses_each_text_three_times(tmp_path: Path, server: JudgeServer) -> None:
    seen: Counter[str] = Counter()

    def script(body: Any) -> tuple[int, Any] | None:
        with server.guard:
            seen[parts_of(body)["ANSWER"]] += 1
            return (429, {"error": {"message": "slow down"}}) if seen[parts_of(body)["ANSWER"]] <= 3 else None

    server.script, server.headers = script, {"Retry-After-Ms": "5"}
    function = judge(tmp_path, server.url, retries=0)
    scores = ask(function, [example()] * 12, [f"a {i}" for i in range(12)])
    assert [score.parts["judge"] for score in scores] == [given_by(server)[f"a {i}"] for i in range(12)]
    assert set(seen.values()) == {4} and function.tally.limited == 36
    assert function.tally.row(H, scores, [1] * 12)[f"cost/judge_limited/{H}"] == 36


@pytest.mark.parametrize("how", ["body", "header"])
def test_an_account_without_credit_is_not_asked_again(tmp_path: Path, server: JudgeServer, how: str) -> None:
    server.script = lambda body: (429, {"error": {"code": "insufficient_quota" if how == "body" else "no"}})
    server.headers = {"x-should-retry": "false"} if how == "header" else {}
    (verdict,) = ask(judge(tmp_path, server.url, retries=5), [example()], ["a"])
    assert verdict.value is None and names(verdict.cause, "RateLimitError") and len(server.bodies) == 1


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "0.25", "retry-after-ms": "20"}, 0.02),
        *(({"retry-after": wrong}, None) for wrong in ("soon", "-1", "nan", "inf", "")),
        ({"retry-after": formatdate(0, usegmt=True)}, 0.0),
    ],
)
def test_what_a_server_asks_to_wait_for(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == (None if seconds is None else pytest.approx(seconds))
