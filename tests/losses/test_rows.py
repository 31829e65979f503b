"""The rows of algorithms.py: what a new surrogate needs, and that nothing else in the package knows one by name."""

import ast
import functools
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import grpo_nb
from grpo_nb import losses, presets
from grpo_nb.algorithms import (
    ADVANTAGE_ROWS,
    ALGORITHMS,
    KL_ROWS,
    SURROGATE_ROWS,
    Algorithm,
    Bound,
    SurrogateRow,
    algorithm,
    widest_log_ratio,
)
from grpo_nb.config import Config, ConfigError, parse
from grpo_nb.losses import ClipConfig
from grpo_nb.losses.surrogates import SURROGATES
from grpo_nb.report import toy_math
from grpo_nb.rules.learning import entropy_collapse
from tests.support.sources import tree_of
from tests.support.tokens import names, pattern

PACKAGE = Path(grpo_nb.__file__).parent
ONE = torch.ones(1, 1)
NEW = "clipped_log_ratio"


def clipped_log_ratio(
    logp: Tensor, logp_old: Tensor, advantage: Tensor, limits: ClipConfig, mask: Tensor | None = None
) -> Tensor:
    return -losses.log_ratio(logp, logp_old, mask).clamp(-limits.low, limits.high) * advantage


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """One function, its row, and an algorithm that uses it."""
    row = SurrogateRow(Bound.LOG_RATIO, Bound.LOG_RATIO, clips_weight=True, settings=("sapo_tau_positive",))
    monkeypatch.setitem(SURROGATES, NEW, clipped_log_ratio)
    monkeypatch.setitem(SURROGATE_ROWS, NEW, row)  # type: ignore[arg-type]
    monkeypatch.setitem(ALGORITHMS, NEW, Algorithm("rloo", NEW, "token_mean", "k2", (0.5, 1.5), ""))  # type: ignore[arg-type]


def config(**changes: object) -> Config:
    return presets.demo().replace(**{f"algorithm.{name}": value for name, value in changes.items()})


@pytest.mark.usefixtures("added")
def test_the_settings_take_a_new_surrogate() -> None:
    chosen = config(name=NEW)
    assert parse(chosen.model_dump(mode="json")) == chosen
    assert config(surrogate=NEW).algorithm.row.clip == (0.5, 1.5), "its own usual clip"
    assert widest_log_ratio(algorithm(NEW)) == 1.5
    with pytest.raises(ConfigError, match=pattern("log_ratio_clamp=1", 1.5)):
        config(name=NEW, log_ratio_clamp=1.0)
    with pytest.raises(ConfigError, match=pattern("dual_clip=3", f"'{NEW}'")):
        config(name=NEW, dual_clip=3.0)
    with pytest.raises(ConfigError, match=pattern("algorithm.surrogate", "'clipped_log_rati'", f"'{NEW}'")):
        config(surrogate="clipped_log_rati")


@pytest.mark.usefixtures("added")
def test_a_setting_that_surrogates_share_is_idle_without_one_of_them() -> None:
    used = {"sapo_tau_positive": 3.0}
    off_policy = {"batch.num_iterations": 2}
    assert config(name=NEW, **used).replace(**off_policy).unused_settings() == []
    (note,) = config(name="grpo", **used).replace(**off_policy).unused_settings()
    assert names(note, "algorithm.sapo_tau_positive", "'sapo'", f"'{NEW}'")


@pytest.mark.usefixtures("added")
def test_the_loss_and_its_report_take_a_new_surrogate() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    logp = torch.tensor([[0.2, -1.0, 2.0]], requires_grad=True)
    old, limits = torch.zeros(1, 3), ClipConfig(0.5, 1.5)
    tokens = losses.LossInputs(logp, old, None, ONE, mask)
    terms = losses.loss_terms(tokens, losses.LossConfig(algorithm(NEW), limits), 0.0, losses.LossNormalizer(1, 3, 3))
    assert terms["policy"].item() == pytest.approx(-(0.2 - 0.5 + 1.5) / 3)
    assert torch.autograd.grad(terms["policy"], logp)[0].tolist() == [pytest.approx([-1 / 3, 0, 0])]
    low, high = losses.clip_fractions(NEW, logp, old, ONE, limits, mask)
    assert (low.item(), high.item()) == pytest.approx((1 / 3, 1 / 3)), "of a weight, whatever the advantage"


