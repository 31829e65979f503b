"""The runs of a study, trained and evaluated in processes of their own: some at a time, on one GPU or shared out."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from grpo_nb import trackers
from grpo_nb.config import ConfigError
from grpo_nb.evaluation.compare import Stage, is_of, logged
from grpo_nb.judge import host_trust
from grpo_nb.printable import clean_logger, one_line
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage import safe_open
from grpo_nb.storage.vocabulary import RunState
from grpo_nb.sweeps.plan import Trial
from grpo_nb.sweeps.shared_sft import adopt, same_sft
from grpo_nb.training.sft import finished

logger = clean_logger(__name__)

STOP_SECONDS = 300.0
"""Seconds that a run has to end its step and save after a requested stop."""
TAIL_BYTES = 4000
LONGEST_REASON = 160
"""Characters that say why a run cannot be read."""
Command = list[str]
"""Arguments of `python -m grpo_nb`."""


def final(trial: Trial) -> Stage:
    """The stage that a trial is judged by."""
    return "latest" if trial.grpo else "sft"


def stages(trial: Trial) -> list[Stage]:
    """The stages that a trial evaluates: the model as loaded by one trial of a seed, each SFT by its first trial."""
    before: list[Stage] = ["base"] if trial.first else []
    if trial.config.sft.steps and trial.own_sft:
        before.append("sft")
    return list(dict.fromkeys([*before, final(trial)]))


def left(trial: Trial) -> list[Command]:
    """Commands that are still to be done for a trial, in order."""
    run = trial.run()
    path = str(trial.path)
    asked = [stage for stage in stages(trial) if run is None or not measured(run, trial, stage)]
    if not asked:  # its checkpoints may be deleted by now
        return []
    warm = bool(trial.config.sft.steps) and (run is None or not finished(run))
    learn = trial.grpo and (run is None or max(run.checkpoints.steps(), default=0) < trial.config.run.steps)
    evaluations = [["eval", path, "--stage", str(stage)] for stage in asked]
    return [*([["sft", path]] if warm else []), *([["train", path]] if learn else []), *evaluations]


def measured(run: Run, trial: Trial, stage: Stage) -> bool:
    """Whether a stage was evaluated, all objectives of it; the newest only counts at the last step."""
    rows = [row for row in logged(run, "test", "greedy") if is_of(row, stage)]
    if stage == "latest":
        rows = [row for row in rows if row["step"] >= trial.config.run.steps]
    return {row["objective"] for row in rows} >= {*trial.config.objectives}


def standing(trial: Trial) -> dict[str, Any]:
    """One row of `Study.status`; of a run that cannot be read, why."""
    goal, fixed = trial.config.run.steps if trial.grpo else 0, {"arm": trial.arm, "seed": trial.seed}
    try:
        run = trial.run()
    except RunError as error:
        found = {"state": RunState.UNREADABLE.value, "step": 0, "of": goal}
        return {**fixed, **found, "left": one_line(textwrap.shorten(str(error), LONGEST_REASON, placeholder=" ..."))}
    words = [command[0] if command[0] != "eval" else f"eval {command[3]}" for command in left(trial)]
    known = (
        {"state": "not begun", "step": 0}
        if run is None
        else {"state": run.status().state.value, "step": run.last_step() or 0}
    )
    return {**fixed, **known, "of": goal, "left": ", ".join(words)}


def train(study: Sequence[Trial], jobs: int, gpus: Sequence[int], arms: Collection[str]) -> None:
    """Do the remaining work of some arms; one of the trials that share an SFT trains it, and the others wait for it.

    Raises:
        ConfigError: fewer than one run at a time, a GPU is named twice, or a server was never confirmed here.
        RunError: a trial's folder holds another run; before any work.
    """
    slots, trials = Slots(places(jobs, gpus)), [trial for trial in study if trial.arm in arms]
    for trial in trials:  # making its run would confirm them
        host_trust.check(f"arm {trial.arm}", host_trust.servers_of(trial.config))
        trackers.check(trial.config)
    runs = [trial.made() for trial in trials]
    runs += [run for trial in study if trial.arm not in arms and (run := trial.readable())]  # their SFT may serve
    shared = [next(i for i, one in enumerate(trials) if same_sft(trial.config, one.config)) for trial in trials]
    turns = {first: threading.Lock() for first in shared}
    order = sorted(range(len(trials)), key=lambda i: shared[:i].count(shared[i]))  # no trial waits while it could train
    total = sum(len(left(trial)) for trial in trials)
    with tqdm(total=total, desc="parts of runs", disable=None if total else True) as bar, slots:
        slots.every([_work(trials[i], runs, slots, turns[shared[i]], bar.update) for i in order])


def places(jobs: int, gpus: Sequence[int]) -> list[str | None]:
    """Places for processes, one each: `jobs` on every GPU, all GPUs before the second process of one.

    Raises:
        ConfigError: fewer than one run at a time, or a GPU is named twice.
    """
    if jobs < 1 or len(set(gpus)) < len(gpus):
        raise ConfigError(f"jobs={jobs}, gpus={list(gpus)}; needs jobs of 1 or more, and each GPU once")
    return [*map(str, gpus)] * jobs if gpus else [None] * jobs


def _work(
    trial: Trial, runs: Sequence[Run], slots: "Slots", turn: threading.Lock, done: Callable[[], object]
) -> Callable[[], None]:
    """Function that runs a trial's remaining commands up to the first failure. `turn`: lock of trials with one SFT."""

    def work() -> None:
        with turn:
            run = trial.made()
            if trial.config.sft.steps and not finished(run) and left(trial):
                if not adopt(run, runs) and not slots.call(trial, ["sft", str(trial.path)]):
                    return
                done()
        for command in left(trial):
            if not slots.call(trial, command):
                return
            done()

    return work


