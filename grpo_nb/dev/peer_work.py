"""The work of `grpo_nb.dev.peer`: the sizes, the model of random weights, the task, and our trainer on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import peft
import torch
import transformers

from grpo_nb.config import Config, ModelConfig
from grpo_nb.policy.adapters import attach
from grpo_nb.policy.model import Policy
from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo
from grpo_nb.types import Example, Score

OBJECTIVE = "words"
RANK, ALPHA, RATE, BETA = 8, 16, 1e-5, 0.04


@dataclass(frozen=True)
class Work:
    """Work of one step: a model's shape, and P prompts of equal length with K completions each."""

    kind: Literal["llama", "qwen3"]
    shape: Mapping[str, Any]
    prompts: int
    group: int
    prompt_tokens: int
    completion_tokens: int
    micro_batch: int

    @property
    def rows(self) -> int:
        return self.prompts * self.group


def _shape(hidden: int, intermediate: int, layers: int, heads: tuple[int, int], head_dim: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": 4096,
    }


_TINY = _shape(128, 352, 2, (4, 4), 32) | {"vocab_size": 512, "tie_word_embeddings": True}


_QWEN_06 = _shape(1024, 3072, 28, (16, 8), 128) | {"vocab_size": 151_936, "tie_word_embeddings": True}


_QWEN_17 = _shape(2048, 6144, 28, (16, 8), 128) | {"vocab_size": 151_936, "tie_word_embeddings": True}


_LLAMA_8 = _shape(4096, 14_336, 32, (32, 8), 128) | {"vocab_size": 128_256, "tie_word_embeddings": False}


SIZES = {
    "tiny": Work("llama", _TINY, 16, 8, 64, 10, 128),
    "0.6b": Work("qwen3", _QWEN_06, 8, 8, 256, 256, 16),
    "1.7b": Work("qwen3", _QWEN_17, 8, 8, 256, 256, 16),
    "8b": Work("llama", _LLAMA_8, 2, 4, 256, 96, 8),
    "8b-long": Work("llama", _LLAMA_8, 1, 8, 1000, 96, 8),
}
"""Shapes of Qwen3-0.6B and 1.7B and of Llama-3.1-8B; `tiny` is of the demo's order."""


class Words:
    """A task without gold answers: only the reward function separates completions."""

    name = OBJECTIVE

    def __init__(self, work: Work) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(8, work.shape["vocab_size"], (64, work.prompt_tokens), generator=generator).tolist()
        self.texts = [" ".join(f"w{i}" for i in row) for row in rows]

    def examples(self, split: str) -> list[Example]:
        """64 prompts of random words."""
        return [Example(str(i), text, None, {}) for i, text in enumerate(self.texts)]

    def score(self, example: Example, completion: str) -> Score:
        """Score that is the same for every completion."""
        return Score(0.0, "answered")


def taste(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Reward that differs between most answers."""
    return [sum(ids) % 11 / 11 for ids in completion_ids]


def words_tokenizer(work: Work) -> Any:
    """`w17` is token 17: prompts of random ids that both sides tokenise by themselves."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{i}" for i in range(len(special), work.shape["vocab_size"]))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **special)


def model_config(work: Work) -> transformers.PreTrainedConfig:
    """The model's shape as transformers has it."""
    made = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[work.kind]
    config: transformers.PreTrainedConfig = made(**work.shape, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    return config


def random_model(work: Work, device: torch.device) -> transformers.PreTrainedModel:
    """A model of random weights, the same each time."""
    config = model_config(work)
    torch.manual_seed(0)
    with device:
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        made: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            config, dtype=kind, attn_implementation="sdpa"
        )
    return made


def lora_model(work: Work, device: torch.device) -> peft.PeftModel:
    """Model with LoRA on every linear layer; adapters are float32."""
    return lora_on(random_model(work, device))


def lora_on(model: transformers.PreTrainedModel) -> peft.PeftModel:
    """A model with LoRA on every linear layer; adapters are float32."""
    return attach(model, ModelConfig(train="lora", lora_rank=RANK, lora_alpha=ALPHA), "random", seed=0)


def our_config(work: Work, changes: Mapping[str, Any]) -> Config:
    """The settings of our steps."""
    objective = {"task": OBJECTIVE, "beta": BETA, "kl_band": None}
    settings = {
        "batch.prompts": work.prompts,
        "batch.group_size": work.group,
        "batch.micro_batch": work.micro_batch,
        "sampling.max_completion_length": work.completion_tokens,
        "sampling.max_prompt_length": work.prompt_tokens,
        "model.train": "lora",
        "model.lora_rank": RANK,
        "model.lora_alpha": ALPHA,
        "algorithm.learning_rate": RATE,
        "run.steps": 10_000,
        "run.checkpoint_every": 10_000,
        **changes,
    }
    bare = Config.model_validate({"objectives": {OBJECTIVE: objective}, "sft": {"steps": 0}})
    return bare.replace(**settings)


def ours(work: Work, device: torch.device, changes: Mapping[str, Any], folder: Path) -> Any:
    """The generator of our steps."""
    policy = Policy(lora_model(work, device), words_tokenizer(work))
    given: Any = {"tasks": {OBJECTIVE: Words(work)}, "rewards": {OBJECTIVE: [taste]}}
    return grpo(Run.create(folder / "run", our_config(work, changes)), policy=policy, **given)
