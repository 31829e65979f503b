"""The per-token policy losses: what clipping holds, how they relate to each other, extremes, masks."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_nb import losses
from grpo_nb.losses import SURROGATES, ClipConfig
from tests.support.trl_case import ADVANTAGE, COUNTS, LOGP, MASK, OLD, REF, float64

NAN, INF = float("nan"), float("inf")
NAMES = sorted(SURROGATES)
TOKENWISE = ["ppo_clip", "cispo", "cispo_cap", "sapo", "cpgd"]


def per_token(name: Any, logp: Tensor, old: Tensor, A: Tensor, mask: Tensor | None, **limits: Any) -> Tensor:
    return SURROGATES[name](logp, old, A, ClipConfig(**limits), mask)


def one(name: str, log_ratio: float, advantage: float, **limits: Any) -> tuple[float, float]:
    """(loss, d loss / d logp) of a single token that was sampled at logp 0."""
    logp = torch.tensor([[log_ratio]], dtype=float64, requires_grad=True)
    A = torch.tensor([[advantage]], dtype=float64)
    loss = per_token(name, logp, torch.zeros(1, 1, dtype=float64), A, None, **limits)
    loss.sum().backward()
    assert logp.grad is not None
    return loss.item(), logp.grad.item()


ratios = st.floats(0.01, 10).filter(lambda r: min(abs(r - edge) for edge in (0.8, 1.28, 3.0)) > 1e-6)


@given(ratios, st.floats(0.1, 3))
def test_ppo_clips_two_sides_of_four(ratio: float, size: float) -> None:
    """A > 0: gain stops above 1 + high. A < 0: gain stops below 1 - low. The other sides always pull."""
    at = math.log(ratio)
    good, bad = one("ppo_clip", at, size, high=0.28), one("ppo_clip", at, -size, high=0.28)
    assert good == pytest.approx((-1.28 * size, 0) if ratio > 1.28 else (-ratio * size, -ratio * size))
    assert bad == pytest.approx((0.8 * size, 0) if ratio < 0.8 else (ratio * size, ratio * size))


@given(ratios)
def test_the_dual_clip_ends_the_pull_of_a_bad_answer_that_became_likely(ratio: float) -> None:
    at = math.log(ratio)
    assert one("ppo_clip", at, -1.0, dual=3.0) == pytest.approx(
        (3.0, 0) if ratio > 3 else one("ppo_clip", at, -1.0), abs=1e-12
    )
    assert one("ppo_clip", at, 1.0, dual=3.0) == one("ppo_clip", at, 1.0)


def test_the_two_readings_of_cispo() -> None:
    """Both bounds around 1, or one absolute cap; the gradient is -weight * A, never 0."""
    assert one("cispo", math.log(2.0), 1.0, high=0.28)[1] == pytest.approx(-1.28)
    assert one("cispo", math.log(0.1), 1.0, low=0.2)[1] == pytest.approx(-0.8)
    assert one("cispo_cap", math.log(2.0), 1.0, high=5.0)[1] == pytest.approx(-2.0)
    assert one("cispo_cap", math.log(9.0), -1.0, high=5.0)[1] == pytest.approx(5.0)
    assert one("cispo_cap", math.log(0.1), 1.0, high=5.0)[1] == pytest.approx(-0.1)


@given(st.floats(-3, 3), st.sampled_from([1.0, -0.5]))
def test_sapo_is_a_soft_gate(log_ratio: float, A: float) -> None:
    """d/dlogp = -4 s (1 - s) r A with s = sigmoid(tau (r - 1)): the full pull at r = 1, fading on both sides."""
    tau, ratio = (1.0 if A > 0 else 1.05), math.exp(log_ratio)
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    expected = (-4 / tau * gate * A, -4 * gate * (1 - gate) * ratio * A)
    assert one("sapo", log_ratio, A) == pytest.approx(expected, rel=1e-9)


@given(st.floats(-5, 5).filter(lambda d: abs(abs(d) - math.log(1.2)) > 1e-6 and abs(d - math.log(0.8)) > 1e-6))
def test_cpgd_pulls_with_the_advantage_or_not_at_all(log_ratio: float) -> None:
    good, bad = one("cpgd", log_ratio, 2.0, drift=0.0), one("cpgd", log_ratio, -2.0, drift=0.0)
    assert good[1] == (0 if log_ratio > math.log(1.2) else -2)
    assert bad[1] == (0 if log_ratio < math.log(0.8) else 2)


@given(st.floats(-5, 5))
def test_cpgds_drift_pulls_back_with_a_clipped_weight(log_ratio: float) -> None:
    with_drift, without = (one("cpgd", log_ratio, 1.0, drift=d)[1] for d in (0.1, 0.0))
    assert with_drift - without == pytest.approx(0.1 * max(-0.2, min(math.exp(log_ratio) - 1, 0.2)), abs=1e-9)


def test_the_drift_term_has_the_gradient_of_the_divergence_it_names() -> None:
    """E over the older policy of (r - 1) grad log pi = grad KL(old || policy): six actions, enumerated."""
    logits, old = torch.randn(2, 6, dtype=float64, generator=torch.Generator().manual_seed(2)) * 0.05
    old = old.log_softmax(-1)
    theta = logits.clone().requires_grad_()
    logp = theta.log_softmax(-1)
    loss = SURROGATES["cpgd"](logp[None], old[None], torch.zeros(1, 1, dtype=float64), ClipConfig(drift=1.0), None)
    (mine,) = torch.autograd.grad((old.exp() * loss[0]).sum(), theta, retain_graph=True)
    (theirs,) = torch.autograd.grad((old.exp() * (old - logp)).sum(), theta)
    torch.testing.assert_close(mine, theirs)


def test_gspo_has_one_ratio_for_the_completion() -> None:
    """Log-ratios .3 and -.1: s = e^.1 for both tokens, whatever the masked third holds."""
    logp = torch.tensor([[0.3, -0.1, 99.0]], dtype=float64)
    A, mask = torch.tensor([[1.0]], dtype=float64), torch.tensor([[True, True, False]])
    value = per_token("gspo", logp, torch.zeros_like(logp), A, mask, low=0.5, high=0.5)
    assert value[0, :2].tolist() == pytest.approx([-math.exp(0.1)] * 2)
    clipped = per_token("gspo", logp, torch.zeros_like(logp), A, mask, low=3e-4, high=4e-4)
    assert clipped[0, :2].tolist() == pytest.approx([-1.0004] * 2)


def test_gspo_token_has_gspos_value_and_gradient() -> None:
    """With one advantage a completion; the token form differs only where advantages differ from token to token."""

    def of(name: str) -> tuple[Tensor, Tensor]:
        logp = LOGP.clone().requires_grad_()
        limits = {"low": 0.05, "high": 0.05}
        loss = losses.sequence_mean(per_token(name, logp, OLD, ADVANTAGE, MASK, **limits), MASK, 4)
        return loss.detach(), torch.autograd.grad(loss, logp)[0]

    torch.testing.assert_close(of("gspo"), of("gspo_token"))


def test_gspo_token_takes_an_advantage_a_token() -> None:
    logp = LOGP.clone().requires_grad_()
    A = torch.zeros_like(LOGP)
    A[0, 1] = 1.0
    per_token("gspo_token", logp, LOGP.clone(), A, MASK).sum().backward()
    assert logp.grad is not None
    assert logp.grad.nonzero().tolist() == [[0, 1]]


def test_gmpo_is_the_geometric_mean_of_clipped_ratios() -> None:
    """A > 0: log-ratios above .4 count as .4, those below -.4 as they are; A < 0 the other way round."""
    logp = torch.tensor([[1.0, -1.0, 0.1]], dtype=float64).repeat(2, 1)
    A = torch.tensor([[1.0], [-1.0]], dtype=float64)
    value = per_token("gmpo", logp, torch.zeros_like(logp), A, None, low=0.4, high=0.4)
    assert value[0].tolist() == pytest.approx([-math.exp((0.4 - 1 + 0.1) / 3)] * 3)
    assert value[1].tolist() == pytest.approx([math.exp((1 - 0.4 + 0.1) / 3)] * 3)


# ---- what all of them share


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_gradient_is_reinforce(name: str) -> None:
    """At ratio 1, grad L = -grad (A log pi), whatever the clip."""
    logits = torch.randn(4, 5, 7, dtype=float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logp = logits.log_softmax(-1)[..., 3]
    cap = {"high": 5.0} if name == "cispo_cap" else {}
    ours = losses.sequence_mean(per_token(name, logp, logp.detach(), ADVANTAGE, MASK, **cap), MASK, 4)
    paper = losses.sequence_mean(-ADVANTAGE * logp, MASK, 4)
    (mine,), (theirs,) = (torch.autograd.grad(loss, logits, retain_graph=True) for loss in (ours, paper))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_no_advantage_no_pull(name: str) -> None:
    logp = LOGP.clone().requires_grad_()
    value = per_token(name, logp, OLD, torch.zeros_like(ADVANTAGE), MASK, drift=0.0)
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    assert not value.any() and not gradient.any()


@pytest.mark.parametrize("name", NAMES)
def test_the_old_policy_must_not_carry_a_gradient(name: str) -> None:
    with pytest.raises(ValueError, match=r"torch\.no_grad\(\)"):
        per_token(name, LOGP, OLD.clone().requires_grad_(), ADVANTAGE, MASK)


@pytest.mark.parametrize("dtype", [torch.float32, float64])
@pytest.mark.parametrize("far", [200.0, -200.0, -INF])
@pytest.mark.parametrize("name", NAMES)
def test_far_log_ratios_stay_finite(name: str, far: float, dtype: torch.dtype) -> None:
    """Of a single token among ordinary ones; -inf is a token that the policy has come to forbid."""
    logp = torch.full((2, 3), -1.0, dtype=dtype)
    logp[:, 1] = far
    logp.requires_grad_()
    A = torch.tensor([[1.0], [-1.0]], dtype=dtype)
    value = per_token(name, logp, torch.full((2, 3), -1.1, dtype=dtype), A, None)
    value.sum().backward()
    assert value.isfinite().all() and value.dtype == dtype
    assert logp.grad is not None and logp.grad.isfinite().all()


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("where", ["logp", "old", "both"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_masked_never_leaks(name: str, where: str, garbage: float) -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    A = torch.tensor([[1.0], [-1.0]], dtype=float64)

    def run(*dirty: str) -> tuple[float, Tensor]:
        inputs = {k: torch.full((2, 3), v, dtype=float64) for k, v in {"logp": -1.0, "old": -1.1}.items()}
        for key in dirty:
            inputs[key][~mask] = garbage
        logp = inputs["logp"].requires_grad_()
        loss = losses.token_mean(per_token(name, logp, inputs["old"], A, mask), mask, 3)
        return loss.item(), torch.autograd.grad(loss, logp)[0]

    clean, dirty = run(), run(*(["logp", "old"] if where == "both" else [where]))
    assert dirty[0] == clean[0]
    assert torch.equal(dirty[1], clean[1])
    assert not dirty[1][~mask].any()


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_at_all(name: str) -> None:
    empty, mask, A = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), torch.ones(2, 1)
    assert per_token(name, empty, empty, A, mask).shape == (2, 0)
    assert losses.token_mean(per_token(name, empty, empty, A, mask), mask, 0) == 0


def test_shapes_are_checked_while_testing() -> None:
    with pytest.raises(Exception, match="advantage"):
        per_token("ppo_clip", LOGP, OLD, ADVANTAGE[:3], None)


# ---- what is reported of clipping


def shares(name: str, log_ratios: list[float], A: float, **limits: Any) -> tuple[float, float]:
    logp = torch.tensor([log_ratios])
    mask = torch.ones_like(logp, dtype=torch.bool)
    low, high = losses.clip_fractions(
        name, logp, torch.zeros_like(logp), torch.tensor([[A]]), ClipConfig(**limits), mask
    )
    return low.item(), high.item()


def test_trl_reported_shares() -> None:
    low, high = losses.clip_fractions("ppo_clip", LOGP, OLD, ADVANTAGE, ClipConfig(), MASK)
    assert low.item() == pytest.approx(0.142857, abs=1e-6)
    assert high.item() == pytest.approx(0.071429, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "limits", "good", "bad"),
    [
        ("ppo_clip", {}, (0, 1 / 3), (1 / 3, 0)),
        ("ppo_clip", {"high": 0.7}, (0, 0), (1 / 3, 0)),
        ("cpgd", {}, (0, 1 / 3), (1 / 3, 0)),
        ("cispo", {}, (1 / 3, 1 / 3), (1 / 3, 1 / 3)),
        ("cispo_cap", {"high": 1.5}, (0, 1 / 3), (0, 1 / 3)),
        ("gmpo", {"low": 0.45, "high": 0.6}, (0, 0), (1 / 3, 0)),
        ("sapo", {}, (0, 0), (0, 0)),
        ("gspo", {}, (0, 0), (0, 0)),
        ("gspo_token", {"low": 0.01}, (0, 0), (0, 0)),
    ],
)
def test_clip_fractions_count_where_each_clip_acts(name: Any, limits: Any, good: Any, bad: Any) -> None:
    """Log-ratios .5, -.5 and 0: their mean is 0, so a completion's ratio is never clipped."""
    assert shares(name, [0.5, -0.5, 0.0], 1.0, **limits) == pytest.approx(good)
    assert shares(name, [0.5, -0.5, 0.0], -1.0, **limits) == pytest.approx(bad)


