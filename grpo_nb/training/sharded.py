"""A step on several ranks, as rank 0 sees it: each function returns the same as its namesake on one rank, and with one
rank it is that namesake.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from grpo_nb.config import ConfigError
from grpo_nb.config.batch import MOST_COMPLETIONS
from grpo_nb.policy.loading import pick_device
from grpo_nb.policy.model import Policy
from grpo_nb.ranks import link
from grpo_nb.ranks.deal import deal
from grpo_nb.ranks.leader import ALONE, Leader, Ranks
from grpo_nb.ranks.messages import Message
from grpo_nb.rewards import scoring
from grpo_nb.rollout import Ended, Engine, Request, VLLMEngine
from grpo_nb.run.run import Run
from grpo_nb.tasks import Task
from grpo_nb.training import gradients, pairs, spread, wire
from grpo_nb.training.dealing import Rows, prompts_of, within
from grpo_nb.training.gradients import Accumulated, BadRows, GradientStats, Measured
from grpo_nb.training.numerics import Numerics
from grpo_nb.training.objectives import Objective
from grpo_nb.training.pairs import Share
from grpo_nb.training.plan import StepPlan
from grpo_nb.training.state import TrainState
from grpo_nb.types import Example, Experience, Rollouts, Score, TokenStats


@contextmanager
def leading(run: Run, policy: Policy | None) -> Iterator[Ranks]:
    """The ranks that train a run, during one stage; the others load their replicas meanwhile."""
    config = run.config
    if (own := link.joined()) is None:
        spread.refuse_alone(config)
        yield ALONE
        return
    if policy is None and config.model.device.startswith("cuda:"):
        raise ConfigError(
            f"model.device='{config.model.device}' is one card, and {own.place.size} ranks train, each on its own; set "
            "model.device='cuda' or 'auto'"
        )
    ranks = Leader(own, run.log_event, config.run.rank_timeout)
    try:
        shards = spread.wanted(config)
        device = pick_device(config.model.device) if policy is None or shards else policy.device
        ranks.open({"run": str(run.path)}, device, shards)
        yield ranks
    finally:
        ranks.close()


def begin(state: TrainState) -> None:
    """Send every replica rank 0's choices, its reference and its weights; from here on prompts are dealt to the ranks,
    except with a server, from which rank 0 alone requests all completions.
    """
    ranks, policy = state.ranks, state.policy
    if isinstance(ranks, Leader):
        start_replicas(ranks, policy, state.numerics, list(policy.reference_by_name().values()))
        if not isinstance(state.engine, VLLMEngine):
            state.chosen_engine = replace(state.chosen_engine, engine=SharedEngine(state.engine, ranks, policy))


def start_replicas(ranks: Leader, policy: Policy, numerics: Numerics, reference: Sequence[Tensor] = ()) -> None:
    """Send every replica the numerical choices and weights of a stage, and its reference if it has one."""
    spread_out = policy.parts is not None  # each rank has its own
    weights = [] if spread_out else [parameter.data for parameter in policy.parameters_by_name().values()]
    ranks.begin(Message(wire.BEGIN, {"numerics": numerics.model_dump()}), weights)
    if reference and not spread_out:
        ranks.send_once(Message(wire.REFERENCE), reference)


class SharedEngine:
    """Samples each prompt's completions on one of the ranks; they do not depend on which one."""

    def __init__(self, own: Engine, ranks: Leader, policy: Policy) -> None:
        self.own, self._ranks, self._policy = own, ranks, policy
        self.max_rows = getattr(own, "max_rows", MOST_COMPLETIONS)
        """Completions in flight on each rank."""

    def release(self) -> None:
        """Give back what rank 0's engine holds; the other ranks do so when their memory is full."""
        if release := getattr(self.own, "release", None):
            release()

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        """Rollouts of the request, from the engines of all ranks."""
        if policy is not self._policy:
            return self.own.generate(policy, request)
        group, parts = request.group_size, deal([1] * len(request.prompt_ids), self._ranks.size)
        messages = [wire.sampling(request, part) if part else None for part in parts[1:]]
        own, replies = self._ranks.ask(messages, lambda: self.own.generate(policy, _own(request, parts[0])))
        found = {0: own}
        for rank, reply in enumerate(replies, 1):
            if reply is not None:
                prompts = [request.prompt_ids[p] for p in parts[rank]]
                found[rank] = wire.drawn_of(reply, prompts, group)
        for rank in found:
            if rank and request.ended is not None:
                rows, texts = wire.rows_of(parts[rank], group), found[rank].scored_texts
                request.ended([Ended(row, text) for row, text in zip(rows, texts, strict=True)])
        return _together(request, [(parts[rank], part) for rank, part in found.items()])


