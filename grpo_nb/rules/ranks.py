"""Rules about several ranks: a rank that is always the slowest, or an uneven split of the work."""

import statistics
from collections import Counter
from collections.abc import Mapping

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.rules.finding import WINDOW, Finding, Row, newest, number
from grpo_nb.rules.history import History, Rule

ROWS = 8
"""Rows that are judged, at least: one slow step may be anything."""
ALWAYS, SLOWER = 0.75, 1.25
"""Part of the steps in which a straggler is the slowest, and how many times the median of the others it takes."""
STRAGGLER_SHARE, UNEVEN_SHARE = 0.1, 0.25
"""Part of the step that the mean rank waits; less is unimportant, and groups of unequal length cost some."""


def straggler(rows: History, config: Config) -> Finding | None:
    """One rank is the slowest in nearly every step, and the others wait for it."""
    recent = _recent(rows)
    if not recent or (share := _waited(recent)) < STRAGGLER_SHARE:
        return None
    taken = [_seconds(row) for row in recent]
    rank, times = Counter(max(own, key=lambda r: own[r]) for own in taken).most_common(1)[0]
    ratio = statistics.median(_ratio(own, rank) for own in taken)
    if times < ALWAYS * len(recent) or ratio < SLOWER:
        return None
    return Finding(
        "straggler",
        "warning",
        newest(rows),
        f"rank {rank} is the slowest in {times} of {len(recent)} steps and takes {ratio:.2f} times as long as the "
        f"median of the others, which wait for {share:.0%} of a step.",
        {"rank": rank, "ratio": ratio, "steps": times, "waited": share},
        "look at that rank's GPU with nvidia-smi for another process, its clock and its temperature; leave it out "
        "(CUDA_VISIBLE_DEVICES) and start the run again: it resumes on any number of GPUs",
    )


def uneven_ranks(rows: History, config: Config) -> Finding | None:
    """The ranks wait for each other, now for this one and now for that one: their parts are unequal."""
    recent = _recent(rows)
    if not recent or (share := _waited(recent)) < UNEVEN_SHARE or straggler(rows, config) is not None:
        return None
    ranks, prompts = len(_seconds(recent[-1])), config.batch.prompts
    uneven = f"{prompts} prompts on {ranks} ranks: some have one more than others. " if prompts % ranks else ""
    return Finding(
        "uneven_ranks",
        "warning",
        newest(rows),
        f"{uneven}the mean rank waits for {share:.0%} of a step for the slowest, which is not always the same.",
        {"waited": share, "ranks": ranks, "prompts": prompts},
        f"set batch.prompts of a new run to a multiple of {ranks}, and several times as many: long completions then "
        "even out; fewer GPUs lose less",
    )


def _recent(rows: History) -> list[Row]:
    """The newest rows, where enough of them are of one number of ranks, more than one."""
    recent: list[Row] = [row for row in rows[-WINDOW:] if len(_seconds(row)) > 1]
    same = [row for row in recent if _seconds(row).keys() == _seconds(recent[-1]).keys()]
    return same if len(same) >= ROWS else []


def _seconds(row: Row) -> Mapping[int, float]:
    below = keys.TIME_RANK.below()
    return {
        int(rank): value
        for key in row
        if key.startswith(below) and (rank := key.removeprefix(below)).isdecimal() and len(rank) < 5
        if (value := number(row, key)) is not None and value >= 0
    }


def _ratio(seconds: Mapping[int, float], rank: int) -> float:
    others = statistics.median(value for other, value in seconds.items() if other != rank)
    return seconds[rank] / max(others, 1e-9)


def _waited(rows: list[Row]) -> float:
    """Part of a step that the mean rank waits."""
    pairs = ((number(row, keys.TIME_RANKS_WAITED), number(row, keys.TIME_STEP)) for row in rows)
    shares = [waited / step for waited, step in pairs if waited is not None and step]
    return statistics.median(shares) if shares else 0.0


RULES: tuple[Rule, ...] = (straggler, uneven_ranks)
