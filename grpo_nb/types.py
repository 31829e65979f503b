"""Records that pass between the layers: the result of each stage for the next.

Data goes one way: task -> Example -> Rollouts -> Score -> Experience -> StepStats -> a row of metrics.jsonl.
Ragged things are plain Python lists, one entry a prompt (P) or a completion (B = P * K, prompt-major:
the K completions of prompt p are rows p*K ... p*K + K - 1). Rectangular things are tensors.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_nb.metrics import keys
from grpo_nb.storage import former_names
from grpo_nb.suggest import close_matches

Message = Mapping[str, str]
"""One chat turn, `{"role": "user", "content": "..."}`."""

Prompt = str | Sequence[Message]
"""A plain string, or chat turns that the tokenizer's template renders."""

StopReason = Literal["stop", "length"]
"""`stop`: a stop token was sampled (and is the last id); `length`: the cap was reached first."""


@dataclass(frozen=True)
class Example:
    """One prompt of one task, with the data that its scorer needs.

    >>> Example(id="Age/12", prompt=[{"role": "user", "content": "Who was late?"}],
    ...         target="Answer: The grandson", columns={"label": 1}).columns["label"]
    1
    """

    id: str
    """Unique within its task; evaluations are paired by it."""
    prompt: Prompt
    target: str | None = None
    """The gold completion: what SFT trains on when no SFT data is given. None: the task has no gold."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns that a reward function may take by name (JSON values only)."""


@dataclass(frozen=True)
class Score:
    """The verdict on one completion.

    >>> Score(value=1.0, label="correct", parts={"answer": 1.0}).scored
    True
    >>> Score(value=None, cause="judge timed out after 15 s").scored
    False
    """

    value: float | None
    """The reward, or None where it could not be scored: never a number that stands for a failure."""
    label: str = ""
    """The class of the answer, e.g. `correct`, `wrong`, `unknown`, `unparsed`; used by evaluation."""
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """Value of each reward function by name, before weighting."""
    cause: str = ""
    """Reason why `value` is None."""
    scale: float = field(default=0.0, compare=False, repr=False)
    """Size of the terms that `value` was summed from, the base of its rounding error; below |value|: |value|."""

    @property
    def scored(self) -> bool:
        return self.value is not None


@dataclass(frozen=True)
class SampledPrompt:
    """A training prompt of one step and the objective it belongs to."""

    objective: str
    example: Example


@dataclass(frozen=True)
class Rollouts:
    """K completions for each of P prompts, prompt-major, as they were sampled.

    Two prompts, K = 2: `completion_ids[0:2]` answer `prompt_ids[0]`, `completion_ids[2:4]` answer
    `prompt_ids[1]`. The last id of a completion is its stop token where `stop_reasons` is `stop`.
    """

    prompt_ids: Sequence[Sequence[int]]
    """[P] token ids, no padding."""
    completion_ids: Sequence[Sequence[int]]
    """[B] token ids, no padding; never re-tokenised."""
    logprobs: Sequence[Sequence[float]]
    """[B] log-probability, in nats, of each completion id under the distribution it was sampled from."""
    stop_reasons: Sequence[StopReason]
    """[B]"""
    texts: Sequence[str]
    """[B] decoded without special tokens."""
    group_size: int
    """K"""
    marked: Sequence[str] = ()
    """[B] the same with the marks of thinking that are special tokens, and before it the mark that its prompt left
    open; empty: they are `texts`."""
    prompts: Sequence[SampledPrompt] = ()
    """[P] the sampled prompts; a training step adds them, engines leave this empty."""

    @property
    def scored_texts(self) -> Sequence[str]:
        """[B] what tasks and the judge read: they show where thinking ends."""
        return self.marked or self.texts

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt and completion."""
        lengths = [len(ids) + len(self.prompt_ids[self.prompt_of(i)]) for i, ids in enumerate(self.completion_ids)]
        return max(lengths, default=0)

    def prompt_of(self, row: int) -> int:
        """Index of the prompt, of P, that a completion belongs to."""
        return row // self.group_size

    def example(self, row: int) -> Example:
        return self.prompts[self.prompt_of(row)].example

    def objective(self, row: int) -> str:
        return self.prompts[self.prompt_of(row)].objective

    def not_finite(self) -> list[int]:
        """Completions with a log-prob of the sampler that is not finite."""
        return [i for i, values in enumerate(self.logprobs) if not all(map(math.isfinite, values))]

    def rows_of(self, objective: str) -> list[int]:
        """Rows of all completions of one objective."""
        return [i for i in range(len(self.completion_ids)) if self.objective(i) == objective]

    def by_prompt(self, values: Tensor) -> Tensor:
        """Values by completion, [B, ...] or those of some prompts, as [prompt, group, ...]."""
        return by_prompt(values, self.group_size)


def by_prompt(values: Tensor, group: int) -> Tensor:
    """[B, ...] -> [prompt, group, ...], as completions lie prompt-major."""
    return values.view(-1, group, *values.shape[1:])


@dataclass(frozen=True)
class Batch:
    """Rows that go through the model together: prompt left-padded, completion right-padded.

    `input_ids[:, -T:]` is the completion part, so the log-probs of a batch are `[batch, token]` with
    token = T; `completion_mask` is true on sampled ids up to and including the first stop token.
    """

    input_ids: Int[Tensor, "batch sequence"]
    attention_mask: Int[Tensor, "batch sequence"]
    completion_mask: Bool[Tensor, "batch token"]

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def __getitem__(self, rows: Int[Tensor, "rows"] | slice) -> "Batch":
        return Batch(self.input_ids[rows], self.attention_mask[rows], self.completion_mask[rows])


@dataclass(frozen=True)
class TokenStats:
    """Log-probs and entropy of a batch's completion tokens from one forward pass, at the sampling temperature."""

    logprobs: Float[Tensor, "batch token"]
    """log pi(token) in nats; 0 outside the completion mask."""
    entropy: Float[Tensor, "batch token"]
    """Entropy of the predicted distribution in nats, 0 outside the completion mask; detached unless requested."""


