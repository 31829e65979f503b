"""Suggestions for names that do not exist."""

import difflib
from collections.abc import Iterable


def close_matches(name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.5) -> list[str]:
    """The known names most like `name`, those with its letters first; none where nothing is like it.

    >>> close_matches("gpro", ["gspo", "grpo", "opo"], count=1)
    ['grpo']
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=max(len(names), 1), cutoff=cutoff)
    return sorted(close, key=lambda other: sorted(other) != sorted(name))[:count]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name, empty where no name is similar.

    >>> did_you_mean("fairnes", ["fairness", "hallucination"])
    "; did you mean 'fairness'?"
    """
    close = close_matches(name, known, count=1)
    return f"; did you mean '{close[0]}'?" if close else ""
