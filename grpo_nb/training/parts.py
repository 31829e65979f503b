"""Weights of which each rank trains its own rows: one update, one checkpoint and one rollback of all ranks.

Rank 0 sends a message, and every rank does the same to its rows (`policy.parts`). Where each rank has all the weights,
or only one rank exists, each function acts on the policy alone.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from grpo_nb import optim
from grpo_nb.policy.model import Policy
from grpo_nb.ranks.leader import ALONE, Leader, Ranks
from grpo_nb.ranks.messages import Message
from grpo_nb.run.checkpoints import Checkpoint
from grpo_nb.run.dependencies_file import OPTIMIZER
from grpo_nb.run.run import Run
from grpo_nb.training.snapshot import Snapshot

T = TypeVar("T")
TAKE_UP, UPDATE, WHOLE, REMEMBER, PUT_BACK = "take up", "update", "whole", "remember", "put back"
"""Messages: load rows from checkpoints; an optimizer step; send rows for complete tensors; copy the rows; restore them.
"""


@dataclass
class Rows:
    """Trained part of a rank other than rank 0."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    snapshot: Snapshot


def update(policy: Policy, optimizer: torch.optim.Optimizer, ranks: Ranks, settings: Mapping[str, Any]) -> optim.Update:
    """One optimizer step; see `optim.apply`."""
    if policy.parts is None or not isinstance(ranks, Leader):
        return optim.apply(policy.parameters_by_name(), optimizer, **settings)
    return _all(ranks, Message(UPDATE, settings), lambda: apply(policy, optimizer, settings))


def apply(policy: Policy, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> optim.Update:
    """The step of this rank's rows, with norms over all ranks; all of them call it at once."""
    assert policy.parts is not None and policy.sharding is not None
    policy.parts.take_gradients()
    done = optim.apply(policy.parameters_by_name(), optimizer, total=policy.sharding.passes.total, **settings)
    if not math.isfinite(done.moved):
        raise optim.BrokenUpdate("a parameter of another rank is not finite after the update; nothing was saved", done)
    return done


def state_dict(policy: Policy, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE) -> dict[str, dict[str, Tensor]]:
    """Tensors of a checkpoint, gathered from all ranks: the policy's trained weights and the optimizer's moments."""
    if policy.parts is None or not isinstance(ranks, Leader):
        return {"policy": policy.state(), OPTIMIZER: optim.state_tensors(policy.parameters_by_name(), optimizer)}
    return _all(ranks, Message(WHOLE, {"reference": False}), lambda: gathered(policy, optimizer))


def stored_reference(policy: Policy, ranks: Ranks) -> dict[str, Tensor]:
    """Weights of the reference policy, gathered from all ranks."""
    if policy.parts is None or not isinstance(ranks, Leader):
        return policy.reference_state()
    return _all(ranks, Message(WHOLE, {"reference": True}), lambda: gathered_reference(policy))


def gathered(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Trained weights and moments of all ranks, complete on rank 0; all ranks call it at once."""
    assert policy.parts is not None
    policy.settle()
    parameters = policy.parameters_by_name()
    moments = optim.moments(parameters, optimizer)
    return {"policy": policy.parts.whole(parameters), OPTIMIZER: policy.parts.whole(moments)}


def gathered_reference(policy: Policy) -> dict[str, Tensor]:
    assert policy.parts is not None
    policy.settle()
    return policy.parts.whole(policy.reference_by_name())


def saved(policy: Policy, checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    """A set of a checkpoint's tensors: all of them, or this rank's rows."""
    if policy.parts is None:
        return checkpoint.tensors(name)
    with safe_open(checkpoint.file(name), "pt") as file:
        found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        rows = policy.parts.rows
        return {key: one[rows(key)] if one.get_shape() else file.get_tensor(key) for key, one in found.items()}


def load_state_dict(policy: Policy, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Restore what `state_dict` returned, bit for bit: all of it, or this rank's rows.

    Without a file of its moments, the optimizer begins them anew.
    """
    policy.load_state(saved(policy, checkpoint, "policy"))
    if OPTIMIZER in checkpoint.names():
        memory = policy.trained_of(saved(policy, checkpoint, OPTIMIZER))
        optim.load_state_tensors(policy.parameters_by_name(), optimizer, memory)


@dataclass(frozen=True)
class Places:
    """Checkpoints that rows are loaded from."""

    newest: Checkpoint | None
    """Weights and moments."""
    reference: Checkpoint | None = None
    """The reference's weights; None: those that the policy has."""
    refers: bool = True
    """Whether a reference policy exists."""


def others_take_up(policy: Policy, optimizer: torch.optim.AdamW, ranks: Ranks, run: Run, places: Places) -> None:
    """Have the other ranks load their rows from where rank 0 has loaded its own."""
    if policy.parts is None or not isinstance(ranks, Leader):
        return
    data = {
        name: None if one is None else [one.step, str(one.path.relative_to(run.path))]
        for name, one in {"newest": places.newest, "reference": places.reference}.items()
    }
    (group,) = optimizer.param_groups
    adam = {"learning_rate": group["lr"], "weight_decay": group["weight_decay"]}
    _all(ranks, Message(TAKE_UP, {**data, "refers": places.refers, "adam": adam}), lambda: None)


def take_up(policy: Policy, run: Run, data: Mapping[str, Any]) -> Rows:
    """Load the rows that a message of `others_take_up` names."""

    def place(name: str) -> Checkpoint | None:
        return None if data[name] is None else Checkpoint(data[name][0], run.path / Path(data[name][1]))

    optimizer, reference, newest = (
        optim.adamw(policy.parameters_by_name(), **data["adam"]),
        place("reference"),
        place("newest"),
    )
    if reference is not None:
        policy.load_state(saved(policy, reference, "policy"))
    if data["refers"]:
        policy.freeze_reference()
    if newest is not None:
        load_state_dict(policy, optimizer, newest)
    return Rows(policy, optimizer, Snapshot(run.config.guards.snapshot == "host"))


def remember(policy: Policy, ranks: Ranks) -> None:
    """Have the other ranks copy their rows, as rank 0 has."""
    if policy.parts is not None and isinstance(ranks, Leader):
        _all(ranks, Message(REMEMBER), lambda: None)


def put_back(policy: Policy, ranks: Ranks) -> None:
    """Have the other ranks restore their copies, as rank 0 has."""
    if policy.parts is not None and isinstance(ranks, Leader):
        _all(ranks, Message(PUT_BACK), lambda: None)


def serve(rows: Rows, message: Message) -> None:
    """Handle a message of rank 0 on another rank: update, gather, copy or restore its rows."""
    policy, optimizer, parameters = rows.policy, rows.optimizer, rows.policy.parameters_by_name()
    if message.work == UPDATE:
        with contextlib.suppress(optim.BrokenUpdate):  # rank 0 has the same verdict, and decides
            apply(policy, optimizer, message.data)
    elif message.work == WHOLE and message.data["reference"]:
        gathered_reference(policy)
    elif message.work == WHOLE:
        gathered(policy, optimizer)
    elif message.work == REMEMBER:
        rows.snapshot.take(parameters, optimizer)
    else:
        rows.snapshot.restore(parameters, optimizer)


def _all(ranks: Leader, message: Message, own: Callable[[], T]) -> T:
    return ranks.ask([message] * (ranks.size - 1), own)[0]
