"""Rollouts that are sampled one step ahead (`rollout.steps_off_policy=1`), and their state until they train.

Step n does, in this order, in the training's own thread:

1. It takes the completions that step n - 1 sampled for it.
2. It samples those of step n + 1 with the weights before its own update. Engine and training share one device and one
set of weights, so sampling during the update would take a copy of the weights and gain nothing; the order alone
decides which weights sample. An engine that samples elsewhere (`rollout.Remote`) gets the weights and the request
here, samples while the step trains, and is waited for at the end of the updates. An evaluation, a pause or a stop
between two steps therefore never finds a partly sampled batch.
3. It scores and trains its own completions. Each token's loss is weighed by the truncated ratio of the policy before
   the update to the weights that sampled (`algorithm.importance_correction`); the denominator are the log-probs that
   the
   engine gave with the tokens. Ratio, clip, KL and entropy are those of the policy before the update, as on-policy; the
   tokens on which they are measured come from the weights that sampled.

Only the waiting is concurrent: judges, and reward functions that only wait, get each completion of step n + 1 as it
ends, in an event loop that stays open between steps, and have until that point of step n + 1: one complete step.

The completions are a function of seed and step; no thread affects them. A step uses them if it would sample in the same
way except for the weights: a change of the temperature, or a rollback with its new sampling stream, discards them, and
the step samples its own completions, on-policy. Betas and learning rate act when a step trains, at once. Step 1 is
on-policy, too. A checkpoint keeps the completions that wait for the next step; their verdicts are requested again, and
found in judge.jsonl. The last step samples as well, so that the run can continue past its goal bit for bit; no judge
gets those until then.

Several ranks sample and train in the same order, so all of this holds for them too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_nb.judge.tally import Tally
from grpo_nb.metrics import keys
from grpo_nb.ranks.messages import joined, split
from grpo_nb.rewards.background import Loop
from grpo_nb.rewards.context import Notes
from grpo_nb.rewards.scoring import Scoring
from grpo_nb.types import Rollouts, StopReason

FILE = "rollouts"
"""Name of a checkpoint's tensor set with the pending completions; the way they were sampled is in its state."""
_REASONS: Sequence[StopReason] = ("stop", "length")


@dataclass(frozen=True)
class SamplingPlan:
    """The way a step's completions are sampled, except for the weights."""

    step: int
    temperature: float
    stream: int
    """`Recovery.stream`"""


@dataclass
class Sampled:
    """The completions of a step, and their scoring."""

    plan: SamplingPlan
    rollouts: Rollouts
    staleness: int | None = None
    """Updates between the weights that sampled them and those that they train; None where it is always 0."""
    scoring: Scoring | None = None
    """Scoring that runs; None before it begins and after it was discarded."""
    notes: Mapping[str, Notes] = field(default_factory=dict)
    """Notes of reward functions, by objective."""
    tallies: Mapping[str, Tally] = field(default_factory=dict)
    """Tallies of the judges, by objective."""

    def close(self) -> None:
        """Cancel what still scores; scoring can begin anew."""
        if self.scoring is not None:
            self.scoring.close()
            self.scoring = None

    def row(self) -> dict[str, float | int | str | None]:
        """Columns that these completions add to the step's row: the staleness, if sampled ahead."""
        return {} if self.staleness is None else {keys.STALENESS: self.staleness}


