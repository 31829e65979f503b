"""What ranks draw and score is put together as one rank's: row by row, each completion handed over once."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from grpo_nb.beta_control import BetaState
from grpo_nb.config import ObjectiveConfig, SamplingConfig
from grpo_nb.ranks.leader import Leader
from grpo_nb.ranks.messages import Message
from grpo_nb.rewards.rubric import Rubric
from grpo_nb.rollout import Ended, Request
from grpo_nb.training import sharded, wire
from grpo_nb.training.objectives import Objective
from grpo_nb.types import Example, Rollouts, Score
from tests.support.tiny_models import policy

GROUP = 2


class Echo:
    """An engine whose completion is the prompt's last token and the row's first random number in thousandths."""

    def __init__(self, marks: bool = False) -> None:
        self.marks = marks

    def generate(self, policy: Any, request: Request) -> Rollouts:
        assert request.uniforms is not None
        ids = [
            [request.prompt_ids[row // GROUP][-1], int(1000 * request.uniforms[row, 0])] for row in range(request.rows)
        ]
        texts = [" ".join(map(str, own)) for own in ids]
        if request.ended is not None:
            request.ended([Ended(row, text) for row, text in enumerate(texts)])
        marked = [f"<{text}>" for text in texts] if self.marks else ()
        return Rollouts(request.prompt_ids, ids, [[-0.1, -0.2]] * len(ids), ["stop"] * len(ids), texts, GROUP, marked)


class Others(Leader):
    """Ranks that answer at once, by `work`."""

    def __init__(self, size: int, work: Callable[[Message], Message]) -> None:
        self.size, self.work, self.asked = size, work, list[Message | None]()

    def ask(self, messages: Sequence[Message | None], own: Callable[[], Any]) -> tuple[Any, list[Message | None]]:
        self.asked = list(messages)
        answers = [None if m is None else self.work(Message.decoded(m.encoded())) for m in messages]
        return own(), [None if a is None else Message.decoded(a.encoded()) for a in answers]


def request(prompts: int, heard: list[Ended]) -> Request:
    uniforms = torch.rand(prompts * GROUP, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = [[1, 10 + p] for p in range(prompts)]
    return Request(ids, GROUP, SamplingConfig(), uniforms, ended=heard.extend, rows_at_once=3)


@pytest.mark.parametrize(("prompts", "ranks"), [(5, 2), (4, 4), (2, 3)])
@pytest.mark.parametrize("marks", [False, True])
def test_what_is_drawn_does_not_depend_on_the_ranks(prompts: int, ranks: int, marks: bool) -> None:
    def draw(message: Message) -> Message:
        asked = wire.request_of(message, torch.device("cpu"))
        assert asked.rows_at_once == 3 and asked.ended is None
        return Message("done", *wire.drawn(Echo(marks).generate(None, asked)))

    heard, alone = list[Ended](), list[Ended]()
    model, others = policy(), Others(ranks, draw)
    engine = sharded.SharedEngine(Echo(marks), others, model)
    found = engine.generate(model, request(prompts, heard))
    assert found == Echo(marks).generate(None, request(prompts, alone))
    assert sorted(completion.row for completion in heard) == list(range(prompts * GROUP))
    if not marks:
        assert sorted(heard, key=lambda completion: completion.row) == alone
    assert len(others.asked) == ranks - 1 and sum(m is None for m in others.asked) == max(0, ranks - prompts)


def test_another_policy_is_drawn_from_here() -> None:
    others = Others(2, lambda message: pytest.fail("asked"))
    engine = sharded.SharedEngine(Echo(), others, policy())
    assert engine.generate(policy(), request(2, [])).rows_of is not None and others.asked == []


class Length:
    name = "length"

    def examples(self, split: str) -> list[Example]:
        return [Example(str(i), "prompt") for i in range(9)]

    def score(self, example: Example, completion: str) -> Score:
        value = None if completion == "none" else int(example.id) + len(completion) / 7
        return Score(value, "correct", {"length": value}, "" if value else "empty", 2.5)


def test_each_rank_scores_a_part_in_the_order_of_the_rows() -> None:
    task = Length()

    def score(message: Message) -> Message:
        known = {example.id: example for example in task.examples("train")}
        texts, examples = message.data["texts"], [known[which] for which in message.data["examples"]]
        return Message(
            "done", {"scores": wire.scores([task.score(e, t) for e, t in zip(examples, texts, strict=True)])}
        )

    own = Objective("own", ObjectiveConfig(task="length"), Rubric(task, []), [], BetaState(0.0, mode="manual"))
    by = sharded.task_scores(Others(3, score), {"own": own})
    examples, texts = task.examples("train")[:5], ["a", "bb", "none", "", "ccc"]
    found = by(task, examples, texts)
    expected = [task.score(e, t) for e, t in zip(examples, texts, strict=True)]
    assert found == expected and [s.scale for s in found] == [2.5] * 5
