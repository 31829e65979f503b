"""Trackio: a run of the project `grpo_nb`, here, or on the server of TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from grpo_nb.config.trackers import PACKAGES
from grpo_nb.printable import clean_logger
from grpo_nb.trackers.tracker import AXES, About, Point, Tracker

PROJECT = "grpo_nb"
logger = clean_logger(__name__)


class Trackio:
    """A run of trackio, found again by its name."""

    fresh = False

    def __init__(self, about: About) -> None:
        trackio: Any = import_module("trackio")
        for module in ("trackio", "trackio.run", "trackio.utils"):  # what it prints would appear in any cell
            vars(import_module(module)).setdefault("print", logger.debug)
        name = f"{about.name} {about.id[:6]}"
        self.newest = _newest(name)
        alone = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(PROJECT, name=name, resume="allow", config=dict(about.settings), **alone)

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            axis = {AXES[point.log]: point.step} if point.log in AXES else {}
            self._run.log({**point.numbers, **axis}, step=point.step)

    def close(self) -> None:
        self._run.finish()


def _newest(name: str) -> Mapping[str, int] | None:
    """Newest steps in the store on this machine: trackio writes half a second later, which a kill can prevent."""
    if PACKAGES["trackio"].server() is not None:
        return None
    store: Any = import_module("trackio.sqlite_storage").SQLiteStorage
    steps = {log: store.get_metric_values(PROJECT, name, axis) for log, axis in AXES.items()}
    return {log: max((int(row["value"]) for row in rows), default=0) for log, rows in steps.items()}


def opened(about: About) -> Tracker:
    """Trackio for a run."""
    return Trackio(about)
