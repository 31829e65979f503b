"""Forward and backward passes that all ranks begin together, as weights that are spread over them need.

A pass gathers such weights layer by layer, and a gathering takes every rank. So before each pass the ranks agree that
there is one (`begin`), and a rank that has no work left makes passes over one token until no other has any: at the end
of a `section`, which every rank enters with each message of rank 0. Outside of sections rank 0 alone makes passes, e.g.
to measure a loss; a message has the others take part in that one pass. Numbers of passes are never counted ahead, so
that rows of any length, an exception or a smaller micro-batch need no plan of their own.

A forward pass with gradients is followed by exactly one backward pass. Where an error comes between them, `Lockstep`
makes the backward pass up, with a gradient of zero.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_nb.printable import Clean
from grpo_nb.ranks.link import RankError, first_line

ATTEND, JOIN, LOAD = "attend", "join", "load"
"""Messages: take part in one pass of rank 0; in a section without work of your own; load the policy."""
_PLAIN, _LEARNS, _SUM, _PRESENT = 100, 101, 102, 103
"""Codes that a rank sends in a round: a pass without gradients; one with them, and its backward pass; a number to add
up; it takes its part of the weights. A smaller number: the sections that it is still in, since an error may leave one
that others are still in."""

Fill = Callable[[bool], None]
"""Makes a pass over one token, with gradients and a backward pass or without."""


class LockstepError(Clean, RuntimeError):
    """Raised when the ranks no longer meet: one has died or hangs, or failed where the others continued."""


class Lockstep:
    """Synchronises this rank's forward passes with those of the others."""

    def __init__(self, backend: str, seconds: float) -> None:
        """`seconds`: how long one rank waits for another."""
        limit = timedelta(seconds=seconds)
        self.weights: dist.ProcessGroup = dist.new_group(backend=backend, timeout=limit)
        """Process group that gathers weights."""
        self._rounds: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=limit)
        self._fill: Fill | None = None
        self._referring: Callable[[], bool] = lambda: False
        self._alone: Callable[[bool, bool], None] | None = None
        self._lost: Callable[[Exception], None] = lambda error: None
        self._depth, self._filling, self._present = 0, False, False
        self._owed: Tensor | None = None
        """The scores of a forward pass with gradients, until its backward pass begins."""
        self._waited = 0.0

    # ------------------------------------------------------------------ of a stage

    def present(self, well: bool = True) -> None:
        """Meet the other ranks before all take their parts of the weights, or report a failure; once per policy.

        Raises:
            LockstepError: on the ranks that are well, where another is not.
        """
        if not well and self._present:
            return
        self._present = well
        if not well:
            self._meet(_PRESENT, 0.0)
            return
        if well and not all(value for _, value in self._meet(_PRESENT, float(well))):
            raise LockstepError("another rank cannot load the policy; its own output has the reason")

    def serve(self, fill: Fill, referring: Callable[[], bool] = lambda: False) -> None:
        """Make passes of this policy from now on; `referring`: whether its parts are those of its reference."""
        self._fill, self._owed, self._present = fill, None, False
        self._referring = referring

    def lead(self, alone: Callable[[bool, bool], None], lost: Callable[[Exception], None]) -> None:
        """On rank 0: `alone` announces a pass outside of sections; `lost` raises the error of the absent rank."""
        self._alone, self._lost = alone, lost

    def rest(self) -> None:
        """End the stage: release the policy."""
        self._fill = self._alone = self._owed = None
        self._referring = bool
        self._depth, self._present = 0, False

    # ------------------------------------------------------------------ of an update

    def total(self, value: float) -> float:
        """The sum over all ranks, the same bits on each; all ranks are in a section."""
        said = self._meet(_SUM, value)
        if any(kind != _SUM for kind, _ in said):
            raise LockstepError("a rank has failed in the update")
        return sum(number for _, number in said)

    # ------------------------------------------------------------------ passes

    def begin(self, learns: bool) -> None:
        """Meet the other ranks right before a forward pass; returns once all have come.

        Raises:
            RankError: no ranks work together, so that the weights cannot be gathered; or one is lost.
            LockstepError: within a section, the same.
        """
        if self._filling:
            return
        if self._fill is None or not (self._depth or self._alone):
            raise RankError(
                f"the weights of this policy are spread over {dist.get_world_size()} ranks, and no training has them "
                "work together now. Load a checkpoint: evaluate(run), or Policy.save in the loop over the steps"
            )
        self._pay()
        if self._depth or self._alone is None:
            self._agree(learns)
            return
        self._alone(learns, self._referring())
        try:
            self._agree(learns)
        except LockstepError as error:
            self._lost(error)
            raise

    def end(self, scores: Tensor) -> None:
        """Handle the end of a forward pass, with its result."""
        if not self._filling and scores.requires_grad:
            self._owed = scores
            scores.register_hook(self._begun)

    def attend(self, learns: bool) -> None:
        """Take part in one pass of rank 0."""
        self._agree(learns)
        self._fill_in(learns)

    @contextmanager
    def section(self) -> Iterator[None]:
        """Block that every rank is in at once, with passes of its own; all leave it together."""
        self._depth += 1
        try:
            yield
        except LockstepError:
            raise
        except Exception:
            self._finish()
            raise
        else:
            self._finish()
        finally:
            self._depth -= 1

    def within(self) -> AbstractContextManager[None]:
        """A section within the present one; outside of sections nothing, since there the others do as rank 0."""
        return self.section() if self._depth else nullcontext()

    def waited(self) -> float:
        """Seconds since the last call in which this rank waited for others to begin a pass."""
        found, self._waited = self._waited, 0.0
        return found

    def _finish(self) -> None:
        """Take part in the passes that others still make."""
        self._pay()
        left = self._depth - 1
        while (found := self._round(left)) != left:
            if found > _LEARNS:
                raise LockstepError("this rank has no part in an update that others make")
            if found >= _PLAIN:
                self._fill_in(found == _LEARNS)

    def _agree(self, learns: bool) -> None:
        own = _LEARNS if learns else _PLAIN
        if (found := self._round(own)) != own:
            raise LockstepError(f"this rank begins a pass of kind {own}, another one of kind {found}")

    def _round(self, own: int) -> int:
        """The highest kind that any rank sends."""
        return max(kind for kind, _ in self._meet(own))

    def _meet(self, kind: int, value: float = 0.0) -> list[tuple[int, float]]:
        """Values that every rank sends in this round, in the ranks' order."""
        said = torch.tensor([kind, value], dtype=torch.float64)
        found = [torch.empty_like(said) for _ in range(dist.get_world_size(self._rounds))]
        began = time.perf_counter()
        try:
            dist.all_gather(found, said, group=self._rounds)
        except RuntimeError as error:
            raise LockstepError(f"the ranks do not meet any more: {first_line(error)}") from error
        self._waited += time.perf_counter() - began
        return [(int(one[0]), float(one[1])) for one in found]

    def _fill_in(self, learns: bool) -> None:
        assert self._fill is not None, "a stage serves a policy"
        self._filling = True
        try:
            self._fill(learns)
        finally:
            self._filling = False

    def _begun(self, gradient: Tensor) -> None:
        self._owed = None

    def _pay(self) -> None:
        """Run the backward pass that an error has left out."""
        owed, self._owed = self._owed, None
        if owed is not None:
            owed.backward(zeros_like(owed))


def zeros_like(scores: Tensor) -> Tensor:
    """A gradient of zero that takes no memory."""
    return scores.new_zeros(()).expand_as(scores)


@functools.cache
def lockstep(backend: str, seconds: float) -> Lockstep:
    """Lockstep of this process; all ranks make it at once. Its groups last as long as a spread policy may."""
    return Lockstep(backend, seconds)
