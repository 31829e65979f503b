"""model.quantize: a frozen base in 4 bits, what it is refused for, and what it takes."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from grpo_nb import presets
from grpo_nb.config import ModelConfig
from grpo_nb.exports import export
from grpo_nb.policy import quantised
from grpo_nb.policy.memory_terms import terms
from grpo_nb.policy.model import ModelError, Policy, load_policy
from grpo_nb.policy.shapes import ModelShape
from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo
from tests.support import tiny_models as tiny
from tests.support.tiny import given, rows, stable, tiny_run
from tests.support.tokens import names

PROMPTS = [[tiny.BOS, 8, 9], [tiny.BOS, 10, 12, 13]]
COMPLETIONS = [[14, 15, 16, 17], [8, 9]]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def _installed() -> bool:
    try:
        return bool(importlib.metadata.version("bitsandbytes"))
    except importlib.metadata.PackageNotFoundError:
        return False


needs_package = pytest.mark.skipif(not _installed(), reason='needs bitsandbytes: pip install "grpo_nb[nf4]"')


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.folder(tmp_path / "base", **SIZES)


def settings(base: Path | str, **changes: Any) -> ModelConfig:
    return ModelConfig(**{"name": str(base), "quantize": "nf4", "lora_rank": 4, "device": "cpu"} | changes)


def quantised_layers(policy: Policy) -> dict[str, Any]:
    import bitsandbytes

    modules = policy.model.named_modules()
    return {name: module for name, module in modules if isinstance(module, bitsandbytes.nn.Linear4bit)}


def size(layer: Any) -> int:
    """Bytes of a quantised layer: packed weights, scales, and what the scales themselves are stored by."""
    state = layer.weight.quant_state
    return sum(each.numel() * each.element_size() for each in (layer.weight, state.absmax, state.state2.absmax))


@pytest.mark.parametrize("changes", [{"train": "full"}, {"train": "lora", "shard": "fsdp2"}])
def test_what_cannot_go_with_it_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(reversed(changes))):
        ModelConfig(quantize="nf4", **changes)


def test_a_model_that_is_no_folder_of_plain_weights_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError) as caught:
        load_policy(settings("demo"))
    assert names(str(caught.value), "model.quantize='none'", "demo")
    monkeypatch.setattr(quantised, "find_spec", lambda package: None)
    with pytest.raises(ModelError) as caught:
        load_policy(settings(base))
    assert names(str(caught.value), "bitsandbytes", "accelerate", "grpo_nb[nf4]")


@pytest.mark.parametrize("method", ["fp8", "bitsandbytes"])
def test_a_model_that_is_quantised_is_not_quantised_again(
    base: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(quantised, "find_spec", lambda package: package)
    stated = json.loads((base / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (base / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ModelError) as caught:
        load_policy(settings(base))
    assert names(str(caught.value), method, "model.quantize='none'")


def test_the_planner_counts_four_bits_and_the_engines_that_serve_them() -> None:
    shape = ModelShape.from_config(tiny.model("llama", **SIZES).config)
    config = presets.gpu_24gb().replace(**{"model.quantize": "nf4"})
    found, plain = ({t.name: t for t in terms(c, shape, on_gpu=True)} for c in (config, presets.gpu_24gb()))
    rest = shape.parameters - shape.linear_weights
    assert found["weights"].bytes == round(shape.linear_weights * (0.5 + 1 / 64 + 4 / 64 / 256)) + 2 * rest
    assert found["adapters"] == plain["adapters"]
    assert "merged weights" in plain and "merged weights" not in found, "the eager engine samples"


@needs_package
def test_the_base_is_stored_in_four_bits_and_scored_by_what_they_stand_for(base: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit

    policy, plain = load_policy(settings(base)), load_policy(settings(base, quantize="none", train="lora"))
    layers, own = quantised_layers(policy), dict(plain.model.named_modules())
    shape = ModelShape.from_config(tiny.model("llama", **SIZES).config)
    assert sum(map(size, layers.values())) == pytest.approx(quantised.NF4_BYTES * shape.linear_weights, rel=0.05)
    errors = []
    for name, layer in layers.items():
        exact: Any = own[name].weight
        stored = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        errors.append(float((stored - exact).norm() / exact.norm()))
        exact.data.copy_(stored)
    assert min(errors) > 0.05 and max(errors) < 0.15, "the error of NF4 on normal weights"
    with torch.no_grad():
        batch = policy.collate(PROMPTS, COMPLETIONS)
        found, expected = (each.logprobs(batch).logprobs[batch.completion_mask] for each in (policy, plain))
    assert torch.allclose(found, expected, atol=1e-4)


@needs_package
@pytest.mark.usefixtures("narrow_model")
def test_a_run_trains_resumes_to_the_same_bits_and_exports_its_adapter(tmp_path: Path) -> None:
    load_policy(ModelConfig(name="demo", train="full", device="cpu")).save(tmp_path / "demo")
    changes = {
        "model__name": str(tmp_path / "demo"),
        "model__quantize": "nf4",
        "model__train": "lora",
        "model__lora_rank": 4,
    }
    changes |= {"sft__steps": 0, "run__checkpoint_every": 1, "algorithm__learning_rate": 1e-2}
    run, whole = (tiny_run(tmp_path, name, **changes) for name in ("run", "whole"))
    first = rows(list(grpo(run, steps=1, **given())))
    more = rows(list(grpo(Run.open(run.path), steps=2, **given())))
    assert [stable(row) for row in first + more] == [stable(row) for row in rows(list(grpo(whole, steps=2, **given())))]
    assert first[0]["grad/norm"] > 0
    made = export(run, tmp_path / "out", format="adapter")
    opened = load_policy(ModelConfig(name=str(made.folder), train="lora", device="cpu"))
    assert {key for key in opened.state()}
    with pytest.raises(Exception, match="adapter"):
        export(run, tmp_path / "merged", format="merged")
