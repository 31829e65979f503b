"""History of a run for the rules: its first rows, its newest rows, and running figures of all rows, in bounded memory.

A row is added once and costs the same whatever the length of the run. The result equals that of a full read, except
that two figures that need all values, the noise of a curve and the spread inside groups, are medians of the newest
NOISE_ROWS.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from grpo_nb.config import Config
from grpo_nb.metrics import keys, limits
from grpo_nb.rules.finding import BASELINE, Finding, Row, keys_below, number
from grpo_nb.storage.index import LogRows
from grpo_nb.storage.index.packing import Floats, Places

KEPT = 40
"""Newest rows that are kept: no rule looks further back."""
NOISE_ROWS = 1000
"""Newest values whose median is the noise of a curve: of a shorter run, all of them."""
MEDIAN_OF = 5
"""Values of a running median: two bad batches move none."""
LATEST = MEDIAN_OF // 2
"""Newest values that cannot be the last high of a fall."""
SHORTEST = 8
"""Fewest values for a fall: the newest five, and three from before."""
FALL_DEVIATIONS = 3.5
"""Standard deviations of one value from which a fall is more than noise: the best of many medians is above the mean by
about one of a median's."""
LOOK_BACK, LOOK_AHEAD = 10, 50
"""Rows before a fall, and from its beginning on, that are kept to see what changed with it."""
PHASES = ("rollout", "score", "reference", "train")
"""Phases of a step whose seconds per token are kept."""
SETTINGS = (keys.LR, keys.TEMPERATURE)
CURVES: tuple[Callable[[str], str], ...] = (
    keys.KL.of,
    keys.ENTROPY.of,
    keys.LENGTH_MEAN.of,
    keys.TRUNCATION.of,
    keys.FRAC_REWARD_ZERO_STD.of,
    lambda objective: keys.LABEL.of(objective, "unparsed"),
    lambda objective: keys.GRAD_NORM,
    lambda objective: keys.SAMPLER_DIFFERENCE.mean,
)
"""Keys, by objective, of the curves kept in addition to `SETTINGS` and beta."""
MOST_HIGHS = 1000
"""Values of a curve that may begin a fall; noise leaves a dozen of them."""
CONFLICT_ROWS = 20
"""Cosines between the objectives' gradients that are kept."""
ABOVE_ROWS = 20
"""KLs that are kept."""


Rule = Callable[["History", Config], Finding | None]
ObjectiveRule = Callable[["History", Config, str], Finding | None]


class Forgotten(LookupError):
    """Raised for a row that is no longer kept."""


