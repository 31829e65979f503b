"""The picture of a Pareto frame: two objectives a panel, with intervals, the front and its knee."""

from itertools import combinations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import NDArray

from grpo_nb.plots import canvas
from grpo_nb.plots.canvas import ALARM, FAINT, INK, MUTED, PALETTE, PAPER, RENDER_LOCK, Picture

Values = NDArray[np.float64]


def pareto(frame: pd.DataFrame) -> Picture:
    """The stages of `pareto.pareto`: a panel for every two objectives; a lone objective is drawn over the steps.

    Filled: on the front; open: surely dominated; ringed: the knee; bars: 95% intervals, each axis for itself.
    """
    values = [str(name) for name in frame if f"{name}_low" in frame]
    pairs = list(combinations(values, 2)) or [("step", name) for name in values]
    with RENDER_LOCK:
        figure = canvas.new(5.6 * max(len(pairs), 1) + 0.6, 4.6)
        if frame.empty or not pairs:
            figure.text(0.5, 0.5, "no quick evaluations yet", ha="center", va="center", size=12, color=FAINT)
            return figure
        axes = figure.subplots(1, len(pairs), squeeze=False)[0]
        figure.subplots_adjust(left=0.13 if len(pairs) == 1 else 0.07, right=0.96, top=0.84, bottom=0.13, wspace=0.24)
        for axis, (across, up) in zip(axes, pairs, strict=True):
            canvas.dress(axis)
            canvas.title(axis, "Objectives against each other", "filled: on the front, open: dominated; bars: 95%")
            _panel(axis, frame, across, up)
        return figure


def _panel(axis: Axes, frame: pd.DataFrame, across: str, up: str) -> None:
    x, y, front = frame[across].to_numpy(float), frame[up].to_numpy(float), frame["front"].to_numpy(bool)
    axis.vlines(x, frame[f"{up}_low"], frame[f"{up}_high"], color=FAINT, linewidth=1, zorder=1)
    if f"{across}_low" in frame:
        axis.hlines(y, frame[f"{across}_low"], frame[f"{across}_high"], color=FAINT, linewidth=1, zorder=1)
    for chosen, face in ((front, PALETTE[0]), (~front, PAPER)):
        axis.plot(
            x[chosen], y[chosen], linestyle="none", marker="o", markersize=7, markerfacecolor=face,
            markeredgecolor=PALETTE[0] if face != PAPER else MUTED, markeredgewidth=1.4, zorder=3,
        )  # fmt: skip
    knee = frame["knee"].to_numpy(bool)
    axis.plot(
        x[knee], y[knee], linestyle="none", marker="o", markersize=13, markerfacecolor="none", markeredgecolor=ALARM,
        markeredgewidth=1.6, zorder=4,
    )  # fmt: skip
    axis.margins(0.14)
    for i in _named(x, y, [*np.flatnonzero(knee).tolist(), int(np.nanargmax(y)), int(np.nanargmax(x)), 0]):
        name = str(frame["stage"].iloc[i]) + (", knee" if knee[i] else "")
        left = x[i] < (np.nanmin(x) + np.nanmax(x)) / 2
        axis.annotate(
            name, (x[i], y[i]), (9 if left else -9, 8), textcoords="offset points", size=8.5, color=INK,
            ha="left" if left else "right",
        )  # fmt: skip
    axis.set_xlabel(_words(across), size=9, color=MUTED)
    axis.set_ylabel(_words(up), size=9, color=MUTED)


def _named(x: Values, y: Values, wanted: list[int]) -> list[int]:
    """Indices of wanted points that are far enough apart for their names; the first of neighbours stays."""
    named: list[int] = []
    spans = [float(np.ptp(values)) or 1.0 for values in (x, y)]
    for i in wanted:
        gaps = [max(abs(x[i] - x[k]) / spans[0] / 2, abs(y[i] - y[k]) / spans[1]) for k in named]
        if all(gap > 0.1 for gap in gaps):
            named.append(int(i))
    return named


def _words(column: str) -> str:
    """`fairness/accuracy_ambiguous` as `fairness: accuracy ambiguous`."""
    return column.replace("/", ": ", 1).replace("_", " ")
