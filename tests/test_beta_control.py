"""Controllers of beta: when beta moves, by how much, where it stops, what it says, and that it works at all."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.beta_control import CONTROLLERS, BetaState, KLTarget, proportional, set_auto, set_manual
from grpo_nb.config import ObjectiveConfig
from tests.support.tokens import names, pattern

BAND, BOUNDS = (0.02, 0.06), (0.01, 1.0)
AIM = KLTarget(band=BAND, bounds=BOUNDS, target=0.04)
NAN, INF = float("nan"), float("inf")
MOVING = ("band", "proportional", "dual_ascent")

every_controller = pytest.mark.parametrize("controller", CONTROLLERS)
every_moving = pytest.mark.parametrize("controller", MOVING)


def drive(
    state: BetaState, kls: Iterable[float | None], controller: str = "band", aim: KLTarget = AIM
) -> tuple[BetaState, list[str]]:
    """The state after these KLs, and everything it said."""
    said: list[str] = []
    for kl in kls:
        state, sentence = CONTROLLERS[controller](state, kl, aim)
        said += [sentence] if sentence else []
    return state, said


# ---- the band rule


def test_below_the_band_beta_falls_and_says_so() -> None:
    state, said = drive(BetaState(0.1), [0.018] * 5)
    assert len(said) == 1 and names(said[0], "0.018", "0.02", "down", "15%", "0.1000 -> 0.0850")
    assert (state.value, state.window) == (pytest.approx(0.085), ())


def test_above_the_band_beta_rises_and_says_so() -> None:
    state, said = drive(BetaState(0.1), [0.5] * 5)
    assert len(said) == 1 and names(said[0], "0.5", "0.06", "up", "15%", "0.1000 -> 0.1150")
    assert state.value == pytest.approx(0.115)


def test_small_betas_keep_their_digits() -> None:
    _, (sentence,) = drive(BetaState(0.0002), [0.5] * 5, aim=replace(AIM, bounds=(1e-4, 1.0)))
    assert names(sentence, "0.5", "0.06", "up", "15%", "0.000200 -> 0.000230")


@pytest.mark.parametrize("kl", [0.02, 0.04, 0.06])
def test_inside_the_band_beta_rests(kl: float) -> None:
    state, said = drive(BetaState(0.1), [kl] * 12)
    assert (state.value, state.pinned, said) == (0.1, None, [])
    assert state.window == (kl,) * 5


def test_the_median_decides_so_one_outlier_does_not() -> None:
    assert drive(BetaState(0.1), [0.04, 0.04, 99.0, 99.0, 0.04])[1] == []
    assert drive(BetaState(0.1), [0.04, 99.0, 99.0, 99.0, 0.04])[1] != []


def test_a_move_waits_for_a_full_window_of_fresh_kls() -> None:
    state, said = drive(BetaState(0.1), [0.5] * 4)
    assert (state.value, len(said)) == (0.1, 0)
    state, said = drive(BetaState(0.1), [0.5] * 9)
    assert (state.value, len(said)) == (pytest.approx(0.115), 1)
    state, said = drive(BetaState(0.1), [0.5] * 10)
    assert (state.value, len(said)) == (pytest.approx(0.1 * 1.15**2), 2)


def test_settings_of_the_rule_are_obeyed() -> None:
    quick = replace(AIM, window=1, up=2.0, down=0.5, limit=0.99)
    assert drive(BetaState(0.1), [0.5], aim=replace(quick, up=1.9))[0].value == pytest.approx(0.19)
    assert drive(BetaState(0.1), [0.0], aim=quick)[0].value == 0.05


def test_up_and_down_do_not_cancel() -> None:
    assert drive(BetaState(0.1), [0.5] * 5 + [0.0] * 5)[0].value == pytest.approx(0.1 * 0.9775)


def test_the_ceiling_is_reached_named_once_and_left_again() -> None:
    state, said = drive(BetaState(0.95), [0.5] * 5)
    assert len(said) == 1 and names(said[0], "0.5", "0.06", "up", "5%", "ceiling", "0.9500 -> 1.0000")
    assert (state.value, state.pinned) == (1.0, "ceiling")
    state, said = drive(state, [0.5] * 20)
    assert (state.value, state.pinned, said) == (1.0, "ceiling", [])
    state, _ = drive(state, [0.04] * 5)
    assert (state.value, state.pinned) == (1.0, None)


def test_the_floor_is_reached_named_once_and_left_again() -> None:
    state, said = drive(BetaState(0.0105), [0.0] * 5)
    assert len(said) == 1 and names(said[0], "0", "0.02", "down", "5%", "floor", "0.0105 -> 0.0100")
    state, said = drive(state, [0.0] * 20)
    assert (state.value, state.pinned, said) == (0.01, "floor", [])
    state, said = drive(state, [0.5] * 5)
    assert (state.value, state.pinned, len(said)) == (pytest.approx(0.0115), None, 1)


def test_a_beta_that_starts_at_its_bound_is_reported_as_pinned() -> None:
    state, said = drive(BetaState(0.01), [0.0] * 15)
    assert len(said) == 1 and names(said[0], "0", "0.02", "stays", "floor", "0.0100")
    assert state.pinned == "floor"
    assert drive(state, [0.04] * 2)[0].pinned == "floor"
    assert drive(state, [0.04] * 3)[0].pinned is None  # the median has come back: pinned beta keeps its window


def test_beta_zero_starts_from_the_floor_when_kl_is_too_high() -> None:
    state, said = drive(BetaState(0.0), [0.5] * 5)
    assert len(said) == 1 and names(said[0], "0.5", "0.06", "up", "floor", "0.0000 -> 0.0100")
    assert (state.value, state.pinned) == (0.01, None)
    assert drive(BetaState(0.0), [0.0] * 5)[0].pinned == "floor"


# ---- the other rules, against their formulas


@pytest.mark.parametrize(("kl", "error"), [(0.065, 0.2), (0.07, 0.2), (9.0, 0.2), (0.019, -0.2), (0.0, -0.2)])
def test_proportional_is_the_papers_rule_with_its_clip(kl: float, error: float) -> None:
    after, _ = drive(BetaState(0.1), [kl], "proportional")
    assert after.value == pytest.approx(0.1 * (1 + 0.1 * error), rel=1e-12)


@pytest.mark.parametrize(("kl", "error"), [(0.044, 0.1), (0.037, -0.075)])
def test_proportional_follows_the_error_where_it_is_small(kl: float, error: float) -> None:
    narrow = replace(AIM, band=(0.039, 0.041))
    after, _ = drive(BetaState(0.1), [kl], "proportional", narrow)
    assert after.value == pytest.approx(0.1 * (1 + 0.1 * error), rel=1e-9)


@pytest.mark.parametrize("kl", [0.1, 0.08, 0.01, 0.0])
def test_dual_ascent_moves_by_the_violation(kl: float) -> None:
    after, _ = drive(BetaState(0.1), [kl], "dual_ascent")
    assert after.value == pytest.approx(0.1 + 0.1 * (kl - 0.04), rel=1e-12)


def test_dual_ascent_returns_after_opposite_violations() -> None:
    assert drive(BetaState(0.1), [0.08, 0.0], "dual_ascent")[0].value == pytest.approx(0.1, rel=1e-12)


def test_fixed_never_moves() -> None:
    state = BetaState(0.1)
    assert drive(state, [9.0, 0.0, NAN, None] * 10, "fixed") == (state, [])


# ---- what all have in common

kls = st.lists(st.none() | st.floats(-0.1, 1.0) | st.just(NAN), max_size=40)
betas = st.floats(*BOUNDS)
kl_targets = st.builds(
    KLTarget,
    band=st.just(BAND),
    bounds=st.just(BOUNDS),
    target=st.floats(*BAND),
    gain=st.floats(1e-3, 10),
    limit=st.floats(1e-3, 0.99),
    window=st.integers(1, 5),
)


@every_controller
@given(beta=betas, kls=kls, aim=kl_targets)
def test_beta_stays_within_its_bounds_and_its_limit_and_never_moves_in_silence(
    controller: str, beta: float, kls: list[float | None], aim: KLTarget
) -> None:
    state = BetaState(beta)
    for kl in kls:
        after, sentence = CONTROLLERS[controller](state, kl, aim)
        assert BOUNDS[0] <= after.value <= BOUNDS[1]
        assert abs(after.value - state.value) <= aim.limit * state.value * (1 + 1e-12)
        assert len(after.window) <= aim.window and all(math.isfinite(k) for k in after.window)
        assert sentence or (after.value == state.value and after.pinned in (None, state.pinned))
        state = after


@every_controller
@given(beta=st.just(0.0) | st.floats(1e-6, 10), window=st.lists(st.floats(0, 1), max_size=5), aim=kl_targets)
def test_more_kl_never_means_less_beta(controller: str, beta: float, window: list[float], aim: KLTarget) -> None:
    state = BetaState(beta, tuple(window)[-aim.window :])
    after = [CONTROLLERS[controller](state, kl, aim)[0].value for kl in (0.0, 0.01, 0.02, 0.04, 0.06, 0.07, 0.3, 9.0)]
    assert after == sorted(after)


@every_moving
@pytest.mark.parametrize(("kl", "way"), [(0.0, -1), (0.019, -1), (0.061, 1), (0.5, 1)])
def test_outside_the_band_beta_moves_the_right_way(controller: str, kl: float, way: int) -> None:
    assert (drive(BetaState(0.1), [kl] * 5, controller)[0].value - 0.1) * way > 0


@every_moving
@given(kls=st.lists(st.floats(*BAND), max_size=12), aim=kl_targets)
def test_inside_the_band_nothing_moves_wherever_the_target_is(controller: str, kls: list[float], aim: KLTarget) -> None:
    state, said = drive(BetaState(0.1, pinned="floor"), kls, controller, aim)
    assert (state.value, said) == (0.1, [])
    assert state.pinned is None or len(kls) < aim.window


@every_moving
@pytest.mark.parametrize(("kl", "expected"), [(9.0, 0.101), (0.0, 0.099)])
def test_the_limit_cuts_every_move(controller: str, kl: float, expected: float) -> None:
    tight = replace(AIM, limit=0.01, gain=10.0, window=1)
    assert drive(BetaState(0.1), [kl], controller, tight)[0].value == pytest.approx(expected, rel=1e-12)


@every_moving
@pytest.mark.parametrize("kl", [None, NAN, INF, -INF])
def test_a_kl_that_is_no_number_is_not_seen(controller: str, kl: float | None) -> None:
    state = BetaState(0.1, (0.5,) * 4, pinned="ceiling")
    assert drive(state, [kl] * 10, controller) == (state, [])


@every_moving
@pytest.mark.parametrize(("kl", "bound", "beta"), [(0.5, "ceiling", 1.0), (0.0, "floor", 0.01)])
def test_a_bound_is_named_once_and_again_after_it_was_left(controller: str, kl: float, bound: str, beta: float) -> None:
    quick = replace(AIM, gain=5.0, window=1)
    state, said = drive(BetaState(0.1), [kl] * 40, controller, quick)
    assert (state.value, state.pinned) == (beta, bound)
    assert [sentence for sentence in said if bound in sentence] == said[-1:]
    state, _ = drive(state, [0.5 - kl], controller, quick)
    assert (state.value != beta, state.pinned) == (True, None)
    state, said = drive(state, [kl] * 10, controller, quick)
    assert (state.value, state.pinned) == (beta, bound)
    assert [sentence for sentence in said if bound in sentence] == said[-1:]


@every_moving
def test_from_zero_or_from_below_its_floor_beta_starts_at_the_floor(controller: str) -> None:
    for beta in (0.0, 1e-6):
        assert drive(BetaState(beta), [0.5] * 5, controller)[0].value >= 0.01


@every_moving
def test_a_beta_beyond_its_bounds_by_hand_never_moves_the_wrong_way(controller: str) -> None:
    assert drive(BetaState(0.001), [0.0] * 10, controller)[0].value == 0.001
    assert drive(BetaState(5.0), [0.5] * 10, controller)[0].value == 5.0
    assert 1.0 < drive(BetaState(5.0), [0.0] * 5, controller)[0].value < 5.0, "back, but no faster than the limit"


@pytest.mark.parametrize(
    ("controller", "beta", "kl", "named"),
    [
        ("proportional", 0.1, 0.5, ["0.5", "0.06", "up", "2.0%", "0.1000 -> 0.1020"]),
        ("proportional", 0.1, 0.01, ["0.01", "0.02", "down", "2.0%", "0.1000 -> 0.0980"]),
        ("dual_ascent", 0.1, 0.2, ["0.2", "0.06", "up", "16%", "0.1000 -> 0.1160"]),
        ("dual_ascent", 0.5, 0.0, ["0", "0.02", "down", "0.8%", "0.5000 -> 0.4960"]),
        ("dual_ascent", 0.9, 0.065, ["0.065", "0.06", "up", "0.3%", "0.9000 -> 0.9025"]),
        ("dual_ascent", 0.995, 1.0, ["1", "0.06", "up", "0.5%", "ceiling", "0.9950 -> 1.0000"]),
        ("dual_ascent", 1.0, 1.0, ["1", "0.06", "stays", "ceiling", "1.0000"]),
        ("proportional", 0.01, 0.0, ["0", "0.02", "stays", "floor", "0.0100"]),
    ],
)
def test_each_sentence_reads_well(controller: str, beta: float, kl: float, named: list[str]) -> None:
    (sentence,) = drive(BetaState(beta), [kl], controller)[1]
    assert names(sentence, *named)


def test_a_tiny_move_is_said_without_a_long_number() -> None:
    slow = replace(AIM, gain=1e-4)
    (sentence,) = drive(BetaState(0.1), [0.065], "dual_ascent", slow)[1]
    assert names(sentence, 0.065, 0.06, "up", "0.1%", "0.1000 -> 0.1000")


# ---- in a closed loop

Plant = Callable[[float, float], float]


def lagging(pull: float) -> Plant:
    """KL answers beta late: each step it goes a third of the way to where reward and penalty balance, pull / beta."""
    return lambda kl, beta: kl + (pull / beta - kl) / 3


@every_moving
@pytest.mark.parametrize("start", [0.02, 0.9], ids=["too loose", "too tight"])
@pytest.mark.parametrize("gain", [0.1, 0.5])
def test_a_loop_brings_kl_into_its_band_and_keeps_it_there(controller: str, start: float, gain: float) -> None:
    """The balance is at beta = 0.1 for KL 0.04, the middle of the band."""
    state, plant, kl, aim = BetaState(start), lagging(0.1 * 0.04), 0.1 * 0.04 / start, replace(AIM, gain=gain)
    assert not BAND[0] <= kl <= BAND[1], "it starts outside"
    trace = []
    for _ in range(1000):
        kl = plant(kl, state.value)
        state, _ = CONTROLLERS[controller](state, kl, aim)
        trace.append(kl)
    assert all(BAND[0] <= kl <= BAND[1] for kl in trace[-300:])
    assert BOUNDS[0] < state.value < BOUNDS[1]


def test_without_a_controller_the_same_loop_stays_outside() -> None:
    state, plant, kl = BetaState(0.02), lagging(0.1 * 0.04), 0.0
    for _ in range(1000):
        kl = plant(kl, state.value)
        state, _ = CONTROLLERS["fixed"](state, kl, AIM)
    assert kl == pytest.approx(0.2)


# ---- who holds beta


@every_controller
def test_by_hand_beta_stays_whatever_the_kl(controller: str) -> None:
    held = set_manual(BetaState(0.1, window=(0.5,), pinned="floor"), 0.3)
    assert held == BetaState(0.3, mode="manual")
    assert drive(held, [9.0] * 20, controller) == (held, [])


@pytest.mark.parametrize("by_hand", [0.0, 1e-6, 0.3, 5.0])
def test_given_back_it_goes_on_from_its_own_last_value(by_hand: float) -> None:
    held = through_json(set_manual(set_manual(BetaState(0.1, window=(0.5,) * 4), 0.7), by_hand))
    back = set_auto(held, configured=0.2)
    assert back == BetaState(0.1)
    assert drive(back, [0.5] * 4)[1] == []
    assert drive(back, [0.5] * 5)[0].value == pytest.approx(0.115)


def test_given_back_without_a_value_of_its_own_it_starts_as_configured() -> None:
    """A state that an older version saved while a person held beta."""
    old = BetaState.from_dict({"value": 0.0, "window": [], "mode": "manual", "pinned": None})
    assert set_auto(old, configured=0.2) == BetaState(0.2)
    assert set_auto(BetaState(0.3, window=(0.5,)), configured=0.2) == BetaState(0.3, window=(0.5,))


@every_moving
def test_beta_set_to_0_by_hand_and_given_back_brings_kl_into_its_band(controller: str) -> None:
    state, plant, kl = BetaState(0.1), lagging(0.1 * 0.04), 0.04
    state = set_manual(state, 0.0)
    for _ in range(20):
        kl = plant(kl, max(state.value, 1e-3))
    assert kl > BAND[1]
    state, kls = set_auto(state, 0.1), []
    for _ in range(100):
        kl = plant(kl, state.value)
        state, _ = CONTROLLERS[controller](state, kl, AIM)
        kls.append(kl)
    assert sum(kl > BAND[1] for kl in kls) < 25 and BAND[0] <= kls[-1] <= BAND[1]


@every_moving
@pytest.mark.parametrize(("start", "first"), [(0.08, 0.08), (1e-4, 0.01), (7.0, 1.0)])
def test_a_beta_configured_as_0_starts_where_it_can_hold_the_kl(controller: str, start: float, first: float) -> None:
    assert drive(BetaState(0.0), [0.5] * 5, controller, replace(AIM, start=start, window=5))[0].value >= first
    assert drive(BetaState(0.0), [0.5] * 5, "band", replace(AIM, start=start))[0].value == first
    assert drive(BetaState(0.0), [0.0] * 5, controller, replace(AIM, start=start))[0].value == 0


@pytest.mark.parametrize("value", [-0.1, NAN, INF])
def test_an_impossible_beta_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=pattern(value, 0)):
        set_manual(BetaState(0.1), value)


# ---- through a checkpoint


def through_json(state: BetaState) -> BetaState:
    return BetaState.from_dict(json.loads(json.dumps(state.to_dict())))


@given(
    st.floats(0, 10),
    st.lists(st.floats(0, 1), max_size=5),
    st.sampled_from(["auto", "manual"]),
    st.sampled_from([None, "floor"]),
)
def test_state_survives_json_bit_for_bit(value: float, window: list[float], mode: str, pinned: str | None) -> None:
    state = BetaState(value, tuple(window), mode, pinned)  # type: ignore[arg-type]
    assert through_json(state) == state


@pytest.mark.parametrize(
    "old",
    [
        {"value": 0.07, "window": [0.5, 0.25], "mode": "auto", "pinned": None},
        {"value": 1.0, "window": [], "mode": "auto", "pinned": "ceiling"},
    ],
)
def test_states_of_older_checkpoints_load(old: dict[str, Any]) -> None:
    """As written before there was more than one controller."""
    state = BetaState.from_dict(old)
    assert state == BetaState(old["value"], tuple(old["window"]), old["mode"], old["pinned"])
    assert state.to_dict() == old


@every_controller
@given(beta=betas, kls=kls, cut=st.integers(0, 40), aim=kl_targets)
def test_resuming_decides_as_if_never_stopped(
    controller: str, beta: float, kls: list[float | None], cut: int, aim: KLTarget
) -> None:
    whole, said = drive(BetaState(beta), kls, controller, aim)
    first, before = drive(BetaState(beta), kls[:cut], controller, aim)
    second, after = drive(through_json(first), kls[cut:], controller, aim)
    assert (second, before + after) == (whole, said)


def test_settings_and_table_agree() -> None:
    assert set(get_args(ObjectiveConfig.model_fields["controller"].annotation)) == set(CONTROLLERS)


def test_a_beta_beyond_its_bound_is_told_with_the_bound() -> None:
    aim = KLTarget(band=(0.01, 0.1), bounds=(0.1, 1.0), target=0.055)
    assert names(proportional(BetaState(5.0), 0.5, aim)[1] or "", "0.5", "0.1", "stays", "ceiling", "5.0000", "1.0000")
    assert names(
        proportional(BetaState(0.0), 0.001, aim)[1] or "", "0.001", "0.01", "stays", "floor", "0.0000", "0.1000"
    )
    assert names(proportional(BetaState(1e-5), 0.5, aim)[1] or "", "0.5", "0.1", "up", "floor", "1.00e-05 -> 0.1000")
