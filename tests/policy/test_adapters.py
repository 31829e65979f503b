"""LoRA starts as the base model; the reference is the policy that was frozen, and comes and goes without a trace."""

from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model

from grpo_nb.config import ModelConfig
from grpo_nb.policy import adapters
from grpo_nb.policy.model import ModelError, Policy, load_policy
from tests.support import tiny_models as tiny
from tests.support.tokens import pattern

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own


@pytest.fixture(params=["full", "lora"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    """A policy that learns in full, and one that learns by LoRA with B away from 0."""
    return tiny.learner(request.param, tmp_path / "base")


# ---- LoRA


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_lora_is_on_every_linear_layer_but_the_head(kind: str, tmp_path: Path) -> None:
    learner = tiny.lora(tmp_path / "base", kind)
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in learner.parameters_by_name()}
    every = {"gpt2": {"c_attn", "c_proj", "c_fc"}}.get(
        kind, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    )
    assert adapted == every and not learner.full
    torch.testing.assert_close(
        tiny.score(learner), tiny.score(tiny.policy(kind)), atol=1e-6, rtol=0
    )  # B = 0: the base model


def test_lora_is_a_function_of_the_seed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    untouched = torch.get_rng_state()
    first, again, other = (tiny.lora(tmp_path / "base", seed=seed).state() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), untouched)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def reference_of(policy: Policy) -> dict[str, torch.Tensor]:
    """Copies of the reference weights."""
    assert policy._reference is not None
    return adapters.snapshot(policy._reference.state())


def test_adapters_are_float32_on_a_bfloat16_base(tmp_path: Path) -> None:
    learner = tiny.lora(tmp_path / "base", dtype="bfloat16")
    learner.freeze_reference()
    assert learner.dtype == torch.bfloat16
    assert {p.dtype for p in learner.parameters_by_name().values()} == {torch.float32}
    assert {t.dtype for t in reference_of(learner).values()} == {torch.float32}
    assert torch.isfinite(tiny.score(learner)).all()


def test_lora_targets_that_match_nothing(tmp_path: Path) -> None:
    tiny.folder(tmp_path)
    with pytest.raises(ModelError, match=pattern("lora_targets=('query',)", "q_proj")):
        load_policy(ModelConfig(name=str(tmp_path), train="lora", lora_targets=("query",), device="cpu"))


def test_nothing_to_train_is_an_error(tmp_path: Path) -> None:
    frozen = tiny.model()
    frozen.requires_grad_(False)
    with pytest.raises(ModelError, match=r"\bnothing\b.*\btrain\b"):
        Policy(frozen, tiny.tokenizer())
    tiny.lora(tmp_path / "base").save(tmp_path / "adapter")
    with pytest.raises(ModelError, match="is_trainable=True"):
        Policy(PeftModel.from_pretrained(tiny.model(), tmp_path / "adapter"), tiny.tokenizer())


def test_several_active_adapters_are_refused() -> None:
    model = get_peft_model(tiny.model(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ModelError, match=pattern("default", "other")):
        Policy(model, tiny.tokenizer())


def test_other_kinds_of_adapters_are_refused() -> None:
    with pytest.raises(ModelError, match="only LoRA"):
        Policy(get_peft_model(tiny.model(), IA3Config(task_type="CAUSAL_LM")), tiny.tokenizer())


# ---- reference


def test_the_reference_is_the_policy_that_was_frozen(either: Policy) -> None:
    assert not either.has_reference
    with pytest.raises(ModelError, match="freeze_reference"), either.as_reference():
        pass
    start, names = tiny.score(either), list(either.parameters_by_name())
    either.freeze_reference()
    with either.as_reference():
        assert torch.equal(tiny.score(either), start)
    tiny.nudge(either, 0.05)
    moved, before, state = tiny.score(either), tiny.flags(either), either.state()
    assert (moved - start).abs().max() > 0.01
    with either.as_reference():
        assert torch.equal(tiny.score(either), start)
        assert list(either.parameters_by_name()) == names
    assert torch.equal(tiny.score(either), moved) and tiny.flags(either) == before
    assert list(either.parameters_by_name()) == names
    assert all(torch.equal(state[name], tensor) for name, tensor in either.state().items())


def test_an_interrupt_inside_the_reference_gives_the_policy_back(either: Policy) -> None:
    either.freeze_reference()
    tiny.nudge(either, 0.05)
    either.model.train()
    moved, before = tiny.score(either), tiny.flags(either)
    with pytest.raises(KeyboardInterrupt), either.as_reference():
        raise KeyboardInterrupt
    assert torch.equal(tiny.score(either), moved) and tiny.flags(either) == before


@pytest.mark.parametrize("switch", ["as_reference", "as_grouped_reference"])
def test_a_reference_within_the_reference_is_the_reference(either: Policy, switch: str) -> None:
    either.freeze_reference()
    start, frozen = tiny.score(either), reference_of(either)
    tiny.nudge(either, 0.05)
    moved, state, before = tiny.score(either), either.state(), tiny.flags(either)
    inner = getattr(either, switch)
    with either.as_reference():
        with inner(), inner():
            pass
        assert torch.equal(tiny.score(either), start)
    assert torch.equal(tiny.score(either), moved) and tiny.flags(either) == before
    tiny.nudge(either, 0.05)
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in reference_of(either).items())
    assert any(not torch.equal(tensor, state[name]) for name, tensor in either.state().items())


