"""Requests to offload weights are refused with what to do instead."""

import pytest

from grpo_nb import presets
from grpo_nb.config import ConfigError
from grpo_nb.policy.model import Policy
from grpo_nb.policy.source import ModelError
from tests.support import tiny_models
from tests.support.tokens import pattern

INSTEAD = ("model.device", "presets.low_memory", "grpo-nb plan")


@pytest.mark.parametrize("setting", ["device_map", "max_memory", "cpu_offload"])
def test_a_setting_that_offloads_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=pattern(f"model.{setting}", *INSTEAD)):
        presets.demo().replace(**{f"model.{setting}": "auto"})


def test_a_model_with_weights_elsewhere_is_refused() -> None:
    model = tiny_models.model()
    model.get_submodule("model.layers.1").to("meta")
    with pytest.raises(ModelError, match=pattern("model.layers.1", "device_map", *INSTEAD)):
        Policy(model, tiny_models.tokenizer())
