"""Controls of a run: each beta, temperature, learning rate, and the commands that its session has.

A callback writes a knob and nothing else, so it may run on any thread. The controls keep no values: they show the knob
file and the newest metrics row, wherever a change came from.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ipywidgets as w

from grpo_nb.config import ObjectiveConfig
from grpo_nb.jupyter.live.knob import Box, Slider
from grpo_nb.jupyter.notices import Severity
from grpo_nb.metrics import keys
from grpo_nb.optim import warmup
from grpo_nb.report.markup import html
from grpo_nb.run.knob_file import KnobSnapshot, Turn
from grpo_nb.run.knobs import Knob
from grpo_nb.run.run import RunError
from grpo_nb.storage.vocabulary import Command, RunState

Row = Mapping[str, Any]
Notify = Callable[..., None]
"""Shows one line under the controls, of a severity that is `warning` unless given; an empty line takes it away."""

AUTO_WIDTH = "72px"
UNDO = "Undo"
MORE = 50
"""Steps that the button at the end trains."""
LITERAL = {ord("$"): "＄", ord("\\"): "＼"}
"""Replacements in names, since JupyterLab typesets mathematics in the text before a control."""


@dataclass(frozen=True)
class Setting:
    """Value of a knob as requested, or as a step used it."""

    value: float
    automatic: bool = False
    by: str = ""
    """Who requested it; empty while it has the configuration's value."""


class KnobControl:
    """One knob as a row: a box for exact values, a slider, a toggle for the controller, and the active value."""

    def __init__(self, knob: Knob, name: str, slider: Slider, arrow: float, notify: Notify) -> None:
        """`arrow` is what an arrow key in the box adds; typed numbers need not be multiples of it."""
        self.turned: Callable[[], None] = lambda: None
        """Called when the knob was changed here."""
        self.knob, self.name, self.slider, self._notify = knob, name, slider, notify
        low, high = knob.bounds
        self.entry = Box(
            self._no_number,
            value=knob.value,
            step=arrow,
            description=name,
            tooltip=f"{name}, exactly: any number from {low:g} to {high:g}. {knob.meaning}",
            layout=w.Layout(width="240px"),
        )
        self.auto: w.ToggleButton | None = None
        self.label = w.HTML(layout=w.Layout(min_width="260px", margin="2px 0 2px 8px"))
        self._own = threading.local()  # set while this thread moves the widgets itself
        slider.observe(self._moved, names="value")
        self.entry.observe(self._moved, names="value")

    def with_auto(self, tooltip: str) -> "KnobControl":
        """Add the toggle that gives the knob back to its controller."""
        self.auto = w.ToggleButton(
            value=False, description="auto", tooltip=f"{self.name}: {tooltip}", layout=w.Layout(width=AUTO_WIDTH)
        )
        self.auto.observe(self._toggled, names="value")
        return self

    @property
    def widget(self) -> w.HBox:
        auto = self.auto or w.Box(layout=w.Layout(width=AUTO_WIDTH, margin="2px"))
        level = {"align_items": "center"}
        moved = w.HBox([self.slider, auto], layout=w.Layout(**level))  # stays in one piece where the row has to wrap
        return w.HBox([self.entry, moved, self.label], layout=w.Layout(**level, flex_flow="row wrap"))

    def follow(self, asked: Setting, used: Setting | None, note: str = "") -> None:
        """Show the knob as it stands: the controller's value while it is automatic, else the requested one."""
        shown = used.value if asked.automatic and used is not None else asked.value
        self._show(shown, asked.automatic)
        text = setting_html(asked, used, note)
        if text != self.label.value:
            self.label.value = text

    def _show(self, value: float, automatic: bool) -> None:
        self._own.moving = True
        try:
            if not math.isclose(self.entry.value, value, rel_tol=1e-9):
                self.entry.value = _rounded(value) if automatic else value
            self.slider.value = value  # by itself: after a typed number it is the slider that lags
            if self.auto is not None and self.auto.value != automatic:
                self.auto.value = automatic
            if self.auto is not None:  # a shade of grey alone would not show whether it is on
                self.auto.icon = "check" if automatic else ""
        finally:
            self._own.moving = False

    def _moved(self, change: Any) -> None:
        if getattr(self._own, "moving", False):
            return
        value = change["new"] if change["owner"] is self.entry else _rounded(change["new"])
        if self._write(lambda: self.knob.set(value, by="dashboard")):
            self._show(value, automatic=False)
        else:  # back to what stands, so that a refused number is not taken for a requested one
            self._show(change["old"], automatic=bool(self.auto and self.auto.value))

    def _toggled(self, change: Any) -> None:
        if getattr(self._own, "moving", False):
            return
        if change["new"]:
            self._write(lambda: self.knob.set_auto(by="dashboard"))
        else:
            self._write(lambda: self.knob.set(self.entry.value, by="dashboard"))

    def _no_number(self, text: str) -> None:
        low, high = self.knob.bounds
        self._notify(f"{self.name}: needs a number from {low:g} to {high:g}, found '{text}'; nothing was changed")

    def _write(self, change: Callable[[], object]) -> bool:
        self._notify("")
        try:
            change()
        except (RunError, OSError) as error:
            self._notify(f"not changed: {error}")
            return False
        self.turned()
        return True


