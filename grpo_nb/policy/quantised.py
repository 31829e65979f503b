"""Quantised weights: which of them can be trained here, and which package reads them."""

from importlib.util import find_spec
from typing import Any

READ_BY_TRANSFORMERS = ("mxfp4", "fp8")
"""Methods whose weights transformers turns into ordinary ones where they cannot stay as they are."""
BITSANDBYTES = "bitsandbytes"


def method(settings: Any) -> str | None:
    """Quantisation method of a model with this configuration (`gptq`, `awq`, ...); None: not quantised."""
    stated = getattr(settings, "quantization_config", None)
    stated = stated if isinstance(stated, dict) else getattr(stated, "__dict__", {})
    name = stated.get("quant_method")
    if name is None and (stated.get("load_in_4bit") or stated.get("load_in_8bit")):
        return BITSANDBYTES  # its older files lack the method
    return None if name is None else str(getattr(name, "value", name))


def refusal(settings: Any, where: str) -> str | None:
    """Reason why a model with this configuration cannot be trained here; None where it can."""
    name = method(settings)
    if name is None or name in READ_BY_TRANSFORMERS:
        return None
    if name.startswith(BITSANDBYTES):
        return _needs_package(where) if find_spec(BITSANDBYTES) is None else None
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