class Slots:
    """Places for one process each; leaving the block early stops running trials, and waits until they are saved."""

    def __init__(self, given: Sequence[str | None]) -> None:
        self._free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for place in given:
            self._free.put(place)
        self._pool = ThreadPoolExecutor(len(given))
        self._threads = max(1, (os.cpu_count() or 1) // len(given))
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()
        self._starting = threading.Lock()
        """Held while a process starts, so that it is either registered for a stop or not started."""

    def __enter__(self) -> "Slots":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stop()
        self._pool.shutdown()

    def every(self, work: Sequence[Callable[[], None]]) -> None:
        """Do all work, as many at a time as there are places; the first error is raised once all have ended."""
        futures = [self._pool.submit(one) for one in work]
        wait(futures)
        for future in futures:
            future.result()

    def call(self, trial: Trial, command: Command) -> bool:
        """Run one command in a process of its own; returns whether it succeeded."""
        opened = safe_open.opened(_log(trial), os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # a folder may be anybody's
        with os.fdopen(opened, "ab") as output, self._place() as place:
            with self._starting:
                if self._stopped.is_set():
                    return False
                process = subprocess.Popen(
                    [sys.executable, "-m", "grpo_nb", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | self._environment(place),
                    start_new_session=True,  # an interrupt reaches this process, which requests a stop of each of those
                )
                self._running.add(process)
            try:
                status = process.wait()
            finally:
                self._running.discard(process)
        if status and not self._stopped.is_set():
            logger.warning("%s: %s ended with status %d: %s", trial.name, command[0], status, _last_line(_log(trial)))
        return status == 0

    def _environment(self, place: str | None) -> Mapping[str, str]:
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self._threads))}
        return threads if place is None else {**threads, "CUDA_VISIBLE_DEVICES": place}

    @contextlib.contextmanager
    def _place(self) -> Iterator[str | None]:
        place = self._free.get()
        try:
            yield place
        finally:
            self._free.put(place)

    def _stop(self) -> None:
        with self._starting:
            self._stopped.set()
        for process in [*self._running]:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        for process in [*self._running]:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _log(trial: Trial) -> Path:
    return trial.path.with_name(f"{trial.name}.log")


def _last_line(path: Path) -> str:
    with os.fdopen(safe_open.opened(path), "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
