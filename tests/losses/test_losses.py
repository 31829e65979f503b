"""The table of algorithms: TRL's golden losses, every row's invariances, reductions, weights, entropy, refusals.

Golden numbers come from TRL at commit f2cd577 (1.10.0.dev0), its `_compute_loss` in float64 with stubbed log-probs.
Inputs and values only; no code is shared. `golden/` holds those of a released version.
"""

import dataclasses
import json
import subprocess
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_nb import algorithms, losses
from grpo_nb.algorithms import ALGORITHMS, algorithm
from grpo_nb.losses import LossNormalizer
from tests.conftest import ROOT
from tests.support import forked
from tests.support.tokens import names, pattern
from tests.support.trl_case import COUNTS, ENTROPY, LOGP, MASK, OLD, REF, ROW, float64, loss_and_gradient

NAN, INF = float("nan"), float("inf")
PLAIN = {"clip": (0.2, 0.2)}
SEQUENCE = {"surrogate": "gspo", **PLAIN}


@pytest.mark.parametrize(
    ("name", "settings", "beta", "loss", "norm"),
    [
        ("grpo", {}, 0.0, 0.012451527, 0.216393045),
        ("grpo", {}, 0.04, 0.012863864, 0.215969455),
        ("grpo", SEQUENCE, 0.0, 0.009220325, 0.222916660),
        ("grpo", SEQUENCE, 0.04, 0.009632662, 0.222455353),
        ("bnpo", {}, 0.0, -0.078684076, 0.207928356),
        ("bnpo", {}, 0.04, -0.078295751, 0.207933539),
        ("dapo", PLAIN, 0.0, -0.078684076, 0.207928356),
        ("dapo", SEQUENCE, 0.0, -0.082899259, 0.223209880),
        ("dapo", SEQUENCE, 0.04, -0.082510934, 0.223149419),
        ("dr_grpo", {}, 0.0, -0.034424283, 0.090968656),
        ("dr_grpo", {}, 0.04, -0.034254391, 0.090970923),
        ("dr_grpo", SEQUENCE, 0.0, -0.036268426, 0.097654322),
        ("dr_grpo", SEQUENCE, 0.04, -0.036098534, 0.097627871),
        ("cispo_cap", {}, 0.0, 0.029644645, 0.230026910),
        ("cispo_cap", {}, 0.04, 0.030032970, 0.230017824),
        ("sapo", {}, 0.0, -0.088489075, 0.223702633),
        ("sapo", {}, 0.04, -0.088076738, 0.223281865),
        ("dapo", {"clip": (0.2, 0.2), "limits": {"dual": 1.25}}, 0.0, -0.084942296, 0.161668985),
        ("dapo", {**PLAIN, "kl_weight": "ratio_through"}, 0.04, -0.078303950, 0.207978082),
    ],
)
def test_trl_loss_and_gradient(name: str, settings: dict[str, Any], beta: float, loss: float, norm: float) -> None:
    value, gradient = loss_and_gradient(name, beta=beta, **settings)
    assert value == pytest.approx(loss, abs=1e-9)
    assert gradient.norm().item() == pytest.approx(norm, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "loss", "norm"), [("dapo", -0.142857143, 0.211288564), ("grpo", -0.0625, 0.205237413)]
)
def test_trl_on_policy(name: str, loss: float, norm: float) -> None:
    value, gradient = loss_and_gradient(name, old=LOGP)
    assert value == pytest.approx(loss, abs=1e-9)
    assert gradient.norm().item() == pytest.approx(norm, abs=1e-9)


def test_trl_clip_higher_is_dapos_own() -> None:
    assert loss_and_gradient("dapo")[0] == pytest.approx(-0.084398362, abs=1e-9)


@pytest.mark.parametrize(("name", "loss"), [("bnpo", -0.434365148), ("grpo", -0.293918437), ("dr_grpo", -0.149313019)])
def test_trl_truncated_row_left_out(name: str, loss: float) -> None:
    """TRL masks the row out of numerator and token count, and goes on counting it as a sequence; we do not."""
    mask = MASK & (ROW != 1)
    counts = dataclasses.replace(COUNTS, tokens=int(mask.sum()))
    assert loss_and_gradient(name, mask=mask, counts=counts)[0] == pytest.approx(loss, abs=1e-9)


