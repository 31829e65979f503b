"""The planner against numbers worked out by hand."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, T5Config

from grpo_nb import presets
from grpo_nb.config import Config, ConfigError
from grpo_nb.dev import peer_work
from grpo_nb.policy import memory
from grpo_nb.policy.memory import Plan, plan
from grpo_nb.policy.memory_terms import GIB, Term, gib, item_bytes, kv_bytes_per_token
from grpo_nb.policy.shapes import _KNOWN, ModelShape, shape_of
from grpo_nb.policy.source import ModelError
from grpo_nb.tasks import demo
from tests.support.tokens import names

PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "openai-community/gpt2": 124_439_808,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
}
"""Parameters as their authors' checkpoints have them."""

TINY = ModelShape(
    name="tiny", parameters=1000, layers=2, hidden=8, intermediate=16, kv_heads=1, head_dim=4, vocabulary=50,
    linear_sizes=100,
)  # fmt: skip


def term(result: Plan, name: str, phase: str | None = None) -> Term:
    (found,) = (t for t in result.terms if t.name == name and phase in (None, t.phase))
    return found


def lora(**changes: object) -> Config:
    base = {
        "model.train": "lora",
        "model.lora_rank": 4,
        "sampling.max_prompt_length": 6,
        "sampling.max_completion_length": 4,
    }
    return presets.demo().replace(**base | {key.replace("__", "."): value for key, value in changes.items()})


# ---- shapes


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_known_models_have_their_published_size(name: str, parameters: int) -> None:
    assert shape_of(name).parameters == parameters


def test_every_known_name_can_be_built() -> None:
    assert all(shape_of(name).linear_sizes > 0 for name in _KNOWN)


@pytest.mark.parametrize(
    ("name", "count"),
    [("Qwen/Qwen2.5-0.5B", 12_288), ("meta-llama/Llama-3.1-8B", 131_072), ("openai-community/gpt2", 36_864),
     ("Qwen/Qwen3-0.6B", 114_688), ("Qwen/Qwen3-4B", 147_456), ("Qwen/Qwen2.5-1.5B", 28_672)],
)  # fmt: skip
def test_kv_bytes_of_a_token_in_bfloat16(name: str, count: int) -> None:
    """E.g. Qwen2.5-0.5B: 2 x 24 layers x 2 heads x 64 x 2 B = 12,288."""
    assert kv_bytes_per_token(shape_of(name), 2) == count


def test_the_demo_model_is_measured_as_it_is_built() -> None:
    model = demo.build_model(0)
    shape = shape_of("demo")
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.layers, shape.vocabulary) == (model.config.num_hidden_layers, len(demo.vocabulary()))


def test_a_folder_is_read_from_its_config(tmp_path: Path) -> None:
    settings = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=99
    )
    settings.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    shape = shape_of(str(tmp_path))
    assert (shape.layers, shape.hidden, shape.vocabulary, shape.head_dim) == (3, 32, 99, 8)
    # q, k, v, o are 32 + 32 each, gate and up 32 + 64, down 64 + 32; three layers, no head
    assert shape.linear_sizes == 3 * (4 * 64 + 3 * 96)


def test_what_cannot_be_planned_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(str(tmp_path / "nothing"))):
        shape_of(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match=r"T5|t5"):
        ModelShape.from_config(T5Config())


# ---- terms


def test_lora_terms_by_hand() -> None:
    result = plan(lora(), TINY, device_gib=1)
    # rank 4 x 100 inputs and outputs = 400 trainable weights in float32; the frozen 1000 in bfloat16
    assert term(result, "weights").bytes == 2 * 1000
    assert term(result, "adapters").bytes == 4 * 400
    assert term(result, "gradient, Adam").bytes == 3 * 4 * 400
    assert term(result, "reference").bytes == 4 * 400
    assert term(result, "update").bytes == 2 * 4 * 400
    # KV: 2 x 2 layers x 1 head x 4 x 2 B = 32 B a token; 16 prompts of 6, in room for 64, and 128 rows of 4
    assert term(result, "KV cache", "always").bytes == 32 * (16 * 64 + 128 * 4)
    eager = plan(lora(rollout__engine="eager"), TINY, device_gib=1)
    assert term(eager, "KV cache", "sampling").bytes == 32 * 128 * 10, "each row with a prompt of its own"
    # 64 rows go through backward together, each with 4 completion tokens over 50 words
    assert term(result, "logits", "training").bytes == (2 + 12) * 64 * 4 * 50


