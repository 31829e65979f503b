"""LoRA adapters, and the frozen reference that a policy can be switched to and back."""

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo_nb import seeding
from grpo_nb.config import ModelConfig
from grpo_nb.policy.loading import quietly
from grpo_nb.policy.source import ModelError, refuse_unsupported

REFERENCE = "reference"
"""Name of the frozen adapter."""


def attach(model: PreTrainedModel, config: ModelConfig, base: str, seed: int) -> PeftModel:
    """The model with fresh LoRA adapters (Hu et al. 2021): B is 0, so the policy starts as the base model.

    `auto` targets are all linear layers of the language model but the output head: none of a vision or audio tower,
    which text never reaches. Adapters are float32 whatever the base is, have no dropout, and A is a function of the
    seed.

    Raises:
        ModelError: `lora_targets` match nothing.
    """
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # peft divides it by r: any positive number will do
        lora_dropout=0.0,
        target_modules="all-linear" if config.lora_targets == "auto" else list(config.lora_targets),
        exclude_modules=beyond_text(model, linear_layers(model)) or None if config.lora_targets == "auto" else None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    try:
        with seeding.seeded(seed, 0, "lora"), quietly():
            wrapped = get_peft_model(model, lora, autocast_adapter_dtype=True)
    except ValueError as error:
        raise ModelError(_no_target(model, config, error)) from error
    wrapped.peft_config["default"].base_model_name_or_path = base
    return wrapped


