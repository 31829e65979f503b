"""Any causal language model of transformers, made tiny: sizes by every name that configurations use for them."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from tests.support import tiny_models

SIZES: dict[str, Any] = {
    **{"vocab_size": tiny_models.VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "attention_hidden_size", "lru_width"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff", "ffn_hidden_size"), 48
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(
        ("head_dim", "d_kv", "rotary_dim", "state_size", "mamba_d_state", "mamba_n_heads", "mamba_d_head"), 8
    ),
    **dict.fromkeys(("conv_kernel", "mamba_d_conv", "time_step_rank", "chunk_size", "mamba_chunk_size"), 4),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("expand", "mamba_expand"), 2),
    **{"attention_window_size": 8, "sliding_window": 6, "first_k_dense_replace": 1, "q_lora_rank": 16},
    **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "bamba": {"layer_types": ["mamba", "attention"], "attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "qwen3_next": {"num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
"""What single kinds want besides, mostly a layer that attends."""
LARGEST = 3_000_000
"""Parameters above which a model counts as not tiny."""


def causal(kind: str, **settings: Any) -> PreTrainedModel:
    """A model of that `model_type`, its weights large enough for peaked distributions.

    Raises:
        ValueError: it is not tiny; whatever its configuration raises besides.
    """
    configuration = CONFIG_MAPPING[kind]
    known = vars(configuration()) | {name: None for name in configuration.__init__.__annotations__}
    chosen = {k: v for k, v in (SIZES | OWN.get(kind, {}) | settings).items() if k in known or k in OWN.get(kind, {})}
    with torch.device("meta"):  # what keeps its full size would not fit into memory
        planned = AutoModelForCausalLM.from_config(configuration(**chosen))
    if sum(p.numel() for p in planned.parameters()) > LARGEST:
        raise ValueError(f"{kind} is not tiny")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(configuration(**chosen)).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() >= 2 and 0 < weight.std() < 0.1:
                    weight.mul_(0.3 / weight.std())
    return model