def test_a_block_that_an_interrupt_left_open_switches_nothing_later(either: Policy) -> None:
    """Ctrl-C at the first instruction of the way out: the block is closed as it is collected, whenever that is."""
    either.freeze_reference()
    start = tiny.score(either)
    tiny.nudge(either, 0.05)
    moved = tiny.score(either)
    left = either._known_reference().active()
    left.__enter__()
    either.settle()
    assert torch.equal(tiny.score(either), moved)
    with either.as_reference():
        left.__exit__(None, None, None)
        assert torch.equal(tiny.score(either), start)
    assert torch.equal(tiny.score(either), moved)


def test_the_reference_never_learns(either: Policy) -> None:
    either.freeze_reference()
    frozen = reference_of(either)
    optimizer = torch.optim.AdamW(either.parameters_by_name().values(), lr=0.1)
    for _ in range(2):
        with either.as_reference():
            assert not tiny.score(either).requires_grad and not torch.is_grad_enabled()
        either.logprobs(either.collate([tiny.PROMPT], [tiny.COMPLETION])).logprobs.sum().backward()
        optimizer.step()
    learning = either.parameters_by_name()
    assert all(torch.equal(frozen[name], tensor) for name, tensor in reference_of(either).items())
    assert [n for n, p in either.model.named_parameters() if p.grad is not None] == list(learning)
    assert not any(p.requires_grad for n, p in either.model.named_parameters() if n not in learning)


def test_the_reference_travels_as_a_state(either: Policy, tmp_path: Path) -> None:
    either.freeze_reference()
    start = tiny.score(either)
    frozen = reference_of(either)
    tiny.nudge(either, 0.05)
    either.freeze_reference()  # moves the reference to the present weights
    with either.as_reference():
        assert (tiny.score(either) - start).abs().max() > 0.01
    either.load_reference_state(frozen)
    with either.as_reference():
        assert torch.equal(tiny.score(either), start)
    assert frozen.keys() == either.state().keys()
    with pytest.raises(ModelError, match=r"q_proj\..*\bweight\b"):
        either.load_reference_state({})


def test_a_partly_frozen_adapter_stays_partly_frozen(tmp_path: Path) -> None:
    model = tiny.lora(tmp_path / "base", seed=5).model
    frozen = next(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    model.get_parameter(frozen).requires_grad_(False)
    learner = Policy(model, tiny.tokenizer())
    tiny.nudge(learner, 0.1)
    start = tiny.score(learner)
    learner.freeze_reference()
    before = tiny.flags(learner)
    with learner.as_reference():
        assert torch.equal(tiny.score(learner), start)
        assert not any(p.requires_grad for p in model.parameters())
    assert tiny.flags(learner) == before and not model.get_parameter(frozen).requires_grad
    assert frozen not in learner.parameters_by_name()


def test_weights_that_train_beside_the_adapter(tmp_path: Path) -> None:
    model = get_peft_model(tiny.model(), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    learner = Policy(model, tiny.tokenizer())
    learner.freeze_reference()
    start = tiny.score(learner)
    tiny.nudge(learner, 0.1)
    assert (tiny.score(learner) - start).abs().max() > 0.1 and any("lm_head" in n for n in learner.state())
    with learner.as_reference():
        assert torch.equal(tiny.score(learner), start)
    model = tiny.lora(tmp_path).model
    model.get_input_embeddings().requires_grad_(True)
    with pytest.raises(ModelError, match=r"embed_tokens\.weight"):
        Policy(model, tiny.tokenizer()).freeze_reference()


def test_lora_keeps_one_copy_of_the_base(tmp_path: Path) -> None:
    learner = tiny.lora(tmp_path / "base")
    before = sum(p.numel() for p in learner.model.parameters())
    learner.freeze_reference()
    adapter = sum(p.numel() for p in learner.parameters_by_name().values())
    assert sum(p.numel() for p in learner.model.parameters()) == before + adapter


def test_a_second_policy_around_a_model_that_has_a_reference_is_one_error(tmp_path: Path) -> None:
    first = tiny.lora(tmp_path / "base")
    first.freeze_reference()
    second = Policy(first.model, first.tokenizer)
    with pytest.raises(ModelError, match=pattern("reference")):
        second.freeze_reference()
    first.freeze_reference()
