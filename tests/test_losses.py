"""The loss mathematics: TRL's golden numbers, then properties, then equivalences.

Golden numbers come from TRL at commit f2cd577 (1.10.0.dev0): advantages from its reward lines in float32, losses
from its `_compute_loss` in float64 with stubbed log-probs. Inputs and values only; no code is shared.
"""

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_nb import losses
from grpo_nb.config import AlgorithmConfig
from grpo_nb.losses import ALGORITHMS, KL, Counts

NAN, INF = float("nan"), float("inf")
float64 = torch.float64
ESTIMATORS = sorted(KL)


# ---- TRL's case: 4 rows, 5 columns, row i from 0, column t from 0

ROW, COLUMN = torch.arange(4, dtype=float64)[:, None], torch.arange(5, dtype=float64)[None, :]
LOGP = -0.5 - 0.1 * ROW - 0.07 * COLUMN
OLD = LOGP - 0.3 * torch.cos(5 * ROW + COLUMN)
REF = LOGP + 0.2 * torch.sin(2 * ROW + COLUMN)
ADVANTAGE = torch.tensor([1, -1, 0.5, -0.25], dtype=float64)
MASK = torch.tensor([5, 3, 2, 4])[:, None] > COLUMN
COUNTS = Counts(sequences=4, tokens=14, max_completion=8)


def loss_and_gradient(
    name: str,
    *,
    old: Tensor = OLD,
    beta: float = 0.0,
    high: float = 0.2,
    mask: Tensor = MASK,
    counts: Counts = COUNTS,
    rows: slice = slice(None),
) -> tuple[float, Tensor]:
    logp = LOGP[rows].clone().requires_grad_()
    per_token = losses.ppo_clip(logp, old[rows], ADVANTAGE[rows], 0.2, high, 20.0, mask[rows])
    per_token = per_token + beta * losses.kl_k3(logp, REF[rows], 20.0, mask[rows])
    loss = losses.reduce(name, per_token, mask[rows], counts)
    loss.backward()
    assert logp.grad is not None
    return loss.item(), logp.grad


@pytest.mark.parametrize(
    ("name", "beta", "loss", "norm"),
    [
        ("grpo", 0.0, 0.012451527, 0.216393045),
        ("grpo", 0.04, 0.012863864, 0.215969455),
        ("dapo", 0.0, -0.078684076, 0.207928356),
        ("dapo", 0.04, -0.078295751, 0.207933539),
        ("dr_grpo", 0.0, -0.034424283, 0.090968656),
        ("dr_grpo", 0.04, -0.034254391, 0.090970923),
    ],
)
def test_trl_loss_and_gradient(name: str, beta: float, loss: float, norm: float) -> None:
    value, gradient = loss_and_gradient(name, beta=beta)
    assert value == pytest.approx(loss, abs=1e-9)
    assert gradient.norm().item() == pytest.approx(norm, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "loss", "norm"), [("dapo", -0.142857143, 0.211288564), ("grpo", -0.0625, 0.205237413)]
)
def test_trl_on_policy(name: str, loss: float, norm: float) -> None:
    value, gradient = loss_and_gradient(name, old=LOGP)
    assert value == pytest.approx(loss, abs=1e-9)
    assert gradient.norm().item() == pytest.approx(norm, abs=1e-9)


def test_trl_clip_higher() -> None:
    assert loss_and_gradient("dapo", high=0.28)[0] == pytest.approx(-0.084398362, abs=1e-9)


@pytest.mark.parametrize(("name", "loss"), [("dapo", -0.434365148), ("grpo", -0.293918437), ("dr_grpo", -0.149313019)])
def test_trl_truncated_row_left_out(name: str, loss: float) -> None:
    """TRL masks the row out of numerator and token count, and goes on counting it as a sequence."""
    mask = MASK & (ROW != 1)
    counts = dataclasses.replace(COUNTS, tokens=int(mask.sum()))
    assert loss_and_gradient(name, mask=mask, counts=counts)[0] == pytest.approx(loss, abs=1e-9)


def test_trl_token_count_of_the_whole_step() -> None:
    doubled = dataclasses.replace(COUNTS, tokens=28)
    assert loss_and_gradient("dapo", counts=doubled)[0] == pytest.approx(-0.039342038, abs=1e-9)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_everything_masked_is_exactly_zero(name: str) -> None:
    value, gradient = loss_and_gradient(name, mask=MASK & False, counts=Counts(0, 0, 8), beta=0.04)
    assert value == 0
    assert not gradient.any()


