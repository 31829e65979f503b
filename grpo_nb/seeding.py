"""Randomness as a function: every draw comes from a generator derived from (seed, step, stream name).

Nothing here has a state to save: step 40 of a resumed run draws what step 40 of an uninterrupted one drew.
"""

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def derived_seed(seed: int, step: int, stream: str) -> int:
    """The 63-bit number that stands for (seed, step, stream): the head of a BLAKE2b hash, the same everywhere.

    >>> derived_seed(0, 1, "sample") == derived_seed(0, 1, "sample") != derived_seed(0, 1, "shuffle")
    True
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, step: int, stream: str, device: str | torch.device = "cpu") -> torch.Generator:
    """A fresh generator for one stream of one step; the same arguments give the same draws."""
    return torch.Generator(device=device).manual_seed(derived_seed(seed, step, stream))


def permutation(n: int, seed: int, epoch: int, stream: str) -> list[int]:
    """A uniform order of range(n) for one epoch of one stream."""
    return torch.randperm(n, generator=generator(seed, epoch, f"permutation/{stream}")).tolist()


@contextlib.contextmanager
def seeded(seed: int, step: int, stream: str) -> Iterator[None]:
    """Torch's global CPU generator holds this stream inside the block, and its old state again after it.

    No other thread may draw meanwhile: it would draw from this stream.

    For code that takes no generator, such as the initialisation of a module's weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derived_seed(seed, step, stream))
        yield
