"""The sample browser: the model's completions by step, objective and group, best answer first."""

import threading
from typing import Any

import ipywidgets as w

from grpo_nb.report import rollouts
from grpo_nb.report.markup import html
from grpo_nb.report.rollouts import Group
from grpo_nb.run.run import Run

LATEST = 0
EMPTY = str(html("note", text="no samples are logged yet; each step writes the first answers of each objective"))


class SampleBrowser:
    """Choosers over one page of text; `refresh` adds new rows."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._groups: list[Group] = []
        self._read: object = None
        self._own = threading.local()  # set while this thread moves the choosers itself
        self.step = self._chooser("step", [("latest", LATEST)])
        self.objective = self._chooser("objective", list(run.config.objectives))
        self.group = self._chooser("group", [])
        self.colouring = self._chooser("colour by", ["log-ratio", "log-prob", "advantage", "plain"])
        self.text = w.HTML(EMPTY, layout=w.Layout(width="100%"))
        for chooser in (self.step, self.objective, self.group, self.colouring):
            chooser.observe(self._chosen, names="value")
        bar = w.HBox([self.step, self.objective, self.group, self.colouring], layout=w.Layout(flex_flow="row wrap"))
        self.widget = w.VBox([bar, self.text])

    def refresh(self) -> None:
        """Read and show new rows; a step that was chosen by hand stays chosen."""
        newest = _signature(self._run)
        if newest != self._read:
            self._groups, self._read = rollouts.groups(self._run.newest_first("samples")), newest
            self._show()

    def _show(self) -> None:
        self._own.moving = True
        try:
            steps = list(dict.fromkeys(group.step for group in self._groups))
            _offer(self.step, [("latest", LATEST), *((str(step), step) for step in steps)])
            mine = self._of_choice()
            _offer(self.group, [(group.example, n) for n, group in enumerate(mine)])
        finally:
            self._own.moving = False
        chosen = mine[self.group.value or 0] if mine else None
        page = str(rollouts.page(chosen, self.colouring.value)) if chosen else EMPTY
        if page != self.text.value:
            self.text.value = page

    def _of_choice(self) -> list[Group]:
        mine = [group for group in self._groups if group.objective == self.objective.value]
        step = self.step.value or max((group.step for group in mine), default=LATEST)
        return [group for group in mine if group.step == step]

    def _chosen(self, _: Any) -> None:
        if not getattr(self._own, "moving", False):
            self._show()

    def _chooser(self, name: str, options: list[Any]) -> w.Dropdown:
        layout = w.Layout(width="210px")
        return w.Dropdown(
            options=options, description=name, tooltip=name, style={"description_width": "64px"}, layout=layout
        )


def _offer(chooser: w.Dropdown, options: list[tuple[str, int]]) -> None:
    """New options with the old choice, where it still is one; else the first."""
    if list(chooser.options) == options:
        return
    before = chooser.value
    chooser.options = options
    if options:
        chooser.value = before if before in [value for _, value in options] else options[0][1]


def _signature(run: Run) -> object:
    try:
        stat = (run.path / "samples.jsonl").stat()
    except OSError:
        return ()
    return stat.st_mtime_ns, stat.st_size
