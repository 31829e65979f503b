"""Names that earlier versions gave to metrics, and what they are called now; files of old runs are read through these.

A row of an old run shows its numbers under today's keys, so that a run which goes on has one curve, not two.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from grpo_nb.metrics import keys

METRICS: Mapping[str, str] = {
    "reward/{objective}": keys.REWARD.name,
    "reward_std/{objective}": keys.REWARD_STD.name,
    "shaped_reward/{objective}": keys.REWARD_SHAPED.name,
    "reward_part/{objective}/{part}": keys.REWARD_PART.name,
    "reward_part_std/{objective}/{part}": keys.REWARD_PART_STD.name,
    "rewards/{objective}/{name}": keys.USER.name,
    "dead_groups/{objective}": keys.FRAC_REWARD_ZERO_STD.name,
    "label_told/{objective}/{label}": keys.LABEL_ANSWERABLE.name,
    "label_untold/{objective}/{label}": keys.LABEL_UNANSWERABLE.name,
    "clip/low": keys.CLIP_RATIO_LOW,
    "clip/high": keys.CLIP_RATIO_HIGH,
    "ratio/max_dev": keys.RATIO_MAX_DEVIATION,
    "ratio/gap": keys.RATIO_DIFFERENCE.mean,
    "ratio/gap_p99": keys.RATIO_DIFFERENCE.p99,
    "ratio/gap_far": keys.RATIO_DIFFERENCE.far,
    "sampler_gap": keys.SAMPLER_DIFFERENCE.mean,
    "sampler_gap_p99": keys.SAMPLER_DIFFERENCE.p99,
    "sampler_gap_far": keys.SAMPLER_DIFFERENCE.far,
    "weight/mean": keys.IMPORTANCE_WEIGHT_MEAN,
    "weight/zero": keys.IMPORTANCE_WEIGHT_ZERO,
}
"""Former key -> today's, with the same fields."""

_FIELD = re.compile(r"\\{\w+\\}")


def _pattern(former: str) -> re.Pattern[str]:
    """Of a former key: an objective ends at a slash, the last field at the end."""
    *first, last = _FIELD.split(re.escape(former))
    return re.compile(r"([^/]*)".join(first) + (r"(.*)" if first else "") + last, re.DOTALL)


_FORMER = [(_pattern(former), keys.TABLE[now]) for former, now in METRICS.items()]


@lru_cache(maxsize=20_000)
def metric(key: str) -> str:
    """Today's name of a metric; other keys as they are.

    >>> metric("reward/fairness"), metric("reward/fairness/mean")
    ('reward/fairness/mean', 'reward/fairness/mean')
    """
    if keys.row_of(key) is None:
        for pattern, now in _FORMER:
            if found := pattern.fullmatch(key):
                return now.of(*found.groups())
    return key


def metrics(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics.jsonl under today's keys; one without former keys is returned itself."""
    names = _metrics(tuple(row))
    return row if names is None else dict(zip(names, row.values(), strict=True))


@lru_cache(maxsize=128)
def _metrics(former: tuple[str, ...]) -> tuple[str, ...] | None:
    """Today's names of a row's keys; None where none has another. Rows of one run share their keys."""
    names = tuple(map(metric, former))
    return None if names == former else names
