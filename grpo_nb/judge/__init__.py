"""LLM judge of answers, over any OpenAI-compatible server; one reward function among others.

A failure is None with its cause, never a number. All verdicts of a group come from one provider: if one fails on
any answer of a group, the next one judges the complete group, and if all fail the group is dropped and counted.
"""

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from grpo_nb.config import ConfigError, JudgeConfig
from grpo_nb.judge.asking import Asking, Outcome, Question
from grpo_nb.judge.client import Endpoint, check_ready
from grpo_nb.judge.failures import Failure
from grpo_nb.judge.host_trust import trust
from grpo_nb.judge.ledger import FILE, Ledger, Store, Verdict
from grpo_nb.judge.prompts import RUBRICS, evidence_of, messages
from grpo_nb.judge.prompts import Rubric as JudgeRubric
from grpo_nb.judge.tally import NAME, Tally
from grpo_nb.rewards.context import BESIDES
from grpo_nb.tasks import thinking
from grpo_nb.types import Example, Score

Evidence = dict[str, str]

__all__ = ["FILE", "Judge", "Tally", "trust"]


@dataclass(frozen=True)
class Attempt:
    """Outcomes of one provider for a group."""

    label: str
    outcomes: list[Outcome]

    @property
    def verdicts(self) -> int:
        return sum(isinstance(outcome, Verdict) for outcome in self.outcomes)

    @property
    def whole(self) -> bool:
        return self.verdicts == len(self.outcomes)


class Judge:
    """The reward function `judge` of one objective: a Score a completion, in [0, 1], or None with its cause.

    Args:
        objective: its name, in the log and in judge.jsonl.
        task: the built-in task whose rubric is used.
        config: servers, limits, budget.
        store: the run's judge.jsonl.

    Raises:
        ConfigError: no rubric for the task, no client, no key, or nothing left of the budget; before any request.
    """

    def __init__(self, objective: str, task: str, config: JudgeConfig, store: Store) -> None:
        if task not in RUBRICS:
            raise ConfigError(
                f"objectives.{objective}.judge: there is no rubric for task '{task}' (known: {', '.join(RUBRICS)}); "
                "set judge=null, and pass a judge of your own as a reward function"
            )
        check_ready(f"objectives.{objective}.judge", config.providers)
        self.__name__ = NAME
        self.config = config
        self._objective, self._rubric = objective, RUBRICS[task]
        self._endpoints = [Endpoint(provider, config) for provider in config.providers]
        self._ledger = Ledger(objective, config, store)
        self._ledger.check()
        self.tally = self._blank()
        """Tally of the newest step that began."""

    def check(self, examples: Sequence[Example]) -> None:
        """Check that every example has its evidence.

        Raises:
            DataError: a part of it is missing or blank.
        """
        for example in examples:
            evidence_of(self._rubric, example.columns, f"objective '{self._objective}', example {example.id}")

    async def __call__(
        self, completions: Sequence[Any], after_thinking: Sequence[str] | None = None, **columns: Any
    ) -> list[Score]:
        """The verdicts on a step's completions, in order; those of one example stand together.

        What is judged is `after_thinking`, without it the part of each completion that follows its thinking.
        """
        answers = after_thinking or [_answer(completion) for completion in completions]
        return await self.as_they_end(_at_once(answers), **columns)

    def as_they_end(self, arrivals: AsyncIterable[tuple[int, str]], **columns: Any) -> Coroutine[Any, Any, list[Score]]:
        """Scores of answers that arrive with their places in any order; a request for each is sent on arrival.

        Several steps may be judged at a time, in one event loop; `tally` is that of the newest from this call on.
        """
        self.tally = self._blank()
        return self._judged(arrivals, self.tally, columns)

    async def _judged(
        self, arrivals: AsyncIterable[tuple[int, str]], tally: Tally, columns: Mapping[str, Any]
    ) -> list[Score]:
        step = _Step(self._evidence({k: v for k, v in columns.items() if k not in BESIDES}), self._rubric, tally)
        async with AsyncExitStack() as stack:
            providers = [Asking(endpoint, self._ledger, tally) for endpoint in self._endpoints]
            for provider in providers:
                await stack.enter_async_context(provider)
            async for place, answer in arrivals:
                await self._hand_over(step, place, answer, providers)
            began = time.perf_counter()
            outcomes = await self._settle(step, providers)
        tally.seconds = time.perf_counter() - began
        tally.notices = [notice for endpoint in self._endpoints for notice in endpoint.told()]
        tally.tokens, tally.usd = self._ledger.tokens, self._ledger.usd
        return [_score(outcome) for group in outcomes for outcome in group]

    def _blank(self) -> Tally:
        return Tally(self._endpoints[0].label, tokens=self._ledger.tokens, usd=self._ledger.usd)

    def _evidence(self, columns: Mapping[str, Sequence[Any]]) -> list[Evidence]:
        """Evidence for judging each completion."""
        count = len(next(iter(columns.values()), [None]))
        rows = [{name: values[i] for name, values in columns.items()} for i in range(count)]
        where = f"objective '{self._objective}', completion"
        return [evidence_of(self._rubric, row, f"{where} {i}") for i, row in enumerate(rows)]

    async def _hand_over(self, step: "_Step", place: int, answer: str, providers: Sequence[Asking]) -> None:
        """Take an answer, and send it to the first provider once no cache can have its complete group."""
        group, question = step.take(place, answer)
        if group.asked:
            await providers[0].ask([question])
        elif not any(all(map(provider.known, group.come())) for provider in providers):
            group.asked = True
            await providers[0].ask(group.come())

    async def _settle(self, step: "_Step", providers: Sequence[Asking]) -> list[list[Outcome]]:
        """Outcomes of every group from one provider: first complete groups of the cache, then each provider in turn."""
        loop, groups = asyncio.get_running_loop(), [group.come() for group in step.groups]
        end = loop.time() + self.config.deadline_s
        tries: list[list[Attempt]] = [_remembered(group, providers, step.tally) for group in groups]
        for left, provider in zip(range(len(providers), 0, -1), providers, strict=True):
            if not (wanting := [g for g, attempts in enumerate(tries) if not _settled(attempts)]):
                break
            until = loop.time() + (end - loop.time()) / left
            outcomes = iter(await provider.outcomes([q for g in wanting for q in groups[g]], until))
            for g in wanting:
                tries[g].append(Attempt(provider.endpoint.label, list(islice(outcomes, len(groups[g])))))
        return [_final(attempts, step.tally) for attempts in tries]


