"""A reply that cannot be read is asked for once more: within every limit, paid for, not where it would end alike."""

import re
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.judge import FILE
from grpo_nb.storage.journal import Journal
from tests.support.fault_proxy import FaultProxy
from tests.support.judge_server import Body, JudgeServer, completion, serving
from tests.support.judging import H, ask, example, judge
from tests.support.tokens import names

GARBAGE = ("html", "prose", "half")
VERDICT = '{"reason": "by the rules", "score": 3}'


pytestmark = pytest.mark.usefixtures("judge_key")


def test_a_verdict_that_comes_the_second_time_counts_and_both_replies_are_paid(
    tmp_path: Path, server: JudgeServer
) -> None:
    server.says = lambda body: VERDICT if len(server.bodies) > 1 else "I cannot decide"
    function = judge(tmp_path, server.url)
    (verdict,) = ask(function, [example()], ["a"])
    assert verdict.parts["judge"] == 0.75 and server.bodies[0] == server.bodies[1]
    assert (function.tally.unreadable, len(function.tally.replies), function.tally.tokens) == (1, 2, 220)
    assert not function.tally.failures and function.tally.dropped_groups == 0
    assert [row["score"] for row in Journal(tmp_path / FILE).read()] == [None, 3]
    (again,) = ask(judge(tmp_path, server.url), [example()], ["a"])
    assert again == verdict and len(server.bodies) == 2


@pytest.mark.parametrize("fault", GARBAGE)
def test_it_is_asked_once_more_and_no_oftener(tmp_path: Path, server: JudgeServer, fault: str) -> None:
    with serving(FaultProxy(server.url, share=1.0, faults=(fault,))) as proxy:
        function = judge(tmp_path, proxy.url)
        (verdict,) = ask(function, [example()], ["a"])
    assert proxy.done == {fault: 2} and verdict.value is None
    assert function.tally.failures == {"unreadable": 1} and function.tally.unreadable == 2
    paid = [row["tokens_in"] for row in Journal(tmp_path / FILE).read()]
    assert len(paid) == 2 and min(paid) >= 100, "whatever came back, the question was read"


@pytest.mark.parametrize(
    "reply",
    [
        completion('{"reason": "because', ended="length"),
        completion("", ended="content_filter"),
        {"choices": [{"message": {"content": None, "refusal": "I may not"}}]},
        {"choices": [{"message": {"content": None}, "finish_reason": "content_filter"}]},
    ],
)
def test_what_would_end_alike_is_not_asked_again(tmp_path: Path, server: JudgeServer, reply: Any) -> None:
    server.reply = reply
    (verdict,) = ask(judge(tmp_path, server.url), [example()], ["a"])
    assert verdict.value is None and len(server.bodies) == 1
    assert any(words in verdict.cause for words in ("max_tokens", "content filter", "I may not"))


def test_the_second_request_keeps_to_the_budget(tmp_path: Path, server: JudgeServer) -> None:
    server.says = lambda body: "I cannot decide"
    function = judge(tmp_path, server.url, budget_tokens=110)
    (verdict,) = ask(function, [example()], ["a"])
    assert len(server.bodies) == 1 and "110 of budget_tokens=110 are used" in verdict.cause


def test_the_second_request_keeps_to_the_deadline(tmp_path: Path, server: JudgeServer) -> None:
    def late(body: Body) -> str:
        server.delay = 30.0
        return "I cannot decide"

    server.says = late
    function = judge(tmp_path, server.url, timeout_s=60, deadline_s=3)
    (verdict,) = ask(function, [example()], ["a"])
    assert len(server.bodies) == 2 and "deadline_s" in verdict.cause


def test_second_requests_wait_for_their_turn(tmp_path: Path, server: JudgeServer) -> None:
    server.says, server.delay = lambda body: "I cannot decide", 0.05
    ask(judge(tmp_path, server.url, concurrency=2), [example()] * 6, [f"a {i}" for i in range(6)])
    assert len(server.bodies) == 12 and server.busiest == 2


def test_of_the_groups_that_garbage_hits_most_are_saved(tmp_path: Path, server: JudgeServer) -> None:
    """One provider, 30% garbage, 12 groups of 4: 9 have a spoilt reply, 2 are dropped."""
    with serving(FaultProxy(server.url, seed=16, faults=GARBAGE, by=re.compile(rb"answer (\d+)"))) as proxy:
        function = judge(tmp_path, proxy.url, concurrency=1)
        scores = ask(function, [example(i // 4) for i in range(48)], [f"answer {i}" for i in range(48)])
    rows = Journal(tmp_path / FILE).read()
    hit = {int(row["answer"].split()[1]) // 4 for row in rows if row["score"] is None}
    row = function.tally.row(H, scores, [1] * 48)
    assert (len(hit), row[f"judge/{H}/dropped_groups"]) == (9, 2)
    assert row[f"cost/judge_asked/{H}"] == len(rows) == proxy.done.total() > 48


@pytest.mark.parametrize(
    "usage",
    [
        None,
        "lots",
        {"prompt_tokens": 0, "completion_tokens": 0},
        {"prompt_tokens": -5, "completion_tokens": -1},
        {"prompt_tokens": True, "completion_tokens": True},
        {"prompt_tokens": 1.5, "completion_tokens": float("nan")},
        {"prompt_tokens": 2**70, "completion_tokens": 2**70, "total_tokens": 2**71},
        {"prompt_tokens": 2**31, "completion_tokens": 2**40},
    ],
)
def test_usage_that_cannot_be_is_counted_by_us(tmp_path: Path, server: JudgeServer, usage: Any) -> None:
    """Else a server that says 0, as some do, would never come to the end of a budget."""
    server.reply = {**completion(VERDICT), "usage": usage}
    function = judge(tmp_path, server.url)
    (verdict,) = ask(function, [example()], ["a"])
    request = "".join(message["content"] for message in server.bodies[0]["messages"])
    counted = sum(len(text.encode()) // 4 for text in (request, VERDICT))
    assert verdict.parts["judge"] == 0.75 and function.tally.tokens == counted > 300


@pytest.mark.parametrize("body", [b"[" * 200_000, b"9" * 6000, b'{"choices": "\xff\xfe"}', b""])
def test_a_body_that_no_parser_takes_is_a_failure_and_no_crash(
    tmp_path: Path, server: JudgeServer, body: bytes
) -> None:
    server.reply = body
    (verdict,) = ask(judge(tmp_path, server.url), [example()], ["a"])
    assert verdict.value is None and names(verdict.cause, "body", "JSON")
