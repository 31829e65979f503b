"""An adapter opens only where every one of its tensors finds its place, and comes back from disk as it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from grpo_nb.config import ModelConfig
from grpo_nb.policy.model import ModelError, Policy, load_policy
from tests.support import tiny_models as tiny
from tests.support.tokens import names

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own

WEIGHTS = "adapter_model.safetensors"


def opened(folder: Path) -> Policy:
    return load_policy(ModelConfig(name=str(folder), train="lora", device="cpu"))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        opened(folder)
    return str(caught.value)


def trained(folder: Path, model: PreTrainedModel, embeddings: bool = False, **settings: Any) -> PeftModel:
    """A LoRA model with random weights, saved as `adapter`, on a base that lies in `base`."""
    config = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | settings
    wrapped = get_peft_model(model, LoraConfig(**config))
    wrapped.peft_config["default"].base_model_name_or_path = str(folder / "base")
    with torch.no_grad():
        for number, parameter in enumerate(p for p in wrapped.parameters() if p.requires_grad):
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    wrapped.save_pretrained(folder / "adapter", save_embedding_layers=embeddings)
    return wrapped.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(torch.tensor([tiny.PROMPT + tiny.COMPLETION])).logits
        return result


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """28 tensors on a Llama, with random B."""
    tiny.folder(tmp_path / "base")
    trained(tmp_path, tiny.model())
    return tmp_path / "adapter"


# ---- tensors that do not fit


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> str:
    """What the adapter is refused with after a change of its file."""
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})
    return refusal(folder)


def test_tensors_of_another_class_are_counted_and_named(adapter: Path) -> None:
    def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace("model.layers", "model.language_model.layers"): t for name, t in tensors.items()}

    said = rewritten(adapter, renamed)
    assert names(said, "28 of 28", 28, "LlamaForCausalLM")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in said
    assert "base_model.model.model.language_model.layers.0" in said and "25 more" in said


def test_one_tensor_that_is_missing_and_one_too_many(adapter: Path) -> None:
    key = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    said = rewritten(adapter, lambda tensors: {name: t for name, t in tensors.items() if name != key})
    assert names(said, "1 of 28", f"({key})")


@pytest.mark.parametrize(
    "name", ["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", "base_model.model.model.norm.weight"]
)
def test_a_tensor_that_belongs_to_nothing_or_to_the_base_model(adapter: Path, name: str) -> None:
    said = rewritten(adapter, lambda tensors: tensors | {name: torch.zeros(32)})
    assert names(said, 1, f"({name})") and " of 28" not in said


def test_tensors_of_another_rank(adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 8}))
    said = refusal(adapter)
    assert names(said, 28, "[4, 32]", "[8, 32]")


def test_a_module_to_save_that_is_not_in_the_file(adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"modules_to_save": ["lm_head"]}))
    assert names(refusal(adapter), "1 of 29", "(base_model.model.lm_head.weight)")


# ---- a vocabulary that grew


def grown(folder: Path, **settings: Any) -> PeftModel:
    """A base model of 25 tokens and an adapter on it, which names the model of 24 as its base."""
    tokens, model = tiny.tokenizer(), tiny.model()
    tiny.folder(folder / "base")
    tokens.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    model.resize_token_embeddings(len(tokens))
    model.save_pretrained(folder / "grown")
    for place in ("grown", "adapter"):
        tokens.save_pretrained(folder / place)
    return trained(folder, model, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"embeddings": True},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"trainable_token_indices": [24]},
    ],
    ids=["embeddings", "modules_to_save", "lora on the embedding", "lora on the head", "token indices"],
)
def test_a_grown_vocabulary_is_named_with_both_sizes(tmp_path: Path, settings: dict[str, Any]) -> None:
    grown(tmp_path, **settings)
    said = refusal(tmp_path / "adapter")
    assert names(said, 25, 24, "resize_token_embeddings(25)", "merge") and "copy" not in said.lower()


def test_the_resized_base_takes_the_adapter_and_its_embeddings_are_saved_again(tmp_path: Path) -> None:
    wrapped = grown(tmp_path)
    with torch.no_grad():  # embeddings that moved with the training, which only the adapter's file has
        wrapped.get_input_embeddings().weight += 0.1
    wrapped.peft_config["default"].base_model_name_or_path = str(tmp_path / "grown")
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    again = opened(tmp_path / "adapter")
    assert torch.equal(logits(again.model), logits(wrapped))
    again.save(tmp_path / "saved")
    assert torch.equal(logits(opened(tmp_path / "saved").model), logits(wrapped))


# ---- kinds of LoRA


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 4}}, 28),
        ({"use_dora": True}, 42),
        ({"use_rslora": True}, 28),
        ({"modules_to_save": ["lm_head"]}, 29),
        ({"trainable_token_indices": [3, 4]}, 29),
        ({"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]}, 8),
        ({"init_lora_weights": "pissa"}, 28),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_kind_of_lora_loads_trains_with_a_reference_and_is_saved(
    tmp_path: Path, settings: dict[str, Any], tensors: int
) -> None:
    tiny.folder(tmp_path / "base")
    expected = logits(trained(tmp_path, tiny.model(), **settings))
    learner = opened(tmp_path / "adapter")
    assert torch.equal(logits(learner.model), expected) and len(learner.state()) == tensors
    learner.freeze_reference()
    tiny.score(learner)
    learner.logprobs(learner.collate([tiny.PROMPT], [tiny.COMPLETION])).logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in learner.parameters_by_name().values())
    start = tiny.score(learner)
    tiny.nudge(learner, 0.1)
    assert not torch.equal(tiny.score(learner), start)
    with learner.as_reference():
        assert torch.equal(tiny.score(learner), start)
    learner.save(tmp_path / "saved")
    assert torch.equal(tiny.score(opened(tmp_path / "saved")), tiny.score(learner))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "all"),
        ("bias", "lora_only"),
        ("layer_replication", [[0, 2], [0, 2]]),
        ("alora_invocation_tokens", [5]),
        ("arrow_config", {"top_k": 2}),
        ("monteclora_config", {}),
    ],
)
def test_a_kind_that_cannot_be_trained_is_refused_before_the_base_model_is_read(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any
) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    assert f"{field}={value!r}" in refusal(adapter)


def test_a_kind_that_cannot_be_trained_is_refused_in_memory_too() -> None:
    model = get_peft_model(tiny.model(), LoraConfig(r=2, target_modules=["q_proj"], bias="all"))
    with pytest.raises(ModelError, match="bias='all'"):
        Policy(model, tiny.tokenizer())


@pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"
)  # peft's own, of its own pattern
def test_experts_are_adapted_and_have_a_reference(tmp_path: Path) -> None:
    shape = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16}
    settings = Qwen3MoeConfig(**shape, num_experts=4, num_experts_per_tok=2, eos_token_id=tiny.EOS)
    model = AutoModelForCausalLM.from_config(settings)
    model.save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    fresh = opened(tmp_path / "base")
    assert sum("experts" in name for name in fresh.parameters_by_name()) == 8
    wanted = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    expected = logits(trained(tmp_path, model, target_modules=["q_proj"], target_parameters=wanted))
    tiny.tokenizer().save_pretrained(tmp_path / "adapter")
    for learner in (fresh, opened(tmp_path / "adapter")):
        learner.freeze_reference()
        start = tiny.score(learner)
        tiny.nudge(learner, 0.1)
        assert not torch.equal(tiny.score(learner), start)
        with learner.as_reference():
            assert torch.equal(tiny.score(learner), start)
    assert torch.equal(logits(opened(tmp_path / "adapter").model), expected)
