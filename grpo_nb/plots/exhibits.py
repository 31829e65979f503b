"""Pictures of toy mathematics: curves over one number, and gradients as arrows."""

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from grpo_nb.plots import canvas
from grpo_nb.plots.canvas import ALARM, FAINT, INK, PALETTE, RENDER_LOCK, Picture

Vector = tuple[float, float]


def curves(
    panels: dict[str, pd.DataFrame],
    unit: str,
    *,
    mark: float | None = None,
    log: bool = False,
    top: float | None = None,
) -> Picture:
    """One panel per frame, one line per column, over the frame's index; `mark` draws a vertical line, e.g. at ratio 1.

    `log` spaces the index by doublings; `top` ends the vertical axis.
    """
    with RENDER_LOCK:
        figure = canvas.new(6.3 * len(panels), 3.8)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        figure.subplots_adjust(left=0.07 if len(panels) > 1 else 0.1, right=0.985, top=0.8, bottom=0.14, wspace=0.18)
        for axis, (name, frame) in zip(axes, panels.items(), strict=True):
            canvas.dress(axis)
            canvas.title(axis, name, unit)
            if log:
                axis.set_xscale("log", base=2)
                axis.set_xticks(
                    [t for t in (0.25, 0.5, 1, 2, 4, 8) if frame.index.min() * 0.99 <= t <= frame.index.max() * 1.01]
                )
                axis.xaxis.set_major_formatter(canvas.plain)
            if mark is not None:
                axis.axvline(mark, color=FAINT, linewidth=0.8, linestyle=canvas.DASHES)
            for i, column in enumerate(frame):
                style = canvas.DASHES if i >= len(PALETTE) // 2 else "-"
                axis.plot(frame.index, frame[column], color=PALETTE[i % len(PALETTE)], label=column, linestyle=style)
            axis.set_ylim(top=top)
            axis.set_xlabel(str(frame.index.name), size=9, color=canvas.MUTED)
            axis.legend(frameon=False, fontsize=8.5, labelcolor=INK)
        return figure


def arrows(gradients: Sequence[Vector], steps: dict[str, Vector]) -> Picture:
    """Objectives' gradients in the plane (thick), and each combiner's step (thin); equal ones as one arrow."""
    with RENDER_LOCK:
        figure = canvas.new(6.3, 5.2)
        axis = figure.subplots()
        figure.subplots_adjust(left=0.08, right=0.97, top=0.86, bottom=0.08)
        canvas.dress(axis)
        canvas.title(axis, "Two objectives, one step", "thick: each objective's own gradient; thin: combined")
        for i, g in enumerate(gradients):
            _arrow(axis, g, ALARM if i else INK, f"objective {i + 1}", 2.6)
        for i, (step, names) in enumerate(_alike(steps).items()):
            _arrow(axis, step, PALETTE[i % len(PALETTE)], " = ".join(names), 1.6)
        reach = 1.15 * max(abs(x) for vector in [*gradients, *steps.values()] for x in vector)
        axis.set_xlim(-reach, reach)
        axis.set_ylim(min(0.0, *(1.2 * v[1] for v in [*gradients, *steps.values()])), reach)
        axis.legend(frameon=False, fontsize=8.5, labelcolor=INK)
        return figure


def _alike(steps: dict[str, Vector]) -> dict[Vector, list[str]]:
    """Names by what they share: an arrow on top of another would hide it."""
    found: dict[Vector, list[str]] = {}
    for name, step in steps.items():
        same = next((other for other in found if math.dist(step, other) <= 1e-3 * math.hypot(*step)), step)
        found.setdefault(same, []).append(name)
    return found


def _arrow(axis: Axes, to: Vector, colour: str, label: str, width: float) -> None:
    axis.annotate("", to, (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": width})
    axis.plot([], [], color=colour, linewidth=width, label=label)


def explosion(norms: pd.DataFrame) -> Picture:
    """Gradient norms by round on a log axis, one curve a column; a cross where the next round breaks a weight."""
    with RENDER_LOCK:
        figure = canvas.new(8.5, 3.8)
        axis = figure.subplots()
        figure.subplots_adjust(left=0.09, right=0.97, top=0.82, bottom=0.14)
        canvas.dress(axis)
        canvas.title(
            axis, "Gradient norm", "by round, log scale; cross: the next round leaves a weight that is not finite"
        )
        for name in norms:
            values = norms[name].where(norms[name] < math.inf).dropna()
            colour = INK if len(norms[name].dropna()) == len(norms) else ALARM
            axis.plot(values.index, values, color=colour, linewidth=2, marker="o", markersize=4, label=str(name))
            if colour == ALARM and len(values):
                axis.plot(values.index[-1:], values[-1:], color=colour, linestyle="none", marker="X", markersize=11)
        known = [v for name in norms for v in norms[name] if 0 < v < math.inf]
        canvas.log_axis(axis, min(known) / 2, 3 * max(known))
        axis.set_xlim(0.5, len(norms) + 0.5)
        axis.legend(frameon=False, fontsize=8.5, labelcolor=INK)
        return figure
