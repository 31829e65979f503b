"""Training on several GPUs from a terminal: torchrun is started and followed, and each rank of it finds its part."""

import logging
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from grpo_nb.cli.opening import open_run, own_code
from grpo_nb.cli.options import UsageError
from grpo_nb.cli.output import say
from grpo_nb.ranks import launch
from grpo_nb.ranks.link import joined
from grpo_nb.run.lock import LOCK, RunLock
from grpo_nb.run.run import Run
from grpo_nb.training.follower import follow

DONE, FAILED, INTERRUPTED = 0, 1, 130


def followed() -> int | None:
    """Exit status of a rank other than rank 0, once rank 0 has ended its work; None in any other process."""
    own = joined()
    if own is None or own.place.leads:
        return None
    logging.getLogger("grpo_nb").setLevel(logging.ERROR)  # rank 0 logs the rest for all
    while follow(own):
        pass
    return DONE


def started(arguments: Namespace) -> int | None:
    """The exit status of a training that torchrun was started for; None where this process trains itself."""
    if arguments.nodes is not None and arguments.gpus is None:
        raise UsageError(f"--nodes {arguments.nodes} needs --gpus N, the ranks on each of them")
    if arguments.gpus is None or launch.place() is not None:
        return None
    with open_run(arguments, steps=arguments.steps) as run:
        run.lock().refuse_if_taken()
        own_code(run, arguments, trains=True)  # kept for the ranks, or refused before they start
        program = ["grpo_nb", "train", str(run.path), *_flags(arguments)]
        if arguments.nodes is None:
            say(f"{run.shown}: {arguments.gpus} processes train together, started by torchrun")
            if _torchrun(run, program, arguments.gpus) != DONE:
                return FAILED
            goal = run.config.run.steps if arguments.steps is None else arguments.steps
            return DONE if (run.last_step() or 0) >= goal else INTERRUPTED
        say(launch.nodes_line(program, arguments.nodes, arguments.gpus))
        return DONE


def _flags(arguments: Namespace) -> list[str]:
    steps = [] if arguments.steps is None else ["--steps", str(arguments.steps)]
    switches = [f"--{name}" for name, on in (("debug", arguments.debug), ("no-sft", arguments.no_sft)) if on]
    return [*steps, *switches, *(part for kind in arguments.accept_changed for part in ("--accept-changed", kind))]


def _torchrun(run: Run, program: list[str], gpus: int) -> int:
    """Run torchrun; interrupts go to rank 0 alone, since torchrun itself would end the ranks within a step."""
    environment = os.environ | launch.environment(gpus)
    torchrun = subprocess.Popen(launch.command(program, gpus), env=environment, start_new_session=True)
    with _interrupts(lambda: launch.stop(torchrun, RunLock(run.path / LOCK))):
        return torchrun.wait()


@contextmanager
def _interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGINT and SIGTERM inside the block."""

    def asked(number: int, frame: FrameType | None) -> None:
        sys.stderr.write("\nstopping after this step, then saving (once more: at once)\n")
        stop()

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
