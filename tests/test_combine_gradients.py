"""Combining objectives: the Gramian, each combiner against its definition and TorchJD, cosines, zero gradients."""

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any, get_args

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_nb import combine_gradients
from grpo_nb.combine_gradients import COMBINERS, cagrad, combiner, mgda, pcgrad, upgrad
from grpo_nb.config import AlgorithmConfig

float64 = torch.float64


def torchjd() -> Any:
    """The field's library, when a test asks: with cvxpy it takes a second, in a process that runs other files too."""
    from torchjd import aggregation

    return aggregation


def projector() -> Any:
    from torchjd.linalg import QuadprogProjector

    return QuadprogProjector(reg_eps=1e-10)


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
    torch.testing.assert_close(combine_gradients.gram(as_gradients(J)), J @ J.T)


def test_gram_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    J = jacobian(3)
    monkeypatch.setattr(combine_gradients, "CHUNK", 2)
    torch.testing.assert_close(combine_gradients.gram(as_gradients(J)), J @ J.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gram_adds_up_in_float64(dtype: torch.dtype) -> None:
    """One large and many small contributions: in the gradients' own type the small ones would vanish."""
    large, small = torch.tensor([2.0**13], dtype=dtype), torch.full((4096,), 2.0**-6, dtype=dtype)
    assert combine_gradients.gram([{"large": large, "small": small}]).item() == 2.0**26 + 1
    assert combine_gradients.gram([{"both": torch.cat([large, small])}]).item() == 2.0**26 + 1


def test_a_parameter_that_one_objective_does_not_reach_counts_as_zero() -> None:
    whole = as_gradients(jacobian(2))
    padded = [whole[0], {"bias": whole[1]["bias"], "kernel": torch.zeros(2, 2, dtype=float64)}]
    partial = [whole[0], {"bias": whole[1]["bias"]}]
    weights = torch.tensor([0.3, 2.0], dtype=float64)
    assert torch.equal(combine_gradients.gram(partial), combine_gradients.gram(padded))
    assert torch.equal(combine_gradients.gram(partial[::-1]), combine_gradients.gram(padded[::-1]))
    mine, theirs = combine_gradients.combine(partial, weights), combine_gradients.combine(padded, weights)
    assert list(mine) == ["bias", "kernel"]
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_gram_of_nothing() -> None:
    assert combine_gradients.gram([{}, {}]).tolist() == [[0, 0], [0, 0]]
    assert combine_gradients.gram([{"empty": torch.zeros(0)}]).tolist() == [[0]]


def test_combine_is_the_weighted_sum_and_leaves_its_inputs_alone() -> None:
    J, weights = jacobian(3), torch.tensor([0.5, 2.0, -1.0], dtype=float64)
    grads = as_gradients(J)
    combined = combine_gradients.combine(grads, weights)
    torch.testing.assert_close(torch.cat([combined["bias"], combined["kernel"].flatten()]), weights @ J)
    assert all(torch.equal(g["bias"], row[:3]) for g, row in zip(grads, J, strict=True))


def test_combine_keeps_type_and_shape() -> None:
    combined = combine_gradients.combine([{"w": torch.ones(2, 3, dtype=torch.bfloat16)}] * 2, ones(2))
    assert combined["w"].dtype == torch.bfloat16
    assert combined["w"].tolist() == [[2.0] * 3] * 2


def test_one_objective_of_weight_one_is_bit_equal() -> None:
    g = {"w": torch.randn(100, generator=seeded())}
    assert torch.equal(combine_gradients.combine([g], ones(1))["w"], g["w"])


def test_one_weight_for_each_gradient() -> None:
    with pytest.raises(ValueError):
        combine_gradients.combine(as_gradients(jacobian(3)), ones(2))


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
    J = jacobian(2, 3, seed)
    torch.testing.assert_close(pcgrad(J @ J.T, ones(2), seeded()), torchjd().PCGradWeighting()(J @ J.T))


@pytest.mark.parametrize("seed", range(20))
def test_pcgrad_of_four_equals_torchjd_given_its_order(seed: int) -> None:
    G = conflicting(4, seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        theirs = torchjd().PCGradWeighting()(G)
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


# ---- MGDA, CAGrad, UPGrad: their definitions, over Gramians of chosen rank

seeds, ranks = st.integers(0, 10**6), st.integers(1, 5)
SETTLING = {"mgda": mgda, "cagrad": cagrad, "upgrad": upgrad}


def ranked(objectives: int, rank: int, seed: int) -> Tensor:
    """Gradients of different lengths that depend on each other where rank < objectives; many conflict."""
    draws = seeded(seed)
    mixed = torch.randn(objectives, rank, dtype=float64, generator=draws)
    lengths = 10 ** (2 * torch.rand(objectives, 1, dtype=float64, generator=draws) - 3)
    return lengths * (mixed @ torch.randn(rank, 7, dtype=float64, generator=draws))


def faces(objectives: int) -> list[list[int]]:
    """Every choice of some of the objectives, none included."""
    return [list(face) for k in range(objectives + 1) for face in itertools.combinations(range(objectives), k)]


def shortest(J: Tensor) -> float:
    """min ‖αᵀJ‖² over α ≥ 0, Σα = 1, by trying every face of the hull."""
    found = []
    for face in faces(len(J))[1:]:
        alpha = torch.linalg.pinv(J[face] @ J[face].T, hermitian=True).sum(1)
        if alpha.sum() > 0 and (alpha >= 0).all():
            found.append(float((alpha / alpha.sum() @ J[face]).square().sum()))
        elif torch.linalg.matrix_rank(J[face]) < len(face):
            hull = torch.linalg.lstsq(torch.cat([J[face].T, ones(len(face))[None]]), torch.eye(8, dtype=float64)[7])
            if (hull.solution >= 0).all():
                found.append(float((hull.solution @ J[face]).square().sum()))
    return min(found)


def projected(g: Tensor, J: Tensor) -> Tensor:
    """The nearest d with J d ≥ 0: some constraints hold with equality, and trying every choice finds which."""
    candidates = [g - torch.linalg.pinv(J[face]) @ (J[face] @ g) if face else g for face in faces(len(J))]
    slack = 1e-9 * J.norm(dim=1).max() * g.norm()
    return min((d for d in candidates if (J @ d >= -slack).all()), key=lambda d: float((d - g).norm()))


def test_mgda_by_hand() -> None:
    """g1 = (1, 0), g2 = (0, 2): the shortest point between them is 4/5 of the first and 1/5 of the second."""
    J = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=float64)
    assert mgda(J @ J.T, ones(2), seeded()).tolist() == pytest.approx([2 * 4 / 5, 2 * 1 / 5])


@given(seeds, ranks)
def test_mgda_of_two_meets_its_conditions(seed: int, rank: int) -> None:
    """KKT of the shortest point in the hull: α in the simplex, and no gᵢ·g below ‖g‖²."""
    J = ranked(2, rank, seed)
    alpha = mgda(J @ J.T, ones(2), seeded()) / 2
    g = alpha @ J
    assert (alpha >= 0).all() and alpha.sum().item() == pytest.approx(1)
    assert ((J @ g) - g @ g >= -1e-12 * J.square().sum()).all()


@given(seeds, st.integers(3, 4), ranks)
def test_mgda_of_more_meets_them_as_far_as_it_says(seed: int, objectives: int, rank: int) -> None:
    J = ranked(objectives, rank, seed)
    alpha = mgda(J @ J.T, ones(objectives), seeded()) / objectives
    g, scale = alpha @ J, 1e-3 * J.square().sum()
    assert (alpha >= 0).all() and alpha.sum().item() == pytest.approx(1)
    assert ((J @ g) - g @ g >= -scale).all()
    assert g @ g <= shortest(J) + scale


@given(seeds, st.integers(2, 4), ranks)
def test_upgrad_is_the_sum_of_the_projections(seed: int, objectives: int, rank: int) -> None:
    J = ranked(objectives, rank, seed)
    expected = torch.stack([projected(g, J) for g in J]).sum(0)
    got = upgrad(J @ J.T, ones(objectives), seeded()) @ J
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 * J.norm().item())


