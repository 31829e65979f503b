"""Floors by hand: bytes and products of a small model, at rates that are given."""

import pytest
import torch

from grpo_nb.policy.roofline import Rates, StepTokens, decode_bytes, measure_rates, rollout_floor, train_floor
from grpo_nb.policy.shapes import ModelShape
from tests.support import tiny_models

SHAPE = ModelShape.from_config(tiny_models.model("llama").config)
LINEAR = sum(p.numel() for name, p in tiny_models.model("llama").named_parameters() if "proj" in name)
HEAD = tiny_models.VOCABULARY * 32
TOKENS = StepTokens(rows=8, prompts=20.0, completions=40.0, group=4)


def test_each_token_reads_the_weights_and_what_lies_before_it() -> None:
    by_hand = sum(1000 + 10 * 8 * (7 + t + 0.5) for t in range(5))
    assert decode_bytes(1000, 10, rows=8, prompt=7, steps=5) == by_hand


def test_tokens_are_means_of_a_row() -> None:
    assert (TOKENS.length, TOKENS.prompt_length) == (5.0, 10.0), "two prompts of ten, eight completions of five"


def test_drawing_is_bound_by_bytes_or_by_products() -> None:
    prefill = 2 * 20 * LINEAR
    keys_and_values = 2 * 2 * 2 * 8 * 4  # of 2 layers, 2 heads of 8, in float32
    read = 5 * (4 * (LINEAR + HEAD) + keys_and_values * 8 * (10 + 2.5))
    slow_memory = rollout_floor(SHAPE, TOKENS, Rates(bandwidth=1e3, products=1e9), item=4)
    assert slow_memory == pytest.approx(prefill / 1e9 + read / 1e3)
    slow_products = rollout_floor(SHAPE, TOKENS, Rates(bandwidth=1e12, products=1e3), item=4)
    assert slow_products == pytest.approx((prefill + 2 * 40 * (LINEAR + HEAD)) / 1e3)


def test_training_multiplies_three_times_and_twice_where_the_base_is_frozen() -> None:
    forward = 2 * (60 * LINEAR + 40 * HEAD)
    rates = Rates(bandwidth=1.0, products=1e6)
    assert train_floor(SHAPE, TOKENS, rates, full=True) == pytest.approx(3 * forward / 1e6)
    assert train_floor(SHAPE, TOKENS, rates, full=False, passes=2) == pytest.approx(2 * 2 * forward / 1e6)


def test_rates_are_those_of_the_device() -> None:
    rates = measure_rates(torch.device("cpu"), torch.float32)
    assert rates.bandwidth > 0 and rates.products > 0
