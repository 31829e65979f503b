"""Controllers of beta: pure functions from state to state, one state per objective, kept in checkpoints.

A controller runs between steps, never inside a loss. Its state is a few numbers; `to_dict` and `from_dict`
carry it through JSON without losing a bit.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Bound = Literal["floor", "ceiling"]


@dataclass(frozen=True)
class BetaState:
    """Beta of one objective and what its controller remembers.

    >>> BetaState.from_dict(BetaState(0.04, window=(0.02, 0.03)).to_dict())
    BetaState(value=0.04, window=(0.02, 0.03), mode='auto', pinned=None)
    """

    value: float
    """Beta in use: the weight of the KL penalty."""
    window: tuple[float, ...] = ()
    """The newest KLs seen since beta last moved, nats per token, oldest first."""
    mode: Literal["auto", "manual"] = "auto"
    """`manual`: a person holds beta, the controller rests."""
    pinned: Bound | None = None
    """The bound that keeps the controller from going on; an alarm, for the KL is out of its band."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "window": list(self.window)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "BetaState":
        return cls(**{**state, "window": tuple(state.get("window", ()))})


def band_rule(
    state: BetaState,
    kl: float | None,
    band: tuple[float, float] | None,
    bounds: tuple[float, float],
    *,
    name: str = "",
    window: int = 5,
    up: float = 1.15,
    down: float = 0.85,
) -> tuple[BetaState, str | None]:
    """β ← β·up where the median of `window` KLs is above the band, β·down where it is below; within bounds.

    A higher beta holds the policy closer to its reference. After a move the window starts empty, so that the
    next decision sees only KLs that the new beta made: at most one move every `window` steps. A KL that is None
    or not finite, a band of None, and manual mode leave the state as it is.

    Args:
        kl: this step's KL(policy ‖ reference), nats per token.
        name: the objective, put before the sentence.

    Returns:
        the next state, and a sentence for the log when beta moved or has just reached a bound, else None.
    """
    if state.mode == "manual" or band is None or kl is None or not math.isfinite(kl):
        return state, None
    seen = (*state.window, kl)[-window:]
    if len(seen) < window:
        return replace(state, window=seen), None
    median = statistics.median(seen)
    if band[0] <= median <= band[1]:
        return replace(state, window=seen, pinned=None), None

    above = median > band[1]
    side, edge = ("above", band[1]) if above else ("below", band[0])
    value, pinned = _raise(state.value, up, bounds) if above else _lower(state.value, down, bounds)
    moved = value != state.value
    after = replace(state, value=value, window=() if moved else seen, pinned=pinned)
    if not moved and pinned == state.pinned:
        return after, None
    sentence = f"KL {median:.3g} {side} {edge:g}, {_change(state.value, value, pinned)}"
    return after, f"{name}: {sentence}" if name else sentence


def set_manual(state: BetaState, value: float) -> BetaState:
    """A person takes beta: it stays at `value`, bounds or not, until `set_auto`.

    Raises:
        ValueError: the value is negative or not finite.
    """
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"beta={value}; needs a finite number, 0 or more (0 switches the KL penalty off)")
    return BetaState(value=value, mode="manual")


def set_auto(state: BetaState) -> BetaState:
    """The controller takes beta back, from the value it has; by hand it gathered no KLs, so they are fresh."""
    return replace(state, mode="auto")


def _raise(value: float, up: float, bounds: tuple[float, float]) -> tuple[float, Bound | None]:
    """Next beta when KL is too high. From 0, which no factor can leave, it starts at the floor."""
    wanted = max(value * up, bounds[0])
    reached = max(value, min(wanted, bounds[1]))  # a beta set above the ceiling is not lowered by a KL that is too high
    return reached, None if reached == wanted else "ceiling"


def _lower(value: float, down: float, bounds: tuple[float, float]) -> tuple[float, Bound | None]:
    """Next beta when KL is too low."""
    wanted = value * down
    reached = min(value, max(wanted, bounds[0]))  # nor is one below the floor raised by a KL that is too low
    return reached, None if reached == wanted != value else "floor"


def _change(before: float, after: float, pinned: Bound | None) -> str:
    if after == before:
        return f"beta stays at its {pinned}: {_number(after)}"
    percent = f" {abs(after / before - 1):.0%}" if before > 0 else ""
    bound = f" to its {pinned}" if pinned else ""
    return f"beta {'up' if after > before else 'down'}{percent}{bound}: {_number(before)} -> {_number(after)}"


def _number(beta: float) -> str:
    return f"{beta:.4f}" if beta >= 0.01 or beta == 0 else f"{beta:#.3g}"