def test_trl_token_count_of_the_whole_step() -> None:
    doubled = dataclasses.replace(COUNTS, tokens=28)
    assert loss_and_gradient("bnpo", counts=doubled)[0] == pytest.approx(-0.039342038, abs=1e-9)


@pytest.mark.parametrize(("name", "loss"), [("bnpo", -0.109398362), ("grpo", -0.018262759), ("dr_grpo", -0.065138569)])
def test_trl_entropy_bonus(name: str, loss: float) -> None:
    """The bonus is a mean over tokens for every algorithm, and it is subtracted."""
    assert loss_and_gradient(name, entropy_coef=0.1)[0] == pytest.approx(loss, abs=1e-9)


def test_trl_token_weights() -> None:
    rows = torch.tensor([[1.0], [0.0], [2.0], [0.5]], dtype=float64).expand(4, 5)
    value, gradient = loss_and_gradient("bnpo", weight=rows)
    assert (value, gradient.norm().item()) == pytest.approx((-0.438206580, 0.160248694), abs=1e-9)


def test_trl_top_entropy() -> None:
    """At a half, TRL loses three tokens that tie with the threshold, to its rounding to float32; we keep them."""
    fifth = losses.top_entropy(ENTROPY, MASK, 0.2).to(float64)
    value, gradient = loss_and_gradient("bnpo", weight=fifth)
    assert (value, gradient.norm().item()) == pytest.approx((0.052497224, 0.027280912), abs=1e-9)
    half = losses.top_entropy(ENTROPY, MASK, 0.5)
    assert half.sum() == 8
    untied = half & (ENTROPY > 0.31)
    value, gradient = loss_and_gradient("bnpo", weight=untied.to(float64))
    assert (value, gradient.norm().item()) == pytest.approx((0.031021203, 0.044979439), abs=1e-9)


# ---- every row of the table


@pytest.mark.parametrize("name", ALGORITHMS)
def test_everything_masked_is_exactly_zero(name: str) -> None:
    value, gradient = loss_and_gradient(name, mask=MASK & False, counts=LossNormalizer(0, 0, 8), beta=0.04)
    assert value == 0
    assert not gradient.any()


@given(st.sampled_from(sorted(ALGORITHMS)), st.sets(st.integers(1, 3)), st.permutations(range(4)))
def test_any_split_and_order_adds_up(name: str, cuts: set[int], order: list[int]) -> None:
    """Value and gradient: the counts belong to the whole update, wherever it is cut and however it is ordered."""
    settings: dict[str, Any] = {"beta": 0.04, "entropy_coef": 0.1, "kl_weight": "ratio_through"}
    rows = torch.tensor(order)
    whole, gradient = loss_and_gradient(name, **settings)
    total, pieces = 0.0, torch.zeros_like(LOGP)
    for start, stop in pairwise([0, *sorted(cuts), 4]):
        part = rows[start:stop]
        value, pieces[part] = loss_and_gradient(name, rows=part, **settings)
        total += value
    assert total == pytest.approx(whole, abs=1e-12)
    torch.testing.assert_close(pieces, gradient)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("garbage", [0.0, NAN, INF])
def test_any_padding_gives_the_same(name: str, garbage: float) -> None:
    whole, gradient = loss_and_gradient(name, beta=0.04)
    value, padded = _padded(name, garbage)
    assert value == pytest.approx(whole, abs=1e-12)
    torch.testing.assert_close(padded[:, :5], gradient)
    assert not padded[:, 5:].any()


def _padded(name: str, garbage: float) -> tuple[float, Tensor]:
    pad = torch.nn.functional.pad
    return loss_and_gradient(
        name,
        logp=pad(LOGP, (0, 3), value=garbage),
        old=pad(OLD, (0, 3), value=garbage),
        ref=pad(REF, (0, 3), value=garbage),
        mask=pad(MASK, (0, 3)),
        beta=0.04,
    )


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("far", [200.0, -200.0])
def test_far_log_ratios_give_finite_losses(name: str, far: float) -> None:
    logp = LOGP.to(torch.float32).clone()
    logp[0, 1] += far
    value, gradient = loss_and_gradient(
        name, logp=logp, old=OLD.float(), ref=REF.float(), beta=0.04, kl_weight="ratio_through"
    )
    assert torch.tensor(value).isfinite() and gradient.isfinite().all() and gradient.dtype == torch.float32