def test_trl_reported_shares() -> None:
    low, high = losses.clip_fractions(LOGP, OLD, ADVANTAGE, MASK, 0.2, 0.2)
    assert low.item() == pytest.approx(0.142857, abs=1e-6)
    assert high.item() == pytest.approx(0.071429, abs=1e-6)
    assert losses.masked_mean(losses.kl_k3(LOGP, REF, 20.0), MASK).item() == pytest.approx(0.009708125, abs=1e-9)


# ---- advantages


def advantages(*groups: list[float], scale: Any = "group", clip: float | None = None) -> Tensor:
    return losses.group_advantages(torch.tensor(groups, dtype=float64), scale=scale, clip=clip)


@pytest.mark.parametrize(
    ("groups", "scale", "expected"),
    [
        (
            [[1, 0, 0, 1], [2, 2, 2, 5]],
            "group",
            [[0.865875, -0.865875, -0.865875, 0.865875], [-0.499967, -0.499967, -0.499967, 1.4999]],
        ),
        ([[1, 0, 0, 1], [2, 2, 2, 5]], "none", [[0.5, -0.5, -0.5, 0.5], [-0.75, -0.75, -0.75, 2.25]]),
        ([[1, 0]], "group", [[0.707007, -0.707007]]),
        ([[NAN, 0, 1, 1]], "group", [[0, -1.1545, 0.57725, 0.57725]]),
        ([[NAN, NAN, NAN, 1]], "group", [[0, 0, 0, 0]]),
        ([[1, 0, 2, 0]], "group", [[0.261089, -0.783268, 1.30545, -0.783268]]),
        (
            [[0.7, 0.3, 1, 0], [0.85, 0.85, 0.15, 0]],
            "group",
            [[0.454755, -0.454755, 1.13689, -1.13689], [0.857837, 0.857837, -0.691804, -1.02387]],
        ),
    ],
)
def test_trl_advantages(groups: list[list[float]], scale: str, expected: list[list[float]]) -> None:
    got = advantages(*[[float(r) for r in group] for group in groups], scale=scale)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=float64), rtol=5e-6, atol=5e-7)


