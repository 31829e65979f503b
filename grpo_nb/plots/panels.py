"""The six panels of the overview, each one aspect of the run."""

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.plots.canvas import INK, MUTED, colours
from grpo_nb.plots.marks import THIN, Band, Curve, Limit, Log, Mark, Outcomes, Panel, Scale, Span, Turned


def overview(config: Config) -> list[Panel]:
    """Panels of reward, KL, beta; length, truncated answers and groups without signal, gradient norm."""
    return [draw(config) for draw in (reward, kl, beta, length, lost, gradient)]


def reward(config: Config) -> Panel:
    """Mean reward of each objective with the spread that its groups have."""
    marks: list[Mark] = [
        Band(keys.REWARD.of(name), keys.REWARD_STD.of(name), colour, name, edges=True, opacity=0.08)
        for name, colour in colours(config.objectives).items()
    ]
    marks += [main(keys.REWARD.of(name), colour, name) for name, colour in colours(config.objectives).items()]
    return Panel("Reward", "mean of a step; band: one deviation inside groups", tuple(marks), Scale(low=None))


def kl(config: Config) -> Panel:
    """KL of each objective and its target band."""
    bands = {name: o.kl_band for name, o in config.objectives.items() if o.kl_band}
    shared = len(set(bands.values())) == 1
    marks: list[Mark] = [
        Span(low, high, MUTED if shared else colours(config.objectives)[name])
        for name, (low, high) in list(bands.items())[: 1 if shared else None]
    ]
    marks += [main(keys.KL.of(name), colour, name) for name, colour in colours(config.objectives).items()]
    scale = Scale(include=tuple(high for _, high in bands.values()), room=1.12, empty=0.1)
    unit = f"nats per token ({config.algorithm.row.kl_reported}); shaded: target band"
    return Panel("KL to the reference", unit, tuple(marks), scale)


def beta(config: Config) -> Panel:
    """Beta of each objective as the steps it was used in, with a mark where a person turned it."""
    marks: list[Mark] = []
    for name, colour in colours(config.objectives).items():
        marks.append(Curve(keys.BETA.of(name), colour, name, smooth="", reach=True, steps=True))
        marks.append(Turned(keys.BETA.of(name), colour, name))
    configured = tuple(o.beta for o in config.objectives.values())
    scale = Scale(include=configured, room=1.25, empty=0.1, log=Log(8, below=1.5, above=1.5))
    return Panel("β, weight of the KL penalty", "as used in each step; triangle: changed by hand", tuple(marks), scale)


def length(config: Config) -> Panel:
    """Length of completions against the cap."""
    cap = config.sampling.max_completion_length
    marks: list[Mark] = [Limit(cap, f"cap {cap}")]
    for name, colour in colours(config.objectives).items():
        marks += [
            main(keys.LENGTH_P50.of(name), colour, name),
            companion(keys.LENGTH_P95.of(name), colour, name),
        ]
    return Panel(
        "Completion length", "tokens; solid: median, dashed: 95th percentile", tuple(marks), Scale(0, 1.15 * cap)
    )


def lost(config: Config) -> Panel:
    """Share of the samples without signal: answers cut at the cap, groups whose rewards are all equal."""
    marks: list[Mark] = []
    for name, colour in colours(config.objectives).items():
        marks += [
            main(keys.TRUNCATION.of(name), colour, name),
            companion(keys.FRAC_REWARD_ZERO_STD.of(name), colour, name),
        ]
    unit = "solid: cut at the cap; dashed: groups of equal reward"
    return Panel("Truncation, groups without signal", unit, tuple(marks), Scale(-0.02, 1.02, numbers="percent"))


def gradient(config: Config) -> Panel:
    """Gradient norm of the steps that were taken; the others are crosses."""
    limit = config.algorithm.max_grad_norm
    norm = Curve(keys.GRAD_NORM, INK, smooth="median", raw=True, reach=True, undone=False)
    scale = Scale(include=(limit,), room=1.25, log=Log(30, "median", below=2, above=3))
    unit = f"raw, limit {limit:g} dotted; tick: clipped, cross: skipped or undone"  # the curve would cover a name on it
    return Panel("Gradient norm", unit, (norm, Limit(limit), Outcomes(keys.GRAD_NORM)), scale)


def main(key: str, colour: str, group: str) -> Curve:
    """The curve that a panel is about."""
    return Curve(key, colour, group, raw=True, reach=True)


def companion(key: str, colour: str, group: str) -> Curve:
    """Curve that accompanies a main curve of the same colour: thinner and dashed."""
    return Curve(key, colour, group, look="dashed", width=THIN)
