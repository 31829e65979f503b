"""The mirror of a run in one tracker: a thread that follows the run's logs and notes how far it has come.

The logs are the queue: nothing is kept in memory, the training passes nothing on, and rows that a failing tracker did
not take are sent once it works again, or at the next start. How far it has come is in `trackers/NAME.json` of the run
folder. Training waits for its mirrors once, when it ends, and no longer than `END_SECONDS`.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from grpo_nb.config import Config, ConfigError
from grpo_nb.config.trackers import SILENT
from grpo_nb.judge.redaction import known_secrets, redacted
from grpo_nb.printable import clean_logger
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage import safe_open
from grpo_nb.storage.files import flock, from_json, separate, to_json, write_atomically
from grpo_nb.storage.journal import Row
from grpo_nb.trackers import ready
from grpo_nb.trackers.tracker import LOGS, About, Log, Tracker, Value, point

logger = clean_logger(__name__)

FOLDER = "trackers"
"""Folder of the mirrors in the run folder."""
POLL_SECONDS, RETRY_SECONDS, END_SECONDS = 0.5, 60.0, 20.0
"""Seconds between two looks at the logs; after a failure; for the remaining rows at the end, all trackers together."""
MOST_ROWS = 100
"""Rows that are sent at a time."""
QUICK = "quick"
"""Mode of evaluations whose numbers the step's row has, too."""
MOST_EVALUATIONS = 10_000
"""Evaluations that are noted as mirrored."""
LARGEST = 1 << 20
"""Bytes of the notes."""
LONGEST_REASON = 300
THREAD = "mirror "
"""Beginning of the threads' names."""


@contextmanager
def mirroring(run: Run) -> Iterator[None]:
    """Send the trackers of `run` the rows that they lack, and those logged inside the block. Raises nothing itself."""
    started = [mirror for name in run.config.run.trackers if (mirror := _started(run, name)) is not None]
    try:
        yield
    finally:
        end = time.monotonic() + END_SECONDS
        for mirror in started:
            mirror.ending.set()
        for mirror in started:
            mirror.thread.join(max(end - time.monotonic(), 0))
            mirror.report()


def _started(run: Run, name: str) -> "Mirror | None":
    """The mirror of a tracker; None where it cannot be written to: trainings have refused that before any work."""
    try:
        ready.check_one(name)
        mirror = Mirror(run, name)
        for variable, value in SILENT.items():
            os.environ.setdefault(variable, value)
        logging.getLogger("urllib3.connectionpool").addFilter(QUIET)
        mirror.thread.start()
    except (ConfigError, RunError, RuntimeError) as error:  # a RuntimeError where there can be no more threads
        logger.warning("%s; nothing is mirrored to %s", error, name)
        return None
    return mirror


