"""A policy as one .gguf file, kept only where this package's own loader reads the same model back from it.

Weights are written as they are, in float32, bfloat16 or float16; quantising is left to llama.cpp's tools.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_nb.policy.loading import move, quietly, read_model, read_tokenizer
from grpo_nb.policy.model import Policy
from grpo_nb.policy.source import ModelError, listed, locate

INSTALL = "pip install 'grpo_nb[gguf]'"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Nats that a log-prob may differ by, when the weights are equal and only settings in float32 were rounded."""
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
PROBES = (
    "Who was late? The grandson of Ann, in 1987; he's 31 years old.\n\n  Answer: unknown",
    "naïve café, Ärger, 東京, Ελλάδα 12345.678 <b>&amp;</b>\ttabs  two spaces 🙂 it's I'll don't",
    "def f(x):\n    return {\"a\": x[0] ** 2, 'b': None}  # …",
)
"""Texts that both tokenizers must encode alike."""
PRE_TOKENIZERS = ("qwen2", "llama-bpe", "tekken", "gpt-4o")
"""Ways to split a text before merging, by GGUF's name; in addition to `gpt-2`."""
_NORMAL, _UNKNOWN, _CONTROL, _ADDED, _UNUSED = 1, 2, 3, 4, 5
_NO_PART_OF_THE_MODEL = frozenset(
    {
        "_name_or_path",
        "_model_name_or_path",
        "architectures",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "use_cache",
        "initializer_range",
    }
    | {"bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "max_window_layers", "pretraining_tp"}
    | {"quantization_config", "unk_token_id"}
)
"""Fields of a configuration that change no log-prob. Stop tokens are compared by themselves."""


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's name of an architecture, and its changes to the weights."""

    name: str
    permutes: bool = False
    """Rows of the query and key projections are interleaved, half a head with the other half."""
    states_head_size: bool = False


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", permutes=True),
    "Qwen2ForCausalLM": Architecture("qwen2"),
    "Qwen3ForCausalLM": Architecture("qwen3", states_head_size=True),
}
"""Architectures that the tests write, read and compare."""


def refuse(model: PreTrainedModel) -> Architecture:
    """The architecture of a model that can be written.

    Raises:
        ModelError: it cannot; or the package that writes it is not installed.
    """
    kind = type(model).__name__
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"a {kind} cannot be exported as GGUF: that it reads back as the same model is proven for "
            f"{', '.join(ARCHITECTURES)} only. Export it merged (format='merged'); llama.cpp's convert_hf_to_gguf.py "
            "reads that folder"
        )
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ModelError(f"GGUF files need a package that is not installed: {error}. {INSTALL}") from None
    return ARCHITECTURES[kind]


def save(policy: Policy, file: Path, name: str) -> None:
    """Write a policy that trains in full to `file`, read it back, and compare. A file that differs is removed.

    Args:
        name: shown by programs that read the file.

    Raises:
        ModelError: another architecture, a tokenizer that GGUF cannot hold, or a difference, which is named.
    """
    model: Any = policy.model
    architecture = refuse(model)
    tokens = _tokens(policy.tokenizer, policy.tokenization.rows)
    try:
        _write(policy, architecture, file, _Header(name, tokens))
        _prove(policy, file)
    except BaseException:
        file.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class _Header:
    name: str
    tokens: Mapping[str, Any]


