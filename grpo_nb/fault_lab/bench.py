"""The lab in a notebook: a fault is chosen from a list, and its run trains in a thread while the kernel stays free."""

import asyncio
import threading
import time
from contextlib import ExitStack

import ipywidgets as w

from grpo_nb.fault_lab.catalogue import FAULTS
from grpo_nb.fault_lab.lab import Lab, Trial
from grpo_nb.fault_lab.records import CLEAN
from grpo_nb.jupyter.session import Session, Summary
from grpo_nb.jupyter.start import start
from grpo_nb.run.run import RunError

POLL_SECONDS = 0.05


def menu(chosen: str) -> w.Dropdown:
    """A list of the faults; `value` is the id of the chosen one."""
    options = [(f"{fault.id}: {fault.what}", fault.id) for fault in (*FAULTS.values(), CLEAN)]
    return w.Dropdown(options=options, value=chosen, description="fault", layout=w.Layout(width="640px"))


class Bench:
    """One trial at a time: a second fault beside the first would be blamed for what both do."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.trial: Trial | None = None
        self.session: Session | None = None
        self._cleaner: threading.Thread | None = None
        """Takes the fault out once the training has ended."""

    def start(self, fault: str, seed: int = 0, steps: int | None = None) -> Session:
        """Put the fault into this kernel and train its run in a thread; the fault leaves when the training ends.

        Args:
            steps: fewer than the fault's own.

        Raises:
            RunError: another trial trains here.
        """
        if self.session is not None and self.session.live:
            raise RunError(f"{self.session.run.name} still trains with its fault; wait for it: await bench.wait()")
        if self._cleaner is not None:
            self._cleaner.join()
        self.trial = trial = self._lab.trial({**FAULTS, CLEAN.id: CLEAN}[fault], seed)
        place = ExitStack()
        with place:
            place.enter_context(trial.injected())
            self.session = begun = start(
                trial.run, tasks=trial.tasks, rewards=trial.rewards, stage=trial.fault.stage, steps=steps
            )
            self._cleaner = threading.Thread(target=_clean_up, args=(begun, place.pop_all()), daemon=True)
        self._cleaner.start()
        return begun

    async def wait(self) -> Summary:
        """Wait until the trial ends; one line that says how, whether by its last step or by an error."""
        assert self.session is not None and self.trial is not None
        try:
            await self.session.wait()
        except Exception as error:
            self.trial.error = error
        while self._cleaner is not None and self._cleaner.is_alive():
            await asyncio.sleep(POLL_SECONDS)
        return self.session.summary()


def _clean_up(trained: Session, fault: ExitStack) -> None:
    while trained.live:
        time.sleep(POLL_SECONDS)
    fault.close()
