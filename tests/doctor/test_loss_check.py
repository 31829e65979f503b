"""A loss function of one's own is tried before it trains."""

import re
from typing import Any

import pytest
import torch

from grpo_nb import doctor
from grpo_nb.losses import SURROGATES, log_ratio
from tests.support.tokens import names


def ratio(logp: Any, old: Any, advantage: Any, clip: Any, mask: Any) -> Any:
    """Sound: the importance-weighted loss, held before exp."""
    return -log_ratio(logp, old, mask, 20.0).exp() * advantage


def over_all_tokens(logp: Any, old: Any, advantage: Any, clip: Any, mask: Any) -> Any:
    delta = log_ratio(torch.nan_to_num(logp, nan=0.0, neginf=-9.0), old, None, 20.0)
    return (-delta.mean(-1, keepdim=True).exp() * advantage).expand_as(logp)


class Keeps:
    """Adds the KL of the first pass to every later one."""

    def __init__(self) -> None:
        self.kl: Any = None

    def __call__(self, logp: Any, old: Any, advantage: Any, clip: Any, mask: Any) -> Any:
        self.kl = (logp - old).pow(2) if self.kl is None else self.kl
        return ratio(logp, old, advantage, clip, mask) + self.kl


BROKEN = {
    "loss_raises": lambda logp, old, advantage, clip: logp,
    "loss_shape": lambda logp, old, advantage, clip, mask: ratio(logp, old, advantage, clip, mask).mean(),
    "loss_without_gradient": lambda logp, *rest: ratio(logp.detach(), *rest),
    "loss_sign": lambda *given: -ratio(*given),
    "loss_not_finite": lambda logp, old, advantage, clip, mask: -(logp - old).exp().clamp(max=99) * advantage * mask,
    "loss_ignores_mask": over_all_tokens,
    "loss_graph_reused": Keeps(),
    "loss_unbounded": lambda logp, old, advantage, clip, mask: -log_ratio(logp, old, mask).exp() * advantage,
}


@pytest.mark.parametrize("name", SURROGATES)
def test_the_packages_own_losses_pass(name: str) -> None:
    assert doctor.check_loss(SURROGATES[name]) == []


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_loss_is_named(rule: str, unchecked: None) -> None:
    (finding,) = doctor.check_loss(BROKEN[rule])
    assert finding.rule == rule and finding.severity == ("warning" if rule == "loss_unbounded" else "error")
    assert (finding.advice and finding.message.endswith(".")) or rule in ("loss_raises", "loss_graph_reused")


def test_a_loss_of_other_parameters_is_shown_how_to_write_them(unchecked: None) -> None:
    four: Any = BROKEN["loss_raises"]
    (finding,) = doctor.check_loss(four)
    assert names(finding.message, "logp, old, advantage, clip", 5)
    parameters = re.search(r"def loss\(([\w, ]+)\)", str(finding.advice))
    assert parameters and len(parameters[1].split(",")) == 5
    assert doctor.check_loss(lambda logp, old, advantage, *rest: ratio(logp, old, advantage, *rest)) == []


def test_a_sound_loss_of_ones_own_passes() -> None:
    assert doctor.check_loss(ratio) == []
