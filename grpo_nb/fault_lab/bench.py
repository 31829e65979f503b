"""The lab in a notebook: a fault is chosen from a list, and its run trains in a thread while the kernel stays free."""

import asyncio
import threading
import time
from contextlib import ExitStack
from typing import Any

import ipywidgets as w

from grpo_nb.fault_lab.catalogue import ALL, FAULTS
from grpo_nb.fault_lab.lab import Lab, Trial
from grpo_nb.fault_lab.records import CLEAN, Fault
from grpo_nb.jupyter.session import Session, Summary
from grpo_nb.jupyter.start import start
from grpo_nb.report.tables import Table, findings
from grpo_nb.run.run import RunError

POLL_SECONDS = 0.05


class Bench:
    """A bench for one trial at a time: two faults at once would be blamed for each other.

    Shown in a cell it is a list of faults, a button that trains with the chosen one, the live view of that run, and the
    doctor's findings at the end.
    """

    def __init__(self, lab: Lab, chosen: str = CLEAN.id) -> None:
        self._lab = lab
        self.trial: Trial | None = None
        self.session: Session | None = None
        self._cleaner: threading.Thread | None = None
        """Thread that removes the fault once the training has ended."""
        options = [(f"{fault.id}: {fault.what}", fault.id) for fault in ALL.values()]
        self.menu = w.Dropdown(options=options, value=chosen, description="fault", layout=w.Layout(width="640px"))
        self.button = w.Button(description="Train with it", tooltip="A few steps with the chosen fault")
        self.button.on_click(lambda _: self._clicked())
        self.named = w.HTML()
        self.panel = w.VBox([w.HBox([self.menu, self.button]), self.named])

    @property
    def fault(self) -> Fault:
        """The chosen fault."""
        return ALL[self.menu.value]

    def start(self, fault: str | None = None, seed: int = 0, steps: int | None = None) -> Session:
        """Put the fault into this kernel and train its run in a thread; the fault leaves when the training ends.

        Args:
            fault: by default the chosen one.
            steps: fewer than the fault's own.

        Raises:
            RunError: another trial trains here.
        """
        if self.session is not None and self.session.live:
            raise RunError(f"{self.session.run.name} still trains with its fault; wait for it: await bench.wait()")
        if self._cleaner is not None:
            self._cleaner.join()
        self.trial = trial = self._lab.trial(ALL[fault or self.menu.value], seed)
        with ExitStack() as place:
            place.enter_context(trial.injected())
            self.session = begun = start(
                trial.run, tasks=trial.tasks, rewards=trial.rewards, stage=trial.fault.stage, steps=steps
            )
            self._cleaner = threading.Thread(target=self._clean_up, args=(begun, place.pop_all()), daemon=True)
        self._cleaner.start()
        return begun

    async def wait(self) -> Summary:
        """Wait until the trial ends; returns one line about its end, by its last step or by an error."""
        assert self.session is not None and self.trial is not None
        try:
            await self.session.wait()
        except Exception as error:
            self.trial.error = error
        while self._cleaner is not None and self._cleaner.is_alive():
            await asyncio.sleep(POLL_SECONDS)
        return self.session.summary()

    def findings(self) -> Table:
        """Findings of the doctor on the newest trial, by rule, worst first, without notes except the fault's own."""
        assert self.trial is not None
        own = self.trial.fault.caught_by
        found = [f for f in self.trial.findings() if f.severity != "info" or f.rule in own]
        table = findings(found)  # a stable order: the doctor's is by severity too
        table.frame.insert(0, "rule", [finding.rule for finding in found])
        return table

    def _clean_up(self, trained: Session, fault: ExitStack) -> None:
        while trained.live:
            time.sleep(POLL_SECONDS)
        fault.close()
        self.named.value = self.findings()._repr_html_()

    def _clicked(self) -> None:
        self.named.value = ""
        try:
            shown = self.start().dashboard().widget
        except RunError as error:
            self.named.value = Table(findings([]).frame, str(error))._repr_html_()
            return
        self.panel.children = (self.panel.children[0], shown, self.named)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = dict(self.panel._repr_mimebundle_(**options) or {})
        return bundle | {"text/plain": f"the fault lab, {len(FAULTS)} faults; chosen: {self.fault.id}"}
