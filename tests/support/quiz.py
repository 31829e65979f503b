"""A task whose right answers are known by number, and an engine that answers what it is told."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from grpo_nb.policy.model import Policy
from grpo_nb.rollout import Request
from grpo_nb.types import Example, Rollouts, Score


class Quiz:
    """Right answers are known by number; five questions to a template."""

    name = "quiz"

    def __init__(self, n: int = 60) -> None:
        self.n = n

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        return [
            Example(id=f"{split}/{i}", prompt="the", target=str(i), columns={"number": i, "cluster": f"t{i // 5}"})
            for i in range(self.n)
        ]

    def score(self, example: Example, completion: str) -> Score:
        if completion == "broken":
            return Score(value=None, cause="no verdict")
        right = completion == str(example.columns["number"])
        return Score(value=float(right), label="correct" if right else "wrong")

    def summary(self, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, float]:
        right = [s.label == "correct" for s in scores]
        return {"accuracy": sum(right) / len(right), "never": math.nan}


class Scripted:
    """An engine that answers what it is told, and remembers how it was asked."""

    def __init__(self, answer: Callable[[int], str]) -> None:
        self.answer = answer
        self.calls: list[Request] = []

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        self.calls.append(request)
        n = len(request.prompt_ids)
        texts = [self.answer(i) for i in range(n)]
        return Rollouts(request.prompt_ids, [[0]] * n, [[0.0]] * n, ["stop"] * n, texts, request.group_size)
