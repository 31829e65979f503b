"""Pictures of a run: pure functions from its log to a Figure, shared by dashboard, report and notebooks.

No pyplot, so no hidden state; no mathtext, whose parser is not safe between threads; and one lock around everything
that builds or draws. What is returned shows itself as the last line of a notebook cell.
"""

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.plots import canvas, drawing, pages, panels
from grpo_nb.plots.canvas import (
    FAINT,
    GRID,
    INK,
    MUTED,
    PALETTE,
    PAPER,
    RENDER_LOCK,
    Picture,
    colours,
    to_kept_png,
    to_png,
)
from grpo_nb.plots.exhibits import arrows, curves
from grpo_nb.plots.fronts import pareto
from grpo_nb.plots.marks import Found, Panel
from grpo_nb.plots.thinning import ordered
from grpo_nb.storage.index import LogRows
from grpo_nb.storage.index.frames import DROPPED

__all__ = [
    "RENDER_LOCK",
    "Picture",
    "answers",
    "arrows",
    "before_after",
    "colours",
    "curves",
    "dashboard",
    "machinery",
    "pareto",
    "reward_curves",
    "rewards",
    "sft",
    "to_kept_png",
    "to_png",
]


MOST_MARKS = 200
"""Marks of one kind in a panel; more would be a grey field."""


def dashboard(
    metrics: pd.DataFrame | LogRows,
    config: Config,
    events: pd.DataFrame | None = None,
    *,
    name: str = "",
    updated: datetime | None = None,
) -> Picture:
    """Reward, KL, beta; length, truncated answers and groups without signal, gradient norm: the run at a glance.

    Args:
        metrics: rows of metrics.jsonl, as a table or as `run.stored("metrics")`; may be empty.
        events: rows of events.jsonl, for the marks of knob turns and resumes.
        name: name of the run, for the header.
        updated: time of the newest row, for the header.
    """
    return _page(lambda found: panels.overview(config), 3, metrics, config, events, (name, updated))


def rewards(
    metrics: pd.DataFrame | LogRows,
    config: Config,
    events: pd.DataFrame | None = None,
    *,
    name: str = "",
    updated: datetime | None = None,
) -> Picture:
    """Each objective's reward functions with their spread, and its answers' labels; arguments as of `dashboard`."""
    across = max(len(config.objectives), 2)
    return _page(lambda found: pages.rewards(config, found), across, metrics, config, events, (name, updated))


def machinery(
    metrics: pd.DataFrame | LogRows,
    config: Config,
    events: pd.DataFrame | None = None,
    *,
    name: str = "",
    updated: datetime | None = None,
) -> Picture:
    """Time by phase, gradients by objective and their agreement, entropy, clipping, learning rate; as `dashboard`."""
    return _page(lambda found: pages.machinery(config, found), 3, metrics, config, events, (name, updated))


def _page(
    described: Callable[[Found], list[Panel]],
    across: int,
    metrics: pd.DataFrame | LogRows,
    config: Config,
    events: pd.DataFrame | None,
    head: tuple[str, datetime | None],
) -> Picture:
    """Panels under the header, all pages of one size so that turning them moves nothing."""
    rows, resumed = ordered(metrics), _steps_of(events, "resume")
    drawn = described(Found.of(rows))
    total = _goal(rows, config, events)
    with RENDER_LOCK:
        figure = canvas.new(*canvas.PAGE)
        axes = figure.subplots(math.ceil(len(drawn) / across), across, squeeze=False)
        figure.subplots_adjust(left=0.05, right=0.985, top=0.785, bottom=0.075, hspace=0.52, wspace=0.2)
        for panel, axis in zip(drawn, axes.flat, strict=True):
            canvas.dress(axis)
            drawing.draw(axis, panel, rows, events)
            canvas.step_axis(axis, rows, total, resumed)
        _header(figure, rows, total, *head)
        _legend(figure, rows, config, resumed)
        return figure


