"""Stand-ins for trackers: they keep what they are given, fail, or hang."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grpo_nb.trackers.tracker import About, Point, Tracker

PATIENCE = 60.0


@dataclass
class Store:
    """What all stand-ins were given, as if on their servers."""

    points: dict[str, list[Point]] = field(default_factory=dict)
    """By tracker."""
    abouts: list[tuple[str, About]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    answers: bool = False
    """Whether a tracker can say what it has."""
    fails: Mapping[str, str] = field(default_factory=dict)
    """Tracker -> where it fails: open, log, or hang."""
    error: str = "no route"
    released: threading.Event = field(default_factory=threading.Event)
    """Ends every hanging call."""

    def opened(self, name: str, about: About) -> Tracker:
        """A stand-in; what the mirror opens."""
        self.abouts.append((name, about))
        if self.fails.get(name) == "open":
            raise OSError(self.error)
        return StandIn(self, name)

    def steps(self, name: str, log: str = "metrics") -> list[int]:
        return [point.step for point in self.points.get(name, []) if point.log == log]


class StandIn:
    """A tracker of a store."""

    fresh = False

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self.newest: Mapping[str, int] | None = None
        if store.answers:
            self.newest = {log: max(store.steps(name, log), default=0) for log in ("sft", "metrics")}

    def log(self, points: Sequence[Point]) -> None:
        fails = self._store.fails.get(self._name)
        if fails == "hang":
            assert self._store.released.wait(PATIENCE)
        if fails == "log":
            raise OSError(self._store.error)
        self._store.points.setdefault(self._name, []).extend(points)

    def close(self) -> None:
        self._store.closed.append(self._name)
