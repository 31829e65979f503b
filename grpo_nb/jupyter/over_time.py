"""One prompt over time: choosers and filters over the answers that a run's log has of it."""

import threading
from pathlib import Path
from typing import Any

import ipywidgets as w

from grpo_nb.printable import cut
from grpo_nb.report import over_time
from grpo_nb.report.markup import html
from grpo_nb.report.over_time import Wanted
from grpo_nb.run.run import Run
from grpo_nb.storage.journal import Row

CLASS = "grpo-nb-over-time"
"""CSS class of the widget."""
EMPTY = (
    "no prompt was answered at two steps yet; with run.quick_eval_every, the first held-out prompts of each objective "
    "are answered every so many steps"
)


class OverTime:
    """A prompt's answers from the first step to the newest, coloured by token; filtered by label, length and reward."""

    def __init__(self, run: Run | str | Path) -> None:
        self.run = Run.of(run)
        self._rows: list[Row] = []
        self._own = threading.local()  # set while this thread moves the choosers itself
        wide = w.Layout(width="420px")
        self.prompt = w.Dropdown(description="prompt", layout=wide)
        self.colouring = w.Dropdown(
            options=["log-prob", "log-ratio", "advantage", "plain"],
            description="colour by",
            layout=w.Layout(width="210px"),
        )
        self.labels = w.SelectMultiple(description="labels", rows=3, tooltip="none chosen: all", layout=wide)
        self.length = w.IntRangeSlider(description="tokens", min=0, max=1, value=(0, 1), layout=wide)
        self.reward = w.FloatRangeSlider(
            description="reward", min=0, max=1, value=(0, 1), step=0.01, readout_format=".2f", layout=wide
        )
        self.again = w.Button(description="Read again", icon="refresh", tooltip="read the log of the run")
        self.text = w.HTML(layout=w.Layout(width="100%"))
        row = w.Layout(flex_flow="row wrap")
        self.widget = w.VBox(
            [
                w.HBox([self.prompt, self.colouring, self.again], layout=row),
                w.HBox([self.labels, w.VBox([self.length, self.reward])], layout=row),
                self.text,
            ]
        )
        self.widget.add_class(CLASS)
        self.prompt.observe(self._chosen, names="value")
        for control in (self.colouring, self.labels, self.length, self.reward):
            control.observe(self._filtered, names="value")
        self.again.on_click(lambda _: self.refresh())
        self.refresh()

    def refresh(self) -> None:
        """Read the log; the prompt and the filters stay as they are where they can."""
        found = [(cut(str(one)), (one.objective, one.example)) for one in over_time.watched(self.run)]
        before = self.prompt.value
        self._own.moving = True
        try:
            self.prompt.options = found
            if found:
                self.prompt.value = before if before in [value for _, value in found] else found[0][1]
        finally:
            self._own.moving = False
        self._read()

    def wanted(self) -> Wanted:
        """The filters as they stand; one at both of its ends filters nothing, not even what has no number."""
        return Wanted(
            frozenset(self.labels.value) if self.labels.value else None,
            self.length.value if self.length.value != (self.length.min, self.length.max) else None,
            self.reward.value if self.reward.value != (self.reward.min, self.reward.max) else None,
        )

    def _chosen(self, _: Any) -> None:
        if not getattr(self._own, "moving", False):
            self._read()

    def _filtered(self, _: Any) -> None:
        if not getattr(self._own, "moving", False):
            self._show()

    def _read(self) -> None:
        self._rows = over_time.answers(self.run, *self.prompt.value) if self.prompt.value else []
        self._own.moving = True
        try:
            self.labels.options = [(cut(label) or "(none)", label) for label in over_time.labels(self._rows)]
            _span(self.length, [row.get("tokens") for row in self._rows])
            _span(self.reward, [row.get("reward") for row in self._rows])
        finally:
            self._own.moving = False
        self._show()

    def _show(self) -> None:
        if not self._rows:
            self.text.value = str(html("note", text=EMPTY))
            return
        self.text.value = str(over_time.page(self._rows, self.wanted(), self.colouring.value))

    def _ipython_display_(self) -> None:
        from IPython.display import display

        from grpo_nb.jupyter.without_kernel import Words

        bundle = dict(self.widget._repr_mimebundle_() or {}) | {"text/plain": repr(self)}
        display(bundle, raw=True)  # type: ignore[no-untyped-call]
        Words(f"{self!r}. To filter them, run this cell again.", CLASS)

    def __repr__(self) -> str:
        return f"answers of {self.run.name} over time: {len(self.prompt.options)} prompts"


def _span(slider: Any, values: list[Any]) -> None:
    """The slider from the lowest to the highest of these numbers, open at both ends."""
    known = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e9]
    low, high = (min(known), max(known)) if known else (0, 1)
    high = high if high > low else low + 1
    slider.min, slider.max = min(slider.min, low), max(slider.max, high)  # never crossing on the way
    slider.min, slider.max = low, high
    slider.value = (low, high)
