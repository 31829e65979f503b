"""Content of a panel as data: matplotlib draws it for static pages, the browser for the live view.

A panel names keys of metrics.jsonl and how each is drawn; it holds no rows. `plots/drawing.py` and `jupyter/live.js`
give the marks the same look.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import pandas as pd

Look = Literal["solid", "dashed", "dotted"]
Smooth = Literal["", "mean", "median"]
Numbers = Literal["plain", "percent", "scientific"]
Names = Literal["", "above", "inside"]

BOLD, THIN = 2.0, 1.3
"""Widths of a curve and of its companion, in points."""
MOST_NAMES = 40
"""Curves of one family of keys in a panel; more cannot be distinguished."""


@dataclass(frozen=True)
class Curve:
    """Curve of one key over the steps."""

    key: str
    colour: str
    group: str = ""
    """Group that a click hides in the live view: its objective, or its own name."""
    look: Look = "solid"
    width: float = BOLD
    smooth: Smooth = "mean"
    raw: bool = False
    """Whether a long run shows the values themselves faint behind the smoothed curve."""
    reach: bool = False
    """Whether the lowest and highest value are shaded where several steps share a point."""
    steps: bool = False
    """Whether it is a setting, which holds from each step to the next."""
    sparse: bool = False
    """Whether some steps have no value; these are passed over."""
    undone: bool = True
    """Whether it includes steps that changed no weight."""


@dataclass(frozen=True)
class Band:
    """A mean and one spread to both sides of it."""

    mean: str
    spread: str
    colour: str
    group: str = ""
    edges: bool = False
    opacity: float = 0.12


@dataclass(frozen=True)
class Layer:
    """Layer of a stack: one key."""

    key: str
    colour: str
    group: str


@dataclass(frozen=True)
class Stack:
    """Keys on top of each other; a key that a row lacks is 0."""

    layers: tuple[Layer, ...]
    smooth: Smooth = "mean"
    opacity: float = 0.9


@dataclass(frozen=True)
class Limit:
    """A dotted line across the panel, with its name on it where there is one."""

    value: float
    text: str = ""
    right: bool = False


@dataclass(frozen=True)
class Span:
    """A shaded range of values between dashed edges."""

    low: float
    high: float
    colour: str


@dataclass(frozen=True)
class Turned:
    """A triangle on the curve of `key` at each step where a person set it."""

    key: str
    colour: str
    group: str = ""


@dataclass(frozen=True)
class Outcomes:
    """A tick at the foot for each step that was clipped, a cross for each that changed no weight."""

    key: str
    """Key at whose value a cross is drawn, at the top where that leaves the panel."""


Mark: TypeAlias = Curve | Band | Stack | Limit | Span | Turned | Outcomes


@dataclass(frozen=True)
class Log:
    """A logarithmic axis, once the highest value is more than `ratio` times the lowest, or the median."""

    ratio: float
    against: Literal["lowest", "median"] = "lowest"
    below: float = 2.0
    above: float = 2.0
    """Room at both ends, as factors."""


@dataclass(frozen=True)
class Scale:
    """Vertical axis of a panel: fixed where `high` is given, else with room for the drawn values."""

    low: float | None = 0.0
    """Lower end, or the lowest value if that is below it; None: the lowest value with a margin."""
    high: float | None = None
    include: tuple[float, ...] = ()
    """Values that always have room."""
    room: float = 1.15
    empty: float = 1.0
    """Upper end without values."""
    log: Log | None = None
    numbers: Numbers = "plain"


@dataclass(frozen=True)
class Panel:
    """Panel over the steps."""

    title: str
    unit: str
    marks: tuple[Mark, ...]
    scale: Scale = field(default_factory=Scale)
    names: Names = ""
    """Position of the names of its own curves or layers; "" where the objectives' colours identify them."""
    missing: str = ""
    """Reason shown where the rows have none of its keys."""

    @property
    def curves(self) -> list[Curve]:
        return [mark for mark in self.marks if isinstance(mark, Curve)]

    @property
    def own_names(self) -> dict[str, str]:
        """Each name with its colour, in the order of the marks."""
        if not self.names:
            return {}
        layers = [layer for mark in self.marks if isinstance(mark, Stack) for layer in mark.layers]
        named: list[Layer | Curve] = [*layers, *self.curves]
        return {one.group: one.colour for one in named if one.group}

    def as_json(self) -> dict[str, Any]:
        """The panel as JSON for the browser; each mark with its kind."""
        marks = [{"kind": type(mark).__name__.lower()} | asdict(mark) for mark in self.marks]
        return asdict(self) | {"marks": marks, "own": list(self.own_names.items())}


@dataclass(frozen=True)
class Found:
    """Keys of a run's rows, and the newest value of each; they determine the layout of a page."""

    keys: Sequence[str] = ()
    newest: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: pd.DataFrame) -> "Found":
        """Keys and newest values of rows in the form that the pictures read."""
        return cls([*map(str, rows.columns)], rows.ffill().iloc[-1].to_dict() if len(rows) else {})

    def below(self, prefix: str) -> list[str]:
        """Rest of the first MOST_NAMES keys that begin with `prefix`, in their order."""
        return [key.removeprefix(prefix) for key in self.keys if key.startswith(prefix)][:MOST_NAMES]

    def number(self, key: str) -> float | None:
        """The newest value of a key, where it is a finite number."""
        value = self.newest.get(key)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def keys_of(panels: Iterable[Panel]) -> list[str]:
    """Every key that the panels draw, once, in their order."""
    found: dict[str, None] = {}
    for panel in panels:
        for mark in panel.marks:
            match mark:
                case Curve(key=key) | Turned(key=key) | Outcomes(key=key):
                    found[key] = None
                case Band(mean=mean, spread=spread):
                    found |= dict.fromkeys((mean, spread))
                case Stack(layers=layers):
                    found |= dict.fromkeys(layer.key for layer in layers)
                case _:
                    pass
    return list(found)
