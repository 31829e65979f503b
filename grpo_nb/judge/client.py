"""Client of one server for verdicts: requests, the parameters that a server refuses, and its errors as text.

Retries and their growing pauses are the `openai` client's own, but for 429 (`Throttle`). The key is read from the
environment for each client and kept in no object of ours; it is removed from every text of a server before that is cut
or kept.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from grpo_nb.config import ConfigError, JudgeConfig, JudgeProvider
from grpo_nb.judge import host_trust
from grpo_nb.judge.failures import AskFailed, Kind, RateLimited
from grpo_nb.judge.network import FINAL, RATE_LIMITED, bounded_client, check_proxies, proxy_of, retry_after
from grpo_nb.judge.prompts import VERDICT_FORMAT, Messages
from grpo_nb.judge.refusals import error_text, plain, refused
from grpo_nb.judge.replies import Reply, read_reply, words_in
from grpo_nb.judge.secrets import strike
from grpo_nb.judge.throttle import Pace, Throttle
from grpo_nb.printable import clean_logger

logger = clean_logger(__name__)

LONGEST_CAUSE = 300
THINKING = 20
"""Factor on max_tokens, from then on, for a model that was cut off while it was thinking."""
_STATUS: dict[int, Kind] = {401: "key", 403: "key", 402: "limit", 429: "limit", 404: "address", 405: "address"}
_STATUS |= {407: "proxy", 408: "timeout"}
_CAPS = ("max_tokens", "max_completion_tokens")
_NO_CREDIT = "insufficient_quota"
"""Code in the body of a 429 of an account without credit: waiting does not help."""
_BASE_URL_ENDS = "base_url ends before /chat/completions, usually in /v1"

Notice = dict[str, Any]
"""Event for the run's log, logged once: its `kind` and its fields."""


