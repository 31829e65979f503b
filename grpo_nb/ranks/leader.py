"""Rank 0 as leader of a training: it sends work, collects replies, and names a rank that fails."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_nb.printable import clean_logger
from grpo_nb.ranks import link, transfer
from grpo_nb.ranks.link import Link, RankError
from grpo_nb.ranks.lockstep import ATTEND, JOIN, LOAD, Lockstep, lockstep
from grpo_nb.ranks.messages import Message

logger = clean_logger(__name__)

T = TypeVar("T")
Log = Callable[..., None]
"""`Run.log_event`."""

LATE_SECONDS = 60.0
"""Seconds after all others have done their part, when a rank that still works is logged."""
GONE_SECONDS = 5.0
FAILED, MEMORY_FULL = "failed", "memory full"
"""Status in a reply whose work was not done."""


class Ranks:
    """Ranks of a training with one rank: nothing is dealt, and nothing is sent."""

    size = 1
    lockstep: Lockstep | None = None
    """Synchronises the ranks' forward passes, where weights are spread over them."""

    def weights_changed(self) -> None:
        """Note that the weights moved: the other ranks need them before their next work."""

    def seconds(self) -> dict[int, float]:
        """Seconds that each rank has worked since the last call; empty with one rank."""
        return {}

    def peaks(self) -> dict[int, float]:
        """Peak memory of the other ranks in MiB."""
        return {}

    def waited(self) -> float:
        """Seconds since the last call in which the mean rank waited for the slowest."""
        return 0.0


ALONE = Ranks()


