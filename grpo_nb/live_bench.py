"""What the control room costs, in a real kernel: `python -m grpo_nb.live_bench`.

How soon the cell that starts a run returns; how long a step takes with the dashboard and without it, in blocks of
steps that alternate; how soon a turned knob is in use; what a notebook keeps of 1,000 steps. The functions that a
kernel calls are here too, so that a person may call them on a run of theirs.
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

from grpo_nb import presets
from grpo_nb.run import Run
from grpo_nb.session import Session

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

LEFT_OUT = 2
"""Steps at the start of a block, while the dashboard comes or goes."""
MANY = 1000
FAST_ROWS = 200.0
"""Rows a second, when a thousand of them are logged: faster than any model, so the picture is always behind."""
STATE = "application/vnd.jupyter.widget-state+json"


def main(arguments: Sequence[str] | None = None) -> int:
    """0: measured."""
    parser = argparse.ArgumentParser(prog="python -m grpo_nb.live_bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=6, help="blocks with the dashboard, and as many without")
    parser.add_argument("--block", type=int, default=10, help="steps of a block")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="grpo_nb-") as folder:
        for line in [*_steps(Path(folder), options.pairs, options.block), *_size(Path(folder))]:
            log.info("%s", line)
    log.info("%d CPU cores, the demo's model, in a kernel driven by nbclient", os.cpu_count() or 0)
    return 0


async def alternate(session: Session, pairs: int, block: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of a step in each block, without a dashboard and with one by turns: as they pass, and of CPU time.

    CPU time is that of the whole kernel: the training's and the drawing's. It is the steadier figure where other
    work shares the machine, and the larger one where a core is free.
    """
    from IPython.display import display

    from grpo_nb.widgets.dashboard import Dashboard

    means: dict[str, dict[str, list[float]]] = {kind: {"wall": [], "cpu": []} for kind in ("without", "with")}
    for _ in range(pairs):
        for kind, found in means.items():
            board = Dashboard(session) if kind == "with" else None
            if board is not None:
                board.watch()
                display(board)  # type: ignore[no-untyped-call]
            begun = session.step + LEFT_OUT
            await session.wait(step=begun)
            cpu = time.process_time()
            await session.wait(step=begun + block)
            found["cpu"].append((time.process_time() - cpu) / block)
            found["wall"].append(float(_step_times(session).loc[begun + 1 : begun + block].mean()))
            if board is not None:
                board.close()
    return means


def _step_times(session: Session) -> "pd.Series":
    return session.metrics().set_index("step")["time/step"]


async def turn(session: Session, times: int) -> list[int]:
    """For each turn of the temperature: how many steps after the one under way used it first; 1 is the next."""
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
    like, first = dict(run.metric_rows()[-1]), (run.last_step() or 0) + 1
    with run.lock():
        run.log_event("resume", step=first - 1)
        for step in range(first, first + steps):
            wave = 1 + 0.3 * (step * 7919 % 100) / 100
            changed = {key: value * wave for key, value in like.items() if isinstance(value, float)}
            run.log_metrics(like | changed | {"step": step})
            await asyncio.sleep(1 / FAST_ROWS)
        await asyncio.sleep(5.0)


def _steps(folder: Path, pairs: int, block: int) -> list[str]:
    steps = 2 * pairs * (block + LEFT_OUT + 2) + 60
    config = presets.demo().replace(
        **{"sft.steps": 0, "run.steps": steps, "run.checkpoint_every": steps, "run.quick_eval_every": 0}
    )
    Run.create(folder / "steps", config)
    book = _execute(
        folder,
        "import json, time\nimport grpo_nb as g\nfrom grpo_nb import live_bench, project, report",
        "begun = time.thread_time()\nsession = g.start('steps')\ndisplay(session)\nprint(time.thread_time() - begun)",
        "await session.wait(step=3)\nsession.dashboard().close()",
        f"print(json.dumps(await live_bench.alternate(session, {pairs}, {block})))",
        "print(json.dumps(await live_bench.turn(session, 10)))",
        "session.stop()\nawait session.wait()",
    )
    seconds: dict[str, dict[str, list[float]]] = json.loads(_printed(book.cells[3]))
    turns: list[int] = json.loads(_printed(book.cells[4]))
    return [
        f"the cell that starts: {_seconds(book.cells[1]):.2f} s, {float(_printed(book.cells[1])):.2f} s of CPU time "
        "in the thread that runs it",
        *(_compared(words, seconds, kind) for kind, words in (("wall", "a step"), ("cpu", "a step's CPU time"))),
        f"{pairs} pairs of {block} steps; in brackets, the smallest and the largest",
        f"a turned knob is in use {max(turns)} step(s) after the one under way at the latest ({len(turns)} turns)",
    ]


def _compared(words: str, seconds: Mapping[str, Mapping[str, Sequence[float]]], kind: str) -> str:
    without, beside = seconds["without"][kind], seconds["with"][kind]
    more = [b / a - 1 for a, b in zip(without, beside, strict=True)]
    medians = f"{statistics.median(without):.3f} s without the dashboard, {statistics.median(beside):.3f} s with it"
    return f"{words}: {medians}; pair by pair {statistics.median(more):+.1%} ({min(more):+.1%} to {max(more):+.1%})"


def _size(folder: Path) -> list[str]:
    """Of the run that `_steps` left."""
    book = _execute(
        folder,
        "import grpo_nb as g\nfrom grpo_nb import live_bench",
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
    """From the moment that the kernel took the cell to its answer."""
    times: Mapping[str, str] = cell.metadata.execution
    begun, ended = (times[key].replace("Z", "+00:00") for key in ("iopub.execute_input", "shell.execute_reply"))
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(begun)).total_seconds()


def _printed(cell: Any) -> str:
    return "".join(output["text"] for output in cell.outputs if output.output_type == "stream")


if __name__ == "__main__":
    sys.exit(main())
