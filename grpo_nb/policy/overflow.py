"""Finds the layer where numbers stop being finite although all weights are: one forward pass with hooks, on demand."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from grpo_nb.policy.model import Policy


@dataclass(frozen=True)
class Overflow:
    """The first module whose output is not finite."""

    layer: str
    """Name of the layer in the model."""
    kind: str
    """Class of the layer."""
    dtype: str
    largest: float
    """Largest |x| of its finite inputs, weights of the module included."""
    inputs_finite: bool
    """Whether its inputs are finite; False: an operation between modules made them."""


class _Found(Exception):
    def __init__(self, overflow: Overflow) -> None:
        self.overflow = overflow


def first_layer(
    policy: Policy, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> Overflow | None:
    """The first module that gives inf or NaN on some completions; None where every output is finite, or where the base
    is spread over ranks, which an aborted pass would leave waiting.
    """
    if policy.sharding is not None:
        return None
    names = {module: name for name, module in policy.model.named_modules() if name}
    hooks = [module.register_forward_hook(partial(_look, name), with_kwargs=True) for module, name in names.items()]
    try:
        with policy.eval_mode():
            policy.logprobs(policy.collate(prompts, completions))
    except _Found as found:
        return found.overflow
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _look(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
    found = [tensor for tensor in _floats(output) if not _finite(tensor)]
    if not found:
        return
    given = [*_floats(args), *_floats(kwargs), *(p.detach() for p in module.parameters(recurse=False))]
    largest = max((float(t[t.isfinite()].abs().max()) for t in given if t.isfinite().any()), default=math.nan)
    dtype = str(found[0].dtype).removeprefix("torch.")
    raise _Found(Overflow(name, type(module).__name__, dtype, largest, all(map(_finite, given))))


def _finite(tensor: Tensor) -> bool:
    """Whether the tensor has no NaN, +inf or -inf; -inf is allowed in an attention mask."""
    return not bool((tensor.isnan() | tensor.isposinf()).any())


def _floats(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors among a module's inputs or outputs."""
    if isinstance(value, Tensor):
        if torch.is_floating_point(value):
            yield value.detach()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _floats(item)
