"""Random models of three architectures and a word-level tokenizer, small enough to build in every test."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from grpo_nb.config import ModelConfig
from grpo_nb.policy.model import Policy, load_policy

torch.set_num_threads(1)  # operations this small lose time to a second thread

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<|end|>", "<|user|>", "<|assistant|>")
PAD, BOS, EOS, UNK, END, USER, ASSISTANT = range(len(SPECIAL))
SENTENCE = "who was late the old young man woman answer is yes no red blue one two three"
WORDS = tuple(SENTENCE.split())
VOCABULARY = len(SPECIAL) + len(WORDS)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
KINDS = ("llama", "gpt2", "qwen2")
EVERY_KIND = (*KINDS, "gemma3", "lfm2")
"""With sliding windows, and with convolutions in place of some attention."""
PROMPT, COMPLETION = [BOS, 8, 9, 10, 11], [12, 13, 14, END]
CHAT = [{"role": "user", "content": "who was late"}]


def ids(text: str) -> list[int]:
    return [len(SPECIAL) + WORDS.index(word) for word in text.split()]


def tokenizer(template: str | None = TEMPLATE, adds_bos: bool = False, **special: Any) -> PreTrainedTokenizerFast:
    """Words are split at spaces; `special` overrides the named tokens, None leaves one out."""
    index = {token: number for number, token in enumerate((*SPECIAL, *WORDS))}
    inner = Tokenizer(models.WordLevel(index, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(list(SPECIAL))
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
    named = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"} | special
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=template, **{key: token for key, token in named.items() if token}
    )


def model(kind: str = "llama", seed: int = 0, eos: int | Sequence[int] = EOS, **settings: Any) -> PreTrainedModel:
    """Two layers of width 32 with weights large enough for peaked distributions."""
    shape: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": BOS, "eos_token_id": eos, "pad_token_id": PAD}
    wide = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    wide |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "gpt2":
            narrow = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}
            return GPT2LMHeadModel(GPT2Config(**shape | narrow | settings)).eval()
        if kind == "gemma3":
            wide |= {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
        if kind == "lfm2":
            wide |= {"layer_types": ["conv", "full_attention"]}
        configuration = {
            "llama": LlamaConfig,
            "mistral": MistralConfig,
            "qwen2": Qwen2Config,
            "qwen3": Qwen3Config,
            "gemma3": Gemma3TextConfig,
            "lfm2": Lfm2Config,
        }[kind]
        return AutoModelForCausalLM.from_config(configuration(**shape | wide | settings)).eval()


def folder(path: Path, kind: str = "llama", tokens: PreTrainedTokenizerFast | None = None, **settings: Any) -> Path:
    """A model folder as transformers writes it."""
    model(kind, **settings).save_pretrained(path)
    (tokens or tokenizer()).save_pretrained(path)
    return path


def policy(kind: str = "llama", seed: int = 0, tokens: Any = None, **settings: Any) -> Policy:
    """Learns in full."""
    return Policy(model(kind, seed, **settings), tokens or tokenizer())


def lora(path: Path, kind: str = "llama", seed: int = 0, **settings: Any) -> Policy:
    """Learns by LoRA of rank 4 on the model in this folder, which is made if missing."""
    name = path if (path / "config.json").exists() else folder(path, kind)
    return load_policy(ModelConfig(name=str(name), train="lora", lora_rank=4, device="cpu", **settings), seed)


def learner(train: str, path: Path) -> Policy:
    """One that learns in full, or by LoRA with B away from 0."""
    if train == "full":
        return policy()
    made = lora(path)
    nudge(made, 0.1)
    return made


def nudge(learner: Policy, size: float) -> None:
    """Move every trained weight at random."""
    with torch.no_grad():
        for number, parameter in enumerate(learner.parameters_by_name().values()):
            change = size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter += change.to(parameter.device)


def generated(learner: Policy, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """What transformers' `generate` writes greedily after each prompt, fillers included."""
    batch = learner.collate(prompts, [[]] * len(prompts))
    ids = learner.model.generate(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        do_sample=False,
        max_new_tokens=most,
        eos_token_id=list(learner.stop_token_ids),
        pad_token_id=learner.pad_id,
    )
    return [list(row) for row in ids[:, batch.input_ids.shape[1] :].tolist()]


def score(learner: Policy, temperature: float = 1.0) -> Tensor:
    """Log-probs of one short completion."""
    return learner.logprobs(learner.collate([PROMPT], [COMPLETION]), temperature).logprobs.detach()


def base(learner: Policy) -> Any:
    return learner.model.get_base_model() if isinstance(learner.model, PeftModel) else learner.model


def flags(learner: Policy) -> list[Any]:
    """Everything about a model that a borrower must give back."""
    return [
        [(name, p.requires_grad) for name, p in learner.model.named_parameters()],
        [(m.training, vars(m).get("gradient_checkpointing")) for m in learner.model.modules()],
        learner.model.config.use_cache,
        getattr(learner.model, "active_adapter", None),
    ]
