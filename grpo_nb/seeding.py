"""Randomness as a function: every draw comes from a generator derived from (seed, step, stream name).

Nothing here has a state to save: step 40 of a resumed run has the draws of step 40 of an uninterrupted one.
"""

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor


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


def uniforms(key: int, rows: Tensor, columns: int) -> Tensor:
    """float64 in [0, 1), [row, column], on the device of `rows`: entry (row number, column) is a function of the key.

    Counter-based (Philox 4x32-10, Salmon et al. 2011), so that any part of the table can be made anywhere with the
    same bits: for some of the rows, in another order, on another device.
    """
    column = torch.arange(columns, device=rows.device)
    high, low = philox((column[None, :], rows.long()[:, None]), key)
    return ((high >> 5) * 2**26 + (low >> 6)).double() / 2**53


def philox(counter: tuple[Tensor, Tensor], key: int) -> tuple[Tensor, Tensor]:
    """The first two words of Philox 4x32-10 at the counter (c0, c1, 0, 0); 32-bit numbers in int64."""
    c0, c1 = torch.broadcast_tensors(*counter)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = key & _WORD, key >> 32 & _WORD
    for _ in range(10):
        first, second = _PHILOX[0] * c0, _PHILOX[1] * c2  # wraps around; the low 64 bits are right
        c0, c1 = (second >> 32 & _WORD) ^ c1 ^ k0, second & _WORD
        c2, c3 = (first >> 32 & _WORD) ^ c3 ^ k1, first & _WORD
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return c0, c1


_WORD = 2**32 - 1
_PHILOX, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
"""Multipliers of the rounds, and steps of the key from round to round."""


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
