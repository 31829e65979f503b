"""Panels behind the first page of the dashboard: what each reward function gives, and how the machinery runs."""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import cycle

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.plots.canvas import (
    DOTS,
    FAINT,
    INK,
    MUTED,
    PALETTE,
    PAPER,
    SHORT_DASHES,
    colours,
    column,
    limit_line,
    line,
    log_axis,
    percent_axis,
    reach,
    scientific,
    seen,
    smooth,
    title,
)

Panel = Callable[[Axes, pd.DataFrame, Config, "pd.DataFrame | None"], None]
NAMES_ACROSS = 3
"""Phases in a row of the legend."""
WIDE = 20.0
"""Norms this many times apart get a logarithmic axis."""


def of_rewards(config: Config) -> list[Panel]:
    """Two panels for each objective: its reward functions above, its answers below."""
    return [functools.partial(draw, name=name) for draw in (functions, labels) for name in config.objectives]


def functions(axis: Axes, rows: pd.DataFrame, config: Config, events: pd.DataFrame | None, *, name: str) -> None:
    """Mean of each reward function with its spread inside groups."""
    names = _below(rows, keys.REWARD_PART.below(name))
    title(axis, f"Reward functions, {name}", "" if names else "mean of a step; band: one deviation inside groups")
    for colour, part in zip(cycle(PALETTE[2:]), names, strict=False):  # the first two are objectives
        mean, spread = column(rows, keys.REWARD_PART.of(name, part)), column(rows, keys.REWARD_PART_STD.of(name, part))
        centre, reach = smooth(mean), smooth(spread)
        axis.fill_between(rows["step"], centre - reach, centre + reach, color=colour, alpha=0.12, linewidth=0)
        line(axis, rows, mean, colour)
        axis.plot([], [], color=colour, linewidth=3, label=part)
    if names:
        _names_above(axis, len(names))
    axis.margins(y=0.08)
    if not names:
        axis.set_ylim(0, 1)


def labels(axis: Axes, rows: pd.DataFrame, config: Config, events: pd.DataFrame | None, *, name: str) -> None:
    """What the sampled answers were: the share of each label over the steps."""
    found = _below(rows, keys.LABEL.below(name))
    order = sorted(found, key=lambda label: (label != "correct", label == "unparsed", label))
    others = iter(("#E69F00", "#D55E00", "#56B4E9", "#CC79A7", "#8C6D31", "#7A5195"))
    tints = [{"correct": "#009E73", "unparsed": FAINT}.get(label) or next(others, MUTED) for label in order]
    title(axis, f"Answers, {name}", "" if order else "share of the sampled answers by label")
    if order:
        shares = [smooth(column(rows, keys.LABEL.of(name, label)).fillna(0.0)) for label in order]
        axis.stackplot(rows["step"], *shares, colors=tints, labels=order, alpha=0.9, linewidth=0)
        _names_above(axis, len(order))
    percent_axis(axis, foot=0.0)


def gradients(axis: Axes, rows: pd.DataFrame, config: Config, events: pd.DataFrame | None) -> None:
    """Norm of each objective's own gradient and of its terms, where the gradient report was logged."""
    title(axis, "Gradient by objective", "norm; solid: whole, dashed: policy term, dotted: KL term")
    norms: list[float] = []
    for name, colour in colours(config.objectives).items():
        own, policy, kl = keys.GRAD_NORM_OF.of(name), *(keys.GRAD_NORM_TERM.of(name, t) for t in ("policy", "kl"))
        for key, look in ((own, "-"), (policy, SHORT_DASHES), (kl, DOTS)):
            values = column(rows, key).dropna()
            _sparse(axis, rows, values, colour, look, 2 if look == "-" else 1.3)
            norms += list(values[values > 0])
    if not norms:
        return _missing(axis, rows, "not logged in this run: set\nalgorithm.gradient_report_every")
    if max(norms) > WIDE * min(norms):
        return log_axis(axis, min(norms) / 2, 2 * max(norms))
    axis.set_ylim(0, 1.2 * max(norms))


def cosines(axis: Axes, rows: pd.DataFrame, config: Config, events: pd.DataFrame | None) -> None:
    """How far the objectives' gradients agree: +1 the same direction, 0 unrelated, -1 against each other."""
    title(axis, "Agreement of the gradients", "cosine; below 0 the objectives pull against each other")
    pairs = _below(rows, keys.GRAD_COSINE_OF.below())
    for colour, pair in zip(cycle((INK, *PALETTE[2:])), pairs, strict=False):
        _sparse(axis, rows, column(rows, keys.GRAD_COSINE_OF.below() + pair).dropna(), colour, "-", 2)
    lowest = column(rows, keys.GRAD_COSINE).dropna()
    if not pairs and len(lowest):
        line(axis, rows, column(rows, keys.GRAD_COSINE), INK)
    axis.axhline(0, color=MUTED, linewidth=1, linestyle=DOTS, zorder=1)
    axis.set_ylim(-1.05, 1.05)
    if not pairs and lowest.empty:
        _missing(axis, rows, "not logged in this run")


