"""Failures of the judge: their kinds, and the advice for each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from grpo_nb.config import JudgeConfig
from grpo_nb.printable import Clean

Kind = Literal[
    "key",
    "address",
    "proxy",
    "connection",
    "timeout",
    "limit",
    "server",
    "refused",
    "cut_off",
    "withheld",
    "unreadable",
    "deadline",
    "budget",
    "request",
]
"""`request` is of runs made before its causes had names of their own."""


@dataclass(frozen=True)
class Failure:
    """Reason for a missing verdict."""

    kind: Kind
    cause: str
    passing: bool = False
    """Whether another reply may be better: the cause of this failure need not be the model."""


class AskFailed(Clean):
    """Raised without a reply; the message has the reason."""

    def __init__(self, kind: Kind, cause: str) -> None:
        super().__init__(cause)
        self.kind: Kind = kind


class RateLimited(AskFailed):
    """Raised when the server has had too many requests; it will answer later."""

    def __init__(self, cause: str, retry_after: float | None) -> None:
        super().__init__("limit", cause)
        self.retry_after = retry_after
        """Pause in seconds that the server requests; None without one."""


ADVICE: Mapping[Kind, str] = {
    "key": "set {variables} to a key that {servers} accepts",
    "address": "base_url of {judge}.providers must end before /chat/completions, usually in /v1, and the server must "
    "know the model; correct them in a new run",
    "proxy": "set NO_PROXY to the host of {servers}, or correct HTTP_PROXY, HTTPS_PROXY or ALL_PROXY",
    "connection": "start the server {servers} and see that this machine reaches it; a wrong base_url needs a new run",
    "timeout": "raise {judge}.timeout_s (now {timeout_s:g}) and deadline_s (now {deadline_s:g}), lower concurrency "
    "(now {concurrency}), or take a faster model",
    "limit": "raise {judge}.deadline_s (now {deadline_s:g}), judge fewer completions a step, and see that the account "
    "at {servers} has credit left",
    "server": "read the log of {servers}: it fails on requests that reached it",
    "refused": "the server refuses the request itself: take the model or setting that its sentence asks for",
    "cut_off": "raise {judge}.max_tokens (now {max_tokens}): the verdict was cut off; or switch off the thinking of "
    "the model at its server",
    "withheld": "take a model or server whose content filter lets these answers be graded",
    "unreadable": "take a model that can write one JSON object, or a server that keeps to response_format and "
    "separates thinking from the reply (its reasoning parser)",
    "deadline": "raise {judge}.deadline_s (now {deadline_s:g}) or concurrency (now {concurrency}), or take a faster "
    "model",
    "budget": "raise {judge}.budget_tokens or budget_usd",
    "request": "see that {servers} can be reached with the key in {variables}",
}
"""Advice by kind of failure."""


def advice(kinds: Sequence[str], judge: JudgeConfig, name: str) -> str:
    """Advice about the judge whose settings are named `name`, for the kinds that occurred."""
    known = [ADVICE[kind] for kind in get_args(Kind) if kind in kinds]
    variables = [p.api_key_env for p in judge.providers if p.api_key_env]
    return "; ".join(known or [ADVICE["request"]]).format(
        judge=name,
        servers=", ".join(provider.label for provider in judge.providers),
        variables=", ".join(dict.fromkeys(variables)) or "api_key_env",
        **{key: getattr(judge, key) for key in ("timeout_s", "deadline_s", "concurrency", "max_tokens")},
    )
