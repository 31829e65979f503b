"""A rank other than rank 0: it holds a replica of the policy and follows rank 0's messages until the stage ends."""

import contextlib
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_nb.optim import Parameters
from grpo_nb.policy.full_memory import full_memory
from grpo_nb.policy.model import Policy
from grpo_nb.printable import clean_logger
from grpo_nb.ranks import transfer
from grpo_nb.ranks.leader import FAILED, MEMORY_FULL, transfers
from grpo_nb.ranks.link import BYE, Link, RankError, first_line, joined
from grpo_nb.ranks.lockstep import ATTEND, JOIN, LOAD, Lockstep, lockstep
from grpo_nb.ranks.messages import Message
from grpo_nb.rewards.scoring import task_scores
from grpo_nb.rollout import Engine
from grpo_nb.run.lock import LOCK, RunLock
from grpo_nb.run.run import Run, RunError
from grpo_nb.tasks import Task, load_tasks, read_examples
from grpo_nb.training import gradients, memory_ladder, metrics, numerics, pairs, parts, spread, wire
from grpo_nb.training.gradients import BadRows
from grpo_nb.training.numerics import Numerics
from grpo_nb.training.resume import Given
from grpo_nb.training.sharded import completed
from grpo_nb.training.state import forget_gradients
from grpo_nb.training.switches import deterministic
from grpo_nb.types import Example

logger = clean_logger(__name__)

POLL_SECONDS = 5.0
"""Seconds between two checks of rank 0's heartbeat, while no message comes."""

Reply = tuple[Mapping[str, Any], Mapping[str, Tensor]]


@dataclass
class Replica:
    """State of a rank other than rank 0 during a stage."""

    link: Link
    run: Run
    policy: Policy
    given: Given
    group: "dist.ProcessGroup"
    ends: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Contexts to leave when the stage ends."""
    lockstep: Lockstep | None = None
    """Synchronises the ranks' forward passes where weights are spread over them; else None."""
    rows: parts.Rows | None = None
    """Rows of the weights that this rank trains, where each rank trains its part."""
    tasks: Mapping[str, Task] = field(default_factory=dict)
    engine: Engine | None = None
    examples: dict[str, dict[str, Example]] = field(default_factory=dict)
    """Examples by objective and id."""
    sets: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Gradients of the newest work, until they are added up."""

    @property
    def parameters(self) -> Parameters:
        return self.policy.parameters_by_name()


def follows(given: Given) -> bool:
    """Whether this process is a rank other than rank 0; if so, it has worked for rank 0 through one stage on return.

    Raises:
        RankError: as `follow`.
    """
    own = joined()
    if own is None or own.place.leads:
        return False
    follow(own, given)
    return True


def follow(link: Link, given: Given | None = None) -> bool:
    """Work for rank 0 through one stage, SFT or GRPO, with the parts that are `given` in place of the run's own.

    Returns:
        Whether a stage came; rank 0 may have no more work.

    Raises:
        RankError: rank 0 died, ended without a word, or gives no sign of life.
    """
    if (opened := _next(link, None)).work == BYE:
        return False
    run = Run.open(opened.data["run"])
    try:
        with left_to_rank_0(), _replica(link, run, opened, given or Given()) as replica:
            while replica is not None and (message := _next(link, run)).work != wire.CLOSE:
                _answer(replica, message)
        return True
    except RankError:
        raise
    except Exception as error:
        with contextlib.suppress(RankError):
            link.send(0, Message(FAILED, _took(0.0) | {"error": f"{type(error).__name__}: {error}"}))
            logger.error("%s", "".join(traceback.format_exception(error)))
            while _next(link, run).work != wire.CLOSE:  # rank 0 saves: what ends here now would end it, too
                pass
        raise


@contextlib.contextmanager
def left_to_rank_0() -> Iterator[None]:
    """Signals to stop do nothing inside the block: rank 0 has them too, decides, and saves first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _replica(link: Link, run: Run, opened: Message, given: Given) -> Iterator[Replica | None]:
    """Replica of the policy on this rank; None where rank 0 ends the stage before the model is loaded."""
    backend, seconds = opened.data["backend"], opened.data["seconds"]
    group, passes = transfers(backend, seconds), lockstep(backend, seconds) if opened.data["shards"] else None
    if passes is None:
        policy = given.policy or spread.loaded(run)
    elif _next(link, run).work == LOAD:
        policy = spread.own_part(run, given.policy, passes)
    else:
        yield None
        return
    forget_gradients(policy)
    with deterministic(run.config, policy.device), contextlib.ExitStack() as ends:
        yield Replica(link, run, policy, given, group, ends, passes)
    if passes is not None:
        passes.rest()
    dist.destroy_process_group(group)


def _next(link: Link, run: Run | None) -> Message:
    """Rank 0's next message, however long it takes while rank 0 lives: a pause has no end."""
    while True:
        arrival = link.next(POLL_SECONDS)
        if arrival is None:
            if run is not None and not _lives(run):
                raise RankError("rank 0 gives no sign of life in the run's lock; this rank ends", 0)
            continue
        if isinstance(arrival[1], Exception) or (arrival[1].work == BYE and run is not None):
            raise RankError(
                f"rank 0 has ended ({link.gone[0]}); this rank ends, and the run resumes from its newest checkpoint",
                0,
            )
        return arrival[1]


def _lives(run: Run) -> bool:
    owner, alive = RunLock(run.path / LOCK).look()
    return alive and owner is not None and owner.age < run.config.run.rank_timeout  # a stopped process still exists


