"""The curves of the live view: the kernel sends new rows, the browser draws them.

A tick of the kernel costs the new rows and nothing else, however long the run is; the browser keeps as many rows as
`tailing.Rows` does. The panels are those of `plots`; texts reach the page as text, numbers as float32.

Pictures drawn in the kernel were tried first: 200 ms each, so that a budget of 1% of a core left blocks of 30 steps
without a second one. Both are measured by `python -m tests.support.live_rate`, rate and cost of a step together. On two
cores that other work shared, at 0.8 s a step: curves every 1.0 s (median; 2.2 s at most), and 3.5 ms of CPU time a step
(0.4%) in the thread that follows the run.
"""

import math
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from grpo_nb.jupyter.tailing import Followed, News, Place
from grpo_nb.metrics import keys, limits
from grpo_nb.plots import canvas, pages
from grpo_nb.plots.marks import keys_of
from grpo_nb.plots.thinning import UNDONE
from grpo_nb.run.run import Run
from grpo_nb.storage.journal import Row

_HERE = Path(__file__).parent
MOST_COLUMNS = 300
LARGEST = 1e30
"""Largest value that is sent: sums of a few thousand are still far below float32's limit."""
STATUS = {"clipped": 1.0, **dict.fromkeys(UNDONE, 2.0)}
"""Codes of the states that the browser distinguishes; all others are 0."""
INKS = {
    "ink": canvas.INK,
    "muted": canvas.MUTED,
    "faint": canvas.FAINT,
    "grid": canvas.GRID,
    "alarm": canvas.ALARM,
    "paper": canvas.PAPER,
}


class Curves(anywidget.AnyWidget):
    """The pages of a run's panels; `page` is the visible one. It draws the rows of `update`."""

    _esm = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in ("plot.js", "view.js"))
    _css = (_HERE / "view.css").read_text(encoding="utf-8")
    page = traitlets.Unicode("overview").tag(sync=True)
    pages = traitlets.Dict().tag(sync=True)
    """The panels of each page, as `Panel.as_json` has them, and how many stand side by side at most."""
    frame = traitlets.Dict().tag(sync=True)
    """Frame of the curves: objectives, marks, the end of the step axis, the inks of a light page."""

    def __init__(self, run: Run, followed: Followed, stage: str, wanted: Callable[[], None] = lambda: None) -> None:
        """`wanted` is called when somebody requests the report; `hand_over` sends it."""
        super().__init__(page="sft" if stage == "sft" else "overview")
        self.run_path, self._config = run.path, run.config
        self._followed, self._stage = followed, stage
        self._wanted = wanted
        self._sending = threading.RLock()
        self._seen = Place()
        self._columns: list[str] = []
        self._laid_out: object = None
        self.on_msg(self._asked)

    def update(self, goal: int, ended: str = "") -> None:
        """Send the rows since the last call; `goal`: the steps of the run, `ended`: its end state, if it has ended."""
        with self._sending:
            self._lay_out(goal, ended)
            news = self._followed.since(self._seen)
            if news.place != self._seen:
                self._tell(news)

    def _asked(self, _: Any, content: Any, __: Any) -> None:
        """Handle a message of the page: it needs all rows after it opened or missed one, or it requests the report."""
        if isinstance(content, dict) and content.get("kind") == "all":
            with self._sending:
                self._tell(self._followed.since(Place()))
        if isinstance(content, dict) and content.get("kind") == "report":
            self._wanted()

    def _tell(self, news: News) -> None:
        rows = [*news.kept, *news.tail]
        about = {
            "kind": "all" if news.anew else "more",
            "generation": news.place.generation,
            "first": news.place.kept - len(news.kept),
            "kept": len(news.kept),
        } | ({"columns": self._columns} if news.anew else {})
        self._seen = news.place
        self.send(about, [np.array([int(row["step"]) for row in rows], float).tobytes(), packed(rows, self._columns)])

    def hand_over(self, page: str) -> None:
        """Let the browser save a page of HTML as a file."""
        name = re.sub(r"[^\w-]+", "-", self.run_path.name)[:80]
        self.send({"kind": "file", "name": f"{name}-report.html"}, [page.encode()])

    def _lay_out(self, goal: int, ended: str) -> None:
        """Describe the pages again where rows have new keys, and the frame of the curves."""
        found = self._followed.found()
        laid_out = len(found.keys), found.number(keys.TEMPERATURE)
        if laid_out != self._laid_out:
            self._laid_out = laid_out
            described = {"sft": [*pages.SFT]} if self._stage == "sft" else pages.pages(self._config, found)
            across = {"rewards": max(len(self._config.objectives), 2)}
            self.pages = {
                name: {"across": across.get(name, 3), "panels": [panel.as_json() for panel in panels]}
                for name, panels in described.items()
            }
            columns = [keys.STATUS, *keys_of(panel for panels in described.values() for panel in panels)]
            columns = list(dict.fromkeys(columns))[:MOST_COLUMNS]
            if columns != self._columns:
                self._columns, self._seen = columns, Place()
        objectives = {} if self._stage == "sft" else canvas.colours(self._config.objectives)
        resumed, turned = self._followed.marks([keys.BETA.of(name) for name in objectives])
        self.frame = {
            "objectives": [[name, colour, keys.REWARD.of(name)] for name, colour in objectives.items()],
            "inks": INKS,
            "resumed": resumed,
            "turned": turned,
            "ended": ended,
            "end": canvas.axis_end(int(found.number(keys.STEP) or 0), goal),
        }


def packed(rows: Sequence[Row], columns: Sequence[str]) -> bytes:
    """Values of each column in turn as float32, within the limits of its key; nan where a row has no finite number."""
    table = np.array([[_number(key, row.get(key)) for row in rows] for key in columns], np.float64)
    table = table.reshape(len(columns), len(rows))
    low, high = np.array([limits.of(key) for key in columns]).reshape(-1, 2).T
    kept = np.clip(table, np.maximum(low, -LARGEST)[:, None], np.minimum(high, LARGEST)[:, None])
    return kept.astype("<f4").tobytes()


def _number(key: str, value: Any) -> float:
    if key == keys.STATUS:
        return STATUS.get(value, 0.0) if isinstance(value, str) else 0.0
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else math.nan
