"""The six panels of the dashboard; each draws one aspect of the rows on one axis."""

import math

import pandas as pd
from matplotlib.axes import Axes

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.plots.canvas import (
    ALARM,
    DASHES,
    INK,
    MUTED,
    PAPER,
    colours,
    column,
    dashed,
    limit_line,
    line,
    log_axis,
    marks,
    percent_axis,
    reach,
    seen,
    smooth,
    status,
    title,
)
from grpo_nb.plots.thinning import UNDONE


def reward(axis: Axes, rows: pd.DataFrame, config: Config, events: pd.DataFrame | None) -> None:
    """Mean reward of each objective with the spread that its groups have."""
    title(axis, "Reward", "mean of a step; band: one deviation inside groups")
    for name, colour in colours(config.objectives).items():
        mean, spread = smooth(column(rows, keys.REWARD.of(name))), smooth(column(rows, keys.REWARD_STD.of(name)))
        axis.fill_between(rows["step"], mean - spread, mean + spread, color=colour, alpha=0.08, linewidth=0)
        for edge in (mean - spread, mean + spread):
            axis.plot(rows["step"], edge, color=colour, alpha=0.25, linewidth=0.8)
    for name, colour in colours(config.objectives).items():
        line(axis, rows, column(rows, keys.REWARD.of(name)), colour)
    axis.margins(y=0.08)
    if rows.empty:
        axis.set_ylim(0, 1)


def kl(axis: Axes, rows: pd.DataFrame, config: Config, events: pd.DataFrame | None) -> None:
    """KL of each objective and its target band."""
    title(axis, "KL to the reference", f"nats per token ({config.algorithm.row.kl_reported}); shaded: target band")
    bands = {name: o.kl_band for name, o in config.objectives.items() if o.kl_band}
    shared = len(set(bands.values())) == 1
    for name, (low, high) in list(bands.items())[: 1 if shared else None]:
        colour = MUTED if shared else colours(config.objectives)[name]
        axis.axhspan(low, high, color=colour, alpha=0.1, linewidth=0)
        for edge in (low, high):
            axis.axhline(edge, color=colour, alpha=0.45, linewidth=0.8, linestyle=DASHES)
    for name, colour in colours(config.objectives).items():
        line(axis, rows, column(rows, keys.KL.of(name)), colour)
    values = [v for name in config.objectives for v in seen(rows, column(rows, keys.KL.of(name)))]
    axis.set_ylim(min(0.0, *values, 0.0), 1.12 * max([high for _, high in bands.values()] + values, default=0.1) or 0.1)


def beta(axis: Axes, rows: pd.DataFrame, config: Config, events: pd.DataFrame | None) -> None:
    """Beta of each objective as the steps it was used in, with a mark where a person turned it."""
    title(axis, "β, weight of the KL penalty", "as used in each step; triangle: turned by hand")
    values = [o.beta for o in config.objectives.values()]
    for name, colour in colours(config.objectives).items():
        used = column(rows, keys.BETA.of(name))
        values += seen(rows, used)
        reach(axis, rows, used, colour)
        dot = "o" if len(rows) == 1 else None
        axis.plot(rows["step"], used, drawstyle="steps-post", color=colour, linewidth=2, marker=dot, markersize=5)
        turned = _turned_by_hand(rows, events, name)
        axis.plot(
            turned, [_in_use(rows, used, step) for step in turned], linestyle="none", marker="v", markersize=8,
            color=colour, markeredgecolor=PAPER, zorder=5,
        )  # fmt: skip
    positive = [v for v in values if v > 0]
    if positive and max(positive) > 8 * min(positive):
        log_axis(axis, min(positive) / 1.5, 1.5 * max(positive))
    else:
        axis.set_ylim(0, 1.25 * max(values) or 0.1)


def length(axis: Axes, rows: pd.DataFrame, config: Config, events: pd.DataFrame | None) -> None:
    """Length of completions against the cap."""
    title(axis, "Completion length", "tokens; solid: median, dashed: 95th percentile")
    cap = config.sampling.max_completion_length
    limit_line(axis, cap, f"cap {cap}")
    for name, colour in colours(config.objectives).items():
        line(axis, rows, column(rows, keys.LENGTH_P50.of(name)), colour)
        dashed(axis, rows, column(rows, keys.LENGTH_P95.of(name)), colour)
    axis.set_ylim(0, 1.15 * cap)


def lost(axis: Axes, rows: pd.DataFrame, config: Config, events: pd.DataFrame | None) -> None:
    """What of the sampling gives no signal: answers cut at the cap, groups whose answers all earn the same."""
    title(axis, "Cut answers and dead groups", "solid: cut at the cap; dashed: groups of equal reward")
    for name, colour in colours(config.objectives).items():
        line(axis, rows, column(rows, keys.TRUNCATION.of(name)), colour)
        dashed(axis, rows, column(rows, keys.FRAC_REWARD_ZERO_STD.of(name)), colour)
    percent_axis(axis)


def gradient(axis: Axes, rows: pd.DataFrame, config: Config, events: pd.DataFrame | None) -> None:
    """Gradient norm of the steps that were taken; the others are crosses, at the top where they leave the panel."""
    limit, norm, skipped = config.algorithm.max_grad_norm, column(rows, keys.GRAD_NORM), status(rows).isin(UNDONE)
    taken = norm.mask(skipped)
    title(axis, "Gradient norm", f"raw, limit {limit:g} dotted; tick: clipped, cross: skipped or undone")
    line(axis, rows, taken, INK, how="median")
    limit_line(axis, limit)  # named above: the curve runs along it
    values = [
        v for v in seen(rows, taken) if v > 0
    ]  # 0 where no group taught anything: such a step has no place on a log axis
    usual, top = float(taken.dropna().median()), max([limit, *values])
    if values and top > 30 * max(usual, 1e-12):
        log_axis(axis, min(values) / 2, 3 * top)
    else:
        axis.set_ylim(0, 1.25 * top)
    marks(axis, rows["step"][status(rows) == "clipped"], "|", MUTED, height=0.025, width=1)
    shown = skipped & (norm < axis.get_ylim()[1])
    axis.plot(rows["step"][shown], norm[shown], linestyle="none", marker="x", color=ALARM, markeredgewidth=2)
    marks(axis, rows["step"][skipped & ~shown], "x", ALARM, height=0.97, width=2)


PANELS = (reward, kl, beta, length, lost, gradient)


def _turned_by_hand(rows: pd.DataFrame, events: pd.DataFrame | None, objective: str) -> list[float]:
    """Steps at which a person set this beta: from the events, else from where a manual value changes."""
    if events is not None and {"kind", "key", "step"} <= set(events.columns):
        turned = events[(events["kind"] == "knob") & (events["key"] == keys.BETA.of(objective))]
        return sorted(set(turned["step"].dropna()))
    used, mode = column(rows, keys.BETA.of(objective)), rows.get(keys.BETA_MODE.of(objective))
    if mode is None:
        return []
    return list(rows["step"][(mode == "manual") & (used != used.shift()) & (rows.index > 0)])


def _in_use(rows: pd.DataFrame, values: pd.Series, step: float) -> float:
    """The value at a step, or at the next one there is."""
    later = values[rows["step"] >= step]
    return float(later.iloc[0]) if len(later) else math.nan
