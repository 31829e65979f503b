"""A line of tokens gives the log-probs, entropies and gradients of the model's own pass on padded rows."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_nb import passes
from grpo_nb.passes import model
from grpo_nb.passes.attention import allowed
from grpo_nb.policy.model import Policy
from grpo_nb.types import TokenStats
from tests.passes.conftest import Make
from tests.support import tiny_models as tiny

PROMPTS = [tiny.PROMPT, tiny.PROMPT[:2], [tiny.BOS, 9, 10, 11, 12, 13, 14]]
COMPLETIONS = [tiny.COMPLETION, [8], [7, 6, 5, 9, 10, 11], tiny.COMPLETION[:2], [12, 13, 14], [8, 8]]
PROMPT_OF = [0, 0, 2, 1, 0, 2]
KINDS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16, "attention_bias": True},
    "mistral": {"sliding_window": 5, "num_hidden_layers": 1},
}
WEIGHTS = torch.randn(2, len(COMPLETIONS), 6, generator=torch.Generator().manual_seed(0))


def rows(learner: Policy, **settings: Any) -> TokenStats:
    return learner.logprobs(learner.collate([PROMPTS[p] for p in PROMPT_OF], COMPLETIONS), 0.7, **settings)


def line(learner: Policy, shares: bool = True, **settings: Any) -> TokenStats:
    return passes.token_stats(learner, passes.flatten(PROMPTS, COMPLETIONS, PROMPT_OF, shares), 0.7, **settings)


def gradients(learner: Policy, found: TokenStats, entropy_learns: bool = False) -> dict[str, Tensor]:
    parameters = learner.parameters_by_name()
    loss = (WEIGHTS[0] * found.logprobs).sum() + ((WEIGHTS[1] * found.entropy).sum() if entropy_learns else 0.0)
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype
        torch.testing.assert_close(found[name], gradient, atol=1e-5 * float(gradient.abs().max() + 1), rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("entropy_learns", [False, True])
def test_numbers_and_gradients_are_the_models_own(lora: Make, kind: str, shares: bool, entropy_learns: bool) -> None:
    learner = lora(kind, **KINDS[kind])
    assert model.unserved(learner, ("cpu",)) is None
    shares &= passes.shares(learner, PROMPTS, COMPLETIONS, PROMPT_OF)
    expected, found = rows(learner, entropy_learns=entropy_learns), line(learner, shares, entropy_learns=entropy_learns)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.entropy, expected.entropy, atol=1e-5, rtol=0)
    assert found.entropy.requires_grad is entropy_learns
    close(gradients(learner, found, entropy_learns), gradients(learner, expected, entropy_learns))


def test_prompts_are_shared_but_behind_a_window(lora: Make) -> None:
    learner = lora("mistral", sliding_window=5)
    assert not passes.shares(learner, PROMPTS, COMPLETIONS, PROMPT_OF)
    assert passes.shares(lora("mistral", sliding_window=13), PROMPTS, COMPLETIONS, PROMPT_OF)
    assert not passes.shares(lora(), PROMPTS, COMPLETIONS[:3], [0, 1, 2])


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["k_proj", "up_proj"]])
def test_adapters_on_some_layers_only(lora: Make, targets: list[str]) -> None:
    learner = lora("qwen3", targets)
    close(gradients(learner, line(learner)), gradients(learner, rows(learner)))


def test_checkpointed_layers_give_the_same_gradients(lora: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = lora()
    plain = gradients(learner, line(learner))
    kept: list[type] = []
    forward = model.Run.forward

    def watched(self: model.Run, *arguments: Any) -> Any:
        scored = forward(self, *arguments)
        kept.extend(map(type, self.kept))
        return scored

    monkeypatch.setattr(model.Run, "forward", watched)
    base: Any = learner.model.get_base_model()  # type: ignore[operator]
    base.train()
    base.activation_checkpointing_enable()
    light = gradients(learner, line(learner))
    assert kept == [Tensor, Tensor], "of each layer one sum and nothing else"
    assert all(torch.equal(light[name], gradient) for name, gradient in plain.items())


def test_equal_weights_give_equal_bits_under_the_reference(lora: Make) -> None:
    learner = lora()
    learner.freeze_reference()
    trained = line(learner)
    with learner.as_reference():
        assert torch.equal(line(learner).logprobs, trained.logprobs)
    tiny.nudge(learner, 0.1)
    with learner.as_reference():
        reference = line(learner).logprobs
    assert torch.equal(reference, trained.logprobs) and not torch.equal(line(learner).logprobs, reference)


def test_pieces_of_the_head_change_nothing(lora: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = lora()
    whole, expected = line(learner), gradients(learner, line(learner))
    monkeypatch.setattr("grpo_nb.passes.head.LEAST", 4)
    monkeypatch.setattr("grpo_nb.passes.head.PIECE", 0)
    torch.testing.assert_close(line(learner).logprobs, whole.logprobs, atol=1e-6, rtol=0)
    close(gradients(learner, line(learner)), expected)


def test_a_pass_is_gone_when_its_numbers_are(lora: Make) -> None:
    learner = lora()
    batch = passes.flatten(PROMPTS, COMPLETIONS, PROMPT_OF, True)
    ids = weakref.ref(batch)
    found = passes.token_stats(learner, batch)
    del batch
    gc.disable()
    try:
        del found
        assert ids() is None, "no circle keeps what a pass held"
    finally:
        gc.enable()


def test_a_second_backward_pass_is_refused(lora: Make) -> None:
    learner = lora()
    loss = line(learner).logprobs.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()


def test_a_line_wastes_no_token() -> None:
    batch = passes.flatten(PROMPTS, COMPLETIONS, PROMPT_OF, True)
    assert len(batch.input_ids) == sum(map(len, PROMPTS)) + sum(map(len, COMPLETIONS))
    assert batch.input_ids[: batch.tree.shared].tolist() == [token for prompt in PROMPTS for token in prompt]
    seen = allowed(batch.tree, None).sum(1)
    assert (seen == batch.position_ids + 1).all(), "each token sees as many as stand before it in its text"
    assert batch.completion_mask.sum(1).tolist() == list(map(len, COMPLETIONS)) and len(batch) == len(COMPLETIONS)
    alone = passes.flatten(PROMPTS, COMPLETIONS, PROMPT_OF, False)
    assert len(alone.input_ids) == sum(len(PROMPTS[p]) for p in PROMPT_OF) + sum(map(len, COMPLETIONS))
    assert (allowed(alone.tree, None).sum(1) == alone.position_ids + 1).all()
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.tree.spans.ends, batch.tree.spans.ends) and moved.tree.spans.ends.dtype == torch.int32
    assert moved.completion_mask.dtype == torch.bool and torch.equal(moved.places, batch.places)


def test_other_policies_keep_their_own_passes(lora: Make) -> None:
    assert not passes.serves(lora()), "a CPU is served by its own kind of passes"
    for other in (tiny.policy(), lora("gemma3"), lora("gpt2"), lora("llama", ["q_proj", "lm_head"])):
        assert model.unserved(other, ("cpu",)) is not None


def test_a_model_that_computes_otherwise_is_not_served(lora: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "unserved", lambda policy: None)
    assert passes.serves(lora())
    scaled = lora()
    scaled.model.get_base_model().lm_head.register_forward_hook(lambda *call: 0.5 * call[-1])  # type: ignore[operator]
    assert not passes.serves(scaled)


def test_a_model_that_moves_is_found_again(lora: Make) -> None:
    learner = lora()
    line(learner)
    for parameter in learner.model.get_base_model().parameters():  # type: ignore[operator]
        parameter.data = 0.9 * parameter.data
    torch.testing.assert_close(line(learner).logprobs, rows(learner).logprobs, atol=1e-5, rtol=0)
