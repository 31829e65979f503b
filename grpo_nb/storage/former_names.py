"""Former names of metrics and settings, and their names now.

A run's own files are read through these tables: a row of an old run shows its numbers under today's keys, so that a run
which continues has one curve, not two. A setting given by its former name is refused with the new one.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from grpo_nb.metrics import keys
from grpo_nb.storage import schema

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
    "kl_clamped/{objective}": keys.LOG_RATIO_CLAMPED.name,
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
"""Former key -> current key, with the same fields."""

SETTINGS: Mapping[str, Mapping[str, str]] = {
    "batch": {"train_batch": "mini_batch", "inner_epochs": "num_iterations"},
    "sampling": {"max_completion": "max_completion_length", "max_prompt": "max_prompt_length"},
    "algorithm": {
        "loss": "name",
        "correction": "importance_correction",
        "correction_level": "importance_correction_level",
        "correction_bounds": "importance_correction_bounds",
        "entropy_top_share": "top_entropy_quantile",
    },
}
"""Former setting -> current setting, by group."""

_FIELD = re.compile(r"\\{\w+\\}")


def _pattern(former: str) -> re.Pattern[str]:
    """Pattern of a former key: an objective ends at a slash, the last field at the end."""
    *first, last = _FIELD.split(re.escape(former))
    return re.compile(r"([^/]*)".join(first) + (r"(.*)" if first else "") + last, re.DOTALL)


_FORMER: dict[str, list[tuple[re.Pattern[str], keys.Key]]] = {}
"""Patterns of former keys, by the first part of a key."""
for _former, _now in METRICS.items():
    _FORMER.setdefault(_former.partition("/")[0], []).append((_pattern(_former), keys.TABLE[_now]))

LONGEST_NAMES = 20_000
"""Characters of a row's keys together that are remembered: a run's own rows have a tenth of it."""


@lru_cache(maxsize=20_000)
def metric(key: str) -> str:
    """Current name of a metric; other keys unchanged.

    >>> metric("reward/fairness"), metric("reward/fairness/mean")
    ('reward/fairness/mean', 'reward/fairness/mean')
    """
    former = _FORMER.get(key.partition("/")[0])
    if former and keys.row_of(key) is None:
        for pattern, now in former:
            if found := pattern.fullmatch(key):
                return now.of(*found.groups())
    return key


def metrics(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics.jsonl under current keys; a row without former keys, or with too many, is returned unchanged."""
    if len(row) > schema.MOST_KEYS or max(map(len, row), default=0) > schema.LONGEST_KEY:
        return row
    former = tuple(row)
    names = _metrics(former) if sum(map(len, former)) <= LONGEST_NAMES else _metrics.__wrapped__(former)
    if names is None:
        return row
    # of a row with both names of a metric, today's number stands
    return dict(zip(names, row.values(), strict=True)) | {name: row[name] for name in names if name in row}


@lru_cache(maxsize=128)
def _metrics(former: tuple[str, ...]) -> tuple[str, ...] | None:
    """Current names of a row's keys; None where none has another. Rows of one run share their keys."""
    names = tuple(map(metric, former))
    return None if names == former else names


def settings(tree: Any) -> Any:
    """The settings in a run's own file under current names; a file that has both names of one keeps both."""
    if not isinstance(tree, dict):
        return tree
    return tree | {group: _renamed(tree[group], names) for group, names in SETTINGS.items() if group in tree}


def _renamed(group: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(group, dict):
        return group
    free = {former: now for former, now in names.items() if now not in group}
    return {free.get(name, name): value for name, value in group.items()}


def setting(dotted: str) -> str | None:
    """Current name of a setting that was renamed.

    >>> setting("batch.train_batch"), setting("batch.prompts")
    ('batch.mini_batch', None)
    """
    group, _, name = dotted.partition(".")
    now = SETTINGS.get(group, {}).get(name)
    return now and f"{group}.{now}"
