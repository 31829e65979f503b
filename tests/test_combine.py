"""Combining objectives: the Gramian, PCGrad against its paper and against TorchJD, cosines, zero gradients."""

import itertools
import threading
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_nb import combine
from grpo_nb.combine import COMBINERS, pcgrad
from grpo_nb.config import AlgorithmConfig

float64 = torch.float64


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def jacobian(objectives: int, parameters: int = 7, seed: int = 0) -> Tensor:
    return torch.randn(objectives, parameters, dtype=float64, generator=seeded(seed))


def ones(objectives: int) -> Tensor:
    return torch.ones(objectives, dtype=float64)


def as_gradients(matrix: Tensor) -> list[dict[str, Tensor]]:
    """Rows cut into two named parameters, one of them a matrix."""
    return [{"bias": row[:3].clone(), "kernel": row[3:7].clone().view(2, 2)} for row in matrix]


def conflicting(objectives: int = 3, seed: int = 0) -> Tensor:
    """A Gramian in which every pair of gradients conflicts, with different lengths and angles."""
    noise = 0.2 * jacobian(objectives, objectives, seed)
    rows = torch.eye(objectives, dtype=float64) - 0.6 / objectives + noise.tril(-1).abs() * -1
    return rows @ rows.T


# ---- the Gramian and the combination


def test_gram_is_the_matrix_of_dot_products() -> None:
    J = jacobian(3)
    torch.testing.assert_close(combine.gram(as_gradients(J)), J @ J.T)


def test_gram_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    J = jacobian(3)
    monkeypatch.setattr(combine, "CHUNK", 2)
    torch.testing.assert_close(combine.gram(as_gradients(J)), J @ J.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gram_adds_up_in_float64(dtype: torch.dtype) -> None:
    """One large and many small contributions: in the gradients' own type the small ones would vanish."""
    large, small = torch.tensor([2.0**13], dtype=dtype), torch.full((4096,), 2.0**-6, dtype=dtype)
    assert combine.gram([{"large": large, "small": small}]).item() == 2.0**26 + 1
    assert combine.gram([{"both": torch.cat([large, small])}]).item() == 2.0**26 + 1


def test_a_parameter_that_one_objective_does_not_reach_counts_as_zero() -> None:
    whole = as_gradients(jacobian(2))
    padded = [whole[0], {"bias": whole[1]["bias"], "kernel": torch.zeros(2, 2, dtype=float64)}]
    partial = [whole[0], {"bias": whole[1]["bias"]}]
    weights = torch.tensor([0.3, 2.0], dtype=float64)
    assert torch.equal(combine.gram(partial), combine.gram(padded))
    assert torch.equal(combine.gram(partial[::-1]), combine.gram(padded[::-1]))
    mine, theirs = combine.combine(partial, weights), combine.combine(padded, weights)
    assert list(mine) == ["bias", "kernel"]
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_gram_of_nothing() -> None:
    assert combine.gram([{}, {}]).tolist() == [[0, 0], [0, 0]]
    assert combine.gram([{"empty": torch.zeros(0)}]).tolist() == [[0]]


def test_combine_is_the_weighted_sum_and_leaves_its_inputs_alone() -> None:
    J, weights = jacobian(3), torch.tensor([0.5, 2.0, -1.0], dtype=float64)
    grads = as_gradients(J)
    combined = combine.combine(grads, weights)
    torch.testing.assert_close(torch.cat([combined["bias"], combined["kernel"].flatten()]), weights @ J)
    assert all(torch.equal(g["bias"], row[:3]) for g, row in zip(grads, J, strict=True))


def test_combine_keeps_type_and_shape() -> None:
    combined = combine.combine([{"w": torch.ones(2, 3, dtype=torch.bfloat16)}] * 2, ones(2))
    assert combined["w"].dtype == torch.bfloat16
    assert combined["w"].tolist() == [[2.0] * 3] * 2


def test_one_objective_of_weight_one_is_bit_equal() -> None:
    g = {"w": torch.randn(100, generator=seeded())}
    assert torch.equal(combine.combine([g], ones(1))["w"], g["w"])


def test_one_weight_for_each_gradient() -> None:
    with pytest.raises(ValueError):
        combine.combine(as_gradients(jacobian(3)), ones(2))


# ---- PCGrad


def test_pcgrad_by_hand() -> None:
    """g1 = (1, 0), g2 = (-1, 1): each loses its part along the other; g1' = (.5, .5), g2' = (0, 1)."""
    J = torch.tensor([[1.0, 0.0], [-1.0, 1.0]], dtype=float64)
    assert (pcgrad(J @ J.T, ones(2), seeded()) @ J).tolist() == pytest.approx([0.5, 1.5])


def paper(J: Tensor, orders: list[tuple[int, ...]]) -> Tensor:
    """Algorithm 1 of Yu et al. 2020 on the gradients themselves."""
    total = torch.zeros_like(J[0])
    for i, order in enumerate(orders):
        g = J[i].clone()
        for j in order:
            if j != i and g @ J[j] < 0:
                g -= (g @ J[j]) / (J[j] @ J[j]) * J[j]
        total += g
    return total


@given(st.integers(0, 10**6), st.integers(2, 5))
def test_pcgrad_is_the_papers_algorithm_on_weighted_gradients(seed: int, objectives: int) -> None:
    J = jacobian(objectives, seed=seed) - 0.3
    weights = torch.rand(objectives, dtype=float64, generator=seeded(seed)) + 0.1
    draws = seeded(seed)
    orders = [tuple(torch.randperm(objectives, generator=draws).tolist()) for _ in range(objectives)]
    ours = pcgrad(J @ J.T, weights, seeded(seed)) @ J
    torch.testing.assert_close(ours, paper(weights[:, None] * J, orders))


@given(st.integers(0, 10**6))
def test_pcgrad_of_two_equals_torchjd(seed: int) -> None:
    """With two objectives there is no order to draw, so the field's library must say exactly the same."""
    aggregation = pytest.importorskip("torchjd.aggregation")
    J = jacobian(2, 3, seed)
    torch.testing.assert_close(pcgrad(J @ J.T, ones(2), seeded()), aggregation.PCGradWeighting()(J @ J.T))


@pytest.mark.parametrize("seed", range(20))
def test_pcgrad_of_four_equals_torchjd_given_its_order(seed: int) -> None:
    aggregation = pytest.importorskip("torchjd.aggregation")
    G = conflicting(4, seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        theirs = aggregation.PCGradWeighting()(G)
    torch.testing.assert_close(pcgrad(G, ones(4), seeded(seed)), theirs)


def test_the_order_matters_and_comes_from_the_generator_alone() -> None:
    G = conflicting(3)
    results = {tuple(pcgrad(G, ones(3), seeded(seed)).tolist()) for seed in range(30)}
    assert len(results) > 1
    before = torch.default_generator.get_state()
    torch.rand(3)
    assert tuple(pcgrad(G, ones(3), seeded(0)).tolist()) == tuple(pcgrad(G, ones(3), seeded(0)).tolist())
    torch.default_generator.set_state(before)
    pcgrad(G, ones(3), seeded(0))
    assert torch.equal(torch.default_generator.get_state(), before)


def test_another_thread_that_draws_changes_nothing() -> None:
    """A notebook cell that draws while a run trains: why the order is not taken from torch's global generator."""
    G, done = conflicting(3), threading.Event()

    def draw() -> None:
        while not done.is_set():
            torch.rand(1000)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        results = {tuple(pcgrad(G, ones(3), seeded(0)).tolist()) for _ in range(200)}
    finally:
        done.set()
        thread.join()
    assert len(results) == 1


def test_pcgrad_leaves_no_pair_of_two_in_conflict() -> None:
    for seed in range(50):
        J = jacobian(2, 3, seed)
        combined = pcgrad(J @ J.T, ones(2), seeded()) @ J
        assert (J @ combined >= -1e-12).all()


@pytest.mark.parametrize("combiner", COMBINERS)
def test_without_conflict_the_weights_are_the_objectives_weights(combiner: str) -> None:
    J = jacobian(3).abs()
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=float64)
    assert torch.equal(COMBINERS[combiner](J @ J.T, weights, seeded()), weights)


def test_a_sum_takes_conflicts_as_they_are() -> None:
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=float64)
    assert torch.equal(COMBINERS["sum"](conflicting(3), weights, seeded()), weights)


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("zero", range(3))
def test_a_zero_gradient_is_no_conflict(combiner: str, zero: int) -> None:
    """It keeps its own weight, the others are settled among themselves, and nothing is divided by 0."""
    G = conflicting(3)
    G[zero], G[:, zero] = 0, 0
    rest = [i for i in range(3) if i != zero]
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=float64)
    got = COMBINERS[combiner](G, weights, seeded())
    assert got[zero] == weights[zero]
    torch.testing.assert_close(got[rest], COMBINERS[combiner](G[rest][:, rest], weights[rest], seeded()))
    assert torch.equal(COMBINERS[combiner](torch.zeros(3, 3, dtype=float64), weights, seeded()), weights)


