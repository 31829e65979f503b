"""Draws a panel with matplotlib; `jupyter/live.js` draws the same in a browser."""

import itertools
import math
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from grpo_nb.plots import canvas
from grpo_nb.plots.canvas import ALARM, INK, LONG, MUTED, PAPER, column, reach, smooth, status
from grpo_nb.plots.marks import BOLD, Band, Curve, Limit, Outcomes, Panel, Scale, Span, Stack, Turned
from grpo_nb.plots.pages import NAMES_ACROSS
from grpo_nb.plots.thinning import UNDONE, extremes

_LOOKS = {"solid": "-", "dashed": canvas.SHORT_DASHES, "dotted": canvas.DOTS}


def draw(axis: Axes, panel: Panel, rows: pd.DataFrame, events: pd.DataFrame | None = None) -> None:
    """The panel on an axis that `canvas.dress` prepared. The caller holds RENDER_LOCK.

    Args:
        rows: points by step, as `thinning.ordered` gives them.
        events: rows of events.jsonl, for the marks of knob turns; None: found in the rows.
    """
    canvas.title(axis, panel.title, panel.unit)
    shown: list[float] = []
    for mark in panel.marks:
        match mark:
            case Curve():
                shown += _curve(axis, mark, rows)
            case Band():
                _band(axis, mark, rows)
            case Stack():
                shown += _stack(axis, mark, rows)
            case Limit():
                canvas.limit_line(axis, mark.value, mark.text, right=mark.right)
            case Span():
                _span(axis, mark)
            case Turned():
                _turned(axis, mark, rows, events)
            case Outcomes():
                pass  # a cross needs the scale
    _scale(axis, panel, rows, shown)
    for mark in panel.marks:
        if isinstance(mark, Outcomes):
            _outcomes(axis, mark, rows)
    _words(axis, panel, rows, shown)


def _curve(axis: Axes, curve: Curve, rows: pd.DataFrame) -> list[float]:
    """Draw a curve; returns the values that the panel needs room for."""
    values = column(rows, curve.key)
    if not curve.undone:
        values = values.mask(status(rows).isin(UNDONE))
    if curve.sparse:
        values = values.dropna()
    smoothed = smooth(values, curve.smooth) if curve.smooth else values
    long = len(rows) >= LONG
    if curve.reach:
        reach(axis, rows, values, curve.colour)
    if curve.raw and long:
        axis.plot(rows["step"], values, color=curve.colour, linewidth=0.8, alpha=0.3)
    bold = curve.width == BOLD
    axis.plot(
        rows["step"][values.index], smoothed, color=curve.colour, linewidth=curve.width,
        linestyle=_LOOKS[curve.look], alpha=1.0 if bold or curve.look == "solid" else 0.85,
        drawstyle="steps-post" if curve.steps else "default",
        marker="o" if len(values) < (4 if curve.sparse else 2) else None, markersize=4 if curve.sparse else 5,
        markerfacecolor=curve.colour if bold else PAPER,
    )  # fmt: skip
    if curve.smooth and not curve.raw and not curve.reach:
        return [*smoothed.dropna()]
    low, high = extremes(rows, values)
    return [*low.dropna(), *high.dropna()]


def _band(axis: Axes, band: Band, rows: pd.DataFrame) -> None:
    mean, spread = smooth(column(rows, band.mean)), smooth(column(rows, band.spread))
    low, high = mean - spread, mean + spread
    axis.fill_between(rows["step"], low, high, color=band.colour, alpha=band.opacity, linewidth=0)
    for edge in (low, high) if band.edges else ():
        axis.plot(rows["step"], edge, color=band.colour, alpha=0.25, linewidth=0.8)


def _stack(axis: Axes, stack: Stack, rows: pd.DataFrame) -> list[float]:
    """Draw a stack; returns its height at each step."""
    if not stack.layers:
        return []
    filled = [column(rows, layer.key).fillna(0.0) for layer in stack.layers]
    heights = [smooth(values, stack.smooth) if stack.smooth else values for values in filled]
    tints = [layer.colour for layer in stack.layers]
    axis.stackplot(rows["step"], *heights, colors=tints, alpha=stack.opacity, linewidth=0)
    return [sum(values) for values in zip(*heights, strict=True)]


def _span(axis: Axes, span: Span) -> None:
    axis.axhspan(span.low, span.high, color=span.colour, alpha=0.1, linewidth=0)
    for edge in (span.low, span.high):
        axis.axhline(edge, color=span.colour, alpha=0.45, linewidth=0.8, linestyle=canvas.DASHES)


