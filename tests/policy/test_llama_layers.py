"""The layers of our own give what transformers' give, forward and backward, or say that they do not serve."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from grpo_nb.policy import llama_layers
from grpo_nb.policy.grouped import group
from grpo_nb.policy.loading import quietly
from grpo_nb.policy.model import ModelError, Policy
from tests.support import tiny_models as tiny
from tests.support.tiny_causal import causal
from tests.support.tokens import pattern

PROMPTS = [tiny.PROMPT, tiny.PROMPT[:1], [tiny.BOS, 9, 10, 11, 12, 13, 14]]
COMPLETIONS = [tiny.COMPLETION, [8], [7, 6, 5, 9, 10, 11], tiny.COMPLETION[:2], [12, 13, 14], [8, 8]]
PROMPT_OF = [0, 0, 2, 1, 0, 2]
SERVED = ("llama", "qwen2", "qwen3", "mistral")


def learner(kind: str, train: str) -> Policy:
    model = causal(kind, **{"sliding_window": None} if kind == "mistral" else {})
    if train == "full":
        return Policy(model, tiny.tokenizer())
    targets = ["q_proj", "v_proj", "down_proj", "lm_head"] if train == "some" else "all-linear"
    made = Policy(adapted(model, r=4, lora_alpha=12, target_modules=targets), tiny.tokenizer())
    tiny.nudge(made, 0.1)
    return made


def adapted(model: PreTrainedModel, **settings: Any) -> PeftModel:
    with quietly():
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))  # type: ignore[return-value]


def both(made: Policy, temperature: float = 1.0, **settings: bool) -> tuple[Tensor, ...]:
    plain = made.collate([PROMPTS[p] for p in PROMPT_OF], COMPLETIONS)
    grouped = made.group(PROMPTS, COMPLETIONS, PROMPT_OF)
    assert torch.equal(grouped.completion_mask, plain.completion_mask)
    alone, shared = (made.logprobs(batch, temperature, **settings) for batch in (plain, grouped))
    return alone.logprobs, shared.logprobs, alone.entropy, shared.entropy


@pytest.mark.parametrize("train", ["full", "all", "some"])
@pytest.mark.parametrize("kind", SERVED)
def test_scores_and_gradients_are_transformers_own(kind: str, train: str) -> None:
    made = learner(kind, train)
    assert llama_layers.unserved(made.model) is None
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    weights = torch.randn(2, len(COMPLETIONS), 6, generator=torch.Generator().manual_seed(0))
    values = both(made, 0.7, entropy_learns=True)
    torch.testing.assert_close(values[1], values[0], atol=3e-5, rtol=0)
    torch.testing.assert_close(values[3], values[2], atol=3e-5, rtol=0)
    gradients = []
    for n in (0, 1):
        made.model.zero_grad()
        ((weights[0] * values[n]).sum() + (weights[1] * values[2 + n]).sum()).backward()
        gradients.append({name: p.grad.clone() for name, p in made.parameters_by_name().items() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() == made.parameters_by_name().keys()
    for name, gradient in gradients[0].items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(gradients[1][name], gradient, atol=2e-5 * max(1.0, largest), rtol=0)
    assert all(torch.equal(p, before[name]) for name, p in made.model.named_parameters())


@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize("switch", ["as_reference", "as_grouped_reference"])
def test_equal_weights_give_equal_bits(tmp_path: Path, train: str, switch: str) -> None:
    made = tiny.learner(train, tmp_path)
    made.freeze_reference()
    batch, flags = made.group(PROMPTS, COMPLETIONS, PROMPT_OF), tiny.flags(made)
    own = made.logprobs(batch).logprobs
    with getattr(made, switch)():
        assert torch.equal(made.logprobs(batch).logprobs, own)
    tiny.nudge(made, 0.1)
    with getattr(made, switch)():
        assert torch.equal(made.logprobs(batch).logprobs, own)
    assert not torch.equal(made.logprobs(batch).logprobs, own)
    assert tiny.flags(made) == flags


def test_completions_of_one_token(tmp_path: Path) -> None:
    made = tiny.policy()
    batch = made.group(PROMPTS, [[8], [9], [10]], [0, 1, 2])
    plain = made.collate(PROMPTS, [[8], [9], [10]])
    torch.testing.assert_close(made.logprobs(batch).logprobs, made.logprobs(plain).logprobs, atol=1e-5, rtol=0)


def test_a_row_holds_its_prompt_once_and_no_last_token() -> None:
    batch = group(PROMPTS, COMPLETIONS, PROMPT_OF, pad_id=0)
    assert batch.input_ids.shape == (3, 7 + 3 * 5) and batch.width == 7
    assert batch.input_ids[2].tolist() == PROMPTS[2] + [7, 6, 5, 9, 10] + [8, 8, 0, 0, 0] + [0] * 5
    assert batch.positions[0, :5].tolist() == [*range(5)] and batch.positions[0, 7:12].tolist() == [*range(5, 10)]
    seen = batch.mask[0, 0] == 0
    assert seen.sum(1).tolist() == [5, *[6, 7, 8, 9, 10] * 3]
    assert group(PROMPTS[:1] * 2, COMPLETIONS[:2], [0, 1], 0).mask.shape[0] == 1, "prompts of one length share a mask"


def test_equal_completions_are_computed_once() -> None:
    made = tiny.policy()
    rows = [COMPLETIONS[2], COMPLETIONS[3], COMPLETIONS[2], COMPLETIONS[2]], [0, 0, 0, 1]
    batch = made.group(PROMPTS[:2], *rows)
    assert batch.input_ids.shape == (2, 5 + 2 * 5)
    plain = made.collate([PROMPTS[p] for p in rows[1]], rows[0])
    weights = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    gradients = []
    for each in (plain, batch):
        made.model.zero_grad()
        (weights * made.logprobs(each).logprobs).sum().backward()
        gradients.append(made.model.model.layers[0].mlp.up_proj.weight.grad.clone())
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-4, rtol=0)


def test_rows_that_cannot_be_grouped_are_refused() -> None:
    made = tiny.policy()
    with pytest.raises(ModelError):
        made.group([[]], [[1]], [0])
    with pytest.raises(ModelError, match=pattern(made.context)):
        made.group([[1] * made.context], [[1]], [0])


@pytest.mark.parametrize(
    "model",
    [
        lambda: tiny.model("gpt2"),
        lambda: tiny.model("gemma3"),
        lambda: tiny.model("llama").to(torch.bfloat16),
        lambda: tiny.model("llama", hidden_act="gelu"),
        lambda: tiny.model("llama", attention_bias=True),
        lambda: tiny.model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        lambda: causal("mistral"),
        lambda: adapted(tiny.model(), use_dora=True, target_modules=["q_proj"]),
        lambda: adapted(tiny.model("qwen2"), lora_bias=True, target_modules=["q_proj"]),
        lambda: adapted(tiny.model(), target_modules=["embed_tokens"]),
        lambda: adapted(tiny.model(), target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    ],
)
def test_others_are_not_served(model) -> None:  # type: ignore[no-untyped-def]
    assert llama_layers.unserved(model()) is not None


def test_large_models_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_layers, "SMALL", 100)
    assert llama_layers.unserved(tiny.model()) is not None
