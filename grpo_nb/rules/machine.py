"""Rules about the machine: memory that keeps growing, a phase that is slower than its own best pace.

Called through `rules`; each judges a stretch of rows at its end.
"""

import statistics
from itertools import pairwise

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.rules.finding import ENOUGH, WINDOW, Finding, Rows, newest, series
from grpo_nb.rules.history import KEPT, PHASES, History, Rule

MEMORY_WARM_UP = 5
"""Rows left out at the start of a run: caches fill."""
MEMORY_ROWS = 40
MEMORY_PARTS = 8
"""Parts of the rows: in a leak each part holds more memory than the one before; a cache that fills does so in jumps."""
MEMORY_SLOPE_MIB, MEMORY_SLOPE_SHARE = 1.0, 0.002
"""MiB a step, and the share of the memory a step, by which it grows at least."""
MEMORY_SLOWING = 0.5
"""Least ratio of last to first growth in a leak; a process that fills its caches, also after a resume, slows down."""
MEMORY_EVEN = 0.5
"""Part of that growth that each eighth has."""
SLOW_ROWS = 30
"""Rows after which a phase's own best pace is known."""
SLOWER, SLOWER_THAN_REST = 3.0, 2.0
"""Times a phase's own floor; and times what the other phases are above theirs, since a busy machine slows all."""
SLOW_SHARE, SLOW_SECONDS = 0.3, 1.0
"""Part of the step that it takes, and seconds of a step that are lost: less is unimportant."""

assert MEMORY_ROWS <= KEPT


def memory_trend(rows: Rows, config: Config) -> Finding | None:
    """Memory grows step by step and does not slow down: a leak, or answers that get longer."""
    recent = rows[max(MEMORY_WARM_UP, len(rows) - MEMORY_ROWS) :]
    used = series(recent, keys.MEMORY_NOW) or series(recent, keys.MEMORY_PEAK)
    if len(used) < MEMORY_ROWS:
        return None
    size = MEMORY_ROWS // MEMORY_PARTS
    lows = [min(used[i : i + size]) for i in range(0, MEMORY_ROWS, size)]
    slopes = [(after - before) / size for before, after in pairwise(lows)]
    limit = max(MEMORY_SLOPE_MIB, MEMORY_SLOPE_SHARE * used[0])
    uneven = min(slopes) <= MEMORY_EVEN * limit or slopes[-1] < MEMORY_SLOWING * slopes[0]
    if uneven or statistics.fmean(slopes) <= limit:
        return None
    return Finding(
        "memory_trend",
        "warning",
        newest(rows),
        f"memory grows by {statistics.fmean(slopes):.3g} MiB a step (now {used[-1]:.0f} MiB) and continues to grow.",
        {"slopes": slopes, "now_mib": used[-1]},
        "look whether lengths grow too (then lower sampling.max_completion_length); else something keeps tensors: own "
        "reward functions are the first suspect. doctor.memory_snapshot() shows who allocated what is held",
    )


def slow_phase(rows: History, config: Config) -> Finding | None:
    """A phase takes several times as long a token as its own floor, and the other phases do not.

    The floor is the pace of the fastest fifth of the run's steps: the pace that this machine has reached.
    """
    if len(rows) < SLOW_ROWS:
        return None
    recent = rows[-WINDOW:]
    above = {phase: ratio for phase in PHASES if (ratio := _above_floor(rows, phase)) is not None}
    if len(above) < 2:
        return None
    phase, ratio = max(above.items(), key=lambda item: item[1])
    rest = statistics.median(value for name, value in above.items() if name != phase)
    times, steps = series(recent, keys.TIME.of(phase)), series(recent, keys.TIME_STEP)
    if ratio < max(SLOWER, SLOWER_THAN_REST * rest) or min(len(times), len(steps)) < ENOUGH or _judged(phase, config):
        return None
    seconds, step = statistics.median(times), statistics.median(steps)
    lost = seconds * (1 - 1 / ratio)
    if seconds < SLOW_SHARE * step or lost < SLOW_SECONDS:
        return None
    return Finding(
        "slow_phase",
        "warning",
        newest(rows),
        f"{phase} takes {seconds:.3g} s of a step of {step:.3g} s, {ratio:.1f} times the time a token of its own "
        f"fastest steps (the other phases: {rest:.1f} times): {lost:.3g} s a step are lost.",
        {"phase": phase, "ratio": ratio, "rest": rest, "seconds": seconds, "lost": lost},
        f"{_SLOW_ADVICE[phase]}; doctor.profile(run) shows the phase by operation",
    )


def _above_floor(rows: History, phase: str) -> float | None:
    """Ratio of a phase's recent pace to its floor; None with too few rows."""
    pace = rows.paces[phase]
    floor, recent = pace.quantile(FLOOR), pace.newest(WINDOW)
    return statistics.median(recent) / floor if len(recent) >= ENOUGH and floor > 0 else None


FLOOR = 0.2
"""Quantile of the paces that counts as the floor: a single fast step may be a step without work."""


def _judged(phase: str, config: Config) -> bool:
    """Whether a judge is waited for in this phase, `score`; the rules about judges report that better."""
    return phase == "score" and any(objective.judge is not None for objective in config.objectives.values())


_SLOW_ADVICE = {
    "rollout": "see whether completions hit the cap, another process uses the device, or memory was halved after an "
    "out-of-memory event; rollout.engine says what draws",
    "score": "look at what your reward functions wait for: a network, a file, a model on the CPU",
    "reference": "see whether another process uses the device, or batch.micro_batch was halved",
    "train": "see whether another process uses the device, or batch.micro_batch was halved",
}

RULES: tuple[Rule, ...] = (memory_trend, slow_phase)
