"""Curves of several runs of one kind: the mean of the seeds, and from the lowest to the highest of them."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from grpo_nb.plots import canvas
from grpo_nb.plots.canvas import FAINT, PALETTE, RENDER_LOCK, Picture

Line = tuple[NDArray[np.float64], NDArray[np.float64]]


def spread(curves: Mapping[str, Mapping[str, Sequence[Line]]], seeds: int) -> Picture:
    """A panel for each key, a colour for each arm; `curves`: by key and arm, steps and values of each seed."""
    arms = [*dict.fromkeys(arm for by_arm in curves.values() for arm in by_arm)]
    colours = {arm: PALETTE[i % len(PALETTE)] for i, arm in enumerate(arms)}
    with RENDER_LOCK:
        figure = canvas.new(5.6 * max(len(curves), 1) + 0.6, 4.2)
        if not arms:
            figure.text(0.5, 0.5, "nothing trained yet", ha="center", va="center", size=12, color=FAINT)
            return figure
        axes = figure.subplots(1, len(curves), squeeze=False)[0]
        figure.subplots_adjust(left=0.08, right=0.97, top=0.82, bottom=0.14, wspace=0.22)
        for axis, (key, by_arm) in zip(axes, curves.items(), strict=True):
            canvas.dress(axis)
            canvas.title(axis, key, f"mean of {seeds} seeds; band: lowest to highest")
            for arm, lines in by_arm.items():
                table = pd.concat(
                    [pd.Series(v, index=s).groupby(level=0).last() for s, v in lines], axis=1
                ).sort_index()
                mean = canvas.smooth(table.mean(axis=1))
                axis.fill_between(
                    table.index, table.min(axis=1), table.max(axis=1), color=colours[arm], alpha=0.12, linewidth=0
                )
                axis.plot(mean.index, mean, color=colours[arm], linewidth=1.8, label=arm)
            axis.set_xlabel("step", size=9, color=canvas.MUTED)
        axes[0].legend(frameon=False, fontsize=9, loc="best")
        return figure