def reward_curves(metrics: pd.DataFrame | LogRows, config: Config) -> Picture:
    """The mean reward of each objective with the spread inside its groups, and how far it came."""
    rows = ordered(metrics)
    with RENDER_LOCK:
        figure = canvas.new(9, 4)
        axis = figure.subplots()
        figure.subplots_adjust(left=0.065, right=0.8, top=0.83, bottom=0.12)
        canvas.dress(axis)
        drawing.draw(axis, panels.reward(config), rows)
        canvas.step_axis(axis, rows, config.run.steps)
        ends = {name: canvas.column(rows, keys.REWARD.of(name)).dropna() for name in config.objectives}
        _end_labels(axis, {name: values for name, values in ends.items() if len(values)}, colours(config.objectives))
        return figure


def answers(metrics: pd.DataFrame | LogRows, config: Config) -> Picture:
    """Labels of the sampled answers: the share of each over the steps, one panel per objective."""
    rows = ordered(metrics)
    with RENDER_LOCK:
        figure = canvas.new(5.4 * len(config.objectives) + 0.8, 3.6)
        axes = figure.subplots(1, len(config.objectives), squeeze=False)[0]
        figure.subplots_adjust(left=0.07, right=0.98, top=0.8, bottom=0.14, wspace=0.2)
        for axis, name in zip(axes, config.objectives, strict=True):
            canvas.dress(axis)
            drawing.draw(axis, pages.labels(name, Found.of(rows)), rows)
            canvas.step_axis(axis, rows, config.run.steps)
        return figure


def sft(rows: pd.DataFrame | LogRows) -> Picture:
    """Loss, learning rate and gradient norm of SFT."""
    points = ordered(rows)
    with RENDER_LOCK:
        figure = canvas.new(*canvas.STRIP)
        axes = figure.subplots(1, 3)
        figure.subplots_adjust(left=0.055, right=0.985, top=0.8, bottom=0.13, wspace=0.22)
        for axis, panel in zip(axes, pages.SFT, strict=True):
            canvas.dress(axis)
            drawing.draw(axis, panel, points)
            canvas.step_axis(axis, points)
        return figure


def before_after(comparison: pd.DataFrame) -> Picture:
    """Base, SFT and latest of every metric with 95% intervals, and the paired change from SFT to latest."""
    groups = [(str(name), lines.reset_index(drop=True)) for name, lines in comparison.groupby("objective", sort=False)]
    tallest, across = max((len(lines) for _, lines in groups), default=2), max(len(groups), 1)
    words, plot, change = 2.0, 2.9, 1.75  # inches of one panel: the metrics' names, the axis, the change in numbers
    width, height = (words + plot + change) * across, 1.15 + 0.42 * tallest
    with RENDER_LOCK:
        figure = canvas.new(width, height)
        for i, (name, lines) in enumerate(groups):
            left = i * (words + plot + change) + words
            tall = 0.42 * len(lines)
            axis = figure.add_axes((left / width, (height - 0.75 - tall) / height, plot / width, tall / height))
            canvas.dress(axis, grid="x")
            _stages(axis, name, lines, PALETTE[i % len(PALETTE)])
        if not groups:
            empty = "no evaluations yet: run grpo_nb.evaluate(run)"
            figure.text(0.5, 0.5, empty, ha="center", va="center", size=12, color=FAINT)
        return figure


def _header(figure: Picture, rows: pd.DataFrame, total: int, name: str, updated: datetime | None) -> None:
    step = _last(rows)
    figure.text(0.05, 0.945, name or "GRPO", size=16, weight="bold", color=INK)
    when = f"   last update {updated:%H:%M:%S}" if updated else ""
    when += f"   {dropped} metrics left out" if (dropped := rows.attrs.get(DROPPED)) else ""
    figure.text(0.985, 0.945, f"step {step} of {total}{when}", size=11, color=INK, ha="right")
    done = min(1.0, step / total) if total else 1.0
    for share, colour in ((1.0, GRID), (done, INK)):
        ends = [0.05, 0.05 + 0.935 * share]
        figure.add_artist(Line2D(ends, [0.925, 0.925], color=colour, linewidth=2.5, solid_capstyle="butt"))


def _legend(figure: Picture, rows: pd.DataFrame, config: Config, resumed: Sequence[int]) -> None:
    handles = [
        Line2D([], [], color=colour, linewidth=3, label=_headline(rows, name))
        for name, colour in colours(config.objectives).items()
    ]
    if resumed:
        handles.append(Line2D([], [], color=MUTED, linewidth=1, linestyle=canvas.DOTS, label="resumed here"))
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.042, 0.917), ncols=min(len(handles), 5), frameon=False,
        fontsize=10, handlelength=1.4, columnspacing=2.2, labelcolor=INK,
    )  # fmt: skip


