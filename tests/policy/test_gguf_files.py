"""A .gguf file is written only of models that our own loader reads back as they were; all others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from grpo_nb.config import ModelConfig
from grpo_nb.policy import gguf_files
from grpo_nb.policy.merged import merged
from grpo_nb.policy.model import ModelError, Policy, load_policy
from tests.support import bpe
from tests.support import tiny_models as tiny
from tests.support.tokens import pattern

pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own

ROWS = 336
"""More than the tokenizer has tokens, as models have for kernels' sake."""
IDS: dict[str, Any] = {"eos": 4, "pad_token_id": 0, "bos_token_id": 1, "vocab_size": ROWS}


def policy(kind: str = "llama", split: str = "gpt-2", **settings: Any) -> Policy:
    return Policy(tiny.model(kind, **IDS | settings), bpe.tokenizer(split))


def written(made: Policy, folder: Path) -> Path:
    file = folder / "model.gguf"
    gguf_files.save(made, file, "a name")
    return file


@pytest.mark.parametrize(
    ("kind", "split", "settings"),
    [
        ("llama", "gpt-2", {"tie_word_embeddings": True}),
        ("llama", "llama-bpe", {"tie_word_embeddings": False}),
        ("qwen2", "qwen2", {"tie_word_embeddings": True}),
        ("qwen3", "qwen2", {"head_dim": 128, "tie_word_embeddings": False}),
    ],
)
def test_what_is_written_is_what_our_loader_reads(
    kind: str, split: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    made = policy(kind, split, **settings)
    tiny.nudge(made, 0.1)  # norms and biases off their first values
    read = load_policy(ModelConfig(name=str(written(made, tmp_path)), train="full", device="cpu"))
    mine, its = made.state(), read.state()
    assert mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)
    prompt: Any = [{"role": "user", "content": "who was late in 1987?"}]
    assert made.encode(prompt) == read.encode(prompt) and made.stop_token_ids == read.stop_token_ids
    batch = made.collate([made.encode(prompt)], [made.encode_completion("the old man")])
    assert torch.allclose(made.logprobs(batch).logprobs, read.logprobs(batch).logprobs, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_written_as_halves(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "base", "qwen2", tokens=bpe.tokenizer(), **IDS)
    whole, half = (
        Policy(AutoModelForCausalLM.from_pretrained(folder, dtype=kind), bpe.tokenizer())
        for kind in (torch.float32, dtype)
    )
    sizes = [written(made, tmp_path).stat().st_size for made in (whole, half)]
    assert sizes[1] < 0.8 * sizes[0]


def test_an_adapter_is_merged_first(tmp_path: Path) -> None:
    tiny.folder(tmp_path / "base", tokens=bpe.tokenizer(), **IDS)
    made = tiny.lora(tmp_path / "base")
    tiny.nudge(made, 0.2)
    batch = made.collate([made.encode("who was late")], [made.encode_completion("the old man")])
    before = made.logprobs(batch).logprobs.detach()
    whole = merged(made)
    assert torch.allclose(before, whole.logprobs(batch).logprobs, atol=1e-4)
    read = load_policy(ModelConfig(name=str(written(whole, tmp_path)), train="full", device="cpu"))
    assert torch.allclose(before, read.logprobs(batch).logprobs, atol=1e-4)


def refused(made: Policy, folder: Path, *named: str) -> None:
    with pytest.raises(ModelError, match=pattern(*named, "format='merged'")):
        written(made, folder)
    assert not list(folder.glob("*.gguf"))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    refused(policy("gpt2"), tmp_path, "GPT2LMHeadModel", *gguf_files.ARCHITECTURES)
    refused(policy("gemma3"), tmp_path, "Gemma3ForCausalLM")


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    refused(tiny.policy(), tmp_path, "WordLevel")
    own = bpe.tokenizer()
    digits = json.loads(own.backend_tokenizer.to_str())
    digits["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, digits["pre_tokenizer"]]}
    own.backend_tokenizer.pre_tokenizer = bpe.pre_tokenizer("gpt-2")
    assert gguf_files._pre_tokenizer(digits["pre_tokenizer"]) is None


def test_a_setting_that_the_format_has_no_word_for_is_found_by_reading_it_back(tmp_path: Path) -> None:
    scaled = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
    refused(policy(rope_parameters=scaled), tmp_path, "settings", "rope_parameters")
    refused(policy(attention_bias=True), tmp_path, "settings", "attention_bias")
    refused(policy("qwen3", head_dim=16), tmp_path, "Qwen3ForCausalLM")


def test_weights_in_the_wrong_order_are_found_by_reading_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "_interleaved", lambda tensor, heads: tensor)
    refused(policy(), tmp_path, "weights", "q_proj.weight")


def test_a_text_that_would_be_read_otherwise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "_pre_tokenizer", lambda stated: "llama-bpe")
    refused(policy(), tmp_path, "tokenizer")


def test_configurations_are_compared_to_the_precision_of_the_file() -> None:
    a, b = LlamaConfig(rms_norm_eps=1e-6), LlamaConfig(rms_norm_eps=9.99999997e-07)
    assert gguf_files._other_settings(a, b) is None
    assert "rms_norm_eps" in (gguf_files._other_settings(a, LlamaConfig(rms_norm_eps=1e-5)) or "")