class Ahead:
    """Completions sampled for steps that have not ended, by step."""

    def __init__(self) -> None:
        self.loop = Loop()
        """Event loop in which their judges are waited for."""
        self._by_step: dict[int, Sampled] = {}

    def keep(self, sampled: Sampled) -> None:
        self._by_step[sampled.plan.step] = sampled

    def of(self, plan: SamplingPlan) -> Sampled | None:
        """Completions sampled in this way; others for the same step are discarded."""
        found = self._by_step.get(plan.step)
        if found is not None and found.plan != plan:
            self._drop(plan.step)
            return None
        return found

    def forget_before(self, step: int) -> None:
        """Discard the completions of earlier steps."""
        self._forget(n for n in self._by_step if n < step)

    def forget_after(self, step: int) -> None:
        """Discard the completions of later steps."""
        self._forget(n for n in self._by_step if n > step)

    def close(self) -> None:
        """Discard all completions, and end the thread that waits."""
        self.forget_after(0)
        self.loop.close()

    def _forget(self, steps: Iterable[int]) -> None:
        for step in [*steps]:
            self._drop(step)

    def _drop(self, step: int) -> None:
        self._by_step.pop(step).close()

    def stored(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """State of the completions of `step` for a checkpoint: JSON values and tensors; None without completions.

        Log-probs are kept by their bits, as integers, since some may not be finite (`guards.mask_bad_rows`).
        """
        if (sampled := self._by_step.get(step)) is None:
            return None
        plan, rollouts = sampled.plan, sampled.rollouts
        data = {"step": plan.step, "temperature": plan.temperature, "stream": plan.stream}
        logprobs = joined(rollouts.logprobs, torch.float64)
        parts = {
            "prompts": joined(rollouts.prompt_ids, torch.int64),
            "ids": joined(rollouts.completion_ids, torch.int64),
            "logprobs": logprobs | {"flat": logprobs["flat"].view(torch.int64)},
            "texts": _encoded(rollouts.texts),
            "marked": _encoded(rollouts.marked),
        }
        tensors = {f"{name}/{key}": tensor for name, part in parts.items() for key, tensor in part.items()}
        reasons = torch.tensor([_REASONS.index(reason) for reason in rollouts.stop_reasons], dtype=torch.uint8)
        return data, tensors | {"reasons": reasons}


def restored(data: Mapping[str, Any], tensors: Mapping[str, Tensor], group: int, vocabulary: int) -> Sampled:
    """Completions from the state that `stored` returned, without the examples of their prompts.

    Args:
        vocabulary: the number of tokens.

    Raises:
        ValueError: the parts do not fit together, or have tokens beyond the vocabulary.
    """
    try:
        parts = {name: _part(name, tensors) for name in ("prompts", "ids", "logprobs", "texts", "marked")}
        logprobs = parts["logprobs"] | {"flat": parts["logprobs"]["flat"].view(torch.float64)}
        rollouts = Rollouts(
            split(parts["prompts"]),
            split(parts["ids"]),
            split(logprobs),
            [_REASONS[number] for number in tensors["reasons"].tolist()],
            _decoded(parts["texts"]),
            group,
            _decoded(parts["marked"]),
        )
    except (KeyError, IndexError, TypeError, RuntimeError) as error:
        raise ValueError(f"has no complete rollouts ({type(error).__name__})") from None
    rows = len(rollouts.prompt_ids) * group
    counts = {len(rollouts.completion_ids), len(rollouts.logprobs), len(rollouts.stop_reasons), len(rollouts.texts)}
    if counts != {rows} or len(rollouts.marked) not in (0, rows):
        raise ValueError(f"has rollouts of {sorted(counts)} completions for {rows // group} prompts of {group}")
    tokens = torch.cat([parts["prompts"]["flat"], parts["ids"]["flat"]])
    if bool(((tokens < 0) | (tokens >= vocabulary)).any()):
        raise ValueError(f"has token ids outside of 0 to {vocabulary - 1}")
    return Sampled(SamplingPlan(data["step"], data["temperature"], data["stream"]), rollouts, staleness=1)


def _part(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    part = {key: tensors[f"{name}/{key}"] for key in ("flat", "lengths")}
    if any(tensor.is_floating_point() or tensor.is_complex() for tensor in part.values()):
        raise TypeError
    return part


def _encoded(texts: Sequence[str]) -> dict[str, Tensor]:
    return joined([list(text.encode(errors="surrogatepass")) for text in texts], torch.uint8)


def _decoded(tensors: Mapping[str, Tensor]) -> list[str]:
    return [bytes(row).decode(errors="surrogatepass") for row in split(tensors)]
