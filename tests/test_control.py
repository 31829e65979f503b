"""The band rule: when beta moves, by how much, where it stops, what it says."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.control import BetaState, band_rule, set_auto, set_manual

BAND, BOUNDS = (0.02, 0.06), (0.01, 1.0)
NAN, INF = float("nan"), float("inf")


def drive(
    state: BetaState, kls: list[float | None], *, band: tuple[float, float] | None = BAND, name: str = "fairness"
) -> tuple[BetaState, list[str]]:
    """The state after these KLs, and everything it said."""
    said: list[str] = []
    for kl in kls:
        state, sentence = band_rule(state, kl, band, BOUNDS, name=name)
        said += [sentence] if sentence else []
    return state, said


def test_below_the_band_beta_falls_and_says_so() -> None:
    state, said = drive(BetaState(0.1), [0.018] * 5)
    assert said == ["fairness: KL 0.018 below 0.02, beta down 15%: 0.1000 -> 0.0850"]
    assert (state.value, state.window) == (pytest.approx(0.085), ())


def test_above_the_band_beta_rises_and_says_so() -> None:
    state, said = drive(BetaState(0.1), [0.5] * 5)
    assert said == ["fairness: KL 0.5 above 0.06, beta up 15%: 0.1000 -> 0.1150"]
    assert state.value == pytest.approx(0.115)


def test_without_a_name_the_sentence_stands_alone() -> None:
    assert drive(BetaState(0.1), [0.5] * 5, name="")[1] == ["KL 0.5 above 0.06, beta up 15%: 0.1000 -> 0.1150"]


def test_small_betas_keep_their_digits() -> None:
    _, sentence = band_rule(BetaState(0.0002, (0.5,) * 4), 0.5, BAND, (1e-4, 1.0))
    assert sentence == "KL 0.5 above 0.06, beta up 15%: 0.000200 -> 0.000230"


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
    state, _ = band_rule(BetaState(0.1), 0.5, BAND, BOUNDS, window=1, up=2.0)
    assert state.value == pytest.approx(0.2)
    state, _ = band_rule(BetaState(0.1), 0.0, BAND, BOUNDS, window=1, down=0.5)
    assert state.value == pytest.approx(0.05)


@pytest.mark.parametrize("kl", [None, NAN, INF, -INF])
def test_a_kl_that_is_none_or_not_finite_changes_nothing(kl: float | None) -> None:
    state = BetaState(0.1, window=(0.5,) * 4)
    assert band_rule(state, kl, BAND, BOUNDS) == (state, None)


def test_no_band_changes_nothing() -> None:
    assert drive(BetaState(0.1), [9.0] * 10, band=None) == (BetaState(0.1), [])


# ---- bounds


def test_the_ceiling_is_reached_named_once_and_left_again() -> None:
    state, said = drive(BetaState(0.95), [0.5] * 5)
    assert said == ["fairness: KL 0.5 above 0.06, beta up 5% to its ceiling: 0.9500 -> 1.0000"]
    assert (state.value, state.pinned) == (1.0, "ceiling")
    state, said = drive(state, [0.5] * 20)
    assert (state.value, state.pinned, said) == (1.0, "ceiling", [])
    state, _ = drive(state, [0.04] * 5)
    assert (state.value, state.pinned) == (1.0, None)


def test_the_floor_is_reached_named_once_and_left_again() -> None:
    state, said = drive(BetaState(0.0105), [0.0] * 5)
    assert said == ["fairness: KL 0 below 0.02, beta down 5% to its floor: 0.0105 -> 0.0100"]
    state, said = drive(state, [0.0] * 20)
    assert (state.value, state.pinned, said) == (0.01, "floor", [])
    state, said = drive(state, [0.5] * 5)
    assert (state.value, state.pinned, len(said)) == (pytest.approx(0.0115), None, 1)


def test_a_beta_that_starts_at_its_bound_is_reported_as_pinned() -> None:
    state, said = drive(BetaState(0.01), [0.0] * 15)
    assert said == ["fairness: KL 0 below 0.02, beta stays at its floor: 0.0100"]
    assert state.pinned == "floor"
    assert drive(state, [0.04] * 2)[0].pinned == "floor"
    assert drive(state, [0.04] * 3)[0].pinned is None  # the median has come back: pinned beta keeps its window


def test_a_beta_outside_its_bounds_never_moves_the_wrong_way() -> None:
    """A person may set it there: KL too low must not raise it, KL too high must not lower it."""
    assert drive(BetaState(0.001), [0.0] * 10)[0].value == 0.001
    assert drive(BetaState(5.0), [0.5] * 10)[0].value == 5.0


def test_beta_zero_starts_from_the_floor_when_kl_is_too_high() -> None:
    state, said = drive(BetaState(0.0), [0.5] * 5)
    assert said == ["fairness: KL 0.5 above 0.06, beta up: 0.0000 -> 0.0100"]
    assert (state.value, state.pinned) == (0.01, None)
    assert drive(BetaState(0.0), [0.0] * 5)[0].pinned == "floor"


kls = st.lists(st.none() | st.floats(-0.1, 1.0) | st.just(NAN), max_size=60)


@given(st.floats(*BOUNDS), kls)
def test_beta_stays_within_its_bounds_and_moves_one_notch_at_a_time(beta: float, kls: list[float | None]) -> None:
    state = BetaState(beta)
    for kl in kls:
        after, sentence = band_rule(state, kl, BAND, BOUNDS)
        assert BOUNDS[0] <= after.value <= BOUNDS[1]
        assert 0.85 * (1 - 1e-12) <= after.value / state.value <= 1.15 * (1 + 1e-12)
        assert len(after.window) <= 5 and all(math.isfinite(k) for k in after.window)
        assert sentence or after.value == state.value
        state = after


# ---- who holds beta


def test_by_hand_beta_stays_whatever_the_kl() -> None:
    held = set_manual(BetaState(0.1, window=(0.5,), pinned="floor"), 0.3)
    assert held == BetaState(0.3, mode="manual")
    assert drive(held, [9.0] * 20) == (held, [])


def test_given_back_it_goes_on_from_the_value_it_has() -> None:
    back = set_auto(set_manual(BetaState(0.1, window=(0.5,) * 4), 0.3))
    assert back == BetaState(0.3)
    assert drive(back, [0.5] * 4)[1] == []
    assert drive(back, [0.5] * 5)[0].value == pytest.approx(0.345)


@pytest.mark.parametrize("value", [-0.1, NAN, INF])
def test_an_impossible_beta_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"needs a finite number, 0 or more"):
        set_manual(BetaState(0.1), value)


# ---- through a checkpoint


@given(
    st.floats(0, 10),
    st.lists(st.floats(0, 1), max_size=5),
    st.sampled_from(["auto", "manual"]),
    st.sampled_from([None, "floor"]),
)
def test_state_survives_json_bit_for_bit(value: float, window: list[float], mode: str, pinned: str | None) -> None:
    state = BetaState(value, tuple(window), mode, pinned)  # type: ignore[arg-type]
    assert BetaState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


def test_resuming_in_mid_window_decides_as_if_never_stopped() -> None:
    sequence: list[float | None] = [0.5, 0.01, 0.5, 0.5, 0.03, 0.5, 0.5, None, 0.5, 0.5, 0.5]
    whole, said = drive(BetaState(0.1), sequence)
    first, before = drive(BetaState(0.1), sequence[:7])
    second, after = drive(BetaState.from_dict(json.loads(json.dumps(first.to_dict()))), sequence[7:])
    assert (second, before + after) == (whole, said)
    assert len(said) == 2
