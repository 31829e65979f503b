"""Cost of a step and of a tick of the live view as a run grows: `python -m grpo_nb.dev.live_growth`.

CPU time of this process, of a run that just began and of one that is long: its status, the rules after a step, a tick
of the live view, the front of its evaluations; and the memory left after the view was opened and closed.
"""

import argparse
import gc
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_nb import presets, rules
from grpo_nb.dev.growth_bench import metric_row
from grpo_nb.evaluation.pareto import pareto
from grpo_nb.printable import clean_logger
from grpo_nb.rules.history import History
from grpo_nb.run.run import Run

logger = clean_logger(__name__)

REPEATED = 10
"""Measurements whose mean is shown."""
FILLED = 50
"""Openings after which the allocator has all the pages that it keeps: from here on nothing may grow."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: measured."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_nb.dev.live_growth", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=20_000, help="steps and events of the long run")
    parser.add_argument("--evaluations", type=int, default=300, help="evaluations of the long run")
    parser.add_argument("--cycles", type=int, default=200, help="times that the live view is opened and closed")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    for line in measured(options.steps, options.evaluations, options.cycles):
        logger.info("%s", line)
    return 0


def measured(steps: int, evaluations: int, cycles: int) -> Iterator[str]:
    """The table: each cost in a short run and in a long one."""
    with tempfile.TemporaryDirectory(prefix="grpo_nb-") as folder:
        run = Run.create(Path(folder) / "run", presets.demo().replace(**{"run.steps": 2 * steps}))
        run.log_event("start", step=0, goal=2 * steps)
        rows = _rows(2 * steps)
        yield f"{'CPU time of':<44} {'a short run':>14} {'a long run':>14}"
        yield _line(f"status(), 20 and {steps:,} events", _status(run, 20), _status(run, steps))
        yield _line(f"rules after a step, 20 and {steps:,} steps", _rules(run, rows, 20), _rules(run, rows, steps))
        yield _line(f"a tick of the live view, 20 and {steps:,} steps", *_ticks(run, rows, 20, steps))
        few = max(evaluations // 10, 1)
        yield _line(
            f"pareto(), {few} and {evaluations} evaluations", _pareto(folder, few), _pareto(folder, evaluations)
        )
        yield "MiB, files and threads of this process after the view was opened and closed"
        opened = 0
        for times in sorted({min(3, cycles), min(FILLED, cycles), cycles}):
            yield f"{f'  {times} times':<44} {_cycles(run, times - opened):>14}"
            opened = times


def _line(what: str, short: float, long: float) -> str:
    return f"{what:<44} {short * 1e3:>11.2f} ms {long * 1e3:>11.2f} ms"


def _rows(count: int) -> list[dict[str, Any]]:
    noise = np.random.default_rng(0)
    return [metric_row(step, count, noise.random(64).tolist()) for step in range(1, count + 1)]


def _mean(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    spent = 0.0
    for _ in range(REPEATED):
        before()
        began = time.process_time()
        work()
        spent += time.process_time() - began
    return spent / REPEATED


def _status(run: Run, events: int) -> float:
    for step in range(events):
        run.log_event("beta", step=step, message="KL 0.21 above 0.1, beta up 15%")
    run.status()
    return _mean(run.status)


def _rules(run: Run, rows: list[dict[str, Any]], step: int) -> float:
    history = History(run.config, rows[: step - 1])
    rules.check(history, run.config)
    following = iter(rows[step - 1 :])

    def one() -> None:
        history.append(next(following))
        rules.after_step(history, run.config)

    return _mean(one)


def _ticks(run: Run, rows: list[dict[str, Any]], short: int, long: int) -> tuple[float, float]:
    """A refresh of words and picture after each new row."""
    from grpo_nb.jupyter.dashboard import Dashboard
    from grpo_nb.jupyter.start import attach

    board, following, found = Dashboard(attach(run)), iter(rows), []
    for length in (short, long):
        while (run.last_step() or 0) < length:
            run.log_metrics(next(following))
        board.refresh()
        found.append(_mean(lambda: board.refresh(), lambda: run.log_metrics(next(following))))
    board.close()
    return found[0], found[1]


def _pareto(folder: str, evaluations: int) -> float:
    run = Run.create(Path(folder) / f"evaluated-{evaluations}", presets.demo())
    draw = np.random.default_rng(0)
    for step in range(evaluations):
        for name in run.config.objectives:
            value = round(float(np.clip(0.3 + 0.6 * step / evaluations + draw.normal(0, 0.05), 0, 1)), 5)
            numbers = {"value": value, "low": value - 0.1, "high": value + 0.1, "n": 64, "clusters": 40}
            draws = np.round(value + draw.normal(0, 0.04, 1000), 5).tolist()
            where = {"stage": f"step {step}", "step": step, "split": "test", "mode": "quick", "objective": name}
            asked = {"pool": "p", "asked": "a", "n": 64, "clusters": 40}
            run.log_evaluation(where | asked | {"metrics": {"accuracy": numbers}, "resamples": {"accuracy": draws}})
    began = time.process_time()
    pareto(run)
    return time.process_time() - began


def _cycles(run: Run, cycles: int) -> str:
    import psutil  # type: ignore[import-untyped, unused-ignore]

    from grpo_nb.jupyter.dashboard import Dashboard
    from grpo_nb.jupyter.start import attach

    for _ in range(cycles):
        board = Dashboard(attach(run))
        board.watch()
        board.resting.wait()
        board.close()
    gc.collect()
    process = psutil.Process(os.getpid())
    files = process.num_fds() if hasattr(process, "num_fds") else len(process.open_files())
    return f"{process.memory_info().rss / 2**20:.0f}, {files}, {threading.active_count()}"


if __name__ == "__main__":
    sys.exit(main())
