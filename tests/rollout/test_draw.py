"""The draw on the device: the same tokens as the eager engine's, log-probs of what was drawn."""

import math
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_nb.rollout import eager, sampling
from grpo_nb.rollout.decode_attention import Options, reference
from grpo_nb.rollout.static_cache import Size, StaticCache

LARGEST = math.nextafter(1.0, 0.0)


def drawn(scores: Tensor, uniforms: Tensor | None, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    step = torch.tensor([0])
    table = None if uniforms is None else uniforms[:, None]
    return sampling.draw(scores, torch.tensor([temperature]), table, step)


@pytest.mark.parametrize("vocabulary", [5, sampling.BLOCK, 3 * sampling.BLOCK + 7])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_tokens_are_those_of_the_eager_draw(vocabulary: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    scores = 3 * torch.randn(200, vocabulary, generator=generator)
    scores[torch.rand(200, vocabulary, generator=generator) < 0.5] = -math.inf
    scores[:, -1] = 0.0
    uniforms = torch.rand(200, dtype=torch.float64, generator=generator)
    tokens, logprobs = drawn(scores, uniforms, temperature)
    assert tokens.tolist() == eager.sample_inverse_cdf(scores / temperature, uniforms).tolist()
    expected = torch.log_softmax((scores / temperature).double(), -1).gather(1, tokens[:, None])[:, 0]
    assert logprobs.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    likeliest, _ = drawn(scores, None, temperature)
    assert likeliest.tolist() == scores.argmax(-1).tolist()


@given(
    st.lists(st.one_of(st.just(-math.inf), st.floats(-80, 80)), min_size=1, max_size=12),
    st.one_of(st.just(0.0), st.just(LARGEST), st.floats(0, 1, exclude_max=True)),
    st.integers(0, 3000),
)
def test_a_token_of_probability_zero_is_never_drawn(logits: list[float], u: float, gap: int) -> None:
    scores = torch.tensor([[*logits, *[-math.inf] * gap, 0.0]])
    probabilities = torch.softmax(scores.double(), -1)[0]
    token = int(drawn(scores, torch.tensor([u], dtype=torch.float64))[0])
    below = float(probabilities[:token].sum())
    assert scores[0, token] > scores.max() - 104  # weights below exp(-104) are 0 in float32
    assert below - 1e-6 <= u <= below + float(probabilities[token]) + 1e-6  # it is the inverse of the CDF


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_show_in_the_logprob(bad: float) -> None:
    scores = torch.zeros(3, 7)
    scores[1, 3] = bad
    for uniforms in (None, torch.full((3,), 0.5, dtype=torch.float64)):
        tokens, logprobs = drawn(scores, uniforms)
        assert logprobs.isfinite().tolist() == [True, False, True] and 0 <= int(tokens[1]) < 7


# ---- the kernels, where Triton is: on a GPU, or with TRITON_INTERPRET=1

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def kernels(name: str) -> object:
    pytest.importorskip("triton", reason="Triton is not installed")
    if not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("needs a CUDA GPU, or TRITON_INTERPRET=1")
    return __import__(f"grpo_nb.rollout.{name}", fromlist=[name])


@pytest.mark.parametrize("vocabulary", [25, 2500])
def test_the_drawing_kernels(vocabulary: int) -> None:
    module, generator = kernels("draw_triton"), torch.Generator().manual_seed(1)
    scores = (3 * torch.randn(6, vocabulary, generator=generator)).to(DEVICE)
    scores[:, ::3] = -math.inf
    table = torch.rand(6, 4, dtype=torch.float64, generator=generator).to(DEVICE)
    table[0, 2], table[1, 2] = 0.0, LARGEST
    temperature, step = torch.tensor([0.7], device=DEVICE), torch.tensor([2], device=DEVICE)
    for uniforms in (table, None):
        tokens, logprobs = module.draw(scores, temperature, uniforms, step, sampling.BLOCK)  # type: ignore[attr-defined]
        expected = sampling.reference(scores, temperature, uniforms, step)
        assert tokens.tolist() == expected[0].tolist()
        assert logprobs.tolist() == pytest.approx(expected[1].tolist(), abs=1e-5)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 8), (6, 2, 24), (4, 4, 16)])
def test_the_attention_kernels(heads: int, kv_heads: int, d: int, window: int | None) -> None:
    module, generator = kernels("attention_triton"), torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    from transformers import DynamicCache

    like, group, step = DynamicCache(), [0, 0, 0, 2, 2], 70
    like.update(normal(3, kv_heads, 90, d), normal(3, kv_heads, 90, d), 0)
    own, query = [normal(5, kv_heads, 128, d) for _ in range(2)], normal(5, heads, 1, d)
    new = [normal(5, kv_heads, 1, d) for _ in range(2)]
    caches = [StaticCache(Size(3, 5, 96, 128), like, 3) for _ in range(2)]
    for cache in caches:
        cache.load(like, [90, 40, 1], group)
        cache.layers[0].own_keys.copy_(own[0])
        cache.layers[0].own_values.copy_(own[1])
        cache.step.fill_(step)
    options = Options(d**-0.5, window)
    found = module.attention(query, *new, caches[0].layers[0], caches[0], options)  # type: ignore[attr-defined]
    expected = reference(query, *new, caches[1].layers[0], caches[1], options)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(caches[0].layers[0].own_keys, caches[1].layers[0].own_keys)
    assert torch.equal(caches[0].layers[0].own_values, caches[1].layers[0].own_values)


def test_the_layer_kernels() -> None:
    module, generator = kernels("layer_triton"), torch.Generator().manual_seed(3)
    from grpo_nb.rollout import layer_ops

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    norms, turn = (normal(8), normal(8)), (normal(3, 8), normal(3, 8))
    calls = {
        "add_norm": (normal(3, 40), normal(3, 40), normal(40), 1e-6),
        "rotate": (normal(3, 64), (4, 2, 8), norms, 1e-6, *turn),
        "gate": (normal(3, 2200),),
        "low": (normal(3, 1500), normal(6, 1500)),
    }
    for name, arguments in calls.items():
        there = [_on(DEVICE, argument) for argument in arguments]
        found, expected = getattr(module, name)(*there), getattr(layer_ops, name)(*arguments)
        pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        assert all(torch.allclose(a.cpu(), b, atol=1e-4, rtol=1e-5) for a, b in pairs), name


def _on(device: str, argument: object) -> object:
    if isinstance(argument, tuple):
        return tuple(_on(device, part) for part in argument)
    return argument.to(device) if isinstance(argument, Tensor) else argument
