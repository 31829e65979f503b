"""Settings of the model that is trained."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from grpo_nb.config.base import Count, Positive, Settings

_RENDERING = {"conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"}
_RENDERING |= {"continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
_RENDERING |= {"return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "strftime_now"}
"""Names that a rendering fills in itself."""


class ModelConfig(Settings):
    """The model, its precision, and which of its weights are trained."""

    name: str = "demo"
    """`demo` (built in, no download), a hub id, a local folder, or a .gguf file."""
    train: Literal["auto", "lora", "full"] = "auto"
    """Weights that learn: `lora` adapters, `full` model, or `auto`: full below 20 M parameters."""
    lora_rank: Count = 16
    """Rank r of the LoRA adapters."""

    # advanced
    lora_alpha: Positive = 32
    """LoRA scale: the adapter's output is multiplied by alpha / rank."""
    lora_targets: tuple[str, ...] | Literal["auto"] = "auto"
    """Module names that get an adapter; `auto`: every linear layer of the language model but the output head."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights' type; `auto` is bfloat16 for a frozen base on a GPU that has it, float32 for all else."""
    tf32: bool | Literal["auto"] = "auto"
    """float32 matrix products on an NVIDIA GPU round their inputs to TF32's 10 bits, for several times the speed;
    `auto`: where all weights learn. Chosen when a run starts, and kept when it resumes."""
    quantize: Literal["none", "nf4"] = "none"
    """Type of the frozen base's linear layers: `nf4` stores them in 4 bits (QLoRA), quantised by bitsandbytes while the
    model loads; adapters stay float32. It saves memory, not time, and needs `train=lora` and a folder or hub id."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`, or `auto`: the first accelerator found, else CPU."""
    chat_template: str | None = None
    """Name of the chat template to use, where the tokenizer has several; null: its default."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """The chat template's own switches, given to it wherever it is rendered, e.g. {"enable_thinking": false}."""
    shard: Literal["none", "fsdp2"] = "none"
    """Placement of the base model on several GPUs: a full copy on each (`none`), or its layers spread over them
    (`fsdp2`: slower, for a base that does not fit one GPU). The variable GRPO_NB_SHARD replaces it, e.g. to resume on
    one GPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about half the memory for about a fifth of the speed."""

    @model_validator(mode="after")
    def _a_quantised_base_is_frozen(self) -> Self:
        if self.quantize == "none":
            return self
        if self.train == "full":
            raise ValueError(f"quantize='{self.quantize}' freezes the weights; set train='lora', or quantize='none'")
        if self.shard != "none":
            raise ValueError(f"quantize='{self.quantize}' keeps a full copy on each GPU; set shard='none'")
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _switches_are_the_templates(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(name for name in value if name in _RENDERING or not name.isidentifier()):
            raise ValueError(f"'{taken[0]}' is no switch of a chat template; give the names that its Jinja code reads")
        return value
