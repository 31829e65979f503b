"""Requests to one provider in one step: each question is sent once, on arrival, within the limits of the settings."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

from grpo_nb.judge.client import Endpoint
from grpo_nb.judge.failures import AskFailed, Failure, RateLimited
from grpo_nb.judge.ledger import Ledger, Verdict, key_of
from grpo_nb.judge.prompts import Messages, UnreadableVerdict, parse_verdict
from grpo_nb.judge.replies import Reply
from grpo_nb.judge.tally import Tally


@dataclass(frozen=True)
class Question:
    """One completion of the step as the judge sees it."""

    answer: str
    messages: Messages


Outcome = Verdict | Failure

_LATE = "not done within the step's deadline_s"


class Asking:
    """One provider's replies to the questions of one step; leaving the block cancels unanswered requests.

    A verdict that the ledger had before the step is reused without a request.
    """

    def __init__(self, endpoint: Endpoint, ledger: Ledger, tally: Tally) -> None:
        self.endpoint = endpoint
        self._ledger, self._tally = ledger, tally
        self._throttle = endpoint.throttle()
        self._deadline = _Deadline()
        self._tasks: dict[str, asyncio.Task[Outcome]] = {}
        self._client: Any = None
        self._refusal = ""
        """The text of the step's newest 429."""
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._open.aclose()

    def known(self, question: Question) -> Verdict | None:
        """The verdict that was there before the step."""
        return self._before(self._key(question))

    async def ask(self, questions: Iterable[Question]) -> None:
        """Start requests for the questions that have none yet; returns before the replies."""
        for question in questions:
            key = self._key(question)
            if key in self._tasks or self._before(key):
                continue
            if self._client is None:
                self._client = await self._open.enter_async_context(self.endpoint.open())
            self._tasks[key] = asyncio.create_task(self._ask(key, question))

    async def outcomes(self, questions: list[Question], until: float) -> list[Outcome]:
        """Outcome of each question by the time `until` of the event loop: from the cache, or by a request."""
        self._deadline.set(until)
        await self.ask(questions)
        keys = list(map(self._key, questions))
        found: dict[str, Outcome] = {key: known for key in keys if (known := self._before(key))}
        self._tally.cached += len(found)
        asked = [key for key in dict.fromkeys(keys) if key not in found]
        found |= zip(asked, await asyncio.gather(*(self._tasks[key] for key in asked)), strict=True)
        return [found[key] for key in keys]

    def _key(self, question: Question) -> str:
        return key_of(self.endpoint.provider, question.messages)

    def _before(self, key: str) -> Verdict | None:
        return None if key in self._tasks else self._ledger.known(key)

    async def _ask(self, key: str, question: Question) -> Outcome:
        """Outcome of a question; a reply that the network damaged, or that was cut off too soon, is requested again."""
        outcome = await self._request(key, question)
        if isinstance(outcome, Failure) and outcome.passing:
            outcome = await self._request(key, question)
        return outcome

    async def _request(self, key: str, question: Question) -> Outcome:
        """One request, with its reply and outcome recorded; nothing is sent once the budget is used up."""
        sent = _Sent()
        try:
            async with self._deadline.bound():
                if isinstance(reply := await self._reply(question, sent), Failure):
                    return reply
            outcome = self._read(reply, question)
        except TimeoutError:
            outcome = Failure("limit" if self._refusal else "deadline", f"{_LATE}{self._refusal}")
        except AskFailed as error:
            outcome = Failure(error.kind, str(error))
        if sent.at is None:
            return outcome
        seconds = time.perf_counter() - sent.at
        self._tally.replies.append(seconds)
        self._tally.unreadable += sent.reply is not None and isinstance(outcome, Failure)
        tokens = (sent.reply.tokens_in, sent.reply.tokens_out) if sent.reply else (0, 0)
        self._ledger.write(key, self.endpoint.provider, question.answer, outcome, tokens, seconds)
        return self._first(key, outcome)

    def _first(self, key: str, outcome: Outcome) -> Outcome:
        """The first verdict on a text, where two steps requested it at a time: the one that a resumed run finds."""
        return self._ledger.known(key) or outcome if isinstance(outcome, Verdict) else outcome

    async def _reply(self, question: Question, sent: "_Sent") -> Reply | Failure:
        """The reply to a question, requested again as long as the server has had too many requests.

        Raises:
            AskFailed: the server, or the way to it, gave another reason for not replying.
        """
        while True:
            async with self._throttle.turn() as now:
                if spent := self._ledger.exhausted():
                    return Failure("budget", spent)
                sent.at = time.perf_counter()
                try:
                    sent.reply = await self.endpoint.ask(self._client, question.messages)
                except RateLimited as error:
                    self._tally.limited += 1
                    self._throttle.refused(now, error.retry_after)
                    self._refusal = f", as the server had too many requests ({error})"
                    continue
                self._throttle.answered()
                return sent.reply

    def _read(self, reply: Reply, question: Question) -> Outcome:
        endpoint = self.endpoint
        if reply.problem:
            more = reply.thought and endpoint.widen(reply, self._ledger.left(reply.tokens_in + reply.tokens_out))
            return Failure(reply.kind, reply.problem, passing=more or not reply.final)
        try:
            score, reason = parse_verdict(reply.text, question.messages[-1]["content"])
            return Verdict(score, endpoint.hidden(reason))
        except UnreadableVerdict as error:
            return Failure("unreadable", endpoint.cleaned(str(error)), passing=True)


@dataclass
class _Sent:
    """The requests of one question so far."""

    at: float | None = None
    """Time when the newest request was sent."""
    reply: Reply | None = None


class _Deadline:
    """A time limit of several blocks that is set while they run."""

    def __init__(self) -> None:
        self._until: float | None = None
        self._running: set[asyncio.Timeout] = set()

    def set(self, until: float) -> None:
        self._until = until
        for timeout in self._running:
            timeout.reschedule(until)

    @asynccontextmanager
    async def bound(self) -> AsyncIterator[None]:
        """Raises TimeoutError in the block at the time that is set by then."""
        async with asyncio.timeout_at(self._until) as timeout:
            self._running.add(timeout)
            try:
                yield
            finally:
                self._running.discard(timeout)