class Endpoint:
    """One provider. Parameters that its server refused once (a JSON schema, a seed) are not sent again."""

    def __init__(self, provider: JudgeProvider, config: JudgeConfig) -> None:
        self.provider = provider
        self.label = provider.label
        self.pace = Pace.full(config.concurrency)
        self._turns: tuple[asyncio.AbstractEventLoop, Throttle] | None = None
        self._notices: list[Notice] = []
        self._config = config
        self._url = f"{provider.base_url}/chat/completions"
        self._budget = config.max_tokens
        self._options: dict[str, Any] = {
            "temperature": 0,
            "seed": 0,
            "max_tokens": config.max_tokens,
            "response_format": VERDICT_FORMAT,
        }

    def throttle(self) -> Throttle:
        """The turns of requests in the running event loop; steps that are judged at a time there share them."""
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:
            self._turns = loop, Throttle(self.pace)
        return self._turns[1]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        """A client for one step: it belongs to its event loop."""
        from openai import AsyncOpenAI  # half a second, and only a run with a judge needs it

        key = key_of(self.provider) or "none"
        async with AsyncOpenAI(
            api_key=key,
            base_url=self.provider.base_url,
            timeout=self._config.timeout_s,
            max_retries=self._config.retries,
            http_client=bounded_client(self._config.timeout_s, key),
        ) as client:
            yield client

    async def ask(self, client: Any, messages: Messages) -> Reply:
        """The reply to one request; parameters that the server refuses by name are left out or renamed.

        Raises:
            RateLimited: the server has had too many requests.
            AskFailed: no reply came, in spite of the client's retries.
        """
        import openai

        options, budget = self._current_options(), self._budget
        while True:
            try:
                response = (
                    await client.chat.completions.create(  # extra_body: as it is, without a walk through its types
                        model=self.provider.model, messages=messages, extra_body=options
                    )
                )
            except openai.APIStatusError as error:
                words = error_text(_body(error))
                if (fewer := self._without(options, words, error.status_code)) is None:
                    raise self._refusal(error, words) from None
                options = fewer
            except openai.OpenAIError as error:
                raise self._unreached(error) from None
            except (ValueError, RecursionError) as error:
                return self._cleaned(_broken(str(error), messages))
            else:
                reply = read_reply(response, messages, budget)
                fewer = self._without(options, words_in(response)) if reply.no_completion else None
                if fewer is None:
                    self._keep(options)
                    return self._cleaned(reply)
                options = fewer

    def widen(self, reply: Reply, left: int | None) -> bool:
        """Raise `max_tokens` for thinking, once, within the `left` tokens of the budget; returns whether it was raised.

        Args:
            reply: one that was cut off before its verdict.
        """
        wide = self._config.max_tokens * THINKING
        wide = wide if left is None else min(wide, left)
        if self._budget == self._config.max_tokens < wide:
            self._budget = wide
            message = (
                f"{self.label} was cut off at max_tokens={self._config.max_tokens} while it was thinking; further "
                f"requests allow {wide}"
            )
            self._note("judge_thinks", message, max_tokens=wide)
        return self._budget > reply.budget

    def told(self) -> list[Notice]:
        """Notices about the server since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def cleaned(self, text: str) -> str:
        """A text of the server on one line, without any key, cut last."""
        text = plain(self.hidden(text))
        return text if len(text) <= LONGEST_CAUSE else f"{text[:LONGEST_CAUSE]}..."

    def hidden(self, text: str) -> str:
        """The text without the keys and a proxy's password: servers repeat them, and a model may repeat anything."""
        proxy = proxy_of(self._url)
        keys = [key_of(provider) for provider in self._config.providers]
        return strike(text, [*keys, *(proxy.secrets if proxy else ())])

    def _current_options(self) -> dict[str, Any]:
        return {name: self._budget if name in _CAPS else value for name, value in self._options.items()}

    def _without(self, options: dict[str, Any], words: str, status: int = 200) -> dict[str, Any] | None:
        """The options without those that a server refused in these words; None where it refused none of them."""
        if status in (401, 403, 407, 429) or (not words and status == 200):
            return None
        named = refused(words, list(options), self.provider.model)
        if "max_tokens" in options and ("max_tokens" in named or refused(words, _CAPS[1:], self.provider.model)):
            return _less(_renamed_cap(options), {*named} - {"max_tokens"})
        if not named and status in (400, 422) and "response_format" in options:
            named = ["response_format"]  # the least common of them
        return _less(options, named) if named else None

    def _keep(self, options: dict[str, Any]) -> None:
        """Use these options from here on, and note once which were refused."""
        if gone := [name for name in self._options if name not in options]:
            now = [name for name in options if name not in self._options]
            message = f"{self.label} refuses {', '.join(gone)}; further requests are sent " + (
                f"with {', '.join(now)} instead" if now else "without"
            )
            self._note("judge_parameters", message, refused=gone, instead=now)
            self._options = dict(options)

    def _note(self, kind: str, message: str, **more: object) -> None:
        logger.warning(message)
        self._notices.append({"kind": kind, "message": message, **more})

    def _refusal(self, error: Any, words: str) -> AskFailed:
        """Error for a status other than 200, with the server's words."""
        status, proxy = error.status_code, proxy_of(self._url)
        kind: Kind = _STATUS.get(status, "server" if status >= 500 else "refused")
        told = f"{type(error).__name__}: {status}" + (f" {words}" if words else "")
        if status == RATE_LIMITED and error.response.headers.get(FINAL) != "false" and _NO_CREDIT not in _body(error):
            return RateLimited(self.cleaned(told), retry_after(error.response.headers))
        if kind == "address":
            known = "" if self.provider.base_url.endswith("/v1") else f" ({_BASE_URL_ENDS})"
            return AskFailed(kind, self._with(told, f"requested from {error.request.url}{known}"))
        if proxy and not _is_json(_body(error)) and (kind in ("proxy", "server") or status == 403):
            return AskFailed("proxy", self._with(told, str(proxy)))
        return AskFailed(kind, self.cleaned(told))

    def _unreached(self, error: Exception) -> AskFailed:
        """Error for a request that got no response."""
        import openai

        proxy, cause = proxy_of(self._url), error.__cause__ or error
        if isinstance(error, openai.APITimeoutError):
            tries = self._config.retries + 1
            told = f"no answer within {self._config.timeout_s:g} s, {tries} times"
            return AskFailed("timeout", self._with(told, str(proxy)) if proxy else told)
        if isinstance(error, openai.APIConnectionError):
            told, where = f"no connection ({type(cause).__name__}: {cause})", f"requested from {self._url}"
            return AskFailed(
                "proxy" if proxy else "connection", self._with(told, f"{where} {proxy}" if proxy else where)
            )
        return AskFailed("refused", self.cleaned(f"{type(error).__name__}: {error}"))

    def _with(self, told: str, more: str) -> str:
        """Two sentences of which the second, our own, is kept in full."""
        return f"{self.cleaned(told)}, {self.hidden(more)}" if more else self.cleaned(told)

    def _cleaned(self, reply: Reply) -> Reply:
        problem = self.cleaned(reply.problem)
        if reply.no_completion and problem:
            proxy = proxy_of(self._url)
            problem = self._with(reply.problem, f"requested from {self._url}" + (f" {proxy}" if proxy else ""))
        return replace(reply, text=self.hidden(reply.text), problem=problem)


