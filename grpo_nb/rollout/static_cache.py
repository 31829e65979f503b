"""Key and value cache at fixed addresses: each prompt's once for its group, and each row's own tokens.

All rows of a batch have sampled the same number of tokens, so token t of every row lies in slot t of its own part. A
prompt fills the last slots of its part. Position of slot j of a prompt: j - start; of a row's slot t: length + t.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo_nb.printable import Clean


class Unserved(Clean):
    """Raised when the graph engine cannot sample from this model; the text has the reason."""


@dataclass
class LayerCache:
    """One layer's keys and values."""

    prompt_keys: Float[Tensor, "prompt head position d"]
    prompt_values: Float[Tensor, "prompt head position d"]
    own_keys: Float[Tensor, "row head token d"]
    own_values: Float[Tensor, "row head token d"]

    def first(self, rows: int) -> "LayerCache":
        """View of the first rows, on the same memory."""
        return LayerCache(self.prompt_keys, self.prompt_values, self.own_keys[:rows], self.own_values[:rows])


@dataclass(frozen=True)
class Size:
    """Capacity of a cache."""

    prompts: int
    rows: int
    prompt: int
    """Tokens of a prompt."""
    tokens: int
    """Tokens of a completion."""

    def holds(self, other: "Size") -> bool:
        """Whether a cache of this size has room for the other's rows."""
        larger = self.prompts >= other.prompts and self.prompt >= other.prompt and self.tokens >= other.tokens
        return larger and self.rows >= other.rows


class StaticCache:
    """Keys and values for decoding attention, and the numbers that mark their filled parts."""

    def __init__(self, size: Size, like: Cache, group_rows: int) -> None:
        self.size, self.group_rows = size, group_rows
        self.layers = [_room(size, layer) for layer in like.layers]
        device = self.layers[0].own_keys.device

        def numbers(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        self.group = numbers(size.rows, torch.long)
        """Prompt of each row, [row]."""
        self.first = numbers(size.prompts + 1)
        """Rows first[p] to first[p + 1] belong to prompt p."""
        self.start = numbers(size.prompts)
        """The first filled slot of each prompt."""
        self.step = numbers(1, torch.long)
        """Slot of the rows' next token, which is the number of tokens that each has."""
        self._scratch: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def load(self, prompts: Cache, lengths: Sequence[int], group: Sequence[int]) -> None:
        """Take over a prefill's keys and values, padded on the left; row b belongs to prompt `group[b]`, in order."""
        layers: list[Any] = prompts.layers
        for layer, filled in zip(self.layers, layers, strict=True):
            count, _, width, _ = filled.keys.shape
            layer.prompt_keys[:count, :, self.size.prompt - width :] = filled.keys
            layer.prompt_values[:count, :, self.size.prompt - width :] = filled.values
        unused = self.size.prompts - len(lengths)
        starts = [self.size.prompt - length for length in lengths] + [0] * unused
        self.start.copy_(torch.tensor(starts, dtype=torch.int32))
        self.step.zero_()
        self._assign(group)

    def keep(self, rows: Sequence[int], group: Sequence[int], filled: int) -> None:
        """Move these rows, of which `filled` slots are filled, to the front; they belong to the prompts of `group`."""
        index = torch.tensor(rows, device=self.step.device)
        for layer in self.layers:
            for own in (layer.own_keys, layer.own_values):
                own[: len(rows), :, :filled] = own[index, :, :filled]
        self._assign(group)

    def scratch(self, heads: int, spans: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """float32 memory for each query's result on each span of the prompt; the layers share it."""
        key = heads, spans, width
        if key not in self._scratch:
            shape, device = (self.size.rows, heads, spans), self.step.device
            self._scratch[key] = (
                torch.empty(*shape, width, device=device),
                torch.empty(shape, device=device),
                torch.empty(shape, device=device),
            )
        return self._scratch[key]

    def _assign(self, group: Sequence[int]) -> None:
        assert list(group) == sorted(group)
        counts = torch.bincount(torch.tensor(group, dtype=torch.long), minlength=self.size.prompts)
        self.first.copy_(torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]))
        self.group[: len(group)] = torch.tensor(group, device=self.group.device)


class Passing(Cache):
    """Cache argument of a model's decoding step, which passes new keys and values on to the attention."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def bytes_per_token(like: Cache) -> int:
    """Bytes per token of the keys and values of all layers."""
    layers: list[Any] = like.layers
    return sum(t.shape[1] * t.shape[3] * t.element_size() for layer in layers for t in (layer.keys, layer.values))


def check_layers(cache: Cache) -> None:
    """Check that a static cache can take over these layers.

    Raises:
        Unserved: a layer has a state, shares another's keys, or has values of another width.
    """
    layers: list[Any] = cache.layers
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise Unserved(f"a layer keeps its past as {type(layer).__name__}")
        if layer.keys is None or layer.values is None or layer.keys.shape != layer.values.shape:
            raise Unserved("a layer has no keys of its own, or values of another width")


def _room(size: Size, like: Any) -> LayerCache:
    _, heads, _, d = like.keys.shape

    def room(rows: int, slots: int) -> Tensor:
        return torch.zeros(rows, heads, slots, d, dtype=like.keys.dtype, device=like.keys.device)

    prompts, own = (size.prompts, size.prompt), (size.rows, size.tokens)
    return LayerCache(room(*prompts), room(*prompts), room(*own), room(*own))
