"""One server that is asked for verdicts: requests, what each server cannot do, and what went wrong in words.

Retries and their growing pauses are the `openai` client's own. The key is read from the environment for each client
and kept in no object of ours; whatever a server says is cleared of it before it becomes a cause.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from grpo_nb.config import ConfigError, JudgeConfig, JudgeProvider
from grpo_nb.judge.prompts import VERDICT_FORMAT, Messages

BYTES_PER_TOKEN = 4
"""What is counted where a server does not say how many tokens it used, or says what cannot be."""
LONGEST_CAUSE = 200
_ENDED = {"length": "cut off at max_tokens", "content_filter": "withheld by the server's content filter"}
"""Why a reply is no whole one, by the reason for its end that the server gives."""


@dataclass(frozen=True)
class Reply:
    """What the judge wrote, and what it took."""

    text: str
    tokens_in: int
    tokens_out: int
    problem: str = ""
    """Why the text cannot be a verdict, where that shows before it is read."""
    final: bool = False
    """The model ended so itself: at temperature 0 it would do it again."""


class AskFailed(Exception):
    """There is no reply; the message says why."""


class Endpoint:
    """One provider. What its server refused once (a JSON schema, a seed) it is not asked for again."""

    def __init__(self, provider: JudgeProvider, config: JudgeConfig) -> None:
        self.provider = provider
        self.label = provider.label
        self._config = config
        self._options: dict[str, Any] = {
            "temperature": 0,
            "seed": 0,
            "max_tokens": config.max_tokens,
            "response_format": VERDICT_FORMAT,
        }

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        """A client for one step: it belongs to the event loop that it was made in."""
        from openai import AsyncOpenAI  # half a second, and only a run with a judge needs it

        async with AsyncOpenAI(
            api_key=key_of(self.provider) or "none",
            base_url=self.provider.base_url,
            timeout=self._config.timeout_s,
            max_retries=self._config.retries,
        ) as client:
            yield client

    async def ask(self, client: Any, messages: Messages) -> Reply:
        """The reply to one request.

        Raises:
            AskFailed: none came, in spite of the client's retries.
        """
        import openai

        options: dict[str, Any] | None = dict(self._options)
        while options is not None:
            try:
                response = await client.chat.completions.create(model=self.provider.model, messages=messages, **options)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                said, options = str(error), _without(options, str(error))
            except openai.OpenAIError as error:
                raise AskFailed(self._clean(self._words(error))) from None
            except (ValueError, RecursionError) as error:
                return Reply(
                    "", *_tokens(None, messages, ""), problem=f"the body is no JSON ({self._clean(str(error))})"
                )
            else:
                self._options = options
                reply = _reply(response, messages)
                return replace(reply, text=self._hidden(reply.text), problem=self._clean(reply.problem))
        raise AskFailed(self._clean(said))

    def _words(self, error: Exception) -> str:
        import openai

        if isinstance(error, openai.APITimeoutError):
            return f"no answer within {self._config.timeout_s:g} s, {self._config.retries + 1} times"
        if isinstance(error, openai.APIConnectionError):
            return f"no connection ({type(error.__cause__ or error).__name__}: {error.__cause__ or error})"
        return f"{type(error).__name__}: {error}"

    def _clean(self, said: str) -> str:
        said = self._hidden(said)
        return said if len(said) <= LONGEST_CAUSE else f"{said[:LONGEST_CAUSE]}..."

    def _hidden(self, said: str) -> str:
        """Without the key: servers repeat it in their errors, and a model may repeat anything."""
        key = key_of(self.provider)
        return said.replace(key, "***") if key else said


def key_of(provider: JudgeProvider) -> str:
    """The key, from the environment; empty where there is none."""
    return os.environ.get(provider.api_key_env, "").strip() if provider.api_key_env else ""


def check_ready(where: str, config: JudgeConfig) -> None:
    """Refuse a judge that could not be asked.

    Raises:
        ConfigError: the client is not installed, or a key is not in the environment.
    """
    try:
        import openai  # noqa: F401
    except ImportError:
        raise ConfigError(
            f'{where} needs the openai client, which is not installed; pip install "grpo_nb[judge]"'
        ) from None
    for provider in config.providers:
        if provider.api_key_env and not key_of(provider):
            raise ConfigError(
                f"{where}: environment variable {provider.api_key_env} is not set, and {provider.label} needs a key; "
                "set it for the process that trains, or api_key_env=null for a server that wants none"
            )


def _without(options: dict[str, Any], said: str) -> dict[str, Any] | None:
    """The options without those that a server refused in these words; None where nothing is left to leave out."""
    if "max_completion_tokens" in said and "max_tokens" in options:
        return {("max_completion_tokens" if k == "max_tokens" else k): v for k, v in options.items()}
    named = [name for name in ("response_format", "seed", "temperature") if name in options and name in said]
    refused = named or (["response_format"] if "response_format" in options else [])
    return {k: v for k, v in options.items() if k not in refused} if refused else None


def _reply(response: Any, messages: Messages) -> Reply:
    """A server's answer as a Reply; the client hands on what is no chat completion at all without a word."""
    try:
        choice = response.choices[0]
        text, refusal = choice.message.content, getattr(choice.message, "refusal", None)
        ended = choice.finish_reason
    except (AttributeError, TypeError, IndexError, KeyError):
        text, refusal, ended = None, None, None
    whole = isinstance(text, str)
    why = _ENDED.get(str(ended), "") or (f"the model refused: {refusal}" if refusal and not whole else "")
    problem = f"{why}: {text[:80]!r}" if why and text and whole else why
    if not whole:
        text, problem = "", problem or "the server's answer is no chat completion"
    return Reply(text, *_tokens(response, messages, text), problem=problem, final=bool(why))


def _tokens(response: Any, messages: Messages, text: str) -> tuple[int, int]:
    usage = getattr(response, "usage", None)
    counts = [getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
    guess = [
        sum(len(m["content"].encode()) for m in messages) // BYTES_PER_TOKEN,
        len(text.encode()) // BYTES_PER_TOKEN,
    ]
    found = [c if type(c) is int and c >= min(g, 1) else g for c, g in zip(counts, guess, strict=True)]
    return found[0], found[1]