def _turned(axis: Axes, mark: Turned, rows: pd.DataFrame, events: pd.DataFrame | None) -> None:
    used = column(rows, mark.key)
    turned = _steps_turned(rows, events, mark.key)
    later = [used[rows["step"] >= step] for step in turned]
    axis.plot(
        turned, [float(values.iloc[0]) if len(values) else math.nan for values in later], linestyle="none", marker="v",
        markersize=8, color=mark.colour, markeredgecolor=PAPER, zorder=5,
    )  # fmt: skip


def _steps_turned(rows: pd.DataFrame, events: pd.DataFrame | None, key: str) -> list[float]:
    """Steps at which a person set this knob: from the events, else from where a manual value changes."""
    if events is not None and {"kind", "key", "step"} <= set(events.columns):
        turned = events[(events["kind"] == "knob") & (events["key"] == key)]
        return sorted(set(turned["step"].dropna()))
    used, mode = column(rows, key), rows.get(key.replace("/", "_mode/", 1))
    if mode is None:
        return []
    return list(rows["step"][(mode == "manual") & (used != used.shift()) & (rows.index > 0)])


def _outcomes(axis: Axes, mark: Outcomes, rows: pd.DataFrame) -> None:
    values, skipped = column(rows, mark.key), status(rows).isin(UNDONE)
    canvas.marks(axis, rows["step"][status(rows) == "clipped"], "|", MUTED, height=0.025, width=1)
    inside = skipped & (values < axis.get_ylim()[1])
    axis.plot(rows["step"][inside], values[inside], linestyle="none", marker="x", color=ALARM, markeredgewidth=2)
    canvas.marks(axis, rows["step"][skipped & ~inside], "x", ALARM, height=0.97, width=2)


def _scale(axis: Axes, panel: Panel, rows: pd.DataFrame, shown: Iterable[float]) -> None:
    scale = panel.scale
    if scale.numbers == "percent":
        canvas.percent_axis(axis, foot=scale.low or 0.0)
    elif scale.high is not None:
        axis.set_ylim(scale.low or 0.0, scale.high)
    elif scale.low is None:
        axis.margins(y=0.08)
        if rows.empty or not panel.curves:
            axis.set_ylim(0, 1)
    elif (ends := log_ends(scale, [*shown])) is not None:
        canvas.log_axis(axis, *ends)
    else:
        known = [*scale.include, *shown]
        axis.set_ylim(min(scale.low, *known, scale.low), scale.room * max(known, default=0.0) or scale.empty)
    if scale.numbers == "scientific":
        axis.yaxis.set_major_formatter(FuncFormatter(canvas.scientific))


def log_ends(scale: Scale, shown: list[float]) -> tuple[float, float] | None:
    """Ends of a logarithmic axis, if these values need one; else None."""
    positive = [v for v in (*scale.include, *shown) if v > 0]
    if scale.log is None or not positive or not any(v > 0 for v in shown):
        return None
    against = min(positive) if scale.log.against == "lowest" else float(np.median(shown))
    top = max(positive)
    return (min(positive) / scale.log.below, scale.log.above * top) if top > scale.log.ratio * against else None


def _words(axis: Axes, panel: Panel, rows: pd.DataFrame, shown: list[float]) -> None:
    for name, colour in panel.own_names.items():
        axis.plot([], [], color=colour, linewidth=3, label=_named(panel, name, rows))
    if panel.own_names and panel.names == "above":
        axis.legend(
            loc="lower left", bbox_to_anchor=(-0.015, 0.985), ncols=len(panel.own_names), frameon=False, fontsize=8,
            handlelength=1, columnspacing=1.0, handletextpad=0.5, labelcolor=INK,
        )  # fmt: skip
    elif panel.own_names:
        axis.legend(
            loc="upper left", ncols=NAMES_ACROSS, frameon=False, fontsize=8, handlelength=1, columnspacing=1.0,
            handletextpad=0.5, labelcolor=INK, borderaxespad=0.1,
        )  # fmt: skip
    if panel.missing and len(rows) and not shown:
        axis.text(
            0.5, 0.5, panel.missing, transform=axis.transAxes, ha="center", va="center", size=9, color=MUTED,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 3},
        )  # fmt: skip


def _named(panel: Panel, name: str, rows: pd.DataFrame) -> str:
    """A name in the legend; inside the panel with its newest value."""
    layers = itertools.chain.from_iterable(mark.layers for mark in panel.marks if isinstance(mark, Stack))
    key = next((layer.key for layer in layers if layer.group == name), None)
    if panel.names != "inside" or key is None or rows.empty:
        return name
    return f"{name} {smooth(column(rows, key).fillna(0.0), 'median').iloc[-1]:.2f}"
