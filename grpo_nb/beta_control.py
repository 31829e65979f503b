"""Controllers of beta: pure functions from state to state, one state per objective, kept in checkpoints.

A controller runs between steps, never inside a loss. Its state is a few numbers; `to_dict` and `from_dict`
carry it through JSON without losing a bit. `CONTROLLERS` names them all. What they share is in `_move`: inside
the band beta rests, no move is larger than the limit, none leaves the bounds, and none is silent.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Bound = Literal["floor", "ceiling"]

ERROR_CLIP = 0.2
"""Bound of the relative error of KL in `proportional`, ± (Ziegler et al. 2019, section 2.2)."""


@dataclass(frozen=True)
class BetaState:
    """Beta of one objective and the memory of its controller.

    >>> BetaState.from_dict(BetaState(0.04, window=(0.02, 0.03)).to_dict())
    BetaState(value=0.04, window=(0.02, 0.03), mode='auto', pinned=None)
    """

    value: float
    """Active beta: the weight of the KL penalty."""
    window: tuple[float, ...] = ()
    """KLs since beta last moved, nats per token, oldest first; only `band` keeps them."""
    mode: Literal["auto", "manual"] = "auto"
    """`manual`: a person holds beta, and the controller is inactive."""
    pinned: Bound | None = None
    """Bound at which the controller is saturated; an alarm, because the KL is out of its band."""
    automatic: float | None = field(default=None, compare=False, repr=False)
    """The controller's last value while a person holds beta; None where it is unknown."""

    def to_dict(self) -> dict[str, Any]:
        known = {key: value for key, value in asdict(self).items() if key != "automatic" or value is not None}
        return known | {"window": list(self.window)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "BetaState":
        return cls(**{**state, "window": tuple(state.get("window", ()))})


@dataclass(frozen=True)
class KLTarget:
    """Inputs of a controller; each one uses what it needs."""

    band: tuple[float, float]
    """KLs, nats per token, between which beta does not move, ends included."""
    bounds: tuple[float, float]
    """Floor and ceiling of beta."""
    target: float
    """Target KL, inside the band; > 0 for `proportional`."""
    gain: float = 0.1
    """`proportional`: K_β, without unit; `dual_ascent`: beta per nat per step."""
    limit: float = 0.2
    """The largest relative change of beta in one move."""
    window: int = 5
    """Number of KLs whose median `band` compares."""
    up: float = 1.15
    """`band`: the factor where KL is above."""
    down: float = 0.85
    """`band`: the factor where KL is below."""
    start: float = 0.0
    """Value at which beta restarts from 0 or from below its floor when KL is too high; at the floor if that is higher.
    """


def fixed(state: BetaState, kl: float | None, aim: KLTarget) -> tuple[BetaState, str | None]:
    """β ← β"""
    return state, None


def band(state: BetaState, kl: float | None, aim: KLTarget) -> tuple[BetaState, str | None]:
    """β ← β·up where the median of `window` KLs is above the band, β·down where it is below.

    After a move the window starts empty, so that the next decision sees only KLs that the new beta made: at most
    one move every `window` steps. 1.15 and 0.85 do not cancel: one up and one down leave 0.9775 β, so a KL that
    keeps jumping over the band lets beta fall by 2 % a pair. The median makes that rare.
    """
    if kl is None or _rests(state, kl):
        return state, None
    seen = (*state.window, kl)[-aim.window :]
    if len(seen) < aim.window:
        return replace(state, window=seen), None
    median = statistics.median(seen)
    after, sentence = _move(state, median, state.value * (aim.up if median > aim.band[1] else aim.down), aim)
    return replace(after, window=seen if after.value == state.value else ()), sentence


def proportional(state: BetaState, kl: float | None, aim: KLTarget) -> tuple[BetaState, str | None]:
    """β ← β·(1 + gain·clip(KL/target − 1, ±0.2)).  Ziegler et al. 2019, section 2.2, where gain is K_β = 0.1.

    Later code writes the gain as n/H: n completions a step over a horizon H, often 10000. Every step counts, and
    equal errors up and down leave β·(1 − gain²·error²): nearly symmetric, unlike `band`.
    """
    if kl is None or _rests(state, kl):
        return state, None
    error = max(-ERROR_CLIP, min(kl / aim.target - 1, ERROR_CLIP))
    return _move(state, kl, state.value * (1 + aim.gain * error), aim)


def dual_ascent(state: BetaState, kl: float | None, aim: KLTarget) -> tuple[BetaState, str | None]:
    """β ← max(0, β + gain·(KL − target)): β as the Lagrange multiplier of KL ≤ target, moved along its gradient.

    Boyd & Vandenberghe 2004, section 5.1. Steps are absolute, so opposite errors cancel exactly; the floor, which
    is above 0, is met before the 0 of the formula.
    """
    if kl is None or _rests(state, kl):
        return state, None
    return _move(state, kl, max(0.0, state.value + aim.gain * (kl - aim.target)), aim)


Controller = Callable[[BetaState, float | None, KLTarget], tuple[BetaState, str | None]]
"""(state, this step's KL(policy ‖ reference) in nats per token, aim) -> next state, and a sentence for the log when
beta moved or has just met a bound, else None. A KL that is None or not finite and manual mode change nothing."""

CONTROLLERS: Mapping[str, Controller] = {
    "fixed": fixed,
    "band": band,
    "proportional": proportional,
    "dual_ascent": dual_ascent,
}


def set_manual(state: BetaState, value: float) -> BetaState:
    """Hold beta at `value`, bounds or not, until `set_auto`.

    Raises:
        ValueError: the value is negative or not finite.
    """
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"beta={value}; needs a finite number, 0 or more (0 switches the KL penalty off)")
    return BetaState(value=value, mode="manual", automatic=state.value if state.mode == "auto" else state.automatic)


