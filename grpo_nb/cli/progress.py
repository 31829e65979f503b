"""Following a generator of steps from a terminal: progress, and an interrupt that saves."""

import logging
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from grpo_nb.metrics import keys
from grpo_nb.metrics.pace import pace
from grpo_nb.run.run import phases
from grpo_nb.types import StepStats

EVERY_SECONDS, PARTS = 30.0, 10
"""Seconds and parts of the steps between two lines where standard error is no terminal, whichever comes first."""
RECENT = 10
"""Steps whose times give the estimate of the time left."""


class Interrupt:
    """Ctrl-C and SIGTERM while a run trains: the first requests a stop, the second ends at once."""

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
    """The main numbers of a step in one line.

    >>> summary({"loss": 0.5, "reward/fairness/mean": 0.25, "kl/fairness": 0.031, "status": "clipped"})
    'loss 0.500  reward/fairness/mean 0.250  kl/fairness 0.031  gradient clipped'
    """
    curves = [key for key in row if keys.REWARD.has(key) or keys.KL.has(key)]
    shown = [key for key in (keys.LOSS, *curves) if isinstance(row.get(key), int | float)]
    words = [f"{key} {row[key]:.3f}" for key in shown]
    return "  ".join([*words, *filter(None, [STATUS.get(str(row.get(keys.STATUS)))])])


STATUS = {"clipped": "gradient clipped", "skipped": "update skipped", "empty": "nothing to learn from"}
STATUS |= {"rolled_back": "step undone"}
"""Words for a step's status; none for `ok`."""


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
    """Send the log of a training's work before its first step to `show`."""
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
    """A line now and then, for logs: the first step, the last, each tenth part, and one every so many seconds."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._due = name, Due(total)
        self._total, self._rows = total, deque[Mapping[str, Any]](maxlen=RECENT)

    def phase(self, words: str) -> None:
        line(f"{self._name}: {words}")

    def step(self, stats: StepStats) -> None:
        self._rows.append(stats.metrics)
        if self._due.at(stats.step):
            line(step_line(self._name, stats.step, self._total, self._rows))


class Due:
    """Whether a step is worth a line: the first seen, the last, one in a new tenth part, or the time is up."""

    def __init__(self, total: int) -> None:
        self._total, self._step, self._part, self._time = total, -1, -1, 0.0

    def at(self, step: int) -> bool:
        part, now = PARTS * step // max(self._total, 1), time.monotonic()
        if step == self._step or (part == self._part and now < self._time):
            return False
        self._step, self._part, self._time = step, part, now + EVERY_SECONDS
        return True


def step_line(name: str, step: int, total: int, rows: Sequence[Mapping[str, Any]]) -> str:
    """Line of one step: the numbers of the last of `rows`, and the estimated time left."""
    return "  ".join([f"{name} step {step}/{total}", summary(rows[-1]), *pace(rows, total - step)])


def line(text: str) -> None:
    """Write a line to standard error, at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
