"""Base of every picture: the lock, the palette, axes with plain numbers, lines that smooth when long."""

import io
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image, ImageColor

from grpo_nb.metrics import keys, limits
from grpo_nb.plots.thinning import extremes
from grpo_nb.printable import printable

RENDER_LOCK = threading.RLock()
"""Held while any figure is built or drawn; reentrant."""

T = TypeVar("T")

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C6D31")
"""Okabe & Ito's colours, distinct with any colour vision; objectives take them in the order of the config."""
INK, MUTED, FAINT, GRID, PAPER, ALARM = "#1F2328", "#656D76", "#AEB5BD", "#E7EAED", "#FFFFFF", "#B3261E"
DOTS, DASHES, SHORT_DASHES = (0, (1, 2)), (0, (4, 3)), (0, (4, 2))
PAGE, STRIP = (12.6, 7.1), (12.6, 3.4)
"""Inches of a page of panels, and of a single row of them."""
OWN = (*PALETTE, INK, MUTED, FAINT, GRID, PAPER, ALARM)
KEPT_DPI, KEPT_COLOURS = 72, 32
"""Resolution and colours of a picture that a notebook keeps; the colours of `OWN` are added to these."""
DECADES = 20
"""Powers of ten that a logarithmic axis has at most; smaller values are not shown."""
LONG = 30
"""Steps from which the raw line is faint behind a smoothed one."""
AXIS_ENDS = (10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 1500, 2000, 3000, 5000, 7500)
"""The step axis grows from one of these to the next, so that it does not move with every step."""


class Picture(Figure):
    """A Figure that a notebook shows as a picture, without pyplot and under the lock."""

    def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
        """PNG and the alternative text that pages made from a notebook show."""
        return to_png(self), {"alt": repr(self)}

    def __repr__(self) -> str:
        """Content of the picture as text; a page uses it as the picture's alternative text."""
        headings = [text.get_text() for text in self.texts]
        titles = [axis.get_title(loc="left") or axis.get_title() for axis in self.axes]
        return "Picture: " + ("; ".join(filter(None, [*headings, *titles])) or f"{len(self.axes)} panels")


def to_png(figure: Figure) -> bytes:
    """The figure as PNG bytes, drawn by Agg under the lock."""
    buffer = io.BytesIO()
    with RENDER_LOCK:
        _without_math(figure)
        FigureCanvasAgg(figure).print_png(buffer)  # type: ignore[no-untyped-call]
    return buffer.getvalue()


