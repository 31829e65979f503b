"""One error for a device whose memory is full, from whichever library it comes."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_nb.printable import Clean

_SAID = re.compile(r"\bout of memory\b|_STATUS_ALLOC_FAILED|can't allocate memory|not enough memory", re.IGNORECASE)
"""CUDA's runtime and Apple's MPS; cuBLAS, cuDNN and cuSOLVER; the allocator of the CPU."""


@contextmanager
def full_memory() -> Iterator[None]:
    """Inside the block a full memory is torch.OutOfMemoryError, also where torch raises a bare RuntimeError for it.

    Raises:
        OutOfMemoryError: the memory is full.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError | Clean) or not _SAID.search(str(error)):
            raise
        raise torch.OutOfMemoryError(str(error)) from error
