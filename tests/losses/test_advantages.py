"""Advantages: TRL's golden numbers, each estimator by hand, what is unscored or cannot be compared, shaping."""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from grpo_nb import losses
from grpo_nb.algorithms import ADVANTAGE_ROWS
from grpo_nb.losses import ADVANTAGES, GroupRewards, Moments

NAN, INF = float("nan"), float("inf")
float64 = torch.float64
NAMES = sorted(ADVANTAGES)
GROUPWISE = sorted(set(ADVANTAGES) - {"reinforce_pp"})
CENTRED = sorted({"group_std", "mean_only", "batch_std", "rloo", "cpgd"})


def advantages(
    *groups: list[float], name: Any = "group_std", clip: float | None = None, lengths: list[list[int]] | None = None
) -> Tensor:
    rewards = torch.tensor(groups, dtype=float64)
    outcomes = GroupRewards(rewards, torch.tensor(lengths) if lengths else torch.ones(rewards.shape, dtype=torch.long))
    return losses.advantages(outcomes, name, clip)[..., 0]


# ---- TRL at f2cd577 (1.10.0.dev0): its reward lines, float32


@pytest.mark.parametrize(
    ("groups", "name", "expected"),
    [
        (
            [[1, 0, 0, 1], [2, 2, 2, 5]],
            "group_std",
            [[0.865875, -0.865875, -0.865875, 0.865875], [-0.499967, -0.499967, -0.499967, 1.4999]],
        ),
        (
            [[1, 0, 0, 1], [2, 2, 2, 5]],
            "batch_std",
            [[0.312874, -0.312874, -0.312874, 0.312874], [-0.46931, -0.46931, -0.46931, 1.40793]],
        ),
        ([[1, 0, 0, 1], [2, 2, 2, 5]], "mean_only", [[0.5, -0.5, -0.5, 0.5], [-0.75, -0.75, -0.75, 2.25]]),
        ([[1, 0]], "group_std", [[0.707007, -0.707007]]),
        ([[NAN, 0, 1, 1]], "group_std", [[0, -1.1545, 0.57725, 0.57725]]),
        ([[NAN, NAN, NAN, 1]], "group_std", [[0, 0, 0, 0]]),
        ([[1, 0, 2, 0]], "group_std", [[0.261089, -0.783268, 1.30545, -0.783268]]),
        (
            [[0.7, 0.3, 1, 0], [0.85, 0.85, 0.15, 0]],
            "group_std",
            [[0.454755, -0.454755, 1.13689, -1.13689], [0.857837, 0.857837, -0.691804, -1.02387]],
        ),
    ],
)
def test_trl_advantages(groups: list[list[float]], name: str, expected: list[list[float]]) -> None:
    got = advantages(*[[float(r) for r in group] for group in groups], name=name)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=float64), rtol=5e-6, atol=5e-7)


def test_trl_advantage_of_a_hair() -> None:
    """In float32, as TRL has it: its rounding of .50001 shows in the third digit. Without the 1e-4, A would be 1.5."""
    outcomes = GroupRewards(torch.tensor([[0.50001, 0.5, 0.5, 0.5]]), torch.ones(1, 4, dtype=torch.long))
    expected = torch.tensor([[0.0715209, -0.0238403, -0.0238403, -0.0238403]])
    torch.testing.assert_close(losses.advantages(outcomes, "group_std")[..., 0], expected, rtol=1e-5, atol=0)


# ---- each estimator by hand


def test_rloo_compares_with_the_others() -> None:
    assert advantages([1.0, 0.0, 5.0], name="rloo").tolist() == [[1 - 2.5, 0 - 3, 5 - 0.5]]
    assert advantages([1.0, NAN, 5.0], name="rloo").tolist() == [[-4, 0, 4]]


def test_opo_weighs_the_baseline_by_length() -> None:
    """(10·1 + 30·0 + 60·2) / 100 = 1.3."""
    got = advantages([1.0, 0.0, 2.0], name="opo", lengths=[[10, 30, 60]])
    assert got.tolist()[0] == pytest.approx([-0.3, -1.3, 0.7])
    hole = advantages([1.0, NAN, 2.0], name="opo", lengths=[[10, 30, 60]])
    assert hole.tolist()[0] == pytest.approx([1 - 130 / 70, 0, 2 - 130 / 70])