class _Quiet(logging.Filter):
    """Filter that drops what other packages log while they retry: the mirror logs a failure once."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.threadName or "").startswith(THREAD)


QUIET = _Quiet()


def open_tracker(name: str, about: About) -> Tracker:
    """The tracker of that name."""
    opened: Tracker = import_module(f"grpo_nb.trackers.to_{name}").opened(about)
    return opened


TAKES_BACK = frozenset({"tensorboard"})
"""Trackers in which rows that a resume set aside are replaced by those that were trained instead."""


@dataclass
class Notes:
    """Progress of a mirror."""

    id: str
    steps: dict[str, int] = field(default_factory=lambda: {"sft": 0, "metrics": 0})
    evaluations: list[str] = field(default_factory=list)
    """A digest of each one."""

    @classmethod
    def read(cls, data: bytes, about: str) -> "Notes":
        """The notes in a file; none where they are damaged, or of another run."""
        try:
            found = from_json(data)
            steps = {log: int(found["steps"][log]) for log in ("sft", "metrics")}
            return cls(about, steps, [str(one) for one in found["evaluations"]]) if found["id"] == about else cls(about)
        except (ValueError, TypeError, KeyError, OverflowError):
            return cls(about)


class Mirror:
    """Mirror of one run to one tracker, with the thread that writes to it."""

    def __init__(self, run: Run, name: str) -> None:
        # a reader of its own: nothing is shared with the training
        self.run, self.name = Run(run.path, run.config), name
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._work, name=f"{THREAD}{name} {run.name}", daemon=True)
        self._folder = run.path / FOLDER
        self._file = self._folder / f"{name}.json"
        self._warned = False
        self._notes = Notes("")
        # now, and not when the thread comes to it: a log that was set back may be as long as before by then
        self._begins = {"sft": run.last_step("sft") or 0, "metrics": run.last_step() or 0}
        self._set_back = name not in TAKES_BACK
        """Whether rows that a resume set aside are no longer noted."""

    def report(self) -> None:
        """Log that the thread has not ended, where it has not."""
        if self.thread.is_alive():
            self.warn(TimeoutError(f"it has not taken everything within {END_SECONDS:g} s"))

    def warn(self, error: Exception) -> None:
        """Log, once, that the tracker fails."""
        if not self._warned:
            self._warned = True
            message = " ".join(redacted(f"{type(error).__name__}: {error}", known_secrets()).split())[:LONGEST_REASON]
            logger.warning(
                "run.trackers: %s fails (%s). Training continues, and its logs have every row; the mirror sends "
                "the missing rows once the tracker works again, at the latest at the next start. It logs "
                "no further failures",
                self.name,
                message,
            )

    def _work(self) -> None:
        while True:
            try:
                with self._alone() as alone:
                    if alone:
                        self._follow()
                return
            except Exception as error:
                self.warn(error)
            if self.ending.wait(RETRY_SECONDS):
                return

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Yields whether no other mirror writes to this tracker of this run; waits for one, with a last check at the
        end.
        """
        safe_open.refuse_linked(self._folder)
        self._folder.mkdir(exist_ok=True)
        fd = _opened_alone(self._folder / f"{self.name}.lock")
        try:
            ended = False
            while (state := flock(fd)) == "busy" and not ended:
                ended = self.ending.wait(POLL_SECONDS)
            yield state != "busy"
        finally:
            os.close(fd)

    def _follow(self) -> None:
        about = self._about()
        tracker = open_tracker(self.name, about)
        try:
            if tracker.fresh:
                self._notes = Notes(about.id)
            elif tracker.newest is not None:
                self._notes.steps.update(tracker.newest)
            readers = {log: self.run.follower(log, lambda: None) for log in LOGS}
            while True:
                last = self.ending.is_set()
                for log, reader in readers.items():
                    for rows in _batches(reader.read()):
                        self._send(tracker, log, rows)
                if last:
                    return
                self.ending.wait(POLL_SECONDS)
        finally:
            tracker.close()

    def _about(self) -> About:
        """The run, and how far its mirror is; noted at once: what a resume set aside must not count later."""
        config = self.run.config
        origin = f"{self.run.name}\n{self.run.started.isoformat()}\n{config.run.seed}"
        identity = hashlib.sha256(origin.encode("utf-8", "replace")).hexdigest()[:16]
        self._notes = Notes.read(self._noted(), identity)
        if not self._set_back:
            self._notes.steps = {log: min(step, self._begins[log]) for log, step in self._notes.steps.items()}
        self._note()
        self._set_back = True
        settings, steps = plain_settings(config), config.sft.steps
        return About(identity, self.run.name, self._folder / self.name, settings, steps, dict(self._notes.steps))

    def _noted(self) -> bytes:
        try:
            return safe_open.read(self._file, LARGEST)
        except FileNotFoundError:
            return b""

    def _note(self) -> None:
        notes, steps = self._notes, self._notes.steps
        kept = notes.evaluations[-MOST_EVALUATIONS:]
        write_atomically(self._file, to_json({"id": notes.id, "steps": steps, "evaluations": kept}) + b"\n")

    def _send(self, tracker: Tracker, log: Log, rows: Sequence[Row]) -> None:
        new = self._new_evaluations(rows) if log == "evaluations" else self._new_steps(log, rows)
        if points := [found for row in new if (found := point(log, row)).numbers]:
            tracker.log(points)
        if log == "evaluations":
            self._notes.evaluations += map(_digest, new)
        elif new:
            self._notes.steps[log] = new[-1]["step"]
        if new:
            self._note()

    def _new_steps(self, log: Log, rows: Sequence[Row]) -> list[Row]:
        newest, found = self._notes.steps[log], []
        for row in rows:
            if row["step"] > newest:
                newest = row["step"]
                found.append(row)
        return found

    def _new_evaluations(self, rows: Sequence[Row]) -> list[Row]:
        known, own = {*self._notes.evaluations}, [row for row in rows if row.get("mode") != QUICK]
        return list({digest: row for row in own if (digest := _digest(row)) not in known}.values())


def _opened_alone(path: Path) -> int:
    """A file of this run only: a snapshot by hard links shares it with its copy, which may be trained, too."""
    try:
        return safe_open.opened(path, os.O_RDWR | os.O_CREAT)
    except safe_open.Irregular:
        if not separate(path):
            raise
        return safe_open.opened(path, os.O_RDWR)


def _digest(row: Row) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == MOST_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def plain_settings(config: Config) -> dict[str, Value]:
    """The settings by dotted name, lists as JSON; whatever looks like a secret is struck, and home folders are `~`."""
    secrets = known_secrets()
    plain = {k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in config.flat().items()}
    return {k: redacted(v, secrets) if isinstance(v, str) else v for k, v in plain.items()}
