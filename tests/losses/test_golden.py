"""Golden numbers of TRL, made by TRL's own code (see `golden/make_trl.py`), against the same case by our table.

What TRL offers and we do not, and where we do something else on purpose, is counted by reason in `ELSEWHERE`: a case
is compared, or it stands there.
"""

import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_nb import losses
from grpo_nb.algorithms import algorithm
from grpo_nb.losses import ClipConfig, GroupRewards, LossNormalizer
from tests.conftest import ROOT

GOLDEN = json.loads((ROOT / "tests" / "golden" / "trl-1.16.0.json").read_text(encoding="utf-8"))
INPUTS = GOLDEN["inputs"]
FLOATS = {"float64": torch.float64, "float32": torch.float32}
TOLERANCE = {"float64": 1e-9, "float32": 1e-6}
NAMES = {"grpo": "grpo", "bnpo": "bnpo", "dr_grpo": "dr_grpo", "dapo": "dapo", "cispo": "cispo_cap", "sapo": "sapo"}
TAUS = {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg"}
LEVELS = {"token": "token", "sequence": "sequence"}

each_float = pytest.mark.parametrize("float_name", FLOATS)


# ---- losses


def elsewhere(case: dict[str, Any]) -> str | None:
    """Why a case of TRL has no counterpart here; None where it has one."""
    s, correction = case["settings"], case["settings"].get("sampler_correction")
    if s["loss_type"] not in NAMES:
        return "loss not offered (luspo, vespo)"
    if s["importance_sampling_level"] == "sequence" and s["loss_type"] in ("cispo", "sapo"):
        return "cispo and sapo have a token's ratio only"
    if s["importance_sampling_level"] == "sequence" and s["beta"] and s["use_bias_correction_kl"]:
        return "a token's KL is weighed by the token's ratio, not by its sequence's"
    if s["off_policy_mask_threshold"] is not None:
        return "off-policy sequence mask not offered"
    if correction and correction["clip_min"] is not None and correction["mode"].endswith("truncate"):
        return "truncation has no lower bound here (TIS)"
    if s["delta"] is not None and s["delta"] <= 1 + s["epsilon_high"]:
        return "a dual clip inside the upper clip, refused by the settings"
    if s["top_entropy_quantile"] < 1 and s["entropy_coef"]:
        return "the entropy bonus is over all tokens, not over the chosen ones"
    if case["inputs"] == "sampler holes":
        return "an engine reports every token's log-prob"
    if s["gradient_accumulation_steps"] > 1 and s["loss_type"] == "bnpo":
        return "a denominator of each micro-batch's own"
    if s["steps_per_generation"] > s["gradient_accumulation_steps"]:
        return "several updates a generation: ours divide by their own tokens"
    return None


ELSEWHERE = {
    "loss not offered (luspo, vespo)": 50,
    "truncation has no lower bound here (TIS)": 26,
    "cispo and sapo have a token's ratio only": 12,
    "off-policy sequence mask not offered": 6,
    "a token's KL is weighed by the token's ratio, not by its sequence's": 6,
    "several updates a generation: ours divide by their own tokens": 6,
    "a dual clip inside the upper clip, refused by the settings": 6,
    "the entropy bonus is over all tokens, not over the chosen ones": 6,
    "a denominator of each micro-batch's own": 3,
    "an engine reports every token's log-prob": 3,
}


def table(inputs: dict[str, Any], key: str, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[0.0 if v is None else v for v in row] for row in inputs[key]], dtype=dtype)


def ours(case: dict[str, Any], dtype: torch.dtype) -> tuple[float, Tensor]:
    s, inputs = case["settings"], INPUTS[case["inputs"]]
    logp = table(inputs, "logp", dtype).requires_grad_()
    old = logp.detach().clone() if s["old"] == "own" else table(inputs, "old", dtype)
    entropy = table(inputs, "entropy", dtype)
    mask = torch.arange(logp.shape[1]) < torch.tensor(inputs["lengths"])[:, None]
    if s["mask_truncated_completions"]:
        mask = mask & ~torch.tensor(inputs["truncated"])[:, None]
    weight = correction_of(s.get("sampler_correction"), old, table(inputs, "sampler", dtype), mask)
    if s["top_entropy_quantile"] < 1:
        weight = weight * losses.top_entropy(entropy, mask, s["top_entropy_quantile"])
    sequence = {"surrogate": "gspo"} if s["importance_sampling_level"] == "sequence" else {}
    row = algorithm(NAMES[s["loss_type"]], kl="k3", **sequence)
    taus = {ours: s[theirs] for ours, theirs in TAUS.items() if theirs in s}
    limits = ClipConfig(s["epsilon"], s["epsilon_high"], dual=s["delta"], **taus)  # also caps that our settings refuse
    through = "ratio_through" if s["use_bias_correction_kl"] else "none"
    tokens = losses.LossInputs(
        logp=logp,
        logp_old=old,
        logp_ref=table(inputs, "ref", dtype),
        advantage=torch.tensor(inputs["advantages"], dtype=dtype)[:, None],
        mask=mask,
        weight=weight,
        entropy=entropy if s["entropy_coef"] else None,
    )
    counts = LossNormalizer(len(logp), int(mask.sum()), inputs["max_completion"])  # TRL counts masked rows as rows
    recipe = losses.LossConfig(row, limits, s["entropy_coef"], through)  # type: ignore[arg-type]
    loss = torch.stack(list(losses.loss_terms(tokens, recipe, s["beta"], counts).values())).sum()
    return loss.item(), torch.autograd.grad(loss, logp)[0]


