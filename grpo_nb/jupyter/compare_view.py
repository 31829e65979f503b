"""The project's runs with a check-box each: those that are checked share one set of plots."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets as w

from grpo_nb import plots
from grpo_nb.jupyter.controls import LITERAL
from grpo_nb.plots.overlay import MOST_RUNS, looks
from grpo_nb.printable import clean_logger, cut, one_line
from grpo_nb.report.markup import html
from grpo_nb.report.several_runs import several
from grpo_nb.run.listing import list_runs
from grpo_nb.run.places import root
from grpo_nb.run.run import Run
from grpo_nb.storage.vocabulary import RunState

logger = clean_logger(__name__)

CLASS = "grpo-nb-runs"
"""CSS class of the widget."""
CHECKED = 3
"""Runs that are checked at first, the last changed ones."""


class RunsView:
    """Check runs to lay their curves over each other; below are the settings that differ, and each run's status.

    A run keeps its colour whatever else is checked. `refresh` reads the logs again.
    """

    def __init__(self, folder: str | Path | None = None, also: Sequence[Run | str | Path] = ()) -> None:
        """
        Args:
            folder: of runs; None: the project's.
            also: runs that are elsewhere.
        """
        listed = list_runs(root() / "runs" if folder is None else folder)
        paths = [*(Run.of(run).path for run in also), *(s.path for s in listed if s.state is not RunState.UNREADABLE)]
        self.paths = [*dict.fromkeys(path.resolve() for path in paths)][:MOST_RUNS]
        self.left_out = len({*map(Path.resolve, paths)}) - len(self.paths) + len(listed)
        self.left_out -= sum(s.state is not RunState.UNREADABLE for s in listed)
        self._looks = looks([str(path) for path in self.paths])
        self.boxes = {path: self._box(path, n < max(CHECKED, len(also))) for n, path in enumerate(self.paths)}
        self.again = w.Button(description="Read again", icon="refresh", tooltip="read the logs of the checked runs")
        self.picture = w.Image(format="png", layout=w.Layout(width="100%", max_width="1260px"))
        self.tables, self.message = w.HTML(), w.HTML()
        chosen = w.HBox([*self.boxes.values(), self.again], layout=w.Layout(flex_flow="row wrap"))
        self.widget = w.VBox([chosen, self.message, self.picture, self.tables])
        self.widget.add_class(CLASS)
        self.again.on_click(lambda _: self.refresh())
        self.refresh()

    @property
    def checked(self) -> list[Path]:
        """Folders of the runs that are shown."""
        return [path for path, box in self.boxes.items() if box.value]

    def refresh(self) -> None:
        """Read and draw the checked runs."""
        try:
            self._draw()
        except Exception as error:  # whatever one run contains, the view stays
            logger.exception("the checked runs could not be drawn")
            self._say(f"the checked runs could not be drawn: {type(error).__name__}: {error}")

    def _draw(self) -> None:
        chosen = self.checked
        self._say(self._words())
        self.picture.layout.display = None if chosen else "none"
        if not chosen:
            self.tables.value = ""
            return
        found = several(chosen)
        own = {name: self._looks[str(run.path.resolve())] for name, run in found.runs.items()}
        figure = replace(found, looks=own).figure
        self.picture.value = plots.to_png(figure)  # in full: few colours would blur shades of the runs
        self.picture.alt = repr(figure)
        self.tables.value = str(html("still", text=None, inside=[table._repr_html_() for table in found.tables()]))

    def _words(self) -> str:
        if not self.paths:
            return "no runs here yet"
        said = [] if self.checked else ["check a run to see its curves"]
        if self.left_out > 0:
            said.append(f"{self.left_out} runs are not listed: unreadable, or beyond the {MOST_RUNS} last changed")
        return "; ".join(said)

    def _say(self, text: str) -> None:
        self.message.value = str(html("note", text=text)) if text else ""

    def _box(self, path: Path, value: bool) -> w.Checkbox:
        colour, _ = self._looks[str(path)]
        name = one_line(path.name).translate(LITERAL)
        box = w.Checkbox(value=value, description=cut(name), indent=False, tooltip=cut(str(path)))
        box.layout = w.Layout(width="auto", margin="0 18px 0 0", border_left=f"4px solid {colour}", padding="0 0 0 6px")
        box.observe(self._changed, names="value")
        return box

    def _changed(self, _: Mapping[str, Any]) -> None:
        self.refresh()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        from grpo_nb.jupyter.without_kernel import Words

        bundle = dict(self.widget._repr_mimebundle_() or {}) | {"text/plain": repr(self)}
        display(bundle, raw=True)  # type: ignore[no-untyped-call]
        Words(f"{self!r}. To compare them, run this cell again.", CLASS)

    def __repr__(self) -> str:
        names = ", ".join(one_line(path.name) for path in self.checked)
        return f"{len(self.paths)} runs to compare, shown: {names or 'none'}"