def entropy(axis: Axes, rows: pd.DataFrame, config: Config, events: pd.DataFrame | None) -> None:
    """Entropy of the policy on its own answers."""
    title(axis, "Entropy", "nats per token; near 0 the answers no longer vary")
    top = 0.0
    for name, colour in colours(config.objectives).items():
        values = column(rows, keys.ENTROPY.of(name))
        line(axis, rows, values, colour)
        top = max([top, *seen(rows, values)])
    axis.set_ylim(0, 1.15 * top or 1.0)


def clipped(axis: Axes, rows: pd.DataFrame, config: Config, events: pd.DataFrame | None) -> None:
    """Share of tokens whose gradient the clip took away."""
    title(axis, "Clipped tokens", "share; solid: at the upper bound, dashed: at the lower")
    high, low = column(rows, keys.CLIP_RATIO_HIGH), column(rows, keys.CLIP_RATIO_LOW)
    axis.plot(rows["step"], smooth(high), color=INK, linewidth=2)
    axis.plot(rows["step"], smooth(low), color=MUTED, linewidth=1.3, linestyle=SHORT_DASHES)
    for values, colour in ((high, INK), (low, MUTED)):
        reach(axis, rows, values, colour)
    axis.set_ylim(-0.002, max(0.02, 1.2 * max([0.0, *seen(rows, high), *seen(rows, low)])))


def rate(axis: Axes, rows: pd.DataFrame, config: Config, events: pd.DataFrame | None) -> None:
    """Learning rate and temperature as the steps used them."""
    newest = column(rows, keys.TEMPERATURE).dropna()
    limit = config.algorithm.learning_rate
    used, requested = column(rows, keys.LR), column(rows, keys.LR_REQUESTED)
    halved = bool((used < requested).any())
    what = "as used; dashed: requested, before a guard halved it" if halved else "as used"
    title(axis, "Learning rate", what + (f"; temperature {newest.iloc[-1]:g} now" if len(newest) else ""))
    reach(axis, rows, used, INK)
    if halved:
        axis.plot(rows["step"], requested, drawstyle="steps-post", color=MUTED, linewidth=1.3, linestyle=SHORT_DASHES)
    axis.plot(
        rows["step"], used, drawstyle="steps-post", color=INK, linewidth=2, marker="o" if len(rows) == 1 else None
    )
    limit_line(axis, limit, f"configured {scientific(limit)}", right=True)
    axis.set_ylim(0, 1.25 * max([limit, *seen(rows, used)]))
    axis.yaxis.set_major_formatter(FuncFormatter(scientific))


def times(axis: Axes, rows: pd.DataFrame, config: Config, events: pd.DataFrame | None) -> None:
    """Where the seconds of a step go."""
    phases = [phase for phase in _below(rows, keys.TIME.below()) if keys.TIME.has(keys.TIME.of(phase))]
    title(axis, "Time of a step", "seconds by phase; line: the whole step")
    tints = [PALETTE[i] for i in (5, 4, 2, 0, 3, 6, 7)]
    stacked = [smooth(column(rows, keys.TIME.of(phase)).fillna(0.0), "median") for phase in phases]
    if phases:
        names = [f"{phase} {values.iloc[-1]:.2f}" for phase, values in zip(phases, stacked, strict=True)]
        shades = [tints[i % len(tints)] for i in range(len(phases))]
        axis.stackplot(rows["step"], *stacked, colors=shades, labels=names, alpha=0.85, linewidth=0)
    whole = smooth(column(rows, keys.TIME_STEP), "median")
    axis.plot(rows["step"], whole, color=INK, linewidth=1.3)
    room = 1.1 + 0.2 * math.ceil(
        len(phases) / NAMES_ACROSS
    )  # of the names, inside: a row of them is wider than a panel
    axis.set_ylim(0, room * max([0.0, *whole.dropna(), *(sum(v) for v in zip(*stacked, strict=True))]) or 1.0)
    if phases:
        axis.legend(
            loc="upper left", ncols=NAMES_ACROSS, frameon=False, fontsize=8, handlelength=1, columnspacing=1.0,
            handletextpad=0.5, labelcolor=INK, borderaxespad=0.1,
        )  # fmt: skip


MACHINERY: Sequence[Panel] = (times, gradients, cosines, entropy, clipped, rate)


def _below(rows: pd.DataFrame, prefix: str) -> list[str]:
    """What follows `prefix` in the columns that have it, in their order."""
    return [key.removeprefix(prefix) for key in map(str, rows.columns) if key.startswith(prefix)]


def _sparse(axis: Axes, rows: pd.DataFrame, values: pd.Series, colour: str, look: object, width: float) -> None:
    """A curve of the steps that have a value, joined over the others."""
    marker = "o" if len(values) < 4 else None
    steps = rows["step"][values.index]
    axis.plot(steps, smooth(values), color=colour, linestyle=look, linewidth=width, marker=marker, markersize=4)


def _names_above(axis: Axes, count: int) -> None:
    axis.legend(
        loc="lower left", bbox_to_anchor=(-0.015, 0.985), ncols=count, frameon=False, fontsize=8, handlelength=1,
        columnspacing=1.0, handletextpad=0.5, labelcolor=INK,
    )  # fmt: skip


def _missing(axis: Axes, rows: pd.DataFrame, text: str) -> None:
    if len(rows):
        axis.text(
            0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", size=9, color=MUTED,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 3},
        )  # fmt: skip