MOST_SHOWN = 8
"""Rewards and KLs in the repr of a step."""


@dataclass(frozen=True, repr=False)
class StepStats:
    """One training step as the log has it; its repr is one line, `metrics` has all numbers.

    >>> StepStats(step=3, metrics={"kl/fairness": 0.7}, status="ok")["kl/fairness"]
    0.7
    >>> StepStats(step=3, metrics={"kl/fairness": 0.7, "reward/fairness/mean": 0.25, "time/step": 1.5, "loss": 0.1})
    <Step 3: ok, reward/fairness/mean 0.25, kl/fairness 0.7, 1.5 s; 4 metrics>
    """

    step: int
    metrics: Mapping[str, float | int | str | None]
    """The row of metrics.jsonl; its keys are those of `metrics.keys`."""
    status: Literal["ok", "clipped", "skipped", "empty", "rolled_back"] = "ok"
    """`skipped`: no update was applied; `empty`: there was nothing to learn from, the gradient was exactly 0;
    `rolled_back`: its updates were undone."""

    def __repr__(self) -> str:
        chosen = [key for family in (keys.REWARD, keys.KL) for key in self.metrics if family.has(key)]
        values = [(key, self.metrics[key]) for key in chosen[:MOST_SHOWN]]
        words = [str(self.status), *(f"{key} {value:.3g}" for key, value in values if isinstance(value, int | float))]
        if isinstance(seconds := self.metrics.get(keys.TIME_STEP), int | float):
            words.append(f"{seconds:.3g} s")
        return f"<Step {self.step}: {', '.join(words)}; {len(self.metrics)} metrics>"

    def __getitem__(self, key: str) -> float | int | str | None:
        """The number under `key`.

        Raises:
            KeyError: it is missing; the message has the new name of a former key, else the keys most like it.
        """
        if key not in self.metrics:
            if (now := former_names.metric(key)) in self.metrics:
                raise KeyError(f"'{key}' is now called '{now}'")
            close = ", ".join(close_matches(key, self.metrics)) or ", ".join(self.metrics)
            raise KeyError(f"no '{key}' in step {self.step}; there are {close}")
        return self.metrics[key]


Steps = Generator[StepStats, None, None]
"""Type of `sft()` and `grpo()`: iterate to train, close (or break out of the loop) to save and stop."""


@dataclass(frozen=True)
class Experience:
    """Training data of one step: B completions with their scores, advantages and log-probs; built once, never changed.

    All tensors are detached; rows of groups that could not be scored, or that `skip_signal_free_groups` leaves out,
    are False in `kept` and train nothing.
    """

    rollouts: Rollouts
    scores: Sequence[Score]
    """[B]"""
    rewards: Mapping[str, Float[Tensor, "prompt group"]]
    """By objective, after shaping; NaN where a completion has none."""
    advantages: Float[Tensor, "batch #token"]
    """Per completion, [batch, 1], or per token where the KL is in the reward of REINFORCE++."""
    kept: Bool[Tensor, "batch"]
    lengths: Int[Tensor, "batch"]
    """Trained tokens of each row: its completion, or 0 where truncated answers are masked."""
    logprobs_old: Float[Tensor, "batch token"]
    """log pi_old of the rows that are `measured`."""
    entropy: Float[Tensor, "batch token"]
    """Entropy in nats, of the rows that are `measured`."""
    measured: Bool[Tensor, "batch"]
    """Rows that a forward pass of the old policy has seen. On-policy that is the pass which trains."""
    logprobs_reference: Float[Tensor, "batch token"] | None
    """log pi_ref, or None where no objective needs the KL."""
    token_weights: Float[Tensor, "batch token"] | None = None
    """Weight of a token's policy loss (importance-sampling correction, entropy mask); None: 1."""
    bad: frozenset[int] = frozenset()
    """Rows that train nothing because one of their log-probs is not finite; False in `kept`."""
    kl: Mapping[str, float | None] = field(default_factory=dict)
    """KL to the reference by objective, nats per token, before the first update; once all rows are measured."""

    def without(self, bad: Sequence[int]) -> "Experience":
        """The batch in which these rows train nothing either; their rewards stay in their groups' baselines."""
        if not bad:
            return self
        kept = self.kept.clone()
        kept[list(bad)] = False
        return replace(self, kept=kept, bad=self.bad | {*bad})

    @property
    def scored(self) -> bool:
        """Whether any group has all its rewards."""
        return any(not bool(rewards.isnan().all()) for rewards in self.rewards.values())

    def kept_rows(self, objective: str) -> list[int]:
        """Rows of one objective that train."""
        return [i for i in self.rollouts.rows_of(objective) if self.kept[i]]

    def learns(self) -> Bool[Tensor, "batch"]:
        """Rows with a trained token whose advantage is not 0."""
        return ((self.advantages != 0) & self.mask()).any(dim=1)

    def advantage_of(self, row: int) -> float:
        """The row's advantage, mean over its trained tokens where they differ."""
        values = self.advantages[row]
        return float(values[: max(int(self.lengths[row]), 1)].mean())

    def mask(self) -> Bool[Tensor, "batch token"]:
        """True on every trained token."""
        return token_mask(self.lengths, self.logprobs_old.shape[1])


def token_mask(lengths: Int[Tensor, "batch"], width: int) -> Bool[Tensor, "batch token"]:
    """True on the first `lengths` tokens of each row."""
    return torch.arange(width)[None, :] < lengths[:, None]