def test_a_gradient_that_is_not_finite_reaches_the_guard() -> None:
    grads = [{"w": torch.tensor([float("nan"), 1.0])}, {"w": torch.tensor([-1.0, -1.0])}]
    weights = pcgrad(combine.gram(grads), ones(2), seeded())
    assert weights.isfinite().all()
    assert combine.combine(grads, weights)["w"].isnan().any()


def test_settings_and_table_agree() -> None:
    assert set(get_args(AlgorithmConfig.model_fields["combine"].annotation)) == set(COMBINERS)


# ---- norms and cosines


def test_norms_come_from_the_gramian() -> None:
    J, weights = jacobian(3), torch.tensor([0.5, 2.0, 1.0])
    torch.testing.assert_close(combine.norms(J @ J.T), J.norm(dim=1))
    torch.testing.assert_close(combine.combined_norm(J @ J.T, weights), (weights.double() @ J).norm())


@given(st.integers(0, 10**6))
def test_cosine_does_not_see_lengths(seed: int) -> None:
    J = jacobian(3, seed=seed)
    lengths = torch.tensor([[1e-9], [1.0], [1e9]], dtype=float64)
    expected = torch.nn.functional.cosine_similarity(J[:, None], J[None], dim=-1)
    for scaled in (J, lengths * J):
        torch.testing.assert_close(combine.cosine(scaled @ scaled.T), expected, atol=1e-12, rtol=0)


def test_cosine_of_a_zero_gradient_is_zero_not_nan() -> None:
    J = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]], dtype=float64)
    assert combine.cosine(J @ J.T).tolist() == [[1, 0, -1], [0, 0, 0], [-1, 0, 1]]


def test_min_cosine_leaves_zero_gradients_out() -> None:
    """An objective without signal in this step must not read as "no conflict"."""
    J = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], dtype=float64)
    assert combine.min_cosine(J @ J.T) == pytest.approx(2**-0.5)
    assert combine.min_cosine(J[:2] @ J[:2].T) is None
    assert combine.min_cosine(J[:1] @ J[:1].T) is None


def test_min_cosine_is_that_of_the_worst_pair() -> None:
    J = jacobian(4)
    pairs = [torch.cosine_similarity(a, b, dim=0).item() for a, b in itertools.combinations(J, 2)]
    assert combine.min_cosine(J @ J.T) == pytest.approx(min(pairs))
