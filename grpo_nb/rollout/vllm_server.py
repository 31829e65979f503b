"""Client of a vLLM server over HTTP: requests, the meaning of its refusals, and the patience with its failures."""

import asyncio
import os
import shlex
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from grpo_nb.config import ConfigError, RolloutConfig
from grpo_nb.judge.client import check_ready, key_of
from grpo_nb.judge.network import bounded_client, http_library, proxy_of
from grpo_nb.judge.secrets import strike
from grpo_nb.printable import Clean, clean_logger, one_line

logger = clean_logger(__name__)

URL = "GRPO_NB_VLLM_URL"
"""Environment variable: the server's address, if it differs from that at the run's start."""
PROGRAM = "GRPO_NB_VLLM"
"""Environment variable: the `vllm` command of its own environment, which the trainer starts. No run can set it."""
RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `--max-lora-rank`."""
LARGEST_REPLY = 256 << 20
LONGEST_WORDS = 300
ADVICE = f"See the server's log, start it, or correct rollout.url or {URL}"
PAUSES = (0.2, 5.0)
"""Seconds before the first further try and, after doubling, at most."""
RELOADS = 3
"""Times in a row that a request may find its adapter missing, which is loaded again."""
_LOADED = "already been loaded"
_PASSING = {408, 429}
_MISSING = 404


class ServerError(Clean, RuntimeError):
    """Raised when a vLLM server lacks a needed feature, or did not answer for too long."""


class Logprobs(BaseModel):
    token_logprobs: list[float]


class Choice(BaseModel):
    """One completion of a reply."""

    index: int
    token_ids: list[int]
    prompt_token_ids: list[int]
    logprobs: Logprobs
    finish_reason: Literal["stop", "length", "abort"]


class Completions(BaseModel):
    """A reply to /v1/completions."""

    choices: list[Choice]


class Card(BaseModel):
    """A model in the reply to /v1/models; an adapter has a parent."""

    id: str
    parent: str | None = None
    max_model_len: int | None = None


class Cards(BaseModel):
    """A reply to /v1/models."""

    data: list[Card]


class Server:
    """Address of the server and its timeouts.

    Args:
        own: address of the server that the trainer starts itself; it replaces every other, and no key of the
            environment is sent there.

    Raises:
        ConfigError: no address is set.
    """

    def __init__(self, rollout: RolloutConfig, own: str = "") -> None:
        given = own or os.environ.get(URL, "").strip()
        changed = {"url": given} | ({"api_key_env": None} if own else {})
        settings = RolloutConfig.model_validate(rollout.model_dump() | changed) if given else rollout
        if settings.server is None:
            raise ConfigError(
                f"rollout.engine='vllm' needs a server. Set rollout.url or {URL} to the address of a running one, e.g. "
                f"http://127.0.0.1:8000, or {PROGRAM} to the `vllm` command that the trainer starts"
            )
        self.provider = settings.server
        self._own_word = bool(given) and not settings.api_key_env
        self._timeout_s, self._patience_s = settings.timeout_s, settings.patience_s
        self._own_key = ""
        self.revive: Callable[[], float] = lambda: 0.0
        """Called where it cannot be reached, before the next try; seconds that a server it starts needs to answer."""
        self.advice: Callable[[], str] = lambda: ADVICE
        """What an error says where it gives no answer."""

    @property
    def label(self) -> str:
        """Its address, as errors name it."""
        return self.provider.base_url.removesuffix("/v1")

    def move(self, url: str, key: str) -> None:
        """Take the address and the key of a server that was started."""
        self._own_key = key
        self.provider = self.provider.model_copy(update={"base_url": url})

    def check_ready(self) -> None:
        """Refuse a server to which requests are not allowed, before anything is sent.

        Raises:
            ConfigError: as `judge.client.check_ready`: the host or its key was never confirmed on this machine.
        """
        check_ready("rollout.url", () if self._own_word else [self.provider])

    @asynccontextmanager
    async def open(self, patience_s: float | None = None) -> AsyncIterator["Session"]:
        """A connection for one rollout, in the event loop that made it."""
        key = self._own_key or key_of(self.provider) or "none"
        patience = self._patience_s if patience_s is None else patience_s
        async with bounded_client(self._timeout_s, key, LARGEST_REPLY) as client:
            yield Session(client, self.label, (key, patience), self.revive, self.advice)


class Session:
    """Requests to a server during one rollout. While it is unreachable or fails they are repeated, for `patience_s`.

    A server that `revive` started again has the seconds that it needs instead.
    """

    def __init__(
        self,
        client: Any,
        url: str,
        limits: tuple[str, float],
        revive: Callable[[], float] = lambda: 0.0,
        advice: Callable[[], str] = lambda: ADVICE,
    ) -> None:
        self._client, self._url, self._revive, self._advice = client, url, revive, advice
        self._key, self._patience_s = limits
        self._errors = http_library().TransportError
        self._silent = False
        """Whether its failure was logged; several requests meet the same failure."""
        self._starts_until = 0.0
        """Time until which a server that was started again may be silent, as `time.monotonic` counts."""

    async def about(self) -> tuple[str, Card]:
        """The server's version, and the model that it serves.

        Raises:
            ServerError: it does not answer as a vLLM server.
        """
        status, found = await self._ask("/v1/models")
        if status != 200:
            raise ServerError(f"{self._url}/v1/models answers with status {status}: {self._words(found)}")
        try:
            (base,) = (card for card in Cards.model_validate(found).data if card.parent is None)
        except (ValidationError, ValueError):
            raise ServerError(f"{self._url} lists no base model under /v1/models: it is no vLLM server") from None
        status, version = await self._ask("/version")
        known = version.get("version") if status == 200 and isinstance(version, dict) else None
        return one_line(str(known or "unknown"))[:50], base

    async def load(self, name: str, folder: Path) -> None:
        """Load an adapter under a name that stands for its weights: a name that is loaded already has the same weights.

        Raises:
            ServerError: the server cannot load it; with the reason.
        """
        status, found = await self._ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        words = self._words(found)
        if status == 200 or _LOADED in words:
            return
        if status == _MISSING and not _is_error(found):
            raise ServerError(f"{self._url} loads no adapters while it runs. Start it with {RUNTIME_LORA}")
        if status == _MISSING:
            raise ServerError(
                f"{self._url} does not find {folder} ({words}). Trainer and server need the same folder: set TMPDIR of "
                "the trainer to one on a disk that both see, and run both as one user"
            )
        raise ServerError(f"{self._url} refuses the adapter: {words}")

    async def unload(self, name: str) -> None:
        """Unload an adapter; a restarted server has lost it already."""
        status, found = await self._ask("/v1/unload_lora_adapter", {"lora_name": name})
        if status not in (200, _MISSING):
            logger.warning("%s keeps the old adapter %s: %s", self._url, name, self._words(found))

    async def complete(self, body: Mapping[str, Any]) -> Sequence[Choice] | None:
        """The K completions of one prompt, in order; None where the adapter is not loaded, or a restart cut them off.

        Raises:
            ServerError: the server refuses the request, or its reply lacks what is needed.
        """
        status, found = await self._ask("/v1/completions", body)
        if status == _MISSING and _is_error(found):
            return None
        if status != 200:
            raise ServerError(f"{self._url} refuses a request (status {status}): {self._words(found)}")
        try:
            choices = sorted(Completions.model_validate(found).choices, key=lambda choice: choice.index)
        except ValidationError as error:
            places = sorted(
                {".".join(str(part) for part in item["loc"] if part != "choices") for item in error.errors()}
            )
            raise ServerError(
                f"a reply of {self._url} lacks {', '.join(places[:3])}: token ids with their log-probs are needed. "
                "Use vLLM 0.11 or newer"
            ) from None
        return None if any(choice.finish_reason == "abort" for choice in choices) else choices

    async def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Status and body of the reply, once one comes that is no failure of the server or of the way to it.

        Raises:
            ServerError: none came in time.
        """
        pause, began = PAUSES[0], 0.0
        while True:
            try:
                method = "GET" if body is None else "POST"
                reply = await self._client.request(method, self._url + path, json=body)
                if reply.status_code < 500 and reply.status_code not in _PASSING:
                    self._silent, self._starts_until = False, 0.0
                    return reply.status_code, _value(reply)
                problem = f"status {reply.status_code}: {self._words(_value(reply))}"
            except self._errors as error:
                problem = self._cleaned(f"{type(error).__name__}: {error}")
                if self._patience_s and (needed := self._revive()):
                    self._starts_until = time.monotonic() + needed
            now = time.monotonic()
            began = began or now
            patience = max(self._patience_s, self._starts_until - began)
            if not self._silent and self._patience_s:
                self._silent = True
                logger.warning("%s%s: %s; the request is repeated for up to %.4g s", self._url, path, problem, patience)
            if now + pause > began + patience:
                again = f" in {patience:.4g} s of retries" if patience else ""
                proxy = proxy_of(self._url)
                raise ServerError(
                    f"{self._url}{path} gives no answer{again}: {problem}. {self._advice()}"
                    + (f"; requests go {proxy}" if proxy else "")
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSES[1])

    def _words(self, found: Any) -> str:
        """Message of an error, in the server's words."""
        error = found.get("error", found) if isinstance(found, dict) else found
        return self._cleaned(str(error.get("message", error) if isinstance(error, dict) else error))

    def _cleaned(self, text: str) -> str:
        return one_line(strike(text, [self._key] if self._key != "none" else []))[:LONGEST_WORDS]


def _value(reply: Any) -> Any:
    """The JSON of a reply; where it is none, its text."""
    try:
        return reply.json()
    except (ValueError, RecursionError):
        return reply.text[:LONGEST_WORDS]


def _is_error(found: Any) -> bool:
    """Whether a 404 is vLLM's own about a model or a folder, rather than about a missing route."""
    return isinstance(found, dict) and "error" in found


def arguments(model: str, rank: int, length: int) -> list[str]:
    """Arguments of `vllm serve` for a server with all that a rollout needs."""
    allowed = next((most for most in LORA_RANKS if most >= rank), rank)
    return [
        *(model, "--host", "127.0.0.1", "--enable-lora", "--max-lora-rank", str(allowed)),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--max-model-len", str(length)),
    ]


def command(model: str, rank: int, length: int) -> str:
    """The shell command that starts a server with all that a rollout needs."""
    return f"{RUNTIME_LORA} vllm serve {shlex.join(arguments(model, rank, length))}"
