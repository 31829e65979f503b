"""The processes of a training on several cards: their command line, and what torchrun passes to each of them."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_nb.config import ConfigError
from grpo_nb.run.lock import RunLock

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets in each process, and torch's `env://` reads."""
PORT = 29500
MOST_RANKS = 4096
SAVING_SECONDS = 300
"""Seconds that torchrun leaves the other ranks to end when one has died, before it kills them: rank 0 saves."""


@dataclass(frozen=True)
class Place:
    """A process among the ranks of a training."""

    rank: int
    size: int
    """Ranks in all."""
    local_rank: int
    """Among those of this machine, which is the number of its card."""
    address: str
    """Host and port where the ranks meet."""

    @property
    def leads(self) -> bool:
        return self.rank == 0


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Place of this process among torchrun's; None where it trains alone.

    Raises:
        ConfigError: the variables are no numbers that fit together.
    """
    if any(not environment.get(name) for name in NAMES):
        return None
    found = {name: environment.get(name, "0") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    try:
        rank, size, local = (int(value) for value in found.values())
    except ValueError:
        rank, size, local = -1, 0, 0
    if not (0 <= rank < size <= MOST_RANKS and local >= 0):
        shown = ", ".join(f"{name}={value!r}" for name, value in found.items())
        raise ConfigError(
            f"the environment has {shown}; needs 0 <= RANK < WORLD_SIZE. Start with torchrun, or unset them"
        )
    address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    return None if size == 1 else Place(rank, size, local, address)


def command(program: Sequence[str], ranks: int) -> list[str]:
    """The command line that runs `python -m PROGRAM` once for each of this machine's ranks.

    >>> command(["grpo_nb", "train", "runs/demo"], 2)[1:]
    ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', '--max-restarts', '0', '-m', 'grpo_nb', \
'train', 'runs/demo']
    """
    node = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "0"]
    return [sys.executable, "-m", "torch.distributed.run", *node, "-m", *program]


def stop(torchrun: "subprocess.Popen[bytes]", lock: RunLock) -> None:
    """Signal rank 0 to end after its step, saved, and with it all others; torchrun itself where none trains yet.

    A second signal ends it within the step. torchrun would end every rank by itself after SAVING_SECONDS.
    """
    owner, alive = lock.look()
    if owner is not None and alive and owner.on_this_machine():
        os.kill(owner.pid, signal.SIGTERM)
    else:
        torchrun.terminate()


def environment(ranks: int) -> dict[str, str]:
    """Environment variables of its processes in addition to this one's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    usual = {"OMP_NUM_THREADS": str(max(1, cores // ranks)), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVING_SECONDS)}
    return {name: os.environ.get(name, value) for name, value in usual.items()}


def nodes_line(program: Sequence[str], nodes: int, ranks: int) -> str:
    """A line for SLURM that starts so many ranks on each of several machines; without srun, run it on each of them.

    >>> print(nodes_line(["grpo_nb", "train", "runs/demo"], 2, 8))
    srun --nodes=2 --ntasks-per-node=1 torchrun --nnodes=2 --nproc-per-node=8 --max-restarts=0 --rdzv-backend=c10d \
--rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):29500 -m grpo_nb \
train runs/demo
    """
    head = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
    return (
        f"srun --nodes={nodes} --ntasks-per-node=1 torchrun --nnodes={nodes} --nproc-per-node={ranks} --max-restarts=0 "
        f"--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint={head}:{PORT} -m {shlex.join(program)}"
    )
