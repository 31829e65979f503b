"""One step of a judge in numbers: the keys of metrics.jsonl, and the line of the log.

Keys under `time/` and `cost/` depend on the clock and on the contents of the cache; a resumed run differs in them.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_nb.metrics import keys
from grpo_nb.types import Score

NAME = "judge"
"""Name of the judge's part of the reward, in samples.jsonl and the metrics."""

Row = dict[str, float | int | str | None]


@dataclass
class Tally:
    """Statistics of the judging of one step of one objective."""

    first: str
    """Label of the provider that gets the first request."""
    seconds: float = 0.0
    """Seconds from the end of the newest completion to the last verdict."""
    replies: list[float] = field(default_factory=list)
    """Seconds of each request that was sent."""
    cached: int = 0
    """Texts whose verdict was in the cache."""
    limited: int = 0
    """Times that a server had too many requests; each was sent again."""
    unreadable: int = 0
    """Replies that were no verdict."""
    providers: Counter[str] = field(default_factory=Counter)
    """Completions with a verdict, by provider."""
    failures: Counter[str] = field(default_factory=Counter)
    """Completions without one, by kind (failures.Kind)."""
    causes: Counter[str] = field(default_factory=Counter)
    """Failures by cause."""
    notices: list[dict[str, Any]] = field(default_factory=list)
    """Notices about servers: events for the run's log."""
    dropped_groups: int = 0
    """Groups that no provider judged completely."""
    tokens: int = 0
    """Tokens spent by this judge since the run began."""
    usd: float = 0.0

    def line(self, step: int, objective: str) -> str:
        """One line for the log."""
        scored, mix = self.providers.total(), ", ".join(f"{name} {n}" for name, n in self.providers.most_common())
        words = [f"{self.seconds:.1f} s", f"{scored} scored", f"providers {mix or 'none'}"]
        if self.failures:
            kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.failures.items()))
            words.append(f"{self.failures.total()} without a verdict ({kinds})")
        if self.cached:
            words.append(f"{self.cached} from the cache")
        if self.limited:
            words.append(f"{self.limited} too many at a time")
        return f"[judge step {step}] {objective}: {', '.join(words)}"

    def row(self, objective: str, scores: Sequence[Score], lengths: Sequence[int]) -> Row:
        """The step's metrics.

        Args:
            scores: of the objective's completions, with the parts `judge` and `task`.
            lengths: of the same completions, in tokens.
        """
        judged = [(s.parts.get(NAME), s.parts.get("task"), n) for s, n in zip(scores, lengths, strict=True)]
        values = [value for value, _, _ in judged if value is not None]
        scored = len(values)
        return {
            keys.JUDGE_SCORED.of(objective): scored,
            keys.JUDGE_FAILED.of(objective): len(scores) - scored,
            keys.JUDGE_UNREADABLE.of(objective): self.unreadable,
            keys.JUDGE_DROPPED.of(objective): self.dropped_groups,
            **{keys.JUDGE_FAILURE.of(objective, kind): n for kind, n in sorted(self.failures.items())},
            **{keys.JUDGE_CAUSE.of(objective): cause for cause, _ in self.causes.most_common(1)},
            **{keys.JUDGE_PROVIDER.of(objective, label): n for label, n in sorted(self.providers.items())},
            keys.JUDGE_FIRST.of(objective): self.providers[self.first] / scored if scored else None,
            keys.JUDGE_LOW.of(objective): min(values, default=None),
            keys.JUDGE_HIGH.of(objective): max(values, default=None),
            keys.JUDGE_DISTINCT.of(objective): 100 * len(set(values)) / scored if scored else None,
            keys.JUDGE_AGREEMENT.of(objective): spearman([(v, t) for v, t, _ in judged]),
            keys.JUDGE_LENGTH.of(objective): spearman([(v, n) for v, _, n in judged]),
            keys.JUDGE_ASKED.of(objective): len(self.replies),
            keys.JUDGE_CACHED.of(objective): self.cached,
            keys.JUDGE_LIMITED.of(objective): self.limited,
            keys.JUDGE_TOKENS.of(objective): self.tokens,
            keys.JUDGE_USD.of(objective): self.usd,
            keys.TIME_JUDGE.of(objective): self.seconds,
            keys.TIME_JUDGE_P50.of(objective): quantile(self.replies, 0.5),
            keys.TIME_JUDGE_P95.of(objective): quantile(self.replies, 0.95),
        }


def spearman(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Rank correlation of the pairs without a None, ties at their mean rank; None where one side is constant.

    >>> spearman([(0, 10), (1, 20), (1, 30), (None, 5)])
    0.8660254037844387
    """
    whole = [(float(x), float(y)) for x, y in pairs if x is not None and y is not None]
    xs, ys = [_ranks([pair[side] for pair in whole]) for side in (0, 1)]
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return None
    return statistics.correlation(xs, ys)


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed; None without values."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else None


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [statistics.fmean(places[value]) for value in values]
