"""Weights of a model spread over several ranks by FSDP2, each layer complete on a GPU only while it computes.

Each transformer layer is a unit of `fully_shard`; so are the embedding and the output head, where they are not one
matrix. Adapters stay on every rank: they are small, and so their gradients, checkpoints and reference are those of a
training with the base replicated. Where all weights learn, each rank trains its rows of every one (`Parts`): an
optimizer, a reference and a snapshot of them, and complete tensors exist in checkpoints only.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from grpo_nb.policy.source import ModelError
from grpo_nb.ranks import transfer

ADAPTER = ".lora_"
"""Part of the names of adapter weights."""


class Together(Protocol):
    """Protocol by which ranks make passes together; see `ranks.lockstep`."""

    def present(self, well: bool = True) -> None:
        """Announce that every rank is about to take its part of the weights."""

    def begin(self, learns: bool) -> None:
        """Announce that a forward pass begins."""

    def end(self, scores: Tensor) -> None:
        """Mark the end of the pass."""

    def section(self) -> AbstractContextManager[None]:
        """Block that every rank is in at once; they leave it together."""

    def within(self) -> AbstractContextManager[None]:
        """Section within another section; outside of any, nothing."""

    def total(self, value: float) -> float:
        """The sum over all ranks."""


@dataclass(frozen=True)
class Sharding:
    """Ranks that hold a part of the weights each, and their device."""

    group: "dist.ProcessGroup"
    device: torch.device
    passes: Together

    @property
    def reads(self) -> bool:
        """Whether this rank reads the weights and sends them to the others."""
        return dist.get_rank(self.group) == 0

    @property
    def mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self.group, self.device.type)


def spread_layers(base: PreTrainedModel, sharding: Sharding) -> None:
    """Leave this rank its part of every layer; other modules stay complete on the device.

    One unit after the other goes to the device, from rank 0 to the others, and is cut: no rank ever holds more than one
    complete unit and its parts there. Models of the other ranks may have no storage (`meta`) before.

    Raises:
        ModelError: quantised weights, or no list of layers.
    """
    if getattr(base, "is_quantized", False):
        raise ModelError(
            "model.shard='fsdp2', and the weights of this model are quantised, which cannot be cut into shards. Set "
            "model.shard='none', or model.name to the model before it was quantised"
        )
    layers = layers_of(base)
    sharding.passes.present()
    owners, mesh = _owners(base), sharding.mesh
    _place(_buffers(base), sharding)
    for unit in [*_ends(base), *layers]:
        _place(_own(unit, owners), sharding)
        _shard(unit, mesh)
    for layer, before in zip(layers, [layers[0], *layers], strict=False):
        layer.set_modules_to_backward_prefetch([before])  # of the first itself: nothing before it learns
    _place((place for place in _own(base, owners) if not isinstance(place.tensor, DTensor)), sharding)


def spread_root(model: PreTrainedModel | PeftModel, sharding: Sharding) -> None:
    """Cut the modules outside the layers, and make the passes of the model begin on all ranks together."""
    _shard(model, sharding.mesh)
    passes = sharding.passes
    model.register_forward_pre_hook(lambda *_: passes.begin(torch.is_grad_enabled()), prepend=True)
    model.register_forward_hook(lambda module, given, output: passes.end(output.logits))


def _shard(unit: nn.Module, mesh: DeviceMesh) -> None:
    made: Any = fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=adapter_weights(unit))
    made.set_gradient_divide_factor(1.0)  # denominators are those of the complete update
    made.set_force_sum_reduction_for_comms(True)


class Parts:
    """The rows of every trained weight that this rank holds, as parameters of its own over the same memory."""

    def __init__(self, model: nn.Module, names: Sequence[str], sharding: Sharding) -> None:
        named: dict[str, Any] = dict(model.named_parameters())
        self._spread: dict[str, Any] = {name: named[name] for name in names}
        self._sharding = sharding
        self.parameters = {name: Parameter(own(p.detach())) for name, p in self._spread.items()}

    def take_gradients(self) -> None:
        """Give the rows the gradients that backward passes have added up over all ranks."""
        for name, parameter in self._spread.items():
            self.parameters[name].grad = None if parameter.grad is None else own(parameter.grad)
            parameter.grad = None

    def drop_gradients(self) -> None:
        for name, parameter in self._spread.items():
            self.parameters[name].grad = parameter.grad = None

    def rows(self, key: str) -> slice:
        """Rows of this rank in the weight that a key names; the key may continue after a slash."""
        group, whole = self._sharding.group, int(self._spread[key.partition("/")[0]].shape[0])
        rows = -(-whole // dist.get_world_size(group))
        first = min(dist.get_rank(group) * rows, whole)
        return slice(first, min(first + rows, whole))

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather the complete tensors that all ranks have rows of, on rank 0's CPU; a scalar is already complete.

        All ranks call it at once, with the same keys in the same order. One tensor at a time is on the device.
        """
        found: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            gathered = tensor if tensor.dim() == 0 else self._gathered(key, tensor.detach())
            if gathered is not None and self._sharding.reads:
                found[key] = gathered.detach().to("cpu", copy=True).contiguous()
        return found

    def _gathered(self, key: str, tensor: Tensor) -> Tensor | None:
        group, shape = self._sharding.group, self._spread[key.partition("/")[0]].shape
        size = dist.get_world_size(group)
        padded = tensor.new_zeros((-(-int(shape[0]) // size), *shape[1:]))
        padded[: len(tensor)] = tensor
        every = [torch.empty_like(padded) for _ in range(size)] if self._sharding.reads else None
        dist.gather(padded, every, dst=0, group=group)
        return None if every is None else torch.cat(every)[: int(shape[0])]


def fill(model: PreTrainedModel | PeftModel, learns: bool) -> None:
    """A pass over one token, in which this rank provides its parts of the weights and trains nothing."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    kept = [(p, p.grad) for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    with torch.set_grad_enabled(learns):
        scores = model(input_ids=ids, use_cache=False).logits
    if learns:
        scores.backward(scores.new_zeros(()).expand_as(scores))
        for parameter, gradient in kept:
            parameter.grad = gradient


def layers_of(base: PreTrainedModel) -> list[Any]:
    """The transformer layers of the language model.

    Raises:
        ModelError: it has no list of them.
    """
    decoder: Any = base.get_decoder()
    lists: list[nn.Module] = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise ModelError(
            f"model.shard='fsdp2' cuts a model layer by layer, and {type(base).__name__} has no list of layers. Set "
            "model.shard='none'"
        )
    longest: Any = max(lists, key=_size)
    return list(longest)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def adapter_weights(module: nn.Module) -> set[Parameter]:
    """The adapters' weights within a module, the reference's too."""
    return {parameter for name, parameter in module.named_parameters() if ADAPTER in f".{name}"}


def own(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; a tensor that is not spread is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _ends(base: PreTrainedModel) -> list[nn.Module]:
    """Embedding and output head, where each is a matrix of its own."""
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    found = [end for end in ends if end is not None]
    if len({id(end.weight) for end in found}) < 2:
        return []
    return found


@dataclass(frozen=True)
class _Place:
    """A parameter or buffer, in every module that has it."""

    owners: Sequence[tuple[dict[str, Any], str]]
    tensor: Tensor

    def put(self, tensor: Tensor) -> None:
        for own, name in self.owners:
            own[name] = tensor


def _owners(model: nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """Modules that hold each parameter, by its id."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module._parameters, name))
    return found


def _own(module: nn.Module, owners: dict[int, list[tuple[dict[str, Any], str]]]) -> Iterator[_Place]:
    """The parameters of a module, adapters left out."""
    left_out = {id(parameter) for parameter in adapter_weights(module)}
    for parameter in list(module.parameters()):
        if id(parameter) not in left_out:
            yield _Place(owners.get(id(parameter), ()), parameter)


def _buffers(model: nn.Module) -> Iterator[_Place]:
    for module in model.modules():
        for holder in (module._buffers, vars(module)):
            for name, value in list(holder.items()):
                if isinstance(value, Tensor):
                    yield _Place([(holder, name)], value)


def _place(places: Iterable[_Place], sharding: Sharding) -> None:
    """Put tensors on the device, with rank 0's content."""
    moved: list[Tensor] = []
    for place in places:
        tensor, device = place.tensor, sharding.device
        if tensor.is_meta:
            empty = torch.empty_like(tensor, device=device)
            new = Parameter(empty, tensor.requires_grad) if isinstance(tensor, Parameter) else empty
            place.put(new)
        elif isinstance(tensor, Parameter):
            new = tensor
            new.data = tensor.data.to(device)
        else:
            new = tensor.to(device)
            place.put(new)
        moved.append(new.data)
    transfer.send(moved, sharding.group)