@pytest.mark.usefixtures("added")
def test_the_rules_and_the_exhibits_take_a_new_surrogate() -> None:
    rows = [{"step": i + 1, "entropy/fairness": 1.0 if i < 20 else 0.01} for i in range(60)]
    finding = entropy_collapse(rows, config(name=NEW).replace(**{"batch.num_iterations": 2}), "fairness")
    assert finding is not None and names(finding.advice, "algorithm.clip_high", 1.5)
    assert toy_math.algorithms().frame.set_index("name").loc[NEW, "clip"] == "0.5, 1.5"
    pulls = toy_math.pulls(1.0)[NEW]
    assert pulls.loc[0.7:4.4].tolist() == pytest.approx([1] * len(pulls.loc[0.7:4.4])) and pulls.loc[4.5:].max() == 0


def test_the_picture_over_one_ratio_shows_the_surrogates_that_have_one() -> None:
    assert list(toy_math.pulls(1.0)) == ["ppo_clip", "cispo", "cispo_cap", "sapo", "cpgd"]


@pytest.mark.parametrize("name", SURROGATE_ROWS)
def test_the_clip_rests_between_its_bounds(name: str) -> None:
    """The gradient of each side changes at the bound that the row says, and is that of the ratio in between."""
    clip = {"low": 0.4, "high": 3.0 if SURROGATE_ROWS[name].high is Bound.CAP else 0.4}
    lowest, highest = SURROGATE_ROWS[name].log_bounds(**clip)

    def pull(at: float, advantage: float) -> float:
        logp = torch.tensor([[at]], dtype=torch.float64, requires_grad=True)
        sampled, A = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), advantage, dtype=torch.float64)
        loss = SURROGATES[name](logp, sampled, A, ClipConfig(**clip, drift=0.0), None)
        return float(torch.autograd.grad(loss.sum(), logp)[0])

    for bound, side in ((lowest, -1.0), (highest, 1.0)):
        if abs(bound) < float("inf"):
            inside, outside, beyond = (pull(bound + side * shift, side) for shift in (-1e-3, 1e-3, 2e-3))
            assert abs(inside) > 0 and outside == beyond, "held: the pull no longer follows the ratio"
            assert (outside == 0) != SURROGATE_ROWS[name].clips_weight


def words(tree: ast.AST) -> Iterator[str]:
    """The texts of a module that are neither documentation nor its list of exports."""
    for node in ast.iter_child_nodes(tree):
        exports = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif not (exports or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))):
            yield from words(node)


@functools.cache
def words_of(path: Path) -> list[str]:
    return [*words(tree_of(path))]


@pytest.mark.parametrize(
    ("kind", "homes"),
    [
        (SURROGATE_ROWS, {"losses/advantages.py"}),  # `cpgd` is an advantage as well
        (ADVANTAGE_ROWS, {"losses/advantages.py"}),
        (KL_ROWS, {"losses/kl.py"}),
    ],
    ids=["surrogate", "advantage", "kl"],
)
def test_nothing_else_knows_a_choice_by_name(kind: Collection[str], homes: set[str]) -> None:
    name = re.compile(rf"\b(?:{'|'.join(kind)})\b")
    found = {
        f"{home}: {text}"
        for path in PACKAGE.rglob("*.py")
        if (home := path.relative_to(PACKAGE).as_posix()) not in homes | {"algorithms.py"}
        for text in words_of(path)
        if name.search(text)
    }
    assert not found
