"""What rank 0 makes of replies: all of them, or one failure with the rank's number."""

from typing import Any

import pytest
import torch

from grpo_nb.ranks import leader as module
from grpo_nb.ranks.launch import Place
from grpo_nb.ranks.leader import FAILED, MEMORY_FULL, Leader
from grpo_nb.ranks.link import Link, RankError
from grpo_nb.ranks.messages import Message


class Line(Link):
    """A link to ranks that answer what the test says: a message, how the connection broke, or nothing."""

    def __init__(self, *answers: Message | str | None) -> None:
        self.place = Place(0, len(answers) + 1, 0, "here:1")
        self.gone: dict[int, str] = {}
        self.answers, self.sent = dict(enumerate(answers, 1)), list[int]()
        self.waiting: list[int] = []

    def send(self, rank: int, message: Message) -> None:
        if self.answers[rank] == "unreachable":
            raise RankError("closed", rank)
        self.sent.append(rank)
        self.waiting.append(rank)

    def next(self, seconds: float) -> Any:
        for rank in self.waiting:
            answer = self.answers[rank]
            if isinstance(answer, str):
                self.gone[rank] = answer
            if answer is not None:
                self.waiting.remove(rank)
                return rank, answer if isinstance(answer, Message) else ConnectionError(answer)
        return None


class Logged(list[dict[str, Any]]):
    def __call__(self, kind: str, **data: Any) -> None:
        self.append({"kind": kind, **data})


def reply(work: str = "done", **data: Any) -> Message:
    return Message(work, {"seconds": 2.0, "peak": 5.0, **data})


def leading(*answers: Message | str | None, seconds: float = 60.0) -> tuple[Leader, Line, Logged]:
    line, log = Line(*answers), Logged()
    return Leader(line, log, seconds), line, log


DO = Message("draw")


def test_replies_come_in_the_order_of_the_ranks() -> None:
    ranks, line, _ = leading(reply(x=1), reply(x=2), reply(x=3))
    own, replies = ranks.ask([DO, None, DO], lambda: "own")
    assert own == "own" and line.sent == [1, 3]
    assert [None if found is None else found.data["x"] for found in replies] == [1, None, 3]
    assert ranks.peaks() == {1: 5.0, 3: 5.0}


def test_what_ranks_take_is_summed_until_it_is_asked_for() -> None:
    ranks, _, _ = leading(reply())
    for _ in range(2):
        ranks.ask([DO], lambda: None)
    seconds = ranks.seconds()
    assert seconds[1] == 4.0 and 0 <= seconds[0] < 1
    assert 1.5 < ranks.waited() <= 2.0
    assert ranks.seconds() == {} and ranks.waited() == 0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("closed", "closed"), ("unreachable", "closed"), (reply(FAILED, error="ValueError: x"), "ValueError")],
)
def test_a_rank_that_dies_or_raises_is_named(answer: Any, reason: str) -> None:
    ranks, _, log = leading(reply(), answer)
    with pytest.raises(RankError) as found:
        ranks.ask([DO, DO], lambda: None)
    assert found.value.rank == 2 and reason in str(found.value)
    (event,) = log
    assert (event["kind"], event["rank"], event["work"]) == ("rank_failed", 2, "draw")
    with pytest.raises(RankError):
        ranks.ask([DO, DO], lambda: None)


def test_a_silent_rank_is_late_then_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATE_SECONDS", 0.01)
    ranks, _, log = leading(reply(), None, seconds=0.05)
    with pytest.raises(RankError) as found:
        ranks.ask([DO, DO], lambda: None)
    assert found.value.rank == 2
    assert [(event["kind"], event["rank"]) for event in log] == [("rank_late", 2), ("rank_failed", 2)]


def test_a_full_memory_is_everybodys_and_breaks_nothing() -> None:
    ranks, line, _ = leading(reply(MEMORY_FULL, error="CUDA out of memory"), reply())
    with pytest.raises(torch.OutOfMemoryError, match="rank 1"):
        ranks.ask([DO, DO], lambda: None)
    line.answers[1] = reply()
    assert ranks.ask([DO, DO], lambda: 3)[0] == 3


def test_what_rank_0_raises_itself_comes_after_the_replies() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("own")

    ranks, line, log = leading(reply(FAILED, error="the same"), reply())
    with pytest.raises(torch.OutOfMemoryError, match="own"):
        ranks.ask([DO, DO], fail)
    assert not line.waiting and not log


def test_an_interrupt_leaves_nothing_to_ask() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    ranks, _, _ = leading(reply())
    with pytest.raises(KeyboardInterrupt):
        ranks.ask([DO], interrupted)
    with pytest.raises(RankError):
        ranks.ask([DO], lambda: None)
