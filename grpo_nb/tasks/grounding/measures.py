"""Numbers with units: the same measure in another unit."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from grpo_nb.tasks.grounding.lexicon import CONVERSIONS

NEAR = 0.03
"""Relative difference allowed between two measures of one thing."""


def converts(run: Sequence[str], lines: Iterable[Sequence[str]]) -> bool:
    """Whether a number with its unit equals, in another unit, a measure in one of these lines of forms.

    >>> converts(["9.1", "mile"], [["14600", "metre"]]), converts(["9.9", "mile"], [["14600", "metre"]])
    (True, False)
    """
    if len(run) != 2 or run[1] not in CONVERSIONS:
        return False
    kind, size = CONVERSIONS[run[1]]
    measures = [
        number_of(number) * CONVERSIONS[unit][1]
        for line in lines
        for number, unit in pairwise(line)
        if unit in CONVERSIONS and unit != run[1] and CONVERSIONS[unit][0] == kind
    ]
    return any(measure and abs(number_of(run[0]) * size / measure - 1) <= NEAR for measure in measures)


def number_of(form: str) -> float:
    """The number that a form is; 0 where it is none."""
    try:
        return float(form)
    except ValueError:
        return 0.0
