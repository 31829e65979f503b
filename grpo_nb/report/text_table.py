"""Tables as text: wrapped to a width, and where their columns do not fit into it a line for each value."""

import re
from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

NARROWEST = 12
"""Characters that a column of longer cells needs, so that it can be read."""
_GAP = 2


def fits(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether each column has room for its longest unbreakable text, at most NARROWEST characters of it."""
    columns = zip(names, *rows, strict=True)
    needed = [max(min(_longest(cell), NARROWEST) for cell in column) for column in columns]
    return sum(needed) + _GAP * (len(needed) - 1) <= width


def drawn(names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], width: int) -> str:
    """Rows of cells (one line each) as a table of `width`; no column and no cell is left out.

    Args:
        right: which columns are flush right, as numbers are.
    """
    if not fits(names, rows, width):
        label = max(map(len, names))
        blocks = ("\n".join(f"{n:<{label}}  {cell}" for n, cell in zip(names, row, strict=True)) for row in rows)
        return "\n\n".join(blocks)
    table = Table(box=None, pad_edge=False)
    whole = _names_fit(names, rows, width)
    for position, (name, flush) in enumerate(zip(names, right, strict=True)):
        justify: Literal["right", "left"] = "right" if flush else "left"
        table.add_column(Text(name), justify=justify, overflow="fold", no_wrap=whole and not position)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(markup=False, highlight=False, width=width, color_system=None)  # kernels set FORCE_COLOR
    with console.capture() as text:
        console.print(table)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def _names_fit(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether the first column, which has names, fits unbroken: the others have room for their words."""
    first, *others = zip(names, *rows, strict=True)
    needed = [max(len(word) for cell in column for word in cell.split() or [""]) for column in others]
    return max(map(len, first)) + sum(_GAP + min(words, NARROWEST) for words in needed) <= width


def _longest(cell: str) -> int:
    return max(map(len, re.split(r"[\s_/.-]", cell)))