KIN = replace(TINY, kin=True, heads=2, linear_weights=700)


def test_flat_passes_by_hand() -> None:
    result = plan(lora(), KIN, device_gib=1)
    assert term(result, "merged weights").bytes == 2 * 700
    # 64 rows of 8 groups: 8 prompts of 6 and 64 answers of 4 tokens
    tokens, answers = 8 * 6 + 64 * 4, 64 * 4
    kept = 2 * (2 * 8 + 2 * 8 + 2 * 4 + 2 * 16)  # both sums, queries and what they saw, keys and values, halves
    works = 2 * (4 * 8 + 3 * 8 + 5 * 16)
    assert term(result, "activations", "training").bytes == tokens * (2 * kept + works)
    thrifty = plan(lora(model__gradient_checkpointing=True), KIN, device_gib=1)
    assert term(thrifty, "activations", "training").bytes == tokens * (2 * 2 * 8 + kept + works)
    alone = plan(lora(batch__share_prompts="never"), KIN, device_gib=1)
    assert term(alone, "activations", "training").bytes == 64 * 10 * (2 * kept + works)
    assert term(result, "logits", "training").bytes == 2 * 2 * answers * 50 + 2 * 2 * answers * 8


def test_large_models_are_not_copied() -> None:
    assert not any(t.name == "merged weights" for t in plan(lora(), replace(KIN, linear_weights=2**31 + 1), None).terms)


@pytest.mark.parametrize(("size", "measured"), [("0.6b", 7.9), ("8b", 19.6)], ids=["Qwen3-0.6B", "Llama-3.1-8B"])
def test_the_plan_is_near_the_peak_that_was_measured(size: str, measured: float) -> None:
    """GiB that an H200 measured: `python -m grpo_nb.dev.peer --size ...`."""
    work = peer_work.SIZES[size]
    shape = ModelShape.from_config(peer_work.model_config(work))
    config = peer_work.our_config(work, {"batch.micro_batch": min(16, work.rows)})
    assert plan(config, shape, 140).peak / GIB == pytest.approx(measured, rel=0.15)


def test_full_training_holds_four_float32_copies_and_the_reference() -> None:
    result = plan(lora(model__train="full"), TINY, device_gib=1)
    assert result.held("always") - term(result, "KV cache").bytes == (1 + 3 + 1) * 4 * 1000
    assert names(term(result, "weights").arithmetic, "1,000")


@pytest.mark.parametrize(
    ("changes", "on_gpu", "full", "expected"),
    [({}, True, False, 2), ({}, False, False, 4), ({}, True, True, 4), ({"model__dtype": "float32"}, True, False, 4),
     ({"model__dtype": "bfloat16"}, False, True, 2)],
)  # fmt: skip
def test_bytes_of_a_weight(changes: dict[str, object], on_gpu: bool, full: bool, expected: int) -> None:
    assert item_bytes(lora(**changes), full, on_gpu) == expected


def test_activations_with_and_without_checkpointing() -> None:
    plain = plan(lora(), TINY, device_gib=1)
    thrifty = plan(lora(model__gradient_checkpointing=True), TINY, device_gib=1)
    saved = round(8 * (10 * 2 + 36.4 + 4 * 0.5))  # bfloat16 and LoRA: hidden x (10 i + 36.4 + 4 k), i = 2, k = 1/2
    assert term(plain, "activations", "training").bytes == 64 * 10 * 2 * saved
    assert term(thrifty, "activations", "training").bytes == 64 * 10 * (2 * 8 * (2 + 2) + saved)