def to_kept_png(figure: Figure) -> bytes:
    """The figure as a notebook keeps it: a fifth of the bytes, at `KEPT_DPI` and in few colours."""
    buffer, canvas = io.BytesIO(), FigureCanvasAgg(figure)
    with RENDER_LOCK:
        _without_math(figure)
        before = figure.dpi
        figure.set_dpi(KEPT_DPI)
        try:
            canvas.draw()  # type: ignore[no-untyped-call]
            pixels = bytes(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
            drawn = Image.frombytes("RGBA", canvas.get_width_height(), pixels)
        finally:
            figure.set_dpi(before)
    in_few_colours(drawn.convert("RGB")).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def in_few_colours(drawn: Image.Image) -> Image.Image:
    """The picture in `KEPT_COLOURS` of its shades, and every pixel of a colour of `OWN` exactly as it is."""
    few, pixels = drawn.quantize(KEPT_COLOURS), np.asarray(drawn)
    places, shades = np.array(few), few.getpalette("RGB") or []
    shades = shades[: 3 * (int(places.max()) + 1)]
    for colour in OWN:
        red_green_blue = ImageColor.getrgb(colour)
        same = (pixels == red_green_blue).all(-1)
        if same.any():
            places[same] = len(shades) // 3
            shades += red_green_blue
    kept = Image.fromarray(places)
    kept.putpalette(shades)
    return kept


def _without_math(figure: Figure) -> None:
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a run named "a$b$" is a name; and mathtext is not safe between threads
        if (clean := printable(text.get_text())) != text.get_text():  # no font has a control character
            text.set_text(clean)


def new(width: float, height: float) -> Picture:
    """An empty picture of so many inches, at 100 dots an inch."""
    return Picture(figsize=(width, height), dpi=100, facecolor=PAPER)


def colours(objectives: Iterable[str]) -> dict[str, str]:
    """The fixed colour of each objective, by its place in the configuration."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(objectives)}


# Rows


def column(rows: pd.DataFrame, key: str) -> pd.Series:
    """A key's finite values within its limits, nan elsewhere; all nan where no row has it."""
    if key not in rows:
        return pd.Series(np.nan, index=rows.index, dtype=float)
    values = pd.to_numeric(rows[key], errors="coerce").astype(float)
    return values.where(np.isfinite(values)).clip(*limits.of(key))


def status(rows: pd.DataFrame) -> pd.Series:
    return rows[keys.STATUS] if keys.STATUS in rows else pd.Series("ok", index=rows.index)


def smooth(values: pd.Series, how: Literal["mean", "median"] = "mean") -> pd.Series:
    """A centred rolling mean (or median) over a twentieth of a long series; a short one as it is."""
    window = max(5, len(values) // 20) if len(values) >= LONG else 1
    return getattr(values.rolling(window, min_periods=1, center=True), how)()


# Axes


def dress(axis: Axes, grid: Literal["x", "y"] = "y") -> None:
    """Set the style of an axis: quiet spines, faint grid, plain numbers."""
    axis.set_facecolor(PAPER)
    axis.grid(axis=grid, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)
    axis.tick_params(colors=MUTED, labelsize=8.5, length=3)
    for part in (axis.xaxis, axis.yaxis):
        part.set_major_formatter(FuncFormatter(plain))


def title(axis: Axes, text: str, unit: str) -> None:
    """Set a bold title, and under it in small the plotted quantity with its unit."""
    axis.set_title(text, loc="left", pad=22, size=11, weight="bold", color=INK)
    axis.annotate(unit, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", size=8.5, color=MUTED)


def plain(value: float, position: int | None = None) -> str:
    """A number without powers of ten as far as that stays short: matplotlib's own would write mathtext."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.6g}"


def scientific(value: float, position: int | None = None) -> str:
    """A small number as `1.2e-4`, zero as `0`."""
    mantissa, _, exponent = f"{value:.3g}".partition("e") if value == 0 else f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}" + (f"e{int(exponent)}" if exponent else "")


def percent_axis(axis: Axes, foot: float = -0.02) -> None:
    axis.set_ylim(foot, 1.02)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))


def log_axis(axis: Axes, low: float, high: float) -> None:
    """Set a logarithmic y axis from `low` to `high` with plain numbers, at most DECADES of them."""
    low = max(low, high / 10**DECADES)
    axis.set_yscale("log")
    axis.set_ylim(low, high)
    fine = math.log10(high / low) < 3
    axis.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0) if fine else (1.0,), numticks=8))
    axis.yaxis.set_major_formatter(FuncFormatter(plain))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(axis="y", which="minor", length=0)


def axis_end(last: int, total: int = 0) -> int:
    """End of the step axis: the total, or a stride beyond the last step.

    >>> axis_end(8, total=60), axis_end(47, total=60), axis_end(70, total=60)
    (10, 50, 70)
    """
    end = next((n for n in AXIS_ENDS if n >= last), math.ceil(last / 5000) * 5000)
    return max(last, min(end, total) if total else end, 1)


def step_axis(axis: Axes, rows: pd.DataFrame, total: int = 0, resumed: Sequence[int] = ()) -> None:
    """Set the step axis, with a dotted line where a run was resumed."""
    axis.set_xlim(0, axis_end(int(rows["step"].iloc[-1]) if len(rows) else 0, total))
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axis.set_xlabel("step", size=8.5, color=MUTED, labelpad=1)
    for step in resumed:
        axis.axvline(step + 0.5, color=MUTED, linewidth=1, linestyle=DOTS, zorder=1)
    if rows.empty:
        axis.text(
            0.5, 0.5, "no steps yet", transform=axis.transAxes, ha="center", va="center", size=10, color=MUTED,
            bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 2},
        )  # fmt: skip


# Lines


def reach(axis: Axes, rows: pd.DataFrame, values: pd.Series, colour: str) -> None:
    """Fill from the lowest to the highest value of each point, where several steps share one."""
    low, high = extremes(rows, values)
    if low is not values:
        axis.fill_between(rows["step"], low, high, color=colour, alpha=0.18, linewidth=0.4)


def limit_line(axis: Axes, value: float, text: str = "", *, right: bool = False) -> None:
    """Draw a dotted limit across the panel, with its name if it has one."""
    axis.axhline(value, color=MUTED, linewidth=1, linestyle=DOTS, zorder=1)
    axis.text(
        0.992 if right else 0.008, value, text, transform=axis.get_yaxis_transform(), va="bottom",
        ha="right" if right else "left", size=8, color=MUTED,
    )  # fmt: skip


def marks(
    axis: Axes, steps: Sequence[float] | pd.Series, marker: str, colour: str, height: float, width: float
) -> None:
    """Marks at a height of the panel, as a fraction of it: for values off the axis."""
    axis.plot(
        steps, np.full(len(steps), height), transform=axis.get_xaxis_transform(), linestyle="none", marker=marker,
        color=colour, markersize=7, markeredgewidth=width, clip_on=False, zorder=5,
    )  # fmt: skip
