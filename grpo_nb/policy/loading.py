"""Loads a model and its tokenizer from a source onto a device, or raises one clear error.

Weights come from safetensors or GGUF only, and no code from a repository is ever run.
"""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_nb.config import ModelConfig
from grpo_nb.metrics.phases import timed
from grpo_nb.policy import quantised
from grpo_nb.policy.source import TOKENIZER_FILES, ModelError, Source, holds, listed, listing, no_safetensors
from grpo_nb.printable import clean_logger

logger = clean_logger(__name__)

FULL_BELOW = 20_000_000
"""`train="auto"` trains all weights of a model with fewer parameters than this."""


def read_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to the source (an adapter's own, else its base model's).

    Raises:
        ModelError: it is missing or cannot be read.
    """
    if source.kind == "demo":
        from grpo_nb.tasks import demo

        return demo.build_tokenizer()
    if source.path is not None and source.kind != "gguf" and not holds(source.path, TOKENIZER_FILES):
        if source.base is not None:
            return read_tokenizer(source.base)
        raise ModelError(
            f"folder {source.path} has no tokenizer: found {listing(source.path)}; needs tokenizer.json (or "
            "tokenizer.model, or vocab.json with merges.txt). Copy the files of the tokenizer that the model was "
            "trained with into the folder: tokenizer.save_pretrained(folder)"
        )
    with _explained(source, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**_arguments(source))
        return tokenizer


def read_model(
    source: Source, dtype: torch.dtype, empty: bool = False, nf4_on: torch.device | None = None
) -> PreTrainedModel:
    """The causal language model with its weights as `dtype`, on CPU; a .gguf file is dequantised.

    Args:
        empty: weights may be without content (on the device `meta`), since others replace them.
        nf4_on: device on which the linear layers are stored in NF4; None: they are not quantised.

    Raises:
        ModelError: unreadable, incomplete, pickle-only, in need of code from its repository, or not to be quantised.
    """
    if source.base is not None:
        return read_model(source.base, dtype, empty, nf4_on)
    if nf4_on is not None and (why := quantised.nf4_refusal(source.kind, f"model '{source.name}'")) is not None:
        raise ModelError(why)
    if source.kind == "demo":
        from grpo_nb.tasks import demo

        return move(demo.build_model(source.seed), dtype)
    # A GGUF model that is kept in its blocks cannot be saved; dequantised it is like any other.
    extra: dict[str, Any] = (
        {"quantization_config": GgufConfig(dequantize=True)} if source.kind == "gguf" else {"use_safetensors": True}
    )
    if empty and source.kind != "gguf":
        extra["device_map"] = "meta"
    with _explained(source, "model"):
        settings = None if source.kind == "gguf" else _read_settings(source)
        _refuse_quantised(source, settings, nf4_on is not None)
        if nf4_on is not None:
            extra |= quantised.nf4(dtype, nf4_on)
        loaded: Any = auto_class(settings).from_pretrained(
            **_arguments(source), dtype=dtype, output_loading_info=True, **extra
        )
    model: PreTrainedModel = loaded[0]
    report: dict[str, Any] = loaded[1]
    _check_complete(source, model, report)
    return model


def auto_class(settings: PreTrainedConfig | None) -> Any:
    """The class that opens a model of this configuration: a language model, else one that reads images too."""
    if settings is None or type(settings) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    return (
        AutoModelForImageTextToText if type(settings) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForCausalLM
    )


def move(model: PreTrainedModel, to: torch.device | torch.dtype) -> PreTrainedModel:
    """`model.to(to)`, in place; transformers' wrapper hides the method's type."""
    moved: Any = model
    moved.to(to)
    return model


@contextlib.contextmanager
def quietly(bars: bool = False) -> Iterator[None]:
    """Silence the libraries' messages, and progress bars of short work."""
    progress: Any = transformers.utils.logging
    shown = progress.is_progress_bar_enabled()
    try:
        if not bars:
            progress.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft's calls of what transformers has renamed
            yield
    finally:
        if shown:
            progress.enable_progress_bar()


def pick_device(wanted: str) -> torch.device:
    """The device that `model.device` names; `auto` is the first accelerator found, else CPU.

    Raises:
        ModelError: the name is unknown, or the machine has no such device.
    """
    have = available_devices()
    if wanted == "auto":
        return torch.device(have[0])
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ModelError(f"model.device='{wanted}' is no device; this machine has {', '.join(have)}") from None
    if str(device) not in have:
        raise ModelError(f"model.device='{wanted}': this machine has {', '.join(have)}; use one of them, or 'auto'")
    return device


def available_devices() -> list[str]:
    """Names of the devices of this machine, the one that `auto` takes first."""
    cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [*(["cuda", *cuda] if cuda else []), *mps, "cpu"]