def test_trl_advantage_of_a_hair() -> None:
    """In float32, as TRL has it: its rounding of .50001 shows in the third digit. Without the 1e-4, A would be 1.5."""
    got = losses.group_advantages(torch.tensor([[0.50001, 0.5, 0.5, 0.5]]), scale="group")
    torch.testing.assert_close(got, torch.tensor([[0.0715209, -0.0238403, -0.0238403, -0.0238403]]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize(
    "group", [[NAN] * 4, [NAN, NAN, 3.0, NAN], [0.1] * 4, [0.3, NAN, 0.3, 0.3], [1.0, 1 + 1e-7, 1.0, 1.0]]
)
def test_a_group_with_nothing_to_compare_gives_exactly_zero(group: list[float], scale: str) -> None:
    assert advantages(group, scale=scale).tolist() == [[0, 0, 0, 0]]


def test_an_unscored_answer_leaves_the_others_alone() -> None:
    with_hole, without = advantages([1.0, NAN, 0.0, 4.0], [1.0, 2.0, 3.0, 5.0]), advantages([1.0, 0.0, 4.0])
    assert with_hole[0, [0, 2, 3]].tolist() == pytest.approx(without[0].tolist())
    assert with_hole[0, 1] == 0
    assert torch.equal(with_hole[1:], advantages([1.0, 2.0, 3.0, 5.0]))


@pytest.mark.parametrize("bad", [INF, -INF])
@pytest.mark.parametrize("scale", ["group", "none"])
def test_an_infinite_reward_is_refused(bad: float, scale: str) -> None:
    with pytest.raises(ValueError, match="rewards hold inf; needs finite numbers"):
        advantages([bad, 0.0, 1.0, 1.0], scale=scale)


def test_advantages_are_cut_on_both_sides() -> None:
    assert advantages([0.0, 0.0, 9.0], scale="none", clip=2.0).tolist() == [[-2, -2, 2]]
    assert advantages([9.0, 9.0, 0.0], scale="none", clip=2.0).tolist() == [[2, 2, -2]]


def test_group_std_knows_what_it_cannot_know() -> None:
    got = losses.group_std(torch.tensor([[1, 2, 3, NAN], [1, NAN, NAN, NAN], [NAN] * 4, [2.0] * 4]))
    torch.testing.assert_close(got, torch.tensor([1.0, NAN, NAN, 0.0]), equal_nan=True)


rewards = st.floats(-10, 10, allow_nan=False) | st.just(NAN)
groups_of_four = st.lists(st.lists(rewards, min_size=4, max_size=4), min_size=1, max_size=4)


@given(groups_of_four, st.sampled_from(["group", "none"]))
def test_advantages_of_a_group_sum_to_zero(groups: list[list[float]], scale: str) -> None:
    got = advantages(*groups, scale=scale)
    assert got.isfinite().all()
    assert got.sum(-1).abs().max() < 1e-9
    assert not got[torch.tensor(groups).isnan()].any()


@given(groups_of_four, st.permutations(range(4)), st.sampled_from(["group", "none"]))
def test_order_within_a_group_means_nothing(groups: list[list[float]], order: list[int], scale: str) -> None:
    shuffled = [[group[k] for k in order] for group in groups]
    torch.testing.assert_close(advantages(*shuffled, scale=scale), advantages(*groups, scale=scale)[:, order])


@given(groups_of_four, st.floats(-100, 100))
def test_a_bonus_for_everyone_changes_nothing(groups: list[list[float]], bonus: float) -> None:
    lifted = [[r + bonus for r in group] for group in groups]
    torch.testing.assert_close(advantages(*lifted, scale="none"), advantages(*groups, scale="none"), atol=1e-5, rtol=0)


# ---- the surrogate


def surrogate(log_ratio: float, advantage: float, low: float = 0.2, high: float = 0.28) -> tuple[float, float]:
    """(loss, d loss / d logp) of one token."""
    logp = torch.tensor([[log_ratio]], dtype=float64, requires_grad=True)
    A = torch.tensor([advantage], dtype=float64)
    loss = losses.ppo_clip(logp, torch.zeros(1, 1, dtype=float64), A, low, high, 20.0)
    loss.sum().backward()
    assert logp.grad is not None
    return loss.item(), logp.grad.item()


@given(st.floats(0.01, 10).filter(lambda r: min(abs(r - 0.8), abs(r - 1.28)) > 1e-6), st.floats(0.1, 3))
def test_ppo_clips_two_sides_of_four(ratio: float, size: float) -> None:
    """A > 0: gain stops above 1 + high. A < 0: gain stops below 1 - low. The other sides always pull."""
    log_ratio = torch.tensor(ratio, dtype=float64).log().item()
    good, bad = surrogate(log_ratio, size), surrogate(log_ratio, -size)
    assert good == pytest.approx((-1.28 * size, 0) if ratio > 1.28 else (-ratio * size, -ratio * size))
    assert bad == pytest.approx((0.8 * size, 0) if ratio < 0.8 else (ratio * size, ratio * size))


def test_clip_fractions_count_only_where_clipping_acts() -> None:
    logp = torch.tensor([[0.5, -0.5, 0.0]]).repeat(2, 1)
    mask, A = torch.ones(2, 3, dtype=torch.bool), torch.tensor([1.0, -1.0])
    low, high = losses.clip_fractions(logp, torch.zeros(2, 3), A, mask, 0.2, 0.2)
    assert (low.item(), high.item()) == pytest.approx((1 / 6, 1 / 6))
    low, high = losses.clip_fractions(-logp, torch.zeros(2, 3), A, mask & (A[:, None] > 0), 0.2, 0.2)
    assert (low.item(), high.item()) == pytest.approx((0, 1 / 3))
    low, high = losses.clip_fractions(logp, torch.zeros(2, 3), A, mask, 0.2, 0.7)
    assert (low.item(), high.item()) == pytest.approx((1 / 6, 0))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_on_policy_gradient_is_reinforce(name: str) -> None:
    """At ratio 1, grad L = -grad (A log pi), whatever the clip."""
    logits = torch.randn(4, 5, 7, dtype=float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logp = logits.log_softmax(-1)[..., 3]
    ours = losses.reduce(name, losses.ppo_clip(logp, logp.detach(), ADVANTAGE, 0.2, 0.2, 20.0, MASK), MASK, COUNTS)
    paper = losses.reduce(name, -ADVANTAGE[:, None] * logp, MASK, COUNTS)
    (mine,), (theirs,) = (torch.autograd.grad(loss, logits, retain_graph=True) for loss in (ours, paper))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("function", ["ppo_clip", *ESTIMATORS])
def test_constants_of_the_step_must_not_carry_a_gradient(function: str) -> None:
    with pytest.raises(ValueError, match="carry a gradient; they are constants of the step"):
        if function == "ppo_clip":
            losses.ppo_clip(LOGP, OLD.clone().requires_grad_(), ADVANTAGE, 0.2, 0.2, 20.0)
        else:
            KL[function](LOGP, REF.clone().requires_grad_(), 20.0)


# ---- KL estimators


@given(st.floats(-30, 30))
def test_k3_and_k2_are_never_negative(drift: float) -> None:
    logp, ref = torch.tensor([[0.0]], dtype=float64), torch.tensor([[drift]], dtype=float64)
    assert losses.kl_k3(logp, ref, 20.0) >= 0
    assert losses.kl_k2(logp, ref, 20.0) >= 0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_of_equal_policies_is_exactly_zero(name: str) -> None:
    assert not KL[name](LOGP, LOGP.clone(), 20.0).any()


def test_k3_keeps_its_digits_near_zero_in_float32() -> None:
    """e^d - 1 - d in float32 loses everything below d = 1e-3; expm1 does not."""
    drift = torch.tensor([[1e-3, 1e-4]])
    torch.testing.assert_close(losses.kl_k3(torch.zeros(1, 2), drift, 20.0), drift.square() / 2, rtol=1e-2, atol=0)


def expected_gradient(estimate: Callable[..., Tensor], logits: Tensor, ref: Tensor) -> Tensor:
    """E over actions of the policy, by enumeration, of the gradient of a per-token loss."""
    theta = logits.clone().requires_grad_()
    logp = theta.log_softmax(-1)
    weighted = logp.detach().exp() * estimate(logp[None], ref[None], 20.0)[0]
    return torch.autograd.grad(weighted.sum(), theta)[0]


def divergence_gradient(logits: Tensor, ref: Tensor, *, reverse: bool) -> Tensor:
    theta = logits.clone().requires_grad_()
    logp = theta.log_softmax(-1)
    divergence = (logp.exp() * (logp - ref)).sum() if reverse else (ref.exp() * (ref - logp)).sum()
    return torch.autograd.grad(divergence, theta)[0]


def categorical() -> tuple[Tensor, Tensor]:
    """Logits of a policy and log-probs of a reference over six actions, 0.6 nats apart."""
    generator = torch.Generator().manual_seed(1)
    logits, ref = torch.randn(2, 6, dtype=float64, generator=generator)
    return logits, ref.log_softmax(-1)


def test_estimators_as_losses() -> None:
    """k2 pulls as KL(policy || ref), k3 as KL(ref || policy), k1 not at all."""
    logits, ref = categorical()
    reverse, forward = (divergence_gradient(logits, ref, reverse=side) for side in (True, False))
    torch.testing.assert_close(expected_gradient(losses.kl_k2, logits, ref), reverse)
    torch.testing.assert_close(expected_gradient(losses.kl_k3, logits, ref), forward)
    torch.testing.assert_close(expected_gradient(losses.kl_k1, logits, ref), torch.zeros_like(logits))
    assert not torch.allclose(reverse, forward, rtol=0.1)


def test_estimators_as_values() -> None:
    """k1 and k3 are unbiased; k2 is not."""
    logits, ref = categorical()
    logp = logits.log_softmax(-1)
    truth = (logp.exp() * (logp - ref)).sum().item()
    mean = {name: (logp.exp() * KL[name](logp[None], ref[None], 20.0)[0]).sum().item() for name in ESTIMATORS}
    assert (mean["k1"], mean["k3"]) == pytest.approx((truth, truth))
    assert mean["k2"] != pytest.approx(truth, rel=0.05)


def test_k3_saturates_only_where_it_would_overflow() -> None:
    """Far below the reference a token is cut and counted; far above it the pull stays, in full."""
    logp = torch.tensor([[0.0, 0.0, 0.0]], requires_grad=True)
    per_token = losses.kl_k3(logp, torch.tensor([[9.0, 4.0, -9.0]]), 5.0)
    per_token.sum().backward()
    e = torch.e
    assert per_token.tolist()[0] == pytest.approx([e**5 - 6, e**4 - 5, e**-9 + 8])
    assert logp.grad is not None
    assert logp.grad.tolist()[0] == pytest.approx([0, 1 - e**4, 1 - e**-9], rel=1e-5)


def test_clamped_share_counts_tokens_beyond_the_clamp() -> None:
    logp, mask = torch.tensor([[25.0, -25.0, 19.0, 99.0]]), torch.tensor([[True, True, True, False]])
    assert losses.clamped_share(logp, torch.zeros(1, 4), mask, 20.0).item() == pytest.approx(2 / 3)


# ---- extreme and masked inputs


def per_token_losses(logp: Tensor, old: Tensor, ref: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    A = torch.tensor([1.0, -1.0], dtype=logp.dtype)[: len(logp)]
    policy = losses.ppo_clip(logp, old, A, 0.2, 0.2, 20.0, mask)
    return {"ppo_clip": policy} | {name: KL[name](logp, ref, 20.0, mask) for name in ESTIMATORS}


@pytest.mark.parametrize("dtype", [torch.float32, float64])
@pytest.mark.parametrize("far", [200.0, -200.0])
@pytest.mark.parametrize("name", ["ppo_clip", *ESTIMATORS])
def test_log_ratios_of_200_stay_finite(name: str, far: float, dtype: torch.dtype) -> None:
    logp = torch.full((2, 3), far, dtype=dtype, requires_grad=True)
    base = torch.zeros(2, 3, dtype=dtype)
    value = per_token_losses(logp, base, base, None)[name]
    value.sum().backward()
    assert value.isfinite().all()
    assert logp.grad is not None and logp.grad.isfinite().all()


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("where", ["logp", "old", "ref", "all"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["ppo_clip", *ESTIMATORS])
def test_what_is_masked_never_leaks(name: str, algorithm: str, where: str, garbage: float) -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    counts = Counts(sequences=2, tokens=3, max_completion=3)

    def run(*dirty: str) -> tuple[float, Tensor]:
        inputs = {k: torch.full((2, 3), v, dtype=float64) for k, v in {"logp": -1.0, "old": -1.1, "ref": -0.7}.items()}
        for key in dirty:
            inputs[key][~mask] = garbage
        logp = inputs["logp"].requires_grad_()
        loss = losses.reduce(algorithm, per_token_losses(logp, inputs["old"], inputs["ref"], mask)[name], mask, counts)
        loss.backward()
        assert logp.grad is not None
        return loss.item(), logp.grad

    clean, dirty = run(), run(*(["logp", "old", "ref"] if where == "all" else [where]))
    assert dirty[0] == clean[0]
    assert torch.equal(dirty[1], clean[1])
    assert not dirty[1][~mask].any()


def test_reports_ignore_what_is_masked() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    logp, old = torch.where(mask, -1.0, NAN), torch.where(mask, -2.0, INF)
    A = torch.tensor([1.0, 1.0])
    assert losses.masked_mean(logp, mask) == -1
    assert losses.ratio_deviation(logp, old, mask).item() == pytest.approx(torch.e - 1)
    assert losses.clip_fractions(logp, old, A, mask, 0.2, 0.2)[1] == 1
    assert losses.clamped_share(logp, old, mask, 0.5) == 1


def test_no_tokens_at_all() -> None:
    """Every completion empty: a width of 0. The loss is 0; a mean over nothing is NaN, not 0."""
    empty, mask, A = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), torch.ones(2)
    for name in ALGORITHMS:
        assert losses.reduce(name, losses.ppo_clip(empty, empty, A, 0.2, 0.2, 20.0), mask, Counts(2, 0, 8)) == 0
    assert losses.ratio_deviation(empty, empty, mask) == 0
    assert losses.masked_mean(empty, mask).isnan()


def test_reports_carry_no_gradient() -> None:
    logp = LOGP.clone().requires_grad_()
    reports = (
        losses.masked_mean(logp, MASK),
        losses.ratio_deviation(logp, OLD, MASK),
        losses.clamped_share(logp, OLD, MASK, 1.0),
        *losses.clip_fractions(logp, OLD, ADVANTAGE, MASK, 0.2, 0.2),
    )
    assert not any(report.requires_grad for report in reports)


# ---- reductions


def test_reductions_by_hand() -> None:
    per_token = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert losses.sequence_mean(per_token, mask, 2).item() == pytest.approx((2 + 10) / 2)
    assert losses.token_mean(per_token, mask, 4).item() == pytest.approx(16 / 4)
    assert losses.constant_length(per_token, mask, 2, 5).item() == pytest.approx(16 / 10)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("garbage", [NAN, INF])
def test_reductions_ignore_what_is_masked(name: str, garbage: float) -> None:
    per_token = torch.where(MASK, LOGP, garbage).requires_grad_()
    loss = losses.reduce(name, per_token, MASK, COUNTS)
    assert loss == losses.reduce(name, LOGP, MASK, COUNTS)
    (gradient,) = torch.autograd.grad(loss, per_token)
    assert gradient.isfinite().all() and not gradient[~MASK].any()


@given(st.sampled_from(sorted(ALGORITHMS)), st.sets(st.integers(1, 3)), st.permutations(range(4)))
def test_any_split_into_micro_batches_adds_up(name: str, cuts: set[int], order: list[int]) -> None:
    """Value and gradient: the counts belong to the whole update, wherever it is cut and however it is ordered."""
    rows = torch.tensor(order)
    whole, gradient = loss_and_gradient(name, beta=0.04)
    total, pieces = 0.0, torch.zeros_like(LOGP)
    for start, stop in pairwise([0, *sorted(cuts), 4]):
        part = rows[start:stop]
        logp = LOGP[part].requires_grad_()
        per_token = losses.ppo_clip(logp, OLD[part], ADVANTAGE[part], 0.2, 0.2, 20.0, MASK[part])
        per_token = per_token + 0.04 * losses.kl_k3(logp, REF[part], 20.0, MASK[part])
        loss = losses.reduce(name, per_token, MASK[part], COUNTS)
        total += loss.item()
        pieces[part] = torch.autograd.grad(loss, logp)[0]
    assert total == pytest.approx(whole, abs=1e-12)
    torch.testing.assert_close(pieces, gradient)


# ---- the table


def test_the_table_reads_as_the_papers_do() -> None:
    rows = {name: (row.scale, row.surrogate, row.reduction) for name, row in ALGORITHMS.items()}
    assert rows == {
        "grpo": ("group", "ppo_clip", "sequence_mean"),
        "dr_grpo": ("none", "ppo_clip", "constant_length"),
        "dapo": ("group", "ppo_clip", "token_mean"),
    }


def test_every_row_names_parts_that_exist() -> None:
    for row in ALGORITHMS.values():
        assert row.scale in losses.SCALES
        assert row.surrogate in losses.SURROGATES
        assert row.reduction in losses.REDUCTIONS


def test_settings_and_tables_agree() -> None:
    assert set(get_args(AlgorithmConfig.model_fields["loss"].annotation)) == set(ALGORITHMS)
    assert set(get_args(AlgorithmConfig.model_fields["kl"].annotation)) == set(KL) - {"k1"}


def test_an_unknown_algorithm_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown algorithm 'ppo'; use one of grpo, dr_grpo, dapo"):
        losses.reduce("ppo", LOGP, MASK, COUNTS)


def test_shapes_are_checked_while_testing() -> None:
    with pytest.raises(Exception, match="advantage"):
        losses.ppo_clip(LOGP, OLD, ADVANTAGE[:3], 0.2, 0.2, 20.0)


@pytest.mark.parametrize("dtype", [torch.float32, float64])
def test_types_are_kept(dtype: torch.dtype) -> None:
    logp, old, A = LOGP.to(dtype), OLD.to(dtype), ADVANTAGE.to(dtype)
    assert losses.reduce("dapo", losses.ppo_clip(logp, old, A, 0.2, 0.2, 20.0), MASK, COUNTS).dtype == dtype
    assert losses.group_advantages(A[None], scale="group").dtype == dtype
    assert all(KL[name](logp, old, 20.0).dtype == dtype for name in ESTIMATORS)
