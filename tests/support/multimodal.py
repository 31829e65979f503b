"""Random models that read more than text, as small as tiny_models."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.support import tiny_models as tiny

IMAGE, VIDEO = tiny.VOCABULARY + 1, tiny.VOCABULARY
_TEXT: dict[str, Any] = {"vocab_size": tiny.VOCABULARY + 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
_TEXT |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
_TEXT |= {"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD, "bos_token_id": tiny.BOS, "initializer_range": 0.3}
_VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28}
_VISION |= {"num_attention_heads": 2, "patch_size": 14}
_QWEN = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
_QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 1, "vision_end_token_id": 1}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_MLLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_global_layers": 1}
_MLLAMA |= {"attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_output_dim": 32, "max_num_tiles": 1}
_MLLAMA |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"mm_tokens_per_image": 4, "image_token_index": IMAGE}),
    "gemma4": (
        "Gemma4",
        {
            "text_config": _TEXT
            | {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8}
            | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": IMAGE + 1, "num_kv_shared_layers": 0},
            "vision_config": _VISION | {"num_key_value_heads": 2, "head_dim": 8},
            "audio_config": None,
        },
    ),
    "llava": (
        "Llava",
        {
            "text_config": {"model_type": "llama"} | _TEXT,
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16} | _VISION,
            "image_token_index": IMAGE,
        },
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": {"model_type": "mistral"} | _TEXT,
            "vision_config": {"model_type": "pixtral", "head_dim": 8} | _VISION,
            "image_token_index": IMAGE,
        },
    ),
    "smolvlm": ("SmolVLM", {"text_config": {"model_type": "llama"} | _TEXT, "image_token_id": IMAGE}),
    "idefics3": ("Idefics3", {"text_config": {"model_type": "llama"} | _TEXT, "image_token_id": IMAGE}),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"text_config": _TEXT | {"rope_parameters": _ROPE}, "vision_config": _QWEN | {"fullatt_block_indexes": [0]}}
        | _QWEN_IDS,
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"text_config": _TEXT | {"rope_parameters": _ROPE}, "vision_config": _QWEN | {"deepstack_visual_indexes": [0]}}
        | _QWEN_IDS,
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {"text_config": _TEXT | {"rope_parameters": _ROPE} | _EXPERTS}
        | {"vision_config": _QWEN | {"deepstack_visual_indexes": [0]}}
        | _QWEN_IDS,
    ),
    "internvl": (
        "InternVL",
        {
            "text_config": {"model_type": "qwen2"} | _TEXT,
            "vision_config": _VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
            "image_token_id": IMAGE,
        },
    ),
    "mllama": (
        "Mllama",
        {
            "text_config": _TEXT | {"num_hidden_layers": 3, "cross_attention_layers": [1]},
            "vision_config": _MLLAMA,
            "image_token_index": IMAGE,
        },
    ),
}
KINDS = tuple(_KINDS)


def model(kind: str) -> PreTrainedModel:
    """With a vision tower of one layer and a language model of two."""
    name, settings = _KINDS[kind]
    settings = {"text_config": _TEXT, "vision_config": _VISION} | settings
    config = getattr(transformers, f"{name}Config")(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: PreTrainedModel = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
        return made
