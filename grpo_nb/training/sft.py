"""SFT: supervised fine-tuning teaches the model the form of an answer, its stop token included.

`for step in sft(run): ...` trains and saves; like `grpo()` it resumes by itself.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_nb import fingerprint, optim, seeding, trackers
from grpo_nb.config import Config, ConfigError
from grpo_nb.metrics import keys
from grpo_nb.policy.full_memory import full_memory
from grpo_nb.policy.model import Policy
from grpo_nb.preflight import dependencies, requirements
from grpo_nb.ranks.leader import ALONE, Leader, Ranks
from grpo_nb.rules.updates import SKIPS_TO_STOP
from grpo_nb.run.checkpoints import Checkpoint, Checkpoints
from grpo_nb.run.knob_file import KnobSnapshot
from grpo_nb.run.run import Run, RunError
from grpo_nb.run.settings import plain
from grpo_nb.storage import file_stamps
from grpo_nb.storage.vocabulary import Command
from grpo_nb.tasks import Task
from grpo_nb.training import (
    follower,
    gold,
    guards,
    loop,
    memory_ladder,
    metrics,
    numerics,
    parts,
    resume,
    sharded,
    spread,
)
from grpo_nb.training.gradients import chunks
from grpo_nb.training.numerics import Numerics
from grpo_nb.training.pairs import Pair, Share, logprobs
from grpo_nb.training.state import draw, environment_info, forget_gradients
from grpo_nb.training.switches import deterministic
from grpo_nb.types import Steps, StepStats

HELD_OUT = 64
"""Pairs kept apart to measure the loss before and after, at most (and never more than a tenth)."""


def sft(
    run: Run,
    *,
    policy: Policy | None = None,
    tasks: Mapping[str, Task] | None = None,
    accept_changed: Collection[str] = (),
) -> Steps:
    """Train on gold completions for `sft.steps` steps, yielding each; the result is saved in the run.

    Like `grpo` it resumes automatically; if SFT is done, it yields nothing.

    The loss is the mean over completion tokens of the batch, stop token included, prompt excluded.
    `accept_changed` names the kinds of content that may differ from the run's start, e.g. `{"data"}` (see
    `dependencies`). A policy that is given belongs to this training until the generator ends or is closed.
    Loss on held-out pairs before and after goes to events.jsonl as `sft_eval`.

    Raises:
        ConfigError, ModelError, DataError: before any work.
        PolicyTaken: `policy` belongs to another training, which is still open; before any work.
        DependencyChanged: content that the run depends on changed, and was not accepted; before any work.
        RunError: GRPO has begun in this run before SFT was done, so its reference must not change any more.
        TrainingError: a completion to learn has no stop token at its end, or three updates in a row were refused.
    """
    if follower.follows(resume.Given(policy, tasks)):
        return
    config = run.config
    dependencies.accepted_kinds(accept_changed)
    requirements.check_combiner(config)  # GRPO would refuse it too, but after the minutes of SFT
    trackers.check(config)
    if run.checkpoints.latest()[0] is not None:
        if finished(run):
            return
        raise RunError(
            f"{run.path} has begun GRPO from its SFT result, which is GRPO's reference; "
            "more SFT needs a new run directory"
        )
    with run.lock() as lock, sharded.leading(run, policy) as ranks:
        run.check_settings()
        run.knobs.request(Command.RUN)
        newest = resume.newest_valid(run, run.sft_checkpoints, accept_changed)
        policy = spread.policy_for(run, policy, ranks)
        policy.ownership.claim(lock)
        policy.settle()
        policy.set_date(run.started)
        run.doing("checking the model, the tasks and their prompts")
        known = requirements.check_ahead(config, run.path, policy, tasks)
        run.doing("reading the pairs to learn")
        with file_stamps.recorded() as files:
            learnt = gold.load_gold(config, run.path, tasks)
        texts = [text for own in learnt.values() for text in own]
        run.doing("comparing data and weights with those that the run was made with")
        found = dependencies.of_policy(policy) | dependencies.of_sft(texts, files)
        dependencies.check(run, found, accept_changed, "sft")
        origins = [name for name, own in learnt.items() for _ in own]
        pairs = [Pair(policy.encode(prompt), policy.encode_completion(target, prompt)) for prompt, target in texts]
        _check_lengths(pairs, policy.context)
        guards.check_ends_with_stop([pair.completion_ids for pair in pairs], policy.stop_token_ids)
        with deterministic(config, policy.device):
            if newest is None and config.sft.data is not None:  # gold answers are of the train split
                guards.log_and_raise(run, list(gold.leaks(texts, known)))
            stage = Sft(run, policy, (pairs, origins), newest)
            stage.share_among(ranks)
            with numerics.computing(stage.numerics), closing(loop.walk(stage, lock)) as steps_taken:
                yield from steps_taken


def finished(run: Run) -> bool:
    """Whether SFT has reached its steps, or has none to do."""
    newest, _ = run.sft_checkpoints.latest()
    return run.config.sft.steps == 0 or (newest is not None and newest.step >= run.config.sft.steps)


def evaluate_loss(policy: Policy, pairs: Sequence[Pair], micro_batch: int, numerics: Numerics | None = None) -> float:
    """Mean negative log-likelihood of the completions, nats per token."""
    total = 0.0
    with policy.eval_mode():
        for micro in chunks(pairs, micro_batch):
            total -= float(logprobs(policy, micro, numerics or Numerics()).double().sum())
    return total / sum(len(pair.completion_ids) for pair in pairs)


@dataclass
class SftProgress:
    """Position of an SFT."""

    run: Run
    goal: int
    step: int
    saved: int
    mid_update: bool = False


class Sft(loop.Stage):
    """SFT as a stage: the policy, its optimizer, and the pairs to learn."""

    prefix = "sft_"

    def __init__(
        self, run: Run, policy: Policy, learnt: tuple[Sequence[Pair], Sequence[str]], newest: Checkpoint | None
    ) -> None:
        """`learnt`: pairs, and the objective of each."""
        (pairs, origins), settings, seed = learnt, run.config.sft, run.config.run.seed
        order = seeding.permutation(len(pairs), seed, 0, "sft/held-out")
        held = min(HELD_OUT, len(pairs) // 10)
        self.held_out = [pairs[i] for i in order[:held]]
        self.pools = gold.pools(settings, [pairs[i] for i in order[held:]], [origins[i] for i in order[held:]])
        self._policy, self.newest = policy, newest
        self.optimizer = optim.adamw(policy.parameters_by_name(), settings.learning_rate, settings.weight_decay)
        forget_gradients(policy)
        step = _resume(run, policy, self.optimizer, newest)
        if newest is None:
            self.numerics = numerics.begin_sft(run, policy)
        else:
            before = numerics.stored(run, newest.state())
            self.numerics = numerics.resume_sft(policy, before)
            numerics.log_changes(run, step, before, self.numerics)
        self.progress = SftProgress(run, settings.steps, step, saved=step)
        self.recent: deque[dict[str, Any]] = deque(maxlen=SKIPS_TO_STOP)
        self.ranks: Ranks = ALONE
        """Ranks that compute the steps."""

    def share_among(self, ranks: Ranks) -> None:
        """Let these ranks compute the steps."""
        self.ranks = ranks
        if isinstance(ranks, Leader):
            self.progress.run.log_event("sft_ranks", step=self.progress.step, ranks=ranks.size)
            places = parts.Places(self.newest, refers=False)
            parts.others_take_up(self.policy, self.optimizer, ranks, self.progress.run, places)
            sharded.start_replicas(ranks, self.policy, self.numerics)

    @property
    def checkpoints(self) -> Checkpoints:
        return self.progress.run.sft_checkpoints

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def save_every(self) -> int:
        return self.progress.run.config.sft.checkpoint_every

    def begin(self) -> None:
        if self.progress.step == 0:  # also where an attempt without a checkpoint did: its model may have been another
            self._measure()

    def accept(self, knobs: KnobSnapshot) -> None:
        """Accept every knob: none belongs to SFT, except pause and stop."""

    def advance(self) -> StepStats:
        run, step = self.progress.run, self.progress.step + 1
        stats = self._step(step)
        self.recent.append(dict(stats.metrics))
        run.log_sft(dict(stats.metrics))
        guards.watch_sft(run, list(self.recent))
        self.progress.step, self.progress.mid_update, self.policy.interrupted_update = step, False, ""
        return stats

    def _step(self, step: int) -> StepStats:
        while True:
            plan = plan_sft_step(self.progress.run.config, self.pools, step, self.numerics)
            plan = replace(plan, ranks=self.ranks)
            try:
                with full_memory():
                    return sft_step(self.policy, self.optimizer, plan, self._moving)
            except torch.OutOfMemoryError as error:
                now = min(plan.micro_batch, -(-len(plan.pairs) // self.ranks.size)) // 2
                if now < 1 or (self.progress.mid_update and not self.undo()):
                    raise
                forget_gradients(self.policy)
                self.numerics = self.numerics.model_copy(update={"micro_batch": now})
                memory_ladder.freed_for_less(self.progress.run, step, f"micro_batch={now}", error, self.prefix)

    def _moving(self) -> None:
        run, policy = self.progress.run, self.policy
        policy.interrupted_update, policy.moved_in = f"step {self.progress.step + 1} of the SFT of {run.name}", run.path
        self.progress.mid_update = True
        self.ranks.weights_changed()

    def undo(self) -> bool:
        """The optimizer's first update undoes itself (see `optim.apply`); of later ones no copy is kept."""
        if self.optimizer.state:
            return False
        forget_gradients(self.policy)
        if self.progress.step == 0:
            self.policy.moved_in = None
        self.policy.interrupted_update, self.progress.mid_update = "", False
        return True

    def store(self) -> None:
        run, step = self.progress.run, self.progress.step
        stored = {"step": step, "config": plain(run.config), "fingerprint": fingerprint.fingerprint()}
        stored["numerics"] = self.numerics.model_dump()
        run.sft_checkpoints.save(step, parts.state_dict(self.policy, self.optimizer, self.ranks), stored)
        run.sft_checkpoints.prune(1)
        self.progress.saved = step

    def finish(self) -> None:
        done = self.progress.run.stored("events").having("kind", {"sft_eval"})
        if not any(event.get("step") == self.progress.step for event in done):
            self._measure()

    def _measure(self) -> None:
        """Log the loss on held-out pairs; where memory is full on fewer at a time, and else not at all."""
        run, step = self.progress.run, self.progress.step
        micro = min(self.numerics.micro_batch_of(run.config.sft.micro_batch), len(self.held_out))
        if not self.held_out:
            return
        run.doing(f"measuring the loss on {len(self.held_out)} held-out pairs")
        while True:
            try:
                with full_memory():
                    loss = evaluate_loss(self.policy, self.held_out, micro, self.numerics)
                break
            except torch.OutOfMemoryError as error:
                if micro == 1:
                    run.log_event("sft_evaluation_failed", step=step, error=memory_ladder.first_line(error))
                    return
                micro //= 2
                memory_ladder.freed_for_less(run, step, f"micro_batch={micro}", error, "sft_evaluation_")
        run.log_event("sft_eval", step=step, loss=loss, n=len(self.held_out))