def test_cpgd_lifts_the_groups_that_can_be_compared() -> None:
    """Two of three groups are dead: omega = min(3 / 1, 3) = 3; of four, three are: it stops at 3."""
    dead = [0.5, 0.5]
    assert advantages([1.0, 0.0], dead, dead, name="cpgd").tolist() == [[1.5, -1.5], [0, 0], [0, 0]]
    assert advantages([1.0, 0.0], dead, dead, dead, name="cpgd")[0].tolist() == [1.5, -1.5]
    assert advantages([1.0, 0.0], [3.0, 1.0], name="cpgd").tolist() == [[0.5, -0.5], [1, -1]]


def test_reinforce_pp_whitens_over_all_tokens_of_the_batch() -> None:
    """Rewards 1 (3 tokens) and 0 (1 token): mean 3/4, variance 3/16."""
    got = advantages([1.0, 0.0], name="reinforce_pp", lengths=[[3, 1]])
    assert got.tolist()[0] == pytest.approx([0.25 / (3 / 16) ** 0.5, -0.75 / (3 / 16) ** 0.5], rel=1e-6)


def test_reinforce_pp_learns_from_a_group_of_equal_rewards() -> None:
    got = advantages([1.0, 1.0], [0.0, 0.0], name="reinforce_pp")
    assert got.flatten().tolist() == pytest.approx([1, 1, -1, -1])


def test_reinforce_pp_takes_the_kl_out_of_the_reward_token_by_token() -> None:
    """Returns count what lies ahead: R − (p₀+p₁), R − p₁ for the first answer; padding is no token."""
    penalty = torch.tensor([[[0.1, 0.2], [0.4, 99.0]]], dtype=float64)
    outcomes = GroupRewards(torch.tensor([[1.0, 0.5]], dtype=float64), torch.tensor([[2, 1]]), penalty)
    returns = torch.tensor([1 - 0.3, 1 - 0.2, 0.5 - 0.4 - 99.0], dtype=float64)
    assert outcomes.returns()[0].flatten()[:3].tolist() == pytest.approx(returns.tolist())
    penalty[0, 1, 1] = 0
    got = losses.advantages(outcomes, "reinforce_pp")
    returns = torch.tensor([0.7, 0.8, 0.1], dtype=float64)
    expected = (returns - returns.mean()) / (returns.var(correction=0) + 1e-8).sqrt()
    assert got[0, 0].tolist() + got[0, 1, :1].tolist() == pytest.approx(expected.tolist())
    assert got[0, 1, 1] == 0


@pytest.mark.parametrize("name", GROUPWISE)
def test_the_others_take_the_kl_out_of_the_whole_reward(name: Any) -> None:
    penalty = torch.tensor([[[0.1, 0.2], [0.4, 0.0]]], dtype=float64)
    rewards, lengths = torch.tensor([[1.0, 0.5]], dtype=float64), torch.tensor([[2, 1]])
    with_penalty = losses.advantages(GroupRewards(rewards, lengths, penalty), name)
    by_hand = losses.advantages(GroupRewards(torch.tensor([[0.7, 0.1]], dtype=float64), lengths), name)
    torch.testing.assert_close(with_penalty, by_hand)
    assert with_penalty.shape == (1, 2, 1)


def test_the_baseline_form_whitens_what_is_centred_and_leaves_dead_groups_out() -> None:
    got = advantages([2.0, 0.0], [5.0, 5.0], name="reinforce_pp_baseline", lengths=[[1, 3], [50, 50]])
    assert got[1].tolist() == [0, 0]
    mean, variance = (1 - 3) / 4, 1 - 0.25
    assert got[0].tolist() == pytest.approx([(1 - mean) / variance**0.5, (-1 - mean) / variance**0.5], rel=1e-6)


# ---- what is unscored, what cannot be compared


