"""Every draw is a function of (seed, step, stream): stable, independent, and free of global state."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_nb import seeding
from grpo_nb.seeding import derived_seed, generator, permutation, seeded


def draws(seed: int, step: int, stream: str, n: int = 8) -> tuple[float, ...]:
    return tuple(torch.rand(n, generator=generator(seed, step, stream), dtype=torch.float64).tolist())


def test_golden_values() -> None:
    """A run that is resumed by a later version must draw the same: these numbers never change."""
    assert derived_seed(0, 0, "rollout") == 5922040756056484737
    assert derived_seed(7, 40, "rollout") == 1001922136060441022
    assert draws(0, 1, "rollout", 3) == (0.7156855929355971, 0.7071051599938055, 0.4913526182219624)
    assert permutation(8, 0, 0, "prompts") == [2, 6, 3, 4, 5, 1, 0, 7]


def test_same_arguments_same_draws_in_another_process() -> None:
    code = "import torch; from grpo_nb.seeding import *; print(torch.rand(8, generator=generator(3, 4, 'x')).tolist())"
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == str(torch.rand(8, generator=generator(3, 4, "x")).tolist())


def test_streams_differ_in_every_argument() -> None:
    keys = list(itertools.product((0, 1, 10), (0, 1, 10), ("", "a", "b", "0", "permutation/a")))
    assert len({draws(*key) for key in keys}) == len(keys)
    assert len({derived_seed(1, 11, "a"), derived_seed(11, 1, "a"), derived_seed(1, 1, "1/a")}) == 3


def test_streams_are_uncorrelated() -> None:
    table = torch.tensor([draws(seed, step, s, 2000) for seed in (0, 1) for step in (0, 1) for s in "ab"])
    assert table.mean() == pytest.approx(0.5, abs=0.01)
    off_diagonal = torch.corrcoef(table).fill_diagonal_(0)
    assert off_diagonal.abs().max() < 0.1  # 4.5 standard errors


def test_permutation_is_one_and_changes_with_the_epoch() -> None:
    orders = [permutation(20, 0, epoch, "prompts") for epoch in range(5)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5
    assert permutation(0, 0, 0, "x") == []


def test_seeded_leaves_the_global_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt), seeded(0, 1, "lora"):
        first = torch.rand(4)
        raise KeyboardInterrupt
    assert torch.equal(torch.get_rng_state(), before)
    with seeded(0, 1, "lora"):
        assert torch.equal(torch.rand(4), first)


def test_uniforms_are_a_function_of_key_row_and_column() -> None:
    table = seeding.uniforms(7, torch.arange(40), 30)
    assert table.dtype == torch.float64 and table.shape == (40, 30)
    assert torch.equal(seeding.uniforms(7, torch.tensor([5, 39, 2]), 12), table[[5, 39, 2], :12])
    assert len(table.unique()) == 1200 and not torch.equal(seeding.uniforms(8, torch.arange(40), 30), table)
    many = seeding.uniforms(seeding.derived_seed(0, 1, "rollout"), torch.arange(300), 300)
    assert many.min() >= 0 and many.max() < 1
    assert many.mean() == pytest.approx(0.5, abs=0.005) and many.var() == pytest.approx(1 / 12, abs=0.002)
    assert abs(torch.corrcoef(torch.stack([many[:-1].flatten(), many[1:].flatten()]))[0, 1]) < 0.01


def test_philox_gives_the_published_words() -> None:
    zero = torch.tensor(0)
    assert [int(word) for word in seeding.philox((zero, zero), 0)] == [0x6627E8D5, 0xE169C58D]
