"""Connection of this process to the other ranks: joining them, and messages between rank 0 and each other rank."""

import atexit
import contextlib
import functools
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grpo_nb.printable import Clean, clean_logger
from grpo_nb.ranks import launch
from grpo_nb.ranks.messages import Message

logger = clean_logger(__name__)

JOIN_SECONDS = 300.0
"""Seconds that a rank waits for all others to start."""
SEND_SECONDS, LEAVE_SECONDS = 60.0, 10.0
SILENT = "silent"
"""State of a rank that is not waited for any more, though its connection stands."""
BYE = "bye"
"""The last message of a process to each other."""
_ALWAYS = timedelta(days=365)
"""Time-out of waiting for a message in a thread; a caller that needs it earlier gives up by itself. A time-out within
gloo would break the connections to all other ranks."""
_TAG = 1
_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Whether torchrun itself keeps the store; else rank 0 does."""
_c10d: Any = dist
"""`torch.distributed` for names that exist at runtime but have no type stubs."""


class RankError(Clean, RuntimeError):
    """Raised when a rank died, raised, is silent or never came; `rank` is its number, None where it is unknown."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


Arrival = tuple[int, "Message | Exception"]
"""Rank, and its message or the error of its connection."""


class Link:
    """Messages in both directions between rank 0 and every other rank."""

    def __init__(self, place: launch.Place) -> None:
        self.place = place
        self.inbox: queue.Queue[Arrival] = queue.Queue()
        """Arrivals, in each rank's own order."""
        self.gone: dict[int, str] = {}
        """Ranks whose connection broke or that are silent, with the reason."""
        peers = range(1, place.size) if place.leads else (0,)
        self._sending, self._parting = threading.Lock(), threading.Lock()
        self._said: set[int] = set()
        """Ranks that got the last message."""
        self._readers = {peer: threading.Thread(target=self._read, args=(peer,), daemon=True) for peer in peers}
        for reader in self._readers.values():
            reader.start()

    def send(self, rank: int, message: Message) -> None:
        """Hand a message to a rank, whose reader takes it at once, whatever else it does.

        Raises:
            RankError: the connection is broken, or the process takes nothing for SEND_SECONDS.
        """
        content = message.encoded()
        try:
            with self._sending:
                for tensor in (torch.tensor([content.numel()]), content):
                    work = dist.isend(tensor, dst=rank, tag=_TAG)
                    assert work is not None
                    work.wait(timedelta(seconds=SEND_SECONDS))
        except RuntimeError as error:
            self.gone.setdefault(rank, first_line(error))
            raise RankError(f"rank {rank} cannot be reached: {first_line(error)}", rank) from error

    def next(self, seconds: float) -> Arrival | None:
        """The next arrival; None where none comes in so many seconds. Signals are served meanwhile."""
        try:
            rank, arrived = self.inbox.get(timeout=max(seconds, 0.001))
        except queue.Empty:
            return None
        if isinstance(arrived, Exception):
            self.gone[rank] = first_line(arrived)
        elif arrived.work == BYE:
            self.gone[rank] = "its process has ended"
        return rank, arrived

    def leave(self) -> None:
        """Send the last message to the others and wait until they have it, as this process ends.

        A reader that still waits for a rank that hangs would crash it: then it ends here, as failed.
        """
        end = time.monotonic() + LEAVE_SECONDS
        for peer in [peer for peer, reader in self._readers.items() if reader.is_alive() and peer not in self.gone]:
            self._say_bye(peer)
        for peer, reader in self._readers.items():
            reader.join(0.0 if self.gone.get(peer) == SILENT else max(end - time.monotonic(), 0.0))
        if any(reader.is_alive() for reader in self._readers.values()):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)

    def _say_bye(self, peer: int) -> None:
        """Send the last message, once; after it, the other side reads no more."""
        with self._parting:
            said = peer in self._said
            self._said.add(peer)
        if not said:
            with contextlib.suppress(RankError):
                self.send(peer, Message(BYE))

    def _read(self, peer: int) -> None:
        message = Message("")
        try:
            while message.work != BYE:
                size = torch.zeros(1, dtype=torch.int64)
                _receive(size, peer)
                content = torch.empty(int(size), dtype=torch.uint8)
                _receive(content, peer)
                message = Message.decoded(content)
                self.inbox.put((peer, message))
            self._say_bye(peer)  # so that the other side can end, however long this one continues
        except Exception as error:
            self.inbox.put((peer, error))