# ---- reductions


def test_reductions_by_hand() -> None:
    per_token = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert losses.sequence_mean(per_token, mask, 2).item() == pytest.approx((2 + 10) / 2)
    assert losses.token_mean(per_token, mask, 4).item() == pytest.approx(16 / 4)
    assert losses.constant_length(per_token, mask, 2, 5).item() == pytest.approx(16 / 10)


@pytest.mark.parametrize("name", losses.REDUCTIONS)
@pytest.mark.parametrize("garbage", [NAN, INF])
def test_reductions_ignore_what_is_masked(name: Any, garbage: float) -> None:
    per_token = torch.where(MASK, LOGP, garbage).requires_grad_()
    loss = losses.REDUCTIONS[name](per_token, MASK, COUNTS)
    assert loss == losses.REDUCTIONS[name](LOGP, MASK, COUNTS)
    (gradient,) = torch.autograd.grad(loss, per_token)
    assert gradient.isfinite().all() and not gradient[~MASK].any()


# ---- weights: another sampler, the entropy mask


def correct(kind: Any, level: Any, bounds: tuple[float, float] = (0.5, 2.0)) -> Tensor:
    """Log-ratios (1, -1, .2 | masked) and (-.1, masked, masked)."""
    delta = torch.tensor([[1.0, -1.0, 0.2, 77.0], [-0.1, 77.0, NAN, INF]], dtype=float64)
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    return losses.correction(losses.Correction(kind, level, bounds), delta, torch.zeros_like(delta), mask)


def test_correction_by_token() -> None:
    e = torch.e
    assert correct("tis", "token")[0].tolist() == pytest.approx([2.0, e**-1, e**0.2, 1.0])
    assert correct("mis", "token")[0].tolist() == pytest.approx([0.0, 0.0, e**0.2, 1.0])
    assert correct("tis", "token")[1].tolist() == pytest.approx([e**-0.1, 1, 1, 1])
    assert correct("none", "token").tolist() == [[1] * 4] * 2


def test_correction_by_completion() -> None:
    e = torch.e
    assert correct("tis", "sequence")[0, :3].tolist() == pytest.approx([e**0.2] * 3)
    assert correct("mis", "sequence", (0.5, 1.2))[0, :3].tolist() == [0, 0, 0]
    assert correct("mis", "sequence_mean", (0.5, 1.2))[0, :3].tolist() == pytest.approx([e ** (0.2 / 3)] * 3)


def test_correction_restores_the_expectation() -> None:
    """E over the sampler of w f = E over the policy of f: six actions, enumerated, no bound reached."""
    new, sampler = torch.randn(2, 6, dtype=float64, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
    f = torch.arange(6, dtype=float64)
    mask = torch.ones(1, 6, dtype=torch.bool)
    w = losses.correction(losses.Correction("tis", "token", (0.0, 1e6)), new[None], sampler[None], mask)[0]
    assert (sampler.exp() * w * f).sum().item() == pytest.approx((new.exp() * f).sum().item())


ENTROPIES = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.7, 0.8, 0.9, 1.0, 1.1, 1.2]])
SIX_AND_FOUR = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])


@pytest.mark.parametrize(
    ("share", "first", "second"),
    [(0.2, [0] * 6, [0, 0, 1, 1, 0, 0]), (0.5, [0] * 5 + [1], [1] * 4 + [0, 0]), (1.0, [1] * 6, [1] * 4 + [0, 0])],
)
def test_the_top_entropy_tokens(share: float, first: list[int], second: list[int]) -> None:
    got = losses.top_entropy(ENTROPIES, SIX_AND_FOUR, share)
    assert got.int().tolist() == [first, second]


