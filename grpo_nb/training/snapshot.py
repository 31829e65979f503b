"""The last good state of a training in memory: weights, optimizer moments, controllers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_nb.beta_control import BetaState
from grpo_nb.losses import Moments
from grpo_nb.optim import Parameters
from grpo_nb.training.recovery import Recovery

Controllers = Mapping[str, tuple[BetaState, Moments]]
"""Beta and reward moments of each objective; frozen records, so that no copy is needed."""


@dataclass
class Snapshot:
    """Copies that `take` writes over at each step boundary, and `restore` writes back bit for bit."""

    on_host: bool = True
    """Whether copies lie in the machine's memory, page-locked with a GPU; else on the device of the weights."""
    controllers: Controllers = field(default_factory=dict)
    recovery: Recovery = field(default_factory=Recovery)
    """Recovery from earlier rollbacks; a record, too."""
    _weights: list[Tensor] = field(default_factory=list)
    _moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Moments by parameter name; empty before the optimizer's first step."""

    def take(self, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        """Copy the present weights and moments."""
        weights = [parameter.detach() for parameter in parameters.values()]
        moments = {name: dict(optimizer.state.get(parameter, {})) for name, parameter in parameters.items()}
        if len(self._weights) != len(weights) or self._layout() != {name: set(own) for name, own in moments.items()}:
            self._weights = [self._room(tensor) for tensor in weights]
            self._moments = {name: {k: self._room(t) for k, t in own.items()} for name, own in moments.items()}
        _copy([*self._weights, *_flat(self._moments)], [*weights, *_flat(moments)])

    def restore(self, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        """Write the copies back; an optimizer without moments then has none again."""
        weights = [parameter.detach() for parameter in parameters.values()]
        for name, parameter in parameters.items():
            if not self._moments[name]:
                optimizer.state.pop(parameter, None)
        moments = [optimizer.state[parameters[n]][key] for n, own in self._moments.items() for key in own]
        _copy([*weights, *moments], [*self._weights, *_flat(self._moments)])

    def _layout(self) -> dict[str, set[str]]:
        return {name: set(own) for name, own in self._moments.items()}

    def _room(self, tensor: Tensor) -> Tensor:
        if not self.on_host or tensor.device.type == "cpu":
            return torch.empty_like(tensor)
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


def _flat(moments: Mapping[str, Mapping[str, Tensor]]) -> list[Tensor]:
    return [tensor for own in moments.values() for tensor in own.values()]


@torch.no_grad()
def _copy(to: list[Tensor], tensors: list[Tensor]) -> None:
    torch._foreach_copy_(to, tensors, non_blocking=True)  # in the stream's order, as are all readers of the copies
