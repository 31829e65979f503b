"""The decoder's layers compiled while decoding: the code of one serves all, since none of it depends on which it is."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo

MOST_SHAPES = 64
"""Numbers of rows that the layers of all models of a process are compiled for; the rest run as they are."""


class CompiledLayers:
    """The layers of a model and their compiled forward functions; of no model: nothing."""

    def __init__(self, base: Any | None) -> None:
        kinds = set(base._no_split_modules or ()) if base is not None else set()
        layers = [m for m in base.modules() if type(m).__name__ in kinds] if base is not None else []
        self.forwards: list[tuple[Any, Callable[..., Any]]] = [
            (layer, torch.compile(layer.forward, dynamic=False)) for layer in layers
        ]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The layers run compiled inside the block, as they were after it."""
        try:
            for layer, forward in self.forwards:
                vars(layer)["forward"] = forward
            with torch._dynamo.config.patch(recompile_limit=MOST_SHAPES):
                yield
        finally:
            for layer, _ in self.forwards:
                vars(layer).pop("forward", None)