@given(seeds, st.integers(2, 5), ranks)
def test_upgrad_serves_every_objective(seed: int, objectives: int, rank: int) -> None:
    J = ranked(objectives, rank, seed)
    g = upgrad(J @ J.T, ones(objectives), seeded()) @ J
    assert (J @ g / J.norm(dim=1) >= -1e-6 * J.norm()).all()


@given(seeds, st.integers(2, 4), ranks, st.sampled_from([0.1, 0.5, 0.9]))
def test_cagrad_is_the_best_for_the_worst_within_its_ball(seed: int, objectives: int, rank: int, c: float) -> None:
    J = ranked(objectives, rank, seed)
    mean, d = J.mean(0), cagrad(J @ J.T, ones(objectives), seeded(), c) @ J / objectives
    slack = 1e-5 * J.norm().item()
    assert (d - mean).norm() <= c * mean.norm() + slack
    others = torch.randn(200, 7, dtype=float64, generator=seeded(seed))
    others = mean + c * mean.norm() * others / others.norm(dim=1, keepdim=True)
    assert (J @ d).min() >= (J @ others.T).min(0).values.max() - slack * J.norm()


@given(seeds, st.integers(2, 5), ranks)
def test_cagrad_with_c_zero_is_the_mean(seed: int, objectives: int, rank: int) -> None:
    """m times the mean, that is the sum."""
    J = ranked(objectives, rank, seed)
    got = combiner("cagrad", 0.0)(J @ J.T, ones(objectives), seeded()) @ J / objectives
    torch.testing.assert_close(got, J.mean(0))


