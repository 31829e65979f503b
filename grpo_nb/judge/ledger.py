"""Verdicts of a judge and their cost, line by line in the run's judge.jsonl: cache, account and record in one file."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from grpo_nb.config import ConfigError, JudgeConfig, JudgeProvider
from grpo_nb.judge.failures import Failure
from grpo_nb.judge.prompts import TOP, VERSION, Messages

FILE = "judge.jsonl"
MOST_SPENT = 2**53
"""Tokens or dollars of one reply that a row may have: more is no price, and sums have 64 bits."""
LONGEST_REASON = 1000
"""Characters of a reason that are kept: a server may ignore `max_tokens`."""


@runtime_checkable
class Store(Protocol):
    """Append-only rows that outlive a kill; `journal.Journal` is one."""

    def append(self, *rows: Mapping[str, Any]) -> None: ...

    def forwards(self) -> Iterator[Mapping[str, Any]]: ...


@dataclass(frozen=True)
class Verdict:
    """Verdict of a judge on a text."""

    score: int
    """0 to 4."""
    reason: str

    @property
    def value(self) -> float:
        """Score scaled to [0, 1]."""
        return self.score / TOP


class Ledger:
    """Verdicts so far and the tokens and dollars spent, of one objective over the complete run.

    Every reply is written down as it comes, readable or not, so neither a kill nor a rewind forgets what was paid. The
    file is the one that the run's lock does not fence: a request that was under way when the lock was lost is paid all
    the same, and its reply is worth keeping. Rows are appended as a unit and belong to no step, so another owner's stay
    valid.

    Raises:
        ConfigError: a row whose tokens or price are no numbers, so that the amount spent is unknown.
    """

    def __init__(self, objective: str, config: JudgeConfig, store: Store) -> None:
        self._objective, self._config, self._store = objective, config, store
        self._known: dict[str, Verdict] = {}
        self.tokens, self.usd = 0, 0.0
        for row in store.forwards():
            if row.get("objective") == objective:
                self._take(row)

    def known(self, key: str) -> Verdict | None:
        """The verdict kept under a key, where the cache is on."""
        return self._known.get(key)

    def write(
        self,
        key: str,
        provider: JudgeProvider,
        answer: str,
        outcome: Verdict | Failure,
        tokens: tuple[int, int],
        seconds: float,
    ) -> None:
        """Write one reply: its verdict or failure, its tokens and its seconds."""
        verdict = outcome if isinstance(outcome, Verdict) else None
        row = {
            "objective": self._objective,
            "key": key,
            "provider": provider.label,
            "answer": answer,
            "score": verdict.score if verdict else None,
            "reason": verdict.reason[:LONGEST_REASON] if verdict else "",
            "cause": outcome.cause if isinstance(outcome, Failure) else "",
            "tokens_in": tokens[0],
            "tokens_out": tokens[1],
            "usd": provider.usd(*tokens),
            "seconds": round(seconds, 3),
        }
        self._store.append(row)
        self._take(row)

    def exhausted(self) -> str | None:
        """Reason why the budget is used up, with the numbers; None while some is left."""
        config = self._config
        if config.budget_tokens is not None and self.tokens >= config.budget_tokens:
            return f"{self.tokens} of budget_tokens={config.budget_tokens} are used"
        if config.budget_usd is not None and self.usd >= config.budget_usd:
            return f"{self.usd:.4g} of budget_usd={config.budget_usd:g} dollars are spent"
        return None

    def left(self, unwritten: int) -> int | None:
        """Tokens that may still be used, after those of a reply that is not written yet; None without a limit."""
        limit = self._config.budget_tokens
        return None if limit is None else max(limit - self.tokens - unwritten, 0)

    def check(self) -> None:
        """Refuse to begin with nothing left.

        Raises:
            ConfigError: the budget is used up; with the way to raise it.
        """
        if spent := self.exhausted():
            name = "budget_tokens" if "budget_tokens" in spent else "budget_usd"
            raise ConfigError(
                f"the judge of '{self._objective}' may ask nothing more: {spent}; raise "
                f"objectives.{self._objective}.judge.{name} in the run's config.json (the limits of a judge may be "
                "edited later), then start it again"
            )

    def _take(self, row: Mapping[str, Any]) -> None:
        spent = [row.get(name) or 0 for name in ("tokens_in", "tokens_out", "usd")]
        if not all(isinstance(number, int | float) and 0 <= number <= MOST_SPENT for number in spent):
            raise ConfigError(
                f"{FILE} has a row of '{self._objective}' that spent {spent} (tokens in, tokens out, dollars), so the "
                "budget cannot be kept; correct or remove that line"
            )
        self.tokens += int(spent[0]) + int(spent[1])
        self.usd += float(spent[2])
        score, key = row.get("score"), row.get("key")
        if self._config.cache and isinstance(key, str) and type(score) is int and 0 <= score <= TOP:
            self._known.setdefault(key, Verdict(score, str(row.get("reason", ""))[:LONGEST_REASON]))


def key_of(provider: JudgeProvider, messages: Messages) -> str:
    """Hash of server, model, prompt version, and the complete request: rubric, evidence and text."""
    whole = json.dumps([provider.label, provider.base_url, VERSION, messages])
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()
