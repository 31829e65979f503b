"""Quantised weights: which ones can be trained here, and a base that is quantised while it loads."""

from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig

READ_BY_TRANSFORMERS = ("mxfp4", "fp8")
"""Methods whose weights transformers turns into ordinary ones where they cannot stay as they are."""
BITSANDBYTES = "bitsandbytes"
NF4_BLOCK, NF4_GROUP = 64, 256
"""Weights that share a scale, and scales that share one in turn."""
NF4_BYTES = 0.5 + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * NF4_GROUP)
"""Bytes of a weight in NF4: 4 bits, its part of an 8-bit scale, and of that scale's own in float32."""


def method(settings: Any) -> str | None:
    """Quantisation method of a model with this configuration (`gptq`, `awq`, ...); None: not quantised."""
    stated = getattr(settings, "quantization_config", None)
    stated = stated if isinstance(stated, dict) else getattr(stated, "__dict__", {})
    name = stated.get("quant_method")
    if name is None and (stated.get("load_in_4bit") or stated.get("load_in_8bit")):
        return BITSANDBYTES  # its older files lack the method
    return None if name is None else str(getattr(name, "value", name))


def refusal(settings: Any, where: str, nf4: bool) -> str | None:
    """Reason why a model with this configuration cannot be trained here; None where it can.

    Args:
        nf4: it is to be quantised while it loads, which needs plain weights.
    """
    name = method(settings)
    if name is None:
        return None
    if name in READ_BY_TRANSFORMERS or name.startswith(BITSANDBYTES):
        if nf4:
            return f"{where} is quantised with {name} already; set model.quantize='none'"
        return _needs_package(where) if name.startswith(BITSANDBYTES) and find_spec(BITSANDBYTES) is None else None
    return (
        f"{where} has weights quantised with {name}, which cannot be trained here, whatever is installed. It needs "
        "weights in float32, bfloat16 or float16, a .gguf file (dequantised while it is read), or bitsandbytes weights "
        "with model.train='lora'. Set model.name to the model before it was quantised"
    )


def _needs_package(where: str) -> str:
    return (
        f"{where} has weights quantised with bitsandbytes, and that package is not installed. LoRA trains on such "
        "weights: pip install bitsandbytes, and set model.train='lora'; model.train='full' needs the model before it "
        "was quantised"
    )


def nf4(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments with which `from_pretrained` stores the linear layers in NF4 on `device`; products are in `dtype`.

    4-bit NormalFloat with double quantisation (Dettmers et al. 2023, section 3). Embeddings, norms and the output head
    stay as they are.
    """
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def nf4_refusal(kind: str, where: str) -> str | None:
    """Reason why no model from a source of this kind can be quantised on this machine; None where it can."""
    if kind not in ("folder", "hub"):
        return (
            f"model.quantize='nf4' quantises a folder or a hub id while it loads, and {where} is of kind '{kind}'. Set "
            "model.quantize='none', or model.name to such a model"
        )
    missing = [package for package in (BITSANDBYTES, "accelerate") if find_spec(package) is None]
    if missing:
        return f"model.quantize='nf4' needs {' and '.join(missing)}: pip install 'grpo_nb[nf4]'"
    return None