def test_a_tiny_share_keeps_one_token_and_no_tokens_stay_none() -> None:
    assert losses.top_entropy(ENTROPIES, SIX_AND_FOUR, 1e-9).nonzero().tolist() == [[1, 3]]
    assert not losses.top_entropy(ENTROPIES, SIX_AND_FOUR & False, 0.2).any()


# ---- entropy


def test_the_entropy_bonus_raises_entropy() -> None:
    """A toy policy of six actions without reward: with the bonus it spreads out, step after step."""
    logits = torch.randn(1, 6, dtype=float64, generator=torch.Generator().manual_seed(4)).mul_(2).requires_grad_()
    one, mask = torch.zeros(1, 1, dtype=float64), torch.ones(1, 1, dtype=torch.bool)
    seen = []
    for _ in range(60):
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1, keepdim=True)
        seen.append(entropy.item())
        tokens = losses.LossInputs(logp[:, :1], logp[:, :1].detach(), None, one, mask, entropy=entropy)
        recipe = losses.LossConfig(algorithm("dapo"), losses.ClipConfig(), entropy_coef=1.0)
        terms = losses.loss_terms(tokens, recipe, 0.0, LossNormalizer(1, 1, 1))
        (gradient,) = torch.autograd.grad(terms["policy"] + terms["entropy"], logits)
        logits = (logits - 0.5 * gradient).detach().requires_grad_()
    assert all(later > earlier for earlier, later in pairwise(seen))
    assert seen[0] < 1.0 < 1.5 < seen[-1]


# ---- the table


def test_the_table_reads_as_the_papers_do() -> None:
    rows = {name: (row.advantage, row.surrogate, row.reduction, row.kl) for name, row in ALGORITHMS.items()}
    assert rows["grpo"] == ("group_std", "ppo_clip", "sequence_mean", "k3")
    assert rows["dr_grpo"] == ("mean_only", "ppo_clip", "constant_length", "k3")
    assert rows["dapo"] == ("group_std", "ppo_clip", "token_mean", "k3")
    assert rows["rloo"] == ("rloo", "ppo_clip", "constant_length", "k1_in_reward")
    assert rows["reinforce_pp"] == ("reinforce_pp", "ppo_clip", "token_mean", "k1_in_reward")
    assert rows["gspo"] == ("group_std", "gspo", "sequence_mean", "k3")
    assert ALGORITHMS["dapo"].clip == (0.2, 0.28) and ALGORITHMS["gspo"].clip == (3e-4, 4e-4)


def test_names_and_tables_agree() -> None:
    assert set(algorithms.SURROGATE_ROWS) == set(losses.SURROGATES)
    assert set(algorithms.ADVANTAGE_ROWS) == set(losses.ADVANTAGES)
    assert set(algorithms.REDUCTION_NAMES) == set(losses.REDUCTIONS)
    assert set(algorithms.KL_ROWS) == set(losses.KL) - {"k1"} | {"k1_in_reward"}
    for row in ALGORITHMS.values():
        assert row.advantage in losses.ADVANTAGES and row.surrogate in losses.SURROGATES
        assert row.reduction in losses.REDUCTIONS and row.kl in algorithms.KL_ROWS


def test_a_row_can_be_changed_in_one_choice() -> None:
    row = algorithm("grpo", kl="k2", clip=(None, 0.3))
    assert row == dataclasses.replace(ALGORITHMS["grpo"], kl="k2", clip=(0.2, 0.3))
    assert algorithm("grpo") == ALGORITHMS["grpo"]


def test_what_does_not_exist_or_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=pattern("'ppo'", "grpo, dr_grpo, dapo")):
        algorithm("ppo")
    with pytest.raises(ValueError, match=pattern("k1", "k1_in_reward")):
        algorithm("grpo", kl="k1")
    with pytest.raises(ValueError, match=pattern("'gmpo'")):
        algorithm("reinforce_pp", surrogate="gmpo")
    with pytest.raises(ValueError, match=r"needs 0 < clip_low < 1, 'gspo' usually has 0.0003"):
        algorithm("gspo", clip=(1.0, None))