def test_c_of_cagrad_is_bound_by_name() -> None:
    G = conflicting(3)
    results = [combiner("cagrad", c)(G, ones(3), seeded()) for c in (0.1, 0.5, 0.9)]
    assert not torch.allclose(results[0], results[1]) and not torch.allclose(results[1], results[2])
    assert torch.equal(combiner("upgrad", 0.1)(G, ones(3), seeded()), upgrad(G, ones(3), seeded()))


EXPLICIT = [
    [[1.0, 0.0], [-1.0, 1.0]],
    [[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0]],
    [[1.0, 0.2, 0.0], [-0.5, 1.0, 0.3], [0.1, -0.9, 0.7]],
]


@pytest.mark.parametrize("rows", EXPLICIT)
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("mgda", lambda: torchjd().MGDA(epsilon=1e-6, max_iters=1000)),
        ("cagrad", lambda: torchjd().CAGrad(c=0.5)),
        ("upgrad", lambda: torchjd().UPGrad(projector=projector())),
    ],
)
def test_they_are_torchjds_at_the_scale_of_a_sum(name: str, theirs: Callable[[], Any], rows: list[Any]) -> None:
    J = torch.tensor(rows, dtype=float64)
    torch.testing.assert_close(SETTLING[name](J @ J.T, ones(len(J)), seeded()) @ J, len(J) * theirs()(J))


# ---- what combiners have in common

every_combiner = pytest.mark.parametrize("name", COMBINERS)


@every_combiner
def test_weights_stretch_the_gradients(name: str) -> None:
    J, weights = ranked(3, 3, 1), torch.tensor([0.2, 1.0, 3.0], dtype=float64)
    stretched = weights[:, None] * J
    expected = COMBINERS[name](stretched @ stretched.T, ones(3), seeded()) @ stretched
    torch.testing.assert_close(COMBINERS[name](J @ J.T, weights, seeded()) @ J, expected)


