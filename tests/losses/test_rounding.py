"""Rounding is told from a fault by a mean and a quantile: noise of half precision passes, wrong scores do not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_nb import presets, rules
from grpo_nb.losses.rounding import Gap, broken
from grpo_nb.metrics import keys
from grpo_nb.training.metrics import difference_row
from tests.support import tiny_models as tiny
from tests.support.made_rows import healthy

BFLOAT16, FLOAT32 = torch.finfo(torch.bfloat16).eps, torch.finfo(torch.float32).eps
CONFIG = presets.demo()


def noise(tokens: int, seed: int = 0, size: float = 0.02) -> Tensor:
    """|Δ log p| with a long tail (Student's t of 3 degrees), as in bfloat16: the largest of 1000 passes 0.2."""
    draws = torch.randn(4, tokens, generator=torch.Generator().manual_seed(seed))
    return size * draws[0].abs() / (draws[1:].square().mean(0)).sqrt()


def logits(tokens: int, seed: int = 1) -> Tensor:
    """Of a trained size: an entropy of about 1.6 nats over 500 words."""
    return 3.0 * torch.randn(tokens, 500, generator=torch.Generator().manual_seed(seed))


def named(name: str) -> keys.Difference:
    return keys.Difference(name, f"{name}_p99", f"{name}_far")


def gaps(sizes: Tensor) -> Gap:
    row: dict[str, Any] = difference_row(named("gap"), sizes)
    return Gap(row["gap"], row["gap_p99"], row["gap_far"], sizes.numel())


@pytest.mark.parametrize("tokens", [10**3, 10**4, 10**5, 10**6])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_long_tail_of_half_precision_is_rounding(tokens: int, seed: int) -> None:
    sizes = noise(tokens, seed)
    assert sizes.max() > 0.15, "what a bound of the largest would have taken for a fault"
    assert broken(gaps(sizes), BFLOAT16) == {}
    assert broken(gaps(2 * sizes), BFLOAT16, temperature=0.5) == {}, "logits are divided by the temperature"


@pytest.mark.parametrize("tokens", [10**3, 10**4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_wrong_temperature_is_no_rounding(tokens: int, seed: int) -> None:
    scores = logits(tokens, seed)
    words = torch.distributions.Categorical(logits=scores).sample()[:, None]
    right, wrong = (torch.log_softmax(scores / t, -1).gather(-1, words)[:, 0] for t in (1.0, 0.9))
    assert broken(gaps((wrong - right).abs() + noise(tokens, seed)), BFLOAT16)
    assert broken(gaps((wrong - right).abs()), FLOAT32)


def test_a_fault_of_few_tokens_is_seen_by_its_nats() -> None:
    """The last token of each of 100 completions, scored one position off."""
    sizes = noise(25_600)
    sizes[::256] = 5.0
    assert "far" in broken(gaps(sizes), BFLOAT16)


def test_a_gap_that_is_no_number_is_no_rounding() -> None:
    assert broken(Gap(math.nan), BFLOAT16) and broken(Gap(math.inf), FLOAT32)
    assert broken(Gap(5e-4, 5e-3, 0.0, 1000), FLOAT32) == {}


# ---- the rules


def row(sizes: Tensor, key: str, eps: float = BFLOAT16) -> dict[str, Any]:
    return healthy(1)[0] | {"rounding": eps, "tokens": sizes.numel()} | difference_row(named(key), sizes)


def test_step_one_bears_rounding_and_stops_at_more() -> None:
    assert rules.after_step([row(noise(4096), "ratio/logp_difference") | {"ratio/max_deviation": 0.28}], CONFIG) == []
    (stop,) = rules.after_step([row(noise(4096) + 0.1, "ratio/logp_difference")], CONFIG)
    assert (stop.rule, stop.severity, stop.action) == ("first_update_wrong", "error", "stop")
    assert stop.evidence["values"]["ratio/logp_difference"] > 0.1
    (fine,) = rules.after_step([row(noise(4096), "ratio/logp_difference", FLOAT32)], CONFIG)
    assert fine.action == "stop", "what is rounding in bfloat16 is none in float32"


@pytest.mark.parametrize(("extra", "action"), [(0.1, "warn"), (1.0, "stop")])
def test_a_sampler_that_is_not_the_trainer(extra: float, action: str) -> None:
    assert rules.after_step([row(noise(4096), "sampler_logp_difference")], CONFIG) == []
    found = row(noise(4096) + extra, "sampler_logp_difference")
    (finding,) = [f for f in rules.after_step([found], CONFIG) if f.rule == "sampler_broken"]
    assert (finding.severity, finding.action) == ("error", action)
    for change in ({"sampling.top_p": 0.9}, {"algorithm.importance_correction": "tis"}):
        assert not [f for f in rules.after_step([found], CONFIG.replace(**change)) if f.rule == "sampler_broken"]


def test_a_sampler_of_other_weights_stops_a_later_step() -> None:
    rows = [*healthy(3), healthy(4)[3] | {"sampler_logp_difference": 2.0}]
    assert [f.action for f in rules.after_step(rows, CONFIG) if f.rule == "sampler_broken"] == ["stop"]


# ---- faults of a real model, in float32


def faulty(fault: str) -> Callable[[Any, Any], Tensor]:
    def scores(policy: Any, batch: Any) -> Tensor:
        if fault == "temperature":
            return policy.logprobs(batch, 0.9).logprobs
        if fault == "weights":
            tiny.nudge(policy, 0.02)
            return policy.logprobs(batch).logprobs
        if fault == "mask":
            batch.attention_mask[0, :3] = 1
            return policy.logprobs(batch).logprobs
        return policy.logprobs(batch).logprobs.roll(1, dims=1)

    return scores


@pytest.mark.parametrize("fault", ["temperature", "weights", "mask", "position"])
def test_a_real_fault_of_a_tiny_model_is_no_rounding(fault: str) -> None:
    policy = tiny.policy()
    prompts, completions = [[8, 9], [8, 9, 10, 11, 12]] * 4, [tiny.COMPLETION] * 8
    with torch.no_grad():
        right = policy.logprobs(policy.collate(prompts, completions)).logprobs
        again = policy.logprobs(policy.collate(prompts, completions)).logprobs
        wrong = faulty(fault)(policy, policy.collate(prompts, completions))
    assert broken(gaps((again - right).abs().flatten()), FLOAT32) == {}
    assert broken(gaps((wrong - right).abs().flatten()), FLOAT32)
