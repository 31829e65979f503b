"""Patches that put faults into the package: attributes replaced for a while, and calls around a backward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from grpo_nb.policy.model import Policy
from grpo_nb.training import gradients as _gradients
from grpo_nb.training import grpo as _trainer
from grpo_nb.training import sampling as _sampling

trainer: Any = _trainer
gradients: Any = _gradients
drawing: Any = _sampling
"""Modules as places of names that are replaced, whoever made what they name."""

Around = Callable[[Policy], None]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside the block."""
    before = owner.__dict__[name] if name in vars(owner) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def around_backward(before: Around, after: Around) -> Iterator[None]:
    """Call these with the policy around each backward pass of GRPO's updates."""
    compute: Callable[..., Any] = trainer.objective_gradients
    backward: Callable[..., None] = Tensor.backward

    def watched(policy: Policy, *given: Any, **named: Any) -> Any:
        def passed(loss: Tensor, *how: Any, **more: Any) -> None:
            before(policy)
            backward(loss, *how, **more)
            after(policy)

        with replaced(Tensor, "backward", passed):
            return compute(policy, *given, **named)

    with replaced(trainer, "objective_gradients", watched):
        yield