def test_another_surrogate_brings_its_own_clip() -> None:
    """What one surrogate calls high is another's absolute cap: 0.2 under `cispo_cap` cuts every gradient to a fifth."""
    assert algorithm("grpo", surrogate="cispo_cap").clip == ALGORITHMS["cispo_cap"].clip
    assert algorithm("dapo", surrogate="gspo").clip == ALGORITHMS["gspo"].clip
    assert algorithm("dapo", surrogate="gspo", clip=(None, 0.1)).clip == (ALGORITHMS["gspo"].clip[0], 0.1)
    assert algorithm("dapo", surrogate="ppo_clip").clip == ALGORITHMS["dapo"].clip, "its own row keeps its own clip"


IN_A_USERS_PROCESS = """
import json, torch
from grpo_nb import losses
from grpo_nb.losses import LossNormalizer, ClipConfig, GroupRewards, LossConfig, LossInputs, advantages, loss_terms
from grpo_nb.algorithms import algorithm

def said(function, *arguments):
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)

table, mask = torch.zeros(4, 5), torch.ones(4, 5, dtype=torch.bool)
whole = dict(logp=table, logp_old=table, logp_ref=table, advantage=torch.ones(4, 1), mask=mask)
changes = [dict(logp_old=torch.zeros(4, 4)), dict(mask=mask[:, :1]), dict(weight=torch.ones(5)),
           dict(advantage=torch.ones(4)), dict(advantage=torch.ones(1, 5))]
recipe, counts = LossConfig(algorithm("grpo"), ClipConfig()), LossNormalizer(4, 20, 5)
found = [said(loss_terms, LossInputs(**whole | change), recipe, 0.1, counts) for change in changes]
shapes = [((4, 1), (4, 1)), ((4,), (4,)), ((2, 4), (4, 2))]
found += [said(advantages, GroupRewards(torch.ones(r), torch.ones(n).long()), "group_std") for r, n in shapes]
found.append(said(advantages, GroupRewards(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.long)), "z"))
found += [said(f, table, table[:1], torch.ones(4, 1), ClipConfig(), mask) for f in losses.SURROGATES.values()]
found += [said(f, table, table[:1], 20.0, mask) for f in losses.KL.values()]
found += [said(f, table, mask[:1], counts) for f in losses.REDUCTIONS.values()]
found += [said(losses.masked_mean, table, mask[:1]), said(losses.stop_properly, table, mask[:1], 0.5)]
found += [said(loss_terms, LossInputs(**whole | {"logp_ref": None}), recipe, 0.1, counts)]
bonus = LossConfig(algorithm("grpo"), ClipConfig(), entropy_coef=0.1)
found += [said(loss_terms, LossInputs(**whole), bonus, 0.0, counts)]
print(json.dumps(found))
"""


def test_shapes_that_disagree_are_refused_not_broadcast() -> None:
    """In a process of its own, because here every signature is checked before a function's own words."""
    ran = subprocess.run(forked.command("-c", IN_A_USERS_PROCESS), capture_output=True, text=True, check=True, cwd=ROOT)
    expected = [
        ["logp is [4, 5], logp_old is [4, 4], logp_ref is [4, 5], mask is [4, 5]"],
        ["logp is [4, 5], logp_old is [4, 5], logp_ref is [4, 5], mask is [4, 1]"],
        ["logp is [4, 5], logp_old is [4, 5], logp_ref is [4, 5], mask is [4, 5], weight is [5]"],
        ["advantage is [4]", "logp [4, 5]", "[4, 1]"],
        ["advantage is [1, 5]", "logp [4, 5]"],
        ["[4, 1]", "[prompt, group]"],
        ["[4]", "[prompt, group]"],
        ["rewards are [2, 4]", "lengths [4, 2]"],
        ["'z'", "group_std"],
        *[["logp is [4, 5], logp_base is [1, 5], mask is [4, 5]"]] * (len(losses.SURROGATES) + len(losses.KL)),
        *[["per_token is [4, 5], mask is [1, 5]"]] * len(losses.REDUCTIONS),
        ["values is [4, 5], mask is [1, 5]"],
        ["rewards is [4, 5], truncated is [1, 5]"],
        ["'kl'", "logp_ref", None],
        ["'entropy'", "entropy", None],
    ]
    for message, named in zip(json.loads(ran.stdout), expected, strict=True):
        assert names(message, *named)