def key_of(provider: JudgeProvider) -> str:
    """API key from the environment; empty where the variable is missing."""
    return os.environ.get(provider.api_key_env, "").strip() if provider.api_key_env else ""


def check_ready(where: str, providers: Collection[JudgeProvider]) -> None:
    """Refuse servers to which no request could be sent.

    Raises:
        ConfigError: the client is not installed, a key is not in the environment or was never confirmed for its server
            (see `trusting`), or a proxy cannot be used.
    """
    try:
        import openai  # noqa: F401
    except ImportError:
        raise ConfigError(
            f'{where} needs the openai client, which is not installed; pip install "grpo_nb[judge]"'
        ) from None
    for provider in providers:
        key = key_of(provider)
        if provider.api_key_env and not key:
            raise ConfigError(
                f"{where}: environment variable {provider.api_key_env} is not set, and {provider.label} needs a key; "
                "set it for the process that trains, or api_key_env=null for a server that wants none"
            )
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                f"{where}: the key in {provider.api_key_env} has characters that no HTTP header can carry (line "
                "breaks, or letters that are not ASCII); set the variable to the key alone"
            )
    host_trust.check(where, providers)
    check_proxies(where)
    for provider in providers:
        _check_detour(where, provider)


def _check_detour(where: str, provider: JudgeProvider) -> None:
    """Warn of a server on this machine that is reached through a proxy, which is seldom intended; refuse it with a key.

    Raises:
        ConfigError: the key would go over plain http to a proxy on another machine.
    """
    proxy = proxy_of(provider.base_url)
    if proxy is None or not host_trust.on_this_machine(provider.base_url):
        return
    if host_trust.in_the_clear(provider) and not host_trust.on_this_machine(proxy.address):
        raise ConfigError(
            f"{where}: the key in {provider.api_key_env} would go over plain http to another machine, because "
            f"requests to {provider.label} go {proxy}"
        )
    logger.warning("%s: %s is on this machine, but requests to it go %s", where, provider.label, proxy)


def _body(error: Any) -> str:
    """The body of an answer with an error status, as it came."""
    try:
        return str(error.response.text)
    except Exception:  # it was closed unread, or its bytes are no text
        return str(error.body or "")


def _is_json(body: str) -> bool:
    return body.lstrip()[:1] in ("{", "[")


def _broken(problem: str, messages: Messages) -> Reply:
    reply = read_reply(None, messages, 0)
    return replace(reply, problem=f"the body is no JSON ({problem})")


def _less(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def _renamed_cap(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"max_completion_tokens" if name == "max_tokens" else name: value for name, value in options.items()}
