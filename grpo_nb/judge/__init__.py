"""An LLM as a further judge of answers, over any OpenAI-compatible server; a reward function among others.

A failure is None with its cause, never a number. All verdicts of a group come from one provider: where one fails on
any answer of a group, the next is asked about the whole group, and where all fail the group is dropped and counted.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from grpo_nb.config import ConfigError, JudgeConfig
from grpo_nb.judge.client import Endpoint, check_ready
from grpo_nb.judge.failures import AskFailed, Failure
from grpo_nb.judge.host_trust import trust
from grpo_nb.judge.ledger import FILE, Ledger, Store, Verdict, key_of
from grpo_nb.judge.prompts import RUBRICS, Messages, UnreadableVerdict, evidence_of, messages, parse_verdict
from grpo_nb.judge.replies import Reply
from grpo_nb.judge.tally import NAME, Tally
from grpo_nb.rewards.context import BESIDES
from grpo_nb.tasks import thinking
from grpo_nb.types import Example, Score

__all__ = ["FILE", "Judge", "Tally", "trust"]


@dataclass(frozen=True)
class Question:
    """One completion of the step as it is put to the judge."""

    answer: str
    messages: Messages


Outcome = Verdict | Failure


@dataclass(frozen=True)
class Attempt:
    """What one provider gave for a group."""

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

    only_waits = True
    """For its servers, so that it runs in the background of a step (`rewards.Scoring`)."""

    def __init__(self, objective: str, task: str, config: JudgeConfig, store: Store) -> None:
        if task not in RUBRICS:
            raise ConfigError(
                f"objectives.{objective}.judge: there is no rubric for task '{task}' (known: {', '.join(RUBRICS)}); "
                "set judge=null, and pass a judge of your own as a reward function"
            )
        check_ready(f"objectives.{objective}.judge", config)
        self.__name__ = NAME
        self.config = config
        self._objective, self._rubric = objective, RUBRICS[task]
        self._endpoints = [Endpoint(provider, config) for provider in config.providers]
        self._ledger = Ledger(objective, config, store)
        self._ledger.check()
        self.tally = self._blank()
        """Of the newest step."""

    def check(self, examples: Sequence[Example]) -> None:
        """See that the evidence of every example is there.

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
        began, self.tally = time.perf_counter(), self._blank()
        answers = after_thinking or [_answer(completion) for completion in completions]
        groups = self._groups(answers, {k: v for k, v in columns.items() if k not in BESIDES})
        outcomes = await self._settle(groups)
        self.tally.seconds = time.perf_counter() - began
        self.tally.notices = [notice for endpoint in self._endpoints for notice in endpoint.told()]
        self.tally.tokens, self.tally.usd = self._ledger.tokens, self._ledger.usd
        return [_score(outcome) for group in outcomes for outcome in group]

    def _blank(self) -> Tally:
        return Tally(self._endpoints[0].label, tokens=self._ledger.tokens, usd=self._ledger.usd)

    def _groups(self, answers: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[list[Question]]:
        """Neighbours with the same evidence are a group (two draws of one example are one: nothing gets mixed)."""
        rows = []
        for i, answer in enumerate(answers):
            own = {name: values[i] for name, values in columns.items()}
            evidence = evidence_of(self._rubric, own, f"objective '{self._objective}', completion {i}")
            rows.append((evidence, answer))
        return [
            [Question(answer, messages(self._rubric, evidence, answer)) for evidence, answer in group]
            for _, group in groupby(rows, key=lambda row: row[0])
        ]

    async def _settle(self, groups: list[list[Question]]) -> list[list[Outcome]]:
        """Every group from one provider: the cache's whole groups as they are, then provider after provider."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.config.deadline_s
        tries: list[list[Attempt]] = [self._remembered(group) for group in groups]
        for left, endpoint in zip(range(len(self._endpoints), 0, -1), self._endpoints, strict=True):
            if not (wanting := [g for g, attempts in enumerate(tries) if not _settled(attempts)]):
                break
            until = loop.time() + (end - loop.time()) / left
            outcomes = await self._ask_all(endpoint, [q for g in wanting for q in groups[g]], until)
            for g in wanting:
                keys = [key_of(endpoint.provider, q.messages) for q in groups[g]]
                tries[g].append(Attempt(endpoint.label, [outcomes[key] for key in keys]))
        return [self._final(attempts) for attempts in tries]

    def _remembered(self, group: list[Question]) -> list[Attempt]:
        """The first provider that the cache knows the whole group of, so that a resumed run asks nobody else."""
        for endpoint in self._endpoints:
            known = [self._ledger.known(key_of(endpoint.provider, q.messages)) for q in group]
            verdicts: list[Outcome] = [verdict for verdict in known if verdict]
            if len(verdicts) == len(group):
                self.tally.cached += len(group)
                return [Attempt(endpoint.label, verdicts)]
        return []

    async def _ask_all(self, endpoint: Endpoint, questions: Sequence[Question], until: float) -> dict[str, Outcome]:
        """What one provider says to each question, by key: from the cache, else by a request; equal ones are one."""
        keyed = {key_of(endpoint.provider, question.messages): question for question in questions}
        outcomes: dict[str, Outcome] = {key: known for key in keyed if (known := self._ledger.known(key))}
        self.tally.cached += len(outcomes)
        gate = asyncio.Semaphore(self.config.concurrency)
        async with endpoint.open() as client:
            asked = [key for key in keyed if key not in outcomes]
            fresh = await asyncio.gather(*(self._ask(endpoint, client, key, keyed[key], gate, until) for key in asked))
        return outcomes | dict(zip(asked, fresh, strict=True))

    async def _ask(
        self, endpoint: Endpoint, client: Any, key: str, question: Question, gate: asyncio.Semaphore, until: float
    ) -> Outcome:
        """What comes of a question; a reply that a network spoilt, or that was cut off too soon, is asked for again."""
        outcome = await self._request(endpoint, client, key, question, gate, until)
        if isinstance(outcome, Failure) and outcome.passing:
            outcome = await self._request(endpoint, client, key, question, gate, until)
        return outcome

    async def _request(
        self, endpoint: Endpoint, client: Any, key: str, question: Question, gate: asyncio.Semaphore, until: float
    ) -> Outcome:
        """One request, written down with what came of it; nothing is sent once the budget is used up."""
        began, reply = None, None
        try:
            async with asyncio.timeout_at(until), gate:
                if spent := self._ledger.exhausted():
                    return Failure("budget", spent)
                began = time.perf_counter()
                reply = await endpoint.ask(client, question.messages)
            outcome = self._read(endpoint, reply, question)
        except TimeoutError:
            outcome = Failure("deadline", "not done within the step's deadline_s")
        except AskFailed as error:
            outcome = Failure(error.kind, str(error))
        if began is None:
            return outcome
        seconds = time.perf_counter() - began
        self.tally.replies.append(seconds)
        self.tally.unreadable += reply is not None and isinstance(outcome, Failure)
        self._ledger.write(
            key,
            endpoint.provider,
            question.answer,
            outcome,
            (reply.tokens_in, reply.tokens_out) if reply else (0, 0),
            seconds,
        )
        return outcome

    def _read(self, endpoint: Endpoint, reply: Reply, question: Question) -> Outcome:
        if reply.problem:
            more = reply.thought and endpoint.widen(reply, self._ledger.left(reply.tokens_in + reply.tokens_out))
            return Failure(reply.kind, reply.problem, passing=more or not reply.final)
        try:
            score, reason = parse_verdict(reply.text, question.messages[-1]["content"])
            return Verdict(score, endpoint.hidden(reason))
        except UnreadableVerdict as error:
            return Failure("unreadable", endpoint.cleaned(str(error)), passing=True)

    def _final(self, attempts: list[Attempt]) -> list[Outcome]:
        """The one attempt that stands for a group: a whole one, else the one that knows most, with every cause."""
        best = max(attempts, key=lambda attempt: attempt.verdicts)
        if best.verdicts:
            self.tally.providers[best.label] += best.verdicts
        if best.whole:
            return best.outcomes
        self.tally.dropped_groups += 1
        outcomes: list[Outcome] = []
        for i, outcome in enumerate(best.outcomes):
            if isinstance(outcome, Failure):
                said = [f"{a.label}: {o.cause}" for a in attempts if isinstance(o := a.outcomes[i], Failure)]
                outcome = Failure(outcome.kind, "; ".join(said))
                self.tally.failures[outcome.kind] += 1
                self.tally.causes[outcome.cause] += 1
            outcomes.append(outcome)
        return outcomes


def _answer(completion: Any) -> str:
    return thinking.after_thinking(completion if isinstance(completion, str) else completion[0]["content"])


def _settled(attempts: Sequence[Attempt]) -> bool:
    return any(attempt.whole for attempt in attempts)


def _score(outcome: Outcome) -> Score:
    if isinstance(outcome, Failure):
        return Score(value=None, cause=outcome.cause)
    return Score(value=outcome.value)