def _write(policy: Policy, architecture: Architecture, file: Path, header: _Header) -> None:
    import gguf

    model: Any = policy.model
    kind = gguf.GGMLQuantizationType[TYPES[policy.dtype]]
    writer = gguf.GGUFWriter(str(file), architecture.name)
    writer.add_name(header.name)
    writer.add_file_type(gguf.LlamaFileType[{"F32": "ALL_F32"}.get(kind.name, f"MOSTLY_{kind.name}")])
    _add_sizes(writer, model.config, architecture)
    _add_tokenizer(writer, policy.tokenizer, header.tokens)
    for name, tensor in _tensors(model, architecture):
        own = kind if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32  # as every program that reads it expects
        data = gguf.quants.quantize(tensor.float().cpu().contiguous().numpy(), own)
        writer.add_tensor(name, data, raw_dtype=own)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_sizes(writer: Any, config: Any, architecture: Architecture) -> None:
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_size)
    writer.add_vocab_size(config.vocab_size)
    if architecture.states_head_size:
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, Any]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokens["pre"])
    writer.add_token_list(tokens["tokens"])
    writer.add_token_types(tokens["types"])
    writer.add_token_merges(tokens["merges"])
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if number is not None:
            add(number)
    ids: Any = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _tensors(model: PreTrainedModel, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    import gguf

    config: Any = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tied = bool(config.tie_word_embeddings)
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stem, _, suffix = name.rpartition(".")
        if (known := names.get_name(stem)) is None:
            raise ModelError(
                f"{name} has no name in a GGUF file of the architecture {architecture.name}. Export the model merged "
                "(format='merged')"
            )
        if architecture.permutes and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            tensor = _interleaved(tensor, heads)
        yield f"{known}.{suffix}", tensor.detach()


def _interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head in the order 0, h/2, 1, h/2 + 1, ...: rotary positions by neighbours in place of halves."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


# ---- the tokenizer


def _tokens(tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[str, Any]:
    """Tokens with their types, merges, and the way a text is split before tokenization.

    Raises:
        ModelError: the tokenizer is not a byte-level BPE that splits a text in one of the known ways.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    stated = {} if backend is None else json.loads(backend.to_str())
    model = stated.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise _refused(f"is of the kind {model.get('type')}" + " with byte fallback" * bool(model.get("byte_fallback")))
    if (pre := _pre_tokenizer(stated.get("pre_tokenizer") or {})) is None:
        raise _refused("splits a text in a way that has no name in GGUF files")
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [_UNUSED] * rows
    for token, number in model["vocab"].items():
        if number < rows:
            tokens[number], types[number] = token, _NORMAL
    for number, added in tokenizer.added_tokens_decoder.items():
        if number < rows:
            tokens[number], types[number] = str(added), _CONTROL if added.special else _ADDED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"tokens": tokens, "types": types, "merges": merges, "pre": pre}


def _pre_tokenizer(stated: Mapping[str, Any]) -> str | None:
    parts = stated.get("pretokenizers", [stated])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return "gpt-2" if parts[0].get("use_regex", True) and not parts[0].get("add_prefix_space") else None
    if kinds != ["Split", "ByteLevel"] or parts[1].get("use_regex", True):
        return None
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as SPLITS

    pattern = parts[0].get("pattern", {}).get("Regex")
    return next((name for name in PRE_TOKENIZERS if SPLITS.get(name) == pattern), None)


def _refused(why: str) -> ModelError:
    return ModelError(
        f"this tokenizer cannot be exported as GGUF: it {why}; needs a byte-level BPE as those of Qwen, Llama 3 or "
        "GPT-2. Export the model merged (format='merged')"
    )


# ---- the proof


def _prove(policy: Policy, file: Path) -> None:
    """Read the file back as any .gguf file is, and compare it part by part.

    Raises:
        ModelError: names the part that differs.
    """
    mine: Any = policy.model
    source = locate(str(file))
    try:
        tokenizer, model = read_tokenizer(source), move(read_model(source, policy.dtype), policy.device).eval()
    except ModelError as error:
        raise _removed(mine, f"it cannot be read back ({error})") from error
    parts: tuple[tuple[str, Callable[[], str | None]], ...] = (
        ("settings", partial(_other_settings, mine.config, model.config)),
        ("weights", partial(_other_weights, mine, model)),
        ("tokenizer", partial(_other_tokens, policy, tokenizer)),
        ("log-probs", partial(_other_logprobs, policy, model)),
    )
    for part, differs in parts:
        if (found := differs()) is not None:
            raise _removed(mine, f"read back, its {part} differ ({found})")


def _removed(model: PreTrainedModel, why: str) -> ModelError:
    return ModelError(
        f"the GGUF file of this {type(model).__name__} was removed: {why}. Export the model merged (format='merged')"
    )


def _other_settings(mine: Any, read: Any) -> str | None:
    a, b = mine.to_dict(), read.to_dict()
    names = sorted((a.keys() | b.keys()) - _NO_PART_OF_THE_MODEL)
    found = [f"{name} {a.get(name)} became {b.get(name)}" for name in names if not _alike(a.get(name), b.get(name))]
    return listed(found, 3) if found else None


def _alike(a: Any, b: Any) -> bool:
    """Equal, numbers to the precision of float32."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, float) or isinstance(b, float):
        return isinstance(a, int | float) and isinstance(b, int | float) and math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _other_weights(mine: PreTrainedModel, read: PreTrainedModel) -> str | None:
    a, b = mine.state_dict(), read.state_dict()
    if names := sorted(a.keys() ^ b.keys()):
        return f"{listed(names, 3)} on one side only"
    found = [name for name in a if not torch.equal(a[name], b[name].to(a[name].dtype))]
    return listed(found, 3) if found else None


def _other_tokens(policy: Policy, read: PreTrainedTokenizerBase) -> str | None:
    mine = policy.tokenizer
    turns = [{"role": "user", "content": PROBES[0]}]
    for text in (*PROBES, *(policy.tokenization.token(i) for i in policy.stop_token_ids)):
        a, b = (t(text)["input_ids"] for t in (mine, read))
        if a != b:
            return f"{text!r} is {a[:8]}, became {b[:8]}"
        if mine.decode(a) != read.decode(a):
            return f"{a[:8]} decodes to {mine.decode(a)!r}, became {read.decode(a)!r}"
    if isinstance(mine.chat_template, str):
        a, b = (t.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for t in (mine, read))
        return None if a == b else "the chat template writes another prompt"
    return None


def _other_logprobs(policy: Policy, read: PreTrainedModel) -> str | None:
    ids: Any = policy.tokenizer(PROBES[0], return_tensors="pt")["input_ids"][:, : policy.context].to(policy.device)
    with policy.eval_mode(), quietly():
        a, b = (model(input_ids=ids).logits.float().log_softmax(-1) for model in (policy.model, read))
    most = float(np.abs((a - b).cpu().numpy()).max())
    return f"by {most:.2g} nats" if not most <= TOLERANCE[policy.dtype] else None
