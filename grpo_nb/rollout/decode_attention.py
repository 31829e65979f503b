"""Attention of one new token per row, registered with transformers: no mask, no copy of keys for grouped queries."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface

from grpo_nb.rollout.static_cache import LayerCache, StaticCache, Unserved

NAME = "grpo_nb_decode"
"""Name of this attention in a model's configuration."""
UNUSED = {"position_ids", "position_embeddings", "use_cache", "output_attentions", "is_causal", "cache_position"}
"""Arguments of attention functions that have no effect here."""


@dataclass(frozen=True)
class Options:
    scale: float
    window: int | None
    """Keys that a query sees, itself included; None: all."""


def attend(
    module: nn.Module,
    query: Float[Tensor, "row head one d"],
    key: Float[Tensor, "row kv_head one d"],
    value: Float[Tensor, "row kv_head one d"],
    attention_mask: Tensor | None,
    **given: Any,
) -> tuple[Float[Tensor, "row one head d"], None]:
    """The rows' new queries over their prompts and their own tokens; the new keys and values are stored.

    Raises:
        Unserved: the model's attention is another function.
    """
    cache, options = _read(module, query, given)
    layer = cache.layers[cast(int, module.layer_idx)].first(query.shape[0])
    return run(query, key, value, layer, cache, options), None


# A compiler stops before it and continues after it: the number of a layer is read here alone, so that all layers share
# the code compiled for one.
AttentionInterface.register(NAME, torch.compiler.disable(attend))


def run(
    query: Tensor, key: Tensor, value: Tensor, layer: LayerCache, cache: StaticCache, options: Options
) -> Float[Tensor, "row one head d"]:
    """Decoding attention with parsed arguments: `layer` is of the queries' rows."""
    if query.device.type == "cpu":
        return reference(query, key, value, layer, cache, options)
    from grpo_nb.rollout import attention_triton

    return attention_triton.attention(query, key, value, layer, cache, options)


def reference(
    query: Tensor, key: Tensor, value: Tensor, layer: LayerCache, cache: StaticCache, options: Options
) -> Float[Tensor, "row one head d"]:
    """Decoding attention in plain torch, for any device."""
    rows, heads, _, d = query.shape
    step = cache.step
    layer.own_keys.index_copy_(2, step, key)
    layer.own_values.index_copy_(2, step, value)
    group = cache.group[:rows]
    keys = torch.cat([layer.prompt_keys[group], layer.own_keys], 2)
    values = torch.cat([layer.prompt_values[group], layer.own_values], 2)
    length = layer.prompt_keys.shape[2]
    slot = torch.arange(keys.shape[2], device=query.device)
    seen = (slot >= cache.start[group][:, None]) & (slot <= length + step)
    if options.window is not None:
        seen &= slot > length + step - options.window
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], d)
    scores = (grouped @ keys.transpose(2, 3)).float() * options.scale
    weights = torch.softmax(scores.masked_fill(~seen[:, None, None], -torch.inf), -1)
    return (weights.to(values.dtype) @ values).reshape(rows, 1, heads, d)


def _read(module: nn.Module, query: Tensor, given: dict[str, Any]) -> tuple[StaticCache, Options]:
    """The cache and the options among an attention function's arguments."""
    cache = given.pop("grpo_cache", None)
    if cache is None or query.shape[2] != 1 or not hasattr(module, "layer_idx"):
        raise Unserved(f"{type(module).__name__} does not hand its arguments to the attention function")
    scale, window = given.pop("scaling", None), given.pop("sliding_window", None)
    given.pop("dropout", None)
    for name in UNUSED & given.keys():
        del given[name]
    strange = [name for name, value in given.items() if value is not None and value is not False]
    if strange:
        raise Unserved(f"{type(module).__name__} has the attention argument '{strange[0]}'")
    return cache, Options(query.shape[3] ** -0.5 if scale is None else float(scale), window)
