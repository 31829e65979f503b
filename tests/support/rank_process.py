"""One rank of a training under test: `python -m tests.support.rank_process RUN OPTIONS`, with torchrun's variables.

OPTIONS are JSON: `dtype`, `steps`, `sft`, `die_at` (a step after which rank 0 is killed), `join_seconds`,
`late_seconds`, and `faults`: as `plant`.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.ranks import leader, link
from grpo_nb.run.run import Run
from grpo_nb.training import follower
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import sft
from tests.support.tiny import REWARDS, FirstOf

SLEEP_SECONDS = 1.0
"""Many times what the work takes here."""


def policy_of(run: Run, dtype: str) -> Policy:
    policy = load_policy(run.config.model, run.config.run.seed)
    policy.model.to(getattr(torch, dtype))  # type: ignore[arg-type]
    return policy


def tasks_of(run: Run) -> dict[str, Any]:
    from grpo_nb.tasks import load_tasks

    return {name: FirstOf(task, 24) for name, task in load_tasks(run.config, run.path).items()}


def failing(do: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def fail(*given: Any) -> Any:
        if do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if do == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if do == "raise":
            raise ValueError("the fault of the test")
        if do == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        if do == "sleep":
            time.sleep(SLEEP_SECONDS)
        return work(*given)

    return fail


def plant(rank: int, work: str, calls: list[int], do: str) -> None:
    """A fault in these calls, from 1, of a kind of work of this rank."""
    if int(os.environ["RANK"]) != rank:
        return
    own, seen = follower.WORK[work], [0]

    def watched(*given: Any) -> Any:
        seen[0] += 1
        return failing(do, own)(*given) if seen[0] in calls else own(*given)

    follower.WORK[work] = watched


def main(path: str, text: str) -> None:
    torch.set_num_threads(1)
    options = json.loads(text)
    link.JOIN_SECONDS, leader.LATE_SECONDS = options.get("join_seconds", 60.0), options.get("late_seconds", 60.0)
    for fault in options.get("faults", ()):
        plant(**fault)
    run = Run.open(path)
    policy = policy_of(run, options.get("dtype", "float32"))
    if options.get("sft"):
        list(sft(run, policy=policy, tasks=tasks_of(run)))
    for stats in grpo(run, policy=policy, tasks=tasks_of(run), rewards=REWARDS, steps=options.get("steps")):
        if options.get("die_at") == stats.step:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