def pick_dtype(wanted: str, device: torch.device, full: bool) -> torch.dtype:
    """Weights' type by capability: `auto` is bfloat16 for a frozen base on a GPU that has it, else float32.

    Weights that learn themselves (`full`) stay in float32 under `auto`: an update of 1e-6 is lost in bfloat16.

    Raises:
        ModelError: a type that cannot work there, with the one to use.
    """
    if wanted == "auto":
        return torch.bfloat16 if not full and _native_bfloat16(device) else torch.float32
    if wanted == "float16" and device.type == "cpu":
        raise ModelError("model.dtype='float16' on CPU: too slow and too coarse to train with; use 'float32' or 'auto'")
    if wanted == "float16" and full:
        raise ModelError(
            "model.dtype='float16' with train='full': small gradients become 0 without loss scaling; use 'float32', "
            "or train='lora', whose adapters are float32"
        )
    if wanted != "float32":
        _warn_half(wanted, device, full)
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[wanted]


def _native_bfloat16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def _warn_half(wanted: str, device: torch.device, full: bool) -> None:
    if wanted == "bfloat16" and not _native_bfloat16(device):
        logger.warning("bfloat16 is emulated or slow on %s; float32 is usually faster there", device)
    if wanted == "bfloat16" and full:
        logger.warning("full training in bfloat16 loses updates below 0.4%% of a weight; float32 or lora keeps them")
    if wanted == "float16" and _native_bfloat16(device):
        logger.warning(
            "model.dtype='float16' on %s, which computes in bfloat16 as fast: float16 overflows above 65504, and a nan "
            "follows; set model.dtype to 'bfloat16' or 'auto'",
            device,
        )
    elif wanted == "float16":
        logger.warning("float16 overflows above 65504; prefer float32 where memory allows")


def _read_settings(source: Source) -> PreTrainedConfig | None:
    """The model's config.json; None for a hub repository without one, such as an adapter's."""
    try:
        settings: PreTrainedConfig = AutoConfig.from_pretrained(**_arguments(source))
    except OSError:
        if source.kind != "hub":
            raise
        return None
    return settings


def _refuse_quantised(source: Source, settings: PreTrainedConfig | None, nf4: bool) -> None:
    if (why := quantised.refusal(settings, f"model '{source.name}'", nf4)) is not None:
        raise ModelError(why)


def _check_complete(source: Source, model: PreTrainedModel, report: dict[str, Any]) -> None:
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            f"hub repository '{source.name}' holds a LoRA adapter; download it and give the folder: "
            f"hf download {source.name} --local-dir my_adapter"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{source.name}: the weights lack {len(missing)} tensors of a {type(model).__name__} "
            f"({listed(missing, 3)}), which would be random; needs a checkpoint of a causal language model"
        )


def _arguments(source: Source) -> dict[str, Any]:
    arguments: dict[str, Any] = {"pretrained_model_name_or_path": source.name, "trust_remote_code": False}
    if source.kind == "gguf" and source.path is not None:
        arguments |= {"pretrained_model_name_or_path": str(source.path.parent), "gguf_file": source.path.name}
    return arguments


@contextlib.contextmanager
def _explained(source: Source, part: str) -> Iterator[None]:
    """Turn any failure of the loader into one ModelError; an interrupt passes."""
    try:
        verb = "converting" if source.kind == "gguf" else "reading"
        with timed(f"{verb} {part} of {source.name}"), quietly(bars=source.kind in ("hub", "gguf")):
            yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(_explain(source, part, error)) from error


def _explain(source: Source, part: str, error: Exception) -> str:
    text, where = str(error), f"{part} of '{source.name}'"
    if "trust_remote_code" in text:
        return (
            f"{where} needs code from its own repository, which is never run here (trust_remote_code is off); use a "
            f"model whose architecture is part of transformers {transformers.__version__}"
        )
    if "safetensors" in text and source.kind == "hub" and "does not appear to have" in text:
        return no_safetensors(f"hub repository '{source.name}'", pickled=True)
    if isinstance(error, ImportError):
        advice = 'pip install "grpo_nb[gguf]"' if source.kind == "gguf" else "install that package"
        return f"{where} needs a package that is not installed: {_first_line(text)}. To continue, {advice}"
    if source.kind == "hub" and isinstance(error, OSError):
        return (
            f"{where} was found neither as a file or folder from {Path.cwd()} nor on the hub: {_first_line(text)} "
            "Check the spelling and the network; a gated model needs HF_TOKEN in the environment"
        )
    return f"{where} cannot be read: {type(error).__name__}: {_first_line(text)}"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"


def learns_in_full(config: ModelConfig, base: PreTrainedModel) -> bool:
    """Whether `model.train` makes all weights of this model train.

    Raises:
        ModelError: its weights are quantised, and were to train.
    """
    if getattr(base, "is_quantized", False):
        if config.train == "full":
            raise ModelError(
                f"model.train='full', and the weights of '{config.name}' are quantised, so nothing but the layers left "
                "as they were could change. Set model.train='lora', or model.name to the model before it was quantised"
            )
        return False
    if config.train == "auto":
        return sum(p.numel() for p in base.parameters()) < FULL_BELOW
    return config.train == "full"


def checkpoint_activations(base: PreTrainedModel) -> None:
    """Layers keep their inputs only, and are computed again in the backward pass.

    Raises:
        ModelError: the architecture cannot.
    """
    base.train()  # layers recompute in training mode only, which without dropout is no other model
    try:
        base.activation_checkpointing_enable()
    except ValueError as error:
        raise ModelError(f"model.gradient_checkpointing=True: {error} Set it to False") from error
