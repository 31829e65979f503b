"""Cost of the dashboard, in a real kernel: `python -m grpo_nb.dev.live_bench`.

It measures the time until the cell that starts a run returns; the seconds of a step with the dashboard and without it,
in blocks of the same steps; the steps until a changed knob is active; and the size of a notebook after 1,000 steps. The
functions that a kernel calls are here too, so that a person may call them on a run of theirs.
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import numpy as np
import psutil
from nbclient import NotebookClient
from traitlets.config import Config

from grpo_nb import presets
from grpo_nb.evaluation.intervals import bootstrap, interval
from grpo_nb.jupyter.session import Session
from grpo_nb.metrics import keys
from grpo_nb.printable import clean_logger
from grpo_nb.run.run import Run

if TYPE_CHECKING:
    import pandas as pd

logger = clean_logger(__name__)

LEFT_OUT = 4
"""Steps of a block that are left out: the first, while the dashboard comes up, and the last one, which is held."""
SPARE = 300
"""Steps for turning the knobs, more than any model does meanwhile."""
MANY = 1000
FAST_ROWS = 200.0
"""Rows a second, when a thousand of them are logged: faster than any model."""
STATE = "application/vnd.jupyter.widget-state+json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: measured."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_nb.dev.live_bench", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--pairs", type=int, default=12, help="blocks of steps, each done with the dashboard and without"
    )
    parser.add_argument("--block", type=int, default=10, help="steps of a block")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="grpo_nb-") as folder:
        for line in [*_steps(Path(folder), options.pairs, options.block), *_size(Path(folder))]:
            logger.info("%s", line)
    logger.info("%d CPU cores, the demo's model, in a kernel driven by nbclient", os.cpu_count() or 0)
    return 0


async def alternate(without: Session, beside: Session, pairs: int, block: int) -> list[tuple[float, float, float]]:
    """Seconds per step in each block: of a run without a dashboard, and of an equal run with one.

    The third number is the CPU time of the dashboard's own thread per step of the run with it.

    Equal runs (one configuration, one seed) do the same work in a step, bit for bit, so a block is compared with
    itself; they train by turns, each held while the other does. The first block, in which all is loaded, is left out.
    """
    means: list[tuple[float, float, float]] = []
    for i in range(pairs + 1):
        begun, end = i * (LEFT_OUT + block), (i + 1) * (LEFT_OUT + block)
        await _train(without, end)
        with _shown(beside) as board:
            await _train(beside, end)
            spent = _cpu_seconds(board)
        found = [_step_times(session).loc[begun + LEFT_OUT : end - 1].mean() for session in (without, beside)]
        means.append((float(found[0]), float(found[1]), spent / (end - begun)))
    return means[1:]


def _cpu_seconds(board: Any) -> float:
    """CPU time of the thread that follows the run."""
    threads = psutil.Process().threads()
    return float(sum(t.user_time + t.system_time for t in threads if t.id == board._thread.native_id))


async def _train(session: Session, step: int) -> None:
    """Train until step `step` is done and held."""
    session.resume()
    await session.wait(step=step - 1)  # the hold is requested within the last step
    session.pause()
    while session.state != "paused":
        await asyncio.sleep(0.05)


@contextmanager
def _shown(session: Session) -> Iterator[Any]:
    from IPython.display import display

    from grpo_nb.jupyter.dashboard import Dashboard

    board = Dashboard(session)
    board.watch()
    display(board)  # type: ignore[no-untyped-call]
    yield board
    board.close()


def _step_times(session: Session) -> "pd.Series":
    return session.metrics().set_index("step")[keys.TIME_STEP]


async def turn(session: Session, times: int) -> list[int]:
    """Steps after the running one until each change of the temperature was active; 1 is the next step."""
    knob, found = session.knobs["temperature"], []
    for i in range(times):
        await asyncio.sleep(0.1 * i)  # at different moments of a step
        wanted = 0.9 + 0.01 * i
        knob.set(wanted)
        under_way = session.step + 1
        await session.wait(step=under_way + 2)
        rows = session.metrics()
        found.append(int(rows[rows["temperature"].eq(wanted)]["step"].min()) - under_way)
    return found


async def flood(path: str, steps: int = MANY) -> None:
    """Log `steps` rows to a run that nobody trains, as fast as no model does, while its dashboard follows."""
    run = Run.open(path)
    like, first = dict(next(run.newest_first("metrics"))), (run.last_step() or 0) + 1
    with run.lock():
        run.log_event("resume", step=first - 1)
        for step in range(first, first + steps):
            wave = 1 + 0.3 * (step * 7919 % 100) / 100
            changed = {key: value * wave for key, value in like.items() if isinstance(value, float)}
            run.log_metrics(like | changed | {"step": step})
            await asyncio.sleep(1 / FAST_ROWS)
        await asyncio.sleep(5.0)


def _steps(folder: Path, pairs: int, block: int) -> list[str]:
    steps = (pairs + 1) * (block + LEFT_OUT) + SPARE
    config = presets.demo().replace(
        **{"sft.steps": 0, "run.steps": steps, "run.checkpoint_every": steps, "run.quick_eval_every": 0}
    )
    for name in ("steps", "twin"):
        Run.create(folder / name, config)
    book = _execute(
        folder,
        "import json, time\nimport grpo_nb as g\nfrom grpo_nb.dev import live_bench",
        "begun = time.thread_time()\nsession = g.start('steps')\ndisplay(session)\nprint(time.thread_time() - begun)",
        "session.dashboard().close()",
        f"print(json.dumps(await live_bench.alternate(session, g.attach('twin'), {pairs}, {block})))",
        "session.resume()\nprint(json.dumps(await live_bench.turn(session, 10)))",
        "session.stop()\ng.attach('twin').stop()\nawait session.wait()",
    )
    times: list[tuple[float, float, float]] = json.loads(_printed(book.cells[3]))
    turns: list[int] = json.loads(_printed(book.cells[4]))
    return [
        f"the cell that starts: {_seconds(book.cells[1]):.2f} s, {float(_printed(book.cells[1])):.2f} s of CPU time "
        "in the thread that runs it",
        compared(times),
        f"{pairs} blocks of {block} steps, each with itself; in brackets, the 95% interval of the mean (bootstrap)",
        f"a changed knob is active {max(turns)} step(s) after the one under way at the latest ({len(turns)} turns)",
    ]


def compared(times: Sequence[tuple[float, float, float]]) -> str:
    """Sentence about the result of `alternate`."""
    without, beside, spent = (statistics.mean(column) for column in zip(*times, strict=True))
    more = np.array([b / a - 1 for a, b, _ in times])
    drawn = bootstrap(lambda rows: {"mean": float(more[rows].mean())}, [str(i) for i in range(len(more))], seed=0)
    low, high = interval("mean", float(more.mean()), drawn["mean"], len(more))
    return (
        f"a step: {without:.3f} s without the dashboard, {beside:.3f} s with it; block by block {more.mean():+.1%} "
        f"({low:+.1%} to {high:+.1%}), median {np.median(more):+.1%}; CPU time of the dashboard's thread "
        f"{1e3 * spent:.1f} ms a step, {spent / without:.1%} of it"
    )


def _size(folder: Path) -> list[str]:
    """Sizes of the run that `_steps` left."""
    book = _execute(
        folder,
        "import grpo_nb as g\nfrom grpo_nb.dev import live_bench",
        "session = g.attach('steps')\nsession",
        "await live_bench.flood('steps')",
        "session",
        "session.report()",
    )
    shown = ("the live view as it came up", "the live view shown again", "the report")
    sizes = [len(json.dumps(book.cells[i].outputs)) for i in (1, 3, 4)]
    state = len(json.dumps(book.metadata.get("widgets", {}).get(STATE, {})))
    kept = [f"{name} {size / 1000:.0f} kB" for name, size in zip(shown, sizes, strict=True)]
    return [
        f"outputs kept after {MANY} more steps: {', '.join(kept)}",
        f"the widgets' state, where a front end is told to save it (JupyterLab is not): {state / 1000:.0f} kB",
    ]


def _execute(folder: Path, *sources: str) -> Any:
    """The executed notebook, with the times of its cells."""
    spec = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    cells = [nbformat.v4.new_code_cell(source) for source in sources]  # type: ignore[no-untyped-call]
    book = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": spec})  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(prefix="nb-") as private:  # short: a socket's path has about 100 characters
        sockets = Config({"KernelManager": {"transport": "ipc", "connection_file": f"{private}/kernel.json"}})
        where = {"metadata": {"path": str(folder)}}
        return NotebookClient(book, config=sockets, timeout=3600, record_timing=True, resources=where).execute()


def _seconds(cell: Any) -> float:
    """Seconds from the kernel's receipt of the cell to its answer."""
    times: Mapping[str, str] = cell.metadata.execution
    begun, ended = (times[key].replace("Z", "+00:00") for key in ("iopub.execute_input", "shell.execute_reply"))
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(begun)).total_seconds()


def _printed(cell: Any) -> str:
    return "".join(output["text"] for output in cell.outputs if output.output_type == "stream")


if __name__ == "__main__":
    sys.exit(main())