def correction_of(settings: dict[str, Any] | None, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    if settings is None:
        return torch.ones_like(old)
    level, mode = settings["mode"].split("_")
    kind: Any = {"truncate": "tis", "mask": "mis"}[mode]
    bounds = (settings["clip_min"] or 0.0, settings["clip_max"])
    return losses.correction(losses.Correction(kind, LEVELS[level], bounds), old, sampler, mask)  # type: ignore[arg-type]


def label(case: dict[str, Any]) -> str:
    s = case["settings"]
    marks = [case["inputs"], s["loss_type"], s["importance_sampling_level"], f"beta{s['beta']}"]
    return "-".join(map(str, marks))


COMPARED = [case for case in GOLDEN["losses"] if elsewhere(case) is None]


@each_float
@pytest.mark.parametrize("case", COMPARED, ids=label)
def test_losses_and_gradients_are_trls(case: dict[str, Any], float_name: str) -> None:
    if case["settings"]["top_entropy_quantile"] < 1 and float_name == "float64":
        float_name = "float32"  # TRL's threshold is rounded to float32, where its float64 loses tokens that tie with it
    expected = case[float_name]
    loss, gradient = ours(case, FLOATS[float_name])
    assert loss == pytest.approx(expected["loss"], abs=TOLERANCE[float_name])
    assert gradient.norm().item() == pytest.approx(expected["norm"], abs=TOLERANCE[float_name])
    if float_name == "float64":
        torch.testing.assert_close(gradient, torch.tensor(expected["gradient"], dtype=torch.float64), atol=1e-9, rtol=0)


def test_what_is_not_compared_has_its_reason() -> None:
    assert Counter(filter(None, map(elsewhere, GOLDEN["losses"]))) == ELSEWHERE


def test_what_is_done_instead() -> None:
    """bnpo's denominator is the update's, so its gradient does not hang on the cut: TRL's, uncut, is ours."""
    cut = [c for c in GOLDEN["losses"] if elsewhere(c) == "a denominator of each micro-batch's own"]
    for case in cut:
        loss, gradient = ours(case, torch.float64)
        uncut = case | {"settings": case["settings"] | {"gradient_accumulation_steps": 1, "steps_per_generation": 1}}
        assert (loss, gradient.tolist()) == (ours(uncut, torch.float64)[0], ours(uncut, torch.float64)[1].tolist())
        assert loss != pytest.approx(case["float64"]["loss"], abs=1e-4)


# ---- advantages

SCALES = {"group": "group_std", "batch": "batch_std", "none": "mean_only"}
PLAIN = [
    case for case in GOLDEN["advantages"] if case["multi_objective_aggregation"] == "sum_then_normalize"
]  # normalising each reward function by itself (GDPO) is not offered: objectives are kept apart here, not summed


@each_float
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: f"{case['name']}-{case['scale_rewards']}".replace(" ", "_"))
def test_advantages_are_trls(case: dict[str, Any], float_name: str) -> None:
    """TRL rounds rewards and weights to float32, and sums what the functions did give; a lone NaN row stays out."""
    given = torch.tensor([[float("nan") if r is None else r for r in row] for row in case["rewards"]])
    weights = torch.tensor(case["weights"] or [1.0] * given.shape[1])
    rewards = torch.where(given.isnan().all(1), torch.nan, (given * weights).nansum(1))
    grouped = rewards.to(FLOATS[float_name]).view(-1, case["group_size"])
    outcomes = GroupRewards(grouped, torch.ones(grouped.shape, dtype=torch.long))
    got = losses.advantages(outcomes, SCALES[case["scale_rewards"]]).flatten()  # type: ignore[arg-type]
    expected = torch.tensor(case[float_name]["advantages"], dtype=FLOATS[float_name])
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