def _own(request: Request, prompts: Sequence[int]) -> Request:
    """Part of a request that rank 0 samples itself."""
    rows, ended = wire.rows_of(prompts, request.group_size), request.ended

    def renumbered(completions: Sequence[Ended]) -> None:
        assert ended is not None
        ended([replace(completion, row=rows[completion.row]) for completion in completions])

    return replace(
        request,
        prompt_ids=[request.prompt_ids[p] for p in prompts],
        uniforms=None if request.uniforms is None else request.uniforms[rows],
        ended=None if ended is None else renumbered,
    )


def _together(request: Request, parts: Sequence[tuple[Sequence[int], Rollouts]]) -> Rollouts:
    """The completions of all ranks, prompt by prompt."""
    group = request.group_size
    places = {row: (part, n) for prompts, part in parts for n, row in enumerate(wire.rows_of(prompts, group))}
    rows = [places[row] for row in range(request.rows)]
    return Rollouts(
        request.prompt_ids,
        [part.completion_ids[n] for part, n in rows],
        [part.logprobs[n] for part, n in rows],
        [part.stop_reasons[n] for part, n in rows],
        [part.texts[n] for part, n in rows],
        group,
        [part.scored_texts[n] for part, n in rows] if any(part.marked for _, part in parts) else (),
    )


def task_scores(ranks: Ranks, objectives: Mapping[str, Objective]) -> Callable[..., list[Score]]:
    """Function that computes a task's scores, with the completions split over the ranks."""
    if not isinstance(ranks, Leader):
        return scoring.task_scores
    names = {id(objective.rubric.task): name for name, objective in objectives.items()}

    def scores(task: Task, examples: Sequence[Example], texts: Sequence[str]) -> list[Score]:
        parts = [range(len(texts))[rank :: ranks.size] for rank in range(ranks.size)]
        messages = [_to_score(names[id(task)], examples, texts, part) if part else None for part in parts[1:]]
        own, replies = ranks.ask(messages, lambda: _scored(task, examples, texts, parts[0]))
        found = dict(zip(parts[0], own, strict=True))
        for part, reply in zip(parts[1:], replies, strict=True):
            if reply is not None:
                found |= dict(zip(part, wire.scores_of(reply.data["scores"]), strict=True))
        return [found[i] for i in range(len(texts))]

    return scores


def _scored(task: Task, examples: Sequence[Example], texts: Sequence[str], part: Sequence[int]) -> list[Score]:
    return scoring.task_scores(task, [examples[i] for i in part], [texts[i] for i in part])


def _to_score(name: str, examples: Sequence[Example], texts: Sequence[str], part: Sequence[int]) -> Message:
    """Message that requests scores; example ids are enough, since every rank has read the examples."""
    data = {"objective": name, "examples": [examples[i].id for i in part], "texts": [texts[i] for i in part]}
    return Message(wire.SCORE, data)


def measure(policy: Policy, rollouts: Rollouts, plan: StepPlan) -> Measured:
    """Old and reference log-probs by `gradients.measure`, with the rows split over the ranks."""
    ranks = plan.ranks
    if not isinstance(ranks, Leader) or not (plan.old_first or plan.needs_reference):
        return gradients.measure(policy, rollouts, plan)
    parts = prompts_of(rollouts, ranks.size, range(len(rollouts.completion_ids)))
    idle = None if policy.parts is None else Message(wire.IDLE, {"reference": plan.needs_reference})
    messages = [_to_measure(wire.part(rollouts, part), plan) if part else idle for part in parts[1:]]
    own, replies = ranks.ask(
        messages, lambda: wire.measured(gradients.measure(policy, wire.part(rollouts, parts[0]), plan))
    )
    found = [own, *({} if reply is None else reply.tensors for reply in replies)]
    tables: dict[str, Tensor] = {}
    for part, tensors in zip(parts, found, strict=True):
        rows = wire.rows_of(part, rollouts.group_size)
        for name, table in tensors.items():
            if name not in tables:
                tables[name] = gradients.blank(rollouts).logprobs
            tables[name][rows, : table.shape[1]] = table
    old = TokenStats(tables["old"], tables["entropy"]) if "old" in tables else None
    return Measured(old, tables.get("reference"))


def _to_measure(rollouts: Rollouts, plan: StepPlan) -> Message:
    data, tensors = wire.completions(rollouts)
    return Message(wire.MEASURE, {**data, "plan": wire.plan(plan)}, tensors)


