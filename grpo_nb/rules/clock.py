"""A rule about the times of events, which come from the machine's clock."""

from collections.abc import Sequence
from itertools import pairwise

from grpo_nb.rules.finding import Finding

SET_BACK = 60.0
"""Seconds of a set-back; less comes from a time server's correction, or from threads that log at once."""


def clock_set_back(times: Sequence[float]) -> Finding | None:
    """An event is older than one that was logged before it.

    Args:
        times: of all events in the order of the log, in seconds since 1970.
    """
    backs = [(before - after, after) for before, after in pairwise(times)]
    far = [(seconds, at) for seconds, at in backs if seconds > SET_BACK]
    if not far:
        return None
    worst, at = max(far)
    return Finding(
        "clock_set_back",
        "warning",
        None,
        f"the clock went back {len(far)} time{'s' if len(far) > 1 else ''} while this run was logged, by {worst:.0f} s "
        "at most: times in the log give no order, and another machine may take a running trainer for a dead one.",
        {"times": len(far), "seconds": worst, "at": at},
        "let a time server set the clock of every machine that writes this run; steps and checkpoints hang on no clock",
    )