@pytest.mark.parametrize("name", GROUPWISE)
@pytest.mark.parametrize(
    "group", [[NAN] * 4, [NAN, NAN, 3.0, NAN], [0.1] * 4, [0.3, NAN, 0.3, 0.3], [1.0, 1 + 1e-12, 1.0, 1.0]]
)
def test_a_group_with_nothing_to_compare_gives_exactly_zero(group: list[float], name: str) -> None:
    assert advantages(group, [0.0, 1.0, 2.0, 3.0], name=name)[0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("group", [[0.1] * 4, [0.3, NAN, 0.3, 0.3]])
def test_a_batch_with_nothing_to_compare_gives_exactly_zero(group: list[float]) -> None:
    assert advantages(group, group, name="reinforce_pp").tolist() == [[0] * 4] * 2


@pytest.mark.parametrize("name", GROUPWISE)
def test_an_unscored_answer_leaves_the_others_alone(name: str) -> None:
    with_hole = advantages([1.0, NAN, 0.0, 4.0], name=name, lengths=[[3, 900, 5, 7]])
    without = advantages([1.0, 0.0, 4.0], name=name, lengths=[[3, 5, 7]])
    assert with_hole[0, [0, 2, 3]].tolist() == pytest.approx(without[0].tolist())
    assert with_hole[0, 1] == 0


@pytest.mark.parametrize("name", NAMES)
def test_an_unscored_group_leaves_the_batch_alone(name: str) -> None:
    got = advantages([1.0, 0.0, 4.0], [NAN] * 3, [3.0, 1.0, 1.0], name=name)
    alone = advantages([1.0, 0.0, 4.0], [3.0, 1.0, 1.0], name=name)
    factor = 1.5 if name == "cpgd" else 1.0  # two of three groups stand in for all three
    torch.testing.assert_close(got[[0, 2]], alone * factor)
    assert not got[1].any()


@pytest.mark.parametrize("bad", [INF, -INF])
@pytest.mark.parametrize("name", NAMES)
def test_an_infinite_reward_is_refused(bad: float, name: str) -> None:
    with pytest.raises(ValueError, match=r"\binf\b"):
        advantages([bad, 0.0, 1.0, 1.0], name=name)


def test_a_batch_without_any_verdict_is_refused() -> None:
    with pytest.raises(ValueError, match="scored"):
        advantages([NAN] * 4, [NAN] * 4)


def test_advantages_are_cut_on_both_sides() -> None:
    assert advantages([0.0, 0.0, 9.0], name="mean_only", clip=2.0).tolist() == [[-2, -2, 2]]
    assert advantages([9.0, 9.0, 0.0], name="mean_only", clip=2.0).tolist() == [[2, 2, -2]]


def test_group_std_knows_what_it_cannot_know() -> None:
    got = losses.group_std(torch.tensor([[1, 2, 3, NAN], [1, NAN, NAN, NAN], [NAN] * 4, [2.0] * 4]))
    torch.testing.assert_close(got, torch.tensor([1.0, NAN, NAN, 0.0]), equal_nan=True)


rewards = st.floats(-10, 10, allow_nan=False) | st.just(NAN)
groups_of_four = st.lists(st.lists(rewards, min_size=4, max_size=4), min_size=1, max_size=4).filter(
    lambda groups: not torch.tensor(groups).isnan().all()
)


@given(groups_of_four, st.sampled_from(CENTRED))
def test_centred_advantages_of_a_group_sum_to_zero(groups: list[list[float]], name: str) -> None:
    got = advantages(*groups, name=name)
    assert got.isfinite().all()
    assert got.sum(-1).abs().max() < 1e-8
    assert not got[torch.tensor(groups).isnan()].any()


@given(groups_of_four, st.lists(st.integers(1, 50), min_size=4, max_size=4))
def test_opo_sums_to_zero_over_tokens(groups: list[list[float]], lengths: list[int]) -> None:
    got = advantages(*groups, name="opo", lengths=[lengths] * len(groups))
    assert (got * torch.tensor(lengths)).sum(-1).abs().max() < 1e-8


@given(groups_of_four, st.permutations(range(4)), st.sampled_from(NAMES))
def test_order_within_a_group_means_nothing(groups: list[list[float]], order: list[int], name: str) -> None:
    shuffled = [[group[k] for k in order] for group in groups]
    torch.testing.assert_close(advantages(*shuffled, name=name), advantages(*groups, name=name)[:, order])


@given(groups_of_four, st.sampled_from(NAMES))
def test_order_of_the_groups_means_nothing(groups: list[list[float]], name: str) -> None:
    torch.testing.assert_close(advantages(*groups[::-1], name=name), advantages(*groups, name=name).flip(0))


@given(groups_of_four, st.floats(-100, 100), st.sampled_from(["mean_only", "rloo", "cpgd"]))
def test_a_bonus_for_everyone_changes_nothing(groups: list[list[float]], bonus: float, name: str) -> None:
    lifted = [[r + bonus for r in group] for group in groups]
    torch.testing.assert_close(advantages(*lifted, name=name), advantages(*groups, name=name), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_scale_free_says_so(name: str) -> None:
    """Rewards ten times as large: the same advantages but for the eps, or ten times them."""
    once, tenfold = advantages([1.0, 2.0, 4.0], name=name), advantages([10.0, 20.0, 40.0], name=name)
    torch.testing.assert_close(tenfold, once if ADVANTAGE_ROWS[name].scale_free else 10 * once, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, float64])
@pytest.mark.parametrize("name", NAMES)
def test_types_are_kept(name: Any, dtype: torch.dtype) -> None:
    outcomes = GroupRewards(torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([[3, 4]]))
    assert losses.advantages(outcomes, name).dtype == dtype


# ---- shaping


def test_the_overlong_penalty_rises_over_its_buffer() -> None:
    lengths = torch.tensor([[0, 80, 90, 95, 100]])
    assert losses.overlong_penalty(lengths, 100, 20, 2.0).tolist() == [[0, 0, -1, -1.5, -2]]
    assert losses.overlong_penalty(lengths, 100, 0, 2.0).tolist() == [[0] * 5]


def test_stop_properly_never_makes_a_truncated_answer_better() -> None:
    rewards, truncated = torch.tensor([[1.0, 1.0, -1.0, NAN]]), torch.tensor([[True, False, True, True]])
    assert losses.stop_properly(rewards, truncated, 0.25)[0, :3].tolist() == [0.25, 1, -1]
    assert losses.stop_properly(rewards, truncated, -0.5)[0, :3].tolist() == [-0.5, 1, -1]
    assert losses.stop_properly(rewards, truncated, 0.25)[0, 3].isnan()


values = st.lists(st.floats(-5, 5), min_size=2, max_size=20)


@given(values, values)
def test_running_moments_are_those_of_all_rewards_seen(first: list[float], then: list[float]) -> None:
    seen = torch.tensor(first + then, dtype=float64)
    moments = Moments.from_dict(Moments().update(first).to_dict()).update(then)
    assert (moments.count, moments.mean) == (len(seen), pytest.approx(float(seen.mean()), abs=1e-9))
    assert moments.std == pytest.approx(float(seen.std()), abs=1e-9)


def test_normalising_centres_and_scales() -> None:
    moments = Moments().update([1.0, 3.0])
    assert moments.normalise(torch.tensor([[2.0, 2.0 + 2**0.5]])).tolist() == [pytest.approx([0, 1])]
    assert Moments().update([2.0]).normalise(torch.tensor([[5.0]])).tolist() == [[3]]


def test_rounding_is_no_spread_to_normalise_by() -> None:
    alike = [1000.1, 1000.1 + 1e-10, 1000.1 - 1e-10]
    assert Moments().update(alike).normalise(torch.tensor([alike], dtype=float64)).abs().max() < 1e-9


# ---- equal rewards


@given(st.sampled_from(NAMES), st.floats(-(2.0**100), 2.0**100), st.integers(2, 9), st.integers(1, 4))
@example("mean_only", 1000.1, 8, 1)
@example("group_std", 1e12 / 7, 7, 2)
@example("opo", 1e12 / 7, 7, 2)
@example("reinforce_pp", 1e12 / 7, 7, 2)
def test_equal_rewards_give_exactly_0_in_any_precision(name: Any, reward: float, group: int, prompts: int) -> None:
    """Their mean is another float than they are: eight times 1000.1 in float32 have 1000.0999."""
    for dtype in (torch.float32, float64):
        rewards = torch.full((prompts, group), reward, dtype=dtype)
        outcomes = GroupRewards(rewards, torch.arange(1, prompts * group + 1).view(prompts, group))
        assert losses.advantages(outcomes, name).eq(0).all()
        assert not losses.has_signal(rewards).any()


@given(st.sampled_from(GROUPWISE), st.floats(-1e6, 1e6, width=32))
def test_rewards_that_differ_by_rounding_are_equal(name: Any, reward: float) -> None:
    """A sum of weighted parts has other last bits in another order; that is no reason to prefer an answer."""
    rewards = torch.tensor([[reward, reward * (1 + 2e-16), reward * (1 - 2e-16), reward]], dtype=float64)
    assert losses.advantages(GroupRewards(rewards, torch.ones(1, 4, dtype=torch.long)), name).eq(0).all()


@pytest.mark.parametrize("group", [[1e4, 1e4 + 1], [1e7, 1e7 + 1], [1e-6, 2e-6]])
def test_a_spread_is_seen_however_large_or_small_the_rewards(group: list[float]) -> None:
    half = (group[1] - group[0]) / 2
    assert advantages(group, name="mean_only").tolist() == [pytest.approx([-half, half])]


def test_a_penalty_in_float32_has_the_rounding_of_float32() -> None:
    """Equal rewards, and a KL that is 0 but for the last bits of its log-probs: nothing to compare."""
    penalty = torch.full((1, 2, 3), 1e-8)
    penalty[0, 1] *= -1
    outcomes = GroupRewards(torch.ones(1, 2, dtype=float64), torch.tensor([[3, 3]]), penalty)
    assert losses.advantages(outcomes, "group_std").tolist() == [[[0], [0]]]


@pytest.mark.parametrize("name", NAMES)
def test_float32_rewards_are_compared_without_further_rounding(name: Any) -> None:
    rewards = torch.tensor(
        [[1000.1, 1000.1, 1000.3, 1000.2, 1000.1, 1000.1, 1000.1], [7.7, 1e6, 0.1, 3.0, 7.7, 2.0, 1.0]]
    )
    lengths = torch.arange(1, 15).view(2, 7)
    narrow, wide = (losses.advantages(GroupRewards(r, lengths), name) for r in (rewards, rewards.double()))
    assert narrow.dtype == torch.float32 and torch.equal(narrow, wide.float())


# ---- rewards that a float32 function means to be equal


def noisy(scale: float, offset: float, seed: int, shape: tuple[int, int] = (3, 8)) -> Tensor:
    """Equal rewards but for float32's last bits, as float64."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.full(shape, scale * (offset + 0.1), dtype=float64)
    return exact * (1 + 1.2e-7 * torch.randn(shape, generator=generator, dtype=float64))


scales = st.sampled_from([10.0**power for power in range(-6, 7)])
offsets = st.sampled_from([0.0, 1.0, -3.0, 1e3])


@given(st.sampled_from(NAMES), scales, offsets, st.integers(0, 50))
def test_float32_noise_is_no_advantage_at_any_scale(name: Any, scale: float, offset: float, seed: int) -> None:
    rewards = noisy(scale, offset, seed)
    lengths = torch.ones(rewards.shape, dtype=torch.long)
    assert losses.advantages(GroupRewards(rewards, lengths), name).eq(0).all()


@given(st.sampled_from(NAMES), scales, offsets, st.integers(0, 50))
def test_a_true_spread_is_seen_at_any_scale(name: Any, scale: float, offset: float, seed: int) -> None:
    rewards = noisy(scale, offset, seed)
    rewards[:, 0] *= 1.0001
    got = losses.advantages(GroupRewards(rewards, torch.ones(rewards.shape, dtype=torch.long)), name)[..., 0]
    assert (got[:, 0] * rewards[:, 0].sign() > 0).all()


@given(st.sampled_from(NAMES), scales, offsets, st.integers(0, 50))
def test_normalising_does_not_blow_noise_up(name: Any, scale: float, offset: float, seed: int) -> None:
    """What is normalised first: nothing else was seen, so that the noise is all the spread there is."""
    rewards = noisy(scale, offset, seed)
    moments = Moments().update(rewards.flatten().tolist())
    normalised, size = moments.normalise(rewards), moments.rescale(rewards.abs())
    assert normalised.abs().max() <= 1e-6 * scale * (1 + abs(offset))
    outcomes = GroupRewards(normalised, torch.ones(rewards.shape, dtype=torch.long), scale=size)
    assert losses.advantages(outcomes, name).eq(0).all()


@given(st.sampled_from(NAMES), scales)
def test_parts_that_cancel_leave_the_rounding_of_the_parts(name: Any, scale: float) -> None:
    rewards = noisy(scale, 1.0, 0) - noisy(scale, 1.0, 1)
    outcomes = GroupRewards(rewards, torch.ones(rewards.shape, dtype=torch.long), scale=torch.full((3, 8), 2.2 * scale))
    assert losses.advantages(outcomes, name).eq(0).all()


def test_noise_among_rewards_that_differ_is_not_normalised_up() -> None:
    moments = Moments().update([0.0, 1.0, 0.1, 0.1 + 1e-8])
    group = torch.tensor([[0.1, 0.1 + 1e-8]], dtype=float64)
    outcomes = GroupRewards(moments.normalise(group), torch.ones(1, 2, dtype=torch.long), scale=moments.rescale(group))
    assert losses.advantages(outcomes, "group_std").eq(0).all()


def test_moments_of_older_checkpoints_are_read() -> None:
    assert Moments.from_dict({"count": 2, "mean": 2.0, "squares": 2.0}).spread == pytest.approx(2**0.5)
