"""Facts about a transformers or LoRA model that its object does not provide."""

from typing import Any

from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from grpo_nb.config.unknown import NO_OFFLOADING
from grpo_nb.policy import adapters
from grpo_nb.policy.source import ModelError

AnyModel = PreTrainedModel | PeftModel


def stop_ids(model: AnyModel) -> list[int]:
    """The ids that its own settings stop at."""
    stated = model.generation_config.eos_token_id
    stated = model.config.get_text_config().eos_token_id if stated is None else stated
    return [] if stated is None else [int(i) for i in (stated if isinstance(stated, list) else [stated])]


def plain(model: AnyModel) -> nn.Module:
    """The model without adapters around it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def towers_note(model: AnyModel) -> str:
    """Note about adapters on layers that text never reaches; empty without such layers."""
    if not isinstance(model, PeftModel):
        return ""
    base: Any = model.get_base_model()
    away = adapters.beyond_text(base, adapters.linear_layers(base))
    learning = (name for name, parameter in base.named_parameters() if parameter.requires_grad)
    if idle := adapters.beyond_text(base, learning):
        return f"{len(idle)} adapter weights are where text never reaches and will not change, e.g. {idle[:1]}"
    return f"adapters on the language model only: text never reaches {len(away)} other linear layers" if away else ""


def rank(model: PeftModel) -> int:
    """Rank of the active adapter."""
    settings: Any = model.peft_config[model.active_adapters[0]]
    return int(settings.r)


def embedding(model: AnyModel) -> Tensor:
    """The matrix of the input embedding."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def in_memory(model: AnyModel) -> AnyModel:
    """The model as it is.

    Raises:
        ModelError: weights are elsewhere, as `device_map="auto"` leaves those that a device has no room for.
    """
    away = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if away:
        raise ModelError(
            f"{len(away)} weights of the model are offloaded or were never loaded, e.g. {away[0]}; load it without "
            f"device_map: {NO_OFFLOADING}"
        )
    return model


def shifts_positions(settings: PreTrainedConfig, longest: int) -> str | None:
    """Kind of rotary positions if a row of `longest` tokens changes the positions of its batch; else None.

    `longrope` and `dynamic` take other frequencies for the batch once its longest row is beyond the length that the
    model was first trained with, so a completion's log-probs depend on its neighbours.
    """
    rope = getattr(settings, "rope_parameters", None) or getattr(settings, "rope_scaling", None) or {}
    for given in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = given.get("rope_type", given.get("type"))
        first = given.get("original_max_position_embeddings") or getattr(
            settings, "original_max_position_embeddings", None
        )
        if kind in ("longrope", "dynamic") and longest > (first or settings.max_position_embeddings):
            return str(kind)
    return None
