"""Weights and gradients from device to device, some tensors at a time."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 256 << 20
"""Bytes that one transfer copies at most, in addition to the tensors themselves."""


def send(tensors: Sequence[Tensor], group: "dist.ProcessGroup") -> None:
    """Make the tensors of every rank those of rank 0, bit for bit and in place."""
    for bucket in buckets(tensors):
        flat = _flat(bucket)
        dist.broadcast(flat, src=0, group=group)
        _spread(flat, bucket)


def add_up(tensors: Sequence[Tensor], group: "dist.ProcessGroup") -> None:
    """Make rank 0's tensors the sums over all ranks, in place; those of the others are undefined afterwards."""
    for bucket in buckets(tensors):
        flat = _flat(bucket)
        dist.reduce(flat, dst=0, group=group)
        _spread(flat, bucket)


def buckets(tensors: Sequence[Tensor], most: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Tensors of one type in a row, together at most so many bytes (one that is larger stands alone)."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > most):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """A tensor that lies in one piece is sent as it is."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].detach().view(-1)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    if flat.data_ptr() == tensors[0].data_ptr():
        return
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])
