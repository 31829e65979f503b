"""The run directory: the complete state of a run in files, shared by trainer, dashboard, doctor and other machines.

    runs/<name>/
      config.json        the settings; never changed once something was trained
      knobs.json         live values (see `knobs`)
      metrics.jsonl      one row a GRPO step            sft.jsonl          one row an SFT step
      samples.jsonl      some completions a step        evaluations.jsonl  held-out results
      events.jsonl       knob changes, checkpoints, resumes, findings
      checkpoints/ sft/  weights and state by step (see `checkpoints`)
      judge.jsonl        an LLM judge's verdict on each text, and its cost
      dependencies.json  content digests of data, weights and more; the run's date (see `dependencies`)
      lock               owner that trains (see `lock`)

`status` reads these event kinds: start, resume (training from there on), paused, stepping (for one step of a
pause), stopped, done, failed, each with the `goal` of that training in steps; and sft_paused.
Log a step's rows before saving its checkpoint: saving syncs the logs, so that a checkpoint is never ahead of them.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from grpo_nb import presets
from grpo_nb.config import Config, check_names
from grpo_nb.metrics import keys
from grpo_nb.printable import clean_logger
from grpo_nb.run import dependencies_file, places, settings
from grpo_nb.run.checkpoints import Checkpoints
from grpo_nb.run.knobs import Knobs, check_start
from grpo_nb.run.lock import LOCK, RunLock
from grpo_nb.run.places import CONFIG
from grpo_nb.run.status import PAUSES, Milestones, modified, standing_of
from grpo_nb.run.status import RunStatus as RunStatus
from grpo_nb.storage import schema
from grpo_nb.storage.files import RunError as RunError
from grpo_nb.storage.files import clear_errors
from grpo_nb.storage.follower import Follower
from grpo_nb.storage.journal import Journal, Row
from grpo_nb.storage.lock import exclusive
from grpo_nb.storage.vocabulary import Command, RunState

if TYPE_CHECKING:
    from pandas import DataFrame

    from grpo_nb.storage.index import LogRows
else:  # half a second to import, and needed for tables only
    DataFrame = LogRows = Any

logger = clean_logger(__name__)
phases = clean_logger(f"{__name__}.phases")
"""Logger of the work of a training before its first step."""

Log = Literal["metrics", "samples", "events", "sft", "evaluations"]
QUOTING = ("error", "traceback", "reason")
"""Fields of events that quote an error."""


class Run:
    """A run directory. Opening it takes no lock and writes nothing, so any number of processes may read it."""

    def __init__(self, path: Path, config: Config) -> None:
        path = Path(os.path.abspath(path))  # a later change of the working directory means nothing to it
        self.path = path
        self.config = config
        self.knobs = Knobs(path / "knobs.json", config)
        self.checkpoints = Checkpoints(path / "checkpoints", before_save=self._sync, fence=self.fence)
        self.sft_checkpoints = Checkpoints(path / "sft", before_save=self._sync, fence=self.fence)
        self._lock: RunLock | None = None
        """The lock that the newest training of this object acquired."""
        self._logs: dict[Log, Journal] = {
            # dashboards read these every second; samples are large and read rarely
            log: Journal(path / f"{log}.jsonl", remember=log != "samples", trains=self.trains_here)
            for log in get_args(Log)
        }
        self._standing = standing_of(path)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def started(self) -> datetime:
        """Time when it was made, which never changes; its chat template gets this date.

        For a run of a version that kept none, the time of its first event, else of its settings.
        """
        if (kept := dependencies_file.read(self.path)) is not None:
            return kept.started
        times = (event.get("time") for event in self.oldest_first("events"))
        first = next((time for time in times if isinstance(time, int | float)), None)
        return datetime.fromtimestamp(modified(self.path / CONFIG) or 0.0 if first is None else first).replace(
            microsecond=0
        )

    @property
    def shown(self) -> str:
        """The path as people read and type it: relative where it is below the working directory."""
        relative = os.path.relpath(self.path)
        return str(self.path) if relative.startswith(os.pardir) else relative

    @classmethod
    def create(cls, path: str | Path, config: Config) -> "Run":
        """A new run in `path`, made with its parents; its settings are frozen once it has trained.

        Raises:
            ConfigError: a knob would start outside its bounds; nothing is written.
            RunError: a run or its remains exist there, or the folder cannot be written.
        """
        path = places.as_path(path)
        run = cls(path, config)
        check_start(config)
        with clear_errors("create the run", path):
            path.mkdir(parents=True, exist_ok=True)
        with exclusive(path / CONFIG):
            if (path / CONFIG).exists():
                raise RunError(
                    f"{path} holds a run already; open it (`Run.open`, or `Run.open_or_create` to change the settings "
                    "of an untrained run), or choose another folder"
                )
            if remains := [name for name in ("metrics.jsonl", "checkpoints", "sft") if (path / name).exists()]:
                raise RunError(
                    f"{path} has {', '.join(remains)} but no {CONFIG}; restore {CONFIG}, or choose another folder"
                )
            run.knobs.create()
            dependencies_file.begin(path)
            # last, because this file makes the folder a run: killed before it, nothing is half there
            settings.write(path, config)
        _confirm(config)
        return run

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open the run of that path or name, found by `places.locate`, to train or to watch.

        Raises:
            RunError: it does not exist, or its config.json is broken; the message has the place and the error.
        """
        folder = places.locate(path) or places.as_path(path)
        return cls(folder, settings.read(folder))

    @classmethod
    def of(cls, run: "Run | str | Path") -> "Run":
        """The run itself, or the one of that path or name, as `open`."""
        return run if isinstance(run, Run) else cls.open(run)

    @classmethod
    def open_or_create(
        cls,
        path: str | Path,
        config: Config | None = None,
        *,
        changes: Mapping[str, Any] | None = None,
        steps: int | None = None,
    ) -> "Run":
        """Open the run in `path`, or create it; an existing run must have the requested settings.

        Until something was trained or measured, other settings replace the run's;
        the log and a warning list them.

        Args:
            path: the run directory.
            config: all settings, e.g. from a preset. None: a new run is `presets.demo()`, an old one keeps its own.
            changes: single settings by dotted name, on top of `config`.
            steps: the total to reach. A new run takes it as its `run.steps`; to an old one it is no
                contradiction, and neither is `config`'s own `run.steps`: a run may always go further.

        Raises:
            RunError: the run there has done work with other settings; each is listed with both values.
            RunLocked: other settings for a run that is being trained just now.
            ConfigError: an unknown name in `changes`, or a value that does not validate.
        """
        path, changes = places.locate(path) or places.as_path(path), dict(changes or {})
        check_names(changes)
        with_steps = changes if steps is None else {**changes, "run.steps": steps}
        if not (path / CONFIG).exists():
            try:
                return cls.create(path, (config or presets.demo()).replace(**with_steps))
            except RunError:
                if not (path / CONFIG).exists():  # else another process made it meanwhile
                    raise
        run = cls.open(path)
        wanted = config or run.config
        differences = settings.contradictions(run.config, wanted.replace(**changes), changes)
        if not differences:
            return run
        if run.has_work():
            settings.refuse_contradiction(path, differences)
        return run._corrected(wanted.replace(**with_steps))

    def has_work(self) -> bool:
        """Whether the run has results of its settings: of SFT, a GRPO step, a checkpoint, an evaluation."""
        saved = self.checkpoints.steps() or self.sft_checkpoints.steps()
        return bool(saved or self.last_step() is not None or next(self.newest_first("evaluations"), None))

    def check_settings(self) -> None:
        """Make sure that config.json is still as opened: it may have been corrected elsewhere meanwhile.

        Raises:
            RunError: it is not; each setting is listed with both values.
        """
        settings.refuse_stale(self.path, self.config.differences(settings.read(self.path)))

    def lock(self) -> RunLock:
        """The right to train this run: `with run.lock(): ...`. From then on everything written is fenced by it."""
        return RunLock(self.path / LOCK, taken=self._fenced_by)

    def fence(self) -> None:
        """Make sure that the training of this object still owns the run; does nothing without a training.

        Every log and checkpoint calls it before it writes, since a machine that was asleep may have lost its run.

        Raises:
            RunLocked: another trainer took the run over, or its lock was released; nothing may be written.
        """
        if self.trains_here() and self._lock is not None:
            self._lock.check()

    def trains_here(self) -> bool:
        """Whether this object holds a training that is running."""
        return self._lock is not None and self._lock.fences

    def doing(self, what: str) -> None:
        """Publish the work of this object's training before its next step, in its lock and in this process's log.
        Empty: it trains. It is not stored.
        """
        if what:
            phases.info("%s", what)
        if self.trains_here() and self._lock is not None:
            self._lock.note(what)

    def _fenced_by(self, lock: RunLock) -> None:
        self._lock = lock

    def log_metrics(self, row: Mapping[str, Any]) -> None:
        """Append one GRPO step's row: a `step`, and keys of `metrics.keys` alone, else ValueError."""
        self._log("metrics", row)

    def log_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append completions of one step, each with its `step`."""
        self._log("samples", *rows)

    def log_event(self, kind: str, **data: Any) -> None:
        """Append an event, with the time in seconds since 1970.

        Keys are struck out of errors, which may quote anything that the failing code had.
        """
        quoted = {name: text for name in QUOTING if isinstance(text := data.get(name), str)}
        if quoted:
            from grpo_nb.judge.redaction import known_secrets  # slow to import, and few events are errors
            from grpo_nb.judge.secrets import strike

            quoted = {name: strike(text, known_secrets()) for name, text in quoted.items()}
        self._log("events", {"time": time.time(), "kind": kind, **data, **quoted})

    def log_sft(self, row: Mapping[str, Any]) -> None:
        """Append one SFT step's row, as `log_metrics`."""
        self._log("sft", row)

    def log_evaluation(self, row: Mapping[str, Any]) -> None:
        """Append one evaluation."""
        self._log("evaluations", row)

    def rows(self, log: Log) -> list[Row]:
        """The rows of one log as they were written, oldest first; invalid rows (`schema`) are left out."""
        return self._logs[log].read()

    def stored(self, log: Log) -> LogRows:
        """The rows of one log, parsed on demand; long logs are read by column."""
        return self._logs[log].stored()

    def oldest_first(self, log: Log) -> Iterator[Row]:
        """The rows of one log, read one by one: none of them stays in memory."""
        return self._logs[log].forwards()

    def follower(self, log: Log, restarted: Callable[[], None]) -> Follower:
        """A reader that gives the rows of one log once, as they come; `restarted`: see `Follower`."""
        return Follower(self._logs[log], restarted)

    def newest_first(self, log: Log) -> Iterator[Row]:
        """The rows of one log backwards, read from the end of the file only as far as needed."""
        return self._logs[log].backwards()

    def metric_rows(self) -> list[Row]:
        """The metrics' rows as they were written, oldest first."""
        return self.rows("metrics")

    def metrics(self) -> DataFrame:
        """Table of metrics: one row per GRPO step, one column per key."""
        return self._table("metrics", "step")

    def samples(self) -> DataFrame:
        """Table of samples: one row per logged completion."""
        return self._table("samples", "step")

    def events(self) -> DataFrame:
        """Table of events: one row each, with `time`, `kind`, and the fields of its kind."""
        return self._table("events", "time", "kind")

    def sft_metrics(self) -> DataFrame:
        """Table of SFT metrics: one row per SFT step."""
        return self._table("sft", "step")

    def evaluations(self) -> DataFrame:
        """Table of evaluations: one row each."""
        return self._table("evaluations")

    def last_step(self, log: Literal["metrics", "sft"] = "metrics") -> int | None:
        """The newest step in a log, read from the end of the file and only where it is new; None before the first."""
        return self._standing.steps[log].read()

    def goal(self) -> int:
        """GRPO steps in all: the configuration's, or the newest start's request or result if that is more."""
        return self._goal(self.last_step() or 0, self.milestone())

    def milestone(self) -> Row:
        """Newest event that gives GRPO's state (see `status`); empty without one."""
        return self._standing.milestones.read().newest

    def rewind(self, step: int) -> dict[str, int]:
        """Go back to `step`: rows and checkpoints past it are set aside, not deleted; returns the rows moved, by log.

        Rows go to `*.discarded.jsonl`, checkpoints to `discarded-*`; events keep everything.
        A kill at any moment loses nothing, and rewinding again does the rest. Needs the lock.
        """
        self.checkpoints.discard_after(step)  # first: no checkpoint may be ahead of the log
        return {log: self._discard_after(log, step) for log in ("metrics", "samples", "evaluations")}

    def rewind_sft(self, step: int) -> int:
        """Go back to `step` of SFT: its later rows go to `sft.discarded.jsonl`; returns their number."""
        self.sft_checkpoints.discard_after(step)
        return self._discard_after("sft", step)

    def status(self) -> RunStatus:
        """Status of the run; cheap enough to read every second, however long its logs are."""
        step, seen = self.last_step() or 0, self._standing.milestones.read()
        owner, alive = RunLock(self.path / LOCK).look()
        state = self._active(seen) if alive else self._ended(step, seen, died=owner is not None)
        sft = None if step or seen.newest else self._sft(state)
        return RunStatus(state, step, self._goal(step, seen.newest), owner, self._updated(), sft)

    def __repr__(self) -> str:
        status = self.status()
        return f"Run({self.shown!r}: {status})"

    def _corrected(self, config: Config) -> "Run":
        """The run with other settings, which replace those that have no results yet."""
        check_start(config)
        differences = self.config.differences(config)
        run = Run(self.path, config)
        with self.lock(), exclusive(self.path / CONFIG):
            if self.has_work():  # a trainer may have come and gone since the first look
                settings.refuse_contradiction(self.path, differences)
            run.knobs.snapshot()
            run.knobs.reset(by="config")
            # last: killed before it, the settings still differ, and the next request for them does the rest
            settings.write(self.path, config)
            _confirm(config, known=self.config)
            run.log_event("config_changed", step=0, differences={k: list(pair) for k, pair in differences.items()})
        logger.warning(
            "nothing was trained yet in %s, so its settings were changed:\n%s", self.path, settings.listed(differences)
        )
        return run

    def _goal(self, step: int, milestone: Row) -> int:
        return max(self.config.run.steps, step, milestone.get("goal") or 0)

    def _active(self, seen: Milestones) -> RunState:
        # a requested pause is not yet one, and a request to continue ends it
        paused = seen.pause.get("kind") in PAUSES and self.knobs.command is Command.PAUSE
        return RunState.PAUSED if paused else RunState.RUNNING

    def _ended(self, step: int, seen: Milestones, died: bool) -> RunState:
        milestone = seen.newest.get("kind")
        if milestone == "failed":
            return RunState.FAILED
        if milestone == "done" or (milestone is None and step > 0):
            return RunState.DONE if step >= self.config.run.steps else RunState.STOPPED
        if died and milestone != "stopped":
            return RunState.DEAD
        return RunState.NEW if milestone is None else RunState.STOPPED

    def _sft(self, state: RunState) -> tuple[int, int] | None:
        """Steps done and total of SFT, if it has begun. A trainer past its last step loads what GRPO needs."""
        step, steps = self.last_step("sft") or 0, self.config.sft.steps
        return (step, steps) if 0 < step < steps or (step and state is RunState.NEW) else None

    def _updated(self) -> float | None:
        times = [modified(self.path / f"{log}.jsonl") for log in ("metrics", "sft", "events")]
        return max((t for t in times if t is not None), default=None)

    def _log(self, log: Log, *rows: Mapping[str, Any]) -> None:
        for row in rows if log in schema.STEPWISE else ():
            keys.check(row)
        self.fence()
        self._logs[log].append(*rows)
        for name, journal in self._logs.items():
            if journal.separated:
                journal.separated = False
                self.log_event("log_separated", log=name)

    def _table(self, log: Log, *columns: str) -> DataFrame:
        from grpo_nb.storage.index.frames import frame

        rows = self.stored(log)
        return frame(rows if log in schema.STEPWISE else [*rows], *columns)

    def _discard_after(self, log: Log, step: int) -> int:
        discarded = Journal(self.path / f"{log}.discarded.jsonl", trains=self.trains_here)
        return self._logs[log].move(lambda row: isinstance(row.get("step"), int) and row["step"] > step, discarded)

    def _sync(self) -> None:
        for journal in self._logs.values():
            journal.sync()


def _confirm(config: Config, known: Config | None = None) -> None:
    """Confirm the servers of a run's configuration on this machine, except those of `known`."""
    if (
        config.run.trackers
        or config.rollout.url
        or any(objective.judge is not None for objective in config.objectives.values())
    ):
        from grpo_nb.judge import host_trust

        host_trust.confirm(host_trust.pairs_of(config) - (host_trust.pairs_of(known) if known else set()))