@pytest.mark.parametrize("name", ["sum", *SETTLING])
@settings(max_examples=30)  # of six orders; mgda takes longest
@given(seed=seeds, order=st.permutations(range(3)))
def test_the_order_of_objectives_does_not_matter(name: str, seed: int, order: list[int]) -> None:
    """`pcgrad` alone draws an order."""
    J = ranked(3, 3, seed)
    got, permuted = (COMBINERS[name](K @ K.T, ones(3), seeded()) for K in (J, J[order]))
    torch.testing.assert_close(permuted, got[order], rtol=1e-5, atol=1e-5)


@every_combiner
@pytest.mark.parametrize("length", [1e-9, 1e9])
def test_no_length_is_too_small_or_too_large(name: str, length: float) -> None:
    J = ranked(3, 3, 1)
    G = (length * J) @ (length * J).T
    torch.testing.assert_close(
        COMBINERS[name](G, ones(3), seeded()), COMBINERS[name](J @ J.T, ones(3), seeded()), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("name", ["sum", "pcgrad", "upgrad"])
def test_without_conflict_the_weights_are_the_objectives_weights(name: str) -> None:
    J = jacobian(3).abs()
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=float64)
    torch.testing.assert_close(COMBINERS[name](J @ J.T, weights, seeded()), weights, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", SETTLING)
def test_gradients_that_agree_are_added(name: str) -> None:
    J = torch.tensor([[0.3, -0.4]] * 3, dtype=float64)
    got = combiner(name, 0.0)(J @ J.T, ones(3), seeded()) @ J
    torch.testing.assert_close(got, J.sum(0))


@pytest.mark.parametrize("name", ["mgda", "upgrad"])
def test_gradients_that_are_opposite_cancel(name: str) -> None:
    J = torch.tensor([[3.0, 4.0], [-1.5, -2.0]], dtype=float64)
    got = COMBINERS[name](J @ J.T, ones(2), seeded()) @ J
    torch.testing.assert_close(got, torch.zeros(2, dtype=float64), rtol=0, atol=1e-6)


@every_combiner
def test_no_global_randomness_and_twice_the_same(name: str) -> None:
    G = conflicting(3)
    before = torch.default_generator.get_state(), random.getstate(), numpy.random.get_state()[1].copy()
    first = COMBINERS[name](G, ones(3), seeded())
    assert torch.equal(COMBINERS[name](G, ones(3), seeded()), first)
    assert torch.equal(torch.default_generator.get_state(), before[0])
    assert random.getstate() == before[1] and (numpy.random.get_state()[1] == before[2]).all()


@every_combiner
def test_a_gramian_rounded_below_zero_is_no_obstacle(name: str) -> None:
    """As on a device that adds up in float32: three gradients in one plane, 120 degrees apart but for rounding."""
    G = 1.5000001 * torch.eye(3, dtype=float64) - 0.5000001
    assert torch.linalg.eigvalsh(G)[0] < -1e-7
    assert COMBINERS[name](G, ones(3), seeded()).isfinite().all()


def test_a_sum_takes_conflicts_as_they_are() -> None:
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=float64)
    assert torch.equal(COMBINERS["sum"](conflicting(3), weights, seeded()), weights)


@every_combiner
@pytest.mark.parametrize("zero", range(3))
def test_a_zero_gradient_is_no_conflict(name: str, zero: int) -> None:
    """It keeps its own weight, the others are settled among themselves, and nothing is divided by 0."""
    G = conflicting(3)
    G[zero], G[:, zero] = 0, 0
    rest = [i for i in range(3) if i != zero]
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=float64)
    got = COMBINERS[name](G, weights, seeded())
    assert got[zero] == weights[zero]
    torch.testing.assert_close(got[rest], COMBINERS[name](G[rest][:, rest], weights[rest], seeded()))
    assert torch.equal(COMBINERS[name](torch.zeros(3, 3, dtype=float64), weights, seeded()), weights)


@pytest.mark.parametrize("name", SETTLING)
@pytest.mark.parametrize("length", [1e-7, 1e-30, 1e-200])
def test_a_gradient_of_rounding_errors_is_zero(name: str, length: float) -> None:
    """It must neither stop the others nor be blown up to their length."""
    J = jacobian(2)
    J[0] *= length * J[1].norm() / J[0].norm()
    assert COMBINERS[name](J @ J.T, ones(2), seeded()).tolist() == [1, 1]


