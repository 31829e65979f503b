"""A model that reads images too learns in its language model, which is all that a text reaches."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from grpo_nb import optim
from grpo_nb.config import ModelConfig, SamplingConfig
from grpo_nb.policy import adapters
from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.policy.shapes import shape_of
from grpo_nb.rollout import EagerEngine, Request
from grpo_nb.training import parts
from tests.support import multimodal, tiny
from tests.support import tiny_models as models
from tests.support.tokens import names

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own


def saved(folder: Path, kind: str) -> Path:
    multimodal.model(kind).save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return folder


def quick(*kinds: str) -> pytest.MarkDecorator:
    """Every kind, of which these are tried in `make test` and the others in `make test-all`."""
    marks = {kind: () if kind in kinds else (pytest.mark.slow,) for kind in multimodal.KINDS}
    return pytest.mark.parametrize("kind", [pytest.param(kind, marks=found) for kind, found in marks.items()])


@quick("gemma3", "llava", "qwen2_5_vl", "mllama")
def test_every_adapter_weight_of_auto_gets_a_gradient(kind: str) -> None:
    learner = Policy(adapters.attach(multimodal.model(kind), ModelConfig(lora_rank=4), "base", 0), models.tokenizer())
    models.nudge(learner, 0.1)
    learner.logprobs(learner.collate([models.PROMPT], [models.COMPLETION])).logprobs.sum().backward()
    parameters = learner.parameters_by_name()
    assert all(p.grad is not None and bool(p.grad.abs().max() > 0) for p in parameters.values())
    decoder = adapters._name_of(learner.model, models.base(learner).get_decoder())
    adapted = {name.partition(".lora_")[0] for name in parameters}
    assert len(adapted) >= 8 and all(name.startswith(decoder) for name in adapted)
    assert names(str(learner.describe()["notes"]), "adapters", "language model")


@quick("gemma3", "qwen2_5_vl")
def test_a_folder_of_it_is_sampled_from_and_scored_like_a_model_of_text(kind: str, tmp_path: Path) -> None:
    if kind == "mllama":
        pytest.skip("transformers opens its folder as the language model alone")
    config = ModelConfig(name=str(saved(tmp_path, kind)), train="lora", lora_rank=4, device="cpu")
    learner = load_policy(config)
    prompts = [models.PROMPT, models.PROMPT * 2]
    sampling = SamplingConfig(max_completion_length=6, temperature=1.0)
    drawn = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rollouts = EagerEngine().generate(learner, Request(prompts, 2, sampling, drawn))
    found = learner.logprobs(learner.collate([p for p in prompts for _ in range(2)], rollouts.completion_ids)).logprobs
    for row, logprobs in zip(found, rollouts.logprobs, strict=True):
        torch.testing.assert_close(row[: len(logprobs)], torch.tensor(logprobs), atol=1e-4, rtol=0)
    shape = shape_of(config.name)
    adapter = [
        p for name, p in learner.parameters_by_name().items() if "experts" not in name and "mlp.gate." not in name
    ]
    assert sum(p.numel() for p in adapter) == 4 * shape.linear_sizes and shape.vocabulary == multimodal.IMAGE + 1


def test_adapters_that_a_person_put_on_the_tower_are_noted() -> None:
    model = get_peft_model(multimodal.model("gemma3"), LoraConfig(r=2, target_modules="all-linear"))
    notes = str(Policy(model, models.tokenizer()).describe()["notes"])
    assert names(notes, "18 adapter weights")


def test_a_model_of_text_has_neither_note_nor_exclusions() -> None:
    wrapped = adapters.attach(models.model(), ModelConfig(), "base", 0)
    assert wrapped.peft_config["default"].exclude_modules is None
    assert Policy(wrapped, models.tokenizer()).describe()["notes"] == []


def test_a_run_made_with_adapters_on_the_tower_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model", "gemma3")
    run = tiny.tiny_run(tmp_path, model__name=str(folder), model__train="lora", model__device="cpu")
    with monkeypatch.context() as before:
        before.setattr(adapters, "beyond_text", lambda *_: [])
        old = load_policy(run.config.model)
        optimizer = optim.adamw(old.parameters_by_name(), 0.1, 0.0)
        old.logprobs(old.collate([models.PROMPT], [models.COMPLETION])).logprobs.sum().backward()
        for parameter in old.parameters_by_name().values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        run.checkpoints.save(1, parts.state_dict(old, optimizer), {"step": 1})
    newest, _ = run.checkpoints.latest()
    policy = load_policy(run.config.model)
    assert newest is not None and len(old.state()) == len(policy.state()) + 18
    parts.load_state_dict(policy, optim.adamw(policy.parameters_by_name(), 0.1, 0.0), newest)
    policy.load_reference_state(newest.tensors("policy"))
    assert torch.equal(models.score(policy), models.score(old))
