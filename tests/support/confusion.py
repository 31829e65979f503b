"""Labelled answers beside how the project judges them: a confusion table by kind."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def counted(rows: Iterable[Row], verdict: Callable[[Row], str]) -> dict[str, Counter[str]]:
    """Verdicts by the row's kind, and of `all`."""
    table: dict[str, Counter[str]] = {}
    for row in rows:
        for kind in (row["kind"], "all"):
            table.setdefault(kind, Counter())[verdict(row)] += 1
    return table


def shares(counts: Counter[str], verdicts: Sequence[str]) -> dict[str, float]:
    """Each verdict as a share of all answers."""
    return {name: counts[name] / counts.total() for name in verdicts}


def show(table: Mapping[str, Counter[str]], verdicts: Sequence[str]) -> None:
    """Print the table, `all` last; the first verdict is the agreement with a person."""
    print(f"{'kind':22}{'n':>5}" + "".join(f"{name:>11}" for name in verdicts) + f"{verdicts[0] + ' %':>9}")
    for kind in [*sorted(kind for kind in table if kind != "all"), "all"]:
        counts = table[kind]
        cells = "".join(f"{counts[name]:>11}" for name in verdicts)
        print(f"{kind:22}{counts.total():>5}{cells}{100 * counts[verdicts[0]] / counts.total():>9.1f}")
