"""Tables for reading: wrapped, escaped, cut to a sane size; with a text form where there is no HTML."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from grpo_nb.config import Config, setting_keys
from grpo_nb.evaluation.intervals import TOO_FEW
from grpo_nb.metrics import keys
from grpo_nb.metrics.healthy import HEALTHY
from grpo_nb.policy.memory import Plan
from grpo_nb.policy.memory_terms import PHASES, gib
from grpo_nb.printable import one_line, printable
from grpo_nb.report.markup import Markup, html
from grpo_nb.report.text_table import drawn

LONGEST_CELL = 600
"""Characters of a table cell; what is longer is cut with a mark, so that no output floods the notebook."""
TEXT_WIDTH = 120
"""Characters of a line of a table where there is no HTML."""
LARGE = 1e6
"""From here on a measure is shown with four digits and an exponent."""
LONG_TEXT, LONG_WIDTH = 60, "16em"
"""A cell of more characters than that is at least so wide."""


@dataclass(frozen=True)
class Table:
    """A data frame shown with wrapped, escaped text and a caption."""

    frame: pd.DataFrame
    caption: str = ""
    folded: bool = False
    """Show the caption only, until it is clicked."""

    def _repr_html_(self) -> Markup:
        """Dollars in a model's answer are dollars: the template keeps JupyterLab from typesetting what is between."""
        return html(
            "table",
            head=[str(name) for name in self.frame.columns],
            rows=[] if self.frame.empty else [[*map(cell, row)] for row in self.frame.itertuples(index=False)],
            caption=self.caption,
            folded=self.folded,
            long_text=LONG_TEXT,
            long_width=LONG_WIDTH,
        )

    def __repr__(self) -> str:
        text = "nothing to show" if self.frame.empty else self._text()
        return printable(f"{self.caption}\n{text}" if self.caption else text)

    def _text(self) -> str:
        rows = [[one_line(cell(value)) for value in row] for row in self.frame.itertuples(index=False)]
        right = [is_numeric_dtype(kind) for kind in self.frame.dtypes]
        return drawn([*map(one_line, self.frame.columns)], rows, right, TEXT_WIDTH)


def cell(value: Any) -> str:
    """A value as a reader wants it: four digits, nothing for what is missing, long text cut."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST_CELL else text[:LONGEST_CELL] + " …"


def format_value(value: Any, name: str = "") -> str:
    """A value of the log in a sentence: numbers in four digits, times as dates, nested values likewise.

    >>> format_value({"share": 0.333333, "steps": [1, 2]})
    'share 0.3333, steps 1, 2'
    """
    if type(value) in (int, float) and name in _TIMES and 0 <= value <= _FAR:
        return f"{datetime.fromtimestamp(value):%Y-%m-%d %H:%M:%S}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_value(item, str(key))}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value)
    return cell(value)


_FAR = 1e11
"""Seconds since 1970 that a calendar has."""
_TIMES = frozenset({"time", "at", "since", "started", "heartbeat"})
"""Names of the log's values that are seconds since 1970."""


def interval(value: float, low: float, high: float) -> str:
    """`0.61 [0.52, 0.70]`; nothing where nothing was measured, and words where clusters are too few for an interval."""
    if math.isnan(value):
        return ""
    if math.isnan(low) or math.isnan(high):
        return f"{_measured(value)} {TOO_FEW}"
    return f"{_measured(value)} [{_measured(low)}, {_measured(high)}]"


def _measured(value: float) -> str:
    return f"{value:.2f}" if abs(value) < LARGE else f"{value:.4g}"


def key_values(values: Mapping[str, Any], caption: str = "") -> Table:
    """Names and values, one a line."""
    return Table(pd.DataFrame({"": list(values), " ": [_plain(value) for value in values.values()]}), caption)


def checks(found: Sequence[Any]) -> Table:
    """Table of the checks of `doctor.environment`."""
    frame = pd.DataFrame([vars(check) for check in found])
    return Table(frame.astype(object).where(frame.notna(), None))


def memory(plan: Plan) -> Table:
    """The planner's terms with their arithmetic, and its verdict."""
    rows = [(t.name, gib(t.bytes), t.arithmetic, PHASES[t.phase]) for t in plan.terms]
    frame = pd.DataFrame(rows, columns=["what", "memory", "arithmetic", "when"])
    return Table(frame, ". ".join([plan.verdict, *plan.advice]))


def findings(found: Sequence[Any]) -> Table:
    """Table of the rules' findings on a run, worst first, with the change to make."""
    order = ("error", "warning", "info")
    table = [
        {"severity": f.severity, "step": f.step, "what": f.message, "what to change": f.advice}
        for f in sorted(found, key=lambda f: order.index(f.severity))
    ]
    frame = pd.DataFrame(table, columns=["severity", "step", "what", "what to change"])
    return Table(frame, "no rule fired" if frame.empty else f"{len(frame)} finding(s)")


def settings(config: Config) -> Table:
    """Every setting with its value, its default and its sentence, those that differ from the default first; folded."""
    found = sorted(setting_keys.settings(config), key=lambda setting: not setting.changed)
    rows = [(s.key, s.text, s.default_text if s.active else "", s.meaning) for s in found]
    frame = pd.DataFrame(rows, columns=["setting", "value", "default", "what it is"])
    return Table(frame, f"all {len(frame)} settings", folded=True)


def changed_settings(config: Config) -> Table:
    """The settings that differ from the defaults, with the default of each."""
    rows = [(s.key, s.text, s.default_text) for s in setting_keys.settings(config) if s.changed]
    frame = pd.DataFrame(rows, columns=["setting", "value", "default"])
    return Table(frame, f"{len(frame)} settings differ from the defaults" if rows else "all settings are the defaults")


def glossary(logged: Iterable[str]) -> Table:
    """Unit, meaning and healthy range of each family of metrics that these keys belong to, in the table's order."""
    families = {row.name for key in logged if (row := keys.row_of(key)) is not None}
    rows = [(k.name, k.unit, k.meaning, HEALTHY.get(k.name, "")) for k in keys.TABLE.values() if k.name in families]
    frame = pd.DataFrame(rows, columns=["metric", "unit", "meaning", "healthy, or what a change means"])
    return Table(frame, f"what {len(frame)} kinds of metrics mean" if rows else "no metrics in the log", folded=True)


def _plain(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return str(value).lower() if value is not None else "null"
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    return value
