"""Messages between the ranks of a training, and back: requests, completions, plans, gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from grpo_nb import losses
from grpo_nb.config import Config, SamplingConfig
from grpo_nb.ranks.messages import Message, joined, split
from grpo_nb.rollout import Request
from grpo_nb.training.gradients import GradientStats, Measured
from grpo_nb.training.numerics import Numerics
from grpo_nb.training.pairs import Pair, Share
from grpo_nb.training.plan import StepPlan, loss_config
from grpo_nb.types import Example, Experience, Rollouts, SampledPrompt, Score, TokenStats

Tensors = dict[str, Tensor]

DRAW, SCORE, MEASURE, GRADIENTS, PAIRS, ADD_UP = "draw", "score", "measure", "gradients", "pairs", "add up"
OPEN, BEGIN, REFERENCE, WEIGHTS, CLOSE = "open", "begin", "reference", "weights", "close"
DONE = "done"
IDLE = "idle"
"""Message without rows: take part in the forward passes of the policy, then of its reference, that others make."""


def below(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors with `name/` before each key."""
    return {f"{name}/{key}": tensor for key, tensor in tensors.items()}


def of(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors that `below` put under `name`."""
    return {key.removeprefix(f"{name}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{name}/")}


# ---- sampling


def sampling(request: Request, prompts: Sequence[int]) -> Message:
    """Message that requests completions of these prompts."""
    tensors = below("prompts", joined([request.prompt_ids[p] for p in prompts], torch.int64))
    if request.uniforms is not None:
        tensors["uniforms"] = request.uniforms[rows_of(prompts, request.group_size)]
    return Message(
        DRAW,
        {
            "group_size": request.group_size,
            "sampling": request.sampling.model_dump(mode="json"),
            "greedy": request.greedy,
            "rows_at_once": request.rows_at_once,
        },
        tensors,
    )


def request_of(message: Message, device: torch.device) -> Request:
    """The request in a message of `sampling`."""
    data, uniforms = message.data, message.tensors.get("uniforms")
    return Request(
        split(of("prompts", message.tensors)),
        data["group_size"],
        SamplingConfig.model_validate(data["sampling"]),
        None if uniforms is None else uniforms.to(device),
        data["greedy"],
        rows_at_once=data["rows_at_once"],
    )


def drawn(rollouts: Rollouts) -> tuple[dict[str, Any], Tensors]:
    """Completions, without their prompts."""
    data = {
        "stop_reasons": list(rollouts.stop_reasons),
        "texts": list(rollouts.texts),
        "marked": list(rollouts.marked),
    }
    return data, below("ids", joined(rollouts.completion_ids, torch.int64)) | below(
        "logprobs", joined(rollouts.logprobs, torch.float64)
    )


def drawn_of(message: Message, prompts: Sequence[Sequence[int]], group: int) -> Rollouts:
    """The completions that a rank sampled for these prompts."""
    data, tensors = message.data, message.tensors
    ids, logprobs = split(of("ids", tensors)), split(of("logprobs", tensors))
    return Rollouts(prompts, ids, logprobs, data["stop_reasons"], data["texts"], group, data["marked"])


def rows_of(prompts: Sequence[int], group: int) -> list[int]:
    """The rows of these prompts' completions."""
    return [prompt * group + k for prompt in prompts for k in range(group)]


# ---- completions that are scored and trained


def part(rollouts: Rollouts, prompts: Sequence[int]) -> Rollouts:
    """The groups of these prompts, as far as passes of the policy need them."""
    rows = rows_of(prompts, rollouts.group_size)
    return Rollouts(
        [rollouts.prompt_ids[p] for p in prompts],
        [rollouts.completion_ids[i] for i in rows],
        (),
        (),
        (),
        rollouts.group_size,
        prompts=[rollouts.prompts[p] for p in prompts],
    )


def completions(rollouts: Rollouts) -> tuple[dict[str, Any], Tensors]:
    """A part of the completions, with the objective of each prompt."""
    objectives = [drawn.objective for drawn in rollouts.prompts]
    tensors = below("prompts", joined(rollouts.prompt_ids, torch.int64))
    tensors |= below("ids", joined(rollouts.completion_ids, torch.int64))
    return {"group_size": rollouts.group_size, "objectives": objectives}, tensors


def completions_of(message: Message) -> Rollouts:
    """The completions in a message of `completions`."""
    prompts, ids = (split(of(name, message.tensors)) for name in ("prompts", "ids"))
    asked = [SampledPrompt(name, Example("", "")) for name in message.data["objectives"]]
    return Rollouts(prompts, ids, (), (), (), message.data["group_size"], prompts=asked)


def measured(found: Measured) -> Tensors:
    """Tables of log-probs by name; missing ones are left out."""
    tables = {"reference": found.reference}
    if found.old is not None:
        tables |= {"old": found.old.logprobs, "entropy": found.old.entropy}
    return {name: table for name, table in tables.items() if table is not None}


# ---- the plan


def plan(of_step: StepPlan) -> dict[str, Any]:
    """Fields of a plan that another rank needs; the rest is in the run's settings."""
    return {
        "step": of_step.step,
        "seed": of_step.seed,
        "temperature": of_step.temperature,
        "betas": dict(of_step.betas),
        "weights": dict(of_step.weights),
        "needs_reference": of_step.needs_reference,
        "old_first": of_step.old_first,
        "micro_batch": of_step.micro_batch,
        "max_completion_length": of_step.max_completion_length,
        "most_bad_rows": of_step.most_bad_rows,
        "numerics": of_step.numerics.model_dump(),
    }


def plan_of(data: Mapping[str, Any], config: Config) -> StepPlan:
    """The plan of a step, for scoring and training."""
    algorithm = config.algorithm
    made = {**data, "numerics": Numerics.model_validate(data["numerics"])}
    return StepPlan(
        **made,
        learning_rate=0.0,
        algorithm=algorithm,
        loss=loss_config(algorithm),
        kl_targets={},
        reports_gradients=False,
    )


# ---- gradients


def training(
    batch: Experience, prompts: Sequence[int], rows: Mapping[str, Sequence[int]], of_step: StepPlan
) -> tuple[dict[str, Any], Tensors]:
    """The groups of these prompts, of which some rows by objective train."""
    every = rows_of(prompts, batch.rollouts.group_size)
    place = {row: n for n, row in enumerate(every)}
    data, tensors = completions(part(batch.rollouts, prompts))
    data |= {"plan": plan(of_step), "rows": {name: [place[i] for i in own] for name, own in rows.items()}}
    tables = {
        "advantages": batch.advantages,
        "kept": batch.kept,
        "lengths": batch.lengths,
        "old": batch.logprobs_old,
        "entropy": batch.entropy,
        "measured": batch.measured,
        "reference": batch.logprobs_reference,
        "token_weights": batch.token_weights,
    }
    return data, tensors | {name: table[every] for name, table in tables.items() if table is not None}


def batch_of(message: Message) -> Experience:
    """The loss inputs in a message of `training`."""
    tables = message.tensors
    return Experience(
        rollouts=completions_of(message),
        scores=(),
        rewards={},
        advantages=tables["advantages"],
        kept=tables["kept"],
        lengths=tables["lengths"],
        logprobs_old=tables["old"],
        entropy=tables["entropy"],
        measured=tables["measured"],
        logprobs_reference=tables.get("reference"),
        token_weights=tables.get("token_weights"),
    )


def normalizers(of_update: Mapping[str, losses.LossNormalizer]) -> dict[str, Any]:
    """Denominators by objective."""
    return {name: asdict(one) for name, one in of_update.items()}


def normalizers_of(data: Mapping[str, Any]) -> dict[str, losses.LossNormalizer]:
    """The denominators in the data of `normalizers`."""
    return {name: losses.LossNormalizer(**one) for name, one in data.items()}


_SUMS = ("loss", "tokens", "clipped_low", "clipped_high", "clamped")


def statistics(stats: GradientStats) -> tuple[dict[str, Any], Tensors]:
    """Statistics of a rank's backward passes, as JSON values and tensors."""
    data = {name: getattr(stats, name) for name in (*_SUMS, "terms", "ratio_deviation")}
    tensors = {"log_ratios": torch.cat(stats.log_ratios) if stats.log_ratios else torch.zeros(0)}
    if stats.seen is not None:
        tensors |= {"seen": stats.seen.logprobs, "seen_entropy": stats.seen.entropy}
    return data, tensors


def add_statistics(stats: GradientStats, message: Message, rows: Sequence[int]) -> None:
    """Add what another rank reported of these rows of the step."""
    for name in _SUMS:
        setattr(stats, name, getattr(stats, name) + message.data[name])
    for term, value in message.data["terms"].items():
        stats.terms[term] = stats.terms.get(term, 0.0) + value
    stats.ratio_deviation = max(stats.ratio_deviation, message.data["ratio_deviation"])
    if message.tensors["log_ratios"].numel():
        stats.log_ratios.append(message.tensors["log_ratios"])
    if stats.seen is not None:
        put(stats.seen, TokenStats(message.tensors["seen"], message.tensors["seen_entropy"]), rows)


def put(table: TokenStats, found: TokenStats, rows: Sequence[int]) -> None:
    """Write the rows that a rank measured into the tables of the step."""
    width = found.logprobs.shape[1]
    table.logprobs[rows, :width] = found.logprobs
    table.entropy[rows, :width] = found.entropy


# ---- pairs of SFT


def share(part: Share) -> Message:
    """Pairs to learn, with the denominator of all."""
    tensors = below("prompts", joined([pair.prompt_ids for pair in part.pairs], torch.int64))
    tensors |= below("ids", joined([pair.completion_ids for pair in part.pairs], torch.int64))
    data = {"tokens": part.tokens, "micro_batch": part.micro_batch, "numerics": part.numerics.model_dump()}
    return Message(PAIRS, data, tensors)


def share_of(message: Message) -> Share:
    """The pairs in a message of `share`."""
    prompts, ids = (split(of(name, message.tensors)) for name in ("prompts", "ids"))
    data, pairs = message.data, [Pair(*both) for both in zip(prompts, ids, strict=True)]
    return Share(pairs, data["tokens"], data["micro_batch"], Numerics.model_validate(data["numerics"]))


# ---- scores


def scores(given: Sequence[Score]) -> list[list[Any]]:
    """Verdicts of a task."""
    return [[s.value, s.label, dict(s.parts), s.cause, s.scale] for s in given]


def scores_of(data: Sequence[Sequence[Any]]) -> list[Score]:
    """The scores in the data of `scores`."""
    return [Score(value, label, parts, cause, scale) for value, label, parts, cause, scale in data]
