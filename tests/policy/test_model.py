"""The policy scores what was sampled, whatever the padding, and gives back what it borrows."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_nb.config import ModelConfig, SamplingConfig
from grpo_nb.policy import logprobs
from grpo_nb.policy.model import ModelError, Policy, load_policy
from grpo_nb.rollout import EagerEngine, Request
from tests.support import tiny_models as tiny
from tests.support.tokens import names, pattern

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own


@pytest.fixture(params=["full", "lora"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    """A policy that learns in full, and one that learns by LoRA with B away from 0."""
    return tiny.learner(request.param, tmp_path / "base")


# ---- log-probs


@pytest.mark.parametrize("kind", tiny.EVERY_KIND)
def test_padding_changes_nothing(kind: str) -> None:
    learner = tiny.policy(kind)
    with learner.eval_mode():
        alone = learner.logprobs(learner.collate([tiny.PROMPT], [tiny.COMPLETION]))
        for pads in range(41):
            long = [tiny.BOS] + [8] * (len(tiny.PROMPT) - 1 + pads)
            padded = learner.collate([tiny.PROMPT, long], [tiny.COMPLETION, tiny.COMPLETION[:2] * 4])
            assert int((padded.attention_mask[0] == 0).sum()) == pads + 4
            found = learner.logprobs(padded)
            torch.testing.assert_close(found.logprobs[0, :4], alone.logprobs[0], atol=1e-5, rtol=0)
            torch.testing.assert_close(found.entropy[0, :4], alone.entropy[0], atol=1e-5, rtol=0)
            assert found.logprobs[0, 4:].abs().max() == found.entropy[0, 4:].abs().max() == 0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_are_of_the_tempered_distribution(temperature: float) -> None:
    learner = tiny.policy("gpt2")
    stats = learner.logprobs(learner.collate([tiny.PROMPT], [tiny.COMPLETION]), temperature)
    logits = learner.model(torch.tensor([tiny.PROMPT + tiny.COMPLETION])).logits[0, len(tiny.PROMPT) - 1 : -1].double()
    expected = torch.log_softmax(logits / temperature, -1)
    at_tokens = expected[range(4), tiny.COMPLETION]
    torch.testing.assert_close(stats.logprobs[0].double(), at_tokens, atol=1e-5, rtol=0)
    torch.testing.assert_close(stats.entropy[0].double(), -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=0)
    divided_after = torch.log_softmax(logits, -1)[range(4), tiny.COMPLETION] / temperature
    assert temperature == 1 or (at_tokens - divided_after).abs().max() > 0.1  # the test tells the two apart


def test_gradients_flow_through_logprobs_only_where_enabled() -> None:
    learner = tiny.policy()
    batch = learner.collate([tiny.PROMPT], [tiny.COMPLETION])
    stats = learner.logprobs(batch)
    assert stats.logprobs.requires_grad and not stats.entropy.requires_grad
    stats.logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in learner.parameters_by_name().values())
    with learner.eval_mode():
        assert not learner.logprobs(batch).logprobs.requires_grad


@pytest.mark.parametrize("entropy_learns", [False, True])
def test_forbidden_tokens_leave_entropy_and_gradients_finite(
    monkeypatch: pytest.MonkeyPatch, entropy_learns: bool
) -> None:
    """Logits of -inf, as models have that mask part of their vocabulary: 0 log 0 is 0, not NaN."""
    learner = tiny.policy()
    batch = learner.collate([tiny.PROMPT], [tiny.COMPLETION])
    plain = logprobs._completion_logits

    def masked(model: Any, batch: Any) -> Any:
        logits = plain(model, batch)
        return torch.where(torch.arange(logits.shape[-1]) == tiny.UNK, -torch.inf, logits)

    monkeypatch.setattr(logprobs, "_completion_logits", masked)
    stats = learner.logprobs(batch, entropy_learns=entropy_learns)
    p = masked(learner.model, batch)[0].detach().double().softmax(-1)
    expected = torch.special.entr(p).sum(-1)
    torch.testing.assert_close(stats.entropy[0].double().detach(), expected, atol=1e-5, rtol=0)
    assert stats.entropy.requires_grad == entropy_learns
    (stats.logprobs.sum() + stats.entropy.sum()).backward()
    assert all(p.grad.isfinite().all() for p in learner.parameters_by_name().values() if p.grad is not None)


def test_only_the_completion_reaches_the_output_head() -> None:
    learner = tiny.policy()
    seen: list[int] = []
    learner.model.lm_head.register_forward_hook(lambda _m, _i, output: seen.append(output.shape[1]))
    learner.logprobs(learner.collate([tiny.PROMPT * 6], [tiny.COMPLETION]))
    assert seen == [len(tiny.COMPLETION) + 1]


def test_logprobs_are_float32_under_a_bfloat16_model() -> None:
    learner = tiny.policy()
    learner.model.to(torch.bfloat16)
    assert tiny.score(learner).dtype == torch.float32 and learner.dtype == torch.bfloat16
    assert tiny.score(learner).exp().max() <= 1


def test_collate_masks_by_position_whatever_the_ids() -> None:
    learner = tiny.policy()
    batch = learner.collate([[8], [8, learner.pad_id]], [[learner.pad_id, tiny.END, tiny.EOS], []])
    assert batch.attention_mask.tolist() == [[0, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.completion_mask.tolist() == [[True] * 3, [False] * 3]
    stats = learner.logprobs(batch)
    assert stats.logprobs[1].abs().sum() == 0 and stats.logprobs[0].abs().min() > 0
    assert learner.logprobs(learner.collate([[8]], [[]])).logprobs.shape == (1, 0)


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        ([[8]], [], "1 prompts for 0 completions"),
        ([], [], "0 prompts"),
        ([[8], []], [[9], [9]], "prompt"),
        ([[8] * 100], [[9] * 40], "140 .*128"),
    ],
)
def test_collate_refuses(prompts: Any, completions: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tiny.policy().collate(prompts, completions)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_training_mode_has_no_dropout(kind: str) -> None:
    dropping: dict[str, Any] = {"attention_dropout": 0.3}
    if kind == "gpt2":
        dropping = {"attn_pdrop": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3}
    learner = tiny.policy(kind, **dropping)
    expected = tiny.score(learner)
    learner.model.train()
    assert torch.equal(tiny.score(learner), expected)
    assert names(str(learner.describe()["notes"]), "dropout", 0)


# ---- flags


def test_scoring_restores_every_flag(either: Policy) -> None:
    tiny.base(either).activation_checkpointing_enable()
    either.model.train()
    next(m for name, m in either.model.named_modules() if name.endswith("mlp")).eval()
    before = tiny.flags(either)

    def meddle() -> None:
        with either.eval_mode():
            assert not any(m.training for m in either.model.modules()) and not torch.is_grad_enabled()
            tiny.base(either).activation_checkpointing_disable()
            either.model.config.use_cache = not before[2]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        meddle()
    assert tiny.flags(either) == before and torch.is_grad_enabled()


def test_checkpointed_gradients_are_the_same(tmp_path: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        learner = tiny.lora(tmp_path / "base", gradient_checkpointing=checkpointing)
        tiny.nudge(learner, 0.1)
        layers: list[bool] = []
        tiny.base(learner).model.layers[0].self_attn.register_forward_pre_hook(
            lambda *_, layers=layers: layers.append(torch.is_grad_enabled())
        )
        learner.logprobs(learner.collate([tiny.PROMPT], [tiny.COMPLETION])).logprobs.sum().backward()
        assert len(layers) == 1 + checkpointing  # once more in the backward pass
        gradients.append([p.grad for p in learner.parameters_by_name().values()])
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-5)


# ---- state and files


def test_state_comes_back_bit_for_bit(either: Policy) -> None:
    state, expected = either.state(), tiny.score(either)
    assert all(t.device.type == "cpu" and t.is_contiguous() and not t.requires_grad for t in state.values())
    pointers = {name: p.data_ptr() for name, p in either.parameters_by_name().items()}
    tiny.nudge(either, 0.1)
    assert not torch.equal(tiny.score(either), expected)
    either.load_state(state)
    assert torch.equal(tiny.score(either), expected)
    assert {name: p.data_ptr() for name, p in either.parameters_by_name().items()} == pointers  # the optimizer's


def test_a_state_that_does_not_fit_is_refused_whole(either: Policy) -> None:
    state, expected = either.state(), tiny.score(either)
    tiny.nudge(either, 0.1)
    moved = tiny.score(either)
    first, second, *_ = state
    bad = {"stranger": torch.zeros(1)} | {name: t for name, t in state.items() if name != first}
    bad[second] = bad[second].double()
    message = rf"missing {first}; unexpected stranger; {second} is float64\[.*\], needs float32"
    with pytest.raises(ModelError, match=message.replace(".", r"\.").replace(r"\.*", ".*")):
        either.load_state(bad)
    assert torch.equal(tiny.score(either), moved) and not torch.equal(moved, expected)


def test_a_saved_adapter_loads_here_and_in_plain_peft(tmp_path: Path) -> None:
    learner = tiny.lora(tmp_path / "base", seed=1)
    tiny.nudge(learner, 0.1)
    learner.freeze_reference()
    learner.save(tmp_path / "adapter")
    expected = tiny.score(learner)
    files = {p.name for p in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files and "reference" not in files
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as weights:
        assert len(weights.keys()) == len(learner.state())
    again = load_policy(ModelConfig(name=str(tmp_path / "adapter"), device="cpu"), seed=9)
    assert torch.equal(tiny.score(again), expected) and not again.full
    assert again.describe()["train"] == "lora, rank 4"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain = PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True)
    assert torch.equal(tiny.score(Policy(plain, tiny.tokenizer())), expected)


def test_a_saved_model_loads_here_and_in_plain_transformers(tmp_path: Path) -> None:
    learner = tiny.policy("gpt2", attn_pdrop=0.1)
    tiny.nudge(learner, 0.1)
    learner.save(tmp_path)
    again = load_policy(ModelConfig(name=str(tmp_path), device="cpu"))
    assert again.full and torch.equal(tiny.score(again), tiny.score(learner))
    assert again.encode(tiny.CHAT) == learner.encode(tiny.CHAT)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config.attn_pdrop == 0.1  # the model is given back as it came
    assert torch.equal(tiny.score(Policy(plain, AutoTokenizer.from_pretrained(tmp_path))), tiny.score(learner))


def test_an_adapter_of_the_demo_finds_its_base_whatever_the_seed(tmp_path: Path) -> None:
    learner = load_policy(ModelConfig(name="demo", train="lora", device="cpu"), seed=3)
    tiny.nudge(learner, 0.1)
    learner.save(tmp_path)
    again = load_policy(ModelConfig(name=str(tmp_path), device="cpu"), seed=0)
    batch = learner.collate([tiny.PROMPT], [tiny.COMPLETION])
    assert torch.equal(again.logprobs(batch).logprobs, learner.logprobs(batch).logprobs)


def test_saving_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=pattern(tmp_path / "file" / "model")):
        tiny.policy().save(tmp_path / "file" / "model")


# ---- a real model


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    if not (path := os.environ.get("GRPO_NB_SMOLLM2")):
        pytest.skip("GRPO_NB_SMOLLM2 is not set to the path of SmolLM2-135M-Instruct.Q4_1.gguf")
    return load_policy(ModelConfig(name=path, device="cpu"))


@pytest.mark.slow
def test_smollm2_from_gguf(smollm2: Policy, tmp_path: Path) -> None:
    assert smollm2.describe()["stop tokens"] == {"<|im_end|>": 2} and smollm2.pad_id != 2
    assert not smollm2.full and smollm2.tokenization.turn_end == 2
    ids = smollm2.encode([{"role": "user", "content": "What is the capital of France?"}])
    target = smollm2.encode_completion("The capital of France is Paris.")
    with smollm2.eval_mode():
        alone = smollm2.logprobs(smollm2.collate([ids], [target])).logprobs[0]
        padded = smollm2.logprobs(smollm2.collate([ids, [1] * 60], [target, target])).logprobs[0]
    assert alone.mean() > math.log(0.4)
    torch.testing.assert_close(padded, alone, atol=2e-4, rtol=0)
    sampling = SamplingConfig(max_completion_length=24)
    answers = EagerEngine().generate(smollm2, Request([ids, ids[:20] + ids[-10:]], 2, sampling, greedy=True))
    assert "Paris" in answers.texts[0] and answers.texts[0] == answers.texts[1] and answers.stop_reasons[0] == "stop"
    smollm2.save(tmp_path)
    again = load_policy(ModelConfig(name=str(tmp_path), device="cpu"))
    with again.eval_mode():
        assert torch.equal(again.logprobs(again.collate([ids], [target])).logprobs[0], alone)


def test_eval_mode_reaches_every_module_and_leaves_each_as_it_was(either: Policy) -> None:
    modules = list(either.model.modules())
    for place, module in enumerate(modules):
        module.training = place % 3 > 0
    with either.eval_mode():
        assert not any(module.training for module in modules)
    assert [module.training for module in modules] == [place % 3 > 0 for place in range(len(modules))]