def _receive(into: torch.Tensor, peer: int) -> None:
    work = dist.irecv(into, src=peer, tag=_TAG)
    assert work is not None
    work.wait(_ALWAYS)


@functools.cache
def joined() -> Link | None:
    """The link of this process, which joins the other ranks at the first call; None where it trains alone.

    Raises:
        RankError: the ranks do not meet within JOIN_SECONDS, or the machine has fewer cards than ranks.
    """
    if (place := launch.place()) is None:
        return None
    use_own_card(place)
    _stay_here(place)
    store = _store(place)
    _meet(store, place)
    dist.init_process_group(
        "gloo",
        store=_c10d.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=JOIN_SECONDS),
    )
    link = Link(place)
    atexit.register(link.leave)
    return link


def _stay_here(place: launch.Place) -> None:
    """Where all ranks are on this machine, use its loopback for messages: no network, and no look-up of names."""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(place.size) and "lo" in dict(socket.if_nameindex()).values():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def use_own_card(place: launch.Place) -> None:
    """Make the GPU of this rank the one that `cuda` means.

    Raises:
        RankError: the machine has fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return
    if place.local_rank >= (cards := torch.cuda.device_count()):
        raise RankError(
            f"rank {place.rank} needs card {place.local_rank} of {socket.gethostname()}, which has {cards}; needs one "
            f"card a rank: start {cards} ranks there (--gpus {cards}, or torchrun --nproc-per-node {cards})",
            place.rank,
        )
    torch.cuda.set_device(place.local_rank)


def _store(place: launch.Place) -> Any:
    """Store in which ranks register before a group exists."""
    try:
        host, _, port = place.address.rpartition(":")
        store = _c10d.TCPStore(
            host,
            int(port),
            is_master=place.leads and os.environ.get(_AGENTS_STORE) != "True",
            timeout=timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,  # its error would not name the rank
        )
    except RuntimeError as error:
        raise RankError(
            f"rank {place.rank} of {place.size} found nobody at {place.address} within {JOIN_SECONDS:.0f} s "
            f"({first_line(error)}). All ranks need the same MASTER_ADDR, a free MASTER_PORT that no firewall blocks, "
            f"and a RANK below WORLD_SIZE={place.size} of their own: start them with torchrun",
            place.rank,
        ) from error
    return _c10d.PrefixStore(f"grpo_nb/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _meet(store: Any, place: launch.Place) -> None:
    """Wait until every rank has left its sign."""
    signs = [f"here/{rank}" for rank in range(place.size)]
    store.set(signs[place.rank], f"{socket.gethostname()}, process {os.getpid()}")
    try:
        store.wait(signs, timedelta(seconds=JOIN_SECONDS))
    except RuntimeError as error:
        missing = _missing(store, signs)
        raise RankError(
            f"rank {place.rank} of {place.size} waited {JOIN_SECONDS:.0f} s at {place.address} and "
            f"{f'rank {missing} never came' if missing else 'lost the connection'}. Look into its log; start as many "
            f"processes as WORLD_SIZE={place.size} requires, all with torchrun",
            missing[0] if missing else None,
        ) from error


def _missing(store: Any, signs: Sequence[str]) -> list[int]:
    with contextlib.suppress(RuntimeError):
        return [rank for rank, sign in enumerate(signs) if not store.check([sign])]
    return []


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