def test_a_clipped_completion_counts_with_all_its_tokens() -> None:
    assert shares("gspo", [0.5, 0.1], 1.0) == (0, 1)


@pytest.mark.parametrize("name", TOKENWISE)
def test_a_token_that_is_held_has_no_gradient(name: Any) -> None:
    """The report and the loss agree: exactly the reported share of tokens is without pull (weights apart)."""
    logp = torch.linspace(-1, 1, 21)[None].requires_grad_()
    mask = torch.ones(1, 21, dtype=torch.bool)
    A = torch.tensor([[1.0]])
    (gradient,) = torch.autograd.grad(per_token(name, logp, torch.zeros(1, 21), A, mask, drift=0.0).sum(), logp)
    low, high = losses.clip_fractions(name, logp, torch.zeros(1, 21), A, ClipConfig(), mask)
    silent = (gradient == 0).float().mean().item()
    assert silent == pytest.approx(0 if name in ("cispo", "cispo_cap") else low.item() + high.item())


def test_reports_ignore_what_is_masked() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    logp, old = torch.where(mask, -1.0, NAN), torch.where(mask, -2.0, INF)
    A = torch.tensor([[1.0], [1.0]])
    assert losses.masked_mean(logp, mask) == -1
    assert losses.ratio_deviation(logp, old, mask).item() == pytest.approx(torch.e - 1)
    assert losses.clip_fractions("ppo_clip", logp, old, A, ClipConfig(), mask)[1] == 1
    assert losses.clamped_share(logp, old, mask, 0.5) == 1


def test_reports_of_nothing() -> None:
    empty, mask = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)
    assert losses.ratio_deviation(empty, empty, mask) == 0
    assert losses.masked_mean(empty, mask).isnan()


def test_reports_carry_no_gradient() -> None:
    logp = LOGP.clone().requires_grad_()
    reports = (
        losses.masked_mean(logp, MASK),
        losses.ratio_deviation(logp, OLD, MASK),
        losses.clamped_share(logp, REF, MASK, 1.0),
        *losses.clip_fractions("ppo_clip", logp, OLD, ADVANTAGE, ClipConfig(), MASK),
    )
    assert not any(report.requires_grad for report in reports)
    assert COUNTS.tokens == int(MASK.sum())