@dataclass(frozen=True)
class Button:
    """A command's button: the session's method that it calls, and the states in which it makes sense."""

    command: Command
    method: str
    icon: str
    does: str
    states: tuple[RunState, ...]

    @property
    def label(self) -> str:
        return self.command.label.capitalize()


ANSWERS: Mapping[str, tuple[Command, Severity, str]] = {
    "checkpoint": (Command.SAVE, "good", "saved: the checkpoint of step {step}"),
    "checkpoint_rewritten": (Command.SAVE, "good", "saved: the checkpoint of step {step}"),
    "evaluated": (Command.EVALUATE, "good", "evaluated at step {step}: report.comparison(run) shows the measures"),
    "evaluation_failed": (Command.EVALUATE, "warning", "not evaluated at step {step}: {error}"),
}
"""Events that report the result of a command, by kind."""
LIVE = tuple(state for state in RunState if state.is_live)
RESUMABLE = (RunState.PAUSED, RunState.STOPPED, RunState.DEAD, RunState.FAILED)
BUTTONS = (
    Button(Command.PAUSE, "pause", "pause", "pause before the next step", (RunState.STARTING, RunState.RUNNING)),
    Button(Command.STEP, "step_once", "step-forward", "train one step, then pause", LIVE),
    Button(Command.RUN, "resume", "play", "continue from the newest step", RESUMABLE),
    Button(Command.STOP, "stop", "stop", "finish this step, save, end", (RunState.STARTING, *LIVE)),
    Button(Command.SAVE, "save_now", "save", "write a checkpoint at the next step boundary", LIVE),
    Button(Command.EVALUATE, "evaluate_now", "check", "measure held-out examples at the boundary", LIVE),
)


class Controls:
    """Every knob and command of one session; `widget` to show, `follow` to bring up to date."""

    def __init__(self, session: Any, notify: Notify, turned: Callable[[], None] = lambda: None) -> None:
        """`turned` is called after a knob was changed or a button was pressed here."""
        self._session, self._notify, self._turned = session, notify, turned
        self._problem: str | None = None
        self._requested: dict[Command, float] = {}
        """Commands without an answer so far, by the time at which they were requested here."""
        self._shown_turn: Turn | None = None
        """The change that the tooltip of Undo shows, and the only one that the button undoes."""
        config, knobs = session.run.config, session.knobs
        self._warmup = config.algorithm.warmup_steps
        self._starts = {keys.BETA.of(name): objective.beta for name, objective in config.objectives.items()}
        self.knobs: dict[str, KnobControl] = {
            keys.BETA.of(name): beta_control(knobs[keys.BETA.of(name)], name, objective, notify)
            for name, objective in config.objectives.items()
        }
        self.knobs["temperature"] = temperature_control(knobs["temperature"], notify)
        self.knobs["learning_rate"] = rate_control(knobs["learning_rate"], config.algorithm.learning_rate, notify)
        for control in self.knobs.values():
            control.turned = self._changed
        self.buttons = {button.command: self._button(button) for button in BUTTONS}
        self.undo, self.more = self._undo(), self._more()
        shown = [*self.buttons.values(), self.undo, self.more]
        buttons = w.HBox(shown, layout=w.Layout(margin="4px 0 0 0", flex_flow="row wrap"))
        self.widget = w.VBox([control.widget for control in self.knobs.values()] + [buttons])

    def follow(self, state: RunState, row: Row) -> None:
        """Show the knobs as the files have them and allow the commands that `state` allows."""
        asked: KnobSnapshot = self._session.knobs.snapshot()
        for name, control in self.knobs.items():
            automatic = asked.modes[name] == "auto"
            value = self._starts[name] if automatic else asked.values[name]
            wanted = Setting(value, automatic, asked.by[name])
            used, note = self._used(name, row, wanted.automatic)
            control.follow(wanted, used, note)
        if asked.problem or self._problem:
            self._notify(asked.problem or "")  # and it clears when the file is valid again
        self._problem = asked.problem
        self._follow_turns(asked)
        for button in BUTTONS:
            self.buttons[button.command].disabled = state not in button.states
        self.more.layout.display = None if state in (RunState.DONE, RunState.STOPPED) else "none"

    def answer(self, newest: Mapping[str, Row]) -> None:
        """Show the result of a command that was requested here; `newest`: the newest event of each kind."""
        for kind, (command, severity, words) in ANSWERS.items():
            event, since = newest.get(kind), self._requested.get(command)
            if event is not None and since is not None and float(event.get("time") or 0) >= since:
                del self._requested[command]
                self._notify(words.format(step=event.get("step"), error=event.get("error")), severity)

    def _used(self, name: str, row: Row, asked_automatic: bool) -> tuple[Setting | None, str]:
        """The knob in the newest row; the learning rate without its warm-up, which the note gives."""
        value = _number(row.get("lr" if name == "learning_rate" else name))
        if value is None:
            return None, ""
        if name == "learning_rate":
            share = warmup(int(row["step"]), self._warmup)
            requested = _number(row.get(keys.LR_REQUESTED)) or value
            notes = [f", {share:.0%} of it during the warm-up"] if share < 1 else []
            notes += [f", {value / requested:.3g} of it since a rollback"] if value < requested else []
            return Setting(requested / share), "".join(notes)
        mode = row.get(name.replace("/", "_mode/", 1))
        return Setting(value, mode == "auto" if isinstance(mode, str) else asked_automatic), ""

    def _button(self, described: Button) -> w.Button:
        button = w.Button(
            description=described.label,
            icon=described.icon,
            tooltip=f"{described.label}: {described.does}",
            layout=w.Layout(width="100px"),
        )

        def pressed() -> None:
            asked = time.time()
            getattr(self._session, described.method)()
            if described.command in (Command.SAVE, Command.EVALUATE):
                self._requested[described.command] = asked
                self._notify(f"{described.label} is requested: it begins when the step in progress is done", "info")

        button.on_click(lambda _: self._press(described.label, pressed))
        return button

    def _undo(self) -> w.Button:
        button = w.Button(description=UNDO, icon="undo", disabled=True, layout=w.Layout(width="100px"))
        button.on_click(lambda _: self._press(UNDO, self._undone))
        return button

    def _undone(self) -> None:
        try:
            if self._shown_turn is None:
                raise RunError("no change of a knob is shown that can be undone; set a value instead")
            undone = self._session.knobs.undo(by="dashboard", turn=self._shown_turn)
            self._notify(f"{UNDO}: {undone} is requested", "info")
        finally:
            self._follow_turns(self._session.knobs.snapshot())

    def _changed(self) -> None:
        """After a change made here: the button undoes it at once, before the next refresh."""
        self._follow_turns(self._session.knobs.snapshot())
        self._turned()

    def _follow_turns(self, asked: KnobSnapshot) -> None:
        self._shown_turn = last = asked.last_turn
        self.undo.disabled = last is None
        self.undo.tooltip = f"{UNDO} the last change of a knob" + (f": back to {last}" if last else "")

    def _more(self) -> w.Button:
        label = f"Train {MORE} more"
        button = w.Button(
            description=label,
            icon="fast-forward",
            tooltip=f"{label}: train {MORE} steps beyond the newest one",
            layout=w.Layout(width="140px", display="none"),
        )
        button.on_click(lambda _: self._press(label, lambda: self._session.train_more(MORE)))
        return button

    def _press(self, label: str, act: Callable[[], None]) -> None:
        self._notify("")
        try:
            act()
        except (RunError, OSError, RuntimeError) as error:
            self._notify(f"{label}: {error}")
        self._turned()


