"""Rows and settings as an earlier version of the package wrote them."""

import re
from typing import Any

Row = dict[str, Any]

KEYS = (
    (r"reward/(\w+)/mean", r"reward/\1"),
    (r"reward/(\w+)/std", r"reward_std/\1"),
    (r"reward/(\w+)/part/(\w+)", r"reward_part/\1/\2"),
    (r"reward/(\w+)/part_std/(\w+)", r"reward_part_std/\1/\2"),
    (r"frac_reward_zero_std/(\w+)", r"dead_groups/\1"),
    (r"label_answerable/(.+)", r"label_told/\1"),
    (r"label_unanswerable/(.+)", r"label_untold/\1"),
    (r"sampler_logp_difference(\w*)", r"sampler_gap\1"),
    (r"ratio/logp_difference(\w*)", r"ratio/gap\1"),
    (r"ratio/max_deviation", "ratio/max_dev"),
    (r"clip_ratio/(low|high)", r"clip/\1"),
)
"""Metric keys of a step today, and what they were called."""
SETTINGS = {
    "batch": {"mini_batch": "train_batch", "num_iterations": "inner_epochs"},
    "sampling": {"max_completion_length": "max_completion", "max_prompt_length": "max_prompt"},
    "algorithm": {
        "name": "loss",
        "importance_correction": "correction",
        "importance_correction_level": "correction_level",
        "importance_correction_bounds": "correction_bounds",
        "top_entropy_quantile": "entropy_top_share",
    },
}
"""Settings today, and what they were called."""
UNWRITTEN = {"system_prompt"}
"""Settings of an objective that earlier versions did not have."""


def row(today: Row) -> Row:
    """A row of metrics.jsonl."""
    old = {}
    for key, value in today.items():
        (name,) = [re.sub(now, former, key) for now, former in KEYS if re.fullmatch(now, key)] or [key]
        old[name] = value
    return old


def settings(today: Row) -> Row:
    """The settings of config.json or of a checkpoint's state."""
    groups = {
        group: {names.get(name, name): value for name, value in today[group].items()}
        for group, names in SETTINGS.items()
    }
    objectives = {
        name: {key: value for key, value in own.items() if key not in UNWRITTEN}
        for name, own in today["objectives"].items()
    }
    return today | groups | {"objectives": objectives}