def test_a_short_gradient_does_not_make_cagrad_zero() -> None:
    J = torch.tensor([[1.0, 0.0], [0.0, 2e-6]], dtype=float64)
    assert (cagrad(J @ J.T, ones(2), seeded()) @ J)[0] == pytest.approx(1)


@every_combiner
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_reaches_the_guard(name: str, bad: float) -> None:
    grads = [{"w": torch.tensor([bad, 1.0])}, {"w": torch.tensor([-1.0, -1.0])}]
    weights = torch.tensor([0.2, 3.0], dtype=float64)
    got = COMBINERS[name](combine_gradients.gram(grads), weights, seeded())
    assert torch.equal(got, weights)
    assert not combine_gradients.combine(grads, got)["w"].isfinite().all()


@pytest.mark.parametrize("name", ["cagrad", "upgrad"])
def test_a_missing_solver_shows_in_the_rehearsal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    combine_gradients.rehearse(name)
    monkeypatch.setattr("torchjd._mixins.find_spec", lambda package: None)
    with pytest.raises(ImportError):
        combine_gradients.rehearse(name)


@pytest.mark.parametrize("name", ["sum", "pcgrad", "mgda"])
def test_the_others_need_no_solver(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchjd._mixins.find_spec", lambda package: None)
    combine_gradients.rehearse(name)


def test_settings_and_table_agree() -> None:
    assert set(get_args(AlgorithmConfig.model_fields["combine"].annotation)) == set(COMBINERS)


# ---- norms and cosines


def test_norms_come_from_the_gramian() -> None:
    J = jacobian(3)
    torch.testing.assert_close(combine_gradients.norms(J @ J.T), J.norm(dim=1))


@given(st.integers(0, 10**6))
def test_cosine_does_not_see_lengths(seed: int) -> None:
    J = jacobian(3, seed=seed)
    lengths = torch.tensor([[1e-9], [1.0], [1e9]], dtype=float64)
    expected = torch.nn.functional.cosine_similarity(J[:, None], J[None], dim=-1)
    for scaled in (J, lengths * J):
        torch.testing.assert_close(combine_gradients.cosine(scaled @ scaled.T), expected, atol=1e-12, rtol=0)


def test_cosine_of_a_zero_gradient_is_zero_not_nan() -> None:
    J = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]], dtype=float64)
    assert combine_gradients.cosine(J @ J.T).tolist() == [[1, 0, -1], [0, 0, 0], [-1, 0, 1]]


def test_min_cosine_leaves_zero_gradients_out() -> None:
    """An objective without signal in this step must not read as "no conflict"."""
    J = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], dtype=float64)
    assert combine_gradients.min_cosine(J @ J.T) == pytest.approx(2**-0.5)
    assert combine_gradients.min_cosine(J[:2] @ J[:2].T) is None
    assert combine_gradients.min_cosine(J[:1] @ J[:1].T) is None


def test_min_cosine_is_that_of_the_worst_pair() -> None:
    J = jacobian(4)
    pairs = [torch.cosine_similarity(a, b, dim=0).item() for a, b in itertools.combinations(J, 2)]
    assert combine_gradients.min_cosine(J @ J.T) == pytest.approx(min(pairs))


def test_a_gradient_of_rounding_conflicts_with_nobody() -> None:
    """Its direction is noise: taking it out of the other gradient would change that one by as much as a true one."""
    J = torch.tensor([[1.0, 1.0], [-1e-8, 1e-9]], dtype=float64)
    weights = torch.ones(2, dtype=float64)
    assert combine_gradients.pcgrad(J @ J.T, weights, torch.Generator()).tolist() == pytest.approx([1, 1], abs=1e-6)
    J[1] *= 1e5
    assert combine_gradients.pcgrad(J @ J.T, weights, torch.Generator()).tolist() != [1, 1]
