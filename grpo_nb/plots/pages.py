"""Pages in addition to the overview: rewards by function, the machinery, and the page of SFT."""

import math
from collections.abc import Sequence
from itertools import cycle

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.plots import panels
from grpo_nb.plots.canvas import FAINT, INK, MUTED, PALETTE, colours, scientific
from grpo_nb.plots.marks import THIN, Band, Curve, Found, Layer, Limit, Log, Mark, Panel, Scale, Stack

NAMES_ACROSS = 3
"""Phases in a row of the legend."""
WIDE = 20.0
"""Norms this many times apart get a logarithmic axis."""


def pages(config: Config, found: Found) -> dict[str, list[Panel]]:
    """Every page of GRPO by its name; `found` has the keys of the run's rows."""
    return {
        "overview": panels.overview(config),
        "rewards": rewards(config, found),
        "machinery": machinery(config, found),
    }


def rewards(config: Config, found: Found) -> list[Panel]:
    """Two panels for each objective: its reward functions above, its answers below."""
    return [draw(name, found) for draw in (functions, labels) for name in config.objectives]


def functions(name: str, found: Found) -> Panel:
    """Mean of each reward function with its spread inside groups."""
    names = found.below(keys.REWARD_PART.below(name))
    marks: list[Mark] = []
    for colour, part in zip(cycle(PALETTE[2:]), names, strict=False):  # the first two are objectives
        mean = keys.REWARD_PART.of(name, part)
        marks += [Band(mean, keys.REWARD_PART_STD.of(name, part), colour, part), panels.main(mean, colour, part)]
    unit = "" if names else "mean of a step; band: one deviation inside groups"
    return Panel(f"Reward functions, {name}", unit, tuple(marks), Scale(low=None), "above")


def labels(name: str, found: Found) -> Panel:
    """Labels of the sampled answers: the share of each over the steps."""
    order = sorted(found.below(keys.LABEL.below(name)), key=lambda x: (x != "correct", x == "unparsed", x))
    others = iter(("#E69F00", "#D55E00", "#56B4E9", "#CC79A7", "#8C6D31", "#7A5195"))
    tints = [{"correct": "#009E73", "unparsed": FAINT}.get(label) or next(others, MUTED) for label in order]
    layers = [Layer(keys.LABEL.of(name, label), tint, label) for label, tint in zip(order, tints, strict=True)]
    unit = "" if order else "share of the sampled answers by label"
    return Panel(f"Answers, {name}", unit, (Stack(tuple(layers)),), Scale(0, 1.02, numbers="percent"), "above")


def machinery(config: Config, found: Found) -> list[Panel]:
    """Time by phase, gradients by objective and their agreement, entropy, clipping, learning rate."""
    return [
        times(found),
        gradients(config),
        cosines(found),
        entropy(config),
        clipped(),
        rate(config, found),
    ]


def times(found: Found) -> Panel:
    """Seconds of a step by phase."""
    phases = [phase for phase in found.below(keys.TIME.below()) if keys.TIME.has(keys.TIME.of(phase))]
    tints = cycle([PALETTE[i] for i in (5, 4, 2, 0, 3, 6, 7)])
    layers = tuple(Layer(keys.TIME.of(phase), tint, phase) for phase, tint in zip(phases, tints, strict=False))
    step = Curve(keys.TIME_STEP, INK, width=THIN, smooth="median")
    room = 1.1 + 0.2 * math.ceil(len(phases) / NAMES_ACROSS)  # of the names: a row of them is wider than a panel
    marks = (Stack(layers, "median", 0.85), step)
    return Panel("Time of a step", "seconds by phase; line: the complete step", marks, Scale(room=room), "inside")


def gradients(config: Config) -> Panel:
    """Norm of each objective's own gradient and of its terms, where the gradient report was logged."""
    marks: list[Mark] = []
    for name, colour in colours(config.objectives).items():
        own, policy, kl = keys.GRAD_NORM_OF.of(name), *(keys.GRAD_NORM_TERM.of(name, t) for t in ("policy", "kl"))
        marks += [
            Curve(own, colour, name, sparse=True),
            Curve(policy, colour, name, "dashed", THIN, sparse=True),
            Curve(kl, colour, name, "dotted", THIN, sparse=True),
        ]
    unit = "norm; solid: total, dashed: policy term, dotted: KL term"
    missing = "not logged in this run: set\nalgorithm.gradient_report_every"
    return Panel("Gradient by objective", unit, tuple(marks), Scale(room=1.2, log=Log(WIDE)), missing=missing)


def cosines(found: Found) -> Panel:
    """Cosines of the objectives' gradients: +1 the same direction, 0 unrelated, -1 against each other."""
    pairs = found.below(keys.GRAD_COSINE_OF.below())
    marks: list[Mark] = [
        Curve(keys.GRAD_COSINE_OF.below() + pair, colour, sparse=True)
        for colour, pair in zip(cycle((INK, *PALETTE[2:])), pairs, strict=False)
    ]
    marks = marks or [panels.main(keys.GRAD_COSINE, INK, "")]
    unit = "cosine; below 0 the objectives pull against each other"
    scale = Scale(-1.05, 1.05)
    return Panel("Agreement of the gradients", unit, (*marks, Limit(0)), scale, missing="not logged in this run")


def entropy(config: Config) -> Panel:
    """Entropy of the policy on its own answers."""
    curves = [panels.main(keys.ENTROPY.of(name), colour, name) for name, colour in colours(config.objectives).items()]
    return Panel("Entropy", "nats per token; near 0 the answers no longer vary", tuple(curves))


def clipped() -> Panel:
    """Share of tokens whose gradient the clip took away."""
    high = Curve(keys.CLIP_RATIO_HIGH, INK, reach=True)
    low = Curve(keys.CLIP_RATIO_LOW, MUTED, look="dashed", width=THIN, reach=True)
    unit = "share; solid: at the upper bound, dashed: at the lower"
    return Panel("Clipped tokens", unit, (high, low), Scale(-0.002, include=(0.02 / 1.2,), room=1.2))


def rate(config: Config, found: Found) -> Panel:
    """Learning rate as the steps used it, and the newest temperature."""
    limit, temperature = config.algorithm.learning_rate, found.number(keys.TEMPERATURE)
    halved = keys.LR_REQUESTED in found.keys
    what = "as used; dashed: requested, before a guard halved it" if halved else "as used"
    marks: list[Mark] = [Limit(limit, f"configured {scientific(limit)}", right=True)]
    if halved:
        marks.append(Curve(keys.LR_REQUESTED, MUTED, look="dashed", width=THIN, smooth="", steps=True))
    marks.append(Curve(keys.LR, INK, smooth="", reach=True, steps=True))
    unit = what + (f"; temperature {temperature:g} now" if temperature is not None else "")
    return Panel("Learning rate", unit, tuple(marks), Scale(include=(limit,), room=1.25, numbers="scientific"))


SFT: Sequence[Panel] = (
    Panel("Loss", "nats per completion token", (panels.main(keys.LOSS, PALETTE[0], ""),), Scale(room=1.05)),
    Panel(
        "Learning rate",
        "of AdamW, as used in each step",
        (Curve(keys.LR, PALETTE[0], smooth=""),),  # a schedule has no noise to smooth
        Scale(room=1.05),
    ),
    Panel("Gradient norm", "before clipping", (panels.main(keys.GRAD_NORM, PALETTE[0], ""),), Scale(room=1.05)),
)