@dataclass(frozen=True)
class SftPlan:
    """Plan of one step of SFT, decided before it begins."""

    step: int
    """Number of the step, 1-based."""
    pairs: Sequence[Pair]
    learning_rate: float
    """Learning rate after warm-up and decay."""
    max_grad_norm: float
    micro_batch: int
    numerics: Numerics
    ranks: Ranks = ALONE


def plan_sft_step(config: Config, pools: Mapping[str, Sequence[Pair]], step: int, numerics: Numerics) -> SftPlan:
    """The plan of a step: its pairs from each pool, and its learning rate."""
    settings = config.sft
    each = zip(pools.items(), gold.counts(settings.batch, len(pools)), strict=True)
    return SftPlan(
        step=step,
        pairs=[own[i] for (name, own), count in each for i in draw(len(own), count, step, config.run.seed, name)],
        learning_rate=settings.learning_rate * schedule(step, settings.warmup_steps, settings.steps),
        max_grad_norm=settings.max_grad_norm,
        micro_batch=numerics.micro_batch_of(settings.micro_batch),
        numerics=numerics,
    )


def sft_step(
    policy: Policy, optimizer: torch.optim.Optimizer, plan: SftPlan, moving: Callable[[], None] = lambda: None
) -> StepStats:
    """One optimizer step on the token-mean loss of one batch; micro-batches change memory, not the gradient.

    `moving` is called right before the weights move.
    """
    clock, tokens = metrics.Clock(), sum(len(pair.completion_ids) for pair in plan.pairs)
    total = sharded.accumulate(policy, Share(plan.pairs, tokens, plan.micro_batch, plan.numerics), plan.ranks)
    moving()
    settings = {"learning_rate": plan.learning_rate, "max_norm": plan.max_grad_norm}
    update = parts.update(policy, optimizer, plan.ranks, settings)
    row: dict[str, Any] = {
        keys.STEP: plan.step,
        keys.STATUS: update.status,
        keys.LOSS: total,
        keys.LR: plan.learning_rate,
        keys.GRAD_NORM: update.norm,
        keys.GRAD_UPDATE: update.moved,
        keys.TOKENS: tokens,
        keys.MEMORY_PEAK: metrics.peak_memory_mib(policy.device),
    }
    return StepStats(step=plan.step, metrics=row | clock.row() | metrics.rank_row(plan.ranks), status=update.status)


def schedule(step: int, warmup_steps: int, steps: int) -> float:
    """Factor of the learning rate: linear warm-up, then a linear decay to a tenth at the last step."""
    if step <= warmup_steps:
        return optim.warmup(step, warmup_steps)
    return 1.0 - 0.9 * (step - warmup_steps) / max(steps - warmup_steps, 1)


def _resume(run: Run, policy: Policy, optimizer: torch.optim.Optimizer, newest: Checkpoint | None) -> int:
    if newest is None:
        policy.refuse_interrupted()
        policy.refuse_moved(run.path)
        run.rewind_sft(0)
        return 0
    parts.load_state_dict(policy, optimizer, newest)
    run.rewind_sft(newest.step)
    if newest.step < run.config.sft.steps:
        run.log_event("sft_resume", step=newest.step, **environment_info(policy))
    return newest.step


def _check_lengths(pairs: Sequence[Pair], context: int) -> None:
    longest = max(len(p.prompt_ids) + len(p.completion_ids) for p in pairs)
    if longest > context:
        raise ConfigError(
            f"the longest SFT example has {longest} tokens, the model's context is {context}; "
            "shorten the data (examples are never cut) or take a model with a longer context"
        )