def beyond_text(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Names of modules or parameters, among `names`, that text never reaches.

    They are outside of the decoder (vision and audio towers, projectors) or in its cross-attention layers; the output
    head is not among them. None for a model of text alone.
    """
    inside, head = _name_of(model, model.get_decoder()), _name_of(model, model.get_output_embeddings())
    crossing = getattr(model.config.get_text_config(), "cross_attention_layers", None) or []
    images_only = tuple(f"{inside}layers.{i}." for i in crossing)
    reached = (inside, head) if head else (inside,)
    return [name for name in names if not f"{name}.".startswith(reached) or name.startswith(images_only)]


def linear_layers(model: nn.Module) -> list[str]:
    """Names of the layers that `auto` chooses from; an adapter's own are not among them."""
    kinds = nn.Linear | Conv1D
    return [name for name, m in model.named_modules() if isinstance(m, kinds) and ".lora_" not in name]


def _name_of(model: nn.Module, part: nn.Module | None) -> str:
    """`model.language_model.`; empty for the model itself and for a module outside of it."""
    found = next((name for name, module in model.named_modules() if module is part), "")
    return f"{found}." if found else ""


def trainable_names(model: PreTrainedModel | PeftModel) -> tuple[str, ...]:
    """Names of the parameters that train, in the model's order.

    Raises:
        ModelError: none does, or not exactly one LoRA adapter is active.
    """
    if isinstance(model, PeftModel) and len(model.active_adapters) != 1:
        raise ModelError(f"adapters {model.active_adapters} are active; needs exactly one: model.set_adapter(name)")
    if isinstance(model, PeftModel) and not isinstance(model.peft_config[model.active_adapters[0]], LoraConfig):
        raise ModelError(f"an adapter of type {model.peft_type}; only LoRA can be trained here")
    if isinstance(model, PeftModel):
        refuse_unsupported(vars(model.peft_config[model.active_adapters[0]]), "this adapter")
    names = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    if not names:
        raise ModelError(
            "no parameter of this model has requires_grad, so nothing would train; load an adapter with "
            "is_trainable=True, or call model.requires_grad_(True) to train it in full"
        )
    return names


@runtime_checkable
class Reference(Protocol):
    """Frozen weights of the names that train, which can take the place of the policy's."""

    def state(self) -> dict[str, Tensor]:
        """The reference weights by the trainable parameters' names; live tensors, not copies."""

    def active(self) -> contextlib.AbstractContextManager[None]:
        """The model computes with the reference weights inside the block, with its own again after the outermost."""

    def settle(self) -> None:
        """Make the model compute with its own weights again, where an interrupt broke off the end of `active`."""


class _Switch(ABC):
    """Switch to a reference and back, once however deep blocks are nested."""

    def __init__(self) -> None:
        self._open: object | None = None
        """Token of the outermost block."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        if self._open is not None:
            yield
            return
        self.settle()
        self._open = mine = object()
        try:
            self._switch()
            yield
        finally:
            if self._open is mine:  # else settled since: an interrupt left the block, and only now it is collected
                self.settle()

    def settle(self) -> None:
        self._switch_back()
        self._open = None

    @abstractmethod
    def _switch(self) -> None:
        """Make the model compute with the reference weights."""

    @abstractmethod
    def _switch_back(self) -> None:
        """Make it compute with its own weights again, if it does not; can be repeated after an interrupt."""


class AdapterReference(_Switch):
    """A second adapter, frozen and inactive: the base weights exist once."""

    def __init__(self, model: PeftModel, trainable: Mapping[str, Parameter]) -> None:
        super().__init__()
        self.model = model
        self.trained = model.active_adapters[0]
        if REFERENCE in model.peft_config:
            raise ModelError(
                f"this model has an adapter named '{REFERENCE}' already, of another Policy around it or of its own. "
                "The frozen reference needs that name. Pass the Policy that trained this model before, or load the "
                "model again"
            )
        settings: Any = copy.deepcopy(model.peft_config[self.trained])
        settings.inference_mode, settings.lora_dropout = True, 0.0
        settings.init_lora_weights = True  # other ways (PiSSA, OLoRA) would change the base weights once more
        self._flags = self._requires_grad()
        """Flags of the weights that require a gradient, while the reference acts: peft freezes one adapter and
        unfreezes the other."""
        try:
            with seeding.seeded(0, 0, "lora"), quietly():
                model.add_adapter(REFERENCE, settings)
        finally:
            self.settle()
        present = dict(model.named_parameters())
        twins = {name: present[self._name(name)] for name in present if self._name(name) != name}
        for name, twin in twins.items():  # of all the adapter's weights, in case some of them do not train
            twin.data = present[name].detach().clone()
            twin.requires_grad_(False)
        if others := [name for name in trainable if name not in twins]:
            raise ModelError(
                f"{others[0]} trains beside the adapter, so the reference would move with it; freeze it, or name its "
                "module in LoraConfig(modules_to_save=...)"
            )
        self.weights = {name: twins[name] for name in trainable}

    def state(self) -> dict[str, Tensor]:
        return {name: weight.data for name, weight in self.weights.items()}

    def _switch(self) -> None:
        self._flags = self._requires_grad()
        self.model.set_adapter(REFERENCE, inference_mode=True)

    def _switch_back(self) -> None:
        if self._flags:
            self.model.set_adapter(self.trained)
            for parameter, flag in self._flags:
                parameter.requires_grad_(flag)
            self._flags = []

    def _requires_grad(self) -> list[tuple[Parameter, bool]]:
        return [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]

    def _name(self, trainable: str) -> str:
        return ".".join(REFERENCE if part == self.trained else part for part in trainable.split("."))


class CopiedReference(_Switch):
    """Copies of all weights that train, exchanged with them: for models small enough to train in full."""

    def __init__(self, trainable: Mapping[str, Parameter]) -> None:
        super().__init__()
        self.trainable = trainable
        self.weights = {name: parameter.detach().clone() for name, parameter in trainable.items()}
        self._own: dict[str, Tensor] = {}
        """The policy's own weights, while the reference's are in their place."""

    def state(self) -> dict[str, Tensor]:
        return self.weights

    def _switch(self) -> None:
        self._own = {name: parameter.data for name, parameter in self.trainable.items()}
        for name, parameter in self.trainable.items():
            parameter.data = self.weights[name]

    def _switch_back(self) -> None:
        for name, weights in self._own.items():
            self.trainable[name].data = weights
        self._own = {}


class ExchangedReference(_Switch):
    """Copies of a rank's rows of all weights that train, whose content takes the place of theirs: FSDP gathers from
    memory that must stay where it is. While the reference acts, the copies hold the policy's own."""

    def __init__(self, trainable: Mapping[str, Parameter]) -> None:
        super().__init__()
        self.trainable = trainable
        self.weights = {name: parameter.detach().clone() for name, parameter in trainable.items()}
        self._left: list[str] = []
        """Names whose content is still exchanged."""

    @property
    def acts(self) -> bool:
        return bool(self._left)

    def state(self) -> dict[str, Tensor]:
        return self.weights

    def _switch(self) -> None:
        for name in self.trainable:
            self._exchange(name)
            self._left.append(name)

    def _switch_back(self) -> None:
        while self._left:
            self._exchange(self._left[-1])
            self._left.pop()

    @torch.no_grad()
    def _exchange(self, name: str) -> None:
        own, copied = self.trainable[name], self.weights[name]
        before = own.detach().clone()
        own.copy_(copied)
        copied.copy_(before)


def _no_target(model: nn.Module, config: ModelConfig, error: ValueError) -> str:
    linear = {name.rsplit(".", 1)[-1] for name in linear_layers(model)}
    return f"lora_targets={config.lora_targets}: {error} Linear layers of this model: {', '.join(sorted(linear))}"


def snapshot(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Independent, contiguous copies on CPU."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}


def restore(weights: Mapping[str, Tensor], state: Mapping[str, Tensor], what: str) -> None:
    """Write `state` into `weights` in place, bit for bit.

    Raises:
        ModelError: a name is missing or unexpected, or a shape or type differs; nothing is written then.
    """
    if wrong := _mismatches(weights, state):
        shown = "; ".join(wrong[:6]) + (f"; and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        raise ModelError(
            f"{what} does not fit this model: {shown}. It needs the weights of the same model and settings"
        )
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(state[name])


def _mismatches(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    missing = [f"missing {name}" for name in weights if name not in state]
    unexpected = [f"unexpected {name}" for name in state if name not in weights]
    unlike = [
        f"{name} is {_kind(state[name])}, needs {_kind(tensor)}"
        for name, tensor in weights.items()
        if name in state and _kind(state[name]) != _kind(tensor)
    ]
    return [*missing, *unexpected, *unlike]


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