def objective_gradients(
    policy: Policy, batch: Experience, rows: Rows, plan: StepPlan, generator: torch.Generator
) -> GradientStats:
    """Accumulate as `gradients.objective_gradients`, on all ranks; only rank 0's `.grad` has the combination."""
    by_ranks = accumulated if isinstance(plan.ranks, Leader) else None
    return gradients.objective_gradients(policy, batch, rows, plan, generator, by_ranks)


def accumulated(policy: Policy, batch: Experience, rows: Rows, plan: StepPlan) -> Accumulated:
    """Accumulated gradients of all rows as `gradients.accumulated`, computed by all ranks.

    Raises:
        BadRows: on any rank.
    """
    ranks = plan.ranks
    assert isinstance(ranks, Leader)
    group, normalizers = batch.rollouts.group_size, gradients.normalizers_of(batch, rows, plan)
    parts = prompts_of(batch.rollouts, ranks.size, [i for own in rows.values() for i in own])
    messages = [_to_train(batch, part, rows, plan) if part else None for part in parts[1:]]

    def own() -> Accumulated | list[int]:
        try:
            return gradients.accumulated(policy, batch, within(rows, parts[0], group), plan, normalizers)
        except BadRows as found:
            return found.rows

    mine, replies = ranks.ask(messages, own)
    bad = mine if isinstance(mine, list) else []
    for part, reply in zip(parts[1:], replies, strict=True):
        every = wire.rows_of(part, group)
        bad += [every[i] for i in (reply.data.get("bad", ()) if reply else ())]
    if bad or isinstance(mine, list):
        raise BadRows(sorted(bad))
    for part, reply in zip(parts[1:], replies, strict=True):
        if reply is not None:
            wire.add_statistics(mine.stats, reply, wire.rows_of(part, group))
    return Accumulated(mine.stats, _summed(policy, mine.apart, ranks, replies))


def accumulate(policy: Policy, share: Share, ranks: Ranks) -> float:
    """Accumulate gradients as `pairs.accumulate`, on all ranks."""
    if not isinstance(ranks, Leader):
        return pairs.accumulate(policy, share)
    every = share.pairs
    dealt = deal([len(pair.prompt_ids) + len(pair.completion_ids) for pair in every], ranks.size)
    parts = [replace(share, pairs=[every[i] for i in part]) for part in dealt]
    messages = [wire.share(part) if part.pairs else None for part in parts[1:]]
    own, replies = ranks.ask(messages, lambda: pairs.accumulate(policy, parts[0]))
    _summed(policy, {}, ranks, replies)
    return math.fsum([own, *(reply.data["loss"] for reply in replies if reply is not None)])


def _summed(
    policy: Policy, apart: Mapping[str, Mapping[str, Tensor]], ranks: Leader, replies: Sequence[Message | None]
) -> dict[str, dict[str, Tensor]]:
    """Add up the gradients of all ranks, where each rank has those of its own rows; returns the separate ones, if any.

    Of weights that are spread the backward passes have done so.
    """
    if policy.parts is not None:
        return {}
    parameters = policy.parameters_by_name()
    sets: dict[str, Mapping[str, Tensor]] = dict(apart)
    if not apart:
        sets = {"": {name: p.grad for name, p in parameters.items() if p.grad is not None}}
    elsewhere = [reply.data["present"] for reply in replies if reply is not None]
    present: dict[str, list[str]] = {}
    for which, own in sets.items():
        names = {name for found in elsewhere for name in found.get(which, ())} | own.keys()
        present[which] = [name for name in parameters if name in names]
    complete = completed(parameters, sets, present)
    ranks.add_up(list(complete.values()), {"present": present})
    if apart:
        return complete
    for name, gradient in complete[""].items():
        parameters[name].grad = gradient
    return {}


def completed(
    parameters: Mapping[str, Tensor], sets: Mapping[str, Mapping[str, Tensor]], present: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Tensor]]:
    """Sets of gradients with zeros for those that other ranks have, in the order that all ranks have them in."""
    return {
        which: {
            name: torch.zeros_like(parameters[name]) if (own := sets.get(which, {}).get(name)) is None else own
            for name in names
        }
        for which, names in present.items()
    }


def _to_train(batch: Experience, part: Sequence[int], rows: Rows, plan: StepPlan) -> Message:
    """The rows of a part of the prompts, with the denominators of all."""
    data, tensors = wire.training(batch, part, within(rows, part, batch.rollouts.group_size), plan)
    normalizers = gradients.normalizers_of(batch, rows, plan)
    return Message(wire.GRADIENTS, {**data, "normalizers": wire.normalizers(normalizers)}, tensors)