class Window:
    """The median of the newest values of a stream; a value costs the logarithm of the window's size."""

    def __init__(self, size: int) -> None:
        self._newest: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        if len(self._newest) == self._newest.maxlen:
            del self._sorted[bisect_left(self._sorted, self._newest[0])]
        self._newest.append(value)
        insort(self._sorted, value)

    def median(self) -> float:
        """Median of the newest values; 0 without any."""
        n = len(self._sorted)
        return (self._sorted[(n - 1) // 2] + self._sorted[n // 2]) / 2 if n else 0.0

    def quantile(self, share: float) -> float:
        """Quantile of the newest values: the one that this share of them is below; 0 without any."""
        return self._sorted[int(share * (len(self._sorted) - 1))] if self._sorted else 0.0

    def newest(self, count: int) -> list[float]:
        """The newest values, oldest first."""
        return [*self._newest][-count:]


@dataclass(slots=True)
class Point:
    """A value of a curve."""

    value: float
    step: int
    place: int
    """Index of its row among all rows."""
    begins: bool = False
    """Whether a fall may begin at this point."""
    around: "Around | None" = None
    """Rows around the point, once all of them were read."""


@dataclass(frozen=True)
class Around:
    """Values of `SETTINGS` and `CURVES` around a row."""

    before: list[Row]
    """Values of the LOOK_BACK rows before it."""
    after: list[Row]
    """Values of the row itself and those that follow, LOOK_AHEAD in all."""


@dataclass(frozen=True)
class Fall:
    """A curve's best running median, where it is now, and the first point that is nearer to the latter to the end."""

    best: float
    now: float
    first: Point

    @property
    def since(self) -> int:
        """The step of that point."""
        return self.first.step


class Curve:
    """The finite values of one key: its best running median, its noise, and where it was high last."""

    def __init__(self) -> None:
        self._newest: deque[Point] = deque(maxlen=LATEST + 1)
        self._values: deque[float] = deque(maxlen=2 * MEDIAN_OF)
        self._young: deque[Point] = deque()
        """Points whose following rows have not all come yet."""
        self._count = 0
        self._best = -math.inf
        self._jumps = Window(NOISE_ROWS)
        self._highs: list[tuple[float, Point]] = []
        """Values that no later one reaches, each with the point after it: candidates for the last high."""

    def add(self, point: Point) -> None:
        newest, values = self._newest, self._values
        if newest:
            self._jumps.add(abs(point.value - values[-1]))
        newest.append(point)
        values.append(point.value)
        self._young.append(point)
        self._count += 1
        if len(values) == 2 * MEDIAN_OF:
            self._best = max(self._best, _median(list(values)[:MEDIAN_OF]))
        if self._count > LATEST:
            self._add_high(newest[0].value, newest[1])

    def grow_up(self, place: int, around: Callable[[int], Around]) -> None:
        """Keep the rows around the point whose last following row is that of `place`."""
        if self._young and self._young[0].place <= place - LOOK_AHEAD + 1:
            point = self._young.popleft()
            if point.begins or any(point is undecided for undecided in self._newest):
                point.around = around(point.place)

    def fill(self, values: Floats, steps: Floats, places: Places) -> None:
        """Do as if these were added one by one, of which the last are kept; none may be added afterwards."""
        count, ended = len(values), max(len(values) - LATEST, 0)
        self._count = count
        self._values.extend(values[-2 * MEDIAN_OF :].tolist())
        for jump in np.abs(np.diff(values[-NOISE_ROWS - 1 :])).tolist():
            self._jumps.add(jump)
        if count >= 2 * MEDIAN_OF:
            stretches = sliding_window_view(values[:-MEDIAN_OF], MEDIAN_OF)
            self._best = float(np.max(np.median(stretches, axis=1)))
        later = np.maximum.accumulate(values[:ended][::-1])[::-1]
        for at in np.flatnonzero(values[:ended] > np.append(later[1:], -math.inf)).tolist():
            after = Point(float(values[at + 1]), int(steps[at + 1]), int(places[at + 1]), begins=True)
            self._highs.append((float(values[at]), after))
        if len(self._highs) > MOST_HIGHS:
            self._highs = _spaced(self._highs)

    def fall(self) -> Fall | None:
        """The fall from the best running median to that of the end, if it is more than noise."""
        if self._count < SHORTEST:
            return None
        values = list(self._values)
        now = _median(values[-MEDIAN_OF:])
        best = self._best if len(values) == 2 * MEDIAN_OF else _median(values[:-MEDIAN_OF])
        if best - now <= FALL_DEVIATIONS * self._deviation():
            return None
        middle = (best + now) / 2
        last = bisect_right(self._highs, -middle, key=lambda high: -high[0]) - 1
        return Fall(best, now, self._highs[last][1])

    def _deviation(self) -> float:
        """Deviation of one value about its curve, from differences of neighbours, so that one fall counts little."""
        return 1.4826 * self._jumps.median() / math.sqrt(2)

    def _add_high(self, value: float, after: Point) -> None:
        highs = self._highs
        while highs and highs[-1][0] <= value:
            highs.pop()[1].begins = False
        highs.append((value, after))
        after.begins = True
        if len(highs) > MOST_HIGHS:
            self._highs = _spaced(highs)


def _spaced(highs: list[tuple[float, Point]]) -> list[tuple[float, Point]]:
    """At most half of MOST_HIGHS, evenly by value: of a curve that falls without noise, every value is a high."""
    gap = (highs[0][0] - highs[-1][0]) / (MOST_HIGHS // 2 - 2)
    kept = highs[:1]
    for high in highs[1:-1]:
        if kept[-1][0] - high[0] >= gap:
            kept.append(high)
    return [*kept, highs[-1]]


class Past:
    """Running figures of one objective."""

    def __init__(self, objective: str, band: tuple[float, float] | None) -> None:
        self.reward, self.correct = Curve(), Curve()
        self.spread = Window(NOISE_ROWS)
        """Spread of the rewards inside groups."""
        self.kls: deque[float] = deque(maxlen=ABOVE_ROWS)
        self.kl_count = self.kl_above = 0
        """KLs that were measured, and those above the band."""
        self._highest = band[1] if band else math.inf
        self._labels, self._correct = keys.LABEL.below(objective), keys.LABEL.of(objective, "correct")
        self._unparsed = keys.LABEL.of(objective, "unparsed")
        self._kl, self._reward, self._spread = (key.of(objective) for key in (keys.KL, keys.REWARD, keys.REWARD_STD))
        self._keys = ("step", *SETTINGS, keys.BETA.of(objective), *(curve(objective) for curve in CURVES))
        self._recent: list[Row] = []
        """The newest rows with `_keys` alone."""
        self._place = -1
        """Index of the newest row."""
        self._stored: LogRows | None = None

    def fill(self, rows: LogRows) -> None:
        """Do as if these rows were added one by one; none may be added afterwards."""
        steps, (_, kl), (_, spread) = (
            rows.numbers("step").values,
            _measured(rows, self._kl),
            _measured(rows, self._spread),
        )
        self.kls.extend(kl[-ABOVE_ROWS:].tolist())
        self.kl_count, self.kl_above = len(kl), int((kl > self._highest).sum())
        for value in spread[-NOISE_ROWS:].tolist():
            self.spread.add(value)
        for curve, (at, values) in ((self.reward, _measured(rows, self._reward)), (self.correct, self._shares(rows))):
            curve.fill(values, steps[at], at)
        self._stored = rows

    def add(self, row: Row) -> None:
        if (kl := _finite(row, self._kl)) is not None:
            self.kls.append(kl)
            self.kl_count += 1
            self.kl_above += kl > self._highest
        if (spread := _finite(row, self._spread)) is not None:
            self.spread.add(spread)
        self._place += 1
        self._recent.append(self._kept(row))
        for curve, value in ((self.reward, _finite(row, self._reward)), (self.correct, self._share(row))):
            if value is not None:
                curve.add(Point(value, int(row["step"]), self._place))
            curve.grow_up(self._place, self._around)
        if len(self._recent) > 2 * (LOOK_BACK + LOOK_AHEAD):
            del self._recent[: LOOK_BACK + LOOK_AHEAD]

    def around(self, point: Point) -> Around:
        """Measured values around a point of a curve."""
        return point.around or self._around(point.place)

    def _around(self, place: int) -> Around:
        if self._stored is not None:
            first = max(place - LOOK_BACK, 0)
            rows = [self._kept(row) for row in self._stored[first : place + LOOK_AHEAD]]
            return Around(rows[: place - first], rows[place - first :])
        at = place - self._place + len(self._recent) - 1
        return Around(self._recent[max(at - LOOK_BACK, 0) : at], self._recent[at : at + LOOK_AHEAD])

    def _kept(self, row: Row) -> Row:
        kept = {key: row[key] for key in self._keys if key in row}
        if self._unparsed not in kept and self._counted(row):
            kept[self._unparsed] = 0.0
        return kept

    def _counted(self, row: Row) -> bool:
        """Whether labels were counted in the row."""
        return any(row[key] is not None for key in keys_below(row, self._labels))

    def _shares(self, rows: LogRows) -> tuple[Places, Floats]:
        """Places and shares of right answers in the rows that have a label, as `_share`."""
        values, (at, right) = np.full(len(rows), np.nan), numbers(rows, self._correct)
        for key in keys.counted_with(self._correct, rows.keys):
            values[rows.numbers(key).at] = 0.0
        values[at] = right
        at = np.flatnonzero(np.isfinite(values))
        return at, values[at]

    def _share(self, row: Row) -> float | None:
        """Share of right answers; 0 where only other labels were counted."""
        if row.get(self._correct) is not None:
            return _finite(row, self._correct)
        return 0.0 if self._counted(row) else None


class History:
    """The rows of a run in their order. Between the first BASELINE and the newest KEPT rows none can be looked at."""

    def __init__(self, config: Config, rows: Iterable[Row] = (), *, without_sft: bool = False) -> None:
        self.without_sft = without_sft
        """Whether GRPO started without a result of SFT although `sft.steps` is above 0."""
        self._first: list[Row] = []
        self._newest: list[Row] = []
        self._count = 0
        self.cosines: deque[float] = deque(maxlen=CONFLICT_ROWS)
        """Cosines between the objectives' gradients, of the newest rows that have one."""
        self.objectives = {name: Past(name, objective.kl_band) for name, objective in config.objectives.items()}
        self.paces = {phase: Window(NOISE_ROWS) for phase in PHASES}
        """Seconds a completion token, by phase."""
        self.reported: tuple[int, frozenset[tuple[str, str]]] = (0, frozenset())
        """Keys of the rules' findings, and the number of rows at that time."""
        for row in rows:
            self.append(row)

    @classmethod
    def of(cls, config: Config, rows: LogRows, *, without_sft: bool = False) -> "History":
        """History from the columns of a long log, equal to adding all rows one by one; no row may be added later."""
        history = cls(config, without_sft=without_sft)
        history._first, history._newest, history._count = [*rows[:BASELINE]], [*rows[-KEPT:]], len(rows)
        history.cosines.extend(_measured(rows, keys.GRAD_COSINE)[1][-CONFLICT_ROWS:].tolist())
        for past in history.objectives.values():
            past.fill(rows)
        tokens = _measured(rows, keys.TOKENS)
        for phase, window in history.paces.items():
            at, seconds = _measured(rows, keys.TIME.of(phase))
            _, one, other = np.intersect1d(at, tokens[0], assume_unique=True, return_indices=True)
            for pace in (seconds[one] / np.maximum(tokens[1][other], 1))[-NOISE_ROWS:].tolist():
                window.add(pace)
        return history

    def append(self, row: Row) -> None:
        """Add the next row."""
        for past in self.objectives.values():
            past.add(row)
        if (cosine := _finite(row, keys.GRAD_COSINE)) is not None:
            self.cosines.append(cosine)
        self._pace(row)
        if self._count < BASELINE:
            self._first.append(row)
        self._newest.append(row)
        self._count += 1
        if len(self._newest) == 2 * KEPT:
            del self._newest[:KEPT]

    def _pace(self, row: Row) -> None:
        tokens = _finite(row, keys.TOKENS)
        for phase, window in self.paces.items():
            if tokens and (seconds := _finite(row, keys.TIME.of(phase))) is not None:
                window.add(seconds / tokens)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...

    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        """A row, or those of a slice.

        Raises:
            Forgotten: one of them is no longer kept.
        """
        if isinstance(place, slice):
            start, stop, _ = place.indices(self._count)
            rows, offset = self._holding(start, stop)
            return rows[start - offset : max(stop, start) - offset : place.step]
        at = range(self._count)[place]
        rows, offset = self._holding(at, at + 1)
        return rows[at - offset]

    def __iter__(self) -> Iterator[Row]:
        return iter(self[:])

    def _holding(self, start: int, stop: int) -> tuple[list[Row], int]:
        """Rows that hold those from `start` to `stop`, and the place of the first of them."""
        if start >= max(self._count - KEPT, 0) or self._count == len(self._newest):
            return self._newest, self._count - len(self._newest)
        if max(start, stop) <= len(self._first):
            return self._first, 0
        raise Forgotten(f"rows {start} to {stop} of {self._count}: the first {BASELINE} and newest {KEPT} are kept")


def _median(values: list[float]) -> float:
    """Median of a few values, at least one."""
    ordered, n = sorted(values), len(values)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def _measured(rows: LogRows, key: str) -> tuple[Places, Floats]:
    """The finite numbers of a key, within its bounds, with the places of their rows."""
    at, values = numbers(rows, key)
    finite = np.isfinite(values)
    return at[finite], values[finite]


def numbers(rows: LogRows, key: str) -> tuple[Places, Floats]:
    """The places of the rows that have a number under a key, and what `finding.number` reads there."""
    found = rows.numbers(key)
    return found.at, limits.bounded(key, found.values)


def _finite(row: Row, key: str) -> float | None:
    value = number(row, key)
    return value if value is not None and math.isfinite(value) else None