class Leader(Ranks):
    """Rank 0 of several."""

    def __init__(self, own: Link, log: Log, seconds: float) -> None:
        """`seconds`: how long another rank's part of a piece of work may take after rank 0's own."""
        self.link, self.size = own, own.place.size
        self._log, self._limit = log, seconds
        self._group: dist.ProcessGroup | None = None
        self._weights: list[Tensor] = []
        self._stale = False
        """Whether the other ranks' weights differ from rank 0's."""
        self._broken = False
        """Whether messages and replies no longer match, so that no more can be sent."""
        self._seconds, self._waited, self._peaks = dict[int, float](), 0.0, dict[int, float]()

    # ------------------------------------------------------------------ of a stage

    def open(self, data: Mapping[str, Any], device: torch.device, shards: bool = False) -> None:
        """Have every rank load its replica; all of them form the group of the transfers.

        `shards`: they load it at `load`, each a part of the weights.
        """
        backend = "nccl" if device.type == "cuda" else "gloo"
        for rank in self.others:
            self.link.send(
                rank, Message("open", {**data, "backend": backend, "seconds": self._limit, "shards": shards})
            )
        self._group = transfers(backend, self._limit)
        if shards:
            self.lockstep = lockstep(backend, self._limit)
            self.lockstep.lead(self._alone, self._broke)

    def load(self) -> None:
        """Have every rank load its part of the weights, now that rank 0 does."""
        for rank in self.others:
            self._send(rank, Message(LOAD))

    def begin(self, message: Message, weights: Sequence[Tensor]) -> None:
        """Send every replica rank 0's choices; from here on they have its `weights`."""
        self._weights = list(weights)
        self.ask([message] * (self.size - 1), lambda: None)
        self._stale = bool(self._weights)

    def send_once(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Have every rank do `message`, whose last part is to receive these tensors."""
        assert self._group is not None
        self._asked([message] * (self.size - 1), lambda: None)  # all are ready before the transfer begins
        with self._unless_broken(message.work):
            transfer.send(tensors, self._group)

    def close(self) -> None:
        """End the stage: the other ranks forget their replicas and wait for the next one."""
        if self.lockstep is not None:
            self.lockstep.rest()
        for rank in self.others:
            if rank not in self.link.gone:
                try:
                    self.link.send(rank, Message("close"))
                except RankError as error:
                    logger.info("%s", error)
        if self._group is not None and not self._broken:
            dist.destroy_process_group(self._group)

    @property
    def others(self) -> range:
        return range(1, self.size)

    # ------------------------------------------------------------------ work

    def weights_changed(self) -> None:
        self._stale = bool(self._weights)

    def ask(self, messages: Sequence[Message | None], own: Callable[[], T]) -> tuple[T, list[Message | None]]:
        """Rank 0's `own` part and the replies of ranks 1, 2, ... to their messages; a rank without one does nothing.

        Raises:
            RankError: a rank died, raised, or is silent for the time limit; this training cannot continue.
            OutOfMemoryError: the memory of a rank was full, and no part was completed; all can continue with fewer
            rows.
        """
        self._check()
        if self._stale and any(messages):
            self._send_weights()
        return self._asked(messages, own)

    def add_up(self, gradients: Sequence[Mapping[str, Tensor]], data: Mapping[str, Any]) -> None:
        """Make these gradients, one set or several, the sums over all ranks; the ranks have answered for theirs."""
        assert self._group is not None
        self._check()
        with self._unless_broken("add up"):
            for rank in self.others:
                self._send(rank, Message("add up", data))
            for one in gradients:
                transfer.add_up(list(one.values()), self._group)

    def _send_weights(self) -> None:
        self.send_once(Message("weights"), self._weights)
        self._stale = False

    def _asked(self, messages: Sequence[Message | None], own: Callable[[], T]) -> tuple[T, list[Message | None]]:
        asked = {rank: message for rank, message in enumerate(messages, 1) if message is not None}
        has_work = set(asked)
        if self.lockstep is not None:
            asked = {rank: asked.get(rank, Message(JOIN)) for rank in self.others}
        mine: list[T] = []
        failure: Exception | None = None
        with self._unless_broken():
            for rank, message in asked.items():
                self._send(rank, message)
            began = time.perf_counter()
            try:
                with self._together():
                    mine.append(own())
            except Exception as error:  # the others answer all the same, and their next message is the next one
                failure = error
            took = time.perf_counter() - began - (self.lockstep.waited() if self.lockstep else 0.0)
            replies = self._replies(asked, failure)
        self._count({0: took} | {rank: float(reply.data["seconds"]) for rank, reply in replies.items()})
        self._peaks |= {rank: float(reply.data["peak"]) for rank, reply in replies.items()}
        full = [f"rank {rank}: {reply.data['error']}" for rank, reply in replies.items() if reply.work == MEMORY_FULL]
        if failure is None and full:
            failure = torch.OutOfMemoryError(full[0])
        if failure is not None:
            raise failure
        return mine[0], [replies[rank] if rank in has_work else None for rank in self.others]

    def _together(self) -> AbstractContextManager[None]:
        return nullcontext() if self.lockstep is None else self.lockstep.section()

    def _alone(self, learns: bool, refers: bool) -> None:
        """Have the other ranks take part in one pass of rank 0, with the reference's weights where it `refers`."""
        self._check()
        with self._unless_broken():
            for rank in self.others:
                self._send(rank, Message(ATTEND, {"learns": learns, "refers": refers}))

    def _broke(self, error: Exception) -> None:
        """Raise for the rank whose absence broke a pass."""
        with self._unless_broken():
            rank = self._first_gone()
            self._lost(rank, ATTEND, f"{'failed' if rank is None else 'died'} ({link.first_line(error)})")

    def _replies(self, asked: Mapping[int, Message], failure: Exception | None) -> dict[int, Message]:
        """Replies of all ranks; where rank 0 itself has failed, a failure of another is its consequence or equal.

        Raises:
            RankError: as `ask`.
        """
        replies: dict[int, Message] = {}
        began, logged = time.monotonic(), False
        while left := [rank for rank in asked if rank not in replies]:
            work, seconds = asked[left[0]].work, time.monotonic() - began
            if self.link.gone:
                rank, how = next(iter(self.link.gone.items()))
                self._lost(rank, work, f"died ({how})")
            if seconds > self._limit:
                self.link.gone[left[0]] = link.SILENT
                self._lost(left[0], work, f"has not answered for {seconds:.0f} s (run.rank_timeout)")
            if seconds > LATE_SECONDS and not logged:
                logged = True
                self._log("rank_late", rank=left[0], ranks=left, work=work, seconds=seconds)
                logger.warning("rank %d is still at '%s', %.0f s after rank 0", left[0], work, seconds)
            rank, reply = self.link.next(min(1.0, self._limit)) or (0, None)
            if isinstance(reply, Message) and rank not in self.link.gone:
                if reply.work == FAILED and failure is None:
                    self._lost(rank, work, f"raised {reply.data['error']}")
                replies[rank] = reply
        return replies

    def _lost(self, rank: int | None, work: str, how: str) -> None:
        self._log("rank_failed", rank=rank, ranks=self.size, work=work, reason=how)
        who = "a transfer" if rank is None else f"rank {rank} of {self.size}"
        raise RankError(
            f"{who} {how}, at '{work}'. All ranks end; each one's output has the reason. Start the run again, with any "
            "number of ranks: it resumes from its newest checkpoint",
            rank,
        )

    def _check(self) -> None:
        if self._broken:
            raise RankError("the ranks no longer work together; start the run again: it resumes from its checkpoint")

    def _send(self, rank: int, message: Message) -> None:
        try:
            self.link.send(rank, message)
        except RankError as error:
            self._lost(rank, message.work, f"died ({error})")

    @contextmanager
    def _unless_broken(self, transferred: str = "") -> Iterator[None]:
        """Mark the link as broken if the block raises, even an interrupt, since messages then lack replies."""
        try:
            yield
        except BaseException as error:
            self._broken = True
            if transferred and type(error) is RuntimeError:  # the error does not name the broken connection
                rank = self._first_gone()
                self._lost(rank, transferred, f"{'failed' if rank is None else 'died'} ({link.first_line(error)})")
            raise

    def _first_gone(self) -> int | None:
        """The rank whose connection breaks, where one does in the next seconds."""
        end = time.monotonic() + GONE_SECONDS
        while not self.link.gone and time.monotonic() < end:
            self.link.next(GONE_SECONDS / 10)
        return next(iter(self.link.gone), None)

    # ------------------------------------------------------------------ what it took

    def _count(self, seconds: Mapping[int, float]) -> None:
        for rank, value in seconds.items():
            self._seconds[rank] = self._seconds.get(rank, 0.0) + value
        self._waited += max(seconds.values()) - sum(seconds.values()) / self.size

    def seconds(self) -> dict[int, float]:
        found, self._seconds = self._seconds, {}
        return found

    def waited(self) -> float:
        found, self._waited = self._waited, 0.0
        return found

    def peaks(self) -> dict[int, float]:
        return dict(self._peaks)


def transfers(backend: str, seconds: float) -> "dist.ProcessGroup":
    """The group of the transfers, formed by all ranks at once."""
    group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timedelta(seconds=seconds))
    return group