def test_gradients_apart_are_counted_where_they_are_kept() -> None:
    assert not any(t.name == "gradients apart" for t in plan(lora(), TINY, device_gib=1).terms)
    assert term(plan(lora(algorithm__combine="pcgrad"), TINY, device_gib=1), "gradients apart").bytes == 2 * 4 * 400


def test_without_sft_there_is_no_sft_phase() -> None:
    assert not any(t.phase == "sft" for t in plan(lora(sft__steps=0), TINY, device_gib=1).terms)


def test_the_peak_is_what_is_held_plus_the_hungriest_phase() -> None:
    result = plan(lora(), TINY, device_gib=1)
    assert result.peak == result.held("always") + max(
        result.held(phase) for phase in ("sampling", "training", "update", "sft")
    )
    assert result.peak < sum(t.bytes for t in result.terms)


# ---- verdict and advice


def test_presets_fit_the_cards_they_are_named_for() -> None:
    for name, size in (("cpu_small", 8), ("low_memory", 4), ("gpu_24gb", 24), ("gpu_40gb", 40), ("gpu_80gb", 80)):
        result = plan(presets.PRESETS[name](), device_gib=size)
        assert result.fits, f"{name}: {result.verdict}"
        assert result.advice == () and names(result.verdict, "fits")


def test_low_memory_takes_what_its_docstring_says() -> None:
    documented = presets.low_memory.__doc__ or ""
    for model in ({}, {"model": "Qwen/Qwen2.5-7B-Instruct"}):
        least, usual = (plan(make(**model), device_gib=80).peak for make in (presets.low_memory, presets.gpu_24gb))
        assert names(documented, f"{least / 2**30:.3g} GiB") and least < usual


def test_advice_leads_to_settings_that_fit() -> None:
    config = presets.gpu_40gb().replace(**{"model.gradient_checkpointing": False, "batch.micro_batch": 16})
    short = plan(config, device_gib=24)
    assert not short.fits and names(short.verdict, "24 GiB")
    *steps, last = short.advice
    changes = dict(step.removeprefix("set ").split(": ")[0].split("=") for step in steps)
    assert "batch.micro_batch" in changes and names(last, "fits")
    followed = config.replace(**{key: {"true": True}.get(value, value) for key, value in changes.items()})
    assert plan(followed, device_gib=24).fits


def test_verdict_has_one_decimal_of_a_measured_device() -> None:
    assert names(plan(lora(), TINY, device_gib=23.5401).verdict, "23.5 GiB")


def test_advice_changes_what_costs_nothing_first() -> None:
    config = presets.gpu_80gb().replace(**{"batch.passes": "model"})
    roomy = plan(config.replace(**{"batch.micro_batch": 64, "sft.micro_batch": 16}), device_gib=80)
    assert {step.split("=")[0] for step in roomy.advice[:-1]} == {"set batch.micro_batch", "set sft.micro_batch"}


def test_full_training_of_a_large_model_is_advised_to_take_lora() -> None:
    result = plan(presets.gpu_80gb().replace(**{"model.train": "full"}), device_gib=80)
    assert result.advice[0].startswith("set model.train=lora")


def test_nothing_left_to_lower_is_said() -> None:
    result = plan(presets.gpu_24gb().replace(**{"rollout.engine": "eager"}), device_gib=8)
    (nothing,) = result.advice
    assert not nothing.startswith("set ") and names(nothing, f"{result.peak / 2**30:.2f} GiB")


def test_a_device_without_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\b0 GiB\b"):
        plan(lora(), TINY, device_gib=0)


def test_this_machine_is_measured() -> None:
    config = presets.demo().replace(**{"model.device": "cpu"})
    measured = memory.measure_device(config)
    assert 0.5 < measured < 100_000
    assert plan(config).device_gib == measured


def test_the_table_can_be_read() -> None:
    text = str(plan(lora(), TINY, device_gib=1))
    assert names(text, "1,000")
    assert gib(3 * GIB // 2) == "1.50 GiB" and gib(3 * 2**20) == "3.0 MiB"
