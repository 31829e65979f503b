"""Following the runs of a sweep in a log, which has no bar: lines of what trains, and of the parts that are done."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Literal

from grpo_nb.cli.progress import RECENT, Due, line, step_line
from grpo_nb.metrics.pace import duration
from grpo_nb.run.run import RunError
from grpo_nb.sweeps.plan import Trial
from grpo_nb.sweeps.work import left

POLL_SECONDS = 2.0


@contextmanager
def followed(trials: Sequence[Trial]) -> Iterator[None]:
    """Write lines inside the block, unless standard error is a terminal, which has a bar."""
    if sys.stderr.isatty():
        yield
        return
    lines, ended = StudyLines(trials), threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            lines.write()

    watcher = threading.Thread(target=watch, name="grpo_nb sweep", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        lines.write()


class StudyLines:
    """Progress lines of the runs since the last look, from their folders."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._trials, self._began = trials, time.monotonic()
        self._total = self._left = sum(map(_left, trials))
        self._due: dict[tuple[str, str], Due] = {}

    def write(self) -> None:
        """Write the lines that are new; a run whose folder cannot be read at present has none."""
        for trial in self._trials:
            try:
                for text in self._step(trial):
                    line(text)
            except (RunError, OSError):
                continue
        self._parts()

    def _step(self, trial: Trial) -> Iterator[str]:
        run = trial.run()
        if run is None or not run.status().state.is_live:
            return
        sft = run.last_step() is None
        log: Literal["sft", "metrics"] = "sft" if sft else "metrics"
        title, total = ("SFT", run.config.sft.steps) if sft else ("GRPO", run.config.run.steps)
        rows = [*islice(run.newest_first(log), RECENT)][::-1]
        if not rows:
            return
        step, due = int(rows[-1]["step"]), self._due.setdefault((trial.name, log), Due(total))
        if due.at(step):
            yield step_line(f"{trial.name} {title}", step, total, rows)

    def _parts(self) -> None:
        try:
            now = sum(map(_left, self._trials))
        except OSError:
            return
        if now < self._left:
            done, passed = self._total - now, time.monotonic() - self._began
            rest = f", about {duration(passed / done * now)} left" if now else ""
            line(f"sweep: {done} of {self._total} parts done{rest}")
        self._left = now


def _left(trial: Trial) -> int:
    """Parts that are left of a run; of one that cannot be read, which hides no other, none."""
    try:
        return len(left(trial))
    except RunError:
        return 0
