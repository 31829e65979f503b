"""Messages between ranks: JSON values and tensors, as the bytes of a safetensors file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

_HEAD = "head"
"""The tensor that holds the JSON; others begin with a slash."""


@dataclass(frozen=True)
class Message:
    """Message from one rank to another."""

    work: str
    """Name of the work that is requested, or was done."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """JSON values; floats keep their bits."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors; on the CPU once received."""

    def encoded(self) -> Tensor:
        """The message as uint8."""
        head = torch.frombuffer(bytearray(json.dumps([self.work, self.data]).encode()), dtype=torch.uint8)
        tensors = {f"/{name}": tensor.detach().cpu().contiguous().clone() for name, tensor in self.tensors.items()}
        return torch.frombuffer(bytearray(safetensors.torch.save({_HEAD: head, **tensors})), dtype=torch.uint8)

    @classmethod
    def decoded(cls, content: Tensor) -> "Message":
        tensors = safetensors.torch.load(content.numpy().tobytes())
        work, data = json.loads(tensors.pop(_HEAD).numpy().tobytes())
        return cls(work, data, {name[1:]: tensor for name, tensor in tensors.items()})


def joined(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Rows of unequal length as two tensors."""
    flat = [value for row in rows for value in row]
    return {"flat": torch.tensor(flat, dtype=dtype), "lengths": torch.tensor(list(map(len, rows)), dtype=torch.int64)}


def split(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """The rows that `joined` put together."""
    return [part.tolist() for part in tensors["flat"].split(tensors["lengths"].tolist())]
