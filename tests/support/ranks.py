"""Several ranks of one training on this machine, as torchrun would start them, in forks that have torch loaded."""

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import forked

PATIENCE_SECONDS = 20.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """A rank that has ended."""

    status: int
    errors: str


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    return {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(size: int, run: Path, ranks: Sequence[int] | None = None, **options: Any) -> "list[subprocess.Popen[str]]":
    """The processes, not waited for; `ranks`: those that come, all by default.

    `program` and its `arguments`: another one than `tests.support.rank_process` with the options.
    """
    port = free_port()
    module, given = options.pop("program", "tests.support.rank_process"), options.pop("arguments", None)
    program = forked.command("-m", module, str(run), *(given or [json.dumps(options)]))
    return [
        subprocess.Popen(
            program,
            env=os.environ | variables(rank, size, port) | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in (range(size) if ranks is None else ranks)
    ]


def train(size: int, run: Path, **options: Any) -> list[Ended]:
    """Every rank, ended; those that outlive rank 0 by PATIENCE_SECONDS are killed, with status -9."""
    processes = start(size, run, **options)
    first, *others = processes
    errors = [first.communicate(timeout=forked.PATIENCE)[1]]
    for process in others:
        try:
            errors.append(process.communicate(timeout=PATIENCE_SECONDS)[1])
        except subprocess.TimeoutExpired:
            process.kill()
            errors.append(process.communicate()[1])
    return [Ended(process.returncode, text) for process, text in zip(processes, errors, strict=True)]