def set_auto(state: BetaState, configured: float | None = None) -> BetaState:
    """Give beta back to the controller, with fresh KLs, from its own last value, else from the configured one.

    It does not start from the person's value: a controller moves by shares, and from 0 or nearly 0 it would need
    hundreds of steps.
    """
    if state.mode == "auto":
        return state
    known = configured if state.automatic is None else state.automatic
    return BetaState(value=state.value if known is None else known)


def reset_window(state: BetaState) -> BetaState:
    """Forget the KLs so far, which were measured differently from those to come; beta stays."""
    return replace(state, window=())


def _rests(state: BetaState, kl: float) -> bool:
    return state.mode == "manual" or not math.isfinite(kl)


def _move(state: BetaState, kl: float, wanted: float, aim: KLTarget) -> tuple[BetaState, str | None]:
    """Move beta towards `wanted` as far as dead band, limit and bounds allow; a higher beta holds the policy closer."""
    low, high = aim.band
    if low <= kl <= high:
        return replace(state, pinned=None), None
    above = kl > high
    value, pinned = (_raise if above else _lower)(state.value, wanted, aim)
    after = replace(state, value=value, pinned=pinned)
    if value == state.value and pinned in (None, state.pinned):
        return after, None
    side, edge = ("above", high) if above else ("below", low)
    return after, f"KL {kl:.3g} {side} {edge:g}, {_change(state.value, value, pinned, aim)}"


def _raise(value: float, wanted: float, aim: KLTarget) -> tuple[float, Bound | None]:
    """Next beta when KL is too high. From below the floor, 0 included, it starts anew, whatever the limit."""
    floor, ceiling = aim.bounds
    again = max(floor, min(aim.start, ceiling)) if value < floor else floor
    limited = max(min(wanted, value * (1 + aim.limit)), again)
    reached = max(value, min(limited, ceiling))  # a beta set above the ceiling is not lowered by a KL that is too high
    return reached, "ceiling" if limited > ceiling else None


def _lower(value: float, wanted: float, aim: KLTarget) -> tuple[float, Bound | None]:
    """Next beta when KL is too low."""
    floor, _ = aim.bounds
    limited = max(wanted, value * (1 - aim.limit))
    reached = min(value, max(limited, floor))  # nor is one below the floor raised by a KL that is too low
    return reached, "floor" if limited < floor else None


def _change(before: float, after: float, pinned: Bound | None, aim: KLTarget) -> str:
    if after == before:
        limit = aim.bounds[0] if pinned == "floor" else aim.bounds[1]
        if after != limit:
            return f"beta stays at {_number(after)}, beyond its {pinned} of {_number(limit)}"
        return f"beta stays at its {pinned}: {_number(after)}"
    if before < aim.bounds[0]:
        where = "to its floor" if after <= aim.bounds[0] else "to its start"
        return f"beta up {where}: {_number(before)} -> {_number(after)}"
    percent = f" {_percent(abs(after / before - 1))}"
    bound = f" to its {pinned}" if pinned else ""
    return f"beta {'up' if after > before else 'down'}{percent}{bound}: {_number(before)} -> {_number(after)}"


def _percent(share: float) -> str:
    if share < 0.001:
        return "by less than 0.1%"
    return f"{share:.0%}" if share >= 0.03 else f"{share:.1%}"


def _number(beta: float) -> str:
    return f"{beta:.4f}" if beta >= 0.01 or beta == 0 else f"{beta:#.3g}"
