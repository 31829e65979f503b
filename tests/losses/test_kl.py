"""KL estimators: as values, as losses, off the policy that sampled, and at extremes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_nb import losses
from grpo_nb.losses import KL
from tests.support.tokens import pattern
from tests.support.trl_case import ADVANTAGE, LOGP, MASK, OLD, REF, float64, recipe

ESTIMATORS = sorted(KL)


def test_trl_value() -> None:
    assert losses.masked_mean(losses.kl_k3(LOGP, REF, 20.0), MASK).item() == pytest.approx(0.009708125, abs=1e-9)


@given(st.floats(-30, 30))
def test_k3_and_k2_are_never_negative(drift: float) -> None:
    logp, ref = torch.tensor([[0.0]], dtype=float64), torch.tensor([[drift]], dtype=float64)
    for name in ("k2", "k3", "k3_k2"):
        assert KL[name](logp, ref, 20.0, None) >= 0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_of_equal_policies_is_exactly_zero(name: str) -> None:
    assert not KL[name](LOGP, LOGP.clone(), 20.0, None).any()


def test_k3_keeps_its_digits_near_zero_in_float32() -> None:
    """e^d - 1 - d in float32 loses everything below d = 1e-3; expm1 does not."""
    drift = torch.tensor([[1e-3, 1e-4]])
    torch.testing.assert_close(losses.kl_k3(torch.zeros(1, 2), drift, 20.0), drift.square() / 2, rtol=1e-2, atol=0)


# ---- six actions, enumerated: expectations without sampling noise


def categorical() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a policy; log-probs of a reference, 0.6 nats away, and of an older policy that sampled."""
    generator = torch.Generator().manual_seed(1)
    logits, ref, old = torch.randn(3, 6, dtype=float64, generator=generator)
    return logits, ref.log_softmax(-1), old.log_softmax(-1)


def expected_gradient(estimate: Callable[[Tensor], Tensor], logits: Tensor, sampler: Tensor | None = None) -> Tensor:
    """E over actions of the sampler (the policy itself if None) of the gradient of a per-token loss of log-probs."""
    theta = logits.clone().requires_grad_()
    logp = theta.log_softmax(-1)
    chances = logp.detach().exp() if sampler is None else sampler.exp()
    return torch.autograd.grad((chances * estimate(logp[None])[0]).sum(), theta)[0]


def divergence_gradient(logits: Tensor, ref: Tensor, *, reverse: bool) -> Tensor:
    theta = logits.clone().requires_grad_()
    logp = theta.log_softmax(-1)
    divergence = (logp.exp() * (logp - ref)).sum() if reverse else (ref.exp() * (ref - logp)).sum()
    return torch.autograd.grad(divergence, theta)[0]


def test_estimators_as_losses() -> None:
    """k2 and k3_k2 pull as KL(policy || ref), k3 as KL(ref || policy), k1 not at all."""
    logits, ref, _ = categorical()
    reverse, forward = (divergence_gradient(logits, ref, reverse=side) for side in (True, False))
    pulls = {
        name: expected_gradient(lambda logp, f=f: f(logp, ref[None], 20.0, None), logits) for name, f in KL.items()
    }
    torch.testing.assert_close(pulls["k2"], reverse)
    torch.testing.assert_close(pulls["k3_k2"], reverse)
    torch.testing.assert_close(pulls["k3"], forward)
    torch.testing.assert_close(pulls["k1"], torch.zeros_like(logits))
    assert not torch.allclose(reverse, forward, rtol=0.1)


def test_estimators_as_values() -> None:
    """k1, k3 and k3_k2 are unbiased; k2 is not; the exhibit reads a fraction."""
    logits, ref, _ = categorical()
    logp = logits.log_softmax(-1)
    truth = (logp.exp() * (logp - ref)).sum().item()
    mean = {name: (logp.exp() * KL[name](logp[None], ref[None], 20.0, None)[0]).sum().item() for name in ESTIMATORS}
    assert (mean["k1"], mean["k3"], mean["k3_k2"]) == pytest.approx((truth, truth, truth))
    assert mean["k2"] != pytest.approx(truth, rel=0.05)
    exhibit = (logp.exp() * losses.kl_clamped_exhibit(logp[None], ref[None])[0]).sum().item()
    assert exhibit < 0.7 * truth


def test_the_exhibit_is_blind_where_the_policy_has_learnt() -> None:
    """Tokens that the policy likes better than the reference read 0 and have no gradient."""
    logp = torch.tensor([[-0.1, -0.1]], requires_grad=True)
    value = losses.kl_clamped_exhibit(logp, torch.tensor([[-3.0, -20.0]]))
    value.sum().backward()
    assert value.tolist() == [[0, 0]]
    assert logp.grad is not None and not logp.grad.any()
    assert losses.kl_k3(torch.tensor([[-0.1]]), torch.tensor([[-3.0]]), 20.0) > 1.9


