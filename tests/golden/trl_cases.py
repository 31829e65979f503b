"""What TRL is asked: inputs, rewards and settings of every golden case, and what to know of its answers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

PAD, EOS, WORD = 0, 1, 2
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
Settings = Mapping[str, Any]

NOTES = (
    "Known values of 1.10.0.dev0 (commit f2cd577) all reproduce to their last digit, advantages and losses, but luspo.",
    "Moved: luspo at token level, or with a KL term, now masks before it sums; at sequence level without KL as before.",
    "Moved: use_bias_correction_kl is True by default, so beta > 0 alone means KL times ratio; always stated here.",
    "Moved: the dapo family divides by num_items_in_batch * GA / steps_per_generation; before, it left the factor out.",
    "Moved: the entropy bonus is a mean over its own tokens for every loss; the dapo family once used its normaliser.",
    "Moved: all EOS ids of model and tokenizer end a row, so a row that ends in any of them is not truncated.",
    "Moved: a reward function that returns the wrong number of rewards is refused.",
    "Moved: a token that the sampler could not score (None) gets importance ratio 1.",
    "Unchanged: an infinite reward makes its group 0 (group, batch), or leaves 0 and -3.4e38 (none); no case here.",
    "Ambiguous: a truncated row that is masked still counts as a row for grpo, sapo, luspo and dr_grpo, while its "
    "tokens do not count for bnpo, dapo, cispo and vespo.",
    "Ambiguous: the dapo family divides an update by the mean token count of the generation batch's updates, not by "
    "its own count, where a generation batch is cut into several updates (steps_per_generation > GA).",
    "Ambiguous: bnpo divides by its micro-batch's own tokens, so that its gradient depends on the cut (GA 2 cases).",
    "Ambiguous: cispo's cap is epsilon_high itself, not 1 + epsilon_high, and epsilon's .2 where it is not given.",
    "Ambiguous: at sequence level bnpo, dr_grpo, dapo and cispo count a sequence's ratio once a token, so that long "
    "answers weigh more; luspo means to.",
    "Doubtful: at sequence level the bias correction multiplies a token's KL by its sequence's ratio; and the ratio is "
    "differentiated, so that the correction changes the gradient even where every ratio is 1.",
    "Doubtful: top_entropy_quantile drops tokens from the sum and not from the count, and takes its quantile over the "
    "micro-batch, in float32.",
    "Doubtful: normalize_then_sum takes no notice of scale_rewards.",
    "Doubtful: sequence modes of the sampler correction take the product of the tokens' ratios, which runs away with "
    "length; neither they nor the entropy and off-policy masks touch the KL term.",
    "Doubtful: a group with a single verdict has no standard deviation; its NaN advantage becomes 0, and counts among "
    "the groups with spread in frac_reward_zero_std.",
)


@dataclass(frozen=True)
class Rows:
    """What the sampler and the forward passes will say: tables [row, token], lists [row]."""

    group_size: int
    max_completion: int
    lengths: Sequence[int]
    truncated: Sequence[bool]
    advantages: Tensor
    logp: Tensor
    old: Tensor
    ref: Tensor
    sampler: Tensor
    entropy: Tensor

    def rounded(self) -> "Rows":
        """Twelve digits a number: the file holds exactly what was computed with."""
        return replace(self, **{name: self._rounded(table) for name, table in self.tables().items()})

    @staticmethod
    def _rounded(table: Tensor) -> Tensor:
        values = [float(f"{value:.12g}") for value in table.flatten().tolist()]
        return torch.tensor(values, dtype=table.dtype).view(table.shape)

    def to(self, dtype: torch.dtype) -> "Rows":
        return replace(self, **{name: value.to(dtype) for name, value in self.tables().items()})

    def tables(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def completions(self) -> list[list[int]]:
        """A finished row ends in EOS, a truncated one in a word."""
        return [
            [WORD] * (length - 1) + [WORD if cut else EOS]
            for length, cut in zip(self.lengths, self.truncated, strict=True)
        ]


# ---- advantages


@dataclass(frozen=True)
class Judged:
    """`rewards[row][function]`, None where a function has no verdict."""

    name: str
    group_size: int
    rewards: Sequence[Sequence[float | None]]
    weights: Sequence[float] | None = None


def single(name: str, *groups: Sequence[float | None]) -> Judged:
    """One reward function, the groups one after another."""
    return Judged(name, len(groups[0]), [[reward] for group in groups for reward in group])


def judged_cases() -> list[Judged]:
    two = [(1, 0), (0, 1), (1, 1), (0, 0), (1, 0.5), (1, 0.5), (0, 0.5), (0, 0)]
    cases = [
        single("two groups", (1, 0, 0, 1), (2, 2, 2, 5)),
        single("smallest group", (1, 0)),
        single("several small groups", (1, 0), (0.25, 0.5), (3, 3), (None, 1)),
        single("one without a verdict", (None, 0, 1, 1)),
        single("one verdict only", (None, None, None, 1)),
        single("no verdict at all", (None, None, None, None), (1, 0, 1, 1)),
        single("all equal", (1, 1, 1, 1)),
        single("all equal, not representable", (0.1, 0.1, 0.1, 0.1), (0.7, 0.7, 0.7, 0.2)),
        single("all equal, one without a verdict", (0.3, None, 0.3, 0.3)),
        single("a hair", (0.50001, 0.5, 0.5, 0.5)),
        single("large offset", (1000, 1001, 1000, 1002)),
        Judged("two functions, one often silent", 4, [(1, None), (0, None), (1, 2), (0, None)], (1, 0.5)),
        Judged("two functions, weighted", 4, two, (0.7, 0.3)),
        Judged("two functions, unweighted", 4, two),
        Judged("a negative weight", 4, two, (1.0, -0.25)),
    ]
    return cases + [random_judged(seed) for seed in range(5)]


def random_judged(seed: int) -> Judged:
    """Several groups and functions, a tenth without a verdict."""
    generator = torch.Generator().manual_seed(seed)
    group, groups, functions = (2, 3, 4, 5, 8)[seed], (4, 3, 2, 3, 2)[seed], (1, 2, 3, 1, 2)[seed]
    values = torch.randn(group * groups, functions, generator=generator)
    silent = torch.rand(values.shape, generator=generator) < 0.1
    rewards = [
        [None if s else v for v, s in zip(*row, strict=True)]
        for row in zip(values.tolist(), silent.tolist(), strict=True)
    ]
    weights = None if functions == 1 else (0.5 + torch.rand(functions, generator=generator)).tolist()
    return Judged(f"random {seed}", group, rewards, weights)


def blank(count: int, group: int) -> Rows:
    """Rows about which only their rewards matter."""
    zeros = torch.zeros(count, 1)
    return Rows(group, 1, [1] * count, [False] * count, zeros[:, 0], *[zeros] * 5)


# ---- losses


def report_rows() -> Rows:
    """Four rows of five tokens by formula, row i and token t from 0; the numbers of TRL 1.10.0.dev0 are known."""
    i, t = torch.arange(4, dtype=torch.float64)[:, None], torch.arange(5, dtype=torch.float64)[None, :]
    logp = -0.5 - 0.1 * i - 0.07 * t
    old = logp - 0.3 * torch.cos(5 * i + t)
    return Rows(
        group_size=2,
        max_completion=8,
        lengths=(5, 3, 2, 4),
        truncated=(False, True, False, False),
        advantages=torch.tensor([1, -1, 0.5, -0.25], dtype=torch.float64),
        logp=logp,
        old=old,
        ref=logp + 0.2 * torch.sin(2 * i + t),
        sampler=old - 0.4 * torch.cos(i + 2 * t),
        entropy=0.1 * (i + 1) + 0.05 * t,
    )


def random_rows(seed: int, count: int, width: int, group: int) -> Rows:
    """Rows of random lengths, the first as long as can be, a third of them truncated."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(count, width, dtype=torch.float64, generator=generator)

    logp = -normal(1.0).abs() - 0.05
    old = logp + normal(0.3)
    lengths = torch.randint(1, width + 1, (count,), generator=generator)
    lengths[0] = width
    return Rows(
        group_size=group,
        max_completion=width + 2,
        lengths=lengths.tolist(),
        truncated=(torch.rand(count, generator=generator) < 1 / 3).tolist(),
        advantages=normal(1.0)[:, 0],
        logp=logp,
        old=old,
        ref=logp + normal(0.3),
        sampler=old + normal(0.15),
        entropy=normal(1.0).abs(),
    )