@dataclass
class _Group:
    """The questions about one example's completions, as far as they have come."""

    by_place: list[Question | None]
    asked: bool = False
    """Whether requests to the first provider were sent while others were being sampled."""

    def come(self) -> list[Question]:
        return [question for question in self.by_place if question is not None]


class _Step:
    """The groups of one step: neighbours with the same evidence; an example that was sampled twice makes two groups."""

    def __init__(self, evidence: Sequence[Evidence], rubric: JudgeRubric, tally: Tally) -> None:
        self._evidence, self._rubric, self.tally = evidence, rubric, tally
        self.groups: list[_Group] = []
        self._at: list[tuple[_Group, int]] = []
        for _, same in groupby(evidence):
            self.groups.append(_Group([None for _ in same]))
            self._at += [(self.groups[-1], n) for n in range(len(self.groups[-1].by_place))]

    def take(self, place: int, answer: str) -> tuple[_Group, Question]:
        """The group that an answer belongs to, and the question that it is now."""
        group, n = self._at[place]
        question = Question(answer, messages(self._rubric, self._evidence[place], answer))
        group.by_place[n] = question
        return group, question


def _remembered(group: list[Question], providers: Sequence[Asking], tally: Tally) -> list[Attempt]:
    """Outcomes of the first provider whose cache has the complete group, so that a resumed run sends no requests."""
    for provider in providers:
        verdicts: list[Outcome] = [known for question in group if (known := provider.known(question))]
        if len(verdicts) == len(group):
            tally.cached += len(group)
            return [Attempt(provider.endpoint.label, verdicts)]
    return []


def _final(attempts: list[Attempt], tally: Tally) -> list[Outcome]:
    """Outcomes of the best attempt for a group: a complete one, else the one with most verdicts, with every cause."""
    best = max(attempts, key=lambda attempt: attempt.verdicts)
    if best.verdicts:
        tally.providers[best.label] += best.verdicts
    if best.whole:
        return best.outcomes
    tally.dropped_groups += 1
    outcomes: list[Outcome] = []
    for i, outcome in enumerate(best.outcomes):
        if isinstance(outcome, Failure):
            said = [f"{a.label}: {o.cause}" for a in attempts if isinstance(o := a.outcomes[i], Failure)]
            outcome = Failure(outcome.kind, "; ".join(said))
            tally.failures[outcome.kind] += 1
            tally.causes[outcome.cause] += 1
        outcomes.append(outcome)
    return outcomes


async def _at_once(answers: Sequence[str]) -> AsyncIterator[tuple[int, str]]:
    for place, answer in enumerate(answers):
        yield place, answer


def _answer(completion: Any) -> str:
    return thinking.after_thinking(completion if isinstance(completion, str) else completion[0]["content"])


def _settled(attempts: Sequence[Attempt]) -> bool:
    return any(attempt.whole for attempt in attempts)


def _score(outcome: Outcome) -> Score:
    if isinstance(outcome, Failure):
        return Score(value=None, cause=outcome.cause)
    return Score(value=outcome.value)
