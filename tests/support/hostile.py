"""Numbers that a row of anyone may hold, and every key that they may be under."""

import math
import re

from grpo_nb.metrics import keys

HUGE = 2**63 - 1
"""The largest integer of a row."""
FINITE: tuple[float, ...] = (-1, 2, 0, -0.0, 1e308, -1.7e308, 5e-324, HUGE)
NOT_FINITE = (math.nan, math.inf, -math.inf)
_FIELDS = {"objective": "fairness", "label": "correct", "part": "task", "phase": "rollout", "kind": "timeout"}
_LABELS = ("correct", "unknown", "abstained", "unparsed")


def all_keys() -> list[str]:
    """Of the table, for the objective fairness."""
    rows = [row for row in keys.TABLE.values() if row.unit != keys.TEXT and row.name != keys.STEP]
    plain = {re.sub(r"\{(\w+)\}", lambda found: _FIELDS.get(found[1], "x"), row.name) for row in rows}
    labels = {row.of("fairness", label) for row in (keys.LABEL, keys.LABEL_ANSWERABLE) for label in _LABELS}
    times = {keys.TIME.of(phase) for phase in ("score", "reference", "train")}
    return sorted(plain | labels | times)