def deaf(rows: Rows) -> Rows:
    """The same rows, two of whose tokens the sampler did not score."""
    sampler = rows.sampler.clone()
    sampler[0, 1] = sampler[2, 0] = math.nan
    return replace(rows, sampler=sampler)


def loss_cases() -> tuple[dict[str, Rows], list[tuple[str, dict[str, Any]]]]:
    """Inputs by name, and which variant is tried on which."""
    report = report_rows()
    inputs = {"report": report, "wide": random_rows(1, 6, 7, 3), "tall": random_rows(2, 8, 4, 4)}
    tried = [(name, variant) for name in inputs for variant in variants()]
    inputs |= {"all cut": replace(report, truncated=(True,) * 4), "sampler holes": deaf(report)}
    tried += [("all cut", {"loss_type": loss, "mask_truncated_completions": True, "beta": 0.04}) for loss in LOSSES]
    tried += [("sampler holes", {"loss_type": "dapo", "vllm": bounds}) for bounds in vllm_variants()]
    return {name: rows.rounded() for name, rows in inputs.items()}, tried


def variants() -> Iterator[dict[str, Any]]:
    """Settings of every loss case, over TRL's defaults except that the KL is left uncorrected unless it says so."""
    for loss in LOSSES:
        yield from (
            {"loss_type": loss, "importance_sampling_level": level, "beta": beta}
            for level in ("token", "sequence")
            for beta in (0.0, 0.04)
        )
        yield {"loss_type": loss, "num_iterations": 1}
        yield {"loss_type": loss, "entropy_coef": 0.1}
        yield {"loss_type": loss, "mask_truncated_completions": True, "beta": 0.04}
        yield {"loss_type": loss, "gradient_accumulation_steps": 2, "beta": 0.04}
    for loss in ("grpo", "dapo"):
        yield from ({"loss_type": loss} | change for change in clipping_variants())
        yield from ({"loss_type": loss} | change for change in entropy_variants())
        yield from ({"loss_type": loss, "beta": 0.04} | change for change in kl_variants())
        yield {"loss_type": loss, "off_policy_mask_threshold": 0.05}
        yield {"loss_type": loss, "steps_per_generation": 2, "gradient_accumulation_steps": 1}
    yield from ({"loss_type": "cispo", "epsilon_high": cap} for cap in (None, 1.1))
    yield {"loss_type": "sapo", "sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0}
    for loss in ("grpo", "dapo", "cispo", "sapo"):
        yield from ({"loss_type": loss, "vllm": bounds} for bounds in vllm_variants())
    yield {"loss_type": "dapo", "beta": 0.04, "vllm": {"mode": "token_truncate", "clip_max": 1.1}}


def clipping_variants() -> list[dict[str, Any]]:
    return [
        {"epsilon_high": 0.28},
        {"epsilon": 0.1},
        {"delta": 1.25},
        {"epsilon": 0.1, "epsilon_high": 0.4, "delta": 1.3},
        {"epsilon": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"},
    ]


def entropy_variants() -> list[dict[str, Any]]:
    return [
        {"top_entropy_quantile": 0.5},
        {"top_entropy_quantile": 0.2},
        {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, "beta": 0.04},
    ]


def kl_variants() -> list[dict[str, Any]]:
    corrected = {"use_bias_correction_kl": True}
    return [corrected, corrected | {"importance_sampling_level": "sequence"}, corrected | {"num_iterations": 1}]


def vllm_variants() -> list[dict[str, Any]]:
    """The four modes, each with bounds that act on some rows and not on others."""
    tight = {"clip_min": 0.8, "clip_max": 1.2}
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    return [{"mode": mode} | tight for mode in modes] + [{"mode": "sequence_mask", "clip_max": 1.5, "clip_min": None}]