def beta_control(knob: Knob, name: str, objective: ObjectiveConfig, notify: Notify) -> KnobControl:
    """A logarithmic slider over the objective's beta bounds; the box takes any beta, 0 too."""
    low, high = objective.beta_bounds
    title = f"β {name.translate(LITERAL)}"
    slider = Slider(value=knob.value, low=low, high=high, log=True, step=0.05, **_naming(title, knob))
    control = KnobControl(knob, title, slider, 0.001, notify)
    if objective.kl_band is None or not objective.controlled:
        return control
    return control.with_auto("let the controller hold the KL from {} to {} nats a token".format(*objective.kl_band))


def temperature_control(knob: Knob, notify: Notify) -> KnobControl:
    """A slider over the usual temperatures; the box takes all that the knob allows."""
    slider = Slider(value=knob.value, low=0.1, high=2.0, step=0.05, **_naming("temperature", knob))
    return KnobControl(knob, "temperature", slider, 0.05, notify)


def rate_control(knob: Knob, start: float, notify: Notify) -> KnobControl:
    """A logarithmic slider two decades to both sides of the configured rate; the box takes any, 0 too."""
    low, high = start / 100, min(100 * start, 1.0)
    slider = Slider(value=knob.value, low=low, high=high, log=True, step=0.05, **_naming("learning rate", knob))
    return KnobControl(knob, "learning rate", slider, _rounded(start / 10), notify)


def setting_html(asked: Setting, used: Setting | None, note: str = "") -> str:
    """Active value as HTML, and the requested one while it is not active yet."""
    return str(
        html(
            "knob",
            asked="auto" if asked.automatic and used else _short(asked),
            asked_automatic=asked.automatic,
            used=_short(used) if used else None,
            used_automatic=used.automatic if used else False,
            agreed=used is not None and _agree(asked, used),
            by=asked.by if asked.by != "config" else "",
            note=note,
        )
    )


def _agree(asked: Setting, used: Setting) -> bool:
    same = asked.automatic or math.isclose(asked.value, used.value, rel_tol=1e-6, abs_tol=1e-12)
    return asked.automatic == used.automatic and same


def _naming(name: str, knob: Knob) -> dict[str, Any]:
    return {"description": name, "tooltip": f"{name}: drag, or move with the arrow keys. {knob.meaning}"}


def _short(setting: Setting) -> str:
    return f"{setting.value:.4g}" if setting.automatic else f"{setting.value:.6g}"


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
