"""Seconds per step, and the estimate of the time left."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_nb.metrics import keys


def pace(rows: Iterable[Mapping[str, Any]], left: int) -> list[str]:
    """The median of the newest steps, and the time left for `left` more; nothing where no row has its time.

    >>> pace([{"time/step": 0.5}, {"time/step": 0.7}, {"time/step": 0.6}], 100)
    ['0.6 s a step, about 60 s left']
    """
    values = (row.get(keys.TIME_STEP) for row in rows)
    known = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if not known:
        return []
    seconds = statistics.median(known)
    each = f"{seconds:.2g} s a step" if seconds < 10 else f"{seconds:.0f} s a step"
    return [f"{each}, about {duration(left * seconds)} left" if left > 0 else each]


def duration(seconds: float) -> str:
    """Seconds for reading.

    >>> duration(75), duration(600), duration(9000)
    ('75 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