def _headline(rows: pd.DataFrame, objective: str) -> str:
    values = canvas.column(rows, keys.REWARD.of(objective)).dropna()
    return f"{objective}   reward {values.tail(5).mean():.2f}" if len(values) else objective


def _end_labels(axis: Axes, curves: dict[str, pd.Series], palette: dict[str, str], gap: float = 0.14) -> None:
    """Each curve's name and way at its right end, lowest first, kept `gap` of the axis apart."""
    low, high = axis.get_ylim()
    place = -math.inf
    for name, values in sorted(curves.items(), key=lambda item: float(canvas.smooth(item[1]).iloc[-1])):
        place = max((float(canvas.smooth(values).iloc[-1]) - low) / (high - low), place + gap)
        way = f"{name}\n{values.head(5).mean():.2f} to {values.tail(5).mean():.2f}"
        axis.text(1.015, place, way, transform=axis.transAxes, size=9.5, color=palette[name], va="center")


def _stages(axis: Axes, name: str, lines: pd.DataFrame, colour: str) -> None:
    canvas.title(axis, name, "grey: base, open: SFT, filled: latest; bars: 95%")
    looks = {"base": (FAINT, PAPER), "sft": (colour, PAPER), "latest": (colour, colour)}
    for offset, (stage, (edge, face)) in zip((-0.24, 0.0, 0.24), looks.items(), strict=True):
        y = lines.index.to_numpy() + offset
        axis.hlines(y, lines[f"{stage}_low"], lines[f"{stage}_high"], color=edge, linewidth=2, alpha=0.55)
        axis.plot(
            lines[stage], y, linestyle="none", marker="o", markersize=6, markerfacecolor=face, markeredgecolor=edge,
            markeredgewidth=1.6,
        )  # fmt: skip
    bounds = lines[[f"{stage}{end}" for stage in looks for end in ("_low", "_high")]].to_numpy(float)
    known = bounds[np.isfinite(bounds)]
    axis.set_xlim(min(-0.04, *known - 0.04), max(1.04, *known + 0.04)) if len(known) else axis.set_xlim(-0.04, 1.04)
    axis.set_ylim(len(lines) - 0.5, -0.5)
    axis.set_yticks(range(len(lines)), [_words(metric) for metric in lines["metric"]], color=INK)
    axis.tick_params(axis="y", length=0)
    axis.axvline(0, color=FAINT, linewidth=0.8, zorder=1)
    for y, row in enumerate(lines.to_dict("records")):
        _change(axis, y, row)


def _change(axis: Axes, y: int, row: dict[Any, Any]) -> None:
    if not math.isfinite(row["difference"]):
        return
    text = f"{row['difference']:+.2f}"
    if math.isfinite(row["difference_low"]):
        text += f"  [{row['difference_low']:+.2f}, {row['difference_high']:+.2f}]"
    sure = bool(row["differs"])
    axis.text(
        1.03, y, text.replace("-", "−"), transform=axis.get_yaxis_transform(), va="center", size=8.5,
        color=INK if sure else MUTED, weight="bold" if sure else "normal",
    )  # fmt: skip


def _words(metric: str) -> str:
    first, _, rest = metric.partition("_")
    halves = ("ambiguous", "disambiguated", "answerable", "unanswerable")
    return f"{first}, {rest}" if rest in halves else metric.replace("_", " ")


def _goal(rows: pd.DataFrame, config: Config, events: pd.DataFrame | None) -> int:
    """Steps in all, as `Run.goal` has it."""
    goals = [] if events is None or "goal" not in events.columns else events["goal"].dropna().tolist()
    return max(config.run.steps, _last(rows), int(goals[-1]) if goals else 0)


def _last(rows: pd.DataFrame) -> int:
    return int(rows["step"].iloc[-1]) if len(rows) else 0


def _steps_of(events: pd.DataFrame | None, kind: str) -> list[int]:
    if events is None or not {"kind", "step"} <= set(events.columns):
        return []
    steps = sorted({int(step) for step in events[events["kind"] == kind]["step"].dropna()})
    return steps[:: max(1, len(steps) // MOST_MARKS)]