def test_the_ratio_restores_the_expectation_off_policy() -> None:
    """Samples of an older policy: weighted, k2 pulls as on-policy; unweighted it does not."""
    logits, ref, old = categorical()
    reverse = divergence_gradient(logits, ref, reverse=True)

    def weighted(kind: Any) -> Tensor:
        def loss(logp: Tensor) -> Tensor:
            return losses.kl_weight(kind, logp, old[None], 20.0) * losses.kl_k2(logp, ref[None], 20.0)

        return expected_gradient(loss, logits, sampler=old)

    torch.testing.assert_close(weighted("ratio"), reverse)
    assert not torch.allclose(weighted("none"), reverse, rtol=0.1)


@pytest.mark.parametrize("off_policy", [False, True])
def test_k3_through_the_ratio_is_the_gradient_of_the_divergence_itself(off_policy: bool) -> None:
    logits, ref, old = categorical()
    sampler = old if off_policy else logits.log_softmax(-1)

    def loss(logp: Tensor) -> Tensor:
        return losses.kl_weight("ratio_through", logp, sampler[None], 20.0) * losses.kl_k3(logp, ref[None], 20.0)

    torch.testing.assert_close(
        expected_gradient(loss, logits, sampler=sampler), divergence_gradient(logits, ref, reverse=True)
    )


def test_a_constant_ratio_is_exactly_one_on_policy() -> None:
    assert torch.equal(losses.kl_weight("ratio", LOGP, LOGP.clone(), 20.0), torch.ones_like(LOGP))
    assert torch.equal(losses.kl_weight("none", LOGP, OLD, 20.0), torch.ones_like(LOGP))


# ---- refusals and extremes


def test_k1_as_a_loss_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=pattern("k1", "k1_in_reward")):
        losses.kl_loss("k1")
    with pytest.raises(ValueError, match=pattern("'k4'", "k2, k3, k3_k2")):
        losses.kl_loss("k4")
    assert losses.kl_loss("k2") is losses.kl_k2


def test_k1_in_the_reward_adds_no_term_to_the_loss() -> None:
    tokens = losses.LossInputs(LOGP, OLD, REF, ADVANTAGE, MASK)
    terms = losses.loss_terms(tokens, recipe("rloo"), 0.5, losses.LossNormalizer(4, 14, 8))
    assert set(terms) == {"policy"}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_reference_must_not_carry_a_gradient(name: str) -> None:
    with pytest.raises(ValueError, match=r"torch\.no_grad\(\)"):
        KL[name](LOGP, REF.clone().requires_grad_(), 20.0, None)


def test_k3_saturates_only_where_it_would_overflow() -> None:
    """Far below the reference a token is cut and counted; far above it the pull stays, in full."""
    logp = torch.tensor([[0.0, 0.0, 0.0]], requires_grad=True)
    per_token = losses.kl_k3(logp, torch.tensor([[9.0, 4.0, -9.0]]), 5.0)
    per_token.sum().backward()
    e = torch.e
    assert per_token.tolist()[0] == pytest.approx([e**5 - 6, e**4 - 5, e**-9 + 8])
    assert logp.grad is not None
    assert logp.grad.tolist()[0] == pytest.approx([0, 1 - e**4, 1 - e**-9], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, float64])
@pytest.mark.parametrize("far", [200.0, -200.0, float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("weight", ["none", "ratio", "ratio_through"])
def test_far_log_ratios_stay_finite(name: str, weight: Any, far: float, dtype: torch.dtype) -> None:
    logp = torch.full((2, 3), far, dtype=dtype, requires_grad=True)
    base = torch.zeros(2, 3, dtype=dtype)
    value = losses.kl_weight(weight, logp, base, 20.0) * KL[name](logp, base, 20.0, None)
    value.sum().backward()
    assert value.isfinite().all() and value.dtype == dtype
    assert logp.grad is not None and logp.grad.isfinite().all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_token_that_both_policies_forbid_has_no_distance(name: str) -> None:
    logp = torch.tensor([[-1.0, -float("inf")]], requires_grad=True)
    value = KL[name](logp, torch.tensor([[-1.5, -float("inf")]]), 20.0, None)
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    assert value[0, 1] == 0 and value.isfinite().all() and gradient.isfinite().all()


def test_clamped_share_counts_tokens_beyond_the_clamp() -> None:
    logp, mask = torch.tensor([[25.0, -25.0, 19.0, 99.0]]), torch.tensor([[True, True, True, False]])
    assert losses.clamped_share(logp, torch.zeros(1, 4), mask, 20.0).item() == pytest.approx(2 / 3)