def _answer(replica: Replica, message: Message) -> None:
    """Do what a message requests, and reply to rank 0; a full memory is no failure, since less at a time may do."""
    if message.work == wire.ADD_UP:
        _add_up(replica, message)
        return
    if message.work == ATTEND and replica.lockstep is not None:
        with replica.policy.as_reference() if message.data["refers"] else contextlib.nullcontext():
            replica.lockstep.attend(message.data["learns"])
        return
    replica.sets = {}
    if message.work != parts.UPDATE:
        forget_gradients(replica.policy)
    began = time.perf_counter()
    try:
        with full_memory(), contextlib.nullcontext() if replica.lockstep is None else replica.lockstep.section():
            data, tensors = WORK[message.work](replica, message)
        reply = Message(wire.DONE, data, tensors)
    except torch.OutOfMemoryError as error:
        forget_gradients(replica.policy)
        if release := getattr(replica.engine, "release", None):
            release()
        memory_ladder.free()
        reply = Message(MEMORY_FULL, {"error": first_line(error)})
    waited = 0.0 if replica.lockstep is None else replica.lockstep.waited()
    took = _took(time.perf_counter() - began - waited) | {"peak": metrics.peak_memory_mib(replica.policy.device)}
    replica.link.send(0, Message(reply.work, {**reply.data, **took}, reply.tensors))
    if message.work in (wire.WEIGHTS, wire.REFERENCE):
        transfer.send([parameter.data for parameter in replica.parameters.values()], replica.group)
    if message.work == wire.REFERENCE:
        replica.policy.freeze_reference()


def _took(seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "peak": 0.0}


def _begin(replica: Replica, message: Message) -> Reply:
    """Take over rank 0's choices, and the reference."""
    run, policy, chosen = replica.run, replica.policy, Numerics.model_validate(message.data["numerics"])
    replica.tasks = load_tasks(run.config, run.path, replica.given.tasks)
    now, chosen_engine = numerics.resume(run, policy, chosen, replica.given.engine)
    if now != chosen:
        raise RunError(
            f"rank {replica.link.place.rank} computes with {now}, rank 0 with {chosen}; needs the same model, packages "
            "and kind of card on every rank"
        )
    replica.engine = chosen_engine.engine
    replica.ends.enter_context(numerics.computing(now))
    return {}, {}


def _ready(replica: Replica, message: Message) -> Reply:
    """Report that this rank is ready; weights follow once every rank has answered."""
    return {}, {}


def _draw(replica: Replica, message: Message) -> Reply:
    assert replica.engine is not None
    return wire.drawn(replica.engine.generate(replica.policy, wire.request_of(message, replica.policy.device)))


def _score(replica: Replica, message: Message) -> Reply:
    name, task = message.data["objective"], replica.tasks[message.data["objective"]]
    if name not in replica.examples:
        replica.examples[name] = {example.id: example for example in read_examples(task, "train")}
    asked = [replica.examples[name][which] for which in message.data["examples"]]
    return {"scores": wire.scores(task_scores(task, asked, message.data["texts"]))}, {}


def _measure(replica: Replica, message: Message) -> Reply:
    plan = wire.plan_of(message.data["plan"], replica.run.config)
    return {}, wire.measured(gradients.measure(replica.policy, wire.completions_of(message), plan))


def _idle(replica: Replica, message: Message) -> Reply:
    """Take part in the forward passes of `gradients.measure` without rows of its own."""
    policy = replica.policy
    with policy.eval_mode():
        with policy.within():
            pass
        if message.data["reference"]:
            with policy.as_reference(), policy.within():
                pass
    return {}, {}


def _take_up(replica: Replica, message: Message) -> Reply:
    replica.rows = parts.take_up(replica.policy, replica.run, message.data)
    return {}, {}


def _of_rows(replica: Replica, message: Message) -> Reply:
    assert replica.rows is not None, "they are taken up first"
    parts.serve(replica.rows, message)
    return {}, {}


def _gradients(replica: Replica, message: Message) -> Reply:
    plan, batch = wire.plan_of(message.data["plan"], replica.run.config), wire.batch_of(message)
    denominators = wire.normalizers_of(message.data["normalizers"])
    try:
        found = gradients.accumulated(replica.policy, batch, message.data["rows"], plan, denominators)
    except BadRows as error:
        forget_gradients(replica.policy)
        return {"bad": error.rows}, {}
    data, tensors = wire.statistics(found.stats)
    replica.sets = dict(found.apart) or _in_grad(replica)
    return data | {"present": {which: list(own) for which, own in replica.sets.items()}}, tensors


def _pairs(replica: Replica, message: Message) -> Reply:
    loss = pairs.accumulate(replica.policy, wire.share_of(message))
    replica.sets = _in_grad(replica)
    return {"loss": loss, "present": {"": list(replica.sets[""])}}, {}


def _in_grad(replica: Replica) -> dict[str, Mapping[str, Tensor]]:
    return {"": {name: p.grad for name, p in replica.parameters.items() if p.grad is not None}}


def _add_up(replica: Replica, message: Message) -> None:
    for own in completed(replica.parameters, replica.sets, message.data["present"]).values():
        transfer.add_up(list(own.values()), replica.group)
    replica.sets = {}
    forget_gradients(replica.policy)


WORK = {
    JOIN: _ready,
    wire.BEGIN: _begin,
    wire.REFERENCE: _ready,
    wire.WEIGHTS: _ready,
    wire.DRAW: _draw,
    wire.SCORE: _score,
    wire.MEASURE: _measure,
    wire.GRADIENTS: _gradients,
    wire.PAIRS: _pairs,
    wire.IDLE: _idle,
    parts.TAKE_UP: _take_up,
    **dict.fromkeys((parts.UPDATE, parts.WHOLE, parts.REMEMBER, parts.PUT_BACK), _of_rows),
}
"""Functions by the name of the work."""
