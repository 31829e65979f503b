"""Every algorithm on a small model: one gradient however its update is cut, ordered, padded; every setting acts."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_nb.algorithms import ALGORITHMS
from grpo_nb.config import AlgorithmConfig, ShapingConfig
from grpo_nb.policy.model import Policy
from grpo_nb.training.gradient_report import gradient_report
from tests.support import tiny_models
from tests.support.made_experience import OBJECTIVES, gradients_of, made_experience, made_plan


def all_terms(name: str) -> dict[str, Any]:
    """The algorithm with every term of a loss, and the gradient through all that it may go through."""
    through = {"kl_weight": "ratio_through"} if ALGORITHMS[name].kl == "k3" else {}  # type: ignore[index]
    return {"name": name, "entropy_coef": 0.05} | through


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_models.policy()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Equal to float32's rounding: the difference is a millionth of the gradient."""
    assert a.keys() == b.keys()
    left, right = (torch.cat([g.flatten().double() for g in gradient.values()]) for gradient in (a, b))
    assert right.norm() > 1e-2
    assert (left - right).norm() < 5e-6 * right.norm()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_micro_batch_gives_the_same_gradient(policy: Policy, name: str) -> None:
    """Rows of 1 to 7 tokens: a mean per micro-batch would weigh them otherwise."""
    experience = made_experience(policy)
    whole, stats = gradients_of(policy, experience, **all_terms(name))
    for micro in (1, 3):
        cut, of_cut = gradients_of(policy, experience, micro_batch=micro, **all_terms(name))
        same(cut, whole)
        assert of_cut.loss == pytest.approx(stats.loss, abs=1e-5)
        assert (of_cut.clipped_low, of_cut.clipped_high) == pytest.approx((stats.clipped_low, stats.clipped_high))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_order_of_rows_gives_the_same_gradient(policy: Policy, name: str) -> None:
    experience = made_experience(policy)
    rows = {"a": [2, 0, 3, 1], "b": [7, 4, 6, 5]}
    shuffled = gradients_of(policy, experience, rows=rows, micro_batch=3, **all_terms(name))[0]
    same(shuffled, gradients_of(policy, experience, **all_terms(name))[0])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_width_of_the_tables_gives_the_same_gradient(policy: Policy, name: str) -> None:
    """The step's tables are wider than a micro-batch needs, and hold garbage beyond a completion."""
    experience = made_experience(policy)
    pad = {"pad": (0, 5), "value": float("nan")}
    wide = dataclasses.replace(
        experience,
        logprobs_old=torch.nn.functional.pad(experience.logprobs_old, **pad),
        logprobs_reference=torch.nn.functional.pad(experience.logprobs_reference, **pad),
        entropy=torch.nn.functional.pad(experience.entropy, **pad),
    )
    padded = gradients_of(policy, wide, micro_batch=2, **all_terms(name))[0]
    same(padded, gradients_of(policy, experience, **all_terms(name))[0])


# ---- every setting acts: the gradient, or (below) what surrounds it

CHANGES = [
    ("name", {"name": "grpo"}, {}),
    ("surrogate", {"surrogate": "sapo"}, {}),
    ("reduction", {"reduction": "sequence_mean"}, {}),
    ("kl", {"kl": "k2"}, {"kl_weight": "ratio"}),
    ("kl_weight", {"kl_weight": "none"}, {}),
    ("clip_low", {"clip_low": 0.05}, {}),
    ("clip_high", {"clip_high": 0.05}, {}),
    ("dual_clip", {"dual_clip": 1.05}, {"clip_high": 0.02}),
    ("sapo_tau_positive", {"sapo_tau_positive": 3.0}, {"name": "sapo"}),
    ("sapo_tau_negative", {"sapo_tau_negative": 3.0}, {"name": "sapo"}),
    ("cpgd_drift", {"cpgd_drift": 0.5}, {"name": "cpgd"}),
    ("cpgd_drift_clip", {"cpgd_drift_clip": 0.01}, {"name": "cpgd"}),
    ("entropy_coef", {"entropy_coef": 0.1}, {}),
    ("log_ratio_clamp", {"log_ratio_clamp": 0.3}, {}),
    ("combine", {"combine": "pcgrad"}, {}),
    ("cagrad_c", {"cagrad_c": 0.9}, {"combine": "cagrad"}),
]
ELSEWHERE = {
    "advantage", "learning_rate", "max_grad_norm", "skip_grad_norm", "warmup_steps", "weight_decay", "advantage_clip",
    "mask_truncated", "top_entropy_quantile", "importance_correction", "importance_correction_level",
    "importance_correction_bounds", "gradient_report_every", "skip_signal_free_groups",
}  # fmt: skip
"""Settings that act outside an update's gradient: see `test_experience.py`."""


@pytest.mark.parametrize(("name", "change", "base"), CHANGES, ids=[c[0] for c in CHANGES])
def test_changing_a_setting_changes_the_gradient(
    policy: Policy, name: str, change: dict[str, Any], base: dict[str, Any]
) -> None:
    signs = torch.tensor([[1.0], [-1.0], [2.0], [-2.0]] * 2)
    experience = dataclasses.replace(made_experience(policy), advantages=signs)
    before, after = (gradients_of(policy, experience, **base | c)[0] for c in ({}, change))
    assert any(not torch.allclose(before[key], after[key], rtol=1e-3, atol=1e-7) for key in before), name


def test_every_setting_of_the_algorithm_is_tested() -> None:
    here = {name for name, _, _ in CHANGES}
    assert here | ELSEWHERE == set(AlgorithmConfig.model_fields), "a setting without a test that it acts"
    assert not here & ELSEWHERE
    assert set(ShapingConfig.model_fields) == {
        "truncated_factor", "overlong_buffer", "overlong_penalty", "normalise", "clip"
    }  # fmt: skip


# ---- the report of each objective's and each term's gradient


def report(policy: Policy, **algorithm: Any) -> dict[str, Any]:
    return gradient_report(policy, made_experience(policy), made_plan(algorithm, micro_batch=3, reports_gradients=True))


def test_the_report_splits_the_gradient_and_leaves_it_alone(policy: Policy) -> None:
    """Terms add up to the objective's own gradient, whose norm a single pass confirms; `.grad` stays untouched."""
    found = report(policy, entropy_coef=0.1)
    assert all(parameter.grad is None for parameter in policy.parameters_by_name().values())
    for name in OBJECTIVES:
        assert {f"grad/norm/{name}/{term}" for term in ("policy", "kl", "entropy")} <= found.keys()
        experience = made_experience(policy)
        alone, _ = gradients_of(
            policy, experience, rows={name: experience.kept_rows(name)}, weights={name: 1.0}, entropy_coef=0.1
        )
        norm = torch.stack([g.double().pow(2).sum() for g in alone.values()]).sum().sqrt().item()
        assert found[f"grad/norm/{name}"] == pytest.approx(norm, rel=1e-5)
    assert -1 <= found["grad/cosine/a/b"] <= 1


def test_the_report_names_only_terms_that_are_there(policy: Policy) -> None:
    found = report(policy, name="rloo")
    assert not [key for key in found if key.endswith(("/kl", "/entropy"))]
    assert found["grad/norm/a"] == found["grad/norm/a/policy"] > 0


def test_a_zero_gradient_has_no_cosine(policy: Policy) -> None:
    experience = made_experience(policy)
    experience.advantages[4:] = 0
    found = gradient_report(policy, experience, made_plan(betas={"a": 0.1, "b": 0.0}, reports_gradients=True))
    assert found["grad/norm/b"] == 0 and found["grad/cosine/a/b"] is None
