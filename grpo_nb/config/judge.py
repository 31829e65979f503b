"""The settings of an LLM judge: its servers, its weight, its time limits and its budgets."""

import os
import re
from typing import Annotated, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import AfterValidator, Field, model_validator

from grpo_nb.config.base import Count, Positive, Settings

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")

OPENAI = "https://api.openai.com/v1"
_BASE_URL = "OPENAI_BASE_URL"
"""Environment variable that OpenAI clients read; its value is written into the run's settings."""

Price = Annotated[float, Field(ge=0)]


# What is refused here may be a key in the wrong place, so no message repeats it.


def _name(value: str) -> str:
    if not _VARIABLE.fullmatch(value):
        raise ValueError(
            "needs the NAME of an environment variable in capitals, e.g. OPENAI_API_KEY (what was given is not "
            "shown: if it is the key itself, put it into the environment and nowhere else)"
        )
    return value


def _plain(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"needs an http:// or https:// address, e.g. http://localhost:8000/v1{_source(value)}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            f"must be an address without user, password or query; a key goes into the environment{_source(value)}"
        )
    _ = parts.port  # raises ValueError where it is no port
    return urlunsplit(parts).rstrip("/")  # with the scheme in small letters


Variable = Annotated[str, AfterValidator(_name)]
"""Name of an environment variable."""
Address = Annotated[str, AfterValidator(_plain)]
"""http or https, host, port and path."""


class JudgeProvider(Settings):
    """One OpenAI-compatible server and the model that judges there."""

    model: Annotated[str, Field(min_length=1)]
    """Name of the model on the server."""
    base_url: Address = Field(
        default_factory=lambda: os.environ.get(_BASE_URL, "").strip() or OPENAI, validate_default=True
    )
    """Address that the server's `/chat/completions` follows; without it OPENAI_BASE_URL, else OpenAI's own."""
    api_key_env: Variable | None = "OPENAI_API_KEY"
    """NAME of the environment variable that holds the key, never the key; null for a server without one."""
    usd_per_million_in: Price | None = None
    """Price of a million prompt tokens, US dollars; a budget in money needs it."""
    usd_per_million_out: Price | None = None
    """Price of a million tokens of the judge's own text, US dollars."""

    @property
    def label(self) -> str:
        """Name of the provider in the log: `model@host`."""
        return f"{self.model}@{urlsplit(self.base_url).netloc}"

    @property
    def priced(self) -> bool:
        return self.usd_per_million_in is not None and self.usd_per_million_out is not None

    def usd(self, tokens_in: int, tokens_out: int) -> float:
        """Cost of a request in US dollars; 0 where no price is set."""
        return (tokens_in * (self.usd_per_million_in or 0) + tokens_out * (self.usd_per_million_out or 0)) / 1e6


class JudgeConfig(Settings):
    """An LLM judge as a further part of an objective's reward."""

    providers: tuple[JudgeProvider, ...]
    """Servers in order; if one fails on any completion of a group, the next one judges the complete group."""
    weight: Positive = 0.04
    """Weight of the judge's score, 0 to 1, added to the task's own. While it is below the gaps between the task's
    classes, a tricked judge cannot lift a wrong answer above a right one."""
    decides_ties: bool = False
    """Whether the judge counts in a group whose task scores are all equal, where it alone decides what is learnt."""
    budget_tokens: Count | None = 5_000_000
    """Tokens, in and out, that this judge may use in the run, which then stops, saved. null: no limit."""
    budget_usd: Positive | None = None
    """US dollars that this judge may use in the run; needs both prices of every provider. null: no limit."""
    cache: bool = True
    """Keep verdicts in the run's judge.jsonl and never send the same text twice; a resumed run uses the same verdicts.
    """

    # advanced
    concurrency: Count = 32
    """Concurrent requests; fewer while a server answers 429."""
    timeout_s: Positive = 15
    """Seconds that one try of a request may take, its reply included."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Further tries after 5xx, a timeout or a cut connection, each later than the one before; after 429 as many as
    `deadline_s` allows."""
    deadline_s: Positive = 60
    """Seconds that a step waits for this judge once the last completion has ended; providers share them. A late
    completion has no verdict."""
    max_tokens: Count = 200
    """Cap on the judge's own text. A model that is cut off while it still thinks gets 20 times as much from then on."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.providers:
            raise ValueError("providers is empty; needs one or more, e.g. [{'model': ..., 'base_url': ...}]")
        labels = [provider.label for provider in self.providers]
        if repeated := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(
                f"provider {min(repeated)} is listed twice; remove one: `retries` repeats requests to the same provider"
            )
        unpriced = [provider.label for provider in self.providers if not provider.priced]
        if self.budget_usd is not None and unpriced:
            raise ValueError(
                f"budget_usd={self.budget_usd:g} needs usd_per_million_in and usd_per_million_out of every provider; "
                f"{', '.join(unpriced)} lacks them: set them, or use budget_tokens"
            )
        return self


def _source(url: str) -> str:
    """Sentence that names the environment variable an address comes from; empty where the settings give the address."""
    return f"; it comes from {_BASE_URL}" if url == os.environ.get(_BASE_URL, "").strip() else ""
