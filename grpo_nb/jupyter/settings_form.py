"""A form of all settings: search, edit, see what is wrong and what it needs; it gives the changes and makes no run."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ipywidgets as w

from grpo_nb.config import Config, ConfigError
from grpo_nb.config.setting_keys import value_text
from grpo_nb.jupyter import project
from grpo_nb.jupyter.controls import LITERAL
from grpo_nb.jupyter.notices import BADGES, Notice
from grpo_nb.jupyter.settings_edits import Edits, Field, Group, as_python
from grpo_nb.jupyter.settings_plan import PlanView
from grpo_nb.printable import cut, one_line, printable
from grpo_nb.report.markup import Markup, html
from grpo_nb.suggest import did_you_mean

CLASS = "grpo-nb-settings"
"""CSS class of the widget."""
MOST_FOUND = 30
"""Settings that a search shows."""
LOOKED_UP = "model.name"
"""Read when the box is left: the sizes of a model of each letter typed would be looked for on the hub."""
SWITCH = ("false", "true")
LABEL, ENTRY = "300px", "520px"
"""Widths of a name, and of a name with its box."""


@dataclass(frozen=True)
class Mark:
    """State of a setting in the form."""

    edited: bool = False
    """Whether its text differs from the first one."""
    changed: bool = False
    """Whether its value differs from the first one."""
    notices: Sequence[Notice] = ()


class Row:
    """One setting: its box, the button that takes the edit back, and its sentence with any error."""

    def __init__(self, field: Field, text: str, edited: Callable[[str, str], None]) -> None:
        """`edited` is called with the key and each new text."""
        self.field, self._edited = field, edited
        self.box = self._box(text)
        self.reset = w.Button(
            icon="undo", tooltip=cut(f"{field.key}: back to {field.setting.text}"), layout=w.Layout(width="36px")
        )
        self.words = w.HTML(layout=w.Layout(flex="1 1 300px", margin="2px 0 2px 8px"))
        self.widget = w.HBox([self.box, self.reset, self.words], layout=w.Layout(flex_flow="row wrap"))
        self.box.observe(self._typed, names="value")
        self.reset.on_click(lambda _: self.put(field.setting.text))

    @property
    def text(self) -> str:
        """Text of the box, as `--set` takes it."""
        return SWITCH[self.box.value] if isinstance(self.box, w.Checkbox) else str(self.box.value)

    def put(self, text: str) -> None:
        """Put a text into the box."""
        self.box.value = text == SWITCH[1] if isinstance(self.box, w.Checkbox) else text

    def show(self, mark: Mark) -> None:
        """Show how the setting stands."""
        setting = self.field.setting
        wrong = any(notice.severity == "error" for notice in mark.notices)
        colour = BADGES["error"] if wrong else BADGES["info"] if mark.changed else "transparent"
        self.widget.layout.border_left = f"4px solid {colour}"
        self.reset.disabled = not mark.edited
        shown = html(
            "setting",
            notices=_notices(mark.notices),
            meaning=setting.meaning,
            inside=", ".join(one.key.rpartition(".")[2] for one in self.field.inside),
            default=setting.default_text,
            before=setting.text if mark.changed else "",
        )
        if str(shown) != self.words.value:
            self.words.value = str(shown)

    def _box(self, text: str) -> Any:
        setting = self.field.setting
        name, layout = _label(setting.key), w.Layout(width=ENTRY)
        texts = [value_text(choice) for choice in setting.choices]
        if texts == [*SWITCH]:
            return w.Checkbox(value=text == SWITCH[1], description=name, tooltip=setting.meaning, layout=layout)
        shared = {
            "description": name,
            "tooltip": setting.meaning,
            "style": {"description_width": LABEL},
            "layout": layout,
        }
        if texts:
            return w.Dropdown(options=list(dict.fromkeys([*texts, text])), value=text, **shared)
        return w.Text(value=text, continuous_update=setting.key != LOOKED_UP, **shared)

    def _typed(self, _: Any) -> None:
        self._edited(self.field.key, self.text)


class SettingsForm:
    """Search and edit the settings of a preset; pass `changes` to `open_run` or `config.replace(**changes)`.

    The form changes nothing but itself: it shows each setting with its sentence, marks differences, shows errors in
    the configuration's own words, and plans the memory of the edited settings.
    """

    def __init__(self, start: Config | str = "demo", changes: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            start: settings, or the name of a preset, that the changes are relative to.
            changes: edits to begin with, such as CHANGES of 01_load.

        Raises:
            ConfigError: unknown preset or setting, or a value that does not validate.
        """
        config = project.preset_of(start) if isinstance(start, str) else start
        self._name = f"settings of the preset {start}" if isinstance(start, str) else "settings"
        self._edits = Edits(config, changes or {})
        self._rows: dict[str, Row] = {}
        self._lock = threading.RLock()
        self._outcome = self._edits.outcome()
        self.search = w.Text(
            placeholder="words of a name or a sentence",
            description="search",
            tooltip="all of these words are in the name or the sentence",
            layout=w.Layout(width="400px"),
        )
        self.browse = w.ToggleButton(
            description="Browse", tooltip="Browse: all settings, by group", layout=w.Layout(width="110px")
        )
        self.only = w.ToggleButton(
            description="Changed", tooltip="Changed: the changed settings only", layout=w.Layout(width="110px")
        )
        self.clear = w.Button(
            description="Reset all", tooltip="Reset all: take every edit back", layout=w.Layout(width="110px")
        )
        self.summary, self.found_words = w.HTML(), w.HTML()
        self.groups = w.Accordion(
            children=[w.VBox() for _ in self._edits.groups], titles=self._titles(), selected_index=None
        )
        self.found = w.VBox()
        self.plan = PlanView()
        choosers = self.search, self.browse, self.only
        bar = w.HBox([*choosers, self.clear], layout=w.Layout(flex_flow="row wrap"))
        self.widget = w.VBox([bar, self.summary, self.plan.widget, self.found_words, self.found, self.groups])
        self.widget.add_class(CLASS)
        self.groups.observe(lambda _: self._open(), names="selected_index")
        for chooser in choosers:
            chooser.observe(lambda _: self._look(), names="value")
        self.clear.on_click(lambda _: self.reset())
        self._look()
        self._show()

    @property
    def config(self) -> Config:
        """The settings with the changes.

        Raises:
            ConfigError: something typed does not validate.
        """
        if self._outcome.config is None:
            raise ConfigError("\n".join(self._outcome.problems.values()), self._outcome.problems)
        return self._outcome.config

    @property
    def changes(self) -> dict[str, Any]:
        """Differences from the start, by dotted name: CHANGES of 01_load.

        Raises:
            ConfigError: a text does not validate.
        """
        _ = self.config
        return dict(self._outcome.changes)

    def row(self, key: str) -> Row:
        """The row of a setting, made on first use.

        Raises:
            ConfigError: the form has no such setting.
        """
        with self._lock:
            if key not in self._edits.fields:
                raise ConfigError(f"the form has no setting '{key}'{did_you_mean(key, self._edits.fields)}")
            if key not in self._rows:
                self._rows[key] = Row(self._edits.fields[key], self._edits.text(key), self._edited)
                self._rows[key].show(self._mark(key))
            return self._rows[key]

    def reset(self) -> None:
        """Take every edit back."""
        with self._lock:
            for key in [*self._edits.texts]:
                self.row(key).put(self._edits.fields[key].setting.text)

    def close(self) -> None:
        """Plan nothing more and remove the widgets."""
        self.plan.close()
        self.widget.close()

    def _edited(self, key: str, text: str) -> None:
        with self._lock:
            self._edits.write(key, text)
            self._outcome = self._edits.outcome()
            self._show()

    def _show(self) -> None:
        outcome = self._outcome
        for key, row in self._rows.items():
            row.show(self._mark(key))
        self.groups.titles = self._titles()
        self.clear.disabled = not self._edits.texts
        notices = [Notice("error", problem) for problem in outcome.problems.values()]
        notices += [Notice("warning", note) for note in outcome.notes]
        line = "" if outcome.config is None else as_python(outcome.changes)
        self.summary.value = str(html("settings", text=self._words(), notices=_notices(notices), line=line))
        if outcome.config is not None:
            self.plan.show(outcome.config)

    def _mark(self, key: str) -> Mark:
        outcome, edited = self._outcome, key in self._edits.texts
        wrong = outcome.config is None
        notices = [Notice("error" if wrong else "warning", text) for text in outcome.beside.get(key, ())]
        return Mark(edited, edited if wrong else key in outcome.changes, notices)

    def _titles(self) -> tuple[str, ...]:
        return tuple(self._title(group) for group in self._edits.groups)

    def _title(self, group: Group) -> str:
        marks = [self._mark(field.key) for field in group.fields]
        changed, wrong = sum(mark.changed for mark in marks), 0
        if self._outcome.config is None:
            wrong = sum(bool(mark.notices) for mark in marks)
        counts = [str(len(marks)), *([f"{changed} changed"] if changed else []), *([f"{wrong} wrong"] if wrong else [])]
        return f"{_label(group.name)} ({', '.join(counts)})"

    def _open(self) -> None:
        """Fill the group that was opened; a widget for each setting of all groups would be a thousand."""
        index = self.groups.selected_index
        if index is None or self.groups.children[index].children:
            return
        group = self._edits.groups[index]
        meaning = w.HTML(str(html("note", text=group.meaning)))
        self.groups.children[index].children = [meaning, *(self.row(field.key).widget for field in group.fields)]

    def _look(self) -> None:
        """Show what the search finds, else the groups where they are wanted."""
        query, only = self.search.value.strip(), self.only.value
        self.groups.layout.display = None if self.browse.value and not (query or only) else "none"
        if not query and not only:
            self.found.children, self.found_words.value = (), ""
            return
        with self._lock:
            found = [field.key for field in self._edits.find(query)]
            if only:
                found = [key for key in found if key in self._edits.texts]
            self.found.children = [self.row(key).widget for key in found[:MOST_FOUND]]
        self.found_words.value = str(html("note", text=self._result(found, query)))

    def _result(self, found: Sequence[str], query: str) -> str:
        if not found:
            names = {key.rpartition(".")[2] for key in self._edits.fields}
            return f"no setting is found{did_you_mean(query, sorted(names))}"
        left = len(found) - MOST_FOUND
        return f"{len(found)} found" + (f", the first {MOST_FOUND} are shown: add a word" if left > 0 else "")

    def _words(self) -> str:
        outcome, groups = self._outcome, self._edits.groups
        counts = f"{self._name}: {len(self._edits.fields)} in {len(groups)} groups"
        if outcome.config is None:
            return f"{counts}, {len(self._edits.texts)} changed, {len(outcome.problems)} not valid"
        return f"{counts}, {len(outcome.changes)} changed"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        from grpo_nb.jupyter.without_kernel import Words

        bundle = dict(self.widget._repr_mimebundle_() or {}) | {"text/plain": repr(self)}
        display(bundle, raw=True)  # type: ignore[no-untyped-call]
        Words(f"{self._words()}. To search and change them, run this cell again.", CLASS)

    def __repr__(self) -> str:
        outcome = self._outcome
        last = [as_python(outcome.changes)] if outcome.config is not None else [*outcome.problems.values()]
        return printable("\n".join([self._words(), *last]))


def _label(name: str) -> str:
    return one_line(name).translate(LITERAL)


def _notices(notices: Sequence[Notice]) -> Markup:
    return html("notices", notices=notices, colours=BADGES, rest="")
