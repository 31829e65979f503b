"""Numbers that are not finite although all weights are: the first layer responsible is named, by one more pass."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from grpo_nb import rules
from grpo_nb.losses.rounding import overflow_advice
from grpo_nb.metrics import keys
from grpo_nb.policy import overflow
from grpo_nb.policy.model import ModelError, Policy
from grpo_nb.rollout import eager
from grpo_nb.rules import health
from grpo_nb.training import overflow_report, sampling
from grpo_nb.training.grpo import grpo
from tests.support import tiny_models
from tests.support.tiny import given, tiny_config, tiny_run
from tests.support.tokens import names

PROMPTS, COMPLETIONS = [[5, 6, 7], [8, 9]], [[10, 11], [12]]


def last_linear(policy: Policy, ending: str) -> tuple[str, nn.Linear]:
    named = [(name, m) for name, m in policy.model.named_modules() if name.endswith(ending)]
    name, module = named[-1]
    assert isinstance(module, nn.Linear)
    return name, module


def test_the_first_layer_that_overflows_is_named() -> None:
    policy = tiny_models.policy()
    assert overflow.first_layer(policy, PROMPTS, COMPLETIONS) is None
    name, layer = last_linear(policy, "down_proj")
    with torch.no_grad():
        layer.weight.fill_(3e38)
    found = overflow.first_layer(policy, PROMPTS, COMPLETIONS)
    assert found is not None and (found.layer, found.kind, found.dtype) == (name, "Linear", "float32")
    assert found.inputs_finite and found.largest == pytest.approx(3e38)
    assert all(not module._forward_hooks for module in policy.model.modules()), "the hooks are gone"


@pytest.mark.parametrize(("dtype", "wider"), [("float16", True), ("bfloat16", False), ("float32", False)])
def test_a_wider_type_is_advised_only_where_it_is_wider(dtype: str, wider: bool) -> None:
    row = {keys.STEP: 3, keys.OVERFLOW_LAYER: "model.layers.1.mlp", keys.OVERFLOW_DTYPE: dtype}
    finding = health.overflow([row], tiny_config())
    assert finding is not None and finding.evidence["layer"] == "model.layers.1.mlp"
    assert names(finding.advice, "model.dtype", "bfloat16") == wider
    assert ("model.dtype" in overflow_advice(dtype)) == wider


def test_the_engines_error_advises_no_float32_to_a_model_that_runs_in_it() -> None:
    assert "model.dtype" not in eager.not_finite(tiny_models.policy(), 0)


def test_a_step_without_finite_numbers_tells_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is not finite while all weights are, and a layer of the model's own pass overflows by then."""
    looked: list[int] = []

    def found(policy: Policy, prompts: Any, completions: Any) -> overflow.Overflow:
        looked.append(len(prompts))
        return overflow.Overflow("model.layers.2.mlp", "MLP", "float32", math.inf, True)

    backward = torch.Tensor.backward

    def infinite(self: torch.Tensor, *args: Any, **more: Any) -> None:
        backward(self * math.inf if len(looked) == 0 else self, *args, **more)

    monkeypatch.setattr(overflow_report.overflow, "first_layer", found)
    monkeypatch.setattr(torch.Tensor, "backward", infinite)
    run = tiny_run(tmp_path, sft__steps=0, run__steps=2)
    first, second = grpo(run, **given())
    assert first.status == "skipped" and first["overflow/layer"] == "model.layers.2.mlp"
    assert first["overflow/largest"] is None and looked == [8]
    assert "overflow/layer" not in second.metrics, "no pass where numbers are finite"
    told = [e for e in run.stored("events").having("kind", {"finding"}) if e["rule"] == "overflow"]
    assert [(e["step"], e["evidence"]["layer"]) for e in told] == [(1, "model.layers.2.mlp")]
    assert [f.step for f in rules.post_mortem(run.metric_rows(), run.config) if f.rule == "overflow"] == [1]


@pytest.mark.parametrize("on", [True, False])
def test_an_engine_that_finds_no_scores_leaves_a_finding(
    on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass of the engine meets an activation that overflows."""

    def no_scores(*_: Any) -> Any:
        raise ModelError("nan")

    monkeypatch.setattr(sampling, "sample", no_scores)
    run = tiny_run(tmp_path, sft__steps=0, run__steps=1, guards__find_overflow=on)
    with pytest.raises(ModelError):
        list(grpo(run, **given()))
    told = [e for e in run.stored("events").having("kind", {"finding"}) if e["rule"] == "overflow"]
    assert [e["step"] for e in told] == ([1] if on else [])
