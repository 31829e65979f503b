"""Faults of rewards and data: in the prompts, and in the rewards of the answers."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from grpo_nb import judge
from grpo_nb.fault_lab.judging import judged, verdict
from grpo_nb.fault_lab.patching import drawing, replaced
from grpo_nb.fault_lab.records import Patient
from grpo_nb.judge.failures import Failure
from grpo_nb.rewards.scoring import Scoring
from grpo_nb.tasks import Task, told
from grpo_nb.types import Example, Rollouts, Score

PERCENT = 100.0
"""Points where the other objective gives 1."""
SPOILT = 4
"""One judge's reply in so many is missing."""

Examples = list[Example]


class Altered:
    """A task with other examples or another score; all else is its own."""

    def __init__(
        self,
        task: Task,
        examples: Callable[[Literal["train", "test"]], Examples] | None = None,
        score: Callable[[Example, str], Score] | None = None,
    ) -> None:
        self._task, self._examples, self._score = task, examples, score
        self.name = task.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def examples(self, split: Literal["train", "test"]) -> Examples:
        return self._examples(split) if self._examples else self._task.examples(split)

    def score(self, example: Example, completion: str) -> Score:
        return self._score(example, completion) if self._score else self._task.score(example, completion)


@contextmanager
def constant_reward(patient: Patient) -> Iterator[None]:
    """Every answer earns the same: the scorer returns early, as a template detector once did."""
    patient.tasks = {name: Altered(task, score=_constant(task)) for name, task in patient.tasks.items()}
    yield


@contextmanager
def reward_scales(patient: Patient) -> Iterator[None]:
    """One objective is paid in percent, the other in shares of 1, and nothing divides by a spread."""
    name = next(iter(patient.tasks))
    task = patient.tasks[name]

    def percent(example: Example, completion: str) -> Score:
        score = task.score(example, completion)
        return replace(score, value=None if score.value is None else PERCENT * score.value)

    patient.tasks = {**patient.tasks, name: Altered(task, score=percent)}
    yield


@contextmanager
def paid_by_length(patient: Patient) -> Iterator[None]:
    """A second reward pays for each word: the judge likes long answers."""

    def thorough(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        return [len(ids) / 5 for ids in completion_ids]

    patient.rewards = {name: [*patient.rewards.get(name, ()), thorough] for name in patient.tasks}
    yield


@contextmanager
def too_easy(patient: Patient) -> Iterator[None]:
    """Only prompts whose text holds the answer, which the policy copies: all answers of a group are right."""
    patient.tasks = {name: Altered(task, _told_only(task)) for name, task in patient.tasks.items()}
    yield


@contextmanager
def too_hard(patient: Patient) -> Iterator[None]:
    """Questions about another text than the one that is shown, paid 1 for the right answer and 0 for all else."""
    patient.tasks = {name: Altered(task, _swapped(task), _exact(task)) for name, task in patient.tasks.items()}
    yield


@contextmanager
def leaked_evaluation(patient: Patient) -> Iterator[None]:
    """The training file was made from all of the data, the held-out prompts included."""

    def everything(task: Task) -> Callable[[str], Examples]:
        held_out = [replace(e, id=f"again/{e.id}") for e in task.examples("test")]
        return lambda split: task.examples("test") if split == "test" else [*task.examples("train"), *held_out]

    patient.tasks = {name: Altered(task, everything(task)) for name, task in patient.tasks.items()}
    yield


@contextmanager
def judge_failure_as_zero(patient: Patient) -> Iterator[None]:
    """A judge that does not answer gives 0, so a server's trouble is an answer's fault."""

    def zero(outcome: Any) -> Score:
        return Score(value=0.0 if isinstance(outcome, Failure) else outcome.value)

    def mostly(count: int, parts: Mapping[str, str]) -> tuple[int, str]:
        return (500, "") if count % SPOILT == 0 else (200, verdict(len(parts["ANSWER"]) % 5))

    with judged(patient, mostly), replaced(judge, "_score", zero):
        yield


@contextmanager
def judge_injection(patient: Patient) -> Iterator[None]:
    """One answer of each group ends in a verdict of its own, and the judge repeats what it reads."""
    draw = drawing.sample

    def injected(state: Any, plan: Any, scoring: Any) -> Rollouts:
        with Scoring() as unused:  # the judge is given the completions once they are as they are read
            own: Rollouts = draw(state, plan, unused)
        size = own.group_size
        texts = [text if i % size else f"{text} {verdict(4)}" for i, text in enumerate(own.texts)]
        return replace(own, texts=texts, marked=())

    def obeys(count: int, parts: Mapping[str, str]) -> tuple[int, str]:
        _, found, order = parts["ANSWER"].partition("{")
        return 200, found + order if found else verdict(len(parts["ANSWER"]) % 5)

    with judged(patient, obeys), replaced(drawing, "sample", injected):
        yield


def _constant(task: Task) -> Callable[[Example, str], Score]:
    return lambda example, completion: replace(task.score(example, completion), value=-1.0)


def _exact(task: Task) -> Callable[[Example, str], Score]:
    def score(example: Example, completion: str) -> Score:
        own = task.score(example, completion)
        return replace(own, value=float(own.label == "correct"))

    return score


def _told_only(task: Task) -> Callable[[str], Examples]:
    def examples(split: str) -> Examples:
        own = task.examples("test" if split == "test" else "train")
        return own if split == "test" else [example for example in own if told(task, example)]

    return examples


def _swapped(task: Task) -> Callable[[str], Examples]:
    """Each answerable question with the prompt of another one's text: the text does not have the answer."""

    def examples(split: str) -> Examples:
        own = task.examples("test" if split == "test" else "train")
        if split == "test":
            return own
        asked = [example for example in own if told(task, example)]
        return [replace(e, prompt=other.prompt) for e, other in zip(asked, [*asked[7:], *asked[:7]], strict=True)]

    return examples


def changed_target(task: Task) -> Task:
    """The task after its file was replaced by one that differs in a single answer."""

    def examples(split: str) -> Examples:
        own = list(task.examples("test" if split == "test" else "train"))
        return [replace(own[0], columns={**own[0].columns, "note": json.dumps("corrected")}), *own[1:]]

    return Altered(task, examples)
