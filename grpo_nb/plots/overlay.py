"""Curves of several runs in the same panels: a colour for each run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from grpo_nb.metrics import keys
from grpo_nb.plots import canvas
from grpo_nb.plots.canvas import DOTS, FAINT, INK, PALETTE, RENDER_LOCK, SHORT_DASHES, Picture
from grpo_nb.plots.thinning import ordered
from grpo_nb.storage.index import LogRows

FAMILIES = {
    keys.REWARD: ("reward", "mean of a step"),
    keys.KL: ("KL to the reference", "nats per token"),
    keys.BETA: ("β", "as used in each step"),
    keys.LENGTH_P50: ("length", "tokens, median"),
}
"""Metrics of each objective that are drawn, with the title and unit of their panels."""
COMMON = {keys.GRAD_NORM: ("gradient norm", "raw"), keys.TIME_STEP: ("time of a step", "seconds")}
"""Metrics without an objective."""
MOST_OBJECTIVES = 4
"""Objectives with panels of their own; of more, the first."""
LOOKS = ("-", SHORT_DASHES, DOTS)
MOST_RUNS = len(PALETTE) * len(LOOKS)
"""Runs that colour and dashes distinguish."""
LONGEST_NAME = 40
Look = tuple[str, Any]
"""Colour and dashes."""
Place = tuple[str, str, str]
"""Key, title and unit of a panel."""


def looks(names: Sequence[str]) -> dict[str, Look]:
    """The look of each run, by its place."""
    return {name: (PALETTE[n % len(PALETTE)], LOOKS[n // len(PALETTE) % len(LOOKS)]) for n, name in enumerate(names)}


def overlay(
    runs: Mapping[str, pd.DataFrame | LogRows],
    objectives: Sequence[str],
    drawn_as: Mapping[str, Look] | None = None,
) -> Picture:
    """A panel for each family and objective, and in each a curve of every run that has the metric.

    Args:
        runs: rows of metrics.jsonl by the run's name.
        drawn_as: the look of each run, where not all of them are shown and each is to keep its own.
    """
    seen = {name: ordered(rows) for name, rows in runs.items()}
    drawn_as = drawn_as or looks([*runs])
    places = _places(seen, objectives[:MOST_OBJECTIVES])
    across = max(len(objectives[:MOST_OBJECTIVES]), 2)
    down = max(math.ceil(len(places) / across), 1)
    with RENDER_LOCK:
        figure = canvas.new(12.6, 2.5 * down + 0.3 + 0.22 * math.ceil(len(runs) / 4))
        if not places:
            figure.text(0.5, 0.5, "no steps yet", ha="center", va="center", size=12, color=FAINT)
            return figure
        top = 1 - (0.75 + 0.22 * math.ceil(len(runs) / 4)) / figure.get_figheight()
        axes = figure.subplots(down, across, squeeze=False)
        figure.subplots_adjust(
            left=0.05, right=0.985, top=top, bottom=0.45 / figure.get_figheight(), hspace=0.72, wspace=0.16
        )
        for axis in axes.flat[len(places) :]:
            axis.set_visible(False)
        for axis, place in zip(axes.flat, places, strict=False):
            _panel(axis, place, seen, drawn_as)
        _legend(figure, [*runs], drawn_as)
        return figure


def _places(seen: Mapping[str, pd.DataFrame], objectives: Sequence[str]) -> list[Place]:
    """The panels of which some run has values, objectives side by side."""
    wanted = [
        (family.of(name), f"{name}: {title}", unit) for family, (title, unit) in FAMILIES.items() for name in objectives
    ]
    wanted += [(key, title, unit) for key, (title, unit) in COMMON.items()]
    return [place for place in wanted if any(canvas.column(rows, place[0]).notna().any() for rows in seen.values())]


def _panel(axis: Axes, place: Place, seen: Mapping[str, pd.DataFrame], drawn_as: Mapping[str, Look]) -> None:
    key, title, unit = place
    canvas.dress(axis)
    canvas.title(axis, title, unit)
    last = 0
    for name, rows in seen.items():
        values = canvas.column(rows, key).dropna()
        if values.empty:
            continue
        colour, dashes = drawn_as[name]
        steps = rows["step"][values.index]
        last = max(last, int(steps.iloc[-1]))
        axis.plot(
            steps, canvas.smooth(values), color=colour, linestyle=dashes, linewidth=1.6,
            marker="o" if len(values) == 1 else None, markersize=4,
        )  # fmt: skip
    axis.set_xlim(0, canvas.axis_end(last))


def _legend(figure: Picture, names: Sequence[str], drawn_as: Mapping[str, Look]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=drawn_as[name][0], linestyle=drawn_as[name][1], linewidth=2) for name in names]
    shown = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]} …" for name in names]
    figure.legend(
        lines, shown, loc="upper left", bbox_to_anchor=(0.04, 0.995), ncols=4, frameon=False, fontsize=9, labelcolor=INK
    )
