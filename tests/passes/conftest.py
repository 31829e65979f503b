"""Flat passes on the CPU, in float32, where they can be compared with the model's own to rounding."""

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model

from grpo_nb.policy.loading import quietly
from grpo_nb.policy.model import Policy
from tests.support import tiny_models as tiny

Make = Callable[..., Policy]


@pytest.fixture
def lora() -> Make:
    """A policy of some kind with adapters whose B is away from 0, and norms away from 1."""

    def make(kind: str = "llama", targets: str | list[str] = "all-linear", **settings: object) -> Policy:
        base = tiny.model(kind, **settings)
        generator = torch.Generator().manual_seed(7)
        for name, parameter in base.named_parameters():
            if "norm" in name:
                parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
        config = LoraConfig(
            r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=kind == "gpt2"
        )
        with quietly():
            learner = Policy(get_peft_model(base, config), tiny.tokenizer())
        tiny.nudge(learner, 0.1)
        return learner

    return make
