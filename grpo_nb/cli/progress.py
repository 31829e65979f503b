"""Following a generator of steps from a terminal: progress, and an interrupt that saves."""

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from grpo_nb.metrics import keys
from grpo_nb.run.run import phases
from grpo_nb.types import StepStats

EVERY_SECONDS = 10.0
"""Between two lines where standard error is no terminal."""


class Interrupt:
    """Ctrl-C and SIGTERM while a run trains: the first asks, the second ends at once."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def caught(self) -> Iterator["Interrupt"]:
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        sys.stderr.write("\nstopping after this step, then saving (once more: at once, without saving)\n")


def follow(steps: Any, name: str, start: int, total: int) -> tuple[int, bool]:
    """Run the generator `steps` to its end or an interrupt, showing each; it is closed in any case, which saves.

    Returns:
        The last step, and whether it was interrupted.
    """
    last, interrupt = start, Interrupt()
    with interrupt.caught(), _display(name, start, total) as show, phases_shown(show.phase), closing(steps):
        for stats in steps:
            last = stats.step
            show.step(stats)
            if interrupt.asked:
                break
    return last, interrupt.asked


def summary(row: Mapping[str, Any]) -> str:
    """The few numbers of a step worth a line.

    >>> summary({"loss": 0.5, "reward/fairness/mean": 0.25, "kl/fairness": 0.031, "status": "clipped"})
    'loss 0.500  reward/fairness/mean 0.250  kl/fairness 0.031  gradient clipped'
    """
    curves = [key for key in row if keys.REWARD.has(key) or keys.KL.has(key)]
    shown = [key for key in (keys.LOSS, *curves) if isinstance(row.get(key), int | float)]
    words = [f"{key} {row[key]:.3f}" for key in shown]
    return "  ".join([*words, *filter(None, [STATUS.get(str(row.get(keys.STATUS)))])])


STATUS = {"clipped": "gradient clipped", "skipped": "update skipped", "empty": "nothing to learn from"}
STATUS |= {"rolled_back": "step undone"}
"""What a step's status says to a reader; `ok` says nothing."""


@contextmanager
def _display(name: str, start: int, total: int) -> Iterator[Any]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(name, total)
        return
    columns = [
        TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=len(name))),
        BarColumn(bar_width=20, table_column=Column(min_width=20)),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(total)) + 1)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("{task.fields[words]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    ]
    with Progress(*columns, console=console, expand=True, refresh_per_second=4) as bar:
        task = bar.add_task(name, total=total, completed=start, words="")
        yield _Bar(bar, task)


@contextmanager
def phases_shown(show: Callable[[str], None]) -> Iterator[None]:
    """What a training does before its first step goes to `show`."""
    handler, (level, propagate) = _Shown(show), (phases.level, phases.propagate)
    phases.addHandler(handler)
    phases.setLevel(logging.INFO)
    phases.propagate = False
    try:
        yield
    finally:
        phases.removeHandler(handler)
        phases.setLevel(level)
        phases.propagate = propagate


class _Shown(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())


class _Bar:
    """A line that is redrawn."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def phase(self, words: str) -> None:
        self._bar.update(self._task, words=words)

    def step(self, stats: StepStats) -> None:
        self._bar.update(self._task, completed=stats.step, words=summary(stats.metrics))


class _Lines:
    """A line now and then, for logs: the first step, the last, and one every so many seconds."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.due = name, total, 0.0

    def phase(self, words: str) -> None:
        sys.stderr.write(f"{self.name}: {words}\n")
        sys.stderr.flush()

    def step(self, stats: StepStats) -> None:
        now = time.monotonic()
        if now >= self.due or stats.step == self.total:
            self.due = now + EVERY_SECONDS
            sys.stderr.write(f"{self.name} step {stats.step}/{self.total}  {summary(stats.metrics)}\n")
            sys.stderr.flush()
