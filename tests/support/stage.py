"""A stand-in for training whose every step the test releases."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from grpo_nb.run.run import Run
from grpo_nb.types import StepStats

PATIENCE = 60.0
FOREVER = 10**4


class Stage:
    """Trains by writing rows, one for each `release`; obeys and logs as the real generators do."""

    def __init__(self) -> None:
        self.loaded = threading.Event()
        self.released = threading.Semaphore(0)
        self.calls: list[int | None] = []
        self.error: Exception | None = None

    def release(self, steps: int = 1) -> None:
        self.loaded.set()
        self.released.release(steps)

    def grpo(
        self, run: Run, *, tasks: Any = None, rewards: Any = None, steps: int | None = None
    ) -> Iterator[StepStats]:
        self.calls.append(steps)
        with run.lock():
            assert self.loaded.wait(PATIENCE)
            run.knobs.request("run")
            run.log_event("resume" if run.last_step() else "start", step=run.last_step() or 0)
            yield from self._steps(run, steps or run.config.run.steps)

    def _steps(self, run: Run, goal: int) -> Iterator[StepStats]:
        for step in range((run.last_step() or 0) + 1, goal + 1):
            while not self.released.acquire(timeout=0.02):
                if run.knobs.command == "stop":
                    break
            if run.knobs.command == "stop":
                run.log_event("stopped", step=step - 1)
                return
            if self.error:
                raise self.error
            run.log_metrics(row(run, step))
            yield StepStats(step, row(run, step))
        run.log_event("done", step=goal)

    def sft(self, run: Run, *, tasks: Any = None) -> Iterator[StepStats]:
        with run.lock():
            for step in range(1, run.config.sft.steps + 1):
                assert self.released.acquire(timeout=PATIENCE)
                run.log_sft({"step": step, "loss": 1.0})
                yield StepStats(step, {})


def row(run: Run, step: int) -> dict[str, Any]:
    knobs = run.knobs.snapshot()
    betas = {name: value for name, value in knobs.values.items() if name.startswith("beta/")}
    return {
        "step": step,
        "status": "ok",
        "reward/fairness/mean": 0.5,
        "temperature": knobs.values["temperature"],
        **betas,
    }


def workers() -> list[Any]:
    """The workers of sessions that are alive, in this process."""
    return [thread for thread in threading.enumerate() if hasattr(thread, "grpo_nb_session")]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
