"""A model is drawn from and scored rightly, whatever its layers are, or it is refused before any work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo_nb.config import SamplingConfig
from grpo_nb.policy.model import ModelError, Policy, load_policy
from grpo_nb.preflight import requirements
from grpo_nb.rollout import EagerEngine, Request, selfcheck
from grpo_nb.rollout.selfcheck import check_model
from grpo_nb.training.grpo import grpo
from tests.support import tiny_models as tiny
from tests.support.tiny import small_tasks, tiny_run
from tests.support.tiny_causal import causal
from tests.support.tokens import pattern

pytestmark = pytest.mark.usefixtures("narrow_model")

RIGHT = ("llama", "gpt2", "gemma3_text", "gpt_oss", "mixtral", "mamba", "falcon_mamba", "mamba2", "lfm2", "olmo_hybrid")
REFUSED = ("bart", "bert", "rwkv")
EITHER = ("jamba", "recurrent_gemma", "qwen3_next", "falcon_h1")
PROMPTS = [[1, 8, 9, 10, 11, 12, 13], [1, 8, 9], [10, 11]]


def policy_of(kind: str, **settings: Any) -> Policy:
    return Policy(causal(kind, **settings), tiny.tokenizer())


def worst(policy: Policy) -> float:
    """Largest |Δ log p| between tokens as they are drawn together and as each row alone is scored."""
    sampling = SamplingConfig(max_completion_length=5, temperature=1.0)
    uniforms = torch.rand(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    drawn = EagerEngine().generate(policy, Request(PROMPTS, 2, sampling, uniforms))
    gaps = []
    for i, ids in enumerate(drawn.completion_ids):
        with policy.eval_mode():
            alone = policy.logprobs(policy.collate([PROMPTS[i // 2]], [ids])).logprobs[0]
        gaps.append(float((alone - torch.tensor(drawn.logprobs[i])).abs().max()))
    return max(gaps)


def is_right(policy: Policy) -> bool:
    """Whether the check lets it through; what it lets through must be right."""
    try:
        check_model(policy)
    except ModelError:
        return False
    assert worst(policy) < 1e-3
    return True


@pytest.mark.parametrize("kind", RIGHT)
def test_these_are_drawn_from_rightly(kind: str) -> None:
    assert is_right(policy_of(kind))


@pytest.mark.parametrize("kind", REFUSED)
def test_these_are_refused(kind: str) -> None:
    assert not is_right(policy_of(kind))


@pytest.mark.parametrize("kind", EITHER)
def test_hybrids_are_right_or_refused(kind: str) -> None:
    is_right(policy_of(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {*RIGHT, *REFUSED, *EITHER, "blt"}))
def test_every_causal_model_is_right_or_refused(kind: str) -> None:
    try:
        policy = policy_of(kind)
    except Exception as error:
        pytest.skip(f"cannot be made tiny: {type(error).__name__}")
    is_right(policy)


# ---- faults that the check must see


def test_a_decoding_step_that_is_another_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_nb.rollout.eager._attends", lambda cache: True)
    with pytest.raises(ModelError, match="MambaForCausalLM"):
        check_model(policy_of("mamba"))
    check_model(policy_of("mamba"), draws=False)


def test_scores_that_depend_on_padding_are_refused() -> None:
    with pytest.raises(ModelError, match=pattern("BartForCausalLM", "padding")):
        check_model(policy_of("bart"), draws=False)


def test_noise_of_an_unknown_name_is_refused() -> None:
    policy = tiny.policy()
    policy.model.model.norm.register_forward_hook(
        lambda module, _, output: output * (1 + 0.5 * torch.rand_like(output)) if module.training else output
    )
    check_model(policy)
    policy.agrees.clear()
    policy.model.train()
    with pytest.raises(ModelError, match=pattern("LlamaForCausalLM", "eval")):
        check_model(policy)


def test_a_model_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny.policy()
    check_model(policy)
    monkeypatch.setattr(EagerEngine, "generate", None)
    check_model(policy)
    check_model(policy, draws=False)


def test_policies_of_the_same_files_are_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    measured = selfcheck._measured
    monkeypatch.setattr(selfcheck, "_measured", lambda *given: (asked.append(given[2]), measured(*given))[1])
    tiny.policy().save(tmp_path / "model")
    model = tiny.ModelConfig(name=str(tmp_path / "model"), device="cpu", train="full")
    for _ in range(3):
        check_model(selfcheck.load_alike(model, 0))
    assert asked == [True]
    check_model(load_policy(model), draws=False)
    check_model(selfcheck.load_alike(model.model_copy(update={"train": "lora"}), 0), draws=False)
    assert asked == [True, False, False], "other settings, and one that somebody may have changed"
    tiny.policy().save(tmp_path / "model")
    check_model(selfcheck.load_alike(model, 0))
    assert len(asked) == 4, "other files"


def test_the_warm_up_and_grpo_refuse_it_before_any_step(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    with pytest.raises(ModelError, match="padding"):
        requirements.check_ahead(run.config, run.path, policy_of("bart"))
    with pytest.raises(ModelError, match="padding"):
        next(iter(grpo(run, tasks=small_tasks(), policy=policy_of("bart"))))
    assert not run.has_work()


def test_half_precision_is_no_reason_to_refuse() -> None:
    for kind in ("llama", "mamba"):
        model = causal(kind)
        model.bfloat16()
        check_model(Policy(model, tiny.tokenizer()))


# ---- routers and what configurations hold


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_router_outputs_and_noise_are_off_and_come_back_when_saved(kind: str, tmp_path: Path) -> None:
    noisy = {"output_router_logits": True, "router_jitter_noise": 0.5, "attention_dropout": 0.4}
    loud, plain = policy_of(kind, **noisy), policy_of(kind)
    loud.model.train()
    check_model(loud)
    assert torch.equal(tiny.score(loud), tiny.score(plain))
    assert worst(loud) < 1e-3
    loud.save(tmp_path)
    again = load_policy(tiny.ModelConfig(name=str(tmp_path), device="cpu"))
    saved = (tmp_path / "config.json").read_text()
    assert '"output_router_logits": true' in saved and '"attention_dropout": 0.4' in saved
    assert again.model.config.attention_dropout == 0 and not again.model.config.output_router_logits
