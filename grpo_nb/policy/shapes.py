"""The sizes of a model that memory depends on, from its configuration: no weight is read or made."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from grpo_nb.policy.adapters import beyond_text, linear_layers
from grpo_nb.policy.loading import auto_class
from grpo_nb.policy.source import ModelError, Source, locate

KIN = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Models of transformers whose layers are: norm, attention with rotary positions, norm, gated silu MLP."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only language model.

    >>> shape_of("Qwen/Qwen2.5-0.5B-Instruct").parameters
    494032768
    """

    name: str
    parameters: int
    """Number of weights, tied ones counted once."""
    layers: int
    hidden: int
    intermediate: int
    """Width of the MLP."""
    kv_heads: int
    head_dim: int
    vocabulary: int
    linear_sizes: int
    """Sum of (inputs + outputs) over the layers that LoRA adapts: with rank r it has r times as many weights."""
    linear_weights: int = 0
    """Sum of inputs x outputs over the same layers."""
    heads: int = 0
    """Number of query heads."""
    kin: bool = False
    """Whether it is one of `KIN`, the models that the CUDA kernels support."""

    @classmethod
    def from_config(cls, config: PreTrainedConfig, name: str = "") -> "ModelShape":
        """Shape of the model that `config` describes, counted on a model without storage.

        Raises:
            ModelError: no causal language model of this kind in transformers.
        """
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = auto_class(config).from_config(config)
        except ValueError as error:
            raise ModelError(f"'{name or config.model_type}' is no causal language model: {error}") from None
        text = config.get_text_config(decoder=True)
        heads, hidden, sizes = text.num_attention_heads, text.hidden_size, _linear_sizes(model)
        return cls(
            name=name or config.model_type,
            parameters=sum(p.numel() for p in model.parameters()),
            layers=text.num_hidden_layers,
            hidden=hidden,
            intermediate=_intermediate(text, hidden),
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or hidden // heads,
            vocabulary=text.vocab_size,
            linear_sizes=sum(map(sum, sizes)),
            linear_weights=sum(map(math.prod, sizes)),
            heads=heads,
            kin=type(model).__name__ in KIN,
        )


def shape_of(name: str, seed: int = 0) -> ModelShape:
    """Shape of the model that a `model.name` setting names; well-known ones need no network.

    Raises:
        ModelError: not found; lists the built-in names.
    """
    return ModelShape.from_config(config_of(name, seed), name)


def config_of(name: str, seed: int = 0) -> PreTrainedConfig:
    """Transformers configuration of the model that a `model.name` setting names; errors as in `shape_of`."""
    if known := _KNOWN.get(_plain(name)):
        kind, sizes = known
        return AutoConfig.for_model(kind, **sizes)
    return _read_config(locate(name, seed), name)


def _read_config(source: Source, name: str) -> PreTrainedConfig:
    if source.base is not None:
        return _read_config(source.base, name)
    if source.kind == "demo":
        from grpo_nb.tasks import demo

        return demo.build_model(source.seed).config
    where: dict[str, Any] = {"pretrained_model_name_or_path": source.name}
    if source.kind == "gguf" and source.path is not None:
        where = {"pretrained_model_name_or_path": str(source.path.parent), "gguf_file": source.path.name}
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(**where, trust_remote_code=False)
    except Exception as error:  # the loaders raise a dozen kinds
        raise ModelError(
            f"the sizes of '{name}' cannot be read ({type(error).__name__}); give a local folder, a .gguf file, or "
            f"one of the known models: {', '.join(sorted(_KNOWN))}"
        ) from error
    return config


def _plain(name: str) -> str:
    """`Qwen/Qwen2.5-0.5B-Instruct` -> `qwen2.5-0.5b`."""
    plain = name.rpartition("/")[2].lower()
    for suffix in ("-instruct", "-base", "-chat", "-it"):
        plain = plain.removesuffix(suffix)
    return plain.removeprefix("meta-")


def _intermediate(config: PreTrainedConfig, hidden: int) -> int:
    return getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden


def _linear_sizes(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """Inputs and outputs of each layer that LoRA adapts."""
    names = linear_layers(model)
    others = {*beyond_text(model, names)}
    head = model.get_output_embeddings()
    layers: list[Any] = [model.get_submodule(name) for name in names if name not in others]
    return [tuple(layer.weight.shape) for layer in layers if layer is not head]


def _llama(hidden: int, mlp: int, layers: int, heads: tuple[int, int], words: int, tied: bool = True) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": words,
        "tie_word_embeddings": tied,
    }


_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2-135m": ("llama", _llama(576, 1536, 30, (9, 3), 49152)),
    "smollm2-360m": ("llama", _llama(960, 2560, 32, (15, 5), 49152)),
    "smollm2-1.7b": ("llama", _llama(2048, 8192, 24, (32, 32), 49152)),
    "llama-3.2-1b": ("llama", _llama(2048, 8192, 16, (32, 8), 128256)),
    "llama-3.2-3b": ("llama", _llama(3072, 8192, 28, (24, 8), 128256)),
    "llama-3-8b": ("llama", _llama(4096, 14336, 32, (32, 8), 128256, tied=False)),
    "llama-3.1-8b": ("llama", _llama(4096, 14336, 32, (32, 8), 128256, tied=False)),
    "qwen2.5-0.5b": ("qwen2", _llama(896, 4864, 24, (14, 2), 151936)),
    "qwen2.5-1.5b": ("qwen2", _llama(1536, 8960, 28, (12, 2), 151936)),
    "qwen2.5-3b": ("qwen2", _llama(2048, 11008, 36, (16, 2), 151936)),
    "qwen2.5-7b": ("qwen2", _llama(3584, 18944, 28, (28, 4), 152064, tied=False)),
    "qwen3-0.6b": ("qwen3", _llama(1024, 3072, 28, (16, 8), 151936) | {"head_dim": 128}),
    "qwen3-1.7b": ("qwen3", _llama(2048, 6144, 28, (16, 8), 151936) | {"head_dim": 128}),
    "qwen3-4b": ("qwen3", _llama(2560, 9728, 36, (32, 8), 151936) | {"head_dim": 128}),
    "gpt2": ("gpt2", {}),
}
"""Kind and sizes of models that people start from, by plain name."""
